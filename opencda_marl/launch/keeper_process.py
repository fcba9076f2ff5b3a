"""The keeper: a small process between the launcher and a child, so that nothing outlives the launcher.

    launcher ── pipe ──> outer keeper ── pipe ──> inner keeper ──> child, a session and group of its own ──> …

The request, one line of JSON, comes through the pipe on standard input; the pipe's end is the launcher's end, however
it went. Both keepers adopt what is orphaned below them, so each of them alone can find and end everything:

- the launcher dies: the inner keeper sees the pipe end, sends TERM to the group, waits, kills all below it;
- the outer keeper dies: the inner one sees the end of the pipe between them, and does the same;
- the inner keeper dies: the outer one adopts what was below it, and does the same;
- the child dies (a wrapper, say) and leaves something behind: the inner keeper ends that, too.

SIGTERM to the outer keeper ends the group, SIGUSR1 kills it at once. Run with `-I -S` and importing next to nothing,
a keeper starts in some 20 ms. How the child ended is said twice: on standard output for the launcher that started
it, and in a file for the one that comes after it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

if __name__ == "__main__":  # -I leaves only the standard library; last, so that nothing here can stand in for it
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from opencda_marl.launch.processes import Process, boot_id, descendants, read_process

__all__ = ["main"]

_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_KILL = signal.SIGUSR1
_HEARD = (*_END, _KILL, signal.SIGCHLD)
_POLL = 0.05  # [s] between two looks at what is being ended
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Read the request, keep the child, exit as it did (128 + n after signal n)."""
    request = _request()
    os.closerange(3, 1 << 16)  # whatever the launcher's own parent left open is none of ours
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    lifeline, ours = os.pipe()
    # A signal that arrives between a fork and the handlers of the new process would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    inner = os.fork()
    if inner == 0:
        os.close(ours)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        os._exit(_Inner(request, lifeline).run())
    os.close(lifeline)
    os._exit(_outer(request, inner))


def _request() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:  # the launcher died while it asked
            os._exit(1)
        line += piece
    return dict(json.loads(line))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


class _Ear:
    """Signals and the ends of pipes, waited for together."""

    def __init__(self, *pipes: int) -> None:
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _HEARD:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        self._poll = select.poll()
        self._pipes = set(pipes)
        for pipe in (self._woken, *pipes):
            self._poll.register(pipe, select.POLLIN)

    def wait(self, seconds: float | None) -> tuple[set[int], bool]:
        """The signals that came, and whether a pipe has ended."""
        ready = {pipe for pipe, _ in self._poll.poll(None if seconds is None else max(0, round(1000 * seconds)))}
        heard = set(os.read(self._woken, 4096)) if self._woken in ready else set()
        ended = {pipe for pipe in ready & self._pipes if not os.read(pipe, 4096)}
        for pipe in ended:
            self._poll.unregister(pipe)
        self._pipes -= ended
        return heard, bool(ended)


