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


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One stand-in for all tests of a module that leave it sound."""
    with Running() as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Running:
    """It, with an episode, settings and a map as at its start; its numbers of episodes and counters go on."""
    with Raw(shared.port) as client:
        client.done("load_new_episode", "StandIn", True, 65535)
    return shared


@pytest.fixture
def raw(server: Running) -> Iterator[Raw]:
    """A connection to it that speaks the bare protocol."""
    with Raw(server.port) as client:
        yield client


@pytest.fixture
def new_server() -> Iterator[Running]:
    """One of the test's own."""
    with Running() as running:
        yield running


@pytest.fixture
def new_raw(new_server: Running) -> Iterator[Raw]:
    """A connection to that one."""
    with Raw(new_server.port) as client:
        yield client
