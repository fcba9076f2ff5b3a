"""What is done per vehicle around CARLA, without a server: lines, pedals, steering, boxes, drivers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opencda_marl.core.conflicts import conflict_zones
from opencda_marl.core.frames import heading_of_carla_yaw, place_of_carla_location
from opencda_marl.core.roads import Movement
from opencda_marl.core.state import Field, TrafficState
from opencda_marl.settings.carla import CarlaSettings, SpeedControlSettings
from opencda_marl.settings.traffic import DemandSettings, VehicleSettings
from opencda_marl.simulators import carla_reading
from opencda_marl.simulators.boxes import touching
from opencda_marl.simulators.carla_control import GAINS, MEMORY, READING, decide, follow, gains
from opencda_marl.simulators.carla_map import entries
from opencda_marl.simulators.carla_reading import settle, take_in
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.right_of_way import Drivers

ROADS = load_roads(find_network("intersection"))
VEHICLE = VehicleSettings()
DT, WHEELBASE, MAX_STEER = 0.05, 2.85, math.radians(70)
LIMITS = np.array([2.6, 4.5, 9.0])
ROW = np.zeros(1, np.int64)
OURS = np.ones(1, np.bool_)


def _gains(settings: CarlaSettings | None = None) -> np.ndarray:
    return gains(settings or CarlaSettings(), wheelbase=WHEELBASE, max_steer=MAX_STEER, length=5.0, dt=DT)


def _decide(reading: np.ndarray, memory: np.ndarray, target: float, constants: np.ndarray) -> tuple[float, ...]:
    pedals = np.zeros((1, 3))
    decide(ROW, reading, memory, np.array([target]), OURS, LIMITS, constants, pedals)
    return tuple(pedals[0].tolist())


def _memory(**columns: float) -> np.ndarray:
    memory = np.zeros((1, len(MEMORY)))
    for name, value in columns.items():
        memory[0, MEMORY.index(name)] = value
    return memory


def _reading(**columns: float) -> np.ndarray:
    reading = np.zeros((1, len(READING)))
    for name, value in columns.items():
        reading[0, READING.index(name)] = value
    return reading


# -------------------------------------------------------------------- where on the line


def _follow(route: int, x: float, y: float, heading: float, near: float) -> tuple[float, float, float]:
    """Progress, distance left of the line, heading of the line."""
    reading, memory, progress = _reading(x=x, y=y, heading=heading), _memory(), np.array([near])
    routes = np.array([route], np.int16)
    place = (ROADS.points, ROADS.samples, ROADS.length, ROADS.spacing)
    follow(ROW, reading, memory, progress, routes, *place, VEHICLE.length, 0.0)
    return float(progress[0]), float(memory[0, MEMORY.index("path_error")]), float(memory[0, MEMORY.index("line")])


def test_progress_is_that_of_the_front_bumper() -> None:
    route = int(np.flatnonzero((ROADS.arm == 3) & (ROADS.movement == Movement.STRAIGHT))[0])  # eastward, y = -5.25
    assert _follow(route, -60.0, -5.25, 0.0, 41.0) == pytest.approx((42.5, 0.0, 0.0))
    assert _follow(route, -60.0, -5.05, 0.0, 41.0) == pytest.approx((42.5, 0.2, 0.0)), "north of it is left"
    assert _follow(route, -60.0, -5.55, 0.0, 41.0) == pytest.approx((42.5, -0.3, 0.0))
    length = float(ROADS.length[route])
    beyond = _follow(route, 98.0, -5.25, 0.0, length - 0.3)
    assert beyond == pytest.approx((length + 0.5, 0.0, 0.0)), "the line goes on behind its end"


@pytest.mark.parametrize("route", range(ROADS.routes))
def test_progress_along_every_route_is_what_brute_force_says(route: int) -> None:
    """A point 0.4 m left of each place of the line, against the nearest of a million points."""
    rng = np.random.default_rng(route)
    mile = np.arange(ROADS.samples[route]) * ROADS.spacing
    mile[-1] = ROADS.length[route]
    line = ROADS.points[route, : ROADS.samples[route], :2]
    fine = np.linspace(0.0, mile[-1], 200_001)
    dense = np.stack([np.interp(fine, mile, line[:, 0]), np.interp(fine, mile, line[:, 1])], axis=1)
    for s in rng.uniform(5.0, mile[-1] - 5.0, 20):
        k = int(s / ROADS.spacing)
        side = line[k + 1] - line[k]
        left = np.array([-side[1], side[0]]) / np.hypot(*side)
        bumper = line[k] + 0.5 * side + 0.4 * left
        nearest = int(np.argmin(((dense - bumper) ** 2).sum(axis=1)))
        heading = float(rng.uniform(-3, 3))
        x, y = bumper - 2.5 * np.array([math.cos(heading), math.sin(heading)])
        progress, error, _ = _follow(route, float(x), float(y), heading, s + rng.uniform(-1, 1))
        assert progress == pytest.approx(fine[nearest], abs=2e-3)
        assert error == pytest.approx(float(np.hypot(*(dense[nearest] - bumper))), abs=1e-3)


def test_vehicles_enter_where_sumo_puts_them() -> None:
    begin = entries(ROADS, VEHICLE.length)
    place, heading = place_of_carla_location(begin.location), heading_of_carla_yaw(begin.yaw)
    assert place == pytest.approx(np.stack([begin.x, begin.y], axis=1))
    for route in range(ROADS.routes):
        at = _follow(route, begin.x[route], begin.y[route], float(heading[route]), 4.0)
        assert at[:2] == pytest.approx((VEHICLE.length, 0.0), abs=1e-6)
        arm = ROADS.arm_heading[ROADS.arm[route]]
        assert np.exp(1j * heading[route]) == pytest.approx(np.exp(1j * arm), abs=1e-6)


# -------------------------------------------------------------------- pedals


def test_the_pedals_by_hand() -> None:
    """8 m/s, told 10: the reference rises by 2.6 * 0.05 = 0.13; 2.6 of 4 m/s2 is 0.65 of the throttle."""
    memory = _memory(reference=8.0, rear=8.0)
    assert _decide(_reading(ahead=8.0), memory, 10.0, _gains()) == pytest.approx((0.65, 0.0, 0.0))
    assert memory[0, MEMORY.index("reference")] == pytest.approx(8.13)
    # told 0: 4.5 of 8 m/s2
    memory = _memory(reference=8.0, rear=8.0)
    assert _decide(_reading(ahead=8.0), memory, 0.0, _gains()) == pytest.approx((0.0, 0.0, 4.5 / 8.0))
    # 0.1 m/s too slow: kp 5 asks for 0.5 m/s2 more
    memory = _memory(reference=8.0, rear=8.0)
    assert _decide(_reading(ahead=7.9), memory, 8.0, _gains())[0] == pytest.approx(0.5 / 4.0)
    assert memory[0, MEMORY.index("integral")] == pytest.approx(0.1 * DT)
    assert _decide(_reading(ahead=0.0), _memory(), 0.0, _gains()) == (0.0, 0.0, 1.0), "the brake is held"


def test_the_integral_does_not_wind_up() -> None:
    """A wall holds the vehicle for a minute; once it is gone there is no more than full throttle to take back."""
    constants = _gains()
    memory = _memory(reference=5.0, rear=5.0)
    for _ in range(1200):
        throttle, _, _ = _decide(_reading(ahead=0.0), memory, 10.0, constants)
    assert throttle == 1.0
    bound = constants[GAINS.index("windup")] / constants[GAINS.index("ki")]
    assert memory[0, MEMORY.index("integral")] <= bound
    held = memory[0, MEMORY.index("integral")]
    _decide(_reading(ahead=0.0), memory, 10.0, constants)
    assert memory[0, MEMORY.index("integral")] == held, "it stands still while the pedal is at its end"
    assert memory[0, MEMORY.index("reference")] <= 1.5 + 2.6 * DT + 1e-9, "nor does the reference run away"


@pytest.mark.parametrize("target", [0.0, 4.0, 10.0, 16.0])
def test_a_car_told_a_speed_has_it_after_five_seconds(target: float) -> None:
    """A plant that is not what the controller takes it for: a fifth weaker, with drag."""
    memory, speed = _memory(reference=10.0, rear=10.0), 10.0
    worst = 0.0
    for _ in range(100):
        throttle, _, brake = _decide(_reading(ahead=speed), memory, target, _gains())
        net = 0.8 * (4.0 * throttle - 8.0 * brake) - 0.15 - 0.03 * speed
        speed = max(0.0, speed + net * DT)
        worst = max(worst, speed - target if target > 10.0 else target - speed)
    assert speed == pytest.approx(target, abs=0.05)
    assert worst < 0.3, "no overshoot to speak of"


def test_a_gain_of_each_name_is_read() -> None:
    """Every setting of the controllers changes what is done, or the memory."""
    start = {"integral": 0.4, "error": 0.2, "path_error": 0.5, "line": 0.1}

    def outcome(constants: np.ndarray, speed: float, target: float, reference: float) -> list[float]:
        memory = _memory(**start, reference=reference, rear=reference * 0.9)
        pedals = _decide(_reading(ahead=speed, heading=0.3), memory, target, constants)
        return [*pedals, *memory[0].tolist()]

    for index, name in enumerate(GAINS):
        other = _gains(CarlaSettings(speed_control=SpeedControlSettings(kd=0.1)))
        base = other.copy()
        other[index] *= 0.01 if name in ("windup", "limit") else 1.3
        if name == "coast":
            base[index], other[index] = 0.0, 20.0
        cases = [(5.2, 12.0, 6.0), (5.2, 0.0, 6.0), (6.0, 0.0, 9.0), (6.0, 12.0, 9.0), (6.0, 6.0, 6.0)]
        same = [outcome(base, *case) == outcome(other, *case) for case in cases]
        assert not all(same), name


# -------------------------------------------------------------------- steering


def test_stanley_by_hand() -> None:
    """0.3 m left of an eastward line at 5 m/s: right, by atan(4 * 0.3 / 6) of the bumper's way."""
    phi = -math.atan(4.0 * 0.3 / (1.0 + 5.0))
    wheels = math.atan(WHEELBASE / (0.5 * (WHEELBASE + 5.0)) * math.tan(phi))
    memory = _memory(reference=5.0, rear=5.0, path_error=0.3)
    _, steer, _ = _decide(_reading(ahead=5.0), memory, 5.0, _gains())
    assert steer == pytest.approx(-wheels / MAX_STEER)
    assert steer > 0.0, "CARLA's positive steer turns right"
    # heading 10 degrees left of the line, on it: the bumper goes back by as much
    memory = _memory(reference=5.0, rear=5.0)
    _, steer, _ = _decide(_reading(ahead=5.0, heading=math.radians(10)), memory, 5.0, _gains())
    wheels = math.atan(WHEELBASE / (0.5 * (WHEELBASE + 5.0)) * math.tan(math.radians(10)))
    assert steer == pytest.approx(wheels / MAX_STEER)
    _, steer, _ = _decide(_reading(ahead=5.0, heading=3.0), _memory(reference=5.0, rear=5.0), 5.0, _gains())
    assert 0.0 < steer <= 1.0


