"""What pedals and wheels do, in metres and seconds."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from opencda_marl.standin.vehicles import VEHICLE, Vehicles

WHEELBASE, MAX_STEER, MASS = 2.88, math.radians(70.0), 1850.0


def car(*, speed: float = 0.0, yaw: float = 0.0, drag: float = 0.3) -> Vehicles:
    """One, at the origin."""
    row = np.zeros(1, VEHICLE)
    row["id"], row["physics"], row["collides"], row["spin"] = 7, True, True, np.nan
    row["extent"], row["wheelbase"], row["max_steer"] = (2.4, 1.08, 0.74), WHEELBASE, MAX_STEER
    row["mass"], row["drag"], row["yaw"] = MASS, drag, yaw
    found = Vehicles()
    found.add(row)
    found.set_velocity(7, (speed * math.cos(yaw), speed * math.sin(yaw), 0.0))
    return found


def drive(vehicles: Vehicles, seconds: float, dt: float = 0.05, **pedals: float) -> np.void:
    names = ("throttle", "steer", "brake", "hand_brake", "reverse")
    vehicles.rows["control"][0, :5] = [pedals.get(name, 0.0) for name in names]
    for _ in range(round(seconds / dt)):
        vehicles.step(dt)
    return vehicles.rows[0]


def test_full_throttle_for_two_seconds() -> None:
    row = drive(car(drag=0.0), 2.0, throttle=1.0)
    assert row["speed"] == pytest.approx((4.0 - 0.15) * 2.0)  # traction less rolling, all the way
    assert row["place"] == pytest.approx([(4.0 - 0.15) * 2.0**2 / 2, 0.0, 0.0])
    assert row["acceleration"] == pytest.approx([3.85, 0.0, 0.0])


def test_power_limits_above_14_metres_per_second() -> None:
    row = drive(car(speed=20.0, drag=0.0), 0.05, throttle=1.0)
    assert row["acceleration"][0] == pytest.approx(55.0 / 20.0 - 0.15)


def test_a_hundred_kilometres_an_hour_take_eight_seconds_or_so() -> None:
    vehicles, time = car(), 0.0
    while vehicles.rows["speed"][0] < 27.78:
        drive(vehicles, 0.05, throttle=1.0)
        time += 0.05
    assert 7.0 < time < 10.0


@pytest.mark.parametrize("dt", [0.01, 0.05, 0.1])
def test_braking_distance(dt: float) -> None:
    """v^2 / 2a with a = 8.15, and a little less for drag and the engine, which are small beside the brake."""
    row = drive(car(speed=15.0), 4.0, dt, brake=1.0)
    assert row["speed"] == 0.0
    alone = 15.0**2 / (2 * 8.15)
    assert 0.93 * alone < row["place"][0] < alone


def test_a_stop_is_exact_whatever_the_step() -> None:
    """Without drag and engine the deceleration is constant, and the last, partial step is accounted for."""
    vehicles = car(speed=3.0, drag=0.0)
    vehicles.rows["control"][0, :3] = (1.0, 0.0, 1.0)  # throttle takes the engine's braking away
    deceleration = 8.0 + 0.15 - 4.0
    for _ in range(60):
        vehicles.step(0.05)
    assert vehicles.rows["place"][0, 0] == pytest.approx(9.0 / (2 * deceleration))
    assert vehicles.rows["speed"][0] == 0.0


def test_it_coasts_to_a_stop_and_never_rolls_back() -> None:
    vehicles = car(speed=5.0)
    speeds = [float(drive(vehicles, 0.05)["speed"]) for _ in range(900)]
    assert all(later <= earlier for earlier, later in pairwise(speeds))
    assert speeds[-1] == 0.0
    assert vehicles.rows["velocity"][0] == pytest.approx(0.0)


def test_a_steady_speed_needs_a_controller() -> None:
    """Half throttle neither keeps 10 m/s nor finds it again."""
    assert float(drive(car(speed=10.0), 5.0, throttle=0.5)["speed"]) > 14.0
    assert float(drive(car(speed=10.0), 5.0)["speed"]) < 8.0


def test_reverse() -> None:
    row = drive(car(yaw=0.5), 1.0, throttle=1.0, reverse=1.0)
    assert row["speed"] == pytest.approx(-3.85, abs=0.01)
    assert row["place"][0] < 0.0
    assert row["velocity"][1] == pytest.approx(row["speed"] * math.sin(0.5))


@pytest.mark.parametrize(("steer", "side"), [(0.3, 1.0), (-0.3, -1.0)])
def test_turning_radius(steer: float, side: float) -> None:
    """Rear axle: wheelbase / tan(angle). The centre, half a wheelbase ahead, runs further out. Right is +y, +yaw."""
    vehicles = car(speed=5.0)
    vehicles.rows["constant"], vehicles.rows["constant_velocity"] = True, (5.0, 0.0, 0.0)
    row = drive(vehicles, 0.0, steer=steer)
    radius = WHEELBASE / math.tan(abs(steer) * MAX_STEER)
    middle = np.array([-WHEELBASE / 2, side * radius])
    for _ in range(200):
        vehicles.step(0.05)
        row = vehicles.rows[0]
        heading = np.array([math.cos(row["yaw"]), math.sin(row["yaw"])])
        rear = row["place"][:2] - WHEELBASE / 2 * heading
        assert np.hypot(*(rear - middle)) == pytest.approx(radius)
        assert np.hypot(*(row["place"][:2] - middle)) == pytest.approx(math.hypot(radius, WHEELBASE / 2))
    assert row["yaw_rate"] == pytest.approx(side * 5.0 / radius)
    assert np.hypot(*row["velocity"][:2]) == pytest.approx(math.hypot(5.0, 5.0 / radius * WHEELBASE / 2))
    first = car(speed=5.0)
    drive(first, 0.5, steer=steer, throttle=1.0)
    assert math.copysign(1.0, first.rows["yaw"][0]) == side
    assert math.copysign(1.0, first.rows["place"][0, 1]) == side


def test_velocity_is_the_derivative_of_place() -> None:
    vehicles = car(speed=8.0)
    drive(vehicles, 1.0, throttle=0.4, steer=0.2)
    before = vehicles.rows["place"][0].copy()
    first = vehicles.rows["velocity"][0].copy()
    vehicles.step(1e-4)
    assert (vehicles.rows["place"][0] - before) / 1e-4 == pytest.approx(first, abs=1e-2)


def test_target_velocity_is_given_once() -> None:
    vehicles = car(yaw=math.pi / 2)
    vehicles.set_velocity(7, (3.0, 10.0, 1.0))  # only what is along its heading, south, stays
    assert vehicles.rows["velocity"][0] == pytest.approx([0.0, 10.0, 0.0], abs=1e-9)
    row = drive(vehicles, 5.0)
    assert 0.0 < row["speed"] < 8.0
    assert row["place"][1] > 30.0


def test_constant_velocity_is_in_the_vehicles_frame() -> None:
    vehicles = car(yaw=math.pi / 2)
    vehicles.rows["constant"], vehicles.rows["constant_velocity"] = True, (4.0, 1.0, 0.5)
    row = drive(vehicles, 2.0, brake=1.0)
    assert row["place"] == pytest.approx([-2.0, 8.0, 1.0])  # ahead is south, its right is west
    assert row["velocity"] == pytest.approx([-1.0, 4.0, 0.5])


def test_without_physics_it_stands_where_it_is_put() -> None:
    vehicles = car(speed=10.0)
    vehicles.rows["physics"] = False
    vehicles.put(7, (3.0, 4.0, 5.0), (1.0, 90.0, 2.0))
    row = drive(vehicles, 1.0, throttle=1.0, steer=1.0)
    assert row["place"] == pytest.approx([3.0, 4.0, 5.0])
    assert (row["pitch"], row["roll"], row["yaw"]) == (1.0, 2.0, pytest.approx(math.pi / 2))
    assert row["velocity"] == pytest.approx(0.0)


def test_a_spin_lasts_one_tick() -> None:
    vehicles = car()
    vehicles.rows["spin"] = math.radians(90.0)
    row = drive(vehicles, 0.5)
    assert row["yaw"] == pytest.approx(math.radians(90.0) * 0.05)
    assert row["yaw_rate"] == 0.0


def test_an_impulse_changes_the_speed_by_its_share() -> None:
    vehicles = car(speed=1.0)
    vehicles.push(7, (MASS * 2.0, MASS * 5.0, 0.0))
    assert vehicles.rows["speed"][0] == pytest.approx(3.0)


def test_yaw_stays_within_a_turn() -> None:
    vehicles = car(speed=5.0, yaw=3.1)
    vehicles.rows["constant"], vehicles.rows["constant_velocity"] = True, (5.0, 0.0, 0.0)
    for _ in range(300):
        row = drive(vehicles, 0.05, steer=0.5)
        assert -math.pi < row["yaw"] <= math.pi


def test_many_at_once_are_as_one_by_one() -> None:
    random = np.random.default_rng(3)
    alone, together = [], Vehicles()
    for number in range(12):
        one = car(speed=float(random.uniform(-5, 20)), yaw=float(random.uniform(-3, 3)))
        one.rows["control"][0, :5] = [*random.uniform(0, 1, 1), random.uniform(-1, 1), random.uniform(0, 0.3), 0, 0]
        alone.append(one)
        row = one.rows.copy()
        row["id"] = number
        together.add(row)
    for _ in range(40):
        together.step(0.05)
        for one in alone:
            one.step(0.05)
    for name in ("place", "yaw", "speed", "velocity", "acceleration"):
        assert together.rows[name] == pytest.approx(np.concatenate([one.rows[name] for one in alone]))
    together.remove([3, 5, 99])
    assert together.rows["id"].tolist() == [0, 1, 2, 4, 6, 7, 8, 9, 10, 11]
    assert together.index(6) == 4
