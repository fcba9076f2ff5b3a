"""A guard behind the policy: its command stands as long as the vehicle can still stop before the first zone ahead.

The last moment at which it can is the moment to **commit**. Whoever commits announces a track, the fastest one from
there on behind its leader, drives it, and is driven by the guard from then on. It may commit only if no vehicle that
has committed before would be in one of its zones at the same time (reservations as in Dresner and Stone 2008, "A
multiagent approach to autonomous intersection management"); else it brakes, and asks again in each step. So who may
go when follows from how the policy lets vehicles approach; the guard holds back who comes at the wrong moment. Behind
a leader everybody keeps a distance from which hard braking still helps.

It uses what vehicles with V2X tell each other: place, speed, movement, and the announced tracks.

Vehicles that somebody else drives announce nothing: those that cannot stop any more are taken to go on at their
present speed, with a wider berth. That is a guess, so among such vehicles nothing is promised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from opencda_marl.core.state import Command, Driver, Field, TrafficState
from opencda_marl.env.command import envelope
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import SLOWEST, RoadTables, lead_distance
from opencda_marl.settings.run import RunSettings

__all__ = ["Shield"]

_POINTS = 241  # of a track, one a step
_CLEAR = 0.3  # [m] a vehicle that stops does so at least this far before the zone
_APART = 0.5  # [m] bumper to bumper behind a leader
_SLOW = 3.0  # [m/s] a track at the present speed is at least so fast
_STRANGER = 1.0  # [s] free time around the zones of vehicles that announce nothing
_SPEED, _PROGRESS = int(Field.SPEED), int(Field.PROGRESS)
# indices into `limits` of the kernels
_DT, _UP, _DOWN, _COMFORT, _LENGTH, _MARGIN = range(6)


class Promises(NamedTuple):
    """What each vehicle has committed to, by slot."""

    committed: Bool[np.ndarray, " slots"]
    since: Int64[np.ndarray, " slots"]  # step of the track's first point
    caps: Float64[np.ndarray, " slots"]  # [m/s] of the track
    tracks: Float64[np.ndarray, "slots points"]  # [m] progress, step by step
    windows: Float64[np.ndarray, "slots routes 2"]  # [s] of the episode: in the zone with each route; NaN: no zone


@kernel
def _stopping(distance: float, ahead: float, limits: Float64[np.ndarray, " 6"]) -> float:
    """Fastest speed of the coming step from which one still stops within `distance`, or behind what brakes alike. [m/s]

    Args:
        distance: to the place where one must stand; bumper to bumper where there is somebody. [m]
        ahead: its speed. [m/s]
        limits: see the indices above.
    """
    lag = limits[_DOWN] * limits[_DT]
    return float(-lag + np.sqrt(max(lag * lag + ahead * ahead + 2.0 * limits[_DOWN] * max(distance, 0.0), 0.0)))


@kernel
def _track(
    start: Float64[np.ndarray, " 2"],
    cap: float,
    road: Float64[np.ndarray, " columns"],
    limits: Float64[np.ndarray, " 6"],
    ahead: float,
    leader: Float64[np.ndarray, " points"],
    first: int,
    out: Float64[np.ndarray, " points"],
) -> None:
    """The fastest track from `start` (progress, speed), not faster than `cap`; step by step as the simulator moves.

    Args:
        start: [m], [m/s].
        cap: [m/s].
        road: row of `RoadTables.route`.
        limits: see the indices above.
        ahead: how far the leader's front is ahead now; infinite: none. [m]
        leader: its track.
        first: the point of the leader's track that is now.
        out: written.
    """
    position, speed = start[0], start[1]
    for k in range(len(out)):
        out[k] = position
        wish = min(envelope(position, road, limits[_COMFORT]), cap)
        if ahead < np.inf:
            at = min(first + k, len(leader) - 1)
            its_speed = (leader[at] - leader[max(at - 1, 0)]) / limits[_DT]
            gap = start[0] + ahead + leader[at] - leader[first] - limits[_LENGTH] - _APART - position
            wish = min(wish, _stopping(gap, its_speed, limits))
        speed = max(min(wish, speed + limits[_UP] * limits[_DT]), speed - limits[_DOWN] * limits[_DT], 0.0)
        position += speed * limits[_DT]


@kernel
def _passes(track: Float64[np.ndarray, " points"], position: float, dt: float) -> float:
    """When, from the track's first point on, the front is at `position`; infinite: not within the track. [s]"""
    k = np.searchsorted(track, position)
    return float(k * dt) if k < len(track) else np.inf