class _Inner:
    """The keeper that has the child. It works until nothing below it lives."""

    def __init__(self, request: dict[str, Any], lifeline: int) -> None:
        self._request = request
        self._lifeline = lifeline
        self._deadline: float | None = None  # [s] on the monotonic clock: when TERM has had its time
        self._sweeping = False

    def run(self) -> int:
        # --keep-carla: the launcher's end, on standard input, is not ours; that of the outer keeper is
        ear = _Ear(self._lifeline) if self._request["survive"] else _Ear(self._lifeline, 0)
        try:
            child = self._start()
        except OSError as error:
            _say({"errno": error.errno, "error": error.strerror or str(error), "file": error.filename})
            return 1
        while True:
            heard, ended = ear.wait(None if self._deadline is None else _POLL)
            if ended or heard & _END:
                self._end(child)
            if _KILL in heard:
                self._end(child, grace=0.0)
            gone = _collect(child)
            if gone is not None:
                left = descendants(os.getpid())
                if not left:
                    break
                self._end_rest(left)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                _kill_all()
        _collect_all()  # only now: while the child is not collected its number stands for its group alone
        _finish(self._request, gone)
        return _as_exit_code(gone)

    def _start(self) -> int:
        """Start the child, write the record, and only then let it become its program."""
        request = self._request
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        gate, open_gate = os.pipe()
        failure, fail = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        child = os.fork()
        if child == 0:
            os.close(open_gate)
            os.close(failure)
            _become(request, log, gate, fail)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        for pipe in (gate, fail, log):
            os.close(pipe)
        try:
            facts = self._record(child)
            os.write(open_gate, b"go")
        finally:
            os.close(open_gate)  # without "go" the child leaves
        refused = b""
        while piece := os.read(failure, 4096):
            refused += piece
        os.close(failure)
        if refused:
            os.waitpid(child, 0)
            raise OSError(*json.loads(refused))
        _say(facts)
        return child

    def _record(self, child: int) -> dict[str, Any]:
        request = self._request
        request["record_facts"] = facts = {
            **request["facts"],
            "boot": boot_id(),
            "pid": child,
            "start_time": _start_time(child),
            "keepers": [[pid, _start_time(pid)] for pid in (os.getppid(), os.getpid())],
            "argv": request["argv"],
            "survive": request["survive"],
            "exit": None,
        }
        _write(request["record"], facts)
        return facts

    def _end(self, child: int, grace: float | None = None) -> None:
        """TERM, once; and a deadline for it, which can only come closer."""
        if self._deadline is None and grace is None:
            os.killpg(child, signal.SIGTERM)
            os.killpg(child, signal.SIGCONT)  # a stopped process hears TERM only when it goes on
        deadline = time.monotonic() + (self._request["grace"] if grace is None else grace)
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def _end_rest(self, left: list[Process]) -> None:
        """What a dead child left behind, in its group or out of it."""
        if not self._sweeping:
            self._sweeping = True
            _terminate(left)
            self._deadline = self._deadline or time.monotonic() + self._request["grace"]


def _outer(request: dict[str, Any], inner: int) -> int:
    """Wait for the inner keeper; if it was killed, end what it had."""
    ear = _Ear()
    deadline: float | None = None
    while True:
        heard, _ = ear.wait(None if deadline is None else _POLL)
        gone = _collect(inner)
        if gone is None:
            for number in heard - {signal.SIGCHLD}:
                os.kill(inner, _KILL if number == _KILL else signal.SIGTERM)
            continue
        below = descendants(os.getpid())
        if not below:
            break
        if deadline is None:
            deadline = time.monotonic() + request["grace"]
            _terminate(below)
        if time.monotonic() >= deadline or _KILL in heard:
            deadline = 0.0
            _kill_all()
    _collect_all()
    if gone < 0:
        _finish(request, -signal.SIGKILL)
    return _as_exit_code(gone)


def _become(request: dict[str, Any], log: int, gate: int, fail: int) -> None:
    """In the child: a session of its own, standard streams, the signals as usual; then the program. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*_HEARD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the last resort, for the child alone: both keepers killed at once
        if os.read(gate, 2) != b"go":
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(fail, json.dumps([error.errno, error.strerror, error.filename or request["argv"][0]]).encode())
    os._exit(127)


def _collect(child: int) -> int | None:
    """Collect dead orphans, but not `child`: how that ended (negative: by a signal), None: it lives."""
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            break
        if found.si_pid == child:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        os.waitpid(found.si_pid, 0)
    return None


def _collect_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    except ChildProcessError:
        return


def _terminate(processes: list[Process]) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):
        for process in processes:
            _send(process.pid, number)


def _kill_all() -> None:
    for process in descendants(os.getpid()):
        _send(process.pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _as_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _start_time(pid: int) -> int:
    process = read_process(pid)
    return 0 if process is None else process.start_time


def _finish(request: dict[str, Any], code: int) -> None:
    facts = request.get("record_facts")
    if facts is None:  # the outer keeper: the inner one has written it
        try:
            with open(request["record"], "rb") as file:
                facts = dict(json.load(file))
        except (OSError, ValueError):
            facts = {}
    try:
        _write(request["record"], {**facts, "exit": code})
    except OSError:
        sys.stderr.write(f"keeper: {request['record']} could not be written; the child ended with {code}\n")
    _say({"exit": code})


def _write(path: str, facts: dict[str, Any]) -> None:
    """Whole or not at all."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.part")
    with open(part, "wb") as file:
        file.write(json.dumps(facts).encode())
    os.replace(part, path)


def _say(facts: dict[str, Any]) -> None:
    """To the launcher, if there still is one."""
    try:
        os.write(1, json.dumps(facts).encode() + b"\n")
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
