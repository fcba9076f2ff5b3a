"""Near-misses: against plain Python, by hand, and (slow) on SUMO's own drivers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_drive import look_at_pairs
from scripted import CONFLICTS, ROADS, random_state

from opencda_marl.core.state import Driver, Field, TrafficState
from opencda_marl.env.near_miss import Proximity
from opencda_marl.env.neighbours import road_tables
from opencda_marl.settings.driving import NearMissSettings
from opencda_marl.settings.run import RunSettings

TABLES = road_tables(ROADS, CONFLICTS)


def _look(state: TrafficState, settings: RunSettings | None = None) -> Proximity:
    proximity = Proximity.of(settings or RunSettings(), TABLES, len(state.ids))
    proximity.look(state.alive, state.values, state.routes)
    return proximity


@pytest.mark.parametrize("limits", [NearMissSettings(), NearMissSettings(4.0, 2.5, 1.0)], ids=["default", "other"])
def test_pairs_equal_plain_python(limits: NearMissSettings) -> None:
    settings = RunSettings()
    settings = replace(settings, reward=replace(settings.reward, near_miss=limits))
    rng = np.random.default_rng(3)
    some = 0
    for count in (1, 2, 12, 30, 38):
        for _ in range(6):
            state = random_state(rng, count)
            found = _look(state, settings)
            rate, predicted, missed = look_at_pairs(settings, ROADS, CONFLICTS, state)
            for slot in state.rows().tolist():
                assert found.rate[slot] == pytest.approx(rate[slot], abs=1e-9), slot
                assert found.predicted[slot] == (slot in predicted), slot
                assert found.missed[slot] == (slot in missed), slot
            some += len(missed)
            assert not found.missed[~state.alive].any()
    assert some > 20


def _pair(routes: tuple[int, int], progress: tuple[float, float], speeds: tuple[float, float]) -> TrafficState:
    state = TrafficState.empty(2)
    for slot in (0, 1):
        state.alive[slot], state.drivers[slot], state.routes[slot] = True, Driver.CAV, routes[slot]
        state.values[slot, [Field.PROGRESS, Field.SPEED]] = progress[slot], speeds[slot]
    return state


def test_one_lane_by_hand() -> None:
    # 15 m from bumper to bumper, closing at 10 m/s: 1.5 s. Braking at 4.5: 15^2/9 = 25 m against 15 + 5^2/9 = 17.8 m
    assert _look(_pair((1, 1), (40.0, 60.0), (15.0, 5.0))).missed.all()
    # 16 m, closing at 8 m/s: 2 s is not below 2 s
    assert not _look(_pair((1, 1), (40.0, 61.0), (15.0, 7.0))).missed.any()
    # 1 m behind at nearly the same speed: no collision within 2 s
    assert not _look(_pair((1, 1), (40.0, 46.0), (10.4, 10.0))).missed.any()
    # slow, 2 m behind one that stands: 2 / 1.5 s, but it stops within 0.25 m
    assert not _look(_pair((1, 1), (40.0, 47.0), (1.5, 0.0))).missed.any()
    # side lanes never count
    assert not _look(_pair((0, 1), (40.0, 43.0), (15.0, 0.0))).missed.any()


def test_crossing_paths_by_hand() -> None:
    mine, its = CONFLICTS.entry[1, 4], CONFLICTS.entry[4, 1]
    # 10 m away at 10 m/s, which takes 11.1 m to stop, and 15 m away at 12 m/s (16 m): 1 s and 1.25 s
    assert _look(_pair((1, 4), (mine - 10, its - 15), (10.0, 12.0))).missed.all()
    # one of them can still stop: a conflict is predicted, and nothing was missed
    found = _look(_pair((1, 4), (mine - 12, its - 15), (10.0, 12.0)))
    assert found.predicted.all()
    assert not found.missed.any()
    # more than a second apart
    assert not _look(_pair((1, 4), (mine - 10, its - 31), (10.0, 14.0))).predicted.any()
    # the first went in 0.5 s ago, the second is there in 0.4 s
    assert _look(_pair((1, 4), (mine + 5, its - 4), (10.0, 10.0))).missed.all()
    # routes that do not meet
    assert not _look(_pair((0, 4), (mine - 10, its - 10), (10.0, 10.0))).predicted.any()


def test_rate_by_hand() -> None:
    mine, its = CONFLICTS.entry[1, 4], CONFLICTS.entry[4, 1]
    # the other is in the zone, I am there in 0.6 s: 1 - 0.6 / 1.5
    found = _look(_pair((1, 4), (mine - 6, its + 1), (10.0, 3.0)))
    assert found.rate.tolist() == pytest.approx([0.6, 0.0])
    # 3 m behind one that drives 4 m/s slower: 0.75 s
    found = _look(_pair((1, 1), (40.0, 48.0), (9.0, 5.0)))
    assert found.rate.tolist() == pytest.approx([0.5, 0.0])
