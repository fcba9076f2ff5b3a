"""Real processes, and nothing left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from opencda_marl.launch.processes import descendants, is_alive
from tests.standin.raw import Raw, Running


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever a test leaves running is ended, and is its failure."""
    before = {process.pid for process in descendants(os.getpid())}
    yield
    left = [one for one in descendants(os.getpid()) if one.pid not in before and is_alive(one.pid, one.start_time)]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    assert not left


@pytest.fixture
def server() -> Iterator[Running]:
    """A stand-in without faults."""
    with Running() as running:
        yield running


@pytest.fixture
def raw(server: Running) -> Iterator[Raw]:
    """A connection to it that speaks the bare protocol."""
    with Raw(server.port) as client:
        yield client
