"""Programs of others, run to their end: never longer than their limit, than this process, or than its wish to stop.

Such a program (a compiler) starts others of its own. They are one group of processes, and end together.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from opencda_marl.core.errors import Interrupted
from opencda_marl.core.speech import plain

__all__ = ["await_true", "run_program", "telling_line"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK = 0.05  # [s] between two looks at it
_LONGEST = 200  # signs of a line

# $1: the program; the others: its arguments. Standard input is a pipe that this process holds: when it ends, this
# process is gone, however it went, and the group ends itself.
_GUARD = """
exec 3<&0 </dev/null
{ read -r _ <&3; kill -s KILL 0; } >/dev/null 2>&1 &
guard=$!
"$@" 3<&- &
wait $!
code=$?
kill -s KILL $guard
wait $guard 2>/dev/null
exit $code
"""


def run_program(command: Sequence[str], *, output: Path, limit: float) -> int:
    """Run a program, with all that it starts.

    A signal that asks this process to stop ends the program at once, and then has the effect that it would have had.

    Args:
        command: the program and its arguments.
        output: the file that takes what it says.
        limit: [s] that it may take.

    Returns:
        its exit code; 128 and the number of the signal that ended it.

    Raises:
        TimeoutError: it took longer.
        Interrupted: this process was asked to stop meanwhile, and somebody here listens for that.
        SystemExit: likewise, and nobody does.
        OSError: no process can be started, or the file not be written.
    """
    with _heard() as came, output.open("wb") as said:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            give_up = time.monotonic() + limit
            while (code := _code(process)) is None:
                if came:
                    raise Interrupted(f"stopped while {command[0]} was at work: nothing is lost")
                if time.monotonic() > give_up:
                    raise TimeoutError(f"{command[0]} did not end within {limit:g} s")
            return code
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def await_true(ready: Callable[[], bool], *, what: str, limit: float) -> bool:
    """Wait for something that another process does; a signal is heard as in `run_program`.

    Args:
        ready: asked several times a second: is it done?
        what: is at work there, for the message.
        limit: [s] that it may take.

    Returns:
        whether it was done in time.

    Raises:
        Interrupted: this process was asked to stop meanwhile, and somebody here listens for that.
        SystemExit: likewise, and nobody does.
    """
    give_up = time.monotonic() + limit
    with _heard() as came:
        while not ready():
            if came:
                raise Interrupted(f"stopped while {what} was at work: nothing is lost")
            if time.monotonic() > give_up:
                return False
            time.sleep(_LOOK)
    return True


def telling_line(text: str) -> str:
    """What a program said, in one line: the first with an error in it, else the first; empty if it was silent."""
    lines = [plain(line.strip()) for line in text.splitlines() if line.strip()]
    found = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return found if len(found) <= _LONGEST else f"{found[:_LONGEST]} …"


def _code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_LOOK)
    except subprocess.TimeoutExpired:
        return None


@contextmanager
def _heard() -> Iterator[list[int]]:
    """Signals that come meanwhile; whoever listens for them hears them too. Elsewhere than in the main thread: none."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def catch(number: int, frame: FrameType | None) -> None:
        came.append(number)
        handler = before[number]
        if not callable(handler):
            raise SystemExit(128 + number)  # what is open is closed on the way
        handler(number, frame)

    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if handler is not None and handler != signal.SIG_IGN:
            before[number] = handler
            signal.signal(number, catch)
    try:
        yield came
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
