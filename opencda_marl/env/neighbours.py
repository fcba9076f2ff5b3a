"""Who is near whom, on the road and in the plane: compiled loops over pairs of vehicles.

Everything here is a function of arrays. `values` are the columns of `core.state.Field`; a vehicle is the
index of its slot. The same formulas in plain Python stand in the tests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int16, Int64

from opencda_marl.core.conflicts import Conflicts, zone_table
from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Field
from opencda_marl.env.compiled import kernel

__all__ = [
    "AFTER",
    "DISC",
    "EXIT",
    "EXIT_LIMIT",
    "INSIDE_LIMIT",
    "LENGTH",
    "LIMIT",
    "OFFSET",
    "SLOWEST",
    "STOP_LINE",
    "UNTIL",
    "RoadTables",
    "conflicting",
    "disc_time_to_collision",
    "lane_mates",
    "lead_distance",
    "road_tables",
    "select_conflicting",
    "select_nearest",
    "squared_distance",
    "time_along",
    "time_pulling",
]

_X, _Y, _PROGRESS = (
    int(Field.X),
    int(Field.Y),
    int(Field.PROGRESS),
)

# columns of RoadTables.route
STOP_LINE, EXIT, LENGTH, LIMIT, INSIDE_LIMIT, EXIT_LIMIT = range(6)
# columns of RoadTables.lead
UNTIL, AFTER, OFFSET = range(3)

DISC = 4.0
"""[m] two vehicles whose centres are closer count as touching, in the time to collision."""

SLOWEST = 1.0
"""[m/s] a vehicle is taken to go at least so fast when its time to a point is asked."""


class RoadTables(NamedTuple):
    """The crossing, packed for kernels (a NamedTuple is what they can take)."""

    route: Float64[np.ndarray, "routes 6"]  # [m], [m/s]; columns STOP_LINE … EXIT_LIMIT
    lead: Float64[np.ndarray, "routes routes 3"]  # [m] columns UNTIL, AFTER, OFFSET; see `lead_distance`
    zones: Float64[np.ndarray, "routes routes 4"]  # [m] see `conflicts.zone_table`
    quarter: Int64[np.ndarray, "routes routes"]  # arm of the other: 0 mine, 1 on my right, 2 opposite, 3 on my left
    movement: Int64[np.ndarray, " routes"]


def road_tables(roads: Roads, conflicts: Conflicts, *, intent: bool = True) -> RoadTables:
    """Pack a crossing.

    Args:
        roads: the crossing.
        conflicts: its zones.
        intent: are the others' movements known? See `conflicts.zone_table`.
    """
    columns = (
        roads.stop_line,
        roads.junction_exit,
        roads.length,
        roads.limit_entry,
        roads.limit_inside,
        roads.limit_exit,
    )
    offset = roads.length[:, None] - roads.length[None, :]
    lead = np.stack([conflicts.shared_until, conflicts.shared_after, offset], axis=-1)
    heading = roads.arm_heading[roads.arm]
    # Who comes from the right drives to the left: its heading is a quarter more than mine.
    turn = np.round((heading[None, :] - heading[:, None]) / (np.pi / 2)).astype(np.int64) % 4
    return RoadTables(
        route=np.ascontiguousarray(np.stack(columns, axis=-1), np.float64),
        lead=np.ascontiguousarray(lead),
        zones=zone_table(conflicts, roads, intent=intent),
        quarter=np.ascontiguousarray(turn),
        movement=np.ascontiguousarray(roads.movement, np.int64),
    )


@kernel
def lead_distance(
    mine: float, other: float, my_route: int, other_route: int, length: float, lead: Float64[np.ndarray, "r r 3"]
) -> float:
    """How far the other's front is ahead of mine on my lane; infinite if it is not on it, or not ahead. [m]

    Args:
        mine: [m] my progress.
        other: [m] the other's.
        my_route: mine.
        other_route: the other's.
        length: [m] of a vehicle.
        lead: `RoadTables.lead`.
    """
    until = lead[my_route, other_route, UNTIL]
    if until > 0.0 and other - length < until:  # its rear is still on the lane by which we both came
        ahead = other - mine
    elif other >= lead[other_route, my_route, AFTER]:  # it is on the lane by which we both leave
        ahead = other + lead[my_route, other_route, OFFSET] - mine
    else:
        return np.inf
    return ahead if ahead > 0.0 else np.inf


@kernel
def lane_mates(
    i: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    radius: float,
    length: float,
    lead: Float64[np.ndarray, "r r 3"],
) -> tuple[int, float, int, float, int]:
    """The next vehicles ahead and behind on i's lane, and how many there are at all within `radius`.

    Returns:
        Leader's slot (-1: none within the radius), how far its front is ahead of i's [m], the same for the
        follower (its front behind i's), and the number of other vehicles within the radius.
    """
    leader, follower, near = -1, -1, 0
    ahead, behind = np.inf, np.inf
    for j in others:
        if j == i or squared_distance(i, j, values) > radius * radius:
            continue
        near += 1
        mine, other = values[i, _PROGRESS], values[j, _PROGRESS]
        gap = lead_distance(mine, other, routes[i], routes[j], length, lead)
        if gap < ahead:
            leader, ahead = j, gap
        gap = lead_distance(other, mine, routes[j], routes[i], length, lead)
        if gap < behind:
            follower, behind = j, gap
    return leader, ahead, follower, behind, near


@kernel
def disc_time_to_collision(dx: float, dy: float, du: float, dv: float) -> float:
    """Smallest t >= 0 at which |dp + t dv| = DISC at constant velocities; infinite: never. [s]

    Already inside: 0 if closing, else never.

    Args:
        dx, dy: [m] position of the other, relative.
        du, dv: [m/s] velocity of the other, relative.
    """
    closing = dx * du + dy * dv
    outside = dx * dx + dy * dy - DISC * DISC
    if closing >= 0.0:
        return np.inf
    if outside <= 0.0:
        return 0.0
    squared = du * du + dv * dv
    root = closing * closing - squared * outside
    if root < 0.0:
        return np.inf
    return float((-closing - np.sqrt(root)) / squared)


@kernel
def time_along(distance: float, speed: float, to_stop_line: float, limit_inside: float, braking: float) -> float:
    """Time to drive `distance` at the present speed, and not faster than allowed inside the junction. [s]

    Who is faster than the junction allows is taken to brake comfortably and to have its limit at the stop line; a left
    turn that arrives at 17.9 m/s and turns at 11.2 would look seconds too early at constant speed.

    Args:
        distance: [m] not positive: already there, 0.
        speed: [m/s] now; taken to be at least SLOWEST.
        to_stop_line: [m] not positive: already behind it.
        limit_inside: [m/s] infinite: unknown, then it is constant speed.
        braking: [m/s^2] comfortable.
    """
    if distance <= 0.0:
        return 0.0
    now = max(speed, SLOWEST)
    inside = min(now, limit_inside)
    before = min(max(to_stop_line, 0.0), distance)
    slowing = min((now * now - inside * inside) / (2.0 * braking), before)
    return (before - slowing) / now + slowing / (0.5 * (now + inside)) + (distance - before) / inside


@kernel
def time_pulling(distance: float, speed: float, top: float, acceleration: float) -> float:
    """Time to drive `distance` with full acceleration, up to `top`; for who is slower than that. [s]

    Args:
        distance: [m] not positive: already there, 0.
        speed: [m/s] now.
        top: [m/s].
        acceleration: [m/s^2].
    """
    if distance <= 0.0:
        return 0.0
    rising = (top * top - speed * speed) / (2.0 * acceleration)
    if distance <= rising:
        return float((np.sqrt(speed * speed + 2.0 * acceleration * distance) - speed) / acceleration)
    return float((top - speed) / acceleration + (distance - rising) / top)


@kernel
def _insert(
    slot: int,
    key: float,
    slots: Int64[np.ndarray, " room"],
    keys: Float64[np.ndarray, " room"],
    count: int,
    room: int,
) -> int:
    """Keep the `room` smallest keys in ascending order; the new count."""
    if count == room and not (room > 0 and key < keys[room - 1]):
        return count
    at = count if count < room else room - 1
    while at > 0 and keys[at - 1] > key:
        keys[at], slots[at] = keys[at - 1], slots[at - 1]
        at -= 1
    keys[at], slots[at] = key, slot
    return count + 1 if count < room else count


@kernel
def select_conflicting(
    i: int,
    leader: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    radius: float,
    length: float,
    zones: Float64[np.ndarray, "r r 4"],
    slots: Int64[np.ndarray, " room"],
    keys: Float64[np.ndarray, " room"],
) -> int:
    """The vehicles whose path still conflicts with i's, nearest to their conflict first, then i's leader.

    Writes `slots` and returns how many. Where there is no room for all, the leader keeps its place.
    `leader` is its slot, -1 for none.
    """
    room = len(slots)
    limit = room - 1 if leader >= 0 else room
    count = 0
    for j in others:
        if j in (i, leader):
            continue
        if not conflicting(i, j, values, routes, length, zones):
            continue
        if squared_distance(i, j, values) > radius * radius:
            continue
        count = _insert(j, zones[routes[i], routes[j], 2] - values[j, _PROGRESS], slots, keys, count, limit)
    if leader >= 0:
        slots[count] = leader
        count += 1
    return count


@kernel
def select_nearest(
    i: int,
    others: Int64[np.ndarray, " others"],
    values: Float64[np.ndarray, "slots fields"],
    radius: float,
    slots: Int64[np.ndarray, " room"],
    keys: Float64[np.ndarray, " room"],
) -> int:
    """The vehicles within `radius` of i, nearest first. Writes `slots` and returns how many."""
    count, room = 0, len(slots)
    for j in others:
        if j == i:
            continue
        squared = squared_distance(i, j, values)
        if squared <= radius * radius:
            count = _insert(j, squared, slots, keys, count, room)
    return count


@kernel
def squared_distance(i: int, j: int, values: Float64[np.ndarray, "slots fields"]) -> float:
    dx, dy = values[j, _X] - values[i, _X], values[j, _Y] - values[i, _Y]
    return float(dx * dx + dy * dy)


@kernel
def conflicting(
    i: int,
    j: int,
    values: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    length: float,
    zones: Float64[np.ndarray, "r r 4"],
) -> bool:
    """True while i and j have a zone in common that neither of them has left."""
    mine, theirs = zones[routes[i], routes[j], 1], zones[routes[i], routes[j], 3]
    # comparisons with NaN (no zone) are false
    return bool(values[i, _PROGRESS] < mine + length and values[j, _PROGRESS] < theirs + length)
