"""What CARLA's own client does, in a process of its own: `python -m tests.standin.driven NAME PORT …`.

Each function's answer is printed as JSON, on the last line. The client may abort the process; that is its answer then.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import carla

from tests.standin.raw import CROSSING, Running

_TIMEOUT = 20.0  # [s]
_STEP = 0.05  # [s]


def connect(port: int, timeout: float = _TIMEOUT) -> Any:
    client = carla.Client("127.0.0.1", port, worker_threads=4)
    client.set_timeout(timeout)
    return client


def synchronous(world: Any, seconds: float = _STEP) -> None:
    settings = world.get_settings()
    settings.synchronous_mode, settings.fixed_delta_seconds = True, seconds
    world.apply_settings(settings)


def crossing(client: Any) -> Any:
    world = client.generate_opendrive_world(CROSSING.read_text(encoding="utf-8"))
    synchronous(world)
    return world


def car(world: Any, transform: Any, kind: str = "vehicle.tesla.model3") -> Any:
    return world.spawn_actor(world.get_blueprint_library().find(kind), transform)


def xyz(vector: Any) -> list[float]:
    return [vector.x, vector.y, vector.z]


def error_of(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except (RuntimeError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def worlds(port: int) -> dict[str, Any]:
    """Connect, versions, maps, settings, an OpenDRIVE world, waypoints, blueprints, reload."""
    client = connect(port)
    answer: dict[str, Any] = {"versions": [client.get_server_version(), client.get_client_version()]}
    world = client.get_world()
    answer["first"] = [world.get_map().name, world.get_settings().synchronous_mode, client.get_available_maps()]
    answer["unknown"] = error_of(lambda: client.load_world("Town01"))
    world = crossing(client)
    city = world.get_map()
    points = city.get_spawn_points()
    waypoints = [city.get_waypoint(point.location) for point in points]
    answer["map"] = [city.name, len(points), len(city.get_topology())]
    answer["off"] = max(math.hypot(w.transform.location.x - p.location.x, w.transform.location.y - p.location.y)
                        for w, p in zip(waypoints, points, strict=True))  # fmt: skip
    answer["turned"] = max(abs((w.transform.rotation.yaw - p.rotation.yaw + 180.0) % 360.0 - 180.0)
                           for w, p in zip(waypoints, points, strict=True))  # fmt: skip
    answer["in_junctions"] = sum(waypoint.is_junction for waypoint in waypoints)
    answer["ahead"] = len(waypoints[0].next(100.0))
    settings = world.get_settings()
    answer["settings"] = [settings.synchronous_mode, settings.fixed_delta_seconds]
    library = world.get_blueprint_library()
    blueprint = library.find("vehicle.tesla.model3")
    answer["blueprints"] = [len(library.filter("vehicle.*")), len(library.filter("static.prop.standin"))]
    answer["no_attribute"] = error_of(lambda: blueprint.set_attribute("nothing", "1"))
    answer["read_only"] = error_of(lambda: blueprint.set_attribute("number_of_wheels", "3"))
    before = world.id
    car(world, points[0])
    world = client.reload_world(False)
    answer["reloaded"] = [world.id != before, len(world.get_actors()), world.get_settings().synchronous_mode]
    world.set_weather(carla.WeatherParameters.HardRainNoon)
    world.tick()
    answer["weather"] = world.get_weather() == carla.WeatherParameters.HardRainNoon
    world.debug.draw_string(carla.Location(), "nobody reads this")
    world.debug.draw_line(carla.Location(), carla.Location(x=1.0))
    return answer


def vehicles(port: int) -> dict[str, Any]:
    """Spawn, batches, ticks, snapshots, single calls, destroy."""
    client = connect(port)
    world = crossing(client)
    points = world.get_map().get_spawn_points()
    blueprint = world.get_blueprint_library().find("vehicle.lincoln.mkz_2020")
    blueprint.set_attribute("role_name", "hero")
    blueprint.set_attribute("sticky_control", "false")
    one = world.spawn_actor(blueprint, points[0])
    answer: dict[str, Any] = {"before_tick": xyz(one.get_transform().location)}
    answer["taken"] = [world.try_spawn_actor(blueprint, points[0]), error_of(lambda: car(world, points[0]))]
    answer["attributes"] = [one.type_id, one.attributes["role_name"], xyz(one.bounding_box.extent)]
    command = carla.command
    then = command.SetSimulatePhysics(command.FutureActor, True)
    fast = command.ApplyTargetVelocity(command.FutureActor, points[8].get_forward_vector() * 10.0)
    batch = [command.SpawnActor(blueprint, points[8]).then(then).then(fast), command.SpawnActor(blueprint, points[0])]
    results = client.apply_batch_sync([*batch, command.DestroyActor(987654)], False)
    answer["batch"] = [[bool(result.error), result.error] for result in results]
    frame = world.tick()
    snapshot = world.get_snapshot()
    two = world.get_actor(results[0].actor_id)
    answer["frames"] = [snapshot.frame - frame, snapshot.timestamp.delta_seconds, snapshot.has_actor(two.id)]
    answer["fast"] = [xyz(two.get_velocity()), xyz(points[8].get_forward_vector())]
    answer["placed"] = one.get_location().distance(points[0].location)
    one.apply_control(carla.VehicleControl(throttle=1.0, steer=0.25, brake=0.0, gear=1))
    for _ in range(20):
        world.tick()
    control = one.get_control()
    answer["control"] = [control.throttle, control.steer, control.brake, control.hand_brake, control.gear]
    answer["moved"] = one.get_location().distance(points[0].location)
    one.enable_constant_velocity(carla.Vector3D(6.0, 0.0, 0.0))
    one.apply_control(carla.VehicleControl())
    world.tick()
    world.tick()
    answer["constant"] = one.get_velocity().length()
    one.disable_constant_velocity()
    one.set_simulate_physics(False)
    one.set_transform(carla.Transform(carla.Location(1.0, 2.0, 3.0), carla.Rotation(yaw=30.0)))
    world.tick()
    world.tick()
    answer["put"] = [xyz(one.get_location()), one.get_transform().rotation.yaw, xyz(one.get_velocity())]
    wheels = one.get_physics_control().wheels
    answer["wheels"] = [len(wheels), wheels[0].max_steer_angle]
    one.set_light_state(carla.VehicleLightState.Brake)
    world.tick()
    world.get_spectator().set_transform(carla.Transform(carla.Location(5.0, 6.0, 7.0)))
    world.tick()
    answer["spectator"] = xyz(world.get_spectator().get_location())
    answer["lights"] = int(world.get_vehicles_light_states()[one.id])
    answer["actors"] = sorted(actor.type_id for actor in world.get_actors())
    answer["destroyed"] = [one.destroy(), [r.error for r in client.apply_batch_sync([command.DestroyActor(two.id)])]]
    world.tick()
    answer["left"] = [world.get_snapshot().has_actor(two.id), [actor.type_id for actor in world.get_actors()]]
    return answer


def physics(port: int) -> dict[str, Any]:
    """Metres, seconds and signs, as the client reads them."""
    client = connect(port)
    world = client.get_world()
    synchronous(world)
    one = car(world, carla.Transform(carla.Location(-150.0, 1.75, 0.5)))
    one.apply_control(carla.VehicleControl(throttle=1.0))
    for _ in range(40):
        world.tick()
    answer: dict[str, Any] = {
        "two_seconds": [one.get_velocity().x, one.get_location().x + 150.0, one.get_acceleration().x]
    }
    speed, place = one.get_velocity().x, one.get_location().x
    one.apply_control(carla.VehicleControl(brake=1.0))
    for _ in range(60):
        world.tick()
    answer["braking"] = [speed, one.get_location().x - place, one.get_velocity().length()]
    one.enable_constant_velocity(carla.Vector3D(4.0, 0.0, 0.0))
    one.apply_control(carla.VehicleControl(steer=0.3))
    world.tick()
    start = one.get_transform()
    for _ in range(10):
        world.tick()
    now = one.get_transform()
    answer["right"] = [now.rotation.yaw - start.rotation.yaw, now.location.y - start.location.y]
    answer["yaw_rate"] = one.get_angular_velocity().z
    answer["steer_angle"] = one.get_wheel_steer_angle(carla.VehicleWheelLocation.FL_Wheel)
    control = one.get_physics_control()
    front, rear = control.wheels[0].position, control.wheels[2].position
    answer["wheelbase"] = math.hypot(front.x - rear.x, front.y - rear.y) / 100.0
    return answer


def fields(port: int) -> dict[str, Any]:
    """Every field of one vehicle in a frame."""
    world = connect(port).get_world()
    deadline = time.monotonic() + _TIMEOUT
    while not (found := [actor for actor in world.get_actors() if actor.type_id.startswith("vehicle.")]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    one = found[0]
    snapshot = world.wait_for_tick()
    seen = snapshot.find(one.id)
    transform, control = seen.get_transform(), one.get_control()
    rotation = transform.rotation
    return {
        "pose": [*xyz(transform.location), rotation.pitch, rotation.yaw, rotation.roll],
        "velocity": xyz(seen.get_velocity()),
        "angular_velocity": xyz(seen.get_angular_velocity()),
        "acceleration": xyz(seen.get_acceleration()),
        "pedals": [control.throttle, control.steer, control.brake],
        "switches": [control.hand_brake, control.reverse, control.manual_gear_shift],
        "gear": control.gear,
        "speed_limit": one.get_speed_limit(),
        "light": [str(one.get_traffic_light_state()), one.is_at_traffic_light()],
        "failure": str(one.get_failure_state()),
        "delta": snapshot.timestamp.delta_seconds,
        "elapsed": snapshot.timestamp.elapsed_seconds,
    }


def collision(port: int) -> dict[str, Any]:
    """Sensors on both of two that meet; stopped before they go."""
    client = connect(port)
    world = client.get_world()
    synchronous(world)
    one, two = (car(world, carla.Transform(carla.Location(x, 1.75, 0.5))) for x in (-30.0, -10.0))
    blueprint = world.get_blueprint_library().find("sensor.other.collision")
    events: list[list[Any]] = []
    lock = threading.Lock()

    def heard(event: Any) -> None:
        with lock:
            push = event.normal_impulse
            events.append([event.frame, event.actor.id, event.other_actor.id, push.x, event.transform.location.x])

    sensors = [world.spawn_actor(blueprint, carla.Transform(), attach_to=actor) for actor in (one, two)]
    for sensor in sensors:
        sensor.listen(heard)
    one.set_target_velocity(carla.Vector3D(12.0, 0.0, 0.0))
    overlaps, places = [], {}
    time.sleep(0.3)  # the sensors' connections
    for _ in range(60):
        frame = world.tick()
        snapshot = world.get_snapshot()
        here = [snapshot.find(actor.id).get_transform().location.x for actor in (one, two)]
        places[frame] = here
        if here[1] - here[0] < 4.79:
            overlaps.append(frame)
    deadline = time.monotonic() + _TIMEOUT
    while len(events) < 2 * len(overlaps) and time.monotonic() < deadline:
        time.sleep(0.02)
    for sensor in sensors:
        sensor.stop()
        sensor.destroy()
    world.tick()
    with lock:
        found = sorted(events)
    return {"overlaps": overlaps, "events": found, "cars": [one.id, two.id], "places": places[overlaps[0]]}


def storm(port: int) -> dict[str, Any]:
    """A sensor that is destroyed in a batch while it listens."""
    client = connect(port)
    world = client.get_world()
    synchronous(world)
    one = car(world, carla.Transform(carla.Location(-30.0, 1.75, 0.5)))
    sensor = world.spawn_actor(
        world.get_blueprint_library().find("sensor.other.collision"), carla.Transform(), attach_to=one
    )
    sensor.listen(lambda _event: None)
    world.tick()
    time.sleep(0.2)
    client.apply_batch_sync([carla.command.DestroyActor(sensor.id)], False)
    time.sleep(0.5)
    return {}


def free_running(port: int) -> dict[str, Any]:
    """Asynchronous mode, and two clients on one world."""
    first, second = connect(port), connect(port)
    world, other = first.get_world(), second.get_world()
    frames = [world.wait_for_tick().frame for _ in range(3)]
    one = car(world, carla.Transform(carla.Location(0.0, 1.75, 0.5)))
    world.wait_for_tick()
    other.wait_for_tick()
    answer: dict[str, Any] = {"frames": frames, "seen": [actor.id for actor in other.get_actors()], "car": one.id}
    synchronous(world)
    frame = world.tick()
    late = connect(port).get_world()
    deadline = time.monotonic() + _TIMEOUT
    while late.get_snapshot().frame < frame and time.monotonic() < deadline:
        time.sleep(0.01)
    answer["late"] = [late.get_snapshot().frame - frame, late.get_settings().synchronous_mode]
    return answer


def watching(port: int) -> dict[str, Any]:
    """Only listens, for a thousand frames."""
    world = connect(port).get_world()
    return {"frames": [world.wait_for_tick().frame for _ in range(1000)]}


def traffic(port: int, manager_port: int) -> dict[str, Any]:
    """Eight cars that CARLA's TrafficManager drives."""
    client = connect(port)
    world = crossing(client)
    city = world.get_map()
    arms = [
        p
        for p in city.get_spawn_points()
        if p.location.x * p.get_forward_vector().x < -1.0 or p.location.y * p.get_forward_vector().y < -1.0
    ]
    inward = [p for p in arms if 55.0 < max(abs(p.location.x), abs(p.location.y)) < 85.0][:8]
    cars = [car(world, point) for point in inward]
    world.tick()
    manager = client.get_trafficmanager(manager_port)
    manager.set_synchronous_mode(True)
    for one in cars:
        one.set_autopilot(True, manager_port)
    off, fastest, driven = 0.0, 0.0, [0.0] * len(cars)
    last = [one.get_location() for one in cars]
    for _ in range(140):
        world.tick()
        for index, one in enumerate(cars):
            here = one.get_location()
            driven[index] += here.distance(last[index])
            last[index] = here
            off = max(off, here.distance(city.get_waypoint(here).transform.location))
            fastest = max(fastest, one.get_velocity().length())
    answer = {"cars": len(cars), "driven": driven, "off": off, "fastest": fastest}
    for one in cars:
        one.set_autopilot(False, manager_port)
    manager.set_synchronous_mode(False)
    manager.shut_down()
    return answer


