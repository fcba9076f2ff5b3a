"""Pairs of vehicles that come too close. Only pairs that share a lane or a zone count, never side lanes.

A vehicle has a **near-miss** (a metric, once in its life) when braking no longer averts what lies ahead:

- same lane: it closes on its leader with a time to collision below `time_to_collision`, and could not stay behind
  if both braked as hard as they can;
- crossing paths: at constant speeds both fronts reach the shared zone within `time_gap` of each other, one of them
  at most `horizon` from now, and neither can stop any more before it. (Who still can need not reach it: without
  this clause a driver who approaches a stop line at speed would count, and under SUMO's own right of way, where
  nothing ever happens, 30 to 40 % of all vehicles would.)

The **rate** (a reward part) is graded and concerns the one who acts: 1 - t / 1.5 s, where t is its time to a zone
that somebody is in, or to its leader's bumper.

A conflict is **predicted** for a vehicle when it and another reach a shared zone within `time_gap` of each other,
one of them within `horizon`, whether or not they can still stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int16

from opencda_marl.core.state import Field
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import AFTER, UNTIL, RoadTables, conflicting, lead_distance
from opencda_marl.settings.run import RunSettings

__all__ = ["RATE_HORIZON", "Proximity", "near_misses"]

RATE_HORIZON = 1.5
"""[s] the graded rate begins here."""

_STANDING = 0.1  # [m/s] slower: it reaches nothing
_SPEED, _PROGRESS = int(Field.SPEED), int(Field.PROGRESS)
_ON_LANE, _ON_ZONE = 1, 2  # bits: vehicles on two routes may follow each other; they may meet in a zone
# indices into `limits` of the kernel
_COLLISION, _GAP, _HORIZON, _LENGTH, _BRAKING = range(5)


@kernel
def _reach(distance: float, speed: float) -> float:
    """When a front reaches a point at constant speed; negative: so long ago. [s]"""
    if speed > _STANDING:
        return distance / speed
    return np.inf if distance > 0.0 else -np.inf


@kernel
def _cannot_stop(distance: float, speed: float, braking: float) -> bool:
    """True when full braking does not stop a vehicle within `distance` (or it is there already)."""
    return bool(distance <= 0.0 or speed * speed >= 2.0 * braking * distance)


@kernel
def _lane(
    i: int,
    j: int,
    gap: float,
    values: Float64[np.ndarray, "slots fields"],
    limits: Float64[np.ndarray, " 5"],
    rate: Float64[np.ndarray, " slots"],
    missed: Bool[np.ndarray, " slots"],
) -> None:
    """j is ahead of i on its lane, `gap` from bumper to bumper."""
    mine, other = values[i, _SPEED], values[j, _SPEED]
    if mine <= other:
        return
    room = max(gap, 0.0)
    collision = room / (mine - other)
    rate[i] = max(rate[i], 1.0 - collision / RATE_HORIZON)
    if collision < limits[_COLLISION] and mine * mine - other * other > 2.0 * limits[_BRAKING] * room:
        missed[i] = missed[j] = True


@kernel
def _crossing(
    i: int,
    j: int,
    zone: Float64[np.ndarray, " 4"],
    values: Float64[np.ndarray, "slots fields"],
    limits: Float64[np.ndarray, " 5"],
    rate: Float64[np.ndarray, " slots"],
    missed: Bool[np.ndarray, " slots"],
    predicted: Bool[np.ndarray, " slots"],
) -> None:
    """i and j have a zone in common that neither has left."""
    mine, other = zone[0] - values[i, _PROGRESS], zone[2] - values[j, _PROGRESS]
    my_speed, its_speed = values[i, _SPEED], values[j, _SPEED]
    mine_at, other_at = _reach(mine, my_speed), _reach(other, its_speed)
    if mine > 0.0 >= other:
        rate[i] = max(rate[i], 1.0 - mine_at / RATE_HORIZON)
    if other > 0.0 >= mine:
        rate[j] = max(rate[j], 1.0 - other_at / RATE_HORIZON)
    first = min(mine_at, other_at)
    if (mine <= 0.0 and other <= 0.0) or first > limits[_HORIZON] or first == np.inf:
        return
    if abs(mine_at - other_at) < limits[_GAP]:
        predicted[i] = predicted[j] = True
        if _cannot_stop(mine, my_speed, limits[_BRAKING]) and _cannot_stop(other, its_speed, limits[_BRAKING]):
            missed[i] = missed[j] = True


@kernel
def near_misses(
    present: Bool[np.ndarray, " slots"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    tables: RoadTables,
    related: Int8[np.ndarray, "routes routes"],
    limits: Float64[np.ndarray, " 5"],
    rate: Float64[np.ndarray, " slots"],
    missed: Bool[np.ndarray, " slots"],
    predicted: Bool[np.ndarray, " slots"],
) -> bool:
    """Look at every pair once; fills `rate`, `missed` and `predicted` of this moment. True: somebody has a near-miss.

    `related`: see `_relations`.
    """
    rate[:], missed[:], predicted[:] = 0.0, False, False
    rows = np.flatnonzero(present)
    length = limits[_LENGTH]
    for a in range(len(rows)):
        i = rows[a]
        mine, my_route = values[i, _PROGRESS], routes[i]
        leader, nearest = -1, np.inf
        for b in range(len(rows)):
            j = rows[b]
            relation = related[my_route, routes[j]]
            if relation & _ON_LANE and j != i:
                ahead = lead_distance(mine, values[j, _PROGRESS], my_route, routes[j], length, tables.lead)
                if ahead < nearest:
                    leader, nearest = j, ahead
            if relation & _ON_ZONE and b > a and conflicting(i, j, values, routes, length, tables.zones):
                _crossing(i, j, tables.zones[my_route, routes[j]], values, limits, rate, missed, predicted)
        if leader >= 0:
            _lane(i, leader, nearest - length, values, limits, rate, missed)
    return bool(missed.any())


def _relations(tables: RoadTables) -> Int8[np.ndarray, "routes routes"]:
    """What vehicles on two routes can be to each other; most pairs are nothing, and are passed over."""
    until, after = tables.lead[..., UNTIL], tables.lead[..., AFTER]
    follows = (until > 0.0) | np.isfinite(after) | np.isfinite(after.T)
    return np.asarray(_ON_LANE * follows + _ON_ZONE * np.isfinite(tables.zones[..., 0]), np.int8)


@dataclass(slots=True)
class Proximity:
    """What `near_misses` found in the last look, by slot.

    Args:
        settings: thresholds, length and braking of a vehicle.
        tables: the crossing, with every movement known.
        slots: of the simulator.
    """

    rate: Float64[np.ndarray, " slots"]  # [1/s] 0 to 1
    missed: Bool[np.ndarray, " slots"]
    any_missed: bool
    predicted: Bool[np.ndarray, " slots"]
    _tables: RoadTables
    _related: Int8[np.ndarray, "routes routes"]
    _limits: Float64[np.ndarray, " 5"]

    @classmethod
    def of(cls, settings: RunSettings, tables: RoadTables, slots: int) -> Proximity:
        """Nothing seen yet."""
        limits, vehicle = settings.reward.near_miss, settings.scenario.vehicle
        return cls(
            rate=np.zeros(slots),
            missed=np.zeros(slots, np.bool_),
            any_missed=False,
            predicted=np.zeros(slots, np.bool_),
            _tables=tables,
            _related=_relations(tables),
            _limits=np.array(
                [limits.time_to_collision, limits.time_gap, limits.horizon, vehicle.length, vehicle.braking]
            ),
        )

    def look(
        self,
        present: Bool[np.ndarray, " slots"],
        values: Float64[np.ndarray, "slots fields"],
        routes: Int16[np.ndarray, " slots"],
    ) -> None:
        """Look at every pair of the vehicles that are present."""
        self.any_missed = near_misses(
            present, values, routes, self._tables, self._related, self._limits, self.rate, self.missed, self.predicted
        )
