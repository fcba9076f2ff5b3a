"""The launcher: fills slots with cells, watches them, tries again what may be tried again, until nothing is left.

It is crash-only. What it knows stands in the matrix folder before it acts on it; killed at any instant, the same
command does what is left. Trainers die with it (launch/keeper.py) and go on from their last checkpoint.

Longer than other modules, because a cell's way through its states is to be read in one place.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import OpenCDAError, OutOfMemoryError, SimulatorError
from opencda_marl.core.run_folder import is_running
from opencda_marl.launch.cells import Cell, Family
from opencda_marl.launch.claims import Claims
from opencda_marl.launch.folder import Launch, Matrix, Writer, is_done, saved_episodes
from opencda_marl.launch.keeper import find, keep
from opencda_marl.launch.leases import Leases, say_undecided
from opencda_marl.launch.mps import Mps, Sharing
from opencda_marl.launch.place import Listener, Place, Server
from opencda_marl.launch.plan import PORTS_APART, Slot, make_slot
from opencda_marl.launch.scaling import Switch, Tuner, steady
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
    in_matrix,
    kind_of,
    make_eager,
    retry_delay,
    said_last,
)
from opencda_marl.launch.wishes import Wishes

__all__ = ["Launcher", "Result"]

_POLL = 0.2  # [s] between two looks at the processes
_BEAT = 1.0  # [s] between two looks at what they write, and two heartbeats of our own
_LOST = "lost"  # asked of a trainer whose cell another launcher has taken over
_RATE = 3.0  # [s] over which steps per second are told, at least


@dataclass(frozen=True, slots=True)
class Result:
    """What a launch left."""

    total: int
    finished: int
    failed: tuple[str, ...]
    stopped: bool  # by somebody, or drained before everything was done


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
        mps: services of the GPUs, closed by us; `--parallel auto` measures whether they are of use.
        shared: an engine has placed it: other launchers work on the same matrix, perhaps on the same machine. It leaves
            when all that is left is in their hands, and takes other ports where its own are in use.
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
        shared: bool = False,
        mps: Mps | None = None,
    ) -> None:
        self.folder, self.matrix, self.options = folder, matrix, matrix.options
        self._listener = listener
        self._served, self._server_for, self._missing = served, server_for, missing
        self._cwd, self._program = cwd or folder.path, program
        self._cells = {cell.id: cell for cell in matrix.cells}
        self._launches: dict[str, Launch] = {}
        self._waiting: list[str] = []
        self._not_before: dict[str, float] = {}
        self._begun = time.monotonic()
        self._starved: set[str] = set()  # cells that found no memory: not before another one has given its own back
        self._rows: dict[str, dict[str, Any]] = {}
        self._failed: set[str] = set()
        self._places: list[Place] = []
        self._most = limit if self.options.parallel == "auto" else int(self.options.parallel)
        self._claims = Claims(())
        self._shared = shared
        self._leases = Leases(
            folder, folder.heartbeat_file, limit=self.options.deadline("lease"), locked=folder.own == folder.path
        )
        self._patient = False  # was it said that it waits for others?
        switch = Switch() if mps is not None and self.options.parallel == "auto" else None
        self._sharing = Sharing(mps, switch)
        self._tuner = Tuner(limit, switch=switch) if self.options.parallel == "auto" else None
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
            left = finished + len(self._failed) < len(self._cells)
            stopped = self.wishes.stop or (self.wishes.drain and left)
            return Result(len(self._cells), finished, tuple(sorted(self._failed)), stopped)

    # --- beginning and end

    def _begin(self) -> None:
        """Read what earlier launches left."""
        self.folder.wishes()  # those were for a launcher that is gone
        for cell in self.matrix.cells:
            launch = Launch()
            if not is_done(cell, self.folder.status(cell.id)):
                launch = self.folder.read_launch(cell.id)
                if self._leases.free(cell.id):
                    self._mend(cell, launch)
                if launch.state == "failed":
                    self._failed.add(cell.id)
                else:
                    self._waiting.append(cell.id)
            self._launches[cell.id] = launch
            self._rows[cell.id] = row(self.folder, cell, launch)
        self._claim_ports(self._slots if self._waiting else 0)
        while len(self._places) < max(1, self._wanted()):
            self._add_place()
        slots = [place.slot.describe() for place in self._places]
        self._tell("launched", name=self.matrix.name, cells=len(self._cells), left=len(self._waiting), slots=slots)

    @property
    def _slots(self) -> int:
        """There are never more."""
        return min(self._most, len(self._cells))

    def _claim_ports(self, slots: int) -> None:
        """Of all slots; where others have them and we are one of many, the next ones."""
        ports = [slot.rpc_port for slot in map(self._slot, range(slots)) if slot.rpc_port is not None]
        if self._shared and ports:
            self._claims, first = Claims.anywhere(ports, PORTS_APART)
            self.options = replace(self.options, carla_rpc_port=first)
        else:
            self._claims = Claims(ports)

    def _mend(self, cell: Cell, launch: Launch) -> None:
        """An attempt that a launcher left when it died is nobody's failure."""
        if launch.state == "running":
            launch.attempts[-1] |= {"kind": "abandoned", "saved": saved_episodes(self.folder.run(cell.id))}
        if launch.state in ("running", "finished"):  # finished: its budget was raised since
            launch.state = "waiting"

    def _slot(self, index: int) -> Slot:
        carla = any(self._served(cell) for cell in self.matrix.cells)
        threads = max((cell.threads for cell in self.matrix.cells), default=1)
        return make_slot(self.options, index, carla=carla, threads=threads)

    def _add_place(self) -> None:
        self._places.append(Place(self._slot(len(self._places)), self._hears))

    def _end(self) -> None:
        """Nothing of ours is left when we go, however we go."""
        left = [place.kept for place in self._places if place.kept is not None]
        for kept in left:
            kept.terminate()
        deadline = time.monotonic() + self.options.deadline("stopping")
        for kept in left:
            if kept.wait(max(0.0, deadline - time.monotonic())) is None:
                kept.kill()
        for place in self._places:
            if place.server is not None:
                place.server.terminate()
        for place in self._places:
            with suppress(OpenCDAError):  # the disk may be full, and nobody can be told
                place.stop_server()
        with suppress(OpenCDAError):
            self._sharing.close()
        self._claims.close()
        self._leases.close()
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
        if not busy and not stopping and not self._patient:
            self._patient = say_undecided(self._leases, self._waiting, self.options, self._hears)
        return busy or (not stopping and any(not self._shared or not self._leases.elsewhere(n) for n in self._waiting))

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
                place.ask_to_stop()
        if self.wishes.kill:
            for place in self._places:
                if place.kept is not None:
                    place.kept.kill()

    def _retry(self, named: str) -> None:
        if named in self._failed:
            self._failed.discard(named)
            if self.folder.read_launch(named).state == "failed":
                self.folder.forgive(named)
            self._launches[named] = self.folder.read_launch(named)
            self._waiting.append(named)
            for place in self._places:  # slots begin anew as well
                place.failures, place.again_at = 0, 0.0
            self._tell("retry", cell=named, name=self._cells[named].name)

    def _wanted(self) -> int:
        """Slots that are of use now."""
        most = self._tuner.scale.cells if self._tuner is not None else int(self.options.parallel)
        aside = sum(place.free and place.trouble is not None for place in self._places)  # others stand in for them
        busy = sum(not place.free for place in self._places)
        return min(most + aside, self._slots, len(self._waiting) + busy + aside)

    def _fill(self) -> None:
        """Put waiting cells into free slots."""
        wanted = self._wanted()
        while len(self._places) < wanted:
            self._add_place()
        used = self._places if self._tuner is None else self._places[:wanted]
        for place in used:
            if place.trouble is not None:
                self._recover(place)
            if place.free:
                self._next_cell(place, used)
            if place.cell is not None and place.kept is None and self._ready(place):
                self._start(place)
        self._give_up()

    def _next_cell(self, place: Place, used: Sequence[Place]) -> None:
        now = time.monotonic()
        for name in list(self._waiting):
            if now < self._not_before.get(name, 0.0) or not self._fits(name):
                continue
            if self._served(self._cells[name]) and (place.trouble is not None or self._elsewhere(name, place, used)):
                continue
            if not self._leases.free(name) or not self._unused(name):
                continue
            known = self._leases.mine(name)
            if not self._leases.take(name):
                continue
            self._waiting.remove(name)
            if known or self._taken(name):
                place.cell = self._cells[name]
                return
            self._leases.give_back(name)

    def _elsewhere(self, name: str, place: Place, used: Sequence[Place]) -> bool:
        """A cell whose simulator has just failed in this slot goes to another one, if one is free."""
        last = self._launches[name].attempts[-1:]
        here = [at for at in last if at.get("slot") == place.slot.index and at.get("kind") in ("simulator", "deadline")]
        return bool(here) and any(other.free and other.trouble is None for other in used if other is not place)

    def _taken(self, name: str) -> bool:
        """Is there anything to do for a cell that others may have had since it was looked at?"""
        cell, launch = self._cells[name], self.folder.read_launch(name)
        done = is_done(cell, self.folder.status(name))
        if not done:
            self._mend(cell, launch)
        if launch.state == "failed":
            self._failed.add(name)
        self._launches[name], self._rows[name] = launch, row(self.folder, cell, launch)
        return not done and launch.state != "failed"

    def _fits(self, name: str) -> bool:
        """May there be memory for it now? Once nobody else is at work there never is more."""
        if all(place.kept is None for place in self._places):
            self._starved.clear()
        return name not in self._starved

    def _unused(self, name: str) -> bool:
        """Is nobody at work in the cell's run folder? What an earlier launcher left there ends by itself."""
        left = None if self._leases.mine(name) else find(self.folder.launch(name) / "trainer.json")
        if left is None:
            return not is_running(self.folder.run(name))
        if time.monotonic() - self._begun > self.options.deadline("stopping"):
            left.kill()
        return False

    def _ready(self, place: Place) -> bool:
        """Can the cell be started? Its server may have to come up first."""
        assert place.cell is not None
        try:
            if place.cell.family in self._missing:
                raise self._missing[place.cell.family]
            if self._served(place.cell) and not self._answers(place):
                return False
            return not self._sharing.wanted(place) or self._sharing.ready(place)
        except OpenCDAError as error:
            self._attempt(place)
            self._close_attempt(place, Outcome(kind_of(error), error.message, error.fix), None)
            return False

    # --- slots whose server does not come up: that is no cell's failure

    def _answers(self, place: Place) -> bool:
        try:
            return place.served(self._server_for, self.options.deadline("server"))
        except OpenCDAError as error:
            self._set_aside(place, error)
            return False

    def _recover(self, place: Place) -> None:
        if any(self._served(self._cells[name]) for name in self._waiting):
            try:
                place.recover(self._server_for, self.options.deadline("server"))
            except OpenCDAError as error:
                self._set_aside(place, error)

    def _set_aside(self, place: Place, error: OpenCDAError) -> None:
        delay = retry_delay(place.failures + 1, self.options)
        place.set_aside(error, delay)
        if place.cell is not None and place.kept is None:
            cell = place.cell
            self._give_back(place)
            self._rows[cell.id] = row(self.folder, cell, self._launches[cell.id])
        told = {"error": error.message, "fix": error.fix, "delay": delay, "failures": place.failures}
        self._tell("slot_set_aside", slot=place.slot.index, **told)

    def _give_up(self) -> None:
        """Where no slot is left that could get a server, cells that need one fail."""
        troubles = [(place, place.trouble) for place in self._places if place.trouble is not None]
        hopeless = [place for place, error in troubles if place.failures > self.options.retry(kind_of(error))]
        if len(hopeless) < max(1, self._slots):
            return
        names = [name for name in self._waiting if self._served(self._cells[name])]
        told = "; ".join(f"slot {place.slot.index}: {error.message.splitlines()[0]}" for place, error in troubles)
        text, last = f"no slot can get a server: {told}", troubles[-1][1]
        if self._shared:  # on other machines there may be some
            if names and all(place.free for place in self._places):
                raise SimulatorError(text, fix=last.fix)
            return
        for name in names:
            if self._leases.free(name) and self._leases.take(name):
                self._waiting.remove(name)
                self._fail_for_good(self._cells[name], Outcome(kind_of(last), text, last.fix))

    def _fail_for_good(self, cell: Cell, outcome: Outcome) -> None:
        """Without an attempt."""
        launch = self._launches[cell.id]
        launch.state, launch.failure, launch.error = "failed", outcome.kind, outcome.text
        self._failed.add(cell.id)
        self._write(cell.id)
        self._leases.give_back(cell.id)
        self._rows[cell.id] = row(self.folder, cell, launch)
        facts = {"error": outcome.text, "failure": outcome.kind, "fix": outcome.fix}
        self._tell("failed", cell=cell.id, name=cell.name, slot=None, code=None, **facts, log=None)
        self._stop_at_failure()

    # --- an attempt

    def _attempt(self, place: Place, **facts: Any) -> None:
        """Write down that an attempt begins."""
        assert place.cell is not None
        launch = self._launches[place.cell.id]
        launch.made += 1
        begun = saved_episodes(self.folder.run(place.cell.id))
        where = {"slot": place.slot.index, "host": socket.gethostname()}
        launch.attempts.append({"number": launch.made, "started": time.time(), **where, "from": begun, **facts})
        launch.state = "running"
        self._write(place.cell.id)

    def _start(self, place: Place) -> None:
        assert place.cell is not None
        cell, folder = place.cell, self.folder.launch(place.cell.id)
        launch = self._launches[cell.id]
        place.mps = self._sharing.wanted(place)
        self._attempt(place, **({"mps": True} if place.mps else {}))
        log = folder / "console.log"
        place.said_from = log.stat().st_size if log.exists() else 0
        try:
            kept = keep(
                argv(
                    self.folder,
                    cell,
                    launch.overrides,
                    port=place.slot.rpc_port if self._served(cell) else None,
                    program=self._program,
                ),
                env=environment(place.slot, cell) | self._sharing.told(place),
                cwd=self._cwd,
                log=log,
                record=folder / "trainer.json",
                grace=self.options.deadline("stopping"),
            )
        except OpenCDAError as error:
            self._close_attempt(place, Outcome(kind_of(error), error.message, error.fix), None)
            return
        launch.attempts[-1] |= {"pid": kept.child_pid, "started_ticks": kept.child_start_time}
        place.began(kept, Watch(self.folder.run(cell.id), kept.child_pid, self.options))
        self._write(cell.id)
        self._tell("started", cell=cell.id, name=cell.name, slot=place.slot.index, attempt=launch.made)

    def _look(self, place: Place) -> None:
        """At a trainer: has it ended, or must it be?"""
        assert place.kept is not None
        assert place.cell is not None
        code = place.kept.poll()
        if code is not None and place.asked == _LOST:
            self._lose(place)
        elif code is not None:
            status = self.folder.status(place.cell.id)
            outcome = classify(
                code,
                said_last(self.folder.launch(place.cell.id) / "console.log", place.said_from),
                finished=is_done(place.cell, status),
                asked=place.asked,
            )
            if outcome.kind in ("error", "signal") and self._sharing.died(place):
                outcome = replace(outcome, kind="mps")
            self._close_attempt(place, outcome, code)
        elif place.asked is not None and time.monotonic() - place.asked_at > self.options.deadline("stopping"):
            place.kept.kill()
        elif place.asked is None and self._sharing.died(place):
            place.end("mps: the multi-process service of its GPU died")
        elif place.asked is None and self._served(place.cell) and place.server and not place.server.alive():
            place.end("simulator: its server died")  # it would wait for an answer

    def _close_attempt(self, place: Place, outcome: Outcome, code: int | None) -> None:
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
        place.clear()
        self._starved.clear()
        facts = {"cell": cell.id, "name": cell.name, "slot": place.slot.index, "code": code, "error": outcome.text}
        stuck = outcome.kind == "recycle" and forgiven(launch, "recycle", self.options) is None
        if stuck:
            outcome = Outcome("recycle", "it asks for a fresh start again and again, and saves nothing in between")
        if outcome.failed or stuck:
            self._fail(cell, launch, outcome, facts | {"error": outcome.text})
        else:
            launch.state = {"finished": "finished", "stopped": "stopped", "recycle": "retrying"}[outcome.kind]
            launch.error = launch.failure = None
            if outcome.kind != "finished":
                self._waiting.insert(0, cell.id)
            self._tell(outcome.kind, **facts, saved=saved)
        if outcome.kind in ("simulator", "deadline", "recycle") and self._served(cell):
            place.restart_server()
        self._write(cell.id)
        if launch.state in ("finished", "failed", "stopped"):
            self._leases.give_back(cell.id)
        self._rows[cell.id] = row(self.folder, cell, launch)

    def _fail(self, cell: Cell, launch: Launch, outcome: Outcome, facts: dict[str, Any]) -> None:
        launch.failure, launch.error = outcome.kind, outcome.text
        count = forgiven(launch, outcome.kind, self.options)
        if outcome.kind == "memory":
            refused = launch.attempts[-1].get("exit_code") == OutOfMemoryError.exit_code
            if refused and all(other.kept is None for other in self._places):
                count = None  # with all the memory that there is: it would be refused again
            self._starved.add(cell.id)
        note = self._go_eager(cell, launch) if outcome.kind == "capture" and count is not None else None
        if count is None:
            launch.state = "failed"
            self._failed.add(cell.id)
            log = self.folder.launch(cell.id) / "console.log"  # there is none before a first trainer
            said = str(log) if log.exists() else None
            self._tell("failed", **facts, failure=outcome.kind, fix=in_matrix(outcome, self.folder.path), log=said)
            self._stop_at_failure()
            return
        launch.state = "retrying"
        delay = retry_delay(count, self.options)
        self._not_before[cell.id] = time.monotonic() + delay
        self._waiting.insert(0, cell.id)
        allowed = self.options.retry(outcome.kind)
        self._tell("retrying", **facts, failure=outcome.kind, count=count, allowed=allowed, delay=delay, note=note)

    def _stop_at_failure(self) -> None:
        if self.options.fail_fast and not self.wishes.stop:
            self._tell("fail_fast")
            self.wishes.stop = True

    def _go_eager(self, cell: Cell, launch: Launch) -> str:
        """Capture is not tried again: nothing of it would be another time."""
        note = "the CUDA graph of the update could not be captured: this cell goes on with eager updates"
        launch.overrides = list(EAGER)
        launch.notes.append(note)
        try:
            make_eager(self.folder.run(cell.id), note)
        except OpenCDAError as error:  # the next attempt will tell
            return f"its settings cannot be changed: {error.message}"
        return note

    def _give_back(self, place: Place) -> None:
        assert place.cell is not None
        self._waiting.insert(0, place.cell.id)
        self._leases.give_back(place.cell.id)
        place.cell = None

    def _lose(self, place: Place) -> None:
        """Another launcher held us for dead. What it does with the cell is written by it."""
        assert place.cell is not None
        cell = place.cell
        self._leases.lose(cell.id)
        place.clear()
        self._waiting.append(cell.id)
        self._tell("lost", cell=cell.id, name=cell.name, slot=place.slot.index)

    # --- once a second

    def _beat(self, phase: str) -> None:
        """Heartbeats: theirs are read, ours is written."""
        self._beaten = now = time.monotonic()
        for place in self._places:
            if place.cell is None:
                continue
            if not self._leases.holds(place.cell.id):
                self._hand_over(place)
                continue
            launch = self._launches[place.cell.id]
            self._rows[place.cell.id] = found = row(self.folder, place.cell, launch)
            if place.kept is None:
                found |= {"state": "server", "slot": place.slot.index}
                continue
            if found["state"] in ("training", "updating") and found["env_steps"] is not None:
                place.samples.append((now, found["env_steps"]))
            self._watch(place)
        for name in self._waiting:
            if self._leases.elsewhere(name):  # and what becomes of it there is read in its files
                self._rows[name] = row(self.folder, self._cells[name])
        rate = self._rate()
        if self._tuner is not None and phase == "running":
            self._rescale(self._tuner, now)
        slots = [place.describe() for place in self._places]
        facts = {"phase": phase, "steps_per_s": rate, "slots": slots, "waiting": len(self._waiting)}
        self.folder.heartbeat({**facts, "name": self.matrix.name, "failed": len(self._failed)})
        self._listener("beat", {**facts, "rows": list(self._rows.values())})

    def _hand_over(self, place: Place) -> None:
        if place.kept is None:
            self._lose(place)
        elif place.asked != _LOST:
            place.end(_LOST)

    def _watch(self, place: Place) -> None:
        assert place.watch is not None
        assert place.cell is not None
        late = place.watch.overdue(self.folder.status(place.cell.id)) if place.asked is None else None
        if late is not None and place.kept is not None:
            place.end(late)  # silent for so long, it would not hear a wish

    def _rate(self) -> float | None:
        """Aggregate steps per second, as far as it can be told."""
        found = [steady(list(place.samples), _RATE) for place in self._places if place.kept is not None]
        known = [rate for rate in found if rate is not None]
        return round(sum(known), 1) if known else None

    def _rescale(self, tuner: Tuner, now: float) -> None:
        """Another number of cells, if what was measured says so."""
        busy = [place for place in self._places if place.kept is not None]
        calm = all(place.asked is None for place in busy)
        changed = tuner.consider(now, [place.samples for place in busy] if calm else [], len(self._waiting))
        if changed is not None:
            self._tell("scaled", **changed)
            # another environment is that of another process
            for place in busy if "mps" in changed else busy[tuner.scale.cells :]:
                place.ask_to_stop()

    def _write(self, cell: str) -> None:
        self.folder.write_launch(cell, self._launches[cell])

    def _tell(self, kind: str, **facts: Any) -> None:
        self._hears(kind, facts)

    def _hears(self, kind: str, facts: dict[str, Any]) -> None:
        self.folder.event(kind, **facts)
        self._listener(kind, facts)
