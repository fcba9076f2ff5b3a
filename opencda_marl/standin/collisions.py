"""Boxes that touch: separating axes of oriented rectangles (Gottschalk, Lin and Manocha 1996), and heights."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

__all__ = ["contacts", "impulses"]

_Pairs = Int64[np.ndarray, "contacts 2"]
_NONE = np.zeros((0, 2), np.int64)
_NOTHING = np.zeros((0, 2))


@lru_cache(maxsize=64)
def _all_pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.triu_indices(count, 1)
    return first, second


def contacts(rows: np.ndarray, *, only: int | None = None) -> tuple[_Pairs, Float64[np.ndarray, "contacts 2"]]:
    """Which vehicles overlap.

    Args:
        rows: VEHICLE, one for each.
        only: pairs with this row alone; None: all pairs. A pair of which neither simulates physics is left out then.

    Returns:
        The pairs of rows, and the unit normal of each contact in the plane, from the second to the first.
    """
    count = len(rows)
    if count < 2:
        return _NONE, _NOTHING
    if only is None:
        first, second = _all_pairs(count)
    else:
        first = np.full(count - 1, only)
        second = np.delete(np.arange(count), only)
    cos, sin = np.cos(rows["yaw"]), np.sin(rows["yaw"])
    box, extent = rows["box"], rows["extent"]
    x = rows["place"][:, 0] + cos * box[:, 0] - sin * box[:, 1]
    y = rows["place"][:, 1] + sin * box[:, 0] + cos * box[:, 1]
    z = rows["place"][:, 2] + box[:, 2]
    reach = np.hypot(extent[:, 0], extent[:, 1])
    dx, dy = x[first] - x[second], y[first] - y[second]
    near = dx * dx + dy * dy < (reach[first] + reach[second]) ** 2
    if not near.any():
        return _NONE, _NOTHING
    first, second, dx, dy = first[near], second[near], dx[near], dy[near]
    touching = np.abs(z[first] - z[second]) < extent[first, 2] + extent[second, 2]
    touching &= rows["collides"][first] & rows["collides"][second]
    if only is None:
        touching &= rows["physics"][first] | rows["physics"][second]
    overlap, normal = _overlap(dx, dy, (cos, sin), extent, first, second)
    touching &= overlap
    return np.stack([first, second], axis=1)[touching], normal[touching]


def _overlap(
    dx: Float64[np.ndarray, " pairs"],
    dy: Float64[np.ndarray, " pairs"],
    direction: tuple[Float64[np.ndarray, " vehicles"], Float64[np.ndarray, " vehicles"]],
    extent: Float64[np.ndarray, "vehicles 3"],
    first: Int64[np.ndarray, " pairs"],
    second: Int64[np.ndarray, " pairs"],
) -> tuple[Bool[np.ndarray, " pairs"], Float64[np.ndarray, "pairs 2"]]:
    """Do the rectangles overlap, and along which of their four axes the least?"""
    cos, sin = direction
    c1, s1, c2, s2 = cos[first], sin[first], cos[second], sin[second]
    along, across = np.abs(c1 * c2 + s1 * s2), np.abs(s1 * c2 - c1 * s2)  # of the angle between them
    a1, b1, a2, b2 = extent[first, 0], extent[first, 1], extent[second, 0], extent[second, 1]
    axes = np.stack(
        [np.stack([c1, s1], -1), np.stack([-s1, c1], -1), np.stack([c2, s2], -1), np.stack([-s2, c2], -1)]
    )  # [4, pairs, 2]
    apart = axes[:, :, 0] * dx + axes[:, :, 1] * dy  # [4, pairs]
    reach = np.stack(
        [
            a1 + a2 * along + b2 * across,
            b1 + a2 * across + b2 * along,
            a2 + a1 * along + b1 * across,
            b2 + a1 * across + b1 * along,
        ]
    )
    depth = reach - np.abs(apart)
    best = np.argmin(depth, axis=0)
    pair = np.arange(len(dx))
    normal = axes[best, pair] * np.where(apart[best, pair] < 0.0, -1.0, 1.0)[:, None]
    return np.all(depth > 0.0, axis=0), normal


def impulses(
    rows: np.ndarray, pairs: _Pairs, normal: Float64[np.ndarray, "contacts 2"]
) -> Float64[np.ndarray, "contacts 2"]:
    """What takes the closing speed out of each pair, as if they stayed together: on the first of the pair. [N s]"""
    first, second = pairs[:, 0], pairs[:, 1]
    velocity = rows["velocity"][:, :2]
    closing = np.sum((velocity[first] - velocity[second]) * normal, axis=1)
    inverse = np.where(rows["physics"], 1.0 / rows["mass"], 0.0)
    size = np.maximum(-closing, 0.0) / np.maximum(inverse[first] + inverse[second], 1e-12)
    result: Float64[np.ndarray, "contacts 2"] = size[:, None] * normal
    return result
