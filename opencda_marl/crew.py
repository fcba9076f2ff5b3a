"""The workers of one run, as one of them sees them: where they meet, what they hand over, how all of them end.

A round is one episode of each worker: worker w of N drives the episodes w + 1, w + 1 + N, … At the end of a round each
hands its line and its state to worker 0, which alone writes the run folder and so always holds a boundary of everybody.
That makes every end simple: whoever has to stop saves that boundary (worker 0) or just goes (the others).

`Alone` is the crew of a run with one worker: it meets nobody, and costs nothing.

Longer than other modules, because both crews answer the same calls and are to be read side by side.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch does not list it
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from opencda_marl.core import errors
from opencda_marl.core.children import Child
from opencda_marl.core.errors import CheckpointError, ConfigError, OpenCDAError, StorageError, WorkerError
from opencda_marl.core.files import array_bytes, arrays_of
from opencda_marl.core.forms import without_reason
from opencda_marl.core.machine import cores
from opencda_marl.core.scratch import scratch_folder
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import LearnerState
from opencda_marl.core.stopping import StopRequest
from opencda_marl.core.torchrun import Place
from opencda_marl.nn.process_group import ProcessGroup
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import WITH_SERVER

__all__ = [
    "Alone",
    "Crew",
    "LeftError",
    "Meeting",
    "Part",
    "Start",
    "device_of",
    "joined",
    "launched_crew",
    "parted",
    "read_posted_config",
    "resolve_workers",
    "spawned",
    "under_torchrun",
]

Wish = Literal["end", "update", "stop"]
_WISHES: tuple[Wish, ...] = ("end", "update", "stop")  # the last one that anybody has is what happens

_FEWEST = 600  # env steps that `auto` leaves each worker between two updates: less is more waiting than driving
_ARRIVAL = 1200.0  # [s] from the first worker's start to the last one's, compiling kernels included
_LAST_WORDS = 2.0  # [s] that a worker has to say why it goes
_MODULE = "opencda_marl.worker"
_CONFIG, _JSON = "config", "json"


@dataclass(slots=True)
class Part:
    """What a worker's episode left."""

    line: dict[str, Any]  # of episodes.jsonl; totals come later
    trajectory: Mapping[str, np.ndarray]
    state: LearnerState  # of its learner


@dataclass(slots=True)
class Start:
    """Where a worker begins."""

    episodes: int = 0  # done by all
    over: bool = False  # there is nothing to do
    state: LearnerState | None = None  # of its learner; None: a fresh one
    weights_only: bool = False


class Meeting(Protocol):
    """What the loop needs of a crew."""

    @property
    def counted(self) -> float:
        """Share of the budget that is done, as worker 0 counted it when they last met."""

    def meet(self, wish: Wish, counted: float, *, over: bool = False) -> Wish:
        """What all of them do now. `over`: this round is the last one; worker 0 decides."""


