"""The launcher: fills slots with cells, watches them, tries again what may be tried again, until nothing is left.

It is crash-only. What it knows stands in the matrix folder before it acts on it; killed at any instant, the same
command does what is left. Trainers die with it (launch/keeper.py) and go on from their last checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from opencda_marl.core.errors import DeadlineError, OpenCDAError, SimulatorError
from opencda_marl.core.run_folder import is_running
from opencda_marl.launch.cells import Cell, Family
from opencda_marl.launch.folder import Launch, Matrix, Writer, is_done, saved_episodes
from opencda_marl.launch.keeper import Kept, find, keep
from opencda_marl.launch.plan import Slot, make_slot
from opencda_marl.launch.scaling import Scale, next_scale, steady
from opencda_marl.launch.status import row
from opencda_marl.launch.trainers import (
    EAGER,
    PROGRAM,
    Outcome,
    Watch,
    argv,
    classify,
    environment,
    forgiven,
    kind_of,
    make_eager,
    retry_delay,
    said_last,
)

__all__ = ["Launcher", "Result", "Server", "Wishes"]

_POLL = 0.2  # [s] between two looks at the processes
_BEAT = 1.0  # [s] between two looks at what they write, and two heartbeats of our own
_WINDOW = 20.0  # [s] over which steps per second are measured

Listener = Callable[[str, dict[str, Any]], None]
"""Hears what happened: the kind of an event, and its facts. `beat` comes once a second with all rows."""


class Server(Protocol):
    """A simulator's server of one slot (launch/servers.py)."""

    def begin(self) -> None:
        """Start it if it is needed; returns at once."""

    def ready(self) -> bool:
        """Does it answer? Raises SimulatorError if it never will."""

    def restart(self) -> None:
        """End it and begin anew; returns at once."""

    def terminate(self) -> None:
        """Ask it to end, as `stop` does, without waiting."""

    def stop(self) -> None:
        """End it, if it is ours and not to be kept."""

    def alive(self) -> bool:
        """Is it there?"""

    def describe(self) -> dict[str, Any]:
        """For launcher.json."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a launch left."""

    total: int
    finished: int
    failed: tuple[str, ...]
    stopped: bool


class Wishes:
    """What a person wants, by signals: the first Ctrl-C or TERM asks to stop, the second to kill."""

    def __init__(self) -> None:
        self.stop = self.kill = self.drain = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
            wanted = [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
            self._before = {number: signal.signal(number, self._caught) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        self.kill = self.kill or (self.stop and number != signal.SIGHUP)
        self.stop = True


@dataclass(slots=True)
class _Place:
    """A slot, and what is at work in it."""

    slot: Slot
    cell: Cell | None = None
    kept: Kept | None = None
    watch: Watch | None = None
    asked: str | None = None  # why we ended the trainer
    ended_by: float = 0.0  # when that was
    said_from: int = 0  # where its part of console.log begins
    server: Server | None = None
    server_since: float = 0.0
    server_ready: bool = False
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=120))

    @property
    def free(self) -> bool:
        return self.cell is None


