"""Conventions: compass points by hand, and round trips for all angles and places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencda_marl.core.frames import (
    carla_location,
    carla_yaw,
    centre_of_front,
    front_of_centre,
    heading_of_carla_yaw,
    heading_of_sumo_angle,
    place_of_carla_location,
    sumo_angle,
    wrap,
)

ANGLES = st.floats(-1e4, 1e4)
PLACES = st.tuples(st.floats(-1e4, 1e4), st.floats(-1e4, 1e4)).map(np.array)

#            SUMO   ours        CARLA
COMPASS = [
    ("north", 0.0, np.pi / 2, -90.0),
    ("east", 90.0, 0.0, 0.0),
    ("south", 180.0, -np.pi / 2, 90.0),
    ("west", 270.0, np.pi, -180.0),  # and 180: one direction, see the ranges
    ("north-east", 45.0, np.pi / 4, -45.0),
]


@pytest.mark.parametrize(("name", "degrees", "heading", "yaw"), COMPASS)
def test_compass(name: str, degrees: float, heading: float, yaw: float) -> None:
    assert heading_of_sumo_angle(np.array(degrees)) == pytest.approx(heading)
    assert sumo_angle(np.array(heading)) == pytest.approx(degrees)
    assert carla_yaw(np.array(heading)) == pytest.approx(yaw)
    assert heading_of_carla_yaw(np.array(yaw)) == pytest.approx(heading)
    # what CARLA calls yaw is SUMO's angle less 90 degrees
    assert np.mod(yaw - (degrees - 90.0), 360.0) == pytest.approx(0.0)


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """Angle between two directions. [rad]"""
    return float(np.abs(np.angle(np.exp(1j * (one - other)))))


@given(ANGLES)
def test_round_trips_of_angles(degrees: float) -> None:
    angle = np.array(degrees)
    heading = heading_of_sumo_angle(angle)
    assert -np.pi < heading <= np.pi
    assert _apart(np.radians(sumo_angle(heading)), np.radians(angle)) < 1e-9
    assert 0.0 <= sumo_angle(heading) <= 360.0  # 360 only by rounding of a hair below it
    yaw = carla_yaw(heading)
    assert -180.0 <= yaw <= 180.0
    assert _apart(heading_of_carla_yaw(yaw), heading) < 1e-9


@given(ANGLES)
def test_wrapping_keeps_the_direction(radians: float) -> None:
    wrapped = wrap(np.array(radians))
    assert -np.pi < wrapped <= np.pi
    assert _apart(wrapped, np.array(radians)) < 1e-9


@given(PLACES, ANGLES, st.floats(0.1, 20))
def test_bumper_and_centre(place: np.ndarray, heading: float, length: float) -> None:
    front = front_of_centre(place, np.array(heading), length)
    assert np.hypot(*(front - place)) == pytest.approx(length / 2, rel=1e-6)
    assert centre_of_front(front, np.array(heading), length) == pytest.approx(place, abs=1e-9)


def test_the_centre_is_behind_the_bumper() -> None:
    fronts = np.array([[10.0, 0.0], [0.0, 10.0]])
    centres = centre_of_front(fronts, np.array([0.0, np.pi / 2]), 5.0)
    assert centres == pytest.approx(np.array([[7.5, 0.0], [0.0, 7.5]]))


@given(PLACES)
def test_carla_is_left_handed(place: np.ndarray) -> None:
    there = carla_location(place)
    assert there.tolist() == [place[0], -place[1]]
    assert (place_of_carla_location(there) == place).all()


@given(PLACES, ANGLES)
def test_a_step_ahead_is_the_same_step_in_carla(place: np.ndarray, degrees: float) -> None:
    """Moving along the heading, then converting, is converting, then moving along the yaw."""
    heading = heading_of_sumo_angle(np.array(degrees))
    ahead = place + np.array([np.cos(heading), np.sin(heading)])
    yaw = np.radians(carla_yaw(heading))
    there = carla_location(place) + np.array([np.cos(yaw), np.sin(yaw)])
    assert carla_location(ahead) == pytest.approx(there, abs=1e-9)
