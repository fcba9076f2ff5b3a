"""The on-disk form of a run: one writer, and the functions that read it.

    runs/<name>/  config.yaml       all settings, as resolved
                  run.json          versions, device, backend, modes, threads, git, hashes, the init line
                  status.json       heartbeat: phase, episode, rates, process
                  episodes.jsonl    one line an episode
                  metrics.jsonl     one line an update or held-out evaluation
                  traffic/          trajectories, `episode_N.safetensors`
                  checkpoints/      see core/checkpoint.py
                  log.txt, plots/, tb/

Files are the truth: whoever reads them needs no object of the process that wrote them. Lines and checkpoints
carry the number of the episode, so what lies beyond the checkpoint that a run goes on from can be cut.

Longer than other modules, because the form is written and read here, and nowhere else.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.errors import CheckpointError, Interrupted, OpenCDAError, StorageError
from opencda_marl.core.files import array_bytes, read_regular, typed, write_whole, writing

__all__ = [
    "ACTIVE_PHASES",
    "RunFolder",
    "best_checkpoint",
    "check_run_folder",
    "is_running",
    "progress_file",
    "read_config",
    "read_episodes",
    "read_metrics",
    "read_run",
    "read_status",
    "run_name",
    "typed",
]

ACTIVE_PHASES = ("starting", "compiling", "training", "updating", "evaluating", "reporting")
"""Phases in which a process is at work; the others are finished, interrupted and failed."""

_LOCK = ".lock"
_APPENDING = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe there is an error at once
_HEARTBEAT = 1.0  # [s] between two status files


def run_name(profile: str | None, seed: int, now: float) -> str:
    """A folder's name: when, what, which seed.

    Args:
        profile: the profile's name; its last part is used.
        seed: of the run.
        now: [s] since the epoch.
    """
    what = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(profile or "run").name)
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{what}-s{seed}"


class RunFolder:
    """The writer. It holds a lock as long as it lives; make it with `create` or `resume`.

    Used as a context manager it writes down how the run ended: an exception becomes the phase `failed` (or
    `interrupted`), its message goes to status.json and its traceback to log.txt.
    """

    def __init__(self, path: Path, lock: int, *, keep: int) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints", keep=keep)
        self._lock = lock
        self._status: dict[str, Any] = {}
        self._beaten = -math.inf
        self._streams: dict[str, int] = {}

    @classmethod
    def create(
        cls, out: Path | None, *, root: Path = Path("runs"), profile: str | None = None, seed: int = 0, keep: int = 2
    ) -> Self:
        """A new run folder.

        Args:
            out: exactly this folder; it may exist if it is empty. None: a fresh name under `root`.
            root: where runs live.
            profile: for the name.
            seed: for the name.
            keep: numbered checkpoints to keep.

        Raises:
            StorageError: it cannot be made, or already holds something.
        """
        path = (_fresh(root, run_name(profile, seed, time.time())) if out is None else _given(out)).absolute()
        return cls(path, _locked(path), keep=keep)

    @classmethod
    def resume(cls, path: Path, *, keep: int = 2) -> Self:
        """The folder of an earlier run, to go on with.

        Raises:
            CheckpointError: it is no run folder, or a process is at work in it.
            StorageError: it cannot be written.
        """
        check_run_folder(path)
        return cls(path.absolute(), _locked(path.absolute()), keep=keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if value is not None:
                self._record_failure(value, trace)
        finally:
            self.close()

    def write_config(self, text: str) -> None:
        """config.yaml."""
        write_whole(self.path / "config.yaml", text.encode())

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """run.json."""
        write_whole(self.path / "run.json", json.dumps(_plain(facts), indent=1).encode())

    def beat(self, phase: str, **fields: Any) -> dict[str, Any] | None:
        """status.json, if the phase changed or a second went by.

        Args:
            phase: one of ACTIVE_PHASES, finished, interrupted, failed.
            fields: what to show; they replace earlier ones of the same name.

        Returns:
            What was written, or None.
        """
        now = time.monotonic()
        if phase == self._status.get("phase") and now - self._beaten < _HEARTBEAT:
            return None
        self._beaten = now
        who = {"pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
        self._status = {**self._status, **fields, **who, "phase": phase}
        write_whole(self.path / "status.json", json.dumps(_plain(self._status)).encode(), durable=False)
        return self._status

    def episode(self, line: Mapping[str, Any]) -> None:
        """Append to episodes.jsonl."""
        self._append("episodes.jsonl", line)

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl."""
        self._append("metrics.jsonl", line)

    def log(self, text: str) -> None:
        """Append to log.txt, with the time."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._write("log.txt", f"{stamp}  {text.rstrip()}\n".encode())

    def arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> Path:
        """Write arrays as safetensors, e.g. `traffic/episode_7`.

        Returns:
            The file.
        """
        path = self.path / f"{name}.safetensors"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        write_whole(path, array_bytes(arrays), durable=False)
        return path

    def sync(self) -> None:
        """Wait until the disk has all lines: a checkpoint must not outlive the lines that lead to it.

        Raises:
            StorageError: the disk failed, or somebody deleted a file of lines.
        """
        for name, stream in self._streams.items():
            with writing(self.path / name):
                os.fsync(stream)
                linked = os.fstat(stream).st_nlink
            if linked == 0 and name.endswith(".jsonl"):  # nobody needs log.txt to go on
                raise StorageError(
                    f"{self.path / name} was deleted or replaced while the run was writing it",
                    fix="put it back from a copy, then continue with --resume; or begin a new run",
                )

    def cut(self, episode: int) -> int:
        """Drop everything beyond an episode: lines, trajectories, numbered checkpoints.

        Args:
            episode: the last one to keep.

        Returns:
            How many episode lines were dropped.
        """
        dropped = 0
        for name in ("episodes.jsonl", "metrics.jsonl"):
            path = self.path / name
            if path.exists():
                lines = _lines(path)
                kept = [raw for raw, line in lines if line["episode"] <= episode]
                dropped += len(lines) - len(kept) if name == "episodes.jsonl" else 0
                write_whole(path, b"".join(kept))
        with writing(self.path):
            for entry in (self.path / "traffic").glob("episode_*.safetensors"):
                if int(re.findall(r"\d+", entry.stem)[-1]) > episode:
                    entry.unlink()
        self.checkpoints.cut(episode)
        return dropped

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        for stream in self._streams.values():
            os.close(stream)
        self._streams = {}
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        self._write(name, json.dumps(_plain(line), allow_nan=False).encode() + b"\n")

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        with writing(path):
            if name not in self._streams:
                self._streams[name] = os.open(path, _APPENDING, 0o644)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._streams[name], rest) :]

    def _record_failure(self, error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, OpenCDAError)
        code = error.exit_code if isinstance(error, OpenCDAError) else 1
        phase = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        text = _with_causes(error) if ours else "".join(traceback.format_exception(type(error), error, trace))
        try:
            self.log(f"{phase}: {type(error).__name__}: {text}")
            self.beat(phase, error=f"{type(error).__name__}: {error}", exit_code=code)
        except StorageError:
            # The disk may be the very thing that failed; the first error is the one to show.
            return


def _with_causes(error: BaseException) -> str:
    """An error of ours, and below it, in their own words, those that led to it."""
    lines = [str(error)]
    while (error := error.__cause__) is not None:  # type: ignore[assignment] # ends with None
        lines.append(f"  because: {type(error).__name__}: {error}")
    return "\n".join(lines)


def _fresh(root: Path, name: str) -> Path:
    with _making(root):
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 10_000):
            path = root / (name if attempt == 1 else f"{name}-{attempt}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    raise StorageError(f"{root} holds 10,000 runs named {name}", fix="clear it: opencda-marl runs clean")


@contextmanager
def _making(path: Path) -> Iterator[None]:
    """Like `writing`, for a folder that never was: it is not gone, it cannot be made."""
    try:
        with writing(path):
            yield
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise StorageError(
                f"the folder {path} cannot be made: {error.__cause__.strerror}", fix="choose another folder with --out"
            ) from error.__cause__
        raise


_BEGUN = {_LOCK, "config.yaml", "status.json", ".config.yaml.part", ".status.json.part", ".run.json.part"}


def _given(out: Path) -> Path:
    with _making(out):
        out.mkdir(parents=True, exist_ok=True)
        found = {entry.name for entry in out.iterdir()}
        if found and not (_LOCK in found and found <= _BEGUN):  # a run that was killed before it began is nothing
            raise StorageError(
                f"{out} is not empty", fix="choose another --out, or continue the run that is in it with --resume"
            )
    return out


def _locked(path: Path) -> int:
    """A descriptor that holds the lock; the kernel frees it however the process ends."""
    lock = path / _LOCK
    with writing(lock):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for _ in range(20):  # a reader that just looks whether it is locked holds it for a moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
            continue
        with writing(lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return descriptor
    owner = os.pread(descriptor, 200, 0).decode(errors="replace").split()
    os.close(descriptor)
    who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
    raise CheckpointError(f"{path} is in use by {who}", fix="wait for it or stop it, then try again")


def progress_file(path: Path, name: str) -> Path:
    """Where a child that evaluates for the run `path` writes how many episodes it has driven."""
    return path / "evaluations" / f"{name}.progress"


def is_running(path: Path) -> bool:
    """Does a process hold the run's lock?"""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_run_folder(path: Path) -> None:
    """Raise unless `path` looks like a run folder.

    Raises:
        CheckpointError: it is missing, or something else.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no run folder {path}", fix="see what there is: opencda-marl runs list")
    for name in ("config.yaml", "run.json"):
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path} is not a run folder: it has no {name}", fix="see what there is: opencda-marl runs list"
            )


def best_checkpoint(path: Path) -> Path:
    """The checkpoint of a run that a person most likely wants: `best`, else `latest`.

    Raises:
        CheckpointError: the run has none.
    """
    checkpoints = Checkpoints(path / "checkpoints")
    found = checkpoints.find("best") or checkpoints.find("latest")
    if found is None:
        raise CheckpointError(f"{path} has no checkpoint yet", fix=f"train on: opencda-marl run --resume {typed(path)}")
    return found


def read_config(path: Path) -> str:
    """config.yaml's text."""
    check_run_folder(path)
    return _read(path / "config.yaml").decode()


def read_run(path: Path) -> dict[str, Any]:
    """run.json."""
    check_run_folder(path)
    return _object(path / "run.json")


def read_status(path: Path) -> dict[str, Any]:
    """status.json, with the phase `died` where a process should be at work and none is; empty: none was written."""
    file = path / "status.json"
    status = _object(file) if file.exists() else {}
    if status.get("phase") in ACTIVE_PHASES and not is_running(path):
        status["phase"] = "died"
    return status


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """episodes.jsonl, without a last line that was cut short."""
    return [line for _, line in _lines(path / "episodes.jsonl")]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, likewise."""
    return [line for _, line in _lines(path / "metrics.jsonl")]


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(_read(path)))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is broken: {error}") from error


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    found = []
    for number, raw in enumerate((_read(path) if path.exists() else b"").splitlines(keepends=True), start=1):
        if not raw.endswith(b"\n"):  # the writer was killed in the middle of it
            break
        try:
            line = json.loads(raw)
            line["episode"] += 0
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}, line {number}: not a line of a run ({error})") from error
        found.append((raw, line))
    return found


def _plain(value: Any) -> Any:
    """JSON values only; what is not finite is absent (None)."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    raise TypeError(f"{value!r} cannot stand in a run folder")
