"""Layouts `ego9` and `ego43` (see `env.layouts`), compiled: one vector a vehicle, no rows."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int8, Int16, Int64

from opencda_marl.core.state import Driver, Field
from opencda_marl.env.compiled import kernel
from opencda_marl.env.layouts import NEAREST_IN_EGO43
from opencda_marl.env.neighbours import LENGTH, STOP_LINE, RoadTables, lane_mates, select_nearest, squared_distance
from opencda_marl.env.view import LANES, RADIUS, VEHICLE, add_to_scene, clip, finish_scene, headings, living, relative

__all__ = ["observe_flat"]

_X, _Y, _SPEED, _PROGRESS = (
    int(Field.X),
    int(Field.Y),
    int(Field.SPEED),
    int(Field.PROGRESS),
)
_CAV = int(Driver.CAV)


@kernel
def _write_flat(
    i: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    directions: Float64[np.ndarray, "slots 2"],
    tables: RoadTables,
    lanes: Int64[np.ndarray, " routes"],
    parameters: Float64[np.ndarray, " parameters"],
    chosen: Int64[np.ndarray, " room"],
    keys: Float64[np.ndarray, " room"],
    out: Float32[np.ndarray, " ego"],
) -> None:
    """Layout `ego9`, or `ego43` where there is room for its five others."""
    route, radius, length = tables.route[routes[i]], parameters[RADIUS], parameters[VEHICLE]
    progress = values[i, _PROGRESS]
    leader, ahead, _, _, _ = lane_mates(i, others, values, routes, radius, length, tables.lead)
    free = max(ahead - length, 0.0) if leader >= 0 else radius
    out[0] = clip(values[i, _X] / 100.0, -2.0, 2.0)
    out[1] = clip(values[i, _Y] / 100.0, -2.0, 2.0)
    out[2] = clip(values[i, _SPEED] / 20.0, 0.0, 2.0)
    out[3], out[4] = directions[i, 1], directions[i, 0]
    out[5] = lanes[routes[i]] / parameters[LANES]
    out[6] = clip((route[STOP_LINE] - progress) / 100.0, -1.0, 2.0)
    out[7] = clip(free / radius, 0.0, 1.0)
    if len(out) == 9:
        out[8] = clip(progress / route[LENGTH], 0.0, 1.0)
        return
    out[8:] = 0.0
    for k in range(select_nearest(i, others, values, radius, chosen, keys)):
        x, y, u, v, along, across, collision = relative(i, chosen[k], values, directions)
        at = 8 + 7 * k
        out[at] = clip(x / 75.0, -2.0, 2.0)
        out[at + 1] = clip(y / 75.0, -2.0, 2.0)
        out[at + 2] = clip(u / 20.0, -2.0, 2.0)
        out[at + 3] = clip(v / 20.0, -2.0, 2.0)
        out[at + 4] = np.arctan2(across, along) / np.pi
        out[at + 5] = 1.0 - np.sqrt(squared_distance(i, chosen[k], values)) / radius
        out[at + 6] = 1.0 - min(collision / 10.0, 1.0)


@kernel
def observe_flat(
    values: Float64[np.ndarray, "slots fields"],
    alive: Bool[np.ndarray, " slots"],
    drivers: Int8[np.ndarray, " slots"],
    routes: Int16[np.ndarray, " slots"],
    rows: Int64[np.ndarray, " rows"],
    tables: RoadTables,
    lanes: Int64[np.ndarray, " routes"],
    parameters: Float64[np.ndarray, " parameters"],
    ego: Float32[np.ndarray, "rows ego"],
    scene: Float32[np.ndarray, " scene"],
) -> bool:
    """Fill everything; False if a value is not finite."""
    others, finite = living(values, alive, rows)
    row_of = np.full(len(alive), -1, np.int64)
    for r in range(len(rows)):
        row_of[rows[r]] = r
    chosen, keys = np.empty(NEAREST_IN_EGO43, np.int64), np.empty(NEAREST_IN_EGO43)
    directions = np.empty((len(alive), 2))
    headings(others, values, directions)
    headings(rows, values, directions)
    spare, sums = np.empty(ego.shape[1], np.float32), np.zeros((2, ego.shape[1]))
    seen = 0
    for i in others:
        r = row_of[i]
        if drivers[i] != _CAV and r < 0:
            continue
        mine = ego[r] if r >= 0 else spare
        _write_flat(i, others, values, routes, directions, tables, lanes, parameters, chosen, keys, mine)
        if drivers[i] == _CAV:
            add_to_scene(mine, seen, sums)
            seen += 1
    for r in range(len(rows)):
        if not alive[rows[r]]:
            _write_flat(rows[r], others, values, routes, directions, tables, lanes, parameters, chosen, keys, ego[r])
    finish_scene(sums, seen, scene)
    return finite
