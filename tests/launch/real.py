"""What tests with real processes wait and look for."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from opencda_marl.launch.processes import Process, is_alive

PATIENCE = 60.0  # [s] for what takes milliseconds on an idle machine


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for it; fail when it does not come."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def all_gone(processes: list[Process]) -> bool:
    return not any(is_alive(process.pid, process.start_time) for process in processes)


def free_ports(count: int = 3) -> int:
    """The first of `count` neighbouring ports that nobody has."""
    # Below the range from which the system takes ports by itself; workers side by side begin far from each other.
    for first in range(10_000 + os.getpid() % 22 * 1_000, 32_000, 10):
        taken = []
        try:
            for port in range(first, first + count):
                taken.append(socket.socket())
                taken[-1].bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
        return first
    raise AssertionError("no free ports")
