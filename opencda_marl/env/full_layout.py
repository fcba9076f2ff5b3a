"""Layout `full` (see `env.layouts`), compiled: ego features, neighbour rows and the scene in one call."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int8, Int16, Int32, Int64

from opencda_marl.core.state import Driver, Field
from opencda_marl.env.command import envelope
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import (
    EXIT,
    EXIT_LIMIT,
    INSIDE_LIMIT,
    LENGTH,
    LIMIT,
    STOP_LINE,
    RoadTables,
    conflicting,
    lane_mates,
    select_conflicting,
    select_nearest,
    time_along,
    time_pulling,
)
from opencda_marl.env.view import (
    BRAKING,
    CONFLICT,
    HARDEST,
    INTENT,
    PULL,
    RADIUS,
    VEHICLE,
    add_to_scene,
    clip,
    finish_scene,
    headings,
    living,
    relative,
)

__all__ = ["observe_full"]

_SPEED, _ACCEL, _PROGRESS, _DEPARTED = (
    int(Field.SPEED),
    int(Field.ACCEL),
    int(Field.PROGRESS),
    int(Field.DEPARTED_AT),
)
_CAV = int(Driver.CAV)


@kernel
def _write_ego(
    i: int,
    others: Int64[np.ndarray, " others"],
    time: float,
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    held: Float64[np.ndarray, " slots"],
    acted: Bool[np.ndarray, " slots"],
    tables: RoadTables,
    parameters: Float64[np.ndarray, " parameters"],
    out: Float32[np.ndarray, " ego"],
) -> int:
    """Ego features of layout `full`; returns the leader's slot, -1 for none."""
    route, length = tables.route[routes[i]], parameters[VEHICLE]
    progress, speed = values[i, _PROGRESS], values[i, _SPEED]
    before, past = progress < route[STOP_LINE], progress >= route[EXIT] + length
    limit, ahead_limit = route[LIMIT], route[INSIDE_LIMIT]
    if not before:
        limit = route[INSIDE_LIMIT] if progress < route[EXIT] else route[EXIT_LIMIT]
        ahead_limit = route[EXIT_LIMIT]
    leader, ahead, follower, behind, near = lane_mates(
        i, others, values, routes, parameters[RADIUS], length, tables.lead
    )
    movement = tables.movement[routes[i]]
    out[0] = clip(speed / 20.0, 0.0, 2.0)
    out[1] = clip(speed / limit, 0.0, 2.0)
    out[2] = clip(values[i, _ACCEL] / 4.5, -2.0, 2.0)
    out[3] = clip((route[STOP_LINE] - progress) / 100.0, -1.0, 2.0)
    out[4] = 1.0 if not before and not past else 0.0
    out[5] = 1.0 if past else 0.0
    out[6] = clip((route[EXIT] + length - progress) / 100.0, -1.0, 2.0)
    out[7] = clip(progress / route[LENGTH], 0.0, 1.0)
    for m in range(3):
        out[8 + m] = 1.0 if movement == m else 0.0
    out[11] = clip(ahead_limit / 20.0, 0.0, 2.0)
    out[12] = clip(envelope(progress, route, parameters[BRAKING]) / 20.0, 0.0, 2.0)
    out[13:18], out[22:24] = 0.0, 0.0
    if leader >= 0:
        out[13] = 1.0
        out[14] = clip((ahead - length) / 50.0, 0.0, 2.0)
        out[15] = clip((speed - values[leader, _SPEED]) / 10.0, -2.0, 2.0)
        longer = (speed**2 - values[leader, _SPEED] ** 2) / (2.0 * parameters[HARDEST])  # my way to stand than its
        spare = ahead - length - longer
        out[22], out[23] = clip(spare / 25.0, -2.0, 2.0), clip(spare / 4.0, -2.0, 2.0)
    if follower >= 0:
        out[16] = 1.0
        out[17] = clip((behind - length) / 50.0, 0.0, 2.0)
    out[18] = 1.0 if acted[i] else 0.0
    out[19] = held[i] if acted[i] else 0.0
    out[20] = clip(near / 30.0, 0.0, 2.0)
    out[21] = clip((time - values[i, _DEPARTED]) / 30.0, 0.0, 2.0)
    return leader


