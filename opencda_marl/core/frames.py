"""Conventions of SUMO and CARLA <-> ours: SI units, one right-handed world frame. Pure functions of arrays.

inside  metres, radians counter-clockwise from +x (east), y north, a vehicle's place is its centre
SUMO    degrees clockwise from north, the place is the middle of the front bumper
CARLA   left-handed: y = -y, yaw in degrees clockwise from +x seen from above (= SUMO's angle - 90), the centre

Positions here are relative to the junction's centre; `Roads.origin` says where that is in SUMO's file.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

_Array = Float64[np.ndarray, "..."]  # NumPy types its operators as Any

__all__ = [
    "carla_location",
    "carla_yaw",
    "centre_of_front",
    "front_of_centre",
    "heading_of_carla_yaw",
    "heading_of_sumo_angle",
    "place_of_carla_location",
    "sumo_angle",
    "wrap",
]


def wrap(angle: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """The same direction in (-pi, pi]. [rad]"""
    result: _Array = np.pi - np.mod(np.pi - angle, 2 * np.pi)
    return result


def heading_of_sumo_angle(angle: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """SUMO's angle [deg, clockwise from north] -> heading in (-pi, pi] [rad, counter-clockwise from east]."""
    result: _Array = np.pi - np.mod(np.pi / 2 + np.radians(angle), 2 * np.pi)
    return result


def sumo_angle(heading: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Heading -> SUMO's angle in [0, 360) [deg]."""
    result: _Array = np.mod(90.0 - np.degrees(heading), 360.0)
    return result


def centre_of_front(
    front: Float64[np.ndarray, "*shape 2"], heading: Float64[np.ndarray, "*shape"], length: float
) -> Float64[np.ndarray, "*shape 2"]:
    """Middle of the front bumper -> centre of a vehicle, half a length behind it. [m]"""
    result: _Array = front - (length / 2) * np.stack([np.cos(heading), np.sin(heading)], axis=-1)
    return result


def front_of_centre(
    centre: Float64[np.ndarray, "*shape 2"], heading: Float64[np.ndarray, "*shape"], length: float
) -> Float64[np.ndarray, "*shape 2"]:
    """Centre of a vehicle -> middle of its front bumper. [m]"""
    result: _Array = centre + (length / 2) * np.stack([np.cos(heading), np.sin(heading)], axis=-1)
    return result


def carla_location(place: Float64[np.ndarray, "*shape 2"]) -> Float64[np.ndarray, "*shape 2"]:
    """Place -> CARLA's x, y [m]: the y axis points south there."""
    result: _Array = place * np.array([1.0, -1.0])
    return result


def place_of_carla_location(location: Float64[np.ndarray, "*shape 2"]) -> Float64[np.ndarray, "*shape 2"]:
    """CARLA's x, y -> place. [m]"""
    result: _Array = location * np.array([1.0, -1.0])
    return result


def carla_yaw(heading: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Heading -> CARLA's yaw in [-180, 180) [deg]."""
    result: _Array = np.mod(180.0 - np.degrees(heading), 360.0) - 180.0
    return result


def heading_of_carla_yaw(yaw: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """CARLA's yaw [deg] -> heading in (-pi, pi] [rad]."""
    result: _Array = np.pi - np.mod(np.pi + np.radians(yaw), 2 * np.pi)
    return result
