"""`bench run`: whole short runs in child processes, learning included, beside the bare simulator loop."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opencda_marl.core.run_folder import read_episodes, read_status
from opencda_marl.core.spans import SPANS
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.bench_env import crossing_of
from opencda_marl.tools.child_runs import ChildRun
from opencda_marl.tools.floor import bare_loop
from opencda_marl.tools.measure import Load, Worker, interleave, median, paired_ratio
from opencda_marl.tools.short_runs import learn_within, steps_between_updates, update_facts

__all__ = ["bench_run", "notes", "present"]

_REPEATS = 3
_FLOOR_STEPS = 600  # per block
_DEADLINE = 1800.0  # [s] of one run
_NEAR = 0.08  # of the wanted number of vehicles
_HIGHEST = 3000.0  # [vehicles/h/lane] the settings' own bound


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of one run."""

    lines: list[dict[str, Any]]
    start_s: float  # [s] from the command to the loop
    memory_mib: float


def bench_run(
    settings: RunSettings,
    name: str,
    *,
    folder: Path,
    config_root: Path | None,
    overrides: Sequence[str],
    vehicles: int | None,
    threads: int | None,
) -> dict[str, Any]:
    """Measure short runs of a profile: milliseconds per simulator step with everything in it.

    Args:
        settings: of the profile, overrides included.
        name: of the profile.
        folder: gets the run folders.
        config_root: folder of profiles; None: the bundled one.
        overrides: `key.sub=value`.
        vehicles: wanted on the crossing: the demand is scaled until it brings them; None: the profile's demand.
        threads: of torch; None: the profile's.
    """
    from opencda_marl.assemble import make_roads

    episodes = _episodes(settings)
    learning = learn_within(settings.learner, episodes * settings.max_steps, settings.decision_interval)
    shared = [*overrides, *_short(settings), *learning, *([] if threads is None else [f"threads={threads}"])]
    make = _Maker(name, folder, config_root, shared)
    rate = None if vehicles is None else _scaled_rate(make, settings, vehicles)
    extra = [] if rate is None else [f"demand.rate_vph={rate}", "demand.rate_draw=choice"]
    first = make("first", [*extra, "max_episodes=1"])
    inside = max(1, round(present(first.lines, settings.decision_interval)))
    crossing = crossing_of(make_roads(settings), settings)
    with ExitStack() as stack:
        floor = stack.enter_context(Worker(bare_loop, crossing, inside, _FLOOR_STEPS))
        floor()
        load = stack.enter_context(Load())
        runs = iter(range(_REPEATS))
        sources: dict[str, Callable[[], Any]] = {
            "floor": floor,
            "run": lambda: make(f"run{next(runs)}", [*extra, f"max_episodes={episodes}"]),
        }
        found = interleave(sources, _REPEATS)
    summary = _summary([block.ms for block in found["floor"]], found["run"], settings)
    return {
        **summary,
        "asked_vehicles": vehicles,
        "notes": notes(vehicles, summary["vehicles"]),
        "threads": settings.threads if threads is None else threads,
        "profile": name,
        "rate_vph": rate if rate is not None else settings.demand.rate_vph,
        "episodes": episodes,
        **update_facts(settings.learner),
        "overrides": list(learning),
        **load.report(),
    }


def notes(asked: int | None, present: float) -> list[str]:
    """What a reader must know about the population: that it is not the one asked for."""
    if asked is None or abs(present - asked) <= _NEAR * asked:
        return []
    return [
        f"{asked} vehicles were asked for; the nearest that this crossing and policy were brought to is {present:g}"
    ]


