"""Drivers of vehicles that nobody commands, for simulators that have none of their own: follow, and wait one's turn.

    following  Krauss 1998 (as in SUMO): v_safe = -b tau + sqrt((b tau)^2 + v_leader^2 + 2 b gap), then up to
               sigma a dt slower at random; or IDM (Treiber et al. 2000) behind the same leader, never above v_safe
    limits     no faster than allows to meet every limit ahead with comfortable braking
    crossing   first come, first served: whoever is nearer than `NEAR` to the stop line takes a number, lower ones go
               first. Until everybody with a lower number has left its zone with me, its beginning is a wall for me.
               Vehicles that somebody commands have no number: who of them would be in our zone within `LOOK_AHEAD`
               seconds, or is in it, goes first.

Nobody waits in a circle: the lowest number waits for nobody, and who drives ahead on a lane has the lower one.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from opencda_marl.core.conflicts import Conflicts
from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Field, Schedule, TrafficState
from opencda_marl.settings.traffic import DemandSettings, VehicleSettings
from opencda_marl.simulators.kernels import kernel

__all__ = ["LOOK_AHEAD", "NEAR", "Drivers"]

NEAR = 45.0
"""[m] before the stop line a number is taken: braking comfortably from the limit fits in."""

LOOK_AHEAD = 4.0
"""[s] a commanded vehicle that would be in a common zone so soon goes first."""

_TAU = 1.0  # [s] SUMO's default
_COMFORT = 2.0  # [m/s^2] braking before a lower limit
_WALL = 0.5  # [m] kept free before a zone that is not ours yet
_SPEED, _PROGRESS = int(Field.SPEED), int(Field.PROGRESS)
_UNNUMBERED = np.iinfo(np.int64).max


@kernel
def _safe(gap: float, leader: float, braking: float) -> float:
    """Krauss's safe speed behind somebody. [m/s]"""
    room = max(0.0, gap)
    lag = braking * _TAU
    return max(0.0, math.sqrt(lag * lag + leader * leader + 2.0 * braking * room) - lag)


@kernel
def _bound(progress: float, stop: float, leave: float, limits: Float64[np.ndarray, " 3"]) -> float:
    """The fastest speed from which each limit ahead is met with comfortable braking. [m/s]"""
    bound = limits[2]
    if progress < leave:
        bound = min(limits[1], math.sqrt(bound * bound + 2.0 * _COMFORT * (leave - progress)))
    if progress < stop:
        bound = min(limits[0], math.sqrt(bound * bound + 2.0 * _COMFORT * (stop - progress)))
    return float(bound)