@pytest.mark.parametrize("route", range(3))
def test_a_bicycle_keeps_to_its_line(route: int) -> None:
    """Right, straight, left: the bumper within 5 cm, begun 0.5 m beside the line and settled before the junction."""
    line = ROADS.points[route]
    heading = float(line[0, 2])
    ahead = np.array([math.cos(heading), math.sin(heading)])
    rear = line[20, :2] - 0.5 * (VEHICLE.length + WHEELBASE) * ahead + 0.5 * np.array([-ahead[1], ahead[0]])
    memory, progress = _memory(reference=7.0, rear=7.0), np.array([10.0])
    errors = []
    while progress[0] < ROADS.length[route] - 5.0:
        x, y = rear + WHEELBASE / 2 * np.array([math.cos(heading), math.sin(heading)])
        reading = _reading(x=x, y=y, heading=heading, ahead=7.0)
        place = (ROADS.points, ROADS.samples, ROADS.length, ROADS.spacing)
        follow(ROW, reading, memory, progress, np.array([route], np.int16), *place, VEHICLE.length, DT / 2)
        _, steer, _ = _decide(reading, memory, 7.0, _gains())
        curvature = math.tan(-steer * MAX_STEER) / WHEELBASE
        for _ in range(10):  # [s] a tenth of a step each
            rear = rear + 7.0 * DT / 10 * np.array([math.cos(heading), math.sin(heading)])
            heading += 7.0 * DT / 10 * curvature
        errors.append((float(progress[0]), abs(memory[0, MEMORY.index("path_error")])))
    late = [error for at, error in errors if at > ROADS.stop_line[route] - 20.0]
    assert max(late) < 0.05
    assert max(error for _, error in errors) < 0.55


