"""The on-disk form of a matrix: one launcher writes, everybody reads.

    <matrix>/  matrix.json       the cells, and what was asked for; written first
               .lock             held by the launcher that is at work, with its number
               launcher.json     heartbeat: phase, slots, rates
               launcher.jsonl    what happened, a line an event
               control/          wishes of other processes: stop, kill, drain, retry-<cell>
               cells/<id>/       run folder of a cell, as `opencda-marl run --out` makes it
               launches/<id>/    <profile>.yaml    the cell's settings, as resolved when the matrix was made
                                 launch.json       its attempts
                                 trainer.json      the process, as its keeper tells it
                                 console.log       what it printed
               slots/slot_<k>/   a server: server.json, server.log
               claims/           which launcher has which cell (launch/leases.py)
               runners/<name>/   a launcher that an engine has placed: .lock, launcher.json, launcher.jsonl and
                                 control/ of its own, console.log, and runner.json, as its keeper tells it

Files are the truth. Whether a cell is done stands in its run folder, and nowhere else.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from opencda_marl.config import BUDGETS, to_yaml
from opencda_marl.config_yaml import parse_value
from opencda_marl.core.budget import Budget
from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.core.files import typed, write_whole, writing
from opencda_marl.launch.cells import Cell
from opencda_marl.launch.plan import Options, options_from
from opencda_marl.settings.run import RunSettings

__all__ = ["Launch", "Matrix", "MatrixFolder", "Writer", "is_done", "read_json", "saved_episodes", "with_budgets"]

_VERSION = 1
_LOCK = ".lock"
_ATTEMPTS = 50  # remembered of a cell


@dataclass(frozen=True, slots=True)
class Matrix:
    """matrix.json."""

    name: str
    cells: tuple[Cell, ...]
    options: Options
    request: str | None = None  # fingerprint of what the cells were made from
    created: float = 0.0  # [s] since the epoch

    def record(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "version": _VERSION,
            "name": self.name,
            "request": self.request,
            "created": self.created,
            "options": self.options.record(),
            "cells": [asdict(cell) for cell in self.cells],
        }


@dataclass(slots=True)
class Launch:
    """launch.json: what became of a cell, attempt by attempt."""

    state: str = "waiting"  # waiting, running, retrying, stopped, finished, failed
    attempts: list[dict[str, Any]] = field(default_factory=list)
    made: int = 0  # attempts, also those that are forgotten
    fresh: int = 0  # attempts before this one do not count for retries
    error: str | None = None
    failure: str | None = None  # its class
    overrides: list[str] = field(default_factory=list)  # beside the cell's own, e.g. eager after a failed capture
    notes: list[str] = field(default_factory=list)

    @property
    def counted(self) -> list[dict[str, Any]]:
        """Attempts since the last `retry`."""
        return [attempt for attempt in self.attempts if attempt["number"] > self.fresh]

    def forgive(self) -> None:
        """Failures so far count no more."""
        self.state, self.fresh, self.error, self.failure = "waiting", self.made, None, None


class MatrixFolder:
    """Paths of a matrix, and reading what lies there."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def run(self, cell: str) -> Path:
        """The run folder of a cell."""
        return self.path / "cells" / cell

    def launch(self, cell: str) -> Path:
        """What the launcher knows of a cell."""
        return self.path / "launches" / cell

    def slot(self, index: int) -> Path:
        """The folder of a slot's server."""
        return self.path / "slots" / f"slot_{index}"

    @property
    def exists(self) -> bool:
        """Is it a matrix?"""
        return (self.path / "matrix.json").is_file()

    def read(self) -> Matrix:
        """matrix.json.

        Raises:
            CheckpointError: it is missing or broken.
        """
        file = self.path / "matrix.json"
        if not file.is_file():
            raise CheckpointError(
                f"{typed(self.path)} is no matrix: it has no matrix.json",
                fix=f"make one: opencda-marl matrix run {typed(self.path)} --profiles PROFILE --seeds 0:5",
            )
        try:
            found = json.loads(file.read_bytes())
            if found["version"] > _VERSION:
                raise CheckpointError(f"{file} is of a newer version of this program", fix="update opencda-marl")
            cells = tuple(Cell.read(values) for values in found["cells"])
            options = options_from(found["options"], {})
            return Matrix(found["name"], cells, options, found["request"], found["created"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} is broken: {error}", fix="type the command that made it again") from error

    def read_launch(self, cell: str) -> Launch:
        """launch.json; one that is missing or broken is that of a cell that never ran."""
        found = read_json(self.launch(cell) / "launch.json")
        try:
            return Launch(**found)
        except TypeError:
            return Launch()

    def status(self, cell: str) -> dict[str, Any]:
        """The run's status.json as it stands; empty: there is none."""
        return read_json(self.run(cell) / "status.json")

    def owner(self) -> int | None:
        """The launcher that is at work here; None: there is none."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            words = os.pread(descriptor, 100, 0).split()  # empty for a moment after it was locked
            return int(words[0]) if words and words[0].isdigit() else 0
        finally:
            os.close(descriptor)
        return None

    def runner(self, name: str) -> Path:
        """What a launcher that an engine has placed writes about itself."""
        return self.path / "runners" / name

    def runners(self) -> list[str]:
        """Names of all that were ever placed."""
        try:
            return sorted(entry.name for entry in (self.path / "runners").iterdir() if entry.is_dir())
        except FileNotFoundError:
            return []

    def ask(self, wish: str, runner: str | None = None) -> None:
        """Leave a wish for the launcher, or for one that an engine has placed: stop, kill, drain, retry-<cell>.

        Raises:
            StorageError: it cannot be written.
        """
        folder = (self.path if runner is None else self.runner(runner)) / "control"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / wish, b"", durable=False)


class Writer(MatrixFolder):
    """A launcher's hold on a matrix, or on its own part of it: it has the lock until `close`.

    Args:
        path: of the matrix.
        runner: one that an engine has placed writes its heartbeats and events below `runners/`; None: the one process
            that may change the matrix.

    Raises:
        CheckpointError: another one has it.
        StorageError: the folder cannot be written.
    """

    def __init__(self, path: Path, runner: str | None = None) -> None:
        super().__init__(path)
        self.own = self.path if runner is None else self.runner(runner)
        with writing(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._events: int | None = None
        if not self._locked():
            raise self._in_use()
        with writing(self.own / _LOCK):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        for descriptor in (self._lock, self._events):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._lock, self._events = -1, None

    def write(self, matrix: Matrix) -> None:
        """matrix.json."""
        write_whole(self.path / "matrix.json", json.dumps(matrix.record(), indent=1).encode())

    def write_settings(self, cells: Iterable[tuple[Cell, RunSettings]]) -> None:
        """The resolved settings of cells; those that are there stay as they are, for they have the same hash."""
        for cell, settings in cells:
            file = self.settings_file(cell)
            if not file.is_file():
                with writing(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, to_yaml(settings).encode(), durable=False)

    def settings_file(self, cell: Cell) -> Path:
        """Named as its profile below a config root of the cell's own."""
        return self.launch(cell.id) / f"{cell.profile}.yaml"

    def write_launch(self, cell: str, launch: Launch) -> None:
        """launch.json."""
        launch.attempts = launch.attempts[-_ATTEMPTS:]
        with writing(self.launch(cell)):
            self.launch(cell).mkdir(parents=True, exist_ok=True)
        write_whole(self.launch(cell) / "launch.json", json.dumps(asdict(launch), indent=1).encode(), durable=False)

    def forgive(self, cell: str) -> None:
        """A failed cell may be tried again, as if nothing had been tried."""
        launch = self.read_launch(cell)
        launch.forgive()
        self.write_launch(cell, launch)

    @property
    def heartbeat_file(self) -> Path:
        """launcher.json."""
        return self.own / "launcher.json"

    def heartbeat(self, facts: Mapping[str, Any]) -> None:
        """launcher.json."""
        told = {**facts, "pid": os.getpid(), "host": socket.gethostname(), "updated": time.time()}
        write_whole(self.heartbeat_file, json.dumps(told).encode(), durable=False)

    def event(self, kind: str, **facts: Any) -> None:
        """A line of launcher.jsonl."""
        line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts}).encode() + b"\n"
        with writing(self.own / "launcher.jsonl"):
            if self._events is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._events = os.open(self.own / "launcher.jsonl", flags, 0o644)
            os.write(self._events, line)

    def wishes(self) -> list[str]:
        """What others asked for since; each is told once."""
        try:
            found = sorted(entry.name for entry in (self.own / "control").iterdir() if entry.name[0] != ".")
        except FileNotFoundError:
            return []
        for name in found:
            (self.own / "control" / name).unlink(missing_ok=True)
        return found

    def _locked(self) -> bool:
        for _ in range(20):  # a reader that just looks whether it is locked holds it for a moment
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            return True
        return False

    def _in_use(self) -> CheckpointError:
        owner = os.pread(self._lock, 200, 0).decode(errors="replace").split()
        self.close()
        who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
        name = read_json(self.path / "matrix.json").get("name", self.path.name)
        return CheckpointError(
            f"the matrix {name} in {typed(self.path)} is being run by {who}",
            fix=f"watch it: opencda-marl matrix status {typed(self.path)}; or end it: opencda-marl matrix stop "
            f"{typed(self.path)}",
        )


