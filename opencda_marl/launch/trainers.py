"""A cell's trainer: what is typed, in which environment, what its end means, and whether it is tried again."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opencda_marl
from opencda_marl.config import from_run_folder, to_yaml
from opencda_marl.core.errors import (
    RECYCLE,
    AccountingError,
    BackendMissingError,
    CheckpointError,
    CompilerError,
    ConfigError,
    CudaGraphCaptureError,
    DeadlineError,
    DeviceError,
    Interrupted,
    NotFiniteError,
    OpenCDAError,
    OutOfMemoryError,
    SimulatorError,
    StorageError,
    WorkerError,
)
from opencda_marl.core.files import remove_tree, typed, writing
from opencda_marl.core.probe import HOST
from opencda_marl.core.run_folder import ACTIVE_PHASES, RunFolder, read_run
from opencda_marl.launch.cells import Cell
from opencda_marl.launch.folder import Launch, MatrixFolder
from opencda_marl.launch.plan import Options, Slot

__all__ = [
    "EAGER",
    "Outcome",
    "Watch",
    "argv",
    "classify",
    "environment",
    "forgiven",
    "in_matrix",
    "kind_of",
    "make_eager",
    "retry_delay",
    "said_last",
]

_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
PROGRAM = (sys.executable, "-m", "opencda_marl.cli")
EAGER = ("learner.update_mode=eager", "learner.cuda_graph_update=false")

_KINDS = {
    ConfigError.exit_code: "config",
    SimulatorError.exit_code: "simulator",
    BackendMissingError.exit_code: "missing",
    DeadlineError.exit_code: "deadline",
    AccountingError.exit_code: "accounting",
    CheckpointError.exit_code: "checkpoint",
    StorageError.exit_code: "storage",
    NotFiniteError.exit_code: "not_finite",
    DeviceError.exit_code: "device",
    CudaGraphCaptureError.exit_code: "capture",
    CompilerError.exit_code: "compiler",
    OutOfMemoryError.exit_code: "memory",
    Interrupted.exit_code: "signal",  # somebody's, not the launcher's
    WorkerError.exit_code: "signal",  # a worker was killed, or hung: the others saved what there was
    RECYCLE: "recycle",
}
_NO_MEMORY = re.compile(r"^[\w.]*(?:OutOfMemoryError|MemoryError)\b", re.M)
_MPS = re.compile(r"\bMPS (?:client|server|control daemon)\b")  # of CUDA's own errors
_TAIL = 8192  # bytes of console.log that are looked at


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended."""

    kind: str  # finished, stopped, recycle, or a class of failures
    text: str | None = None  # for people; None where there is nothing to say
    fix: str | None = None

    @property
    def failed(self) -> bool:
        """Is it held against the cell?"""
        return self.kind not in ("finished", "stopped", "recycle")