# -------------------------------------------------------------------- readings


def test_columns_are_those_of_the_state() -> None:
    names = ("X", "Y", "HEADING", "SPEED", "ACCEL", "PROGRESS")
    assert [getattr(carla_reading, f"_{name}") for name in names] == [int(Field[name]) for name in names]


def test_readings_by_hand() -> None:
    """Southward in CARLA (yaw 90) is southward here (heading -90); the box's middle lies 0.1 m ahead."""
    raw = np.array([[12.0, 5.0, 0.0, 90.0, 0.5, 7.0]])
    reading = np.zeros((1, 5))
    reading[0, 2] = math.radians(-90) - 0.02  # turned left by 0.02 rad since
    fresh = np.ones(1, np.bool_)
    take_in(ROW, raw, (2.0, 1.0), (0.1, 0.0), 5.0, DT, fresh, reading)
    # x 12 - 2; y -5 - 1, and 0.1 m further south; velocity: 7 ahead, 0.5 east is left, and the bumper swings 1 m/s more
    assert reading[0] == pytest.approx([10.0, -6.1, math.radians(-90), 7.0, 0.5 + 0.02 / DT * 2.5])
    assert not fresh[0]
    values = np.zeros((1, len(Field)))
    values[0, Field.SPEED] = 7.0
    told, off = settle(ROW, reading, np.array([33.0]), np.array([7.0]), OURS, DT, values)
    speed = math.hypot(7.0, 1.5)
    assert values[0, [Field.SPEED, Field.ACCEL, Field.PROGRESS]] == pytest.approx([speed, (speed - 7.0) / DT, 33.0])
    assert (told, off) == (1, 0)
    assert settle(ROW, reading, np.array([33.0]), np.array([6.0]), OURS, DT, values) == (1, 1)


