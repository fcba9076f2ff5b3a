"""Preferences: on the simplex, held for life, drawn from their own branch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from opencda_marl.learners.preference import Preferences, simplex_grid
from opencda_marl.settings.learning import PreferenceSettings

FIXED = [0.6, 0.3, 0.1]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_grid_is_all_of_the_simplex() -> None:
    grid = simplex_grid(4)
    assert len(grid) == 15  # 6 over 2
    assert len({tuple(p) for p in grid}) == 15
    np.testing.assert_allclose(grid.sum(1), 1.0)
    assert set(np.round(grid * 4, 9).ravel()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert simplex_grid(1).tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]


def test_sampled_is_drawn_once_per_vehicle_and_held() -> None:
    preferences = Preferences(PreferenceSettings(source="sampled"), seed=1)
    first = preferences.of(ids(7, 5), explore=True)
    np.testing.assert_allclose(first.sum(1), 1.0, rtol=1e-6)
    later = preferences.of(ids(5, 9, 7), explore=True)
    assert (later[[2, 0]] == first).all()
    assert (later[1] != first).any()


def test_dirichlet_has_the_concentration_that_was_asked_for() -> None:
    for concentration, spread in ((1.0, 2.0 / 9.0 / 4.0), (50.0, 2.0 / 9.0 / 151.0)):
        preferences = Preferences(PreferenceSettings(concentration=concentration), seed=2)
        drawn = preferences.of(np.arange(20_000), explore=True)
        np.testing.assert_allclose(drawn.mean(0), 1.0 / 3.0, atol=0.01)
        np.testing.assert_allclose(drawn.var(0), spread, rtol=0.05)  # a (1 - a) / (K c + 1) with a = 1/3


def test_a_dirichlet_may_lean_to_one_objective() -> None:
    preferences = Preferences(PreferenceSettings(concentration=[6.0, 3.0, 1.0]), seed=2)
    drawn = preferences.of(np.arange(20_000), explore=True)
    np.testing.assert_allclose(drawn.mean(0), [0.6, 0.3, 0.1], atol=0.005)
    np.testing.assert_allclose(drawn[:, 0].var(), 0.6 * 0.4 / 11.0, rtol=0.05)


def test_a_vehicle_that_ended_is_forgotten_and_the_others_are_not() -> None:
    preferences = Preferences(PreferenceSettings(), seed=3)
    before = preferences.of(ids(1, 2, 3), explore=True)
    preferences.forget(ids(2))
    tensors, _ = preferences.state()
    assert tensors["preference.ids"].tolist() == [1, 3]
    assert (preferences.of(ids(3, 1), explore=True) == before[[2, 0]]).all()


def test_the_last_answer_is_kept_no_longer_than_it_holds() -> None:
    held = Preferences(PreferenceSettings(source="sampled"), 3)
    some, others = np.array([1, 2], np.int64), np.array([2, 3], np.int64)
    first = held.of(some, explore=True).copy()
    assert (held.of(some, explore=True) == first).all()
    assert (held.of(some, explore=False) == np.float32(PreferenceSettings().fixed)).all()
    assert (held.of(others, explore=True)[0] == first[1]).all()
    assert (held.of(some, explore=True) == first).all()
    tensors, values = held.state()
    held.forget(some)
    assert (held.of(some, explore=True) != first).any()  # drawn anew
    held.load(tensors, values)
    assert (held.of(some, explore=True) == first).all()


def test_without_exploring_everybody_has_the_fixed_one() -> None:
    for source in ("sampled", "fixed"):
        preferences = Preferences(PreferenceSettings(source=source, fixed=FIXED), seed=4)
        np.testing.assert_allclose(preferences.of(ids(1, 2), explore=False), [FIXED, FIXED])
    assert preferences.of(ids(1), explore=True)[0] == pytest.approx(FIXED)


def test_the_grid_is_dealt_in_turn_greedy_or_not() -> None:
    preferences = Preferences(PreferenceSettings(source="grid", divisions=1), seed=5)
    first = preferences.of(ids(10, 11), explore=False)
    second = preferences.of(ids(11, 12, 13), explore=True)
    assert first.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert second.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("source", ["sampled", "grid"])
def test_saved_and_loaded_goes_on_alike(source: str) -> None:
    settings = PreferenceSettings(source=source)
    preferences, again = Preferences(settings, seed=6), Preferences(settings, seed=7)
    preferences.of(ids(1, 2, 3), explore=True)
    tensors, values = preferences.state()
    again.load(tensors, json.loads(json.dumps(values)))
    assert (again.of(ids(3, 4, 1), explore=True) == preferences.of(ids(3, 4, 1), explore=True)).all()


def test_one_seed_one_sequence() -> None:
    first, same, other = (Preferences(PreferenceSettings(), seed=s).of(ids(1, 2), explore=True) for s in (1, 1, 2))
    assert (first == same).all()
    assert (first != other).all()