@kernel
def _write_zone(
    i: int,
    j: int,
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    tables: RoadTables,
    parameters: Float64[np.ndarray, " parameters"],
    out: Float32[np.ndarray, " 9"],
    more: Float32[np.ndarray, " 7"],
) -> None:
    """Columns `conflict` to `in_zone`, and `my_stop` to `my_stop_near` in `more`; see `env.layouts` for the scales."""
    zone, mine, its = tables.zones[routes[i], routes[j]], tables.route[routes[i]], tables.route[routes[j]]
    length, braking = parameters[VEHICLE], parameters[BRAKING]
    me, other = values[i, _PROGRESS], values[j, _PROGRESS]
    my_entry, my_exit = zone[0] - me, zone[1] + length - me
    its_entry, its_exit = zone[2] - other, zone[3] + length - other
    my_speed, my_line, my_limit = values[i, _SPEED], mine[STOP_LINE] - me, mine[INSIDE_LIMIT]
    its_speed, its_line = values[j, _SPEED], its[STOP_LINE] - other
    its_limit = its[INSIDE_LIMIT] if parameters[INTENT] > 0.0 else np.inf  # the limit would tell its movement
    i_enter = time_along(my_entry, my_speed, my_line, my_limit, braking)
    i_leave = time_along(my_exit, my_speed, my_line, my_limit, braking)
    it_enters = time_along(its_entry, its_speed, its_line, its_limit, braking)
    it_leaves = time_along(its_exit, its_speed, its_line, its_limit, braking)
    out[0] = 1.0
    out[1] = clip(my_entry / 25.0, -1.0, 2.0)
    out[2] = clip(my_exit / 25.0, -1.0, 2.0)
    out[3] = clip(its_entry / 25.0, -1.0, 2.0)
    out[4] = clip(its_exit / 25.0, -1.0, 2.0)
    second, first = i_enter - it_leaves, it_enters - i_leave
    out[5] = clip((i_enter - it_enters) / 3.0, -2.0, 2.0)
    out[6], more[4] = clip(second / 3.0, -2.0, 2.0), clip(second / 0.5, -2.0, 2.0)
    out[7], more[5] = clip(first / 3.0, -2.0, 2.0), clip(first / 0.5, -2.0, 2.0)
    out[8] = 1.0 if its_entry <= 0.0 else 0.0
    brakes, pull = 2.0 * parameters[HARDEST], parameters[PULL]
    its_top = its_limit if its_limit < np.inf else its[LIMIT]
    if my_speed < my_limit:
        i_leave = min(i_leave, time_pulling(my_exit, my_speed, my_limit, pull))
    if its_speed < its_top:
        it_leaves = min(it_leaves, time_pulling(its_exit, its_speed, its_top, pull))
    spare = my_entry - my_speed**2 / brakes
    more[0], more[6] = clip(spare / 25.0, -2.0, 2.0), clip(spare / 4.0, -2.0, 2.0)
    more[1] = clip((its_entry - its_speed**2 / brakes) / 25.0, -2.0, 2.0)
    more[2] = clip((i_enter - it_leaves) / 3.0, -2.0, 2.0)
    more[3] = clip((it_enters - i_leave) / 3.0, -2.0, 2.0)


@kernel
def _write_neighbour(
    i: int,
    j: int,
    leader: int,
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    held: Float64[np.ndarray, " slots"],
    acted: Bool[np.ndarray, " slots"],
    directions: Float64[np.ndarray, "slots 2"],
    tables: RoadTables,
    parameters: Float64[np.ndarray, " parameters"],
    out: Float32[np.ndarray, " features"],
) -> None:
    """Row of layout `full` for the other vehicle j, as i sees it; `out` is zero."""
    x, y, u, v, along, across, collision = relative(i, j, values, directions)
    if parameters[INTENT] > 0.0:
        out[tables.movement[routes[j]]] = 1.0
    out[3 + tables.quarter[routes[i], routes[j]]] = 1.0
    out[7] = clip(x / 75.0, -2.0, 2.0)
    out[8] = clip(y / 75.0, -2.0, 2.0)
    out[9] = clip(u / 20.0, -2.0, 2.0)
    out[10] = clip(v / 20.0, -2.0, 2.0)
    out[11], out[12] = across, along
    out[13] = clip(values[j, _SPEED] / 20.0, 0.0, 2.0)
    out[14] = clip(np.sqrt(x * x + y * y) / 75.0, 0.0, 2.0)
    out[15] = clip(values[j, _ACCEL] / 4.5, -2.0, 2.0)
    if acted[j]:
        out[16], out[17] = 1.0, held[j]
    out[18] = clip((tables.route[routes[j], STOP_LINE] - values[j, _PROGRESS]) / 100.0, -1.0, 2.0)
    if conflicting(i, j, values, routes, parameters[VEHICLE], tables.zones):
        _write_zone(i, j, values, routes, tables, parameters, out[19:28], out[31:38])
    if collision < np.inf:
        out[28], out[29] = 1.0, min(collision / 10.0, 1.0)
    out[30] = 1.0 if j == leader else 0.0


