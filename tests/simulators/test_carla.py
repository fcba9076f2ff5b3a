"""The CARLA backend on the real client and the stand-in (a test double): who is refused, what is sent, what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("carla")

import opencda_marl
from opencda_marl.core.errors import (
    BackendMissingError,
    ConfigError,
    DeadlineError,
    RecycleError,
    SimulatorError,
)
from opencda_marl.core.roads import Movement
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Command, Driver, Ending, Events, Schedule, TrafficState, vehicle_id
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.traffic import DemandSettings, ScenarioSettings, VehicleSettings
from opencda_marl.simulators import carla_session
from opencda_marl.simulators.carla import CarlaSimulator
from opencda_marl.simulators.carla_map import read_map
from opencda_marl.simulators.carla_session import Session, check_client
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.simulators.server_memory import server_memory
from opencda_marl.standin import StandIn
from tests.standin.raw import Raw

ROADS = load_roads(find_network("intersection"))
XODR = read_map(ScenarioSettings(), ROADS.network)
DT = 0.05
EASTWARD = int(np.flatnonzero((ROADS.arm == 3) & (ROADS.movement == Movement.STRAIGHT))[0])
SOUTHWARD = int(np.flatnonzero((ROADS.arm == 0) & (ROADS.movement == Movement.STRAIGHT))[0])


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with StandIn() as made:
        yield made


def _factory(port: int, **changes: Any) -> Callable[[], CarlaSimulator]:
    settings = replace(CarlaSettings(port=port, tick_timeout=5.0), **changes)
    return partial(CarlaSimulator, ROADS, XODR, settings, VehicleSettings(), DemandSettings(), DT)


@contextmanager
def _simulator(port: int, **changes: Any) -> Iterator[CarlaSimulator]:
    with closing(_factory(port, **changes)()) as made:
        yield made


def _schedule(*vehicles: tuple[float, int], episode: int = 1) -> Schedule:
    count = len(vehicles)
    return Schedule(
        episode=episode,
        rate_vph=0.0,
        ids=np.array([vehicle_id(episode, i) for i in range(count)], np.int64),
        times=np.array([v[0] for v in vehicles]),
        routes=np.array([v[1] for v in vehicles], np.int16),
        speed_factors=np.ones(count),
        drivers=np.full(count, int(Driver.CAV), np.int8),
    )


def _everywhere(episode: int = 1, waves: int = 1) -> Schedule:
    """One vehicle on each route, every four seconds."""
    return _schedule(*((4.0 * wave, route) for wave in range(waves) for route in range(ROADS.routes)), episode=episode)


def _drive(simulator: Simulator, steps: int, speed: float = 8.0) -> tuple[TrafficState, list[Events]]:
    """Go on with the episode."""
    command = Command(np.full(simulator.info.slots, speed), np.ones(simulator.info.slots, np.bool_))
    events = []
    for _ in range(steps):
        state, event = simulator.step(command)
        events.append(event)
    return state, events


def _counters(server: StandIn) -> dict[str, Any]:
    with Raw(server.port) as client:
        return dict(client.value("standin_counters"))


# -------------------------------------------------------------------- who is refused


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _service(answer: bytes | None) -> Iterator[int]:
    """Something on a port: says `answer` to whatever comes, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                held.append(connection)
                if answer is not None:
                    connection.recv(64)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()
    thread.join(5)


def _refused(port: int, **changes: Any) -> Exception:
    settings = replace(CarlaSettings(port=port, connect_timeout=0.5, tick_timeout=1.0), **changes)
    with pytest.raises((SimulatorError, ConfigError)) as caught:
        Session(settings, XODR, DT).close()
    return caught.value


def test_nobody_there() -> None:
    port = _free_port()
    error = _refused(port)
    assert f"there is no server on 127.0.0.1:{port}" in str(error)
    assert "carla.host: 'no such host' has no IPv4 address" in str(_refused(port, host="no such host"))
    assert f"CarlaUE4.sh -carla-rpc-port={port} " in str(error)
    assert f"opencda-marl carla-standin --rpc-port {port}" in str(error)


