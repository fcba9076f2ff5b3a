"""CARLA's own client against the stand-in, in child processes: what works, and what breaks as the real thing breaks."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.standin.raw import ROOT, Running, child, eventually

pytest.importorskip("carla", reason="needs CARLA's client, which is in the extra `dev`")


def answer_of(name: str, port: int, *arguments: Any) -> dict[str, Any]:
    """What a function of driven.py answers."""
    done = child(name, port, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_worlds(new_server: Running) -> None:
    answer = answer_of("worlds", new_server.port)
    assert answer["versions"] == ["0.9.16", "0.9.16"]
    assert answer["first"] == ["Carla/Maps/StandIn", False, ["/Game/Carla/Maps/StandIn"]]
    assert answer["unknown"] == "RuntimeError: Map 'Town01' not found"
    assert answer["map"] == ["Carla/Maps/OpenDriveMap", 96, 24]
    assert answer["off"] < 0.01  # [m] of the client's own lane middles
    assert answer["turned"] < 0.01  # [deg]
    assert answer["in_junctions"] == 0
    assert answer["ahead"] == 1
    assert answer["settings"] == [True, 0.05]
    assert answer["blueprints"] == [7, 1]
    assert answer["no_attribute"].startswith("IndexError")
    assert answer["read_only"].startswith("ValueError")
    assert answer["reloaded"] == [True, 1, True]
    assert answer["weather"] is True


def test_vehicles(server: Running) -> None:
    answer = answer_of("vehicles", server.port)
    assert answer["before_tick"] == [0.0, 0.0, 0.0]
    assert answer["taken"] == [None, "RuntimeError: Spawn failed because of collision at spawn position"]
    assert answer["attributes"] == ["vehicle.lincoln.mkz_2020", "hero", pytest.approx([2.445, 0.92, 0.745])]
    assert answer["batch"] == [
        [False, ""],
        [True, "Spawn failed because of collision at spawn position"],
        [True, "unable to destroy actor: not found"],
    ]
    assert answer["frames"] == [0, pytest.approx(0.05), True]
    velocity, ahead = np.array(answer["fast"])
    assert velocity @ ahead == pytest.approx(10.0, abs=0.1)
    assert answer["placed"] < 0.02  # nothing holds it but rolling resistance
    assert answer["control"] == [1.0, 0.25, 0.0, False, 1]
    assert answer["moved"] == pytest.approx(3.85 / 2, rel=0.05)  # a second of full throttle, along an arc
    assert answer["constant"] == pytest.approx(6.0)
    assert answer["put"] == [[1.0, 2.0, 3.0], pytest.approx(30.0), [0.0, 0.0, 0.0]]
    assert answer["wheels"] == [4, pytest.approx(70.0)]
    assert answer["spectator"] == [5.0, 6.0, 7.0]
    assert answer["lights"] == 8
    assert answer["actors"] == ["spectator", *2 * ["vehicle.lincoln.mkz_2020"]]
    assert answer["destroyed"] == [True, [""]]
    assert answer["left"] == [False, ["spectator"]]


def test_sticky_control(server: Running) -> None:
    before = server.counters()["calls"].get("apply_control_to_vehicle", 0)
    answer_of("sticky", server.port)
    assert server.counters()["calls"]["apply_control_to_vehicle"] - before == 1 + 3


def test_metres_and_seconds(server: Running) -> None:
    answer = answer_of("physics", server.port)
    speed, way, acceleration = answer["two_seconds"]
    assert speed == pytest.approx(2.0 * 3.85, rel=0.01)
    assert way == pytest.approx(2.0**2 * 3.85 / 2, rel=0.01)
    assert acceleration == pytest.approx(3.85, rel=0.02)
    speed, way, left = answer["braking"]
    assert way == pytest.approx(speed**2 / (2 * 8.15), rel=0.05)
    assert left == 0.0
    turned, sideways = answer["right"]
    assert 0.0 < turned < 180.0
    assert sideways > 0.0  # south of where it was: its right
    radius = answer["wheelbase"] / math.tan(math.radians(answer["steer_angle"]))
    assert math.radians(answer["yaw_rate"]) == pytest.approx(4.0 / radius, rel=1e-3)


def test_two_that_meet(server: Running) -> None:
    answer = answer_of("collision", server.port)
    one, two = answer["cars"]
    overlaps, events = answer["overlaps"], answer["events"]
    assert overlaps
    assert len(events) == 2 * len(overlaps)
    assert sorted(event[0] for event in events) == sorted(2 * overlaps)
    first = {event[1]: event for event in events if event[0] == overlaps[0]}
    assert (first[one][2], first[two][2]) == (two, one)
    assert first[one][3] < 0.0 < first[two][3]  # pushed back, and ahead
    assert first[two][3] == pytest.approx(1850.0 / 2 * 12.0, rel=0.2)
    assert [first[one][4], first[two][4]] == pytest.approx(answer["places"], abs=1e-3)
    counters = server.counters()
    assert counters["unknown_stream_connections"] == 0
    assert counters["stream_open"] == 0


def test_a_reconnect_storm_is_seen() -> None:
    with Running() as server:
        answer_of("storm", server.port)
        assert server.counters()["unknown_stream_connections"] > 50


def test_free_running_and_two_clients(server: Running) -> None:
    answer = answer_of("free_running", server.port)
    frames = answer["frames"]
    assert frames[0] < frames[1] < frames[2]
    assert answer["car"] in answer["seen"]
    assert answer["late"] == [0, True]


def test_a_traffic_manager_drives(server: Running) -> None:
    """Seven seconds: all eight get going, keep to their lanes, and to the speed that they are told."""
    before = server.counters()["calls"]
    answer = answer_of("traffic", server.port, _free_port())
    assert answer["cars"] == 8
    assert sum(way > 12.0 for way in answer["driven"]) >= 4
    assert min(answer["driven"]) > 3.0
    assert answer["off"] < 1.75
    assert 5.0 < answer["fastest"] < 1.3 * 30.0 / 3.6
    after = server.counters()["calls"]
    for method in ("is_traffic_manager_running", "add_traffic_manager_running", "destroy_traffic_manager"):
        assert after[method] - before.get(method, 0) >= 1
    assert after["get_vehicle_light_states"] - before.get("get_vehicle_light_states", 0) >= 130
    assert after["apply_batch"] - before.get("apply_batch", 0) >= 130


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def test_every_field_arrives() -> None:
    """Distinct numbers in each, through a server whose frames are ours."""
    from opencda_marl.standin import server as serving
    from opencda_marl.standin.faults import Faults
    from opencda_marl.standin.world import World

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    port, streaming = (int(one.getsockname()[1]) for one in sockets)

    class Distinct(World):
        def _snapshot(self, seconds: float) -> bytes:
            payload = super()._snapshot(seconds)
            table = np.frombuffer(payload[84:], self._table.dtype).copy()  # type: ignore[union-attr]
            row = table[0]
            row["pose"], row["velocity"] = (1.5, 2.5, 3.5, 4.5, 5.5, 6.5), (7.5, 8.5, 9.5)
            row["angular_velocity"], row["acceleration"] = (10.5, 11.5, 12.5), (13.5, 14.5, 15.5)
            row["pedals"], row["switches"], row["gear"] = (0.25, -0.5, 0.75), (1, 0, 1), 4
            row["speed_limit"], row["light_state"], row["has_light"], row["failure"] = 16.5, 1, 1, 2
            return payload[:84] + table.tobytes()

    async def serve() -> None:
        made = serving.Server(streaming_port=streaming, version="0.9.16", faults=Faults())
        made.world.__class__ = Distinct
        made.world.spawn([0, "vehicle.tesla.model3", []], [[0, 0, 0.5], [0, 0, 0]])
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(made.requests.connection, sock=sockets[0]),
            await loop.create_server(made.streams.connection, sock=sockets[1]),
        ]
        clock = asyncio.create_task(made.run())
        await over.wait()
        clock.cancel()
        for one in servers:
            one.close()
        made.requests.drop()
        made.streams.drop()
        await asyncio.sleep(0.05)

    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        answer = answer_of("fields", port)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30.0)
        loop.close()
    assert answer["pose"] == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert answer["velocity"] == [7.5, 8.5, 9.5]
    assert answer["angular_velocity"] == [10.5, 11.5, 12.5]
    assert answer["acceleration"] == [13.5, 14.5, 15.5]
    assert answer["pedals"] == [0.25, -0.5, 0.75]
    assert answer["switches"] == [True, False, True]
    assert answer["gear"] == 4
    assert answer["speed_limit"] == 16.5
    assert answer["light"] == ["Yellow", True]
    assert answer["failure"] == "Engine"
    assert answer["delta"] == pytest.approx(1.0 / 60.0)
    assert answer["elapsed"] > 0.0


# --- what breaks, as the client breaks


@pytest.mark.parametrize("fault", ["hang:get_map_data", "late:get_map_data:1.5"])
def test_no_answer_in_time(fault: str) -> None:
    with Running(fault) as server:
        answer = answer_of("impatient", server.port, "map")
    assert "time-out of 1000ms while waiting for the simulator" in answer["said"]
    assert 0.9 < answer["took"] < 10.0
    assert answer["then"] is None  # the connection is as good as before


@pytest.mark.parametrize("fault", ["die@tick:20", "hang@tick:20", "drop@tick:20"])
def test_a_tick_that_is_not_answered(fault: str) -> None:
    with Running(fault) as server:
        answer = answer_of("ticking", server.port)
    assert "time-out of 1000ms" in answer["said"]
    assert 10 <= answer["ticks"] < 20  # settings took some
    assert (answer["then"] is None) == fault.startswith("hang")


def test_another_version_is_told_and_borne() -> None:
    with Running("version:0.9.15") as server:
        done = child("version", server.port)
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1])["server"] == "0.9.15"
    assert "WARNING: Version mismatch detected" in done.stderr


@pytest.mark.parametrize(("fault", "name"), [("http", "version"), ("malformed@frame:100", "watching")])
def test_wrong_bytes_abort_the_clients_process(fault: str, name: str) -> None:
    with Running(fault) as server:
        done = child(name, server.port)
    assert done.returncode == -signal.SIGABRT


@pytest.mark.slow
def test_a_traffic_manager_aborts_its_process_when_the_server_dies() -> None:
    with Running("die@frame:400") as server:
        done = child("manager_dies", server.port, _free_port())
        eventually(lambda: server.process.poll() == 139, "the server's death")
    assert done.returncode == -signal.SIGABRT


@pytest.mark.slow
def test_a_server_that_comes_after_another() -> None:
    """The old client's streams come back, find none of their own, and get nobody else's events; its calls stay dead."""
    answer = answer_of("restarted", 0)
    assert "time-out of 1000ms" in answer["dead"]
    assert "time-out of 1000ms" in answer["still_dead"]
    assert answer["world_open"] == 1
    assert answer["storm"] > 50
    assert answer["after_stop"] == 0
    old, new = answer["events"]
    assert old == 0 < new


@pytest.mark.slow
def test_a_step_of_fifteen_costs_milliseconds_and_the_servers_tick_less_than_one() -> None:
    argv = [
        sys.executable,
        str(ROOT / "benchmarks" / "carla_standin.py"),
        "--vehicles",
        "15",
        "--steps",
        "500",
        "--json",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert row["server_ms"]["p50"] < 1.0
    assert row["server_ms"]["p50"] < row["tick_ms"]["p50"] < row["step_ms"]["p50"] < 50.0
