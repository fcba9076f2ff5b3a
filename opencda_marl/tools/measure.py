"""Honest comparison on a machine that drifts: alternate what is compared, take medians, pair the ratios.

Absolute milliseconds move two- to threefold with what else runs. Two things measured in turn, block by
block, share that weather; the median of their ratios is what can be quoted.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

import psutil

from opencda_marl.core.errors import DeadlineError, OpenCDAError

__all__ = ["HEADLINE", "Block", "Load", "Worker", "against_floor", "interleave", "median", "paired_ratio"]

HEADLINE = ("ms_median", "floor_ms_median", "ratio", "speedup", "vehicles", "mean_rows")
"""Fields that a bench repeats from its most important row."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Block:
    """One stretch of measuring."""

    seconds: float  # [s] measured
    steps: int  # over which
    vehicles: float = 0.0  # mean present
    rows: float = 0.0  # mean neighbour rows of an acting vehicle
    spans: Mapping[str, float] = field(default_factory=dict)  # share of the time by name

    @property
    def ms(self) -> float:
        """Milliseconds per step."""
        return self.seconds * 1000.0 / self.steps


def median(values: Sequence[float]) -> float:
    """The middle value.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("nothing was measured")
    return float(statistics.median(values))


def paired_ratio(values: Sequence[float], floors: Sequence[float]) -> float:
    """Median of value / floor over repeats that ran side by side."""
    return median([value / floor for value, floor in zip(values, floors, strict=True)])


def interleave(sources: Mapping[str, Callable[[], _T]], repeats: int) -> dict[str, list[_T]]:
    """Run every source once per repeat, forwards and backwards in turn, so that a slow drift favours nobody.

    Args:
        sources: name -> what to measure once.
        repeats: how often.

    Returns:
        name -> its results, in the order of the repeats.
    """
    results: dict[str, list[_T]] = {name: [] for name in sources}
    names = list(sources)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            results[name].append(sources[name]())
    return results


def against_floor(name: str, ours: Sequence[Block], floors: Sequence[Block]) -> dict[str, Any]:
    """A row of a bench: medians, the range, the ratio of pairs and its inverse, means of vehicles and rows."""
    each = [block.ms for block in ours]
    below = [block.ms for block in floors]
    ratio = paired_ratio(each, below)
    return {
        "name": name,
        "ms_median": round(median(each), 4),
        "floor_ms_median": round(median(below), 4),
        "ratio": round(ratio, 3),
        "speedup": round(1.0 / ratio, 3),
        "ms_low": round(min(each), 4),
        "ms_high": round(max(each), 4),
        "vehicles": round(statistics.fmean(block.vehicles for block in ours), 2),
        "floor_vehicles": round(statistics.fmean(block.vehicles for block in floors), 2),
        "mean_rows": round(statistics.fmean(block.rows for block in ours), 2),
        "steps": sum(block.steps for block in ours),
    }


class Load:
    """How busy others kept the machine meanwhile: `with Load() as load: ...; load.report()`."""

    def __init__(self) -> None:
        self._begin: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
        self._end = self._begin
        self.before = 0.0  # one-minute load average when measuring began

    def __enter__(self) -> Load:
        self.before = os.getloadavg()[0]
        self._begin = _clocks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = _clocks()

    def report(self) -> dict[str, float]:
        """`load`: the average before; `others`: CPUs that other processes kept busy; `stolen`: CPUs the host took."""
        wall, busy, stolen, ours = (end - begin for end, begin in zip(self._end, self._begin, strict=True))
        others = max(0.0, busy - ours) / wall if wall > 0 else 0.0
        return {
            "load": round(self.before, 2),
            "others": round(others, 2),
            "stolen": round(stolen / wall if wall > 0 else 0.0, 2),
        }


def _clocks() -> tuple[float, float, float, float]:
    """Wall clock, the machine's busy seconds, its stolen seconds, and those of this process and its children."""
    machine = psutil.cpu_times()
    busy = machine.user + machine.system + getattr(machine, "nice", 0.0) + getattr(machine, "softirq", 0.0)
    here = psutil.Process()
    mine = here.cpu_times()
    ours = mine.user + mine.system + mine.children_user + mine.children_system
    for child in here.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it ended between the list and the look: its time is in the parent's sum
            continue
        ours += times.user + times.system
    return time.perf_counter(), busy, getattr(machine, "steal", 0.0), ours


class Worker:
    """A child process that measures one thing when asked: SUMO allows one simulation per process.

    It is idle while the others are measured.

    Args:
        make: top-level function, called in the child with `arguments`; returns what is run at each call.
        arguments: picklable.
        deadline: [s] for one answer.
    """

    def __init__(self, make: Callable[..., Callable[[], Any]], *arguments: object, deadline: float = 600.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._deadline = deadline
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self) -> Any:
        """One measurement.

        Raises:
            OpenCDAError: what the child raised, or that it died.
            DeadlineError: no answer in time.
        """
        name = f"the measuring process {self._process.pid}"
        try:
            self._ours.send(True)
            if not self._ours.poll(self._deadline):
                raise DeadlineError(f"{name} did not answer within {self._deadline:g} s", fix="try again when idle")
            answer = self._ours.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(5.0)
            raise OpenCDAError(
                f"{name} died with exit code {self._process.exitcode}", fix="what it said before stands above this"
            ) from error
        if isinstance(answer, OpenCDAError):
            raise answer
        return answer

    def close(self) -> None:
        """End the child; may be called twice."""
        self._ours.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, make: Callable[..., Callable[[], Any]], arguments: tuple[object, ...]) -> None:
    """The child's life: prepare at the first question, answer until the parent hangs up."""
    measure: Callable[[], Any] | None = None
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        try:
            measure = measure or make(*arguments)
            pipe.send(measure())
        except OpenCDAError as error:
            pipe.send(error)