@dataclass(slots=True)
class Alone:
    """One worker."""

    rank: int = 0
    size: int = 1
    counted: float = 0.0
    over: bool = False
    group: None = None

    def meet(self, wish: Wish, counted: float, *, over: bool = False) -> Wish:
        """See `Meeting`."""
        self.counted, self.over = counted, over
        return wish

    def collect(self, part: Part) -> list[Part]:
        """Its own."""
        return [part]

    def check(self) -> None:
        """Nobody else can have died."""

    def begin(self) -> None:
        """Nobody has to be awaited."""

    def agree(self, described: Mapping[str, Any]) -> None:
        """With itself it always does."""

    def hand_out(self, starts: Sequence[Start]) -> None:
        """There is nobody to hand anything to."""

    def explained(self, error: WorkerError) -> OpenCDAError:
        """Nobody else knows more."""
        return error

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class Crew:
    """Several workers; made by `spawned` and `under_torchrun`.

    Args:
        place: of this one.
        store: where they find each other.
        spans: timers of the loop; waiting is one of them.
        stop: whether somebody asked this process to stop.
        settings: of the run.
        address: that this worker listens on; None: its machine's name.
        children: the other workers, where they are ours to end.
        meeting: the folder of the store, where it has one; to be removed once they have found each other.
    """

    place: Place
    store: Store
    spans: Spans
    stop: StopRequest
    settings: RunSettings
    address: str | None
    children: list[Child] = field(default_factory=list)
    meeting: TemporaryDirectory[str] | None = None
    counted: float = 0.0
    over: bool = False
    group: ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self.place.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.place.size

    @property
    def joined(self) -> ProcessGroup:
        """The group, once everybody is there."""
        assert self.group is not None
        return self.group

    def begin(self) -> None:
        """Wait until everybody is ready, and form the group.

        Raises:
            OpenCDAError: one of them could not be; the error is its own.
            Interrupted: somebody asked to stop.
        """
        try:
            self._await_all()
        except RuntimeError as error:  # torch's, of a store that is gone
            raise WorkerError(
                f"worker {self.rank} of {self.size} does not reach the others any more: one that was started with it "
                "has ended before all were ready",
                fix="see what the others said",
            ) from error
        device, own_gpu = device_of(self.settings.device, self.place)
        self.group = ProcessGroup(
            self.store,
            self.rank,
            self.size,
            timeout=self.settings.worker_timeout,
            device=torch.device(device),
            own_gpu=own_gpu,
            address=self.address,
        )
        self.group.meanwhile = self._meanwhile

    def _await_all(self) -> None:
        """Say that this one is ready, and wait for the others."""
        self.store.set(f"ready {self.rank}", "yes")
        names = [f"ready {rank}" for rank in range(self.size)]
        give_up = time.monotonic() + _ARRIVAL
        while not self.store.check(names):
            self.check()
            if self.stop.requested():
                raise errors.Interrupted("stopped before training began: nothing is lost")
            if time.monotonic() > give_up:
                missing = [str(rank) for rank, name in enumerate(names) if not self.store.check([name])]
                raise WorkerError(f"workers that never came: {', '.join(missing)}", fix="see what they said")
            time.sleep(0.02)

    def meet(self, wish: Wish, counted: float, *, over: bool = False) -> Wish:
        """See `Meeting`.

        Raises:
            WorkerError: a worker is gone, or does not come.
            OpenCDAError: a worker of ours has failed; the error is its own.
        """
        with self.spans("wait"):
            try:
                table = self.joined.meet([_WISHES.index(wish), counted, over])
            except LeftError:
                return "stop"
        self.counted = float(table[0, 1])
        agreed = _WISHES[int(table[:, 0].max())]
        if agreed == "stop":
            self.stop.ask()
        if agreed == "end":
            self.over = bool(table[0, 2])
        return agreed

    def collect(self, part: Part) -> list[Part]:
        """What everybody's episode left, by rank, at worker 0; nothing elsewhere.

        Raises:
            WorkerError: a worker is gone, or does not answer.
        """
        with self.spans("wait"):
            found = self.joined.gather(_packed_part(part) if self.rank else b"")
        return [part, *map(_unpacked_part, found[1:])] if self.rank == 0 else []

    def agree(self, described: Mapping[str, Any]) -> None:
        """See that everybody computes updates in one form: after the first one in two their weights would differ.

        Args:
            described: the init line of this worker's learner.

        Raises:
            WorkerError: they do not, or one of them is gone.
        """
        own = str(described.get("update_passes", ""))
        forms = [found.decode() for found in self.joined.share(own.encode())]
        if len({without_reason(found) for found in forms}) > 1:
            told = "; ".join(f"worker {rank} in {found}" for rank, found in enumerate(forms))
            raise WorkerError(
                f"the workers compute updates in different forms: {told}",
                fix="a compiler that one of them lacks, or could not start, is usually the reason; try again, or see "
                "to it that all of them have it, or none (CXX=none)",
            )

    def hand_out(self, starts: Sequence[Start]) -> None:
        """Tell everybody where to begin; by worker 0, with a start for each."""
        self.over = starts[0].over
        for start in starts[1:]:
            self.joined.broadcast(_packed_start(start))
        if self.meeting is not None:  # they have found each other
            self.meeting.cleanup()

    def receive(self) -> Start:
        """Where this worker begins; by all but worker 0."""
        found = [self.joined.broadcast(None) for _ in range(1, self.size)]
        start = _unpacked_start(found[self.rank - 1])
        self.over = start.over
        return start

    def check(self) -> None:
        """Raise if a worker of ours has ended before its time.

        Raises:
            OpenCDAError: its own error, or WorkerError where it had none.
        """
        if not self.over:
            for rank, child in enumerate(self.children, start=1):
                if child.done:
                    raise _last_word(rank, child)

    def explained(self, error: WorkerError) -> OpenCDAError:
        """Why a worker was lost: the error that it left, if it is one of ours; else what was noticed of it."""
        give_up = time.monotonic() + _LAST_WORDS
        while self.children and time.monotonic() < give_up:
            for rank, child in enumerate(self.children, start=1):
                if child.done:
                    return _last_word(rank, child)
            self.children[0].wait(0.05)
        return error

    def close(self) -> None:
        """End all workers that are ours, and leave; may be called twice."""
        for child in self.children:
            if self.over:
                child.wait(10.0)
            child.close()
        if self.group is not None:
            self.group.close()
        if self.meeting is not None:
            self.meeting.cleanup()

    def _meanwhile(self) -> None:
        """While others are awaited: is there any use in it?"""
        self.check()
        if self.children and self.stop.requested():
            raise LeftError  # they end with us


