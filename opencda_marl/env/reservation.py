"""A rule-based driver: first come, first served, by reserving time in every conflict zone.

Vehicles are planned one after the other. Each gets the fastest motion that keeps its distance from its
leader and stays out of every zone while one that was planned before it is there (compare the reservation
protocol of Dresner and Stone 2008, "A multiagent approach to autonomous intersection management"). The order
is: those that cannot stop any more before their first zone, as they became so; then by time of entry. So
whoever is asked to wait still can, and who was let in is never asked again. A vehicle may pass before one
that came earlier where that one is not held up by it.

The motion of vehicles that somebody else drives is taken to be their present speed; they are planned first.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int16, Int64

from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Command, Driver, Field, TrafficState
from opencda_marl.env.command import envelope
from opencda_marl.env.compiled import kernel
from opencda_marl.env.conflicts import Conflicts
from opencda_marl.env.neighbours import RoadTables, lead_distance, road_tables
from opencda_marl.settings.run import RunSettings

__all__ = ["HOLD", "Reservation"]

HOLD = 0.5
"""[s] how long a planned speed is held before the next plan."""

_GRID = 0.1  # [s] between the points of a planned motion
_POINTS = 201  # 20 s
_FAR = 12.0  # [s] who must wait longer than this drives up and stops, instead of slowing down on the way
_SOFT = 2.5  # [m/s^2] braking for that
_NEW, _KEPT, _FOREIGN = 0.5, 0.2, 1.0  # [s] free time around a reservation: to get in, to stay in, and of strangers
_SPEED, _PROGRESS, _DEPARTED = int(Field.SPEED), int(Field.PROGRESS), int(Field.DEPARTED_AT)
# indices into `limits` of the kernels
_UP, _DOWN, _COMFORT, _LENGTH, _GAP = range(5)


@kernel
def _when(position: float, track: Float64[np.ndarray, " points"]) -> float:
    """Time at which a front passes `position`; infinite: not within the plan. [s]"""
    k = np.searchsorted(track, position)
    return float(k * _GRID) if k < len(track) else np.inf


@kernel
def _follow(gap: float, leader_speed: float, braking: float) -> float:
    """Speed from which one can still stop behind a leader that brakes alike, after HOLD (Gipps 1981). [m/s]"""
    lag = braking * HOLD
    return float(-lag + np.sqrt(max(lag * lag + leader_speed * leader_speed + 2.0 * braking * gap, 0.0)))


@kernel
def _hold(distance: float, time: float) -> float:
    """Speed at which a point is not passed before `time` from now. [m/s]"""
    if time <= 0.0:
        return np.inf
    room = max(distance, 0.0)
    if time > _FAR:
        return float(np.sqrt(2.0 * _SOFT * room))
    return room / time


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
    """The fastest motion from `start` (progress, speed) behind `leader` that passes no point before its time.

    Args:
        start: [m], [m/s].
        road: row of `RoadTables.route`.
        limits: see the indices above.
        ahead: how far the leader's front is ahead now; infinite: none. [m]
        leader: its planned progress.
        points: where to wait, [m]; the first `waits` count.
        times: until when, [s].
        waits: how many.
        track: written, progress at each point of the grid.
    """
    position, speed = start[0], start[1]
    for k in range(len(track)):
        track[k] = position
        wish = min(speed + limits[_UP] * _GRID, envelope(position, road, limits[_COMFORT]))
        if ahead < np.inf:
            last = min(k + 1, len(leader) - 1)
            its_speed = (leader[last] - leader[last - 1]) / _GRID
            gap = start[0] + ahead + leader[last] - leader[0] - limits[_LENGTH] - limits[_GAP] - position
            wish = min(wish, _follow(gap, its_speed, limits[_DOWN]))
        for w in range(waits):
            wish = min(wish, _hold(points[w] - position, times[w] - k * _GRID))
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
    """Until when the other is in the way (margin included) if both drive as planned; 0: it is not. [s]"""
    mine, mine_clear = _when(zone[0], track), _when(zone[1] + length, track)
    its, its_clear = _when(zone[2], other), _when(zone[3] + length, other)
    if mine == np.inf or its == np.inf or mine >= its_clear + margin or its >= mine_clear + margin:
        return 0.0
    return its_clear + margin


@kernel
def _plan_one(
    i: int,
    order: Int64[np.ndarray, " rows"],
    done: int,
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    limits: Float64[np.ndarray, " 5"],
    first: Int8[np.ndarray, "slots slots"],
    tracks: Float64[np.ndarray, "rows points"],
) -> None:
    """Plan the vehicle in slot i behind the `done` ones before it in `order`; writes `tracks[done]`."""
    route, length, track = routes[i], limits[_LENGTH], tracks[done]
    start = np.array([values[i, _PROGRESS], values[i, _SPEED]])
    leader, ahead = -1, np.inf
    for k in range(done):
        j = order[k]
        gap = lead_distance(start[0], values[j, _PROGRESS], route, routes[j], length, tables.lead)
        if gap < ahead:
            leader, ahead = k, gap
    points, times = np.empty(done), np.empty(done)
    waits = 0
    waiting = np.zeros(done, np.bool_)
    while True:
        _drive(start, tables.route[route], limits, ahead, tracks[max(leader, 0)], points, times, waits, track)
        worst, until, entry = -1, 0.0, np.inf
        for k in range(done):
            j = order[k]
            zone = tables.zones[route, routes[j]]
            if waiting[k] or not zone[0] < entry or start[0] >= zone[1] + length:
                continue
            margin = _FOREIGN if not ours[j] else (_KEPT if first[i, j] == 1 else _NEW)
            clash = _clash(track, zone, length, tracks[k], margin)
            if clash > 0.0:
                worst, until, entry = k, clash, zone[0]
        if worst < 0:
            break
        waiting[worst] = True
        points[waits], times[waits] = entry, until
        waits += 1
    for k in range(done):
        first[i, order[k]] = 0 if waiting[k] else 1


@kernel
def _plan(
    order: Int64[np.ndarray, " rows"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    limits: Float64[np.ndarray, " 5"],
    first: Int8[np.ndarray, "slots slots"],
    speeds: Float64[np.ndarray, " slots"],
) -> None:
    """Plan everybody in `order`; writes the speed that each of ours must have after HOLD."""
    tracks = np.empty((len(order), _POINTS))
    hold = int(np.round(HOLD / _GRID))
    for done in range(len(order)):
        i = order[done]
        if not ours[i]:
            for k in range(_POINTS):
                tracks[done, k] = values[i, _PROGRESS] + values[i, _SPEED] * _GRID * k
            continue
        _plan_one(i, order, done, values, routes, ours, tables, limits, first, tracks)
        speeds[i] = (tracks[done, hold + 1] - tracks[done, hold]) / _GRID


class Reservation:
    """Plans again whenever asked, and remembers who was let in.

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
        # where the first zone begins on each route; beyond the end where there is none
        entry = np.where(conflicts.exists, conflicts.entry, np.inf).min(axis=1)
        self._first_zone = np.where(np.isfinite(entry), entry, np.inf)
        self._first = np.zeros((slots, slots), np.int8)  # 1: the row's vehicle goes before the column's
        self._committed = np.zeros(slots, np.int64)  # rank of those that cannot stop any more; 0: still can
        self._ids = np.full(slots, -1, np.int64)
        self._next_rank = 1
        self._speeds = np.zeros(slots)

    def clear(self) -> None:
        """A new episode."""
        self._ids[:] = -1
        self._next_rank = 1

    def speeds(self, state: TrafficState, ours: Bool[np.ndarray, " slots"]) -> Float64[np.ndarray, " slots"]:
        """Speed that each of our vehicles should reach within HOLD; the same array each time. [m/s]

        Args:
            state: all vehicles.
            ours: which of the living ones we drive.
        """
        rows = state.rows()
        self._forget_strangers(state, rows)
        order = self._order(state, rows, ours)
        _plan(
            order,
            state.values,
            state.routes,
            ours,
            self._tables,
            self._limits,
            self._first,
            self._speeds,
        )
        return self._speeds

    def add(self, command: Command, state: TrafficState) -> None:
        """Command the vehicles whose driver is `Driver.RULE`; plans every HOLD and whenever one has entered."""
        ours = state.alive & (state.drivers == Driver.RULE)
        if not ours.any():
            return
        if state.step % self._every == 0 or (self._ids[ours] != state.ids[ours]).any():
            self.speeds(state, ours)
        for slot in np.flatnonzero(ours):
            bound = envelope(
                float(state.values[slot, _PROGRESS]), self._tables.route[state.routes[slot]], self._limits[_COMFORT]
            )
            command.target_speed[slot] = min(self._speeds[slot], bound)
            command.controlled[slot] = True

    def _forget_strangers(self, state: TrafficState, rows: Int64[np.ndarray, " rows"]) -> None:
        """What was agreed with the last vehicle in a slot does not bind the next one."""
        new = rows[self._ids[rows] != state.ids[rows]]
        self._first[new, :], self._first[:, new] = 0, 0
        self._committed[new] = 0
        self._ids[new] = state.ids[new]

    def _order(
        self, state: TrafficState, rows: Int64[np.ndarray, " rows"], ours: Bool[np.ndarray, " slots"]
    ) -> Int64[np.ndarray, " rows"]:
        """Strangers, then those that cannot stop any more, then by time of entry."""
        values = state.values[rows]
        speed, progress = values[:, _SPEED], values[:, _PROGRESS]
        stopping = speed * speed / (2.0 * self._limits[_DOWN]) + speed * HOLD
        late = ours[rows] & (progress + stopping >= self._first_zone[state.routes[rows]])
        for slot in rows[late & (self._committed[rows] == 0)]:
            self._committed[slot] = self._next_rank
            self._next_rank += 1
        rank = np.where(late, self._committed[rows], self._next_rank)
        # within a lane the one in front comes first: it entered first
        keys = (state.ids[rows], values[:, _DEPARTED], rank, ours[rows])
        return rows[np.lexsort(keys)]