# -------------------------------------------------------------------- boxes


def _corners(x: float, y: float, heading: float, length: float, width: float) -> np.ndarray:
    cos, sin = math.cos(heading), math.sin(heading)
    half = np.array([[1, 1], [1, -1], [-1, -1], [-1, 1]]) * (length / 2, width / 2)
    return half @ np.array([[cos, sin], [-sin, cos]]) + (x, y)


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    """Brute force: a point of one's grid lies inside the other."""

    def inside(points: np.ndarray, box: np.ndarray) -> bool:
        a, b = box[0] - box[1], box[1] - box[2]
        away = points - box.mean(axis=0)
        return bool(((np.abs(away @ a) < a @ a / 2) & (np.abs(away @ b) < b @ b / 2)).any())

    def grid(box: np.ndarray) -> np.ndarray:
        u, v = np.meshgrid(np.linspace(0, 1, 60), np.linspace(0, 1, 30))
        return box[1] + u.reshape(-1, 1) * (box[0] - box[1]) + v.reshape(-1, 1) * (box[2] - box[1])

    return inside(grid(one), other) or inside(grid(other), one)


def test_boxes_that_touch_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(0)
    seen = [0, 0]
    for _ in range(300):
        places = np.column_stack([rng.uniform(-4, 4, 2), rng.uniform(-4, 4, 2), rng.uniform(-4, 4, 2)])
        pairs = np.zeros((4, 2), np.int64)
        count = touching(np.array([1, 0]), places, 5.0, 1.8, pairs)
        boxes = [_corners(*place, 5.0, 1.8) for place in places.tolist()]
        grown = [_corners(*place, 5.2, 2.0) for place in places.tolist()]
        shrunk = [_corners(*place, 4.8, 1.6) for place in places.tolist()]
        if _overlap(*shrunk):
            assert (count, pairs[0].tolist()) == (1, [0, 1])
        elif not _overlap(*grown):
            assert count == 0
        seen[int(_overlap(*boxes))] += 1
    assert min(seen) > 50