@kernel
def _speeds(
    rows: Int64[np.ndarray, " rows"],
    free: Bool[np.ndarray, " slots"],
    number: Int64[np.ndarray, " slots"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    factor: Float64[np.ndarray, " slots"],
    noise: Float64[np.ndarray, " slots"],
    geometry: Float64[np.ndarray, "routes 6"],
    zones: Float64[np.ndarray, "4 routes routes"],
    vehicle: Float64[np.ndarray, " 6"],
    out: Float64[np.ndarray, " slots"],
) -> None:
    """Write the speed that each free vehicle wants after the coming step. [m/s]

    Args:
        rows: slots of all vehicles.
        free: who is not commanded.
        number: of each slot.
        values, routes: of the state.
        factor: how each driver reads the limits.
        noise: in [0, 1).
        geometry: stop line, junction exit, length, three limits of each route.
        zones: entry and exit of the zones, shared until, shared after: see `Conflicts`.
        vehicle: length, acceleration, braking, gap, sigma or -1 for IDM, step.
        out: written where `free`.
    """
    length, acceleration, braking, gap_kept, sigma, dt = vehicle
    for i in rows:
        if not free[i]:
            continue
        mine = routes[i]
        here, speed = values[i, _PROGRESS], values[i, _SPEED]
        desired = _bound(here, geometry[mine, 0], geometry[mine, 1], geometry[mine, 3:6] * factor[i])
        nearest, leader, wall = np.inf, 0.0, np.inf
        for j in rows:
            if j == i:
                continue
            other = routes[j]
            there = values[j, _PROGRESS]
            if there > here and there - length < zones[2, mine, other]:  # one lane so far
                gap = there - length - here
                if gap < nearest:
                    nearest, leader = gap, values[j, _SPEED]
                continue
            if zones[3, mine, other] < np.inf:  # one exit lane: counted from its end
                left, left_there = geometry[mine, 2] - here, geometry[other, 2] - there
                if there >= zones[3, other, mine] and left_there < left:
                    gap = left - left_there - length
                    if gap < nearest:
                        nearest, leader = gap, values[j, _SPEED]
            entry = zones[0, mine, other]
            if math.isnan(entry) or here > zones[1, mine, other] + length:
                continue
            if there > zones[1, other, mine] + length:  # it has left
                continue
            away = zones[0, other, mine] - there
            soon = 0.0 if free[j] else values[j, _SPEED] * LOOK_AHEAD
            first = away <= soon or (free[j] and number[j] < number[i])
            if first and here < entry:
                wall = min(wall, entry - here)
        safe = min(_safe(nearest - gap_kept, leader, braking), _safe(wall - _WALL, 0.0, braking))
        if sigma >= 0.0:
            wanted = min(desired, speed + acceleration * dt, safe)
            wanted -= sigma * acceleration * dt * noise[i]
        else:
            push = 1.0 - (speed / max(desired, 0.1)) ** 4
            for gap, before in ((nearest, leader), (wall, 0.0)):
                if gap < np.inf:
                    star = speed * _TAU + speed * (speed - before) / (2.0 * math.sqrt(acceleration * braking))
                    push -= ((gap_kept + max(0.0, star)) / max(gap, 0.1)) ** 2
            wanted = min(speed + acceleration * push * dt, safe)
        out[i] = max(0.0, wanted)


class Drivers:
    """Everybody who drives by itself.

    Args:
        roads: where.
        conflicts: of these roads.
        vehicle: sizes and limits.
        demand: the car-following model.
        slots: of the simulator.
        dt: [s] a step.
    """

    def __init__(
        self,
        roads: Roads,
        conflicts: Conflicts,
        vehicle: VehicleSettings,
        demand: DemandSettings,
        slots: int,
        dt: float,
    ) -> None:
        self._geometry = np.stack(
            [
                roads.stop_line,
                roads.junction_exit,
                roads.length,
                roads.limit_entry,
                roads.limit_inside,
                roads.limit_exit,
            ],
            axis=1,
        )
        self._zones = np.stack([conflicts.entry, conflicts.exit, conflicts.shared_until, conflicts.shared_after])
        sigma = vehicle.sigma if demand.car_following == "Krauss" else -1.0
        self._vehicle = np.array(
            [vehicle.length, vehicle.acceleration, vehicle.braking, vehicle.min_gap, sigma, dt], np.float64
        )
        self._slots = slots
        self._number = np.full(slots, _UNNUMBERED)
        self._factor = np.ones(slots)
        self._noise = np.zeros(slots)
        self._next = 0
        self._rng = np.random.default_rng(0)

    def begin(self, seed: int) -> None:
        """Forget the last episode."""
        self._rng = np.random.default_rng(seed)
        self._number[:] = _UNNUMBERED
        self._factor[:] = 1.0
        self._next = 0

    def enter(self, slot: int, schedule: Schedule, index: int) -> None:
        """A vehicle of the schedule is in this slot now."""
        self._number[slot] = _UNNUMBERED
        self._factor[slot] = schedule.speed_factors[index]

    def drive(
        self,
        rows: Int64[np.ndarray, " rows"],
        state: TrafficState,
        commanded: Bool[np.ndarray, " slots"],
        target: Float64[np.ndarray, " slots"],
    ) -> None:
        """Write the target speed of everybody who is not commanded. [m/s]

        Args:
            rows: slots of vehicles on the road.
            state: the traffic now.
            commanded: who has a target already.
            target: completed.
        """
        free = ~commanded
        if not free[rows].any():
            return
        self._take_numbers(rows[free[rows]], state)
        self._noise[:] = self._rng.random(self._slots)
        _speeds(
            rows,
            free,
            self._number,
            state.values,
            state.routes,
            self._factor,
            self._noise,
            self._geometry,
            self._zones,
            self._vehicle,
            target,
        )

    def _take_numbers(self, rows: Int64[np.ndarray, " rows"], state: TrafficState) -> None:
        progress = state.values[rows, Field.PROGRESS]
        left = self._geometry[state.routes[rows], 0] - progress
        fresh = (self._number[rows] == _UNNUMBERED) & (left < NEAR)
        if fresh.any():  # who is nearest goes first
            for slot in rows[fresh][np.lexsort((rows[fresh], left[fresh]))].tolist():
                self._number[slot] = self._next
                self._next += 1
