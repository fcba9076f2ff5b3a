"""Boxes that touch, against brute force; impulses against the conservation of momentum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencda_marl.standin.collisions import contacts, impulses
from opencda_marl.standin.vehicles import VEHICLE, Vehicles


def rows_of(*poses: tuple[float, float, float]) -> np.ndarray:
    """Cars of 4.8 m by 2.16 m at x, y, yaw."""
    rows = np.zeros(len(poses), VEHICLE)
    rows["id"] = np.arange(len(poses)) + 1
    rows["physics"] = rows["collides"] = True
    rows["extent"], rows["box"], rows["mass"], rows["spin"] = (2.4, 1.08, 0.74), (0.0, 0.0, 0.74), 1500.0, np.nan
    rows["wheelbase"] = 2.9
    for row, (x, y, yaw) in zip(rows, poses, strict=True):
        row["place"], row["yaw"] = (x, y, 0.0), yaw
    return rows


def corners(row: np.void) -> np.ndarray:
    a, b, _ = row["extent"]
    cos, sin = np.cos(row["yaw"]), np.sin(row["yaw"])
    local = np.array([[a, b], [a, -b], [-a, -b], [-a, b]])
    return row["place"][:2] + local @ np.array([[cos, sin], [-sin, cos]])


def shared_area(one: np.void, other: np.void) -> float:
    """Brute force: one rectangle clipped by each edge of the other (Sutherland and Hodgman 1974). [m^2]"""
    piece, edges = list(corners(one)), corners(other)
    middle = other["place"][:2]
    for start, end in zip(edges, np.roll(edges, -1, axis=0), strict=True):
        normal = np.array([end[1] - start[1], start[0] - end[0]])
        normal = normal * np.sign((middle - start) @ normal)
        kept = []
        for here, there in zip(piece, [*piece[1:], *piece[:1]], strict=True):
            inside, next_inside = (here - start) @ normal, (there - start) @ normal
            if inside >= 0.0:
                kept.append(here)
            if inside * next_inside < 0.0:
                kept.append(here + (there - here) * inside / (inside - next_inside))
        piece = kept
    x, y = np.array(piece).reshape(-1, 2).T
    return float(abs(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))) / 2)


_POSE = st.tuples(st.floats(-6, 6), st.floats(-6, 6), st.floats(-3.14, 3.14))


@settings(max_examples=60)
@given(st.lists(_POSE, min_size=2, max_size=5))
def test_as_brute_force_says(poses: list[tuple[float, float, float]]) -> None:
    rows = rows_of(*poses)
    found = {tuple(pair) for pair in contacts(rows)[0].tolist()}
    for i in range(len(rows)):
        for j in range(i + 1, len(rows)):
            area = shared_area(rows[i], rows[j])
            if area == 0.0 or area > 1e-9:  # what rounding cannot decide is left out
                assert ((i, j) in found) == (area > 0.0)


@pytest.mark.parametrize(("gap", "touches"), [(-0.01, True), (0.01, False)])
def test_bumper_to_bumper(gap: float, touches: bool) -> None:
    pairs, normal = contacts(rows_of((0.0, 0.0, 0.0), (4.8 + gap, 0.0, 0.0)))
    assert (len(pairs) == 1) == touches
    if touches:
        assert normal[0] == pytest.approx([-1.0, 0.0], abs=1e-9)  # from the second to the first


def test_one_above_the_other_does_not_touch() -> None:
    rows = rows_of((0.0, 0.0, 0.0), (0.5, 0.0, 0.3))
    rows["place"][1, 2] = 1.5
    assert len(contacts(rows)[0]) == 0
    rows["place"][1, 2] = 1.4
    assert len(contacts(rows)[0]) == 1


def test_without_collisions_others_pass_through() -> None:
    rows = rows_of((0.0, 0.0, 0.0), (0.5, 0.0, 0.3))
    rows["collides"][0] = False
    assert len(contacts(rows)[0]) == 0


def test_bodies_without_physics_do_not_meet_but_block_a_spawn() -> None:
    rows = rows_of((0.0, 0.0, 0.0), (0.5, 0.0, 0.3))
    rows["physics"] = False
    assert len(contacts(rows)[0]) == 0
    assert len(contacts(rows, only=1)[0]) == 1


def test_a_rear_end_collision_keeps_momentum() -> None:
    """10 m/s into a standing one of twice the mass: both go on with a third of it."""
    rows = rows_of((0.0, 0.0, 0.0), (4.7, 0.0, 0.0))
    rows["mass"][1] = 3000.0
    rows["velocity"][0], rows["speed"][0] = (10.0, 0.0, 0.0), 10.0
    pairs, normal = contacts(rows)
    impulse = impulses(rows, pairs, normal)
    assert impulse[0] == pytest.approx([-1000.0 * 10.0, 0.0])  # reduced mass times closing speed
    vehicles = Vehicles()
    for index in range(2):
        vehicles.add(rows[index : index + 1])
    vehicles.bounce(pairs, impulse)
    assert vehicles.rows["speed"] == pytest.approx([10.0 / 3, 10.0 / 3])


def test_bodies_that_part_exchange_nothing() -> None:
    rows = rows_of((0.0, 0.0, 0.0), (4.7, 0.0, 0.0))
    rows["velocity"][1] = (3.0, 0.0, 0.0)
    assert impulses(rows, *contacts(rows)) == pytest.approx(0.0)
