"""Real processes, and nothing left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from opencda_marl.launch.processes import descendants, is_alive


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a test leaves running is ended, and is its failure."""
    before = {process.pid for process in descendants(os.getpid())}
    yield
    left = [process for process in descendants(os.getpid()) if process.pid not in before]
    deadline = time.monotonic() + 20.0
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if is_alive(process.pid, process.start_time)]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    assert not left
