"""Children that never outlive the launcher, and that a later launcher finds again.

`keep` starts a child under a keeper (see keeper_process.py), `find` recognises one that an earlier launcher started.
Linux only: the keepers read /proc and use its rules for orphans.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import part_of, storage_error
from opencda_marl.launch import keeper_process
from opencda_marl.launch.processes import boot_id, group_members, is_alive

__all__ = ["GRACE", "Kept", "find", "keep"]

GRACE = 10.0
"""[s] from TERM to KILL, unless told otherwise."""

_POLL = 0.02  # [s] between two looks while somebody waits
_UNKILLABLE = 20.0  # [s] after KILL: what still lives then hangs in the kernel (a driver, a network drive)


class Kept:
    """A child under a keeper, found by number and start of each. Made by `keep` and `find`.

    Args:
        record: the file that the keeper writes.
        facts: what stood in it when the child began.
        pipes: to the keeper (its end ends the child) and from it; only whoever started the child has them.
        said: what came from it after those facts.
    """

    def __init__(
        self, record: Path, facts: Mapping[str, Any], pipes: tuple[int, int] | None = None, said: bytes = b""
    ) -> None:
        self.record = record
        self.facts = dict(facts)
        self.child_pid: int = facts["pid"]
        self.child_start_time: int = facts["start_time"]
        self._keepers = [(int(pid), int(start)) for pid, start in facts["keepers"]]
        self.pid, self.start_time = self._keepers[0]
        self._pipes = pipes
        self._ours = pipes is not None  # a child of this process: it has to be collected
        self._said = said
        self._code: int | None = None

    @property
    def alive(self) -> bool:
        """Does the child, or anything that it left behind, still live?"""
        return self.poll() is None

    def poll(self) -> int | None:
        """How the child ended: its exit code, or minus the signal; None: it has not, or something of it lives.

        Both keepers dead and the child alive: it is killed here.
        """
        if self._code is None and not self._outer_lives() and not is_alive(*self._keepers[-1]):
            code = self._last_word()
            if code is None:  # both were killed
                left = group_members(self.child_pid, self.child_start_time)
                for process in left:
                    _send(process.pid, signal.SIGKILL)
                code = None if left else -signal.SIGKILL
            if code is not None:
                self._code = code
                self.release()
        return self._code

    def terminate(self) -> None:
        """TERM to the child's group; the keeper kills what is left of it after the grace time. Returns at once."""
        self._tell(signal.SIGTERM)

    def kill(self) -> None:
        """KILL to the child's group and to all below it. Returns at once."""
        if self.poll() is not None:
            return
        for pid, start in self._keepers:
            if is_alive(pid, start):
                _send(pid, signal.SIGCONT)
        self._tell(signal.SIGUSR1)
        for process in group_members(self.child_pid, self.child_start_time):
            _send(process.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, `seconds` at most; like `poll`."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return code

    def stop(self, grace: float = GRACE) -> int:
        """End it: TERM, `grace` seconds (the keeper's own grace time at most), KILL.

        Returns:
            As `poll`.

        Raises:
            OpenCDAError: it lives on: it hangs in the kernel.
        """
        if (code := self.poll()) is not None:
            return code
        self.terminate()
        if (code := self.wait(grace)) is not None:
            return code
        self.kill()
        code = self.wait(_UNKILLABLE)
        if code is None:
            raise OpenCDAError(
                f"process {self.child_pid} does not end, not even killed: it hangs in the kernel",
                fix="look for what it waits for: a GPU driver (dmesg) or a network drive; then try again",
            )
        return code

    def release(self) -> None:
        """Let go of the keeper, as this process's end would: the child ends, unless it is to survive."""
        if self._pipes is not None:
            for pipe in self._pipes:
                os.close(pipe)
            self._pipes = None

    def _outer_lives(self) -> bool:
        if self._ours:
            try:
                pid, _ = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid = self.pid
            self._ours = pid == 0
            return self._ours
        return is_alive(self.pid, self.start_time)

    def _tell(self, number: int) -> None:
        for pid, start in self._keepers:
            if is_alive(pid, start):
                _send(pid, number)
                return

    def _last_word(self) -> int | None:
        """What the keeper said about the end: through the pipe, or in the record."""
        if self._pipes is not None:
            while piece := os.read(self._pipes[1], 4096):  # the keepers are gone: no waiting
                self._said += piece
            for line in self._said.splitlines():
                return int(json.loads(line)["exit"])
        facts = _read(self.record)
        same = (facts.get("pid"), facts.get("start_time")) == (self.child_pid, self.child_start_time)
        return facts["exit"] if same else None


def keep(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    record: Path,
    survive: bool = False,
    grace: float = GRACE,
    facts: Mapping[str, Any] | None = None,
) -> Kept:
    """Start a child in a session and group of its own, under a keeper.

    Args:
        argv: program and arguments; the program is looked for in `env`'s PATH.
        env: its whole environment.
        cwd: where it runs.
        log: what it prints is appended here.
        record: JSON about it: `pid`, `start_time`, `argv`, `exit` (None while it lives), `keepers`, `boot`.
        survive: the launcher's death is not its end.
        grace: [s] from TERM to KILL.
        facts: more JSON values for the record.

    Raises:
        StorageError: log or record cannot be written; nothing was started.
        OpenCDAError: the program cannot be started.
    """
    log, record = log.absolute(), record.absolute()
    request = {
        "argv": list(argv),
        "env": dict(env),
        "cwd": str(cwd.absolute()),
        "log": str(log),
        "record": str(record),
        "survive": survive,
        "grace": grace,
        "facts": dict(facts or {}),
    }
    keeper, pipes = _spawn(log)
    kept = None
    try:
        line, said = _ask(pipes, request)
        if "error" in line:
            raise _refused(line, argv[0], (log, record))
        kept = Kept(record, line, pipes, said)
    finally:
        if kept is None:
            for pipe in pipes:
                os.close(pipe)
            os.waitpid(keeper, 0)
    return kept


def find(record: Path) -> Kept | None:
    """The child of an earlier launcher that `record` tells of, if anything of it still lives on this machine."""
    facts = _read(record)
    if facts.get("boot") != boot_id() or facts.get("exit") is not None or not facts.get("keepers"):
        return None
    kept = Kept(record, facts)
    return kept if kept.alive else None


def _spawn(log: Path) -> tuple[int, tuple[int, int]]:
    """A keeper that waits for its request. Returns: its number, and the pipes to it and from it."""
    theirs, to_keeper = os.pipe()
    from_keeper, said = os.pipe()
    command = [sys.executable, "-I", "-S", keeper_process.__file__]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        keeper = os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs, 0),
                (os.POSIX_SPAWN_DUP2, said, 1),
                (os.POSIX_SPAWN_OPEN, 2, str(log), flags, 0o644),
            ],
            setsid=True,
        )
    except OSError as error:
        os.close(to_keeper)
        os.close(from_keeper)
        raise storage_error(error, log) from error
    finally:
        os.close(theirs)
        os.close(said)
    return keeper, (to_keeper, from_keeper)


def _ask(pipes: tuple[int, int], request: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Hand the request over. Returns: the answer, and what was said after it (a child may end at once)."""
    said = b""
    try:
        rest = memoryview(json.dumps(request).encode() + b"\n")
        while rest:
            rest = rest[os.write(pipes[0], rest) :]
        while b"\n" not in said and (piece := os.read(pipes[1], 1 << 16)):
            said += piece
    except BrokenPipeError:
        said = b""  # it died; what it had to say is in the log
    line, end, rest_said = said.partition(b"\n")
    return dict(json.loads(line)) if end else {"error": "its keeper died while starting"}, rest_said


def _refused(line: Mapping[str, Any], program: str, files: tuple[Path, Path]) -> OpenCDAError:
    for file in files:
        if line.get("file") in (str(file), str(part_of(file))):
            return storage_error(OSError(line["errno"], line["error"]), file)
    what = program if line.get("file") in (None, program) else f"{program} ({line['file']})"
    return OpenCDAError(f"{what} cannot be started: {line['error']}", fix="see that it is there and may be executed")


def _read(record: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(record.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}  # no record, or one of something else: nothing is known


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