@kernel
def _windows(
    track: Float64[np.ndarray, " points"],
    now: float,
    zones: Float64[np.ndarray, "routes 4"],
    limits: Float64[np.ndarray, " 6"],
    out: Float64[np.ndarray, "routes 2"],
) -> None:
    """From when until when a track is in the zone with each route; NaN: there is none. [s] of the episode"""
    for r in range(len(zones)):
        out[r] = np.nan
        if not np.isnan(zones[r, 0]):
            out[r, 0] = now + max(_passes(track, zones[r, 0], limits[_DT]) - limits[_DT], 0.0)
            out[r, 1] = now + _passes(track, zones[r, 1] + limits[_LENGTH], limits[_DT])


@kernel
def _free(
    i: int,
    mine: Float64[np.ndarray, "routes 2"],
    now: float,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    limits: Float64[np.ndarray, " 6"],
    promises: Promises,
) -> bool:
    """True if nobody who has committed is in a zone of i's at the same time."""
    for j in others:
        if j == i or np.isnan(mine[routes[j], 0]):
            continue
        zone, margin = tables.zones[routes[i], routes[j]], limits[_MARGIN]
        if ours[j]:
            if not promises.committed[j]:
                continue
            begin, end = promises.windows[j, routes[i], 0], promises.windows[j, routes[i], 1]
        else:
            to, speed = zone[2] - values[j, _PROGRESS], max(values[j, _SPEED], SLOWEST)
            if to - _CLEAR > speed * speed / (2.0 * limits[_DOWN]):
                continue
            begin, end = now + to / speed, now + (zone[3] + limits[_LENGTH] - values[j, _PROGRESS]) / speed
            margin = max(margin, _STRANGER)
        if end < now:
            continue
        if mine[routes[j], 0] < end + margin and begin < mine[routes[j], 1] + margin:
            return False
    return True


@kernel
def _leader(
    i: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    tables: RoadTables,
    length: float,
) -> tuple[int, float]:
    """Slot of the next one ahead on i's lane, and how far its front is ahead [m]; -1 and infinite: there is none."""
    leader, ahead = -1, np.inf
    for j in others:
        gap = lead_distance(values[i, _PROGRESS], values[j, _PROGRESS], routes[i], routes[j], length, tables.lead)
        if j != i and gap < ahead:
            leader, ahead = j, gap
    return leader, ahead


@kernel
def _commit(
    i: int,
    leader: int,
    ahead: float,
    step: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    ends: Float64[np.ndarray, " routes"],
    limits: Float64[np.ndarray, " 6"],
    promises: Promises,
) -> bool:
    """Let i commit if there is a track for it, the fastest one or the one at its present speed."""
    route, now = routes[i], step * limits[_DT]
    follows = leader >= 0 and ours[leader] and values[leader, _PROGRESS] < ends[routes[leader]]
    if follows and not promises.committed[leader]:
        return False  # it may still stop, and so must i
    points = promises.tracks.shape[1]
    start = np.array([values[i, _PROGRESS], values[i, _SPEED]])
    track, windows = np.empty(points), np.empty((len(tables.zones), 2))
    known = leader >= 0 and promises.committed[leader]
    before = promises.tracks[leader if known else i]
    first = min(step - promises.since[leader], points - 1) if known else 0
    for cap in (np.inf, max(start[1], _SLOW)):
        _track(start, cap, tables.route[route], limits, ahead if known else np.inf, before, first, track)
        _windows(track, now, tables.zones[route], limits, windows)
        if track[-1] < ends[route]:
            continue
        if _free(i, windows, now, others, values, routes, ours, tables, limits, promises):
            promises.committed[i], promises.since[i], promises.caps[i] = True, step, cap
            promises.tracks[i], promises.windows[i] = track, windows
            return True
    return False