class Launcher:
    """One launch of a matrix.

    Args:
        folder: locked by us.
        matrix: as it stands in the folder.
        listener: see `Listener`.
        served: does a cell need a server?
        server_for: makes the server of a slot.
        missing: what a family of cells lacks here, so that none of them can run.
        limit: the most cells at once, for `--parallel auto`.
        cwd: where trainers run.
        program: what trains: it takes the arguments of `opencda-marl`.
    """

    def __init__(
        self,
        folder: Writer,
        matrix: Matrix,
        *,
        listener: Listener,
        served: Callable[[Cell], bool],
        server_for: Callable[[Slot], Server],
        missing: Mapping[Family, OpenCDAError],
        limit: int = 1,
        cwd: Path | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.folder, self.matrix, self.options = folder, matrix, matrix.options
        self._listener, self._limit = listener, limit
        self._served, self._server_for, self._missing = served, server_for, missing
        self._cwd, self._program = cwd or folder.path, program
        self._cells = {cell.id: cell for cell in matrix.cells}
        self._launches: dict[str, Launch] = {}
        self._waiting: list[str] = []
        self._not_before: dict[str, float] = {}
        self._held_since: dict[str, float] = {}  # by a trainer of an earlier launcher
        self._rows: dict[str, dict[str, Any]] = {}
        self._failed: set[str] = set()
        self._places: list[_Place] = []
        self._auto = self.options.parallel == "auto"
        self._scale = Scale()
        self._scaled_at = 0.0
        self._beaten = 0.0
        self.wishes = Wishes()

    def run(self) -> Result:
        """Until every cell is finished or failed, or somebody asks to stop.

        Raises:
            StorageError: the matrix folder cannot be written; trainers are stopped.
        """
        with self.wishes:
            try:
                self._begin()
                while self._tick():
                    time.sleep(_POLL)
            finally:
                self._end()
            finished = sum(found["state"] == "finished" for found in self._rows.values())
            return Result(len(self._cells), finished, tuple(sorted(self._failed)), self.wishes.stop)

    # --- beginning and end

    def _begin(self) -> None:
        """Read what earlier launches left."""
        self.folder.wishes()  # those were for a launcher that is gone
        for cell in self.matrix.cells:
            launch = Launch()
            if not is_done(cell, self.folder.status(cell.id)):
                launch = self.folder.read_launch(cell.id)
                self._mend(cell, launch)
                if launch.state == "failed":
                    self._failed.add(cell.id)
                else:
                    self._waiting.append(cell.id)
            self._launches[cell.id] = launch
            self._rows[cell.id] = row(self.folder, cell, launch)
        while len(self._places) < max(1, self._wanted()):
            self._add_place()
        slots = [place.slot.describe() for place in self._places]
        self._tell("launched", name=self.matrix.name, cells=len(self._cells), left=len(self._waiting), slots=slots)

    def _mend(self, cell: Cell, launch: Launch) -> None:
        """An attempt that a launcher left when it died is nobody's failure."""
        if launch.state == "running":
            launch.attempts[-1] |= {"kind": "abandoned", "saved": saved_episodes(self.folder.run(cell.id))}
        if launch.state in ("running", "finished"):  # finished: its budget was raised since
            launch.state = "waiting"

    def _add_place(self) -> None:
        carla = any(self._served(cell) for cell in self.matrix.cells)
        threads = max((cell.threads for cell in self.matrix.cells), default=1)
        self._places.append(_Place(make_slot(self.options, len(self._places), carla=carla, threads=threads)))

    def _end(self) -> None:
        """Nothing of ours is left when we go, however we go."""
        left = [place.kept for place in self._places if place.kept is not None]
        for kept in left:
            kept.terminate()
        deadline = time.monotonic() + self.options.deadline("stopping")
        for kept in left:
            if kept.wait(max(0.0, deadline - time.monotonic())) is None:
                kept.kill()
        servers = [place.server for place in self._places if place.server is not None]
        for server in servers:
            server.terminate()
        for server in servers:
            try:
                server.stop()
            except SimulatorError as error:
                self._listener("server_failed", {"error": error.message})
        with suppress(OpenCDAError):
            self._beat(phase="ended")

    # --- the loop

    def _tick(self) -> bool:
        """Look at everything once; False: there is nothing more to do."""
        self._hear()
        for place in self._places:
            if place.kept is not None:
                self._look(place)
        stopping = self.wishes.stop or self.wishes.drain
        if not stopping:
            self._fill()
        busy = any(not place.free for place in self._places)
        if time.monotonic() - self._beaten >= _BEAT:
            self._beat(phase="stopping" if self.wishes.stop else "draining" if self.wishes.drain else "running")
        return busy or bool(self._waiting and not stopping)

    def _hear(self) -> None:
        """Signals and the wishes of other processes."""
        for wish in self.folder.wishes():
            if wish in ("stop", "kill"):
                self.wishes.kill = self.wishes.kill or wish == "kill"
                self.wishes.stop = True
            elif wish == "drain" and not self.wishes.drain:
                self.wishes.drain = True
                self._tell("draining")
            elif wish.startswith("retry-"):
                self._retry(wish.removeprefix("retry-"))
        if not self.wishes.stop:
            return
        for place in self._places:
            if place.kept is None and place.cell is not None:  # its server was starting
                self._give_back(place)
            elif place.kept is not None and place.asked is None:
                self._ask_to_stop(place, "stop")
        if self.wishes.kill:
            for place in self._places:
                if place.kept is not None:
                    place.kept.kill()

    def _retry(self, named: str) -> None:
        if named in self._failed:
            self._failed.discard(named)
            self._launches[named].forgive()
            self._write(named)
            self._waiting.append(named)
            self._tell("retry", cell=named, name=self._cells[named].name)

    def _ask_to_stop(self, place: _Place, why: str) -> None:
        assert place.kept is not None
        place.asked, place.ended_by = why, time.monotonic()
        place.kept.terminate()

    def _wanted(self) -> int:
        """Slots that are of use now."""
        most = self._scale.cells if self.options.parallel == "auto" else self.options.parallel
        return min(most, len(self._waiting) + sum(not place.free for place in self._places))

    def _fill(self) -> None:
        """Put waiting cells into free slots."""
        wanted = self._wanted()
        while len(self._places) < wanted:
            self._add_place()
        for place in self._places if not self._auto else self._places[:wanted]:
            if place.free:
                self._next_cell(place)
            if place.cell is not None and place.kept is None and self._ready(place):
                self._start(place)

    def _next_cell(self, place: _Place) -> None:
        now = time.monotonic()
        for name in self._waiting:
            if now >= self._not_before.get(name, 0.0) and self._unused(name):
                self._waiting.remove(name)
                place.cell = self._cells[name]
                return

    def _unused(self, name: str) -> bool:
        """Is nobody at work in the cell's run folder? What an earlier launcher left there ends by itself."""
        if not is_running(self.folder.run(name)):
            return True
        since = self._held_since.setdefault(name, time.monotonic())
        left = find(self.folder.launch(name) / "trainer.json")
        if left is not None and time.monotonic() - since > self.options.deadline("stopping"):
            left.kill()
        return False

    def _ready(self, place: _Place) -> bool:
        """Can the cell be started? Its server may have to come up first."""
        assert place.cell is not None
        try:
            if place.cell.family in self._missing:
                raise self._missing[place.cell.family]
            return not self._served(place.cell) or self._server_ready(place)
        except OpenCDAError as error:
            self._attempt(place)
            self._close_attempt(place, Outcome(kind_of(error), error.message, error.fix), None)
            return False

    def _server_ready(self, place: _Place) -> bool:
        """Raises SimulatorError if it never will be."""
        if place.server is None:
            place.server = self._server_for(place.slot)
            place.server_since, place.server_ready = time.monotonic(), False
            place.server.begin()
            self._tell("server_starting", slot=place.slot.index, **place.server.describe())
        if place.server_ready and place.server.alive():
            return True
        waited = time.monotonic() - place.server_since
        place.server_ready = place.server.ready()
        if place.server_ready:
            self._tell("server_ready", slot=place.slot.index, seconds=round(waited, 1))
        elif waited > self.options.deadline("server"):
            raise DeadlineError(f"the server of slot {place.slot.index} does not answer after {waited:.0f} s")
        return place.server_ready

    def _restart_server(self, place: _Place) -> None:
        if place.server is None:
            return
        place.server_since, place.server_ready = time.monotonic(), False
        try:
            place.server.restart()
        except SimulatorError as error:
            self._tell("server_failed", slot=place.slot.index, error=error.message)

    # --- an attempt

    def _attempt(self, place: _Place, **facts: Any) -> None:
        """Write down that an attempt begins."""
        assert place.cell is not None
        launch = self._launches[place.cell.id]
        launch.made += 1
        begun = saved_episodes(self.folder.run(place.cell.id))
        launch.attempts.append(
            {"number": launch.made, "started": time.time(), "slot": place.slot.index, "from": begun, **facts}
        )
        launch.state = "running"
        self._write(place.cell.id)

    def _start(self, place: _Place) -> None:
        assert place.cell is not None
        cell, folder = place.cell, self.folder.launch(place.cell.id)
        launch = self._launches[cell.id]
        self._attempt(place)
        log = folder / "console.log"
        place.said_from = log.stat().st_size if log.exists() else 0
        try:
            place.kept = keep(
                argv(self.folder, cell, launch.overrides, program=self._program),
                env=environment(place.slot, cell),
                cwd=self._cwd,
                log=log,
                record=folder / "trainer.json",
                grace=self.options.deadline("stopping"),
            )
        except OpenCDAError as error:
            self._close_attempt(place, Outcome(kind_of(error), error.message, error.fix), None)
            return
        launch.attempts[-1] |= {"pid": place.kept.child_pid, "started_ticks": place.kept.child_start_time}
        place.asked = None
        place.watch = Watch(self.folder.run(cell.id), place.kept.child_pid, self.options)
        place.samples.clear()
        self._write(cell.id)
        again = launch.attempts[-1]["number"] if launch.made > 1 else None
        self._tell("started", cell=cell.id, name=cell.name, slot=place.slot.index, attempt=again)

    def _look(self, place: _Place) -> None:
        """At a trainer: has it ended, or must it be?"""
        assert place.kept is not None
        assert place.cell is not None
        code = place.kept.poll()
        if code is not None:
            status = self.folder.status(place.cell.id)
            outcome = classify(
                code,
                said_last(self.folder.launch(place.cell.id) / "console.log", place.said_from),
                finished=is_done(place.cell, status),
                asked=place.asked,
            )
            place.kept = None
            self._close_attempt(place, outcome, code)
        elif place.asked is not None and time.monotonic() - place.ended_by > self.options.deadline("stopping"):
            place.kept.kill()
        elif place.asked is None and self._served(place.cell) and place.server and not place.server.alive():
            place.asked, place.ended_by = "simulator: its server died", time.monotonic()
            place.kept.kill()  # it would wait for an answer

    def _close_attempt(self, place: _Place, outcome: Outcome, code: int | None) -> None:
        """Write down how an attempt ended, and what follows from it."""
        assert place.cell is not None
        cell, launch = place.cell, self._launches[place.cell.id]
        saved = saved_episodes(self.folder.run(cell.id))
        launch.attempts[-1] |= {
            "ended": time.time(),
            "exit_code": code,
            "kind": outcome.kind,
            "error": outcome.text,
            "saved": saved,
        }
        place.cell, place.watch = None, None
        facts = {"cell": cell.id, "name": cell.name, "slot": place.slot.index, "code": code, "error": outcome.text}
        if outcome.failed:
            self._fail(cell, launch, outcome, facts)
        else:
            launch.state = {"finished": "finished", "stopped": "stopped", "recycle": "retrying"}[outcome.kind]
            launch.error = launch.failure = None
            if outcome.kind != "finished":
                self._waiting.insert(0, cell.id)
            self._tell(outcome.kind, **facts, saved=saved)
        if outcome.kind in ("simulator", "deadline", "recycle"):
            self._restart_server(place)
        self._write(cell.id)
        self._rows[cell.id] = row(self.folder, cell, launch)

    def _fail(self, cell: Cell, launch: Launch, outcome: Outcome, facts: dict[str, Any]) -> None:
        launch.failure, launch.error = outcome.kind, outcome.text
        count = forgiven(launch, outcome.kind, self.options)
        if count is None:
            launch.state = "failed"
            self._failed.add(cell.id)
            log = str(self.folder.launch(cell.id) / "console.log")
            self._tell("failed", **facts, failure=outcome.kind, fix=outcome.fix, log=log)
            if self.options.fail_fast and not self.wishes.stop:
                self._tell("fail_fast")
                self.wishes.stop = True
            return
        launch.state = "retrying"
        delay = retry_delay(count, self.options)
        self._not_before[cell.id] = time.monotonic() + delay
        self._waiting.insert(0, cell.id)
        note = None
        if outcome.kind == "capture":
            note = "the CUDA graph of the update could not be captured: this cell goes on with eager updates"
            launch.overrides = list(EAGER)
            launch.notes.append(note)
            make_eager(self.folder.run(cell.id), note)
        allowed = self.options.retry(outcome.kind)
        self._tell("retrying", **facts, failure=outcome.kind, count=count, allowed=allowed, delay=delay, note=note)

    def _give_back(self, place: _Place) -> None:
        assert place.cell is not None
        self._waiting.insert(0, place.cell.id)
        place.cell = None

    # --- once a second

    def _beat(self, phase: str) -> None:
        """Heartbeats: theirs are read, ours is written."""
        self._beaten = now = time.monotonic()
        for place in self._places:
            if place.cell is None:
                continue
            launch = self._launches[place.cell.id]
            self._rows[place.cell.id] = found = row(self.folder, place.cell, launch)
            if place.kept is None:
                found |= {"state": "server", "slot": place.slot.index}
                continue
            if found["state"] in ("training", "updating") and found["env_steps"] is not None:
                place.samples.append((now, found["env_steps"]))
            self._watch(place)
        rate = self._rate()
        if self._auto and phase == "running":
            self._rescale(now)
        slots = [self._slot_facts(place) for place in self._places]
        facts = {"phase": phase, "steps_per_s": rate, "slots": slots, "waiting": len(self._waiting)}
        self.folder.heartbeat({**facts, "name": self.matrix.name, "failed": len(self._failed)})
        self._listener("beat", {**facts, "rows": list(self._rows.values())})

    def _watch(self, place: _Place) -> None:
        assert place.watch is not None
        assert place.cell is not None
        late = place.watch.overdue(self.folder.status(place.cell.id)) if place.asked is None else None
        if late is not None and place.kept is not None:
            place.asked, place.ended_by = late, time.monotonic()
            place.kept.kill()  # it has not answered for so long that it will not answer a wish

    def _rate(self) -> float | None:
        """Aggregate steps per second, as far as it can be told."""
        found = [steady(list(place.samples), 3.0) for place in self._places if place.kept is not None]
        known = [rate for rate in found if rate is not None]
        return round(sum(known), 1) if known else None

    def _rescale(self, now: float) -> None:
        """Another number of cells, if what was measured says so."""
        busy = [place for place in self._places if place.kept is not None]
        if len(busy) != self._scale.cells or any(place.asked is not None for place in busy):
            self._scaled_at = now
            return
        found = [steady([s for s in place.samples if s[0] >= self._scaled_at], _WINDOW) for place in busy]
        if any(rate is None for rate in found):
            return
        before = self._scale
        total = sum(rate for rate in found if rate is not None)
        self._scale = next_scale(before, total, limit=min(self._limit, len(busy) + len(self._waiting)))
        self._scaled_at = now
        if self._scale.cells != before.cells:
            self._tell("scaled", cells=self._scale.cells, before=before.cells, steps_per_s=round(total, 1))
        for place in busy[self._scale.cells :]:
            self._ask_to_stop(place, "stop")

    def _slot_facts(self, place: _Place) -> dict[str, Any]:
        cell = None if place.cell is None else place.cell.id
        server = None if place.server is None else place.server.describe()
        return {**place.slot.describe(), "cell": cell, "server": server}

    def _write(self, cell: str) -> None:
        self.folder.write_launch(cell, self._launches[cell])

    def _tell(self, kind: str, **facts: Any) -> None:
        self.folder.event(kind, **facts)
        self._listener(kind, facts)