def _summary(floors: list[float], runs: list[_Outcome], settings: RunSettings) -> dict[str, Any]:
    each = [_ms(run.lines) for run in runs]
    lines = [line for run in runs for line in run.lines]
    steps = sum(int(line["steps"]) for line in lines)
    wall = sum(float(line["wall_s"]) for line in lines)
    names = [*SPANS, *sorted({span for line in lines for span in line["spans"]} - {*SPANS})]
    spans = {span: sum(float(line["spans"].get(span, 0.0)) for line in lines) for span in names}
    ratio = paired_ratio(each, floors)
    return {
        "what": "run",
        "ms_median": round(median(each), 4),
        "floor_ms_median": round(median(floors), 4),
        "ratio": round(ratio, 3),
        "speedup": round(1.0 / ratio, 3),
        "vehicles": round(present(lines, settings.decision_interval), 2),
        "mean_rows": round(statistics.fmean(float(line["mean_rows"]) for line in lines), 2),
        "start_s": round(median([run.start_s for run in runs]), 2),
        "memory_mib": round(max(run.memory_mib for run in runs), 1),
        "span_ms": {span: round(seconds * 1000.0 / steps, 4) for span, seconds in spans.items()},
        "unaccounted_share": round(1.0 - sum(spans.values()) / wall, 4),
        "gradient_steps_per_step": round(sum(int(run.lines[-1]["training_step"]) for run in runs) / steps, 3),
        "rows": [
            {"name": f"run {index}", "ms": round(ms, 4), "floor_ms": round(floor, 4), "steps": _steps(run.lines)}
            for index, (ms, floor, run) in enumerate(zip(each, floors, runs, strict=True), start=1)
        ],
    }


def present(lines: Sequence[Mapping[str, Any]], interval: int) -> float:
    """Mean number of vehicles that the policy drove.

    A vehicle with n decisions was driven for about n - 1 whole intervals: its first and its last are cut short, by
    half an interval each on average. With a decision at every step nothing is cut.
    """
    steps = sum(int(line["steps"]) for line in lines)
    decisions = sum(int(line["decisions"]) for line in lines)
    cut = sum(int(line["departed"]) for line in lines) * (1.0 - 1.0 / interval)
    return max(0.0, decisions - cut) * interval / steps


def _steps(lines: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(line["steps"]) for line in lines)


def _ms(lines: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(line["wall_s"]) for line in lines) * 1000.0 / _steps(lines)


def _short(settings: RunSettings) -> list[str]:
    return [
        "workers=1",
        "max_env_steps=null",
        "max_minutes=null",
        "evaluation.final=false",
        "eval_every=0",
        f"checkpoint_every={max(_episodes(settings), settings.checkpoint_every)}",
    ]


def _episodes(settings: RunSettings) -> int:
    """Episodes that hold whole updates: at least two, and one update."""
    return max(2, -(-steps_between_updates(settings.learner) // settings.max_steps))


class _Maker:
    """Runs in child processes, each in a folder of its own."""

    def __init__(self, name: str, folder: Path, config_root: Path | None, overrides: Sequence[str]) -> None:
        self._name = name
        self._folder = folder
        self._root = config_root
        self._overrides = overrides

    def __call__(self, label: str, extra: Sequence[str]) -> _Outcome:
        run = ChildRun(self._name, self._folder, label, self._root, (*self._overrides, *extra))
        begin = time.perf_counter()
        process = run.start()
        facts = run.path / "run.json"
        start = None
        while process.poll() is None and time.perf_counter() - begin < _DEADLINE:
            if start is None and facts.exists() and "init" in json.loads(facts.read_bytes() or b"{}"):
                start = time.perf_counter() - begin
                break
            time.sleep(0.01)
        run.finish(process, deadline=_DEADLINE)
        status = read_status(run.path)
        took = time.perf_counter() - begin if start is None else start
        return _Outcome(read_episodes(run.path), took, float(status.get("peak_memory_mib", 0.0)))


def _scaled_rate(make: _Maker, settings: RunSettings, vehicles: int) -> float:
    """The demand that brings about so many vehicles under an untrained policy. [vehicles/h/lane]"""
    rate, best, nearest = min(_HIGHEST, 12.0 * vehicles), 0.0, float("inf")
    for attempt in range(4):
        extra = [f"demand.rate_vph={rate}", "demand.rate_draw=choice", "max_episodes=1"]
        found = present(make(f"try{attempt}", extra).lines, settings.decision_interval)
        if abs(found - vehicles) < nearest:
            best, nearest = rate, abs(found - vehicles)
        if nearest <= _NEAR * vehicles:
            break
        rate = round(min(_HIGHEST, rate * vehicles / max(1.0, found)), 1)
    return best
