"""What is done per vehicle in a step around SUMO, compiled: a dozen NumPy calls on rows this short cost more.

`tests/simulators/test_kernels.py` holds the NumPy forms that these must equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numba import njit

__all__ = ["compare_targets", "fill_values", "kernel"]

# Columns of `core.state.Field`, as numbers (a test compares): compiled code is cached by this file's contents alone.
_X, _Y, _HEADING, _SPEED, _ACCEL, _PROGRESS = range(6)
_TOLERANCE = 1e-6  # [m/s] between the commanded and the achieved speed

_Function = TypeVar("_Function", bound=Callable[..., object])


def kernel(function: _Function) -> _Function:
    """Compile at the first call; keep the code on disk where some folder can be written."""
    try:
        compiled = njit(cache=True)(function)
    except RuntimeError:  # numba found no folder for its cache: it compiles anew in each process
        compiled = njit(function)
    return cast("_Function", compiled)


@kernel
def compare_targets(
    rows: Int64[np.ndarray, " rows"],
    controlled: Bool[np.ndarray, " slots"],
    target_speed: Float64[np.ndarray, " slots"],
    told: Float64[np.ndarray, " slots"],
    changed: Int64[np.ndarray, " slots"],
    speeds: Float64[np.ndarray, " slots"],
) -> tuple[int, int, int]:
    """Find what SUMO must be told.

    Args:
        rows: slots of vehicles on the road.
        controlled: who gets a target speed.
        target_speed: [m/s]
        told: the target each slot was last told, NaN: none; brought up to date.
        changed: filled with indices into `rows` whose target changed; first those whose control began or ended.
        speeds: filled with their new targets, -1: none. [m/s]

    Returns:
        how many changed, of these the first so many began or ended to be controlled; and the first index into
        `rows` with a target that is no speed, or -1.
    """
    count, switched = 0, 0
    for i in range(len(rows)):
        slot = rows[i]
        before = told[slot]
        if controlled[slot]:
            now = target_speed[slot]
            if not (0.0 <= now < math.inf):
                return count, switched, i
            if now == before:
                continue
            told[slot] = now
        elif math.isnan(before):
            continue
        else:
            now = -1.0
            told[slot] = math.nan
        if math.isnan(before) or now < 0.0:  # keep those that switch in front
            changed[count], speeds[count] = changed[switched], speeds[switched]
            changed[switched], speeds[switched] = i, now
            switched += 1
        else:
            changed[count], speeds[count] = i, now
        count += 1
    return count, switched, -1


@kernel
def fill_values(
    rows: Int64[np.ndarray, " rows"],
    fronts: Float64[np.ndarray, " twice_rows"],
    angles: Float64[np.ndarray, " rows"],
    speeds: Float64[np.ndarray, " rows"],
    fresh: Bool[np.ndarray, " slots"],
    told: Float64[np.ndarray, " slots"],
    values: Float64[np.ndarray, "slots fields"],
    origin: tuple[float, float],
    length: float,
    braking: float,
    acceleration: float,
    dt: float,
) -> tuple[int, int]:
    """SUMO's readings -> columns of the state.

    Args:
        rows: slots of vehicles on the road.
        fronts: x, y of each front bumper, one after the other. [m]
        angles: clockwise from north. [deg]
        speeds: [m/s]
        fresh: entered in this step, so placed and not yet moved; set to False.
        told: target speeds of this step, NaN: none. [m/s]
        values: columns `Field`; brought up to date.
        origin: the junction's centre in SUMO's coordinates. [m]
        length: of a vehicle. [m]
        braking, acceleration: limits of a vehicle. [m/s^2]
        dt: [s]

    Returns:
        vehicles that had a target, and those whose speed is not what target and limits of acceleration give.
    """
    commanded, overridden = 0, 0
    for i in range(len(rows)):
        slot = rows[i]
        heading = math.pi - (math.pi / 2 + math.radians(angles[i])) % (2 * math.pi)
        speed = speeds[i]
        values[slot, _X] = fronts[2 * i] - origin[0] - length / 2 * math.cos(heading)
        values[slot, _Y] = fronts[2 * i + 1] - origin[1] - length / 2 * math.sin(heading)
        values[slot, _HEADING] = heading
        if fresh[slot]:
            fresh[slot] = False
            values[slot, _ACCEL] = 0.0
            values[slot, _PROGRESS] = length
        else:
            before = values[slot, _SPEED]
            values[slot, _ACCEL] = (speed - before) / dt
            values[slot, _PROGRESS] += speed * dt  # SUMO's Euler step
            target = told[slot]
            if not math.isnan(target):
                commanded += 1
                expected = max(0.0, min(max(target, before - braking * dt), before + acceleration * dt))
                if abs(speed - expected) > _TOLERANCE:
                    overridden += 1
        values[slot, _SPEED] = speed
    return commanded, overridden