def argv(
    folder: MatrixFolder,
    cell: Cell,
    overrides: Sequence[str] = (),
    *,
    port: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> list[str]:
    """The trainer's command: a fresh run, or the one that is there goes on.

    A folder that a trainer left before it had written down what it is holds nothing, and makes room.

    Args:
        folder: of the matrix.
        cell: to train.
        overrides: of a fresh run, over the cell's settings.
        port: of the slot's CARLA server; None: the cell needs none.
        program: that takes the arguments of `opencda-marl`.

    Raises:
        StorageError: it cannot be removed.
    """
    run = folder.run(cell.id)
    command = [*program, "run"]
    free = cell.free if port is None else [*cell.free, f"carla.host={HOST}", f"carla.port={port}"]
    if (run / "run.json").is_file() or (run / "checkpoints").exists():
        return [*command, "--resume", str(run), *free]
    if run.exists():
        with writing(run):
            remove_tree(run)
    root = folder.launch(cell.id)
    return [*command, "-t", cell.profile, "--config-root", str(root), "--out", str(run), *free, *overrides]


def environment(slot: Slot, cell: Cell, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The trainer's environment.

    Args:
        slot: its GPU.
        cell: its threads.
        given: the launcher's own; None: that of this process.
    """
    found = dict(os.environ if given is None else given)
    here = str(Path(opencda_marl.__file__).resolve().parent.parent)
    before = found.get("PYTHONPATH")
    found["PYTHONPATH"] = here if not before else os.pathsep.join((here, before))
    found |= dict.fromkeys(_POOLS, str(cell.threads))
    found |= {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    if slot.cuda is not None:
        # the order of nvidia-smi, not CUDA's own guess at which card is the fastest
        found |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": slot.cuda}
    return found


def said_last(console: Path, begin: int = 0) -> str:
    """The end of what a trainer printed; what stands before byte `begin` was said by another one."""
    try:
        with console.open("rb") as stream:
            stream.seek(max(begin, stream.seek(0, os.SEEK_END) - _TAIL))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def classify(code: int, console: str, *, finished: bool, asked: str | None = None) -> Outcome:
    """What the end of a trainer means.

    Args:
        code: its exit code, or minus the signal.
        console: the end of what it printed.
        finished: does the run folder say that the budget is used up?
        asked: what the launcher wanted: `stop`; or why it ended the trainer (`deadline: …`); None: nothing.
    """
    if finished:
        return Outcome("finished")
    if asked is not None and asked != "stop":
        why, _, told = asked.partition(": ")
        return Outcome(why, told)
    if asked == "stop" and (code in (0, Interrupted.exit_code) or code < 0):
        return Outcome("stopped")
    if code == RECYCLE:
        return Outcome("recycle")
    if code < 0:
        return Outcome("signal", f"killed by signal {-code}{' (out of memory?)' if code == -9 else ''}")
    if code == Interrupted.exit_code:  # what it says then is for a person who would go on with it alone
        return Outcome("signal", "ended from outside, not by the launcher")
    kind = _KINDS.get(code, "error")
    if kind == "error" and _NO_MEMORY.search(console):
        kind = "memory"
    elif kind == "error" and _MPS.search(console):
        kind = "mps"
    if code == 0:
        return Outcome(kind, "the trainer ended well, but its budget is not used up")
    text, fix = _message(console)
    return Outcome(kind, text or f"exit code {code}", fix)


def in_matrix(outcome: Outcome, matrix: Path) -> str | None:
    """The fix of a cell that has failed, where its trainer speaks of a run of its own."""
    if outcome.fix is None or "--resume" not in outcome.fix:
        return outcome.fix
    where = typed(matrix)
    again = f"opencda-marl matrix retry {where}; opencda-marl matrix run {where}"
    for alone in ("start again from the last checkpoint (--resume)", "continue with --resume"):
        fix = outcome.fix.replace(alone, again)
        if fix != outcome.fix:
            return fix
    return outcome.fix


def kind_of(error: OpenCDAError) -> str:
    """The class of failures that an error of ours belongs to."""
    return _KINDS.get(error.exit_code, "error")


def _message(console: str) -> tuple[str | None, str | None]:
    """The last error of a console, and its fix."""
    lines = [line.rstrip() for line in console.splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("error: "):
            fixes = [line.strip().removeprefix("fix: ") for line in lines[index:] if line.strip().startswith("fix: ")]
            return lines[index].removeprefix("error: "), fixes[0] if fixes else None
    filled = [line for line in lines if line.strip()]
    return (filled[-1][:300] if filled else None), None


def forgiven(launch: Launch, kind: str, options: Options) -> int | None:
    """How many failures of this kind there were in a row; None: one more than is forgiven.

    An episode saved in between begins the count anew: a run of a week may lose its simulator every day.
    """
    count = 0
    for attempt in reversed(launch.counted):
        if attempt.get("kind") == kind:
            count += 1
        if attempt.get("saved", 0) > attempt.get("from", 0):
            break
    return count if count <= options.retry(kind) else None


def make_eager(run: Path, said: str) -> None:
    """A run whose CUDA graph could not be captured goes on with eager updates; checkpoints are the same in all forms.

    Raises:
        CheckpointError, StorageError: the folder cannot be read or written.
    """
    if not (run / "run.json").is_file():
        return  # it had not begun: the next one begins eager
    settings = from_run_folder(run, overrides=EAGER)
    with RunFolder.resume(run) as folder:
        facts = read_run(run)
        folder.write_config(to_yaml(settings))
        folder.write_run({**facts, "fallback": {"update_mode": "eager", "why": said}})
        folder.log(f"note: {said}")


class Watch:
    """Whether a trainer still gives signs of life, phase by phase.

    Args:
        run: its run folder.
        pid: the trainer's; a heartbeat of another process is none of it.
        options: deadlines.
        clock: [s]; for tests.
    """

    def __init__(self, run: Path, pid: int, options: Options, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._pid = pid
        self._options = options
        self._clock = clock
        self._sign: object = None
        self._seen = clock()  # when the last sign came
        self._looked = self._seen

    def overdue(self, status: Mapping[str, Any]) -> str | None:
        """What is wrong, or None.

        Args:
            status: status.json as it stands.
        """
        now = self._clock()
        mine = status.get("pid") == self._pid
        phase = str(status.get("phase")) if mine else "starting"
        sign = (phase, status.get("updated") if mine else None, self._children(phase))
        # the launcher itself may have been stopped for a while: then nobody looked
        paused, self._looked = now - self._looked > 10.0, now
        if sign != self._sign or paused:
            self._sign, self._seen = sign, now
        deadline = self._options.deadline(phase if phase in ACTIVE_PHASES else "stopping")
        silent = now - self._seen
        if silent <= deadline:
            return None
        return f"deadline: no sign of life for {silent:.0f} s while {phase} (limit {deadline:g} s)"

    def _children(self, phase: str) -> tuple[float, ...]:
        """While others evaluate for it, their progress is its sign of life."""
        if phase not in ("evaluating", "reporting"):
            return ()
        try:
            files = sorted((self._run / "evaluations").glob("*.progress"))
            return tuple(file.stat().st_mtime for file in files)
        except OSError:
            return ()


def retry_delay(count: int, options: Options) -> float:
    """[s] before the next attempt after so many failures in a row."""
    return float(min(60.0, options.retry_delay * 2.0 ** max(0, count - 1)))