@kernel
def _guard(
    step: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    stops: Float64[np.ndarray, " routes"],
    ends: Float64[np.ndarray, " routes"],
    limits: Float64[np.ndarray, " 6"],
    promises: Promises,
    target: Float64[np.ndarray, " slots"],
) -> int:
    """Change the target speeds where it must be; `others` in the order in which they may ask. Returns how many."""
    dt, changed = limits[_DT], 0
    for i in others:
        if not ours[i]:
            continue
        route, progress, speed, wish = routes[i], values[i, _PROGRESS], values[i, _SPEED], target[i]
        leader, ahead = _leader(i, others, values, routes, tables, limits[_LENGTH])
        if not promises.committed[i] and progress < stops[route]:
            stop = _stopping(stops[route] - _CLEAR - progress, 0.0, limits)
            will = max(min(wish, speed + limits[_UP] * dt), speed - limits[_DOWN] * dt)
            if will > stop and not _commit(
                i, leader, ahead, step, others, values, routes, ours, tables, ends, limits, promises
            ):
                wish = min(wish, stop)
        if promises.committed[i]:
            wish = envelope(progress, tables.route[route], limits[_COMFORT])
            wish = min(wish, promises.caps[i]) if progress < ends[route] else wish
        if leader >= 0:
            wish = min(wish, _stopping(ahead - limits[_LENGTH] - _APART, values[leader, _SPEED], limits))
        changed += abs(wish - target[i]) > 1e-9
        target[i] = wish
    return changed


class Shield:
    """Remembers who has committed to what.

    Args:
        settings: vehicle, envelope, margin.
        tables: the crossing, with every movement known.
        slots: of the simulator.
    """

    def __init__(self, settings: RunSettings, tables: RoadTables, slots: int) -> None:
        vehicle, routes = settings.scenario.vehicle, len(tables.zones)
        self._tables = tables
        self._limits = np.array(
            [
                settings.simulator.step_length,
                vehicle.acceleration,
                vehicle.braking,
                settings.envelope.comfort_braking,
                vehicle.length,
                settings.shield.margin,
            ]
        )
        zones = tables.zones
        nothing = np.isnan(zones[..., 0]).all(1)
        self._stops = np.where(nothing, -np.inf, np.nan_to_num(zones[..., 0], nan=np.inf).min(1))
        self._ends = np.where(nothing, -np.inf, np.nan_to_num(zones[..., 1], nan=-np.inf).max(1)) + vehicle.length
        self._ids = np.full(slots, -1, np.int64)
        self._promises = Promises(
            committed=np.zeros(slots, np.bool_),
            since=np.zeros(slots, np.int64),
            caps=np.zeros(slots),
            tracks=np.zeros((slots, _POINTS)),
            windows=np.zeros((slots, routes, 2)),
        )
        self.changed = 0  # commands of this episode that were not the policy's

    def clear(self) -> None:
        """A new episode."""
        self._ids[:], self._promises.committed[:], self.changed = -1, False, 0

    def guard(self, command: Command, state: TrafficState) -> None:
        """Change the target speeds of the vehicles that the policy drives, where that is needed."""
        rows = state.rows()
        new = rows[self._ids[rows] != state.ids[rows]]
        self._ids[new], self._promises.committed[new] = state.ids[new], False
        order = rows[np.argsort(state.ids[rows])]
        self.changed += _guard(
            state.step,
            order,
            state.values,
            state.routes,
            state.drivers == Driver.CAV,
            self._tables,
            self._stops,
            self._ends,
            self._limits,
            self._promises,
            command.target_speed,
        )
