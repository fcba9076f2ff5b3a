"""Conflict zones: by hand on two crossing roads, by brute force on the bundled crossing."""

from __future__ import annotations

import numpy as np
import pytest
from crossings import CROSS, MERGE
from scripted import CONFLICTS, ROADS

from opencda_marl.core.conflicts import CLEARANCE, conflict_zones, zone_table
from opencda_marl.core.roads import Movement, Roads


def test_two_straight_roads_conflict_where_they_cross() -> None:
    zones = conflict_zones(CROSS)
    # they meet 60 m from each beginning; 2.6 m on either side, rounded outwards to half a metre
    assert zones.exists.tolist() == [[False, True], [True, False]]
    for i, j in ((0, 1), (1, 0)):
        assert 60 - CLEARANCE - 0.5 <= zones.entry[i, j] <= 60 - CLEARANCE
        assert 60 + CLEARANCE <= zones.exit[i, j] <= 60 + CLEARANCE + 0.5
    assert np.isnan(zones.entry[0, 0])
    assert np.isinf(zones.shared_until[0, 0])
    assert zones.shared_until[0, 1] == 0.0
    assert np.isinf(zones.shared_after).all()


def test_merging_ends_where_the_exit_lane_begins_and_one_entry_lane_never_conflicts() -> None:
    zones = conflict_zones(MERGE)
    assert zones.exists[0, 1]
    assert zones.exit[0, 1] == MERGE.junction_exit[0]
    assert zones.exit[1, 0] == MERGE.junction_exit[1]
    assert zones.shared_after[0, 1] == MERGE.junction_exit[0]
    assert zones.entry[0, 1] > MERGE.stop_line[0]
    # south right and south straight part inside the junction
    assert not zones.exists[1, 2]
    assert MERGE.stop_line[1] <= zones.shared_until[1, 2] < MERGE.junction_exit[1]
    assert zones.exists[0, 2]


def _brute_force(roads: Roads, i: int, j: int, step: float = 0.1) -> tuple[float, float] | None:
    """The stretch of i inside the junction that is near j's centre line there, on densely resampled lines."""

    def dense(k: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.arange(roads.stop_line[k], roads.junction_exit[k], step)
        mile = np.minimum(np.arange(roads.samples[k]) * roads.spacing, roads.length[k])
        line = roads.points[k, : roads.samples[k]]
        return at, np.stack([np.interp(at, mile, line[:, 0]), np.interp(at, mile, line[:, 1])], axis=1)

    at, mine = dense(i)
    _, other = dense(j)
    near = np.hypot(*(mine[:, None] - other[None]).transpose(2, 0, 1)).min(1) < CLEARANCE
    return (float(at[near].min()), float(at[near].max())) if near.any() else None


@pytest.mark.parametrize("roads", [ROADS, CROSS, MERGE], ids=["intersection", "cross", "merge"])
def test_zones_equal_brute_force(roads: Roads) -> None:
    zones = conflict_zones(roads)
    for i in range(roads.routes):
        for j in range(roads.routes):
            if i == j or (roads.entry_edge[i] == roads.entry_edge[j] and roads.lane[i] == roads.lane[j]):
                continue
            found = _brute_force(roads, i, j)
            assert zones.exists[i, j] == (found is not None), (i, j)
            if found is not None:
                # never smaller than the truth, and at most a sample and a bit larger
                assert found[0] - 1.1 <= zones.entry[i, j] <= found[0] + 1e-9, (i, j)
                assert found[1] - 1e-9 <= zones.exit[i, j] <= found[1] + 1.1, (i, j)


def test_the_bundled_crossing_is_symmetric_under_quarter_turns() -> None:
    for k in range(12):
        turned = np.roll(np.arange(12), 3)
        assert (CONFLICTS.exists[k] == CONFLICTS.exists[turned[k], :][turned]).all()
    # 12 routes: right turns meet nobody, straight 4 each, left 4 each
    assert CONFLICTS.exists.sum(1).tolist() == [0, 4, 4] * 4
    assert (CONFLICTS.exists == CONFLICTS.exists.T).all()
    assert (ROADS.movement[~CONFLICTS.exists.any(1)] == Movement.RIGHT).all()


def test_zone_table_with_intent_is_the_pair_itself() -> None:
    table = zone_table(CONFLICTS, ROADS, intent=True)
    np.testing.assert_array_equal(table[..., 0], CONFLICTS.entry)
    np.testing.assert_array_equal(table[..., 1], CONFLICTS.exit)
    np.testing.assert_array_equal(table[..., 2], CONFLICTS.entry.T)
    np.testing.assert_array_equal(table[..., 3], CONFLICTS.exit.T)


def test_zone_table_without_intent_depends_on_the_others_arm_alone() -> None:
    table = zone_table(CONFLICTS, ROADS, intent=False)
    for i in range(12):
        for arm in range(4):
            routes = np.flatnonzero(ROADS.arm == arm)
            if arm == ROADS.arm[i]:
                assert np.isnan(table[i, routes]).all()
                continue
            for j in routes[1:]:
                np.testing.assert_array_equal(table[i, j], table[i, routes[0]])
            # the hull of what may come
            if CONFLICTS.exists[i, routes].any():
                assert table[i, routes[0], 0] == np.nanmin(CONFLICTS.entry[i, routes])
                assert table[i, routes[0], 3] == np.nanmax(CONFLICTS.exit[routes, i])
