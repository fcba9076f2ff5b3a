"""What each column of an observation means: its unit, its scale, its bounds.

A value is divided by its scale and clipped. Where something may be absent (no leader, no action yet, no
conflict) a column of ones and zeros says so, and the columns that belong to it are zero then.
"""

from __future__ import annotations

from opencda_marl.core.spec import Feature, ObservationSpec

__all__ = [
    "EGO9",
    "EGO43",
    "FULL_EGO",
    "FULL_NEIGHBOUR",
    "NEAREST_IN_EGO43",
    "PLAIN_NEIGHBOUR",
    "flat_spec",
    "full_spec",
    "plain_spec",
]

NEAREST_IN_EGO43 = 5
"""How many others are written into `ego43`."""

FULL_EGO = (
    Feature("speed", "m/s", 20.0, "0 to 2"),
    Feature("speed_over_limit", "1", 1.0, "over the limit where the front is; 0 to 2"),
    Feature("acceleration", "m/s^2", 4.5, "-2 to 2"),
    Feature("stop_line", "m", 100.0, "distance to the stop line, negative behind it; -1 to 2"),
    Feature("inside", "flag", 1.0, "some part of the vehicle is inside the junction"),
    Feature("past", "flag", 1.0, "all of it has left the junction"),
    Feature("exit", "m", 100.0, "distance until all of it has left the junction; -1 to 2"),
    Feature("progress", "1", 1.0, "share of the route that is done; 0 to 1"),
    Feature("right", "flag", 1.0, "it turns right"),
    Feature("straight", "flag", 1.0, "it goes straight on"),
    Feature("left", "flag", 1.0, "it turns left"),
    Feature("limit_ahead", "m/s", 20.0, "the next limit: of the junction before it, else of the exit; 0 to 2"),
    Feature("envelope", "m/s", 20.0, "fastest speed that may be commanded now; 0 to 2"),
    Feature("leader", "flag", 1.0, "somebody is ahead on the lane, within the radius"),
    Feature("leader_gap", "m", 50.0, "bumper to bumper; with `leader`; 0 to 2"),
    Feature("leader_closing", "m/s", 10.0, "own speed minus the leader's; with `leader`; -2 to 2"),
    Feature("follower", "flag", 1.0, "somebody is behind on the lane, within the radius"),
    Feature("follower_gap", "m", 50.0, "bumper to bumper; with `follower`; 0 to 2"),
    Feature("acted", "flag", 1.0, "it has acted before"),
    Feature("last_action", "1", 1.0, "in [-1, 1]; with `acted`"),
    Feature("others", "vehicles", 30.0, "vehicles within the radius; 0 to 2"),
    Feature("age", "s", 30.0, "since it entered; 0 to 2"),
    Feature("leader_stop", "m", 25.0, "gap that is left if both brake as hard as they can; with `leader`; -2 to 2"),
    Feature("leader_stop_near", "m", 4.0, "the same, magnified; -2 to 2"),
)
"""Ego features of layout `full`, in order."""

FULL_NEIGHBOUR = (
    Feature("right", "flag", 1.0, "the other turns right; 0 where its intent is hidden"),
    Feature("straight", "flag", 1.0, "the other goes straight on; likewise"),
    Feature("left", "flag", 1.0, "the other turns left; likewise"),
    Feature("from_mine", "flag", 1.0, "the other came by my arm"),
    Feature("from_right", "flag", 1.0, "by the arm on my right, as seen when I entered"),
    Feature("from_opposite", "flag", 1.0, "by the arm opposite mine"),
    Feature("from_left", "flag", 1.0, "by the arm on my left"),
    Feature("x", "m", 75.0, "position ahead of me, centre to centre; -2 to 2"),
    Feature("y", "m", 75.0, "position to my left; -2 to 2"),
    Feature("u", "m/s", 20.0, "relative velocity forwards; -2 to 2"),
    Feature("v", "m/s", 20.0, "relative velocity to the left; -2 to 2"),
    Feature("sin_heading", "1", 1.0, "of its heading relative to mine"),
    Feature("cos_heading", "1", 1.0, "likewise"),
    Feature("speed", "m/s", 20.0, "0 to 2"),
    Feature("distance", "m", 75.0, "centre to centre; 0 to 2"),
    Feature("acceleration", "m/s^2", 4.5, "-2 to 2"),
    Feature("acted", "flag", 1.0, "it is driven by the policy and has acted before"),
    Feature("last_action", "1", 1.0, "in [-1, 1]; with `acted`"),
    Feature("stop_line", "m", 100.0, "its distance to its stop line, negative behind it; -1 to 2"),
    Feature("conflict", "flag", 1.0, "our paths share a zone that neither of us has left"),
    Feature("my_entry", "m", 25.0, "my distance to the shared zone, negative inside; with `conflict`; -1 to 2"),
    Feature("my_exit", "m", 25.0, "my distance until my rear has left it; with `conflict`; -1 to 2"),
    Feature("its_entry", "m", 25.0, "the other's distance to the zone; with `conflict`; -1 to 2"),
    Feature("its_exit", "m", 25.0, "the other's distance until its rear has left it; with `conflict`; -1 to 2"),
    Feature("entry_difference", "s", 3.0, "my time to the zone minus its; with `conflict`; -2 to 2"),
    Feature("gap_if_second", "s", 3.0, "my time to the zone minus its time to leave it; with `conflict`; -2 to 2"),
    Feature("gap_if_first", "s", 3.0, "its time to the zone minus my time to leave it; with `conflict`; -2 to 2"),
    Feature("in_zone", "flag", 1.0, "it is in the zone already"),
    Feature("will_touch", "flag", 1.0, "at constant velocities our discs of 4 m will touch"),
    Feature("time_to_collision", "s", 10.0, "until they touch; with `will_touch`; 0 to 1"),
    Feature("is_leader", "flag", 1.0, "it is the next one ahead on my lane"),
    Feature("my_stop", "m", 25.0, "how far before the zone I stand if I brake hard; with `conflict`; -2 to 2"),
    Feature("its_stop", "m", 25.0, "how far before the zone the other stands if it does; with `conflict`; -2 to 2"),
    Feature("fast_if_second", "s", 3.0, "`gap_if_second` if the other accelerates as hard as it can; -2 to 2"),
    Feature("fast_if_first", "s", 3.0, "`gap_if_first` if I accelerate as hard as I can; -2 to 2"),
    Feature("near_if_second", "s", 0.5, "`gap_if_second`, magnified; -2 to 2"),
    Feature("near_if_first", "s", 0.5, "`gap_if_first`, magnified; -2 to 2"),
    Feature("my_stop_near", "m", 4.0, "`my_stop`, magnified; -2 to 2"),
)
"""Neighbour features of layout `full`, in order. Times are those of `neighbours.time_along`: the present speed, at
least 1 m/s, and braking comfortably to the junction's limit where that is lower."""