def manager_dies(port: int, manager_port: int) -> dict[str, Any]:
    """A TrafficManager whose server dies."""
    client = connect(port, 1.0)
    world = client.get_world()
    one = car(world, carla.Transform(carla.Location(0.0, 1.75, 0.5)))
    one.set_autopilot(True, manager_port)
    error_of(lambda: [world.wait_for_tick() for _ in range(10_000)])
    time.sleep(10.0)
    return {}


def impatient(port: int, what: str) -> dict[str, Any]:
    """A call that is not answered within a second; then another."""
    client = connect(port, 1.0)
    world = client.get_world()
    begun = time.monotonic()
    said = error_of(world.get_map if what == "map" else client.get_server_version)
    took = time.monotonic() - begun
    return {"said": said, "took": took, "then": error_of(world.get_settings)}


def ticking(port: int) -> dict[str, Any]:
    """Tick until that fails; then what is left of the client."""
    client = connect(port, 1.0)
    world = client.get_world()
    synchronous(world)
    one = car(world, carla.Transform(carla.Location(0.0, 1.75, 0.5)))
    ticks, said = 0, None
    while said is None and ticks < 100:
        said = error_of(world.tick)
        ticks += said is None
    one.apply_control(carla.VehicleControl())  # asynchronous calls fail in silence
    return {"ticks": ticks, "said": said, "then": error_of(world.get_settings), "x": one.get_location().x}


