"""The compiled observation against plain Python on random traffic, and its promises one by one."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from reference_view import ReferenceView, controlled
from scripted import CONFLICTS, ROADS, pose, random_state

from opencda_marl.core.conflicts import conflict_zones
from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.roads import Roads
from opencda_marl.core.spec import Feature
from opencda_marl.core.state import Driver, Field, TrafficState
from opencda_marl.env.layouts import EGO9, EGO43, FULL_EGO, FULL_NEIGHBOUR
from opencda_marl.env.observe import ego9, ego43, full, plain
from opencda_marl.settings.driving import NeighbourSettings
from opencda_marl.settings.run import RunSettings


def _scaled(feature: Feature, value: float) -> float:
    """As the layout's table promises: over the scale, clipped to the bounds in its last words."""
    bounds = re.search(r"(-?\d) to (\d)$", feature.about)
    low, high = (float(bounds[1]), float(bounds[2])) if bounds else (-1.0, 1.0)
    return float(np.clip(value / feature.scale, low, high))


def _settings(**changes: object) -> RunSettings:
    return RunSettings(neighbours=replace(NeighbourSettings(), **changes))


VARIANTS = [
    {},
    {"max": 2},
    {"radius": 40.0},
    {"intent": "none"},
    {"selection": "nearest"},
    {"selection": "nearest", "max": 30, "radius": 60.0},
    {"selection": "nearest", "intent": "none", "max": 3},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_full_layout_equals_the_reference(variant: dict[str, object]) -> None:
    settings = _settings(**variant)
    observer = full(settings, ROADS, CONFLICTS)
    rng = np.random.default_rng(1)
    for count in (1, 2, 9, 25, 33):
        state = random_state(rng, count)
        _compare_full(settings, ROADS, state, observer, rng)


def _compare_full(
    settings: RunSettings, roads: Roads, state: TrafficState, observer: object, rng: np.random.Generator
) -> None:
    held, acted = rng.uniform(-1, 1, 40), rng.random(40) < 0.7
    rows = rng.permutation(state.rows())[: rng.integers(1, state.alive.sum() + 1)]
    seen = observer.observe(state, held, acted, rows)
    view = ReferenceView(settings, roads, conflict_zones(roads), state)
    for r, slot in enumerate(rows):
        ego = view.ego(slot, held, acted)
        expected = [_scaled(f, ego[f.name]) for f in FULL_EGO]
        np.testing.assert_allclose(seen.ego[r], expected, atol=2e-6, err_msg=str(slot))
        chosen = view.selected(slot)
        assert seen.counts[r] == len(chosen)
        assert (seen.neighbours[r, len(chosen) :] == 0).all()
        for k, j in enumerate(chosen):
            row = view.row(slot, j, held, acted)
            expected = [_scaled(f, row[f.name]) for f in FULL_NEIGHBOUR]
            np.testing.assert_allclose(seen.neighbours[r, k], expected, atol=3e-6, err_msg=f"{slot} sees {j}")
    everybody = controlled(state)
    if everybody:
        ego = np.array([[_scaled(f, view.ego(s, held, acted)[f.name]) for f in FULL_EGO] for s in everybody])
        np.testing.assert_allclose(seen.scene, [*ego.mean(0), *ego.max(0)], atol=2e-6)
    np.testing.assert_array_equal(seen.ids, state.ids[rows])


@pytest.mark.parametrize("variant", VARIANTS[:5], ids=str)
def test_full_layout_where_lanes_merge_and_part(variant: dict[str, object]) -> None:
    from crossings import MERGE

    settings = _settings(**variant)
    observer = full(settings, MERGE, conflict_zones(MERGE))
    rng = np.random.default_rng(5)
    for count in (2, 6, 12):
        _compare_full(settings, MERGE, random_state(rng, count, roads=MERGE), observer, rng)


def test_flat_layouts_equal_the_reference() -> None:
    settings = _settings(radius=80.0)
    rng = np.random.default_rng(2)
    for count in (1, 4, 25):
        state = random_state(rng, count)
        view = ReferenceView(settings, ROADS, CONFLICTS, state)
        rows = state.rows()
        nothing = np.zeros(40), np.zeros(40, np.bool_)
        small = ego9(settings, ROADS, CONFLICTS).observe(state, *nothing, rows)
        large = ego43(settings, ROADS, CONFLICTS).observe(state, *nothing, rows)
        for r, slot in enumerate(rows):
            leader, route = view.leader(slot), view.route(slot)
            free = 80.0 if leader is None else min(max(view.ahead(slot, leader) - 5.0, 0.0), 80.0)
            heading = view.v(slot, Field.HEADING)
            pose9 = [
                np.clip(view.v(slot, Field.X) / 100, -2, 2),
                np.clip(view.v(slot, Field.Y) / 100, -2, 2),
                view.v(slot, Field.SPEED) / 20,
                np.sin(heading),
                np.cos(heading),
                ROADS.lane[route] / 2,
                np.clip((ROADS.stop_line[route] - view.v(slot, Field.PROGRESS)) / 100, -1, 2),
                free / 80.0,
            ]
            np.testing.assert_allclose(
                small.ego[r], [*pose9, view.v(slot, Field.PROGRESS) / ROADS.length[route]], atol=2e-6
            )
            others = sorted(view.in_sight(slot), key=lambda j: (view.distance(slot, j), j))[:5]
            expected = np.zeros(43)
            expected[:8] = pose9
            for k, j in enumerate(others):
                x, y, u, v, turned = view.in_my_frame(slot, j)
                touch = view.collision(slot, j)
                expected[8 + 7 * k : 15 + 7 * k] = [
                    *np.clip([x / 75, y / 75, u / 20, v / 20], -2, 2),
                    np.angle(np.exp(1j * turned)) / np.pi,
                    1 - view.distance(slot, j) / 80.0,
                    0.0 if touch is None else 1 - min(touch / 10, 1),
                ]
            np.testing.assert_allclose(large.ego[r], expected, atol=3e-6)
        assert small.neighbours.shape == (count, 0, 0)
        assert large.scene.shape == (86,)


def test_layouts_have_the_sizes_of_their_names() -> None:
    settings = RunSettings()
    assert len(EGO9) == 9
    assert len(EGO43) == 43
    for make, ego, rows in ((full, FULL_EGO, 12), (plain, FULL_EGO, 12), (ego9, EGO9, 0), (ego43, EGO43, 0)):
        spec = make(settings, ROADS, CONFLICTS).spec
        assert spec.ego == ego
        assert spec.max_neighbours == rows
        names = [f.name for f in spec.ego]
        assert len(set(names)) == len(names)
        assert spec.scene_size == 2 * len(ego)


def test_plain_rows_are_those_of_full_without_what_conflicts_tell() -> None:
    state, nothing = _two((60.0, 80.0), (1, 4)), (np.zeros(4), np.zeros(4, np.bool_), np.array([0, 1]))
    whole, less = (make(RunSettings(), ROADS, CONFLICTS) for make in (full, plain))
    assert {f.name for f in whole.spec.neighbour} - {f.name for f in less.spec.neighbour} == {
        *("conflict", "in_zone", "will_touch", "time_to_collision", "entry_difference", "my_entry", "my_exit"),
        *("its_entry", "its_exit", "gap_if_second", "gap_if_first", "my_stop", "its_stop", "fast_if_second"),
        *("fast_if_first", "near_if_second", "near_if_first", "my_stop_near"),
    }
    seen, fewer = whole.observe(state, *nothing), less.observe(state, *nothing)
    assert (fewer.counts == [1, 1]).all()
    assert (fewer.ego == seen.ego).all()
    for column, feature in enumerate(less.spec.neighbour):
        assert (fewer.neighbours[:, :, column] == seen.neighbours[:, :, whole.spec.neighbour.index(feature)]).all()


def _two(progress: tuple[float, float], routes: tuple[int, int]) -> TrafficState:
    state = TrafficState.empty(4)
    state.step, state.time = 200, 10.0
    for slot in (0, 1):
        state.ids[slot], state.alive[slot], state.drivers[slot] = slot, True, Driver.CAV
        state.routes[slot] = routes[slot]
        x, y, heading = pose(ROADS, routes[slot], progress[slot])
        state.values[slot] = [x, y, heading, 10.0, 0.0, progress[slot], 4.0, 5.0]
    return state


def _row(state: TrafficState, name: str, settings: RunSettings | None = None) -> float:
    seen = full(settings or RunSettings(), ROADS, CONFLICTS).observe(
        state, np.zeros(4), np.zeros(4, np.bool_), np.array([0])
    )
    assert seen.counts[0] == 1
    return float(seen.neighbours[0, 0, [f.name for f in FULL_NEIGHBOUR].index(name)])


def test_time_gaps_by_hand() -> None:
    # route 1: from north straight on; route 4: from east straight on. Zone of 1 with 4 begins at 92.0 and ends at 97.5.
    entry, exit_ = CONFLICTS.entry[1, 4], CONFLICTS.exit[1, 4]
    its_entry, its_exit = CONFLICTS.entry[4, 1], CONFLICTS.exit[4, 1]
    state = _two((entry - 20.0, its_entry - 30.0), (1, 4))
    # both at 10 m/s: I am there in 2 s, the other in 3 s and clear when its rear (5 m) has left
    assert _row(state, "my_entry") == pytest.approx(20 / 25)
    assert _row(state, "my_exit") == pytest.approx((20 + exit_ - entry + 5) / 25)
    assert _row(state, "its_entry") == pytest.approx(30 / 25)
    assert _row(state, "entry_difference") == pytest.approx(-1.0 / 3.0)
    assert _row(state, "gap_if_second") == pytest.approx(
        np.clip((2.0 - (3.0 + (its_exit - its_entry + 5) / 10)) / 3, -2, 2), abs=1e-6
    )
    assert _row(state, "gap_if_first") == pytest.approx((3.0 - (2.0 + (exit_ - entry + 5) / 10)) / 3, abs=1e-6)
    assert _row(state, "in_zone") == 0.0
    # 10 m/s take 11.1 m to stop with 4.5 m/s^2; with 2.6 m/s^2 a way d takes (sqrt(100 + 5.2 d) - 10) / 2.6
    assert _row(state, "my_stop") == pytest.approx((20 - 100 / 9) / 25)
    assert _row(state, "its_stop") == pytest.approx((30 - 100 / 9) / 25)
    its_way, my_way = 30 + its_exit - its_entry + 5, 20 + exit_ - entry + 5
    assert _row(state, "fast_if_second") == pytest.approx(
        (2.0 - (np.sqrt(100 + 5.2 * its_way) - 10) / 2.6) / 3, abs=1e-6
    )
    assert _row(state, "fast_if_first") == pytest.approx((3.0 - (np.sqrt(100 + 5.2 * my_way) - 10) / 2.6) / 3, abs=1e-6)
    assert _row(state, "near_if_second") == -2.0
    assert _row(state, "near_if_first") == pytest.approx((3.0 - (2.0 + (exit_ - entry + 5) / 10)) / 0.5, abs=1e-6)
    assert _row(state, "my_stop_near") == 2.0
    assert _row(state, "from_left") == 1.0  # I drive south; who comes from the east comes from my left


def test_hidden_intent_does_not_show_the_movement() -> None:
    """Only the other's route differs, everything that can be seen is the same: so is the observation."""
    settings = _settings(intent="none")
    observer = full(settings, ROADS, CONFLICTS)
    for mine in (1, 2):
        seen = []
        for route in (3, 4, 5):
            state = _two((70.0, 75.0), (mine, 4))
            state.routes[1] = route
            seen.append(observer.observe(state, np.zeros(4), np.ones(4, np.bool_), np.array([0])))
        for other in seen[1:]:
            np.testing.assert_array_equal(other.neighbours, seen[0].neighbours)
            np.testing.assert_array_equal(other.ego, seen[0].ego)
        assert seen[0].counts[0] == 1
    # while with shared intent a right turn is not even listed
    state = _two((70.0, 75.0), (1, 3))
    shown = full(RunSettings(), ROADS, CONFLICTS).observe(state, np.zeros(4), np.ones(4, np.bool_), np.array([0]))
    assert shown.counts[0] == 0


def test_an_ended_vehicle_still_sees_and_is_not_seen() -> None:
    state = _two((60.0, 80.0), (1, 1))
    observer = full(RunSettings(), ROADS, CONFLICTS)
    flags = np.zeros(4), np.ones(4, np.bool_)
    before = observer.observe(state, *flags, np.array([0, 1]))
    state.alive[0] = False
    after = observer.observe(state, *flags, np.array([0, 1]))
    np.testing.assert_array_equal(after.ego[0], before.ego[0])
    names = [f.name for f in FULL_EGO]
    assert before.ego[1, names.index("follower")] == 1.0
    assert after.ego[1, names.index("follower")] == 0.0
    np.testing.assert_array_equal(after.scene[: len(names)], after.ego[1])


def test_arrays_are_the_callers_to_keep() -> None:
    state = _two((60.0, 80.0), (1, 4))
    observer = full(RunSettings(), ROADS, CONFLICTS)
    first = observer.observe(state, np.zeros(4), np.zeros(4, np.bool_), np.array([0, 1]))
    kept = first.ego.copy()
    state.values[:, Field.SPEED] = 3.0
    observer.observe(state, np.zeros(4), np.zeros(4, np.bool_), np.array([0, 1]))
    np.testing.assert_array_equal(first.ego, kept)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_error(bad: float) -> None:
    state = _two((60.0, 80.0), (1, 4))
    state.values[1, Field.SPEED] = bad
    for make in (full, plain, ego9, ego43):
        with pytest.raises(NotFiniteError, match="step 200") as caught:
            make(RunSettings(), ROADS, CONFLICTS).observe(state, np.zeros(4), np.zeros(4, np.bool_), np.array([0]))
        assert "values" in caught.value.batch


def test_nobody_to_look() -> None:
    state = TrafficState.empty(4)
    seen = full(RunSettings(), ROADS, CONFLICTS).observe(
        state, np.zeros(4), np.zeros(4, np.bool_), np.zeros(0, np.int64)
    )
    assert len(seen) == 0
    assert (seen.scene == 0).all()