def test_something_else_there() -> None:
    with _service(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert "is not a CARLA server" in str(_refused(port))
    with _service(None) as port:
        silent = _refused(port)
        assert isinstance(silent, DeadlineError)
        assert "did not answer within 0.5 s" in str(silent)


def test_the_port_for_streaming_is_not_the_one(server: StandIn) -> None:
    assert isinstance(_refused(server.streaming_port), SimulatorError)


def test_another_version_of_the_server() -> None:
    with StandIn("version:0.9.15") as other:
        error = _refused(other.port)
    assert "is CARLA 0.9.15, and CARLA 0.9.16 is needed" in str(error)
    assert "install CARLA 0.9.16" in str(error)


@pytest.mark.parametrize(
    ("installed", "there", "message"),
    [
        (None, False, "CARLA's client is not installed"),
        (None, True, "CARLA's client is of unknown version, and 0.9.16 is needed"),
        ("0.9.15", True, "CARLA's client is 0.9.15, and 0.9.16 is needed"),
    ],
)
def test_another_client(monkeypatch: pytest.MonkeyPatch, installed: str | None, there: bool, message: str) -> None:
    monkeypatch.setattr(carla_session, "wheel_version", lambda _: installed)
    monkeypatch.setattr(carla_session, "find_spec", lambda _: there or None)
    with pytest.raises(BackendMissingError, match=message) as caught:
        check_client()
    assert caught.value.fix is not None
    assert "pip install 'carla==0.9.16'" in caught.value.fix


def test_a_blueprint_that_the_server_has_not(server: StandIn) -> None:
    error = _refused(server.port, blueprint="vehicle.hover.craft")
    assert isinstance(error, ConfigError)
    assert "vehicle.lincoln.mkz_2020" in str(error)


def test_two_runs_on_one_server(server: StandIn) -> None:
    with _simulator(server.port):
        assert "is used by another run on this machine" in str(_refused(server.port))


def test_another_map_is_found_out(server: StandIn) -> None:
    """The same roads, mirrored: the sign of y is wrong."""
    points = ROADS.points * np.array([1.0, -1.0, -1.0])
    with pytest.raises(SimulatorError, match=r"the server's map is not the scenario's: .* (m and|degrees)"):
        settings = CarlaSettings(port=server.port)
        CarlaSimulator(replace(ROADS, points=points), XODR, settings, VehicleSettings(), DemandSettings(), DT)


def test_no_opendrive_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read, and CARLA needs one"):
        read_map(ScenarioSettings(), str(tmp_path / "crossing.net.xml.gz"))
    other = tmp_path / "other.xodr"
    other.write_text("<net/>")
    with pytest.raises(ConfigError, match="is not an OpenDRIVE file"):
        read_map(ScenarioSettings(map=str(other)), ROADS.network)


# -------------------------------------------------------------------- somebody else's synchronous mode

_OTHER = """
import sys, time, carla
client = carla.Client("127.0.0.1", int(sys.argv[1]))
client.set_timeout(5.0)
world = client.generate_opendrive_world(open(sys.argv[2]).read())
settings = world.get_settings()
settings.synchronous_mode, settings.fixed_delta_seconds = True, 0.05
world.apply_settings(settings)
blueprint = world.get_blueprint_library().find("vehicle.tesla.model3")
blueprint.set_attribute("role_name", "opencda-marl.e7.v3")
world.spawn_actor(blueprint, carla.Transform(carla.Location(50, 5.25, 0.3)))
world.tick()
print("ready", flush=True)
while True:
    time.sleep(0.1)
    world.tick()
"""


def test_a_server_that_somebody_ticks_is_refused_and_one_left_by_a_killed_client_taken_over(tmp_path: Path) -> None:
    xodr = tmp_path / "crossing.xodr"
    xodr.write_text(XODR)
    with StandIn() as server:
        words = [sys.executable, "-c", _OTHER, str(server.port), str(xodr)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            error = _refused(server.port, connect_timeout=5.0, tick_timeout=5.0)
            assert "is in synchronous mode, and another client ticks it" in str(error)
            with Raw(server.port) as client:
                assert client.value("get_episode_settings")[0] is True, "nothing was done to it"
            other.kill()
        with _simulator(server.port) as simulator:
            notes = " / ".join(simulator.info.notes)
            assert "taken over from a run that died" in notes
            assert "1 actors that an earlier run left were removed" in notes
            assert _counters(server)["calls"]["copy_opendrive_to_file"] == 1, "the world was there, and was kept"


# -------------------------------------------------------------------- what is sent, what is left


def test_one_batch_one_tick_and_nothing_of_single_actors(server: StandIn) -> None:
    with _simulator(server.port) as simulator:
        assert simulator.info.backend == "carla (stand-in, a test double)"
        assert "test double" in simulator.info.notes[0]
        simulator.reset(_everywhere(), 1)
        _drive(simulator, 1)
        before = _counters(server)
        state, events = _drive(simulator, 100)
        after = _counters(server)
        assert state.alive.sum() == ROADS.routes
        actors = simulator._session.ask("test", lambda world: world.get_actors().filter("vehicle.*"))
        names = {actor.attributes["role_name"] for actor in actors}
        assert names == {f"opencda-marl.e1.v{number}" for number in range(ROADS.routes)}
        calls = {name: count - before["calls"].get(name, 0) for name, count in after["calls"].items()}
        used = {name: count for name, count in calls.items() if count and not name.startswith("standin")}
        assert used == {"apply_batch": 100, "tick_cue": 100}
        assert sum(event.commanded for event in events) == 100 * ROADS.routes
        begun = time.perf_counter()
        simulator.reset(_everywhere(episode=2), 1)
        assert time.perf_counter() - begun < 0.5  # benchmarks/carla_step.py holds it to 20 ms
    left = _counters(server)
    assert left["unknown_stream_connections"] == before["unknown_stream_connections"]
    assert not any("traffic_manager" in name for name in left["calls"])
    assert "set_actor_autopilot" not in left["calls"]
    assert left["actors"] == 1, "the spectator alone"


def test_the_server_is_left_asynchronous(server: StandIn) -> None:
    with _simulator(server.port) as simulator:
        simulator.reset(_everywhere(), 1)
        _drive(simulator, 3)
    with Raw(server.port) as client:
        synchronous, no_rendering, delta, *_ = client.value("get_episode_settings")
    assert (synchronous, no_rendering, delta) == (False, False, [False])


_PARENT = """
import sys, time
sys.path[:0] = {folders!r}
from test_carla import RemoteSimulator, _drive, _everywhere, _factory
if __name__ == "__main__":
    remote = RemoteSimulator(_factory({port}), deadline=20.0)
    remote.reset(_everywhere(), 1)
    _drive(remote, 20)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_the_server_asynchronous_and_empty(tmp_path: Path) -> None:
    root = Path(opencda_marl.__file__).parents[1]
    folders = [str(Path(__file__).parent), str(root)]
    script = tmp_path / "parent.py"
    with StandIn() as server:
        script.write_text(_PARENT.format(folders=folders, port=server.port))
        with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "ready\n"
            assert _counters(server)["actors"] == 1 + ROADS.routes
            parent.kill()
        until = time.monotonic() + 15.0
        while time.monotonic() < until and _counters(server)["rpc_open"] > 1:
            time.sleep(0.1)
        assert _counters(server)["actors"] == 1
        with Raw(server.port) as client:
            assert client.value("get_episode_settings")[0] is False


def test_the_world_is_loaded_anew_every_so_many_episodes(server: StandIn) -> None:
    with _simulator(server.port, world_reload_every=2) as simulator:
        before = _counters(server)["calls"].get("load_new_episode", 0)
        worlds = []
        for episode in range(1, 6):
            state = simulator.reset(_everywhere(episode), 1)
            worlds.append(state.world)
            state, _ = _drive(simulator, 5)
            assert state.alive.sum() == ROADS.routes
            assert (state.ids[state.alive] // 1_000_000 == episode).all()
        assert worlds == [0, 0, 1, 1, 2]
        assert _counters(server)["calls"]["load_new_episode"] - before == 2


# -------------------------------------------------------------------- coming and going


def test_a_blocked_entry_is_tried_higher_then_waited_for(server: StandIn) -> None:
    with _simulator(server.port) as simulator:
        simulator.reset(_schedule((0.0, EASTWARD)), 1)
        session, carla = simulator._session, simulator._session.carla
        blueprint = session.blueprints.find("vehicle.carlamotors.firetruck")
        place = carla.Transform(carla.Location(-97.5, 5.25, 0.3))
        (truck,) = session.batch([carla.command.SpawnActor(blueprint, place)])
        assert not truck.error
        state, events = _drive(simulator, 10)
        assert not state.alive.any()
        assert [event.waiting for event in events] == [1] * 10
        refused = [event.refused for event in events]
        assert refused == [3, 3, 0, 3, 0, 0, 0, 3, 0, 0], "three heights; then pauses of 1, 2, 4 steps"
        session.batch([carla.command.DestroyActor(truck.actor_id)])
        state, events = _drive(simulator, 8)
        assert state.alive.sum() == 1
        assert sum(len(event.departed) for event in events) == 1


def test_who_vanishes_strays_or_falls_is_removed_once_with_the_reason(server: StandIn) -> None:
    with _simulator(server.port) as simulator:
        simulator.reset(_everywhere(), 1)
        state, _ = _drive(simulator, 20)
        carla, actors = simulator._session.carla, simulator._fleet._actors
        slots = np.flatnonzero(state.alive)[:3].tolist()
        aside = carla.Transform(carla.Location(300.0, 300.0, 0.0))
        place = simulator._session.ask("test", lambda world: world.get_actor(actors[slots[2]])).get_transform()
        place.location.z = -10.0
        simulator._session.batch(
            [
                carla.command.DestroyActor(actors[slots[0]]),
                carla.command.ApplyTransform(actors[slots[1]], aside),
                carla.command.ApplyTransform(actors[slots[2]], place),
            ]
        )
        state, events = _drive(simulator, 1)
        found = dict(zip(events[0].slots.tolist(), events[0].reasons, strict=True))
        assert found[slots[0]] == "vanished from CARLA"
        assert found[slots[1]].startswith("strayed ")
        assert found[slots[2]] == "fell off the road"
        assert set(events[0].endings.tolist()) == {int(Ending.REMOVED)}
        _, later = _drive(simulator, 20)
        assert not any(set(slots) & set(event.slots.tolist()) for event in later)


@pytest.mark.parametrize("collisions", ["geometric", "sensor"])
def test_both_ways_of_finding_collisions_find_this_one(server: StandIn, collisions: str) -> None:
    before = _counters(server)
    with _simulator(server.port, collisions=collisions) as simulator:
        simulator.reset(_schedule((0.0, SOUTHWARD), (10.5 / 13.0, EASTWARD)), 1)
        _, events = _drive(simulator, 180, 13.0)
        ends = [(int(e.ids[i]), int(e.endings[i]), int(e.partners[i])) for e in events for i in range(len(e.ids))]
        one, other = vehicle_id(1, 0), vehicle_id(1, 1)
        assert ends == [(one, Ending.COLLIDED, other), (other, Ending.COLLIDED, one)]
    assert _counters(server)["actors"] == 1, "sensors go with their vehicles"
    assert _counters(server)["unknown_stream_connections"] == before["unknown_stream_connections"]
    assert _counters(server)["stream_connections"] - before["stream_connections"] < 10, "no storm"


def test_a_server_that_has_grown(server: StandIn) -> None:
    found = server_memory("127.0.0.1", server.port)
    assert found is not None
    assert 2**24 < found < 2**31
    assert server_memory("192.0.2.1", server.port) is None, "not on this machine"
    assert server_memory("127.0.0.1", _free_port()) is None
    with (
        _simulator(server.port, server_memory_gib=found / 2**31) as simulator,
        pytest.raises(RecycleError, match=r"beyond carla\.server_memory_gib"),
    ):
        simulator.reset(_everywhere(), 1)
    with _simulator(server.port, server_memory_gib=8.0) as simulator:
        simulator.reset(_everywhere(), 1)


# -------------------------------------------------------------------- a server that fails, through the child


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("die@tick:60", SimulatorError, r"(CARLA failed|did not answer within 1 s) "),
        ("hang@tick:60", DeadlineError, r"did not answer within 1 s while ticking"),
        pytest.param(
            "malformed@tick:60", SimulatorError, r"the simulator's process died \(killed by SIG", marks=pytest.mark.slow
        ),
    ],
)
def test_a_server_that_fails_in_a_step(fault: str, error: type[SimulatorError], message: str) -> None:
    with StandIn(fault) as server:
        remote = RemoteSimulator(_factory(server.port, tick_timeout=1.0), deadline=8.0)
        with closing(remote):
            remote.reset(_everywhere(), 1)
            begun = time.monotonic()
            with pytest.raises(error, match=message):
                _drive(remote, 200)
            assert time.monotonic() - begun < 8.0


@pytest.mark.slow
def test_a_server_that_is_stopped() -> None:
    with StandIn() as server:
        remote = RemoteSimulator(_factory(server.port, tick_timeout=1.0), deadline=8.0)
        with closing(remote):
            remote.reset(_everywhere(), 1)
            _drive(remote, 20)
            os.kill(server.process.pid, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(DeadlineError, match="within 1 s"):
                _drive(remote, 5)
            assert 0.9 < time.monotonic() - begun < 4.0
            os.kill(server.process.pid, signal.SIGCONT)


def test_an_error_of_ours_leaves_the_server_asynchronous(server: StandIn) -> None:
    remote = RemoteSimulator(_factory(server.port), deadline=20.0)
    with closing(remote):
        remote.reset(_everywhere(), 1)
        _drive(remote, 2)
        with pytest.raises(SimulatorError, match="was told to drive nan m/s"):
            _drive(remote, 1, float("nan"))
    with Raw(server.port) as client:
        assert client.value("get_episode_settings")[0] is False
    assert _counters(server)["actors"] == 1