def version(port: int) -> dict[str, Any]:
    """What a client makes of another version."""
    client = connect(port)
    return {"server": client.get_server_version(), "map": client.get_world().get_map().name}


def sticky(port: int) -> dict[str, Any]:
    """The same control three times, to one that takes changes alone, and to one that takes all."""
    client = connect(port)
    world = client.get_world()
    synchronous(world)
    for y, wish in ((1.75, "true"), (5.25, "false")):
        blueprint = world.get_blueprint_library().find("vehicle.tesla.model3")
        blueprint.set_attribute("sticky_control", wish)
        one = world.spawn_actor(blueprint, carla.Transform(carla.Location(0.0, y, 0.5)))
        for _ in range(3):
            one.apply_control(carla.VehicleControl(throttle=0.5))
    world.tick()
    return {}


def restarted(_port: int) -> dict[str, Any]:
    """A server dies and another one comes to its ports, while a sensor of the first one's listens."""
    first = Running()
    client = connect(first.port, 1.0)
    world = client.get_world()
    synchronous(world)
    one = car(world, carla.Transform(carla.Location(0.0, 1.75, 0.5)))
    blueprint = world.get_blueprint_library().find("sensor.other.collision")
    sensor = world.spawn_actor(blueprint, carla.Transform(), attach_to=one)
    heard: list[int] = []
    sensor.listen(lambda event: heard.append(event.frame))
    world.tick()
    time.sleep(0.2)
    first.stop()
    answer: dict[str, Any] = {"dead": error_of(world.tick)}
    with Running(rpc_port=first.port, streaming_port=first.streaming_port) as second:
        deadline = time.monotonic() + _TIMEOUT
        while second.counters()["world_open"] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        answer["world_open"] = second.counters()["world_open"]  # the old client's stream has come back
        answer["still_dead"] = error_of(client.get_server_version)
        answer["storm"] = second.counters()["unknown_stream_connections"]
        sensor.stop()
        time.sleep(0.3)
        before = second.counters()["unknown_stream_connections"]
        time.sleep(0.3)
        answer["after_stop"] = second.counters()["unknown_stream_connections"] - before
        again = connect(second.port)
        world = again.get_world()
        synchronous(world)
        two = [car(world, carla.Transform(carla.Location(x, 1.75, 0.5))) for x in (0.0, 6.0)]
        news: list[int] = []
        ears = world.spawn_actor(blueprint, carla.Transform(), attach_to=two[0])
        ears.listen(lambda event: news.append(event.frame))
        time.sleep(0.2)
        two[0].set_target_velocity(carla.Vector3D(10.0, 0.0, 0.0))
        for _ in range(20):
            world.tick()
        time.sleep(0.3)
        ears.stop()
        answer["events"] = [len(heard), len(news)]
    return answer


def main() -> None:
    name, *arguments = sys.argv[1:]
    answer = globals()[name](*(int(word) if word.isdigit() else word for word in arguments))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
