"""Any simulator in a child process, over shared arrays, with a deadline.

For simulators that can hang or abort (CARLA), for more than one SUMO at once (libsumo allows one simulation
per process), and for held-out evaluation beside training. The child is spawned, never forked. The shared
memory has no name, so nothing is left behind however either side ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float64, Int64

from opencda_marl.core import errors
from opencda_marl.core.errors import DeadlineError, OpenCDAError, SimulatorError
from opencda_marl.core.roads import Roads
from opencda_marl.core.scratch import drop_scratch_folders, sweep
from opencda_marl.core.simulator import Simulator, SimulatorInfo
from opencda_marl.core.spans import Spans
from opencda_marl.core.state import FIELDS, Command, Events, Schedule, TrafficState

__all__ = ["RemoteSimulator"]

_CAPACITY = 4096  # slots that the shared arrays have room for; pages that nobody touches cost nothing
_SLOW_SECONDS = 120.0  # [s] for what is not a step: imports, start, reset
_FAREWELL_SECONDS = 5.0  # [s] that a child has for closing its simulator when its parent is gone
_CLOSE_SECONDS = 10.0
_WELL, _ENDS, _FAILED = b"0", b"1", b"2"  # first byte of an answer
_STEP, _RESET, _CLOSE = b"s", b"r", b"c"  # first byte of a question

_LAYOUT: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "values": (np.float64, (_CAPACITY, FIELDS)),
    "target_speed": (np.float64, (_CAPACITY,)),
    "ids": (np.int64, (_CAPACITY,)),
    "ended": (np.int64, (4, _CAPACITY)),  # ids, slots, endings, partners
    "departed": (np.int64, (_CAPACITY,)),
    "counts": (np.int64, (8,)),  # step, ended, departed, waiting, commanded, overridden, refused, world
    "times": (np.float64, (2,)),  # time, longest wait [s]
    "routes": (np.int16, (_CAPACITY,)),
    "drivers": (np.int8, (_CAPACITY,)),
    "alive": (np.bool_, (_CAPACITY,)),
    "controlled": (np.bool_, (_CAPACITY,)),
}  # wide types first: every array is aligned

_ARRAYS = ("ids", "alive", "drivers", "routes", "values")  # of the state


@dataclass(slots=True)
class _Shared:
    """Both sides' view of the same memory."""

    state: TrafficState
    command: Command
    ended: Int64[np.ndarray, "4 slots"]
    departed: Int64[np.ndarray, " slots"]
    counts: Int64[np.ndarray, " 8"]
    times: Float64[np.ndarray, " 2"]


def _size() -> int:
    return sum(int(np.dtype(kind).itemsize * np.prod(shape)) for kind, shape in _LAYOUT.values())


def _view(memory: Any, slots: int) -> _Shared:
    views: dict[str, np.ndarray] = {}
    offset = 0
    for name, (kind, shape) in _LAYOUT.items():
        views[name] = np.frombuffer(memory, kind, int(np.prod(shape)), offset).reshape(shape)
        offset += views[name].nbytes
    ids, alive, drivers, routes, values = (views[name][:slots] for name in _ARRAYS)
    return _Shared(
        state=TrafficState(0, 0.0, ids, alive, drivers, routes, values),
        command=Command(views["target_speed"][:slots], views["controlled"][:slots]),
        ended=views["ended"],
        departed=views["departed"],
        counts=views["counts"],
        times=views["times"],
    )


# -------------------------------------------------------------------- the child's side


def _serve(pipe: Connection, memory: Any, factory: Callable[[], Simulator]) -> None:
    """Main function of the child: answers until it is told to close, or the parent is gone."""
    # A signal to the whole group is for the parent, which decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    simulator: Simulator | None = None
    try:
        simulator = factory()
        if simulator.info.slots > _CAPACITY:
            raise SimulatorError(f"{simulator.info.slots} slots are more than the {_CAPACITY} that can be shared")
        shared = _view(memory, simulator.info.slots)
        pipe.send_bytes(_WELL + pickle.dumps((simulator.info, simulator.roads)))
        _answer(pipe, simulator, shared)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except OpenCDAError as error:
        pipe.send_bytes(_FAILED + pickle.dumps((type(error).__name__, error.message, error.fix)))
    finally:
        if simulator is not None:
            simulator.close()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        mp_connection.wait([parent.sentinel])
        time.sleep(_FAREWELL_SECONDS)  # a main thread that is not stuck has closed the simulator and is gone by then
        drop_scratch_folders()
        os._exit(1)


def _answer(pipe: Connection, simulator: Simulator, shared: _Shared) -> None:
    while True:
        question = pipe.recv_bytes()
        kind = question[:1]
        if kind == _STEP:
            state, events = simulator.step(shared.command)
            _publish(shared, state, events)
            pipe.send_bytes(_ENDS + pickle.dumps(events.reasons) if events.reasons else _WELL)
        elif kind == _RESET:
            schedule, seed = pickle.loads(question[1:])
            _publish(shared, simulator.reset(schedule, seed), Events())
            pipe.send_bytes(_WELL)
        else:
            simulator.close()
            pipe.send_bytes(_WELL)
            return


