"""A rule-based driver: first come, first served, by reserving time in every conflict zone.

Each vehicle has a *track*: where its front will be at every moment of the next 20 s. No two tracks have
vehicles in a common zone at the same time (compare the reservations of Dresner and Stone 2008, "A multiagent
approach to autonomous intersection management"). Planning a vehicle means to find its fastest track that keeps
the distance from its leader and respects the tracks of all others. Vehicles are planned in the order in which
they entered, so whoever came first chooses first; and since the others' tracks are respected too, a new one never
breaks a promise, and is seldom later than the old one.

The track of a vehicle that somebody else drives is its present speed, for ever, with a wider berth.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from opencda_marl.core.conflicts import Conflicts
from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Command, Driver, Field, TrafficState
from opencda_marl.env.command import envelope, envelopes
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import INSIDE_LIMIT, RoadTables, lead_distance, road_tables
from opencda_marl.settings.run import RunSettings

__all__ = ["HOLD", "Reservation"]

HOLD = 0.5
"""[s] how long a planned speed is held before the next plan."""

_GRID = 0.1  # [s] between the points of a track
_POINTS = 201  # 20 s
_NEW, _KEPT, _STRANGER = 0.4, 0.0, 1.0  # [s] free time around a reservation: to get in, to stay in, of strangers
_BUFFER = 0.75  # [m] who waits does so this far before the zone: tracks are followed to a few decimetres
_LAUNCH, _RUN_UP = 2.0, 12.0  # [m/s^2], [m/s] who waits for its time may take a run-up to enter at speed
_STANDOFF, _SOFT = 3.0, 2.5  # [m], [m/s^2] who has no time yet stops so far before the zone, braking so hard
_SPEED, _PROGRESS, _DEPARTED = int(Field.SPEED), int(Field.PROGRESS), int(Field.DEPARTED_AT)
# indices into `limits` of the kernels
_UP, _DOWN, _COMFORT, _LENGTH, _GAP = range(5)


@kernel
def _when(position: float, track: Float64[np.ndarray, " points"]) -> float:
    """Time at which a front passes `position`; infinite: not within the track. [s]"""
    k = np.searchsorted(track, position)
    return float(k * _GRID) if k < len(track) else np.inf


@kernel
def _follow(gap: float, leader_speed: float, braking: float) -> float:
    """Speed from which one can still stop behind a leader that brakes alike, after HOLD (Gipps 1981). [m/s]"""
    lag = braking * HOLD
    return float(-lag + np.sqrt(max(lag * lag + leader_speed * leader_speed + 2.0 * braking * gap, 0.0)))


@kernel
def _reach(speed: float, time: float, top: float) -> float:
    """How far one gets in `time`, from `speed` on and with a run-up to `top`. [m]"""
    if speed >= top:
        return float(speed * time)
    rising = min(time, (top - speed) / _LAUNCH)
    return float(speed * rising + 0.5 * _LAUNCH * rising * rising + top * (time - rising))


@kernel
def _hold(distance: float, time: float, top: float, low: float, high: float) -> float:
    """Fastest speed for the next point of the track with which a place is not reached before its time. [m/s]

    Args:
        distance: to the place. [m]
        time: from now. [s]
        top: speed to be had there. [m/s]
        low, high: what brakes and engine allow. [m/s]
    """
    if time <= 0.0:
        return high
    if time == np.inf:
        return max(low, min(high, float(np.sqrt(2.0 * _SOFT * max(distance - _STANDOFF, 0.0)))))
    rest = max(time - _GRID, 0.0)
    if _reach(high, rest, top) <= distance - high * _GRID:
        return high
    for _ in range(10):  # bisection: to a thousandth of what one step can change
        middle = 0.5 * (low + high)
        if _reach(middle, rest, top) <= distance - middle * _GRID:
            low = middle
        else:
            high = middle
    return low


@kernel
def _drive(
    start: Float64[np.ndarray, " 2"],
    road: Float64[np.ndarray, " columns"],
    limits: Float64[np.ndarray, " 5"],
    ahead: float,
    leader: Float64[np.ndarray, " points"],
    points: Float64[np.ndarray, " waits"],
    times: Float64[np.ndarray, " waits"],
    waits: int,
    track: Float64[np.ndarray, " points"],
) -> None:
    """The fastest track from `start` (progress, speed) behind `leader` that passes no point before its time.

    Args:
        start: [m], [m/s].
        road: row of `RoadTables.route`.
        limits: see the indices above.
        ahead: how far the leader's front is ahead now; infinite: none. [m]
        leader: its track.
        points: where to wait, [m]; the first `waits` count.
        times: until when, [s].
        waits: how many.
        track: written.
    """
    position, speed = start[0], start[1]
    top = min(road[INSIDE_LIMIT], _RUN_UP)
    for k in range(len(track)):
        track[k] = position
        wish = min(speed + limits[_UP] * _GRID, envelope(position, road, limits[_COMFORT]))
        if ahead < np.inf:
            last = min(k + 1, len(leader) - 1)
            its_speed = (leader[last] - leader[last - 1]) / _GRID
            gap = start[0] + ahead + leader[last] - leader[0] - limits[_LENGTH] - limits[_GAP] - position
            wish = min(wish, _follow(gap, its_speed, limits[_DOWN]))
        low = max(speed - limits[_COMFORT] * _GRID, 0.0)
        for w in range(waits):
            wish = min(wish, _hold(points[w] - position, times[w] - k * _GRID, top, min(low, wish), wish))
        speed = max(wish, speed - limits[_DOWN] * _GRID, 0.0)
        position += speed * _GRID


@kernel
def _clash(
    track: Float64[np.ndarray, " points"],
    zone: Float64[np.ndarray, " 4"],
    length: float,
    other: Float64[np.ndarray, " points"],
    margin: float,
) -> float:
    """Until when the other is in the way (margin included) if both keep to their tracks; 0: it is not. [s]"""
    mine, its_clear = _when(zone[0], track), _when(zone[3] + length, other)
    if mine == np.inf or mine >= its_clear + margin:
        return 0.0
    its = _when(zone[2], other)
    if its == np.inf or its >= _when(zone[1] + length, track) + margin:
        return 0.0
    return its_clear + margin


@kernel
def _plan_one(
    i: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    limits: Float64[np.ndarray, " 5"],
    first: Bool[np.ndarray, "slots slots"],
    tracks: Float64[np.ndarray, "slots points"],
) -> None:
    """Find the track of the vehicle in slot i, and whom it goes before."""
    route, length = routes[i], limits[_LENGTH]
    start = np.array([values[i, _PROGRESS], values[i, _SPEED]])
    leader, ahead = i, np.inf
    for j in others:
        gap = lead_distance(start[0], values[j, _PROGRESS], route, routes[j], length, tables.lead)
        if j != i and gap < ahead:
            leader, ahead = j, gap
    count, waits = len(others), 0
    points, times, waiting = np.empty(count), np.empty(count), np.zeros(count, np.bool_)
    track = np.empty(_POINTS)
    while True:
        _drive(start, tables.route[route], limits, ahead, tracks[leader], points, times, waits, track)
        worst, until, entry = -1, 0.0, np.inf
        for k in range(count):
            j = others[k]
            zone = tables.zones[route, routes[j]]
            # comparisons with NaN (no zone) are false; who is in a zone clears it, and the others wait
            if waiting[k] or not (zone[0] < entry and start[0] <= zone[0]):
                continue
            margin = _STRANGER if not ours[j] else (_KEPT if first[i, j] else _NEW)
            clash = _clash(track, zone, length, tracks[j], margin)
            if clash > 0.0:
                worst, until, entry = k, clash, zone[0]
        if worst < 0:
            break
        waiting[worst] = True
        points[waits], times[waits] = entry - _BUFFER, until
        waits += 1
    tracks[i] = track
    for k in range(count):
        first[i, others[k]] = not waiting[k] and _when(tables.zones[route, routes[others[k]], 0], track) < np.inf


@kernel
def _plan(
    order: Int64[np.ndarray, " planned"],
    others: Int64[np.ndarray, " others"],
    elapsed: float,
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    known: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    limits: Float64[np.ndarray, " 5"],
    first: Bool[np.ndarray, "slots slots"],
    tracks: Float64[np.ndarray, "slots points"],
    speeds: Float64[np.ndarray, " slots"],
) -> None:
    """Bring every track up to date, then plan those in `order`; writes the speed they must have after HOLD."""
    grid = np.arange(_POINTS) * _GRID
    for j in others:
        if ours[j] and known[j]:
            at = grid + elapsed
            last = (tracks[j, -1] - tracks[j, -2]) / _GRID
            moved = np.interp(at, grid, tracks[j]) + np.maximum(at - grid[-1], 0.0) * last
            tracks[j] = moved + values[j, _PROGRESS] - moved[0]
        elif ours[j]:
            tracks[j] = -np.inf  # it has promised nothing yet, and is in nobody's way
        else:
            tracks[j] = values[j, _PROGRESS] + values[j, _SPEED] * grid
    hold = int(np.round(HOLD / _GRID))
    for i in order:
        _plan_one(i, others, values, routes, ours, tables, limits, first, tracks)
        speeds[i] = (tracks[i, hold] - tracks[i, hold - 1]) / _GRID


class Reservation:
    """Plans again whenever asked, and remembers every track.

    Args:
        settings: vehicle, envelope.
        roads: the crossing.
        conflicts: its zones.
        slots: of the simulator.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts, slots: int) -> None:
        vehicle = settings.scenario.vehicle
        self._tables = road_tables(roads, conflicts)
        self._limits = np.array(
            [
                vehicle.acceleration,
                vehicle.braking,
                settings.envelope.comfort_braking,
                vehicle.length,
                vehicle.min_gap,
            ]
        )
        self._every = max(1, round(HOLD / settings.simulator.step_length))
        self._first = np.zeros((slots, slots), np.bool_)  # the row's vehicle goes before the column's
        self._tracks = np.zeros((slots, _POINTS))  # [m]
        self._ids = np.full(slots, -1, np.int64)  # whose track it is
        self._time = 0.0  # of the last plan
        self._speeds = np.zeros(slots)

    def clear(self) -> None:
        """A new episode."""
        self._ids[:] = -1

    def speeds(
        self,
        state: TrafficState,
        ours: Bool[np.ndarray, " slots"],
        asked: Int64[np.ndarray, " asked"] | None = None,
    ) -> Float64[np.ndarray, " slots"]:
        """Speed that each of our vehicles should reach within HOLD; the same array each time. [m/s]

        Args:
            state: all vehicles.
            ours: which of the living ones we drive.
            asked: slots of those that get a new track; None: all of ours. The others keep to theirs.
        """
        if state.time < self._time:  # another episode
            self.clear()
        rows = state.rows()
        known = self._ids == state.ids
        new = rows[~known[rows]]
        self._first[new, :], self._first[:, new] = False, False
        self._ids[new] = state.ids[new]
        planned = rows[ours[rows]] if asked is None else asked
        # within a lane the one in front comes first: it entered first
        order = planned[np.lexsort((state.ids[planned], state.values[planned, _DEPARTED]))]
        _plan(
            order,
            rows,
            state.time - self._time,
            state.values,
            state.routes,
            ours,
            known,
            self._tables,
            self._limits,
            self._first,
            self._tracks,
            self._speeds,
        )
        self._time = state.time
        return self._speeds

    def add(self, command: Command, state: TrafficState) -> None:
        """Command the vehicles whose driver is `Driver.RULE`; plans every HOLD and whenever one has entered."""
        ours = state.alive & (state.drivers == Driver.RULE)
        slots = np.flatnonzero(ours)
        new = slots[self._ids[slots] != state.ids[slots]]
        if len(slots) and state.step % self._every == 0:
            self.speeds(state, ours)
        elif len(new):
            self.speeds(state, ours, new)
        progress = np.ascontiguousarray(state.values[slots, _PROGRESS])
        bounds = envelopes(progress, state.routes[slots], self._tables.route, self._limits[_COMFORT])
        command.target_speed[slots] = np.minimum(self._speeds[slots], bounds)
        command.controlled[slots] = True
