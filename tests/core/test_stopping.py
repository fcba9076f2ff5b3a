"""The first signal is a wish, the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from opencda_marl.core.stopping import StopRequest

_NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", _NUMBERS)
def test_one_is_noted_and_the_handlers_come_back(number: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.requested()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("second", _NUMBERS)
@pytest.mark.parametrize("first", _NUMBERS)
def test_two_end_at_once(first: int, second: int) -> None:
    script = (
        "import time; from opencda_marl.core.stopping import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop.requested(): time.sleep(0.01)\n"
        "    print('asked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(second)
    assert process.wait(5) == -second
    process.stdout.close()


def test_another_thread_can_only_ask() -> None:
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            stop.ask()
            seen.append(stop.requested())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_lost_terminal_asks_as_often_as_it_likes_and_nohup_is_obeyed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with StopRequest() as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.01)
            assert stop.requested()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGHUP, before)