@kernel
def _write_neighbours(
    i: int,
    leader: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    held: Float64[np.ndarray, " slots"],
    acted: Bool[np.ndarray, " slots"],
    directions: Float64[np.ndarray, "slots 2"],
    tables: RoadTables,
    parameters: Float64[np.ndarray, " parameters"],
    chosen: Int64[np.ndarray, " room"],
    keys: Float64[np.ndarray, " room"],
    out: Float32[np.ndarray, "room features"],
) -> int:
    """Neighbour rows of one vehicle; returns how many are real."""
    radius, length = parameters[RADIUS], parameters[VEHICLE]
    if parameters[CONFLICT] > 0.0:
        count = select_conflicting(i, leader, others, values, routes, radius, length, tables.zones, chosen, keys)
    else:
        count = select_nearest(i, others, values, radius, chosen, keys)
    out[:] = 0.0
    for k in range(count):
        _write_neighbour(i, chosen[k], leader, values, routes, held, acted, directions, tables, parameters, out[k])
    return count


@kernel
def observe_full(
    time: float,
    values: Float64[np.ndarray, "slots fields"],
    alive: Bool[np.ndarray, " slots"],
    drivers: Int8[np.ndarray, " slots"],
    routes: Int16[np.ndarray, " slots"],
    held: Float64[np.ndarray, " slots"],
    acted: Bool[np.ndarray, " slots"],
    rows: Int64[np.ndarray, " rows"],
    tables: RoadTables,
    parameters: Float64[np.ndarray, " parameters"],
    ego: Float32[np.ndarray, "rows ego"],
    neighbours: Float32[np.ndarray, "rows room features"],
    counts: Int32[np.ndarray, " rows"],
    scene: Float32[np.ndarray, " scene"],
) -> bool:
    """Fill everything; False if a value is not finite."""
    others, finite = living(values, alive, rows)
    row_of = np.full(len(alive), -1, np.int64)
    for r in range(len(rows)):
        row_of[rows[r]] = r
    room = neighbours.shape[1]
    directions = np.empty((len(alive), 2))
    headings(others, values, directions)
    headings(rows, values, directions)
    chosen, keys = np.empty(room, np.int64), np.empty(room)
    spare, sums = np.empty(ego.shape[1], np.float32), np.zeros((2, ego.shape[1]))
    seen = 0
    for i in others:
        r = row_of[i]
        if drivers[i] != _CAV and r < 0:
            continue
        mine = ego[r] if r >= 0 else spare
        leader = _write_ego(i, others, time, values, routes, held, acted, tables, parameters, mine)
        if drivers[i] == _CAV:
            add_to_scene(mine, seen, sums)
            seen += 1
        if r >= 0:
            counts[r] = _write_neighbours(
                i,
                leader,
                others,
                values,
                routes,
                held,
                acted,
                directions,
                tables,
                parameters,
                chosen,
                keys,
                neighbours[r],
            )
    for r in range(len(rows)):
        if not alive[rows[r]]:
            i = rows[r]
            leader = _write_ego(i, others, time, values, routes, held, acted, tables, parameters, ego[r])
            counts[r] = _write_neighbours(
                i,
                leader,
                others,
                values,
                routes,
                held,
                acted,
                directions,
                tables,
                parameters,
                chosen,
                keys,
                neighbours[r],
            )
    finish_scene(sums, seen, scene)
    return finite
