"""Programs of others: ended with all that they have started by a limit, by a signal, and by our own death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from opencda_marl.core.errors import Interrupted
from opencda_marl.core.programs import await_true, run_program, telling_line
from opencda_marl.core.stopping import StopRequest

HANG = ["sh", "-c", "sleep {} & sleep {}; wait"]  # a child in the background, one in front
RUN = """
import signal
import sys
from pathlib import Path
from opencda_marl.core.programs import run_program
from opencda_marl.core.scratch import scratch_folder
from opencda_marl.core.stopping import StopRequest

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background inherits that it is ignored
with StopRequest() if sys.argv[2] == "listens" else scratch_folder(), scratch_folder("build") as folder:
    run_program(["sh", "-c", sys.argv[1]], output=Path(folder) / "said", limit=60.0)
"""


def hang(seconds: float) -> list[str]:
    """A program that can be found by how long it sleeps."""
    return [part.format(seconds, seconds) for part in HANG]


def sleepers(seconds: float) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline() == ["sleep", str(seconds)] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def awaited(seconds: float, count: int) -> bool:
    """Are there so many of them within ten seconds?"""
    give_up = time.monotonic() + 10.0
    while len(sleepers(seconds)) != count:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def test_what_it_says_and_how_it_ends(tmp_path: Path) -> None:
    command = ["sh", "-c", 'echo "$1"; echo wrong >&2; cat; exit 3', "sh", "a  b"]
    assert run_program(command, output=tmp_path / "said", limit=20.0) == 3
    assert (tmp_path / "said").read_text() == "a  b\nwrong\n", "its standard input is empty"
    assert run_program(["true"], output=tmp_path / "said", limit=20.0) == 0
    assert run_program(["sh", "-c", "kill -9 $$"], output=tmp_path / "said", limit=20.0) == 128 + 9


def test_one_that_hangs_ends_at_its_limit_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"sh did not end within 0\.5 s"):
        run_program(hang(41.25), output=tmp_path / "said", limit=0.5)
    assert awaited(41.25, 0)


@pytest.mark.parametrize(("number", "listens"), [(15, "listens"), (2, "listens"), (15, "not"), (2, "not"), (9, "not")])
def test_a_signal_ends_it_with_its_children_and_leaves_no_folder(tmp_path: Path, number: int, listens: str) -> None:
    seconds = 42.0 + number / 64 + (listens == "not") / 128  # of its own in each case
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, hang(seconds)[2], listens], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        assert awaited(seconds, 2)
        process.send_signal(number)
        code = process.wait(60.0)  # on a busy machine
    finally:
        process.kill()
        process.wait()
    assert awaited(seconds, 0)
    assert (
        code
        == {("listens", 15): 1, ("listens", 2): 1, ("not", 15): 128 + 15, ("not", 2): -2, ("not", 9): -9}[
            listens, number
        ]
    )
    left = list(tmp_path.iterdir())
    assert bool(left) == (number == 9), left  # a later process sweeps what a killed one has left: see test_scratch


def test_whoever_listens_for_the_signal_hears_it(tmp_path: Path) -> None:
    with StopRequest() as stop:
        ask = ["sh", "-c", f"sleep 0.2; kill -TERM {os.getpid()}; sleep 43.5"]
        with pytest.raises(Interrupted, match="stopped while sh was at work"):
            run_program(ask, output=tmp_path / "said", limit=20.0)
        assert stop.requested()
    assert awaited(43.5, 0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_process_is_awaited_until_a_signal_or_its_limit() -> None:
    looks = iter([False, False, True])
    assert await_true(lambda: next(looks), what="the other one", limit=20.0)
    assert not await_true(lambda: False, what="the other one", limit=0.1)
    with StopRequest() as stop:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted, match="stopped while the other one was at work"):
            await_true(lambda: False, what="the other one", limit=20.0)
        assert stop.requested()


def test_the_line_that_tells() -> None:
    said = (
        "In file included from a.cpp:1:\n\na.cpp:3:1: \x1b[31merror:\x1b[0m 'x' was not declared\na.cpp:4: error: too\n"
    )
    assert telling_line(said) == "a.cpp:3:1: \\x1b[31merror:\\x1b[0m 'x' was not declared"
    assert telling_line("\n  no license \nbye\n") == "no license"
    assert telling_line(" \n") == ""
    assert telling_line("e" * 999) == "e" * 200 + " …"
