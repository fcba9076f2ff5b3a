"""Vehicles that touch: oriented rectangles in the plane, by the separating axis theorem (Gottschalk et al. 1996)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float64, Int64

from opencda_marl.simulators.kernels import kernel

__all__ = ["touching"]


@kernel
def _apart(
    dx: float, dy: float, one: float, other: float, half: tuple[float, float], half_other: tuple[float, float]
) -> bool:
    """Is there an axis of one of two rectangles along which they do not overlap?"""
    cos1, sin1, cos2, sin2 = math.cos(one), math.sin(one), math.cos(other), math.sin(other)
    along, across = abs(cos1 * cos2 + sin1 * sin2), abs(cos1 * sin2 - sin1 * cos2)
    if abs(dx * cos1 + dy * sin1) >= half[0] + half_other[0] * along + half_other[1] * across:
        return True
    if abs(dy * cos1 - dx * sin1) >= half[1] + half_other[0] * across + half_other[1] * along:
        return True
    if abs(dx * cos2 + dy * sin2) >= half_other[0] + half[0] * along + half[1] * across:
        return True
    return bool(abs(dy * cos2 - dx * sin2) >= half_other[1] + half[0] * across + half[1] * along)


@kernel
def touching(
    rows: Int64[np.ndarray, " rows"],
    places: Float64[np.ndarray, "slots columns"],
    length: float,
    width: float,
    pairs: Int64[np.ndarray, "pairs 2"],
) -> int:
    """Find the pairs of vehicles whose boxes overlap; boxes that share an edge do not.

    Args:
        rows: slots of vehicles.
        places: x [m], y [m], heading [rad] of each middle in the first three columns.
        length, width: of every vehicle. [m]
        pairs: written, the lower slot first; pairs beyond its length are counted only.

    Returns:
        how many pairs there are.
    """
    half = (length / 2, width / 2)
    reach = length * length + width * width  # two circles around the boxes
    count = 0
    for a in range(len(rows)):
        i = rows[a]
        for b in range(a + 1, len(rows)):
            j = rows[b]
            dx, dy = places[j, 0] - places[i, 0], places[j, 1] - places[i, 1]
            if dx * dx + dy * dy >= reach:
                continue
            if not _apart(dx, dy, places[i, 2], places[j, 2], half, half):
                if count < len(pairs):
                    pairs[count, 0], pairs[count, 1] = min(i, j), max(i, j)
                count += 1
    return count