def _publish(shared: _Shared, state: TrafficState, events: Events) -> None:
    there = shared.state
    there.ids[:] = state.ids
    there.alive[:] = state.alive
    there.drivers[:] = state.drivers
    there.routes[:] = state.routes
    there.values[:] = state.values
    ended, departed = len(events.ids), len(events.departed)
    if ended:
        shared.ended[:, :ended] = events.ids, events.slots, events.endings, events.partners
    if departed:
        shared.departed[:departed] = events.departed
    told = events.waiting, events.commanded, events.overridden, events.refused
    shared.counts[:] = state.step, ended, departed, *told, state.world
    shared.times[:] = state.time, events.longest_wait


# -------------------------------------------------------------------- the parent's side


def _end(process: SpawnProcess, pipe: Connection) -> None:
    pipe.close()
    if process.is_alive():
        process.kill()  # a stopped process ignores everything else
        process.join()
        with suppress(OSError):  # it had no time to remove anything
            sweep()
    process.join()


class RemoteSimulator:
    """A simulator that lives in a child process; see `core.simulator.Simulator`.

    The child is ended with this object, with this process, or when it misses its deadline. After an error it is
    gone: make a new one. Scripts need the usual `if __name__ == "__main__":`, because the child imports them.

    Args:
        factory: makes the simulator, in the child; picklable, e.g. `functools.partial(SumoSimulator, roads, …)`.
        deadline: [s] for a step.
        patience: [s] for what is not a step: start and reset.
        setting: the name that a person raises the deadline by.
        spans: gets "tick" (waiting for the child) and "read" (all else).

    Raises:
        OpenCDAError: whatever the factory raised.
        SimulatorError: the child died.
        DeadlineError: it did not start in time.
    """

    def __init__(
        self,
        factory: Callable[[], Simulator],
        *,
        deadline: float,
        patience: float = _SLOW_SECONDS,
        setting: str = "simulator.deadline",
        spans: Spans | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._patience, self._setting = max(patience, deadline), setting
        self._deadline = deadline
        self._spans = spans or Spans(enabled=False)
        self._closed = False
        self._doing = "starting"
        self._memory = RawArray("B", _size())  # an unlinked file, mapped by both
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._memory, factory), name="simulator", daemon=True
        )
        self._process.start()
        # Before multiprocessing's own exit function, which would wait for the child for ever.
        self._end = Finalize(self, _end, (self._process, self._pipe), exitpriority=100)
        theirs.close()  # so that its death ends our reading
        self.info: SimulatorInfo
        self.roads: Roads
        self.info, self.roads = pickle.loads(self._hear(self._patience)[1:])
        self._shared = _view(self._memory, self.info.slots)

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        """Begin an episode."""
        self._doing = f"beginning episode {schedule.episode}"
        self._ask(_RESET + pickle.dumps((schedule, seed)))
        self._hear(self._patience)
        state = self._shared.state
        state.step, state.time, state.world = 0, 0.0, int(self._shared.counts[-1])
        self._doing = f"in episode {schedule.episode}"
        return state

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        """Advance one step in the child."""
        shared, spans = self._shared, self._spans
        with spans("read"):
            shared.command.target_speed[:] = command.target_speed
            shared.command.controlled[:] = command.controlled
        with spans("tick"):
            self._ask(_STEP)
            answer = self._hear(self._deadline)
        with spans("read"):
            step, ended, departed, waiting, commanded, overridden, refused, _ = shared.counts.tolist()
            shared.state.step = step
            shared.state.time, longest_wait = shared.times.tolist()
            ids, slots, endings, partners = shared.ended[:, :ended].copy()
            events = Events(
                ids=ids,
                slots=slots,
                endings=endings,
                partners=partners,
                reasons=pickle.loads(answer[1:]) if answer[:1] == _ENDS else (),
                departed=shared.departed[:departed].copy(),
                waiting=waiting,
                longest_wait=longest_wait,
                commanded=commanded,
                overridden=overridden,
                refused=refused,
            )
        return shared.state, events

    def close(self) -> None:
        """End the child; may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._process.is_alive():
            try:
                self._pipe.send_bytes(_CLOSE)
                if self._pipe.poll(_CLOSE_SECONDS):
                    self._pipe.recv_bytes()
                    self._process.join(_CLOSE_SECONDS)
            except (OSError, EOFError):
                pass  # it died meanwhile; what is left of it is ended below
        self._end()

    def _ask(self, question: bytes) -> None:
        if self._closed:
            raise SimulatorError("the simulator was closed; make a new one")
        try:
            self._pipe.send_bytes(question)
        except OSError:
            self._died()

    def _hear(self, seconds: float) -> bytes:
        try:
            if not self._pipe.poll(seconds):
                self._closed = True
                self._end()
                raise DeadlineError(
                    f"the simulator's process did not answer within {seconds:g} s while {self._doing}; it was ended",
                    fix=f"start again from the last checkpoint (--resume); {self._setting} sets the limit",
                )
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            self._died()
        if answer[:1] == _FAILED:
            name, message, fix = pickle.loads(answer[1:])
            self._closed = True
            self._process.join(_FAREWELL_SECONDS)  # it closes its simulator, which may have a server to leave in order
            self._end()
            raise getattr(errors, name)(message, fix=fix)
        return answer

    def _died(self) -> NoReturn:
        self._closed = True
        self._process.join(_CLOSE_SECONDS)
        code = self._process.exitcode
        self._end()
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        raise SimulatorError(
            f"the simulator's process died ({how}) while {self._doing}",
            fix="start again; its server, if it has one, may need a fresh start, too"
            if self._doing == "starting"
            else "start again from the last checkpoint (--resume)",
        )