def read_json(file: Path) -> dict[str, Any]:
    """An object; empty where there is none that can be read."""
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def saved_episodes(run: Path) -> int:
    """Episodes of the checkpoint that a run goes on from; 0: it has none."""
    try:
        name = os.readlink(run / "checkpoints" / "latest")
    except OSError:
        return 0
    number = name.rpartition("_")[2]
    return int(number) if number.isdigit() else 0


def is_done(cell: Cell, status: Mapping[str, Any]) -> bool:
    """Is a cell's budget used up? Its status.json says so, whoever ran it."""
    if status.get("phase") != "finished":
        return False
    done = (status.get("episodes"), status.get("env_steps"), status.get("training_s"))
    if any(not isinstance(value, int | float) for value in done):
        return False
    episodes, steps, minutes = (cell.budgets[key] for key in BUDGETS)
    budget = Budget(None if episodes is None else int(episodes), None if steps is None else int(steps), minutes)
    return budget.used(float(done[0] or 0), int(done[1] or 0), float(done[2] or 0.0)) >= 1.0


def with_budgets(cells: Sequence[Cell], overrides: Sequence[str]) -> tuple[Cell, ...]:
    """The same cells with other budgets, `max_episodes=20`.

    Raises:
        ConfigError: something else is given, or a value that no budget takes.
    """
    wanted: dict[str, float | None] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if key not in BUDGETS:
            raise ConfigError(
                f"--set {text}: only budgets can be changed without naming the cells again",
                fix=f"one of {', '.join(BUDGETS)}; or give --profiles and --seeds too",
            )
        number = parse_value(value, f"{key}=")
        whole = isinstance(number, int) or (key == "max_minutes" and isinstance(number, float))
        if number is not None and (isinstance(number, bool) or not whole or number <= 0):
            raise ConfigError(f"--set {text}: {key} is a number above 0", fix=f"e.g. --set {key}=20")
        wanted[key] = number
    changed = tuple(replace(cell, budgets={**cell.budgets, **wanted}) for cell in cells)
    if any(all(value is None for value in cell.budgets.values()) for cell in changed):
        raise ConfigError("a cell would have no budget and never end", fix=f"set one of {', '.join(BUDGETS)}")
    return changed
