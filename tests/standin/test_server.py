"""The bare protocol: bytes, answers, streams, episodes, batches, what goes wrong."""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

import msgpack
import psutil
import pytest

from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.probe import look
from opencda_marl.standin import StandIn
from tests.standin.raw import COLLISION, CROSSING, ROOT, TESLA, Raw, Running, Stream, eventually, world_stream

OPENDRIVE = [2.0, 50.0, 1.0, 0.6, True, True, True]


def test_the_bytes_of_the_description(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30.0) as connection:
        connection.sendall(b"\x94\x00\x01\xa7version\x91\x91\xc2")
        assert connection.recv(100) == b"\x94\x01\x01\xc0\x91\x92\x01\xa60.9.16"
        connection.sendall(b"\x94\x00\x09\xb9set_actor_target_velocity\x93\x91\xc3\x04\x93" + 3 * b"\xca\0\0\0\0")
        assert b"registry" in connection.recv(300)
        head = b"\x94\x00\x05\xb6get_weather_parameters"
        connection.sendall(head[:7])  # a request in pieces
        time.sleep(0.05)
        connection.sendall(head[7:] + b"\x91\x91\xc2")
        assert connection.recv(300).startswith(b"\x94\x01\x05\xc0\x91\x92\x01\x9e")


def test_it_says_what_it_is(raw: Raw, server: Running) -> None:
    assert raw.value("standin") == "stand-in of opencda-marl: a test double, not CARLA"
    names = [definition[1] for definition in raw.value("get_actor_definitions")]
    assert "static.prop.standin" in names
    assert look(server.port).version == "0.9.16"


