"""Where paths meet: computed once per network, used by everything that looks at pairs of vehicles.

Two routes conflict where their centre lines come closer than `clearance` inside the junction: with vehicles
1.8 m wide and turning, that means contact. The stretch of route i on which that is so is i's *zone* with j;
j has a stretch of its own. A vehicle is in its zone from its front bumper's entry until its rear has left.

Routes from one entry lane never conflict: on the lane the one behind follows the one in front, and where
they part they part. Routes into one exit lane conflict from the merging on until the exit lane begins; from
there on, again, the one behind follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from opencda_marl.core.roads import Roads

__all__ = ["CLEARANCE", "Conflicts", "conflict_zones", "zone_table"]

CLEARANCE = 2.6
"""[m] centre lines closer than this: two cars cannot both be there."""

_SAME_POINT = 0.5  # [m] exit lanes whose ends are closer are one lane


@dataclass(frozen=True, slots=True)
class Conflicts:
    """Tables over pairs of routes; the first index is whose distances they are."""

    exists: Bool[np.ndarray, "routes routes"]
    entry: Float64[np.ndarray, "routes routes"]  # [m] where the zone begins on the first one's path; NaN: none
    exit: Float64[np.ndarray, "routes routes"]  # [m] where it ends
    shared_until: Float64[np.ndarray, "routes routes"]  # [m] one lane up to here; inf: the same route; 0: never
    shared_after: Float64[np.ndarray, "routes routes"]  # [m] one lane from here on; inf: never


_Points = Float64[np.ndarray, "points 2"]


def _distances(points: _Points, line: _Points) -> Float64[np.ndarray, " points"]:
    """Distance of each point to a polyline. [m]"""
    begin, step = line[:-1], np.diff(line, axis=0)  # [sides, 2]
    squared = (step**2).sum(axis=1)
    away = points[:, None] - begin  # [points, sides, 2]
    along = (away * step).sum(axis=2) / np.where(squared > 0.0, squared, 1.0)
    nearest = away - np.clip(along, 0.0, 1.0)[..., None] * step
    found: Float64[np.ndarray, " points"] = np.hypot(nearest[..., 0], nearest[..., 1]).min(axis=1)
    return found


def _close_stretch(mine: _Points, other: _Points, clearance: float) -> tuple[int, int]:
    """First and last of my samples that are closer to the other line than `clearance`; (-1, -1): none."""
    close = np.flatnonzero(_distances(mine, other) < clearance)
    return (int(close[0]), int(close[-1])) if len(close) else (-1, -1)


def conflict_zones(roads: Roads, clearance: float = CLEARANCE) -> Conflicts:
    """Zones of every pair of routes, exact to one sample of the centre lines (rounded outwards).

    Args:
        roads: the crossing.
        clearance: [m] centre lines closer than this conflict.
    """
    count = roads.routes
    # samples inside the junction: from the last one before the stop line to the first behind the exit
    first = np.floor(roads.stop_line / roads.spacing).astype(np.int64)
    last = np.minimum(np.ceil(roads.junction_exit / roads.spacing).astype(np.int64), roads.samples - 1)
    inside = [roads.points[i, first[i] : last[i] + 1, :2] for i in range(count)]
    ends = roads.points[np.arange(count), roads.samples - 1, :2]  # [routes, 2]
    entry, exit_ = np.full((count, count), np.nan), np.full((count, count), np.nan)
    until, after = np.zeros((count, count)), np.full((count, count), np.inf)
    for i in range(count):
        for j in range(count):
            if i == j:
                until[i, j] = np.inf
                continue
            same_entry = roads.entry_edge[i] == roads.entry_edge[j] and roads.lane[i] == roads.lane[j]
            gap = float(np.hypot(*(ends[i] - ends[j])))
            same_exit = roads.exit_edge[i] == roads.exit_edge[j] and gap < _SAME_POINT
            begin, end = _close_stretch(inside[i], inside[j], clearance)
            if begin >= 0:
                begin, end = begin + int(first[i]), end + int(first[i])
            if same_entry:
                until[i, j] = roads.spacing * end if begin >= 0 else roads.stop_line[i]
            elif begin >= 0:
                entry[i, j] = max(roads.spacing * (begin - 1), roads.stop_line[i])
                exit_[i, j] = min(roads.spacing * (end + 1), roads.junction_exit[i])
            if same_exit:
                after[i, j] = roads.junction_exit[i]
    return Conflicts(~np.isnan(entry), entry, exit_, until, after)


def zone_table(conflicts: Conflicts, roads: Roads, *, intent: bool) -> Float64[np.ndarray, "routes routes 4"]:
    """What a vehicle on route i knows of its zone with one on route j: entry and exit of i, entry and exit of j.

    NaN where there is no conflict. With `intent` False the other's movement is hidden: its zone is the hull over
    every route that begins on j's arm and conflicts with i, so that nothing in the table depends on which of them
    j will take. (Which lane j is on can be seen, and on a crossing where a lane allows one movement only, whoever
    knows the map can tell the movement from it; the table does not.) Vehicles of one's own lane never conflict.

    Args:
        conflicts: of the crossing.
        roads: the crossing.
        intent: is the others' movement known?
    """
    count = roads.routes
    table = np.full((count, count, 4), np.nan)
    for i in range(count):
        for j in range(count):
            if conflicts.shared_until[i, j] > 0.0:
                continue
            possible = np.arange(count) == j if intent else roads.arm == roads.arm[j]
            possible &= conflicts.exists[i]
            if possible.any():
                table[i, j] = (
                    conflicts.entry[i, possible].min(),
                    conflicts.exit[i, possible].max(),
                    conflicts.entry[possible, i].min(),
                    conflicts.exit[possible, i].max(),
                )
    return table
