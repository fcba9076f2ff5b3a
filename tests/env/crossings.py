"""Small crossings made by hand, with what the bundled one has not: merging, and lanes that allow two movements."""

from __future__ import annotations

import numpy as np

from opencda_marl.core.roads import Movement, Roads

SPACING = 0.5
ARM = 50.0  # [m] from the beginning of a route to the stop line, and from the junction to its end


def _line(vertices: list[tuple[float, float]]) -> np.ndarray:
    """x, y, heading at equal distances along a polyline."""
    corners = np.array(vertices)
    sides = np.hypot(*np.diff(corners, axis=0).T)
    mile = np.concatenate([[0.0], np.cumsum(sides)])
    at = np.arange(0.0, mile[-1] + 1e-9, SPACING)
    x, y = np.interp(at, mile, corners[:, 0]), np.interp(at, mile, corners[:, 1])
    return np.stack([x, y, np.arctan2(np.gradient(y), np.gradient(x))], axis=1)


def crossing(ways: list[tuple[str, int, str, Movement, list[tuple[float, float]]]]) -> Roads:
    """Roads from (entry edge, lane, exit edge, movement, polyline); arms are the entry edges in order.

    The stop line is ARM from the beginning, the junction's exit ARM before the end.
    """
    arms = tuple(dict.fromkeys(way[0] for way in ways))
    lines = [_line(way[4]) for way in ways]
    samples = np.array([len(line) for line in lines])
    points = np.stack([np.concatenate([p, np.repeat(p[-1:], samples.max() - len(p), axis=0)]) for p in lines])
    length = (samples - 1) * SPACING
    first = [next(k for k, way in enumerate(ways) if way[0] == arm) for arm in arms]
    return Roads(
        network="by hand",
        arms=arms,
        arm_heading=np.array([lines[k][0, 2] for k in first]),
        arm=np.array([arms.index(way[0]) for way in ways]),
        exit_arm=np.zeros(len(ways), np.int64),
        lane=np.array([way[1] for way in ways]),
        movement=np.array([int(way[3]) for way in ways]),
        entry_edge=tuple(way[0] for way in ways),
        exit_edge=tuple(way[2] for way in ways),
        length=length,
        stop_line=np.full(len(ways), ARM),
        junction_exit=length - ARM,
        limit_entry=np.full(len(ways), 15.0),
        limit_inside=np.full(len(ways), 10.0),
        limit_exit=np.full(len(ways), 15.0),
        spacing=SPACING,
        points=points,
        samples=samples,
    )


CROSS = crossing(
    [
        # two straight roads that cross at a right angle in the origin, 20 m of junction
        ("west", 0, "east", Movement.STRAIGHT, [(-60.0, 0.0), (60.0, 0.0)]),
        ("south", 0, "north", Movement.STRAIGHT, [(0.0, -60.0), (0.0, 60.0)]),
    ]
)

MERGE = crossing(
    [
        # from south to the east, into the lane that those from the west leave by; and straight on, from the same lane
        ("west", 0, "east", Movement.STRAIGHT, [(-60.0, 0.0), (60.0, 0.0)]),
        ("south", 0, "east", Movement.RIGHT, [(0.0, -60.0), (0.0, -10.0), (0.0, -5.0), (5.0, 0.0), (60.0, 0.0)]),
        ("south", 0, "north", Movement.STRAIGHT, [(0.0, -60.0), (0.0, 60.0)]),
    ]
)
