"""Snapshots of CARLA -> columns of the state, compiled. Speeds are those of the front bumper's middle, as in SUMO."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float64, Int64

from opencda_marl.simulators.kernels import kernel

__all__ = ["RAW", "settle", "take_in"]

RAW = ("x", "y", "z", "yaw", "vx", "vy")
"""Columns of a snapshot: the actor's place [m], yaw [deg], velocity [m/s], all in CARLA's frame."""

# columns of `core.state.Field`, as numbers (a test compares): compiled code is cached by this file's contents alone
_X, _Y, _HEADING, _SPEED, _ACCEL, _PROGRESS = range(6)
_OFF_TARGET = 0.5  # [m/s] between the reference and the speed: more counts as overridden


@kernel
def take_in(
    rows: Int64[np.ndarray, " rows"],
    raw: Float64[np.ndarray, "rows 6"],
    origin: tuple[float, float],
    box: tuple[float, float],
    length: float,
    dt: float,
    fresh: Bool[np.ndarray, " slots"],
    reading: Float64[np.ndarray, "slots 5"],
) -> None:
    """Raw columns -> `carla_control.READING`: our frame, the box's middle, the bumper's sideways velocity.

    Args:
        rows: slots of vehicles.
        raw: see RAW, a line for each of them.
        origin: the junction's centre in the network's coordinates. [m]
        box: the box's middle, ahead and to the right of the actor's place. [m]
        length: of a vehicle. [m]
        dt: [s]
        fresh: entered since the last tick; set to False.
        reading: brought up to date.
    """
    for i in range(len(rows)):
        slot = rows[i]
        heading = math.pi - (math.pi + math.radians(raw[i, 3])) % (2.0 * math.pi)
        cos, sin = math.cos(heading), math.sin(heading)
        turned = math.pi - (math.pi - (heading - reading[slot, 2])) % (2.0 * math.pi)
        vx, vy = raw[i, 4], -raw[i, 5]
        reading[slot, 0] = raw[i, 0] - origin[0] + box[0] * cos + box[1] * sin
        reading[slot, 1] = -raw[i, 1] - origin[1] + box[0] * sin - box[1] * cos
        reading[slot, 2] = heading
        reading[slot, 3] = vx * cos + vy * sin
        reading[slot, 4] = vy * cos - vx * sin + turned / dt * length / 2
        fresh[slot] = False


@kernel
def settle(
    rows: Int64[np.ndarray, " rows"],
    reading: Float64[np.ndarray, "slots 5"],
    progress: Float64[np.ndarray, " slots"],
    reference: Float64[np.ndarray, " slots"],
    commanded: Bool[np.ndarray, " slots"],
    dt: float,
    values: Float64[np.ndarray, "slots fields"],
) -> tuple[int, int]:
    """Columns of the state from what was read.

    Args:
        rows: slots of vehicles.
        reading: see `carla_control.READING`.
        progress: of the front bumper along the route. [m]
        reference: speed that the controllers aimed at in this step. [m/s]
        commanded: who had a target in this step.
        dt: [s]
        values: columns `Field`; brought up to date.

    Returns:
        vehicles that had a target, and those of them that are far from their reference.
    """
    told, off = 0, 0
    for slot in rows:
        speed = math.hypot(reading[slot, 3], reading[slot, 4]) if reading[slot, 3] > 0.0 else 0.0
        values[slot, _X], values[slot, _Y] = reading[slot, 0], reading[slot, 1]
        values[slot, _HEADING] = reading[slot, 2]
        values[slot, _ACCEL] = (speed - values[slot, _SPEED]) / dt
        values[slot, _SPEED] = speed
        values[slot, _PROGRESS] = progress[slot]
        if commanded[slot]:
            told += 1
            if abs(speed - reference[slot]) > _OFF_TARGET:
                off += 1
    return told, off