class LeftError(Exception):
    """An exchange was left because this process has to stop, and the others, its children, with it."""


def resolve_workers(settings: RunSettings, place: Place | None) -> int:
    """How many workers a run has; decided once, when it begins.

    Args:
        settings: of the run.
        place: that torchrun gave this process, if it did.

    Raises:
        ConfigError: torchrun started another number of them.
    """
    asked = settings.workers
    if place is not None:
        if asked not in ("auto", place.size):
            raise ConfigError(
                f"workers is {asked}, but {place.size} processes were started for this run (WORLD_SIZE)",
                fix=f"workers=auto, or workers={place.size}",
            )
        return place.size
    if asked != "auto":
        return asked
    own = settings.learner
    if not isinstance(own, MappoSettings) or settings.simulator.gui or settings.simulator.backend in WITH_SERVER:
        return 1
    return max(1, min(int(cores()) // settings.threads, own.n_steps // _FEWEST, own.minibatch_size))


def device_of(name: str, place: Place) -> tuple[str, bool]:
    """The device of a worker, and whether every worker of its machine has one of its own.

    GPUs are dealt out in turn, unless the setting names one.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return ("cpu" if name == "auto" else name), False
    if ":" in name:
        return name, False
    count = torch.cuda.device_count()
    return f"cuda:{place.local_rank % count}", place.local_size <= count


def spawned(settings: RunSettings, text: str, *, folder: Path, spans: Spans, stop: StopRequest) -> Crew:
    """A crew on this machine: this process is worker 0, the others are its children and never outlive it.

    Args:
        settings: of the run.
        text: the same as YAML.
        folder: where what they say goes.
        spans: timers of this process.
        stop: of this process.

    Raises:
        StorageError: their requests cannot be written.
    """
    size = int(settings.workers)
    meeting: TemporaryDirectory[str] | None = None
    try:
        meeting = scratch_folder("workers")
        path = str(Path(meeting.name) / "store")
        store = FileStore(path, size)
        store.set(_CONFIG, text)
    except (OSError, RuntimeError) as error:  # torch tells a full disk by the latter
        if meeting is not None:
            meeting.cleanup()
        raise StorageError(
            f"the workers cannot meet in a temporary folder: {str(error).splitlines()[0]}",
            fix="make room where temporary files go, or name another folder: export TMPDIR=/tmp; or set workers=1",
        ) from error
    crew = Crew(Place(0, size, 0, size), store, spans, stop, settings, "127.0.0.1", meeting=meeting)
    try:
        for rank in range(1, size):
            request = {"store": path, "rank": rank, "size": size}
            crew.children.append(Child(_MODULE, request, folder=folder, name=f"worker_{rank}"))
    except BaseException:
        crew.close()
        raise
    return crew


def under_torchrun(place: Place) -> Store:
    """The store of the processes that torchrun started, on one machine or on several.

    Raises:
        WorkerError: they do not find each other.
    """
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_ARRIVAL)))
    except RuntimeError as error:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise WorkerError(
            f"worker {place.rank} of {place.size} does not reach the others at {where}",
            fix="check MASTER_ADDR and MASTER_PORT; torchrun sets them",
        ) from error
    return PrefixStore("opencda-marl", store)


def launched_crew(settings: RunSettings, text: str, place: Place, *, spans: Spans, stop: StopRequest) -> Crew:
    """The crew of a run whose processes torchrun started, as its worker 0 sees it; arguments as `spawned`."""
    store = under_torchrun(place)
    store.set(_CONFIG, text)
    return Crew(place, store, spans, stop, settings, None)


def read_posted_config(store: Store) -> str:
    """What worker 0 posted.

    Raises:
        WorkerError: it never did.
    """
    try:
        store.wait([_CONFIG], timedelta(seconds=_ARRIVAL))
        return str(store.get(_CONFIG).decode())
    except RuntimeError as error:
        raise WorkerError("worker 0 never said what to do", fix="see what it said") from error


def joined(states: Sequence[LearnerState]) -> LearnerState:
    """The states of all workers as one, for a checkpoint: that of worker 0, and what is different in the others.

    Raises:
        OpenCDAError: a state has a replay.
    """
    if len(states) == 1:
        return states[0]
    if any(state.segments for state in states):
        raise OpenCDAError("a learner with a replay cannot be shared by workers", fix="workers=1")
    tensors = dict(states[0].tensors)
    for rank, state in enumerate(states[1:], start=1):
        for name, array in state.tensors.items():
            first = states[0].tensors[name]
            same = first.dtype == array.dtype and first.shape == array.shape and first.tobytes() == array.tobytes()
            if not same:
                tensors[f"worker{rank}/{name}"] = array
    return LearnerState(tensors, {**states[0].values, "workers": [state.values for state in states[1:]]})


def parted(state: LearnerState, size: int) -> list[LearnerState]:
    """What `joined` was given.

    Raises:
        CheckpointError: it was given another number of states.
    """
    values = dict(state.values)
    others = values.pop("workers", [])
    if len(others) != size - 1:
        raise CheckpointError(
            f"the checkpoint is that of {len(others) + 1} workers, but this run has {size}",
            fix="a run keeps its number of workers; begin a new one with --init-from",
        )
    if size == 1:
        return [state]
    own = {name: array for name, array in state.tensors.items() if not name.startswith("worker")}
    states = [LearnerState(own, values)]
    for rank, theirs in enumerate(others, start=1):
        prefix = f"worker{rank}/"
        mine = {name.removeprefix(prefix): a for name, a in state.tensors.items() if name.startswith(prefix)}
        states.append(LearnerState({**own, **mine}, theirs))
    return states


def _last_word(rank: int, child: Child) -> OpenCDAError:
    """The error that a worker left, under its own class."""
    if child.code is not None and child.code < 0:
        fix = "was it short of memory? dmesg knows" if child.code == -signal.SIGKILL else None
        return WorkerError(f"worker {rank} was killed by signal {-child.code}", fix=fix)
    try:
        said = dict(child.result())
    except OpenCDAError as error:
        return WorkerError(f"worker {rank} died: {error.message}", fix=error.fix)
    kind = vars(errors).get(str(said.get("error")), WorkerError)
    found = kind(f"worker {rank}: {said.get('message', 'it ended before its time')}", fix=said.get("fix"))
    assert isinstance(found, OpenCDAError)
    return found


def _packed(values: Any, arrays: Mapping[str, np.ndarray]) -> bytes:
    return array_bytes({**arrays, _JSON: np.frombuffer(json.dumps(values, default=_plain).encode(), np.uint8)})


def _plain(value: np.generic) -> Any:
    """Numbers of NumPy in a line."""
    return value.item()


def _unpacked(data: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    arrays = arrays_of(data)
    return json.loads(arrays.pop(_JSON).tobytes()), arrays


def _packed_part(part: Part) -> bytes:
    arrays = {f"state/{name}": array for name, array in part.state.tensors.items()}
    arrays |= {f"trajectory/{name}": array for name, array in part.trajectory.items()}
    return _packed([part.line, part.state.values], arrays)


def _unpacked_part(data: bytes) -> Part:
    (line, values), arrays = _unpacked(data)
    return Part(line, _below(arrays, "trajectory/"), LearnerState(_below(arrays, "state/"), values))


def _packed_start(start: Start) -> bytes:
    values, arrays = (None, {}) if start.state is None else (start.state.values, start.state.tensors)
    return _packed([start.episodes, start.over, start.weights_only, values], arrays)


def _unpacked_start(data: bytes) -> Start:
    (episodes, over, weights_only, values), arrays = _unpacked(data)
    return Start(episodes, over, None if values is None else LearnerState(arrays, values), weights_only)


def _below(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
