"""A simulator in a child process: equal to one in this process, ended in time, leaving nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

import opencda_marl
from opencda_marl.core.errors import BackendMissingError, DeadlineError, SimulatorError
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.spans import Spans
from opencda_marl.core.state import Command, Driver, Schedule
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.simulators.sumo import SumoSimulator

ROADS = load_roads(find_network("intersection"))
SUMO: Callable[[], SumoSimulator] = partial(
    SumoSimulator, ROADS, SimulatorSettings(backend="libsumo"), VehicleSettings(), DemandSettings()
)


def _schedule(seed: int = 3) -> Schedule:
    demand = DemandSettings(rate_vph=500.0, cav_share=0.5)
    return build_schedule(demand, ROADS, episode=2, horizon=30.0, rng=np.random.default_rng(seed))


def _command(simulator: Simulator) -> Command:
    return Command(np.full(simulator.info.slots, 9.0), np.zeros(simulator.info.slots, np.bool_))


@pytest.fixture
def remote() -> Iterator[RemoteSimulator]:
    made = RemoteSimulator(SUMO, deadline=20.0)
    yield made
    made.close()


def _play(simulator: Simulator, seed: int) -> list[tuple[object, ...]]:
    rng, seen = np.random.default_rng(1), []
    state, command = simulator.reset(_schedule(seed), seed), _command(simulator)
    for _ in range(600):
        command.controlled[:] = state.drivers == Driver.CAV
        command.target_speed[:] = rng.uniform(0, 17, len(state.ids))
        state, e = simulator.step(command)
        arrays = (state.ids, state.alive, state.drivers, state.routes, state.values)
        events = (e.ids, e.slots, e.endings, e.partners, e.departed)
        counts = (e.waiting, e.longest_wait, e.commanded, e.overridden, e.reasons, state.step, state.time)
        seen.append((*(a.tobytes() for a in (*arrays, *events)), *counts))
    return seen


def test_equal_to_the_same_simulator_in_this_process(remote: RemoteSimulator) -> None:
    here = SUMO()
    try:
        for seed in (3, 4):
            assert _play(here, seed) == _play(remote, seed)
        assert remote.info == here.info
        assert remote.roads.entry_edge == here.roads.entry_edge
    finally:
        here.close()


def test_two_at_once(remote: RemoteSimulator) -> None:
    """libsumo allows one simulation per process; processes there may be many."""
    other = RemoteSimulator(SUMO, deadline=20.0)
    try:
        one, two = remote.reset(_schedule(), 1), other.reset(_schedule(), 1)
        for _ in range(100):
            one, _ = remote.step(_command(remote))
            two, _ = other.step(_command(other))
            assert np.array_equal(one.values, two.values)
    finally:
        other.close()


def test_a_child_that_is_killed(remote: RemoteSimulator) -> None:
    remote.reset(_schedule(), 1)
    remote.step(_command(remote))
    os.kill(remote.pid or 0, signal.SIGKILL)
    with pytest.raises(SimulatorError, match=r"(?s)killed by SIGKILL.*in episode 2.*--resume"):
        remote.step(_command(remote))
    with pytest.raises(SimulatorError, match="closed"):
        remote.step(_command(remote))


def test_a_child_that_hangs() -> None:
    remote = RemoteSimulator(SUMO, deadline=0.5)
    remote.reset(_schedule(), 1)
    os.kill(remote.pid or 0, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"within 0\.5 s while in episode 2"):
        remote.step(_command(remote))
    assert 0.4 < time.monotonic() - begun < 5.0
    assert not psutil.pid_exists(remote.pid or 0), "a stopped process must not stay"
    remote.close()


def test_closing_a_child_that_hangs() -> None:
    remote = RemoteSimulator(SUMO, deadline=1.0)
    os.kill(remote.pid or 0, signal.SIGKILL)
    remote.close()
    assert not psutil.pid_exists(remote.pid or 0)


def _no_backend() -> Simulator:
    raise BackendMissingError("nothing here", fix="install it")


def _bug() -> Simulator:
    raise ZeroDivisionError("a bug")


def test_errors_of_the_factory_arrive_as_they_are() -> None:
    with pytest.raises(BackendMissingError, match=r"(?s)nothing here.*install it"):
        RemoteSimulator(_no_backend, deadline=1.0)


def test_a_bug_in_the_child_is_not_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SimulatorError, match=r"exit code 1\) while starting"):
        RemoteSimulator(_bug, deadline=1.0)
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_errors_of_a_step_arrive_as_they_are(remote: RemoteSimulator) -> None:
    with pytest.raises(SimulatorError, match="call reset first"):
        remote.step(_command(remote))
    assert not psutil.pid_exists(remote.pid or 0)


def test_signals_to_the_group_are_left_to_the_parent(remote: RemoteSimulator) -> None:
    """Ctrl-C reaches every process of the terminal: the child goes on until it is told to end."""
    remote.reset(_schedule(), 1)
    for sent in (signal.SIGINT, signal.SIGTERM):
        os.kill(remote.pid or 0, sent)
    state, _ = remote.step(_command(remote))
    assert state.step == 1


def test_spans(remote: RemoteSimulator) -> None:
    spans = Spans()
    timed = RemoteSimulator(SUMO, deadline=20.0, spans=spans)
    timed.reset(_schedule(), 1)
    timed.step(_command(timed))
    timed.close()
    assert set(spans.take()) == {"tick", "read"}


_SCRIPT = """
import os, sys, time
sys.path[:0] = {folders!r}
from test_remote import SUMO, RemoteSimulator, _command, _schedule
if __name__ == "__main__":
    remote = RemoteSimulator(SUMO, deadline=20.0)
    remote.reset(_schedule(), 1)
    remote.step(_command(remote))
    print(remote.pid, flush=True)
    {then}
"""


def _shared_files(pid: int) -> list[Path]:
    """Files behind multiprocessing's shared memory that a process made and did not unlink."""
    return [file for folder in ("/dev/shm", tempfile.gettempdir()) for file in Path(folder).glob(f"pym-{pid}-*")]


def _gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("then", ["time.sleep(60)", "os._exit(0)", "sys.exit(0)", "1 / 0"])
def test_the_child_ends_with_its_parent(tmp_path: Path, then: str) -> None:
    """Killed, left without cleaning up, ended without closing, or with an error."""
    folders = [str(Path(__file__).parent), str(Path(opencda_marl.__file__).parents[1])]
    script = tmp_path / "parent.py"
    script.write_text(_SCRIPT.format(folders=folders, then=then))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if "sleep" in then:
            parent.kill()
        parent.wait(20)
    assert _gone(child)
    assert _shared_files(parent.pid) == []


def test_nothing_is_left_behind() -> None:
    me, descriptors = psutil.Process(), []
    for _ in range(2):
        remote = RemoteSimulator(SUMO, deadline=20.0)
        assert _shared_files(me.pid) == [], "the shared file has no name even while it is in use"
        remote.close()
        descriptors.append(me.num_fds())
        assert not psutil.pid_exists(remote.pid or 0)
    assert descriptors[0] == descriptors[1]
