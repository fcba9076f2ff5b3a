"""Who follows whom, and when discs touch: by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from crossings import CROSS, MERGE
from scripted import CONFLICTS, ROADS

from opencda_marl.core.conflicts import conflict_zones
from opencda_marl.env.neighbours import disc_time_to_collision, lead_distance, road_tables, time_along

ZONES = conflict_zones(MERGE)
LEAD = road_tables(MERGE, ZONES).lead
WEST, RIGHT, NORTH = 0, 1, 2  # routes of MERGE: from west on, from south to the right, from south on


def _ahead(mine: float, other: float, my_route: int, other_route: int) -> float:
    return lead_distance(mine, other, my_route, other_route, 5.0, LEAD)


def test_one_route() -> None:
    assert _ahead(10.0, 30.0, WEST, WEST) == 20.0
    assert _ahead(30.0, 10.0, WEST, WEST) == math.inf
    assert _ahead(5.0, 119.0, WEST, WEST) == 114.0


def test_one_entry_lane_until_the_rear_has_turned_off() -> None:
    until = ZONES.shared_until[RIGHT, NORTH]
    assert _ahead(20.0, 40.0, RIGHT, NORTH) == 20.0
    assert _ahead(until - 10.0, until + 4.9, RIGHT, NORTH) == pytest.approx(14.9)  # its rear is still on the lane
    assert _ahead(until - 10.0, until + 5.1, RIGHT, NORTH) == math.inf


def test_one_exit_lane_from_where_it_begins() -> None:
    # both lanes end at the same place, so the way that is left says who is ahead
    west, right = MERGE.junction_exit[WEST], MERGE.junction_exit[RIGHT]
    assert west != right
    assert _ahead(20.0, right + 0.1, WEST, RIGHT) == pytest.approx(west - 20.0 + 0.1)
    assert _ahead(20.0, right - 0.1, WEST, RIGHT) == math.inf  # still inside: the zone is what counts
    assert _ahead(20.0, west + 0.1, RIGHT, WEST) == pytest.approx(right - 20.0 + 0.1)
    assert _ahead(20.0, west - 0.1, RIGHT, WEST) == math.inf
    assert _ahead(west + 9.0, right + 2.0, WEST, RIGHT) == math.inf  # behind me


def test_roads_that_only_cross_have_no_leaders() -> None:
    lead = road_tables(CROSS, conflict_zones(CROSS)).lead
    for other in (10.0, 58.0, 62.0, 119.0):
        assert lead_distance(5.0, other, 0, 1, 5.0, lead) == math.inf


def test_on_the_bundled_crossing_only_ones_own_route_leads() -> None:
    lead = road_tables(ROADS, CONFLICTS).lead
    for i in range(12):
        for j in range(12):
            found = [lead_distance(1.0, other, i, j, 5.0, lead) < math.inf for other in np.linspace(2.0, 180.0, 90)]
            assert all(found) if i == j else not any(found)


def test_discs_of_four_metres() -> None:
    # 24 m ahead, closing at 10 m/s: the discs touch after 2 s
    assert disc_time_to_collision(24.0, 0.0, -10.0, 0.0) == pytest.approx(2.0)
    assert disc_time_to_collision(24.0, 0.0, 10.0, 0.0) == math.inf
    assert disc_time_to_collision(24.0, 0.0, 0.0, 0.0) == math.inf
    # it passes 5 m to the side: never; 3 m to the side: after (24 - sqrt(7)) / 10
    assert disc_time_to_collision(24.0, 5.0, -10.0, 0.0) == math.inf
    assert disc_time_to_collision(24.0, 3.0, -10.0, 0.0) == pytest.approx((24.0 - math.sqrt(7.0)) / 10.0)
    # inside already: at once if closing, never if not
    assert disc_time_to_collision(2.0, 0.0, -1.0, 0.0) == 0.0
    assert disc_time_to_collision(2.0, 0.0, 1.0, 0.0) == math.inf


def test_times_along_the_path() -> None:
    # 30 m at 10 m/s, the junction allows more
    assert time_along(30.0, 10.0, 20.0, 17.88, 3.0) == pytest.approx(3.0)
    # who stands is taken to crawl at 1 m/s; who is there needs no time
    assert time_along(7.0, 0.0, 7.0, 11.18, 3.0) == pytest.approx(7.0)
    assert time_along(-2.0, 10.0, -9.0, 11.18, 3.0) == 0.0
    # at 14 m/s towards a limit of 8 m/s: (196 - 64) / 6 = 22 m of braking at 11 m/s on average, 2 s
    assert time_along(50.0, 14.0, 50.0, 8.0, 3.0) == pytest.approx(28.0 / 14.0 + 2.0)
    assert time_along(66.0, 14.0, 50.0, 8.0, 3.0) == pytest.approx(28.0 / 14.0 + 2.0 + 16.0 / 8.0)
    # inside already, still too fast: at the limit
    assert time_along(16.0, 14.0, -3.0, 8.0, 3.0) == pytest.approx(2.0)