def test_boxes_by_hand() -> None:
    pairs = np.zeros((3, 2), np.int64)
    rows = np.arange(2)
    for gap, expected in ((4.99, 1), (5.0, 0)):
        assert touching(rows, np.array([[0.0, 0, 0], [gap, 0, 0]]), 5.0, 1.8, pairs) == expected
    for gap, expected in ((1.79, 1), (1.8, 0)):
        assert touching(rows, np.array([[0.0, 0, 0], [0, gap, 0]]), 5.0, 1.8, pairs) == expected
    # side by side on lanes 3.5 m apart, and a T: half a length and half a width
    assert touching(rows, np.array([[0.0, 0, 0], [0, 3.5, 0]]), 5.0, 1.8, pairs) == 0
    assert touching(rows, np.array([[0.0, 0, 0], [3.39, 0, math.pi / 2]]), 5.0, 1.8, pairs) == 1
    assert touching(rows, np.array([[0.0, 0, 0], [3.41, 0, math.pi / 2]]), 5.0, 1.8, pairs) == 0


# -------------------------------------------------------------------- drivers of their own


def _drivers(model: str = "IDM") -> Drivers:
    demand = DemandSettings(car_following=model)  # type: ignore[arg-type]
    return Drivers(ROADS, conflict_zones(ROADS), VEHICLE, demand, 4, DT)


def _state(*vehicles: tuple[int, float, float]) -> TrafficState:
    state = TrafficState.empty(4)
    for slot, (route, progress, speed) in enumerate(vehicles):
        state.alive[slot], state.routes[slot], state.ids[slot] = True, route, slot
        state.values[slot, [Field.PROGRESS, Field.SPEED]] = progress, speed
    return state


def _wanted(drivers: Drivers, state: TrafficState, commanded: tuple[int, ...] = ()) -> np.ndarray:
    told, target = np.zeros(4, np.bool_), np.zeros(4)
    told[list(commanded)] = True
    drivers.drive(state.rows(), state, told, target)
    return target


ACROSS = int(np.flatnonzero((ROADS.arm == 0) & (ROADS.movement == Movement.STRAIGHT))[0])
EASTWARD = int(np.flatnonzero((ROADS.arm == 3) & (ROADS.movement == Movement.STRAIGHT))[0])


def test_nobody_ahead_means_the_limit_and_somebody_means_krausss_speed() -> None:
    alone = _wanted(_drivers("Krauss"), _state((EASTWARD, 20.0, 5.0)))
    assert 5.0 < alone[0] <= 5.0 + 2.6 * DT
    behind = _state((EASTWARD, 20.0, 13.0), (EASTWARD, 32.5, 0.0))  # 7.5 m to its rear, 2.5 kept: 5 m
    expected = -4.5 + math.sqrt(4.5**2 + 2 * 4.5 * 5.0)
    assert _wanted(_drivers("Krauss"), behind)[0] == pytest.approx(expected, abs=0.5 * 2.6 * DT + 1e-9)
    assert _wanted(_drivers("IDM"), behind)[0] <= expected + 1e-9


def test_first_come_first_served() -> None:
    drivers = _drivers()
    stop = float(ROADS.stop_line[EASTWARD])
    zones = conflict_zones(ROADS)
    # the northern one is nearer and takes its number first; the western one stops before the zone
    state = _state((EASTWARD, stop - 8.0, 6.0), (ACROSS, stop - 5.0, 6.0))
    first = _wanted(drivers, state)
    room = float(zones.entry[EASTWARD, ACROSS]) - (stop - 8.0) - 0.5
    assert first[0] <= -4.5 + math.sqrt(4.5**2 + 2 * 4.5 * room) + 1e-9
    assert first[1] > 6.0
    # it has left: the way is free
    state.values[1, Field.PROGRESS] = float(zones.exit[ACROSS, EASTWARD]) + VEHICLE.length + 0.1
    assert _wanted(drivers, state)[0] > 6.0


def test_commanded_vehicles_that_come_soon_go_first() -> None:
    stop = float(ROADS.stop_line[EASTWARD])
    for speed, goes in ((6.0, False), (0.0, True)):
        state = _state((EASTWARD, stop - 2.0, 7.5), (ACROSS, stop - 5.0, speed))
        wanted = _wanted(_drivers(), state, commanded=(1,))
        assert wanted[1] == 0.0, "who is commanded is left alone"
        assert bool(wanted[0] > 7.5) is goes
