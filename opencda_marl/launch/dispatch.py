"""A matrix on more than one machine: runners are placed by an engine, until nothing is left.

A runner is a launcher (launch/launcher.py) that takes cells from the shared folder; claims keep two of them from the
same cell. What is decided here is only how many runners there are. Killed at any instant, the same command goes on:
it finds jobs that still wait or run, and places what is missing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from opencda_marl.core.errors import OpenCDAError, SimulatorError
from opencda_marl.core.files import typed
from opencda_marl.launch.engines import MARGIN, Engine, Job
from opencda_marl.launch.folder import Matrix, Writer, saved_episodes
from opencda_marl.launch.launcher import Result
from opencda_marl.launch.leases import Leases, say_undecided
from opencda_marl.launch.place import Listener
from opencda_marl.launch.runners import live_runners, together
from opencda_marl.launch.status import row
from opencda_marl.launch.wishes import Wishes

__all__ = ["Dispatch"]

_POLL = 0.5  # [s] between two looks at the jobs
_BEAT = 1.0  # [s] between two heartbeats
_ROUND = 50  # rows of cells that nobody is at work on, read again with each heartbeat
_FRUITLESS = 5  # runners in a row that end and leave no episode behind them
_OVER = ("finished", "failed")
_NUMBERED = re.compile(r"r([0-9]+)")


class Dispatch:
    """One launch of a matrix through an engine.

    Args:
        folder: locked by us, on a file system that all machines share.
        matrix: as it stands in the folder.
        engine: places the runners; closed by us.
        listener: see `Listener`.
        count: of runners at once.
    """

    def __init__(self, folder: Writer, matrix: Matrix, engine: Engine, *, listener: Listener, count: int) -> None:
        self.folder, self.matrix, self.options = folder, matrix, matrix.options
        self._engine, self._listener, self._count = engine, listener, count
        self._cells = {cell.id: cell for cell in matrix.cells}
        self._slots = 1 if self.options.parallel == "auto" else int(self.options.parallel)
        self._leases = Leases(folder, None, limit=self.options.deadline("lease"), locked=True)
        self._patient = False  # was it said that it waits for others?
        self._jobs: dict[str, Job] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._read: dict[str, int] = {}  # bytes of each runner's events that were told
        self._busy: dict[str, int] = {}  # cells in the hands of each runner
        self._fruitless = self._refused = 0
        self._accepted = False  # has the engine taken any?
        self._not_before = 0.0  # [s] when the engine is asked again
        self._saved = 0
        self._turn = 0
        self._beaten = 0.0
        self._asked: set[tuple[str, str]] = set()  # runners, and what they were asked
        self._asked_at: float | None = None  # [s] when everything was asked to stop
        self.wishes = Wishes()

    def run(self) -> Result:
        """Until every cell is finished or failed, or somebody asks to stop.

        Raises:
            SimulatorError: runners end one after another and get nothing done, or the engine takes none.
            StorageError: the matrix folder cannot be written.
        """
        with self.wishes:
            try:
                self._begin()
                while self._tick():
                    time.sleep(_POLL)
            finally:
                self._end()
        states = [found["state"] for found in self._rows.values()]
        failed = tuple(sorted(cell for cell, found in self._rows.items() if found["state"] == "failed"))
        finished = states.count("finished")
        stopped = self.wishes.stop or (self.wishes.drain and finished + len(failed) < len(self._cells))
        return Result(len(self._cells), finished, failed, stopped)

    def _begin(self) -> None:
        self.folder.wishes()  # those were for a launcher that is gone
        self._rows = {cell.id: row(self.folder, cell) for cell in self.matrix.cells}
        self._saved = self._got_done()
        self._jobs = self._engine.adopt()
        for name in self._jobs:
            events = self.folder.runner(name) / "launcher.jsonl"
            self._read[name] = events.stat().st_size if events.exists() else 0
        facts = {"name": self.matrix.name, "cells": len(self._cells), "left": len(self._left()), "slots": []}
        self._tell("launched", **facts, runners=self._count, adopted=len(self._jobs))

    def _end(self) -> None:
        """No runner is left behind, unless we are killed; then the same command finds those that outlive us."""
        with suppress(OpenCDAError):
            if self._jobs:
                self._stop()
        deadline = time.monotonic() + self.options.deadline("stopping") + MARGIN
        while self._jobs and time.monotonic() < deadline:
            self._collect()
            time.sleep(_POLL if self._jobs else 0.0)
        self._engine.close()
        with suppress(OpenCDAError):
            self._look_again(self._cells)
            self._beat(phase="ended")

    # --- the loop

    def _tick(self) -> bool:
        """Look at everything once; False: there is nothing more to do."""
        self._hear()
        self._relay()
        for name, how in self._collect().items():
            self._tell("runner_ended", runner=name, how=how)
            self._look_again(self._cells)
            self._judge(name, how)
        if self.options.fail_fast and not self.wishes.stop and any(r["state"] == "failed" for r in self._rows.values()):
            self._tell("fail_fast")
            self.wishes.stop = True
        stopping = self.wishes.stop or self.wishes.drain
        if not stopping:
            self._place()
        if time.monotonic() - self._beaten >= _BEAT:
            self._beat(phase="stopping" if self.wishes.stop else "draining" if self.wishes.drain else "running")
        return bool(self._jobs) or (not stopping and bool(self._left()))

    def _hear(self) -> None:
        """Signals and the wishes of other processes, which runners are told."""
        for wish in self.folder.wishes():
            if wish in ("stop", "kill"):
                self.wishes.kill = self.wishes.kill or wish == "kill"
                self.wishes.stop = True
            elif wish == "drain" and not self.wishes.drain:
                self.wishes.drain = True
                self._tell("draining")
                self._ask("drain")
            elif wish.startswith("retry-") and (cell := wish.removeprefix("retry-")) in self._cells:
                self.folder.forgive(cell)
                self._look_again([cell])
                self._ask(wish)
        if self.wishes.stop:
            self._stop()

    def _stop(self) -> None:
        """Ask every runner to stop, once; those that wait for their turn, or do not hear, are cancelled."""
        now, live = time.monotonic(), live_runners(self.folder)
        self._asked_at = self._asked_at or now
        for wish in ("stop", "kill") if self.wishes.kill else ("stop",):
            for name in live:
                if (name, wish) not in self._asked:
                    self._asked.add((name, wish))
                    self.folder.ask(wish, name)
        late = self.wishes.kill or now - self._asked_at > self.options.deadline("stopping")
        for name, job in self._jobs.items():
            if name not in live or late:
                job.cancel()

    def _ask(self, wish: str) -> None:
        for name in {*self._jobs, *live_runners(self.folder)}:  # a job that Slurm has put into its queue again
            self.folder.ask(wish, name)

    def _collect(self) -> dict[str, str]:
        """Runners that have ended since, and how."""
        ended = {name: how for name, job in self._jobs.items() if (how := job.ended()) is not None}
        if ended:
            self._relay()  # their last words
        for name in ended:
            del self._jobs[name]
        return ended

    def _judge(self, name: str, how: str) -> None:
        """Runners that end and have done nothing would end for ever."""
        saved = self._got_done()
        self._fruitless = 0 if saved > self._saved else self._fruitless + 1
        self._saved = saved
        if self._fruitless >= _FRUITLESS and self._left() and not self.wishes.stop:
            console = self.folder.runner(name) / "console.log"
            raise SimulatorError(
                f"{self._fruitless} runners in a row have ended without an episode; the last one: {how}",
                fix=f"read {typed(console)}, and what the engine says about its job; then type the command again",
            )

    def _got_done(self) -> int:
        """Grows with every episode that is saved, and with every cell that is over."""
        over = sum(found["state"] in _OVER for found in self._rows.values())
        return over + sum(saved_episodes(self.folder.run(cell)) for cell in self._cells)

    def _left(self) -> list[str]:
        return [cell for cell, found in self._rows.items() if found["state"] not in _OVER]

    def _place(self) -> None:
        """As many runners as there is work for."""
        if time.monotonic() < self._not_before:
            return
        free = sum(self._leases.free_for_all(cell) for cell in self._left())
        spare = sum(max(0, self._slots - self._busy.get(name, 0)) for name in self._jobs)
        wanted = -(-max(0, free - spare) // self._slots)  # rounded up
        if not self._jobs and not wanted and not self._patient:
            self._patient = say_undecided(self._leases, self._left(), self.options, self._hears)
        for _ in range(min(wanted, self._count - len(self._jobs))):
            numbers = [int(found[1]) for found in map(_NUMBERED.fullmatch, self.folder.runners()) if found]
            name = f"r{max([0, *numbers]) + 1:03d}"
            try:
                self._jobs[name] = self._engine.place(name)
            except SimulatorError as error:
                self._refuse(error)
                return
            self._refused, self._accepted = 0, True
            self.folder.runner(name).mkdir(parents=True, exist_ok=True)
            self._tell("runner_placed", runner=name)

    def _refuse(self, error: SimulatorError) -> None:
        """An engine that takes no jobs for a while is no reason to end those that run."""
        self._refused += 1
        if not self._jobs and (not self._accepted or self._refused >= _FRUITLESS):
            raise error
        delay = min(300.0, self.options.retry_delay * 10.0 * 2.0 ** (self._refused - 1))
        self._not_before = time.monotonic() + delay
        self._tell("engine_refused", error=error.message, again_in_s=round(delay))

    # --- what is seen

    def _relay(self) -> None:
        """Events of runners are ours, too."""
        for name in self._jobs:
            try:
                with (self.folder.runner(name) / "launcher.jsonl").open("rb") as stream:
                    stream.seek(self._read.get(name, 0))
                    whole, _, _ = stream.read().rpartition(b"\n")
            except FileNotFoundError:
                continue
            self._read[name] = self._read.get(name, 0) + len(whole) + bool(whole)
            for line in whole.splitlines():
                with suppress(ValueError):  # a line that its disk had no room for
                    self._pass_on(name, json.loads(line))

    def _pass_on(self, name: str, facts: dict[str, Any]) -> None:
        kind = facts.pop("event")
        facts.pop("time", None)
        if kind == "launched":
            return
        self._tell(kind, **facts, runner=name)
        if facts.get("cell") in self._cells:
            self._look_again([facts["cell"]])

    def _look_again(self, cells: Any) -> None:
        for cell in cells:
            if self._rows.get(cell, {}).get("state") != "finished":
                self._rows[cell] = row(self.folder, self._cells[cell])

    def _beat(self, phase: str) -> None:
        self._beaten = time.monotonic()
        self._relay()
        live = live_runners(self.folder)
        told = together(live)
        self._busy = {name: sum(slot["cell"] is not None for slot in facts["slots"]) for name, facts in live.items()}
        at_work: Mapping[str, int] = {slot["cell"]: slot["index"] for slot in told["slots"] if slot["cell"] is not None}
        left = self._left()
        self._turn = (self._turn + _ROUND) % max(1, len(left))
        self._look_again({*at_work, *left[self._turn : self._turn + _ROUND]} & set(self._cells))
        for cell, slot in at_work.items():
            if cell in self._rows and self._rows[cell]["state"] in ("waiting", "retrying", "stopped"):
                self._rows[cell] |= {"state": "server", "slot": slot}
        failed = sum(found["state"] == "failed" for found in self._rows.values())
        facts = {"phase": phase, **told, "waiting": len(left) - len(at_work), "runners": sorted(self._jobs)}
        self.folder.heartbeat({**facts, "name": self.matrix.name, "failed": failed})
        self._listener("beat", {**facts, "rows": list(self._rows.values())})

    def _tell(self, kind: str, **facts: Any) -> None:
        self._hears(kind, facts)

    def _hears(self, kind: str, facts: dict[str, Any]) -> None:
        self.folder.event(kind, **facts)
        self._listener(kind, facts)