def test_it_listens_on_this_machine_alone(server: Running) -> None:
    listening = {one.laddr.ip for one in psutil.Process(server.process.pid).net_connections() if one.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_errors_of_rpclib(raw: Raw) -> None:
    for method, arguments, says in [
        ("fly", [1], "rpclib: server could not find function 'fly' with argument count 2."),
        ("version", [1], "rpclib: function 'version' (called with 2 arg(s)) was called with an invalid number of"),
    ]:
        number = raw.send(method, *arguments)
        answer = raw.receive()
        assert answer is not None
        assert (answer[0], answer[1], answer[3]) == (1, number, None)
        assert answer[2].startswith(says)
    assert raw.value("version") == "0.9.16"  # the connection goes on


def test_an_argument_of_another_shape_is_an_error_and_not_the_end(raw: Raw) -> None:
    assert "set_episode_settings" in raw.refused("set_episode_settings", [True])
    assert "apply_control_to_vehicle" in raw.refused("apply_control_to_vehicle", raw.spawn(0.0), [1.0])
    assert raw.value("version") == "0.9.16"


def test_what_is_no_request_ends_the_connection(new_server: Running) -> None:
    for bytes_ in (b"GET / HTTP/1.1\r\n\r\n", msgpack.packb([1, 1, None, None]), b"\xc1"):
        with socket.create_connection(("127.0.0.1", new_server.port), timeout=30.0) as connection:
            connection.sendall(bytes_)
            with suppress(ConnectionResetError):
                assert connection.recv(10) == b""
    assert new_server.counters()["not_requests"] == 3


def test_world_frames(new_raw: Raw) -> None:
    new_raw.synchronous(0.1)
    stream = world_stream(new_raw)
    first, actors = stream.world()  # the latest frame, at once, though nobody ticks
    assert (first["kind"], first["episode"], first["flags"]) == (17, 1, 0)
    assert list(actors) == [new_raw.value("get_spectator")[0]]
    car = new_raw.spawn(-100.0, 1.75)
    new_raw.done("apply_control_to_vehicle", car, [0.5, 0.1, 0.25, True, True, True, 3])
    frame = new_raw.value("tick_cue")
    head, actors = stream.world()
    assert head["frame"] == frame == first["frame"] + 1
    assert head["delta"] == pytest.approx(0.1)
    assert head["seconds"] == pytest.approx(first["seconds"] + 0.1)
    assert abs(head["platform"] - time.time()) < 60.0
    assert (actors[car]["state"], actors[car]["control"]) == (1, (0.5, pytest.approx(0.1), 0.25, 1, 1, 1, 3))
    assert actors[car]["pose"] == pytest.approx((-100.0, 1.75, 0.5, 0.0, 0.0, 0.0))
    stream.close()


def test_a_frame_may_come_late() -> None:
    with Running(options=["--frame-delay=200"]) as server, Raw(server.port) as raw:
        raw.synchronous()
        stream = world_stream(raw)
        now = stream.world()[0]["frame"]
        begun = time.monotonic()
        assert [raw.value("tick_cue"), raw.value("tick_cue")] == [now + 1, now + 2]
        assert time.monotonic() - begun < 0.2
        assert stream.world()[0]["frame"] == now + 1
        assert time.monotonic() - begun >= 0.2
        stream.close()


def test_asynchronous_frames_come_by_themselves() -> None:
    with Running(options=["--rate=100"]) as server, Raw(server.port) as raw:
        stream = world_stream(raw)
        first = stream.world()[0]
        later = stream.until(first["frame"] + 20)[0]
        assert later["seconds"] - first["seconds"] == pytest.approx(20 * 0.01)
        took = later["platform"] - first["platform"]
        assert 0.15 < took < 5.0  # a fifth of a second, on an idle machine
        raw.synchronous()
        frame = raw.value("set_episode_settings", raw.value("get_episode_settings"))
        time.sleep(0.1)
        assert raw.value("tick_cue") == frame + 1
        stream.close()


def test_streams_that_are_not_there_are_refused_and_counted(new_raw: Raw, new_server: Running) -> None:
    stream = Stream(struct.pack("<IHBB16x", 77, new_server.streaming_port, 1, 0))
    assert stream.receive() is None
    stream.close()
    counters = new_server.counters()
    assert (counters["unknown_stream_connections"], counters["stream_connections"]) == (1, 1)
    follower = world_stream(new_raw)
    eventually(lambda: new_server.counters()["world_open"] == 1, "the world to be followed")
    follower.close()
    eventually(lambda: new_server.counters()["stream_open"] == 0, "it to be left")


def test_actors_have_their_numbers_and_boxes(raw: Raw) -> None:
    car = raw.value("spawn_actor", TESLA, [[0, 0, 0.5], [0, 0, 0]])
    number, parent, description, box, tags, token = car
    assert (parent, description, tags, token) == (0, TESLA, b"\x0e", b"")
    assert box[1] == pytest.approx([2.395, 1.08, 0.745])
    assert raw.value("get_actor_bounding_box", number) == box
    assert raw.value("get_actors_by_id", [number, 999]) == [car]
    assert raw.value("destroy_actor", number) is True
    assert raw.refused("destroy_actor", number) == "unable to destroy actor: not found"
    said = raw.refused("apply_control_to_vehicle", number, [0, 0, 0, False, False, False, 0])
    assert said.startswith("Responding error from function apply_control_to_vehicle: Actor could not be found in the")
    assert "no blueprint 'vehicle.unknown'" in raw.refused(
        "spawn_actor", [0, "vehicle.unknown", []], [[0, 0, 0], [0, 0, 0]]
    )
    assert "not a vehicle" in raw.refused("set_actor_simulate_physics", raw.value("get_spectator")[0], True)


def test_a_taken_place_is_refused_and_a_free_one_above_it_is_not(raw: Raw) -> None:
    raw.spawn(0.0)
    says = "Spawn failed because of collision at spawn position"
    assert raw.refused("spawn_actor", TESLA, [[4.7, 0.5, 0.5], [0, 45, 0]]) == says
    raw.spawn(4.85)
    raw.spawn(0.0, z=2.1)


def test_batches(raw: Raw) -> None:
    """Spawn with what is done after, control, velocity, transform, destroy; errors stay with their commands."""
    raw.synchronous()
    stream = world_stream(raw)
    after = [[[14, [0, True]]], [[8, [0, [5.0, 0.0, 0.0]]]], [[2, [0, [0, 0, 1.0, False, False, False, 0]]]]]
    here = [[-50.0, 1.75, 0.5], [0.0, 0.0, 0.0]]
    commands = [
        [[0, [TESLA, here, [False], 0, "", after]]],
        [[0, [TESLA, here, [False], 0, "", []]]],
        [[1, [999]]],
        [[21, [1, 2]]],
    ]
    ((good, car),), *rest = raw.ask("apply_batch", commands, False)
    assert good == 1
    texts = [text for ((kind, (text,)),) in rest if kind == 0]
    assert texts[0].startswith("Spawn failed")
    assert texts[1:] == [
        "unable to destroy actor: not found",
        "the stand-in does not have the command set_traffic_light_state",
    ]
    frame = raw.value("tick_cue")
    _, actors = stream.until(frame)
    assert actors[car]["velocity"][0] == pytest.approx(5.0 - 0.05 * (8.0 + 0.15 + 0.05 * 5.0), abs=1e-3)
    moved = [[[6, [car, [[10.0, 0.0, 0.5], [0.0, 90.0, 0.0]]]]], [[19, [car, [11.0, 2.0, 0.5]]]]]
    assert raw.ask("apply_batch", moved, True) == [[[1, car]], [[1, car]]]  # and tick
    head, actors = stream.until(frame + 1)
    assert head["frame"] == frame + 1
    assert actors[car]["pose"][0] == pytest.approx(11.0, abs=0.01)
    assert actors[car]["pose"][4] == pytest.approx(90.0)
    assert raw.ask("apply_batch", [[[1, [car]]]], False) == [[[1, car]]]
    raw.value("tick_cue")
    assert car not in stream.until(frame + 2)[1]
    stream.close()


def test_collision_sensors(raw: Raw) -> None:
    raw.synchronous()
    fast, slow = raw.spawn(-20.0), raw.spawn(0.0)
    sensors = {}
    for car in (fast, slow):
        actor = raw.value("spawn_actor_with_parent", COLLISION, [[0, 0, 0], [0, 0, 0]], car, 0, "")
        assert actor[1] == car
        sensors[car] = (actor[0], Stream(actor[5]))
    world = world_stream(raw)
    world.world()
    raw.done("set_actor_target_velocity", fast, [10.0, 0.0, 0.0])
    time.sleep(0.1)  # the streams are followed
    contact = None
    for _ in range(60):
        frame = raw.value("tick_cue")
        actors = world.until(frame)[1]
        if contact is None and actors[slow]["pose"][0] - actors[fast]["pose"][0] < 4.79:
            contact = frame
            break
    assert contact is not None
    events = {}
    for car, (_, stream) in sensors.items():
        payload = stream.receive()
        assert payload is not None
        kind, at, _, *pose = struct.unpack_from("<QQd6f", payload)
        assert (kind, at) == (0, contact)
        assert pose == pytest.approx(actors[car]["pose"])
        events[car] = msgpack.unpackb(payload[48:], raw=False)
    assert [actor[0] for actor in events[fast][:2]] == [fast, slow]
    assert [actor[0] for actor in events[slow][:2]] == [slow, fast]
    pushed, pushes = events[slow][2], events[fast][2]
    assert pushed == pytest.approx([-part for part in pushes])
    assert pushed[0] == pytest.approx(1850.0 / 2 * 10.0, rel=0.12)  # reduced mass times what speed is left
    raw.value("tick_cue")
    after = world.until(contact + 1)[1]
    assert after[slow]["velocity"][0] == pytest.approx(after[fast]["velocity"][0])
    assert raw.value("destroy_actor", fast)  # its sensor goes with it
    while sensors[fast][1].receive() is not None:
        pass
    raw.value("tick_cue")
    assert sensors[fast][0] not in world.until(contact + 2)[1]
    world.close()
    for _, stream in sensors.values():
        stream.close()


def test_attached_actors_follow(raw: Raw) -> None:
    raw.synchronous()
    car = raw.spawn(10.0, 20.0, yaw=90.0)
    sensor = raw.value("spawn_actor_with_parent", COLLISION, [[2.0, 1.0, 0.5], [0, 10, 0]], car, 0, "")[0]
    world = world_stream(raw)
    pose = world.until(raw.value("tick_cue"))[1][sensor]["pose"]
    assert pose == pytest.approx((9.0, 22.0, 1.0, 0.0, 100.0, 0.0), abs=1e-4)  # ahead is +y, its right is -x
    raw.done("set_actor_location", raw.value("get_spectator")[0], [1.0, 2.0, 3.0])
    assert world.until(raw.value("tick_cue"))[1][1]["pose"][:3] == (1.0, 2.0, 3.0)
    world.close()


def test_episodes(new_raw: Raw) -> None:
    new_raw.synchronous()
    world = world_stream(new_raw)
    before = world.world()[0]
    new_raw.spawn(0.0)
    assert new_raw.refused("load_new_episode", "Town01", True, 65535) == "Map 'Town01' not found"
    assert new_raw.refused("load_new_episode", "OpenDriveMap", True, 65535) == "Map 'OpenDriveMap' not found"
    assert new_raw.refused("copy_opendrive_to_file", "<net/>", OPENDRIVE).startswith(
        "opendrive could not be correctly parsed"
    )
    xodr = CROSSING.read_text(encoding="utf-8")
    new_raw.done("copy_opendrive_to_file", xodr, OPENDRIVE)
    new_raw.done("load_new_episode", "OpenDriveMap", False, 65535)
    head, actors = world.until(before["frame"] + 1)
    assert (head["episode"], head["flags"], head["seconds"]) == (2, 1, pytest.approx(0.05))
    assert list(actors) == [1]
    assert new_raw.value("get_episode_settings")[0] is True  # not reset
    name, points = new_raw.value("get_map_info")
    assert (name, len(points)) == ("Carla/Maps/OpenDriveMap", 96)
    assert new_raw.value("get_map_data") == xodr
    assert new_raw.spawn(*points[0][0][:2]) == 2  # numbers begin anew
    new_raw.done("load_new_episode", "", True, 65535)
    assert new_raw.value("get_episode_info")[0] == 3
    assert new_raw.value("get_map_info")[0] == "Carla/Maps/OpenDriveMap"
    assert new_raw.value("get_episode_settings")[0] is False
    new_raw.done("load_new_episode", "/Game/Carla/Maps/StandIn", True, 65535)
    assert new_raw.value("get_map_info")[0] == "Carla/Maps/StandIn"
    world.close()


def test_settings_and_weather_are_kept(raw: Raw) -> None:
    settings = [True, True, [True, 0.02], False, 0.005, 7, 1.5, False, 10.0, 20.0, False]
    raw.value("set_episode_settings", settings)
    assert raw.value("get_episode_settings") == settings
    weather = [float(number) for number in range(14)]
    raw.done("set_weather_parameters", weather)
    assert raw.value("get_weather_parameters") == weather
    car = raw.spawn(0.0)
    raw.done("set_vehicle_light_state", car, [5])
    assert raw.value("get_vehicle_light_states") == [[car, 5]]
    assert raw.value("get_vehicle_light_state", car) == [5]


def test_physics_control_changes_steering_and_mass(raw: Raw) -> None:
    raw.synchronous()
    car = raw.spawn(0.0)
    control = raw.value("get_physics_control", car)
    assert (len(control), len(control[15]), control[15][0][2]) == (17, 4, pytest.approx(70.0))
    front, rear = control[15][0][9], control[15][2][9]
    assert front[0] - rear[0] == pytest.approx(288.0)  # [cm] the wheelbase
    for wheel in control[15][:2]:
        wheel[2] = 35.0
    raw.done("apply_physics_control", car, control)
    assert raw.value("get_physics_control", car) == control
    raw.done("apply_control_to_vehicle", car, [0, 1.0, 0, False, False, False, 1])
    assert raw.value("get_wheel_steer_angle", car, 0) == pytest.approx(35.0)
    assert raw.value("get_wheel_steer_angle", car, 2) == 0.0
    raw.done("enable_actor_constant_velocity", car, [4.0, 0.0, 0.0])
    world = world_stream(raw)
    turned = world.until(raw.value("tick_cue"))[1][car]["angular_velocity"][2]
    assert turned == pytest.approx(math.degrees(4.0 * math.tan(math.radians(35.0)) / 2.88), rel=1e-5)
    raw.done("disable_actor_constant_velocity", car)
    raw.done("set_actor_target_angular_velocity", car, [0, 0, 40.0])
    assert world.until(raw.value("tick_cue"))[1][car]["angular_velocity"][2] == pytest.approx(40.0)
    world.close()


def test_impulse_collisions_autopilot(raw: Raw) -> None:
    raw.synchronous()
    car, other = raw.spawn(0.0), raw.spawn(6.0)
    raw.done("add_actor_impulse", car, [1850.0 * 40.0, 0.0, 0.0])
    raw.done("set_actor_collisions", car, False)
    raw.done("set_actor_autopilot", car, True)
    world = world_stream(raw)
    for _ in range(5):
        actors = world.until(raw.value("tick_cue"))[1]
    assert actors[car]["velocity"][0] == pytest.approx(40.0, abs=1.5)
    assert actors[car]["pose"][0] > 6.0  # through the other
    assert actors[other]["velocity"] == (0.0, 0.0, 0.0)
    world.close()


def test_what_is_not_finite_is_refused(raw: Raw) -> None:
    car, nan = raw.spawn(0.0), math.nan
    for method, *arguments in [
        ("apply_control_to_vehicle", car, [nan, 0.0, 0.0, False, False, False, 0]),
        ("set_actor_target_velocity", car, [math.inf, 0.0, 0.0]),
        ("set_actor_target_angular_velocity", car, [0.0, 0.0, nan]),
        ("set_actor_transform", car, [[0.0, nan, 0.0], [0.0, 0.0, 0.0]]),
        ("set_actor_location", car, [0.0, nan, 0.0]),
        ("spawn_actor", TESLA, [[20.0, 0.0, 0.0], [0.0, nan, 0.0]]),
    ]:
        assert "not finite" in raw.refused(method, *arguments)


def test_traffic_managers_are_registered(raw: Raw) -> None:
    assert raw.value("is_traffic_manager_running", 8000) is False
    assert raw.value("get_traffic_manager_running", 8000) == ["", 0]
    assert raw.value("add_traffic_manager_running", ["127.0.0.1", 8000]) is True
    assert raw.value("add_traffic_manager_running", ["127.0.0.1", 8000]) is False
    assert raw.value("get_traffic_manager_running", 8000) == ["127.0.0.1", 8000]
    assert raw.value("destroy_traffic_manager", 8000) is True
    assert raw.value("destroy_traffic_manager", 8000) is False


def test_one_answer_for_each_request_whether_read_or_not(raw: Raw) -> None:
    car = raw.spawn(0.0)
    asked = [raw.send("set_actor_enable_gravity", car, True, asynchronous=True) for _ in range(200)]
    answers = [raw.receive() for _ in asked]
    assert [answer and answer[1] for answer in answers] == asked


def test_many_episodes_leave_nothing(new_raw: Raw, new_server: Running) -> None:
    new_raw.done("copy_opendrive_to_file", CROSSING.read_text(encoding="utf-8"), OPENDRIVE)
    process, memory = psutil.Process(new_server.process.pid), 0
    for episode in range(40):
        new_raw.done("load_new_episode", "OpenDriveMap", True, 65535)
        sensor = new_raw.value("spawn_actor_with_parent", COLLISION, [[0, 0, 0], [0, 0, 0]], new_raw.spawn(0.0), 0, "")
        stream = Stream(sensor[5])
        if episode == 10:
            memory = process.memory_info().rss
        new_raw.done("load_new_episode", "", True, 65535)
        assert stream.receive() is None  # its actor is gone, and so is it
        stream.close()
    counters = new_server.counters()
    assert (counters["actors"], counters["stream_open"]) == (1, 0)
    assert process.memory_info().rss < memory + 5 * 2**20
    eventually(lambda: process.num_fds() < 20, "sockets to be closed")


# --- faults


def test_a_method_that_hangs_or_is_late_or_drops() -> None:
    with Running("hang:get_map_data", "late:get_map_info:0.3", "drop:get_spectator") as server:
        with Raw(server.port) as raw:
            begun = time.monotonic()
            raw.send("get_map_data")
            raw.send("get_map_info")
            number = raw.send("version")
            first, second = raw.receive(), raw.receive()
            assert first is not None and second is not None
            assert (first[1], second[1]) == (number, number - 1)  # the late one is carried out, and answered last
            assert time.monotonic() - begun >= 0.3
            raw.send("get_spectator")
            with suppress(ConnectionResetError):
                assert raw.receive() is None
        counters = server.counters()
        assert counters["calls"]["get_map_data"] == 1
        assert counters["rpc_connections"] == 2


@pytest.mark.parametrize("fault", ["die:get_spectator", "die@tick:3", "die@frame:40"])
def test_a_death(fault: str) -> None:
    with Running(fault) as server, Raw(server.port) as raw:
        if fault == "die:get_spectator":
            raw.send("get_spectator")
        elif fault == "die@tick:3":
            raw.synchronous()
            raw.value("tick_cue")
            raw.value("tick_cue")
            raw.send("tick_cue")
        assert server.process.wait(30.0) == 139  # the 40th frame comes by itself


def test_ticks_that_hang_leave_the_rest_alive() -> None:
    with Running("hang@tick:2") as server, Raw(server.port) as raw:
        raw.synchronous()
        frame = raw.value("tick_cue")
        raw.send("tick_cue")
        assert raw.value("set_episode_settings", raw.value("get_episode_settings")) == frame


def test_frames_that_hang_or_drop() -> None:
    with Running("hang@frame:30") as server, Raw(server.port) as raw:
        eventually(lambda: raw.value("standin_counters")["frame"] == 29, "the frame before")
        time.sleep(0.2)
        assert raw.value("standin_counters")["frame"] == 29
    with Running("drop@frame:60") as server, Raw(server.port) as raw:
        stream = world_stream(raw)
        with suppress(ConnectionResetError):
            while stream.receive() is not None:
                pass
        with suppress(ConnectionResetError):
            assert raw.receive() is None
        eventually(lambda: server.counters()["frame"] > 60, "frames go on")
        stream.close()


def test_bytes_that_are_wrong() -> None:
    with Running("malformed:get_map_info", "malformed@tick:1") as server, Raw(server.port) as raw:
        stream = world_stream(raw)
        assert stream.receive() is not None
        raw.send("get_map_info")
        assert raw.socket.recv(4) == b"HTTP"
        stream.close()
    with Running("malformed@frame:30") as server, Raw(server.port) as raw:
        stream = world_stream(raw)
        sizes = set()
        while len(sizes) < 2:
            sizes.add(len(stream.receive() or b""))
        assert max(sizes) - min(sizes) == 1
        stream.close()


@pytest.mark.parametrize("words", [("leak:100",), ("leak@tick:2",)])
def test_memory_grows(words: tuple[str, ...]) -> None:
    with Running(*words) as server:
        memory = psutil.Process(server.process.pid).memory_info
        first = memory().rss
        eventually(lambda: memory().rss > first + 30 * 2**20, "30 MiB more")


def test_another_version() -> None:
    with Running("version:0.9.15") as server:
        assert look(server.port).version == "0.9.15"
    with Running(options=["--version=0.9.14"]) as server:
        assert look(server.port).version == "0.9.14"


def test_a_taken_port_is_the_end(server: Running) -> None:
    with pytest.raises(SimulatorError, match="bind: Address already in use"):
        StandIn(rpc_port=server.port)
    with pytest.raises(SimulatorError, match="bind: Address already in use"):
        StandIn(streaming_port=server.streaming_port)


def test_a_port_that_is_only_held() -> None:
    with Running("squat") as server:
        assert look(server.port).kind == "closed"
        with pytest.raises(SimulatorError, match="bind: Address already in use"):
            StandIn(rpc_port=server.port)


def test_a_map_that_is_none() -> None:
    with pytest.raises(SimulatorError, match="is no map"):
        StandIn(options=["--xodr=/nowhere.xodr"])


def test_its_own_map() -> None:
    with Running(options=[f"--xodr={CROSSING}"]) as server, Raw(server.port) as raw:
        assert raw.value("get_map_data") == CROSSING.read_text(encoding="utf-8")


def test_it_ends_with_who_started_it() -> None:
    code = "import time; from opencda_marl.standin import StandIn; print(StandIn().process.pid, flush=True)"
    code += "; time.sleep(60)"
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    eventually(lambda: not psutil.pid_exists(pid), "its end")


def test_the_command() -> None:
    """With the program around it; two stand-ins never have the same streams."""
    argv = [sys.executable, "-m", "opencda_marl.cli", "carla-standin", "--rpc-port", "0", "--streaming-port", "0"]
    process = subprocess.Popen([*argv, "--fault", "die:version"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "Disabling core dumps.\n"
    line = process.stdout.readline()
    assert line.startswith("stand-in of opencda-marl: a test double, not CARLA; version 0.9.16, on 127.0.0.1, ports ")
    with Raw(int(line.split()[-2])) as raw:
        raw.send("version")
        assert process.wait(30.0) == 139
    process.stdout.close()


def test_streams_of_two_servers_differ() -> None:
    found = []
    for _ in range(2):
        with Running() as server, Raw(server.port) as raw:
            found.append(raw.value("spawn_actor_with_parent", COLLISION, [[0, 0, 0], [0, 0, 0]], raw.spawn(0.0), 0, ""))
    assert found[0][5][:4] != found[1][5][:4]