_OF_CONFLICTS = ("my_", "its_", "gap_", "fast_", "near_", "conflict", "entry_", "in_zone", "will_", "time_to_")
PLAIN_NEIGHBOUR = tuple(feature for feature in FULL_NEIGHBOUR if not feature.name.startswith(_OF_CONFLICTS))
"""Neighbour features of layout `plain`: where the others are, how they move and what they want."""

_POSE = (
    Feature("x", "m", 100.0, "east of the junction's centre; -2 to 2"),
    Feature("y", "m", 100.0, "north of it; -2 to 2"),
    Feature("speed", "m/s", 20.0, "0 to 2"),
    Feature("sin_heading", "1", 1.0, "counter-clockwise from east"),
    Feature("cos_heading", "1", 1.0, "likewise"),
    Feature("lane", "1", 1.0, "index from the right over the highest one"),
    Feature("junction", "m", 100.0, "distance to the stop line, negative behind it; -1 to 2"),
    Feature("free_ahead", "radius", 1.0, "free road on my lane, at most as far as the radius of sight; 0 to 1"),
)

EGO9 = (*_POSE, Feature("progress", "1", 1.0, "share of the route that is done; 0 to 1"))
"""Layout `ego9`."""

EGO43 = (
    *_POSE,
    *(
        Feature(f"{name}_{k}", unit, scale, f"{about}; all zero where there is no {k}-th vehicle within the radius")
        for k in range(1, NEAREST_IN_EGO43 + 1)
        for name, unit, scale, about in (
            ("x", "m", 75.0, "position ahead of me, centre to centre; -2 to 2"),
            ("y", "m", 75.0, "position to my left; -2 to 2"),
            ("u", "m/s", 20.0, "relative velocity forwards; -2 to 2"),
            ("v", "m/s", 20.0, "relative velocity to the left; -2 to 2"),
            ("heading", "rad", 3.141592653589793, "relative to mine; -1 to 1"),
            ("nearness", "radius", 1.0, "1 - distance over the radius: 0 is nobody within sight, so it is the mask"),
            ("urgency", "10 s", 1.0, "1 - time to collision over 10 s: 0 is no collision within 10 s"),
        )
    ),
)
"""Layout `ego43`: distance and time to collision of the five nearest are turned round, so that "nobody" is where
the scale ends and not a value on it."""


def full_spec(max_neighbours: int) -> ObservationSpec:
    """Layout `full`: ego features and up to `max_neighbours` rows."""
    return ObservationSpec("full", 3, FULL_EGO, FULL_NEIGHBOUR, max_neighbours)


def plain_spec(max_neighbours: int) -> ObservationSpec:
    """Layout `plain`: `full` without what its rows say of conflicts."""
    return ObservationSpec("plain", 1, FULL_EGO, PLAIN_NEIGHBOUR, max_neighbours)


def flat_spec(name: str) -> ObservationSpec:
    """Layout `ego9` or `ego43`: no neighbour rows."""
    return ObservationSpec(name, 1, {"ego9": EGO9, "ego43": EGO43}[name], (), 0)
