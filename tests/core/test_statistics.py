"""Aggregates over runs, by hand and by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from opencda_marl.core.statistics import (
    interquartile_mean,
    paired_difference,
    performance_profile,
    probability_of_improvement,
    stratified_interval,
)


def test_interquartile_mean_by_hand() -> None:
    assert interquartile_mean(np.array([0.0, 1.0, 3.0, 100.0])) == 2.0
    # a quarter of five values is 1.25: the second and the fourth count three quarters
    assert interquartile_mean(np.array([[9.0, 1.0, 4.0, 2.0, 0.0]])) == pytest.approx((0.75 * 1 + 2 + 0.75 * 4) / 2.5)
    assert interquartile_mean(np.array([7.0])) == 7.0
    with pytest.raises(ValueError, match="no score"):
        interquartile_mean(np.zeros(0))


def test_tasks_are_drawn_apart() -> None:
    scores = np.array([[0.0, 10.0], [1.0, 11.0]])
    seen: set[tuple[float, ...]] = set()

    def remember(drawn: np.ndarray) -> float:
        seen.add(tuple(drawn.ravel()))
        assert set(drawn[:, 0]) <= {0.0, 1.0}
        assert set(drawn[:, 1]) <= {10.0, 11.0}
        return float(drawn.mean())

    low, high = stratified_interval(scores, remember, repetitions=400)
    assert (0.0, 11.0, 1.0, 10.0) in seen  # no run as a whole looks like that
    assert 5.0 <= low < 5.5 < high <= 6.0
    assert stratified_interval(scores[:1]) == (5.0, 5.0)


def test_interval_of_a_mean_is_about_two_standard_errors() -> None:
    scores = np.random.default_rng(1).normal(size=(400, 1))
    low, high = stratified_interval(scores, lambda drawn: float(drawn.mean()))
    error = float(scores.std() / math.sqrt(400))
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert stratified_interval(scores) == stratified_interval(scores)


def test_probability_of_improvement_by_hand() -> None:
    ours, theirs = np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[2.0, 5.0]])
    assert probability_of_improvement(ours, theirs) == (0.5 + 0.5) / 2
    assert probability_of_improvement(ours + 9.0, theirs) == 1.0
    assert probability_of_improvement(theirs, ours) == 1.0 - probability_of_improvement(ours, theirs)


def test_performance_profile_by_hand() -> None:
    scores = np.array([[0.9, 1.0], [0.95, 0.5]])
    assert performance_profile(scores, np.array([0.0, 0.5, 0.9, 1.0])).tolist() == [1.0, 0.75, 0.5, 0.0]


def test_paired_difference_by_hand() -> None:
    ours, theirs = np.array([[1.0, 10.0], [3.0, 10.0]]), np.array([[5.0, 10.0], [5.0, 10.0]])
    apart, p = paired_difference(ours, theirs)
    assert apart == pytest.approx(0.2 - 0.5)
    assert p == 0.5  # of four ways to swap, none and both are as far apart
    assert paired_difference(ours, ours) == (0.0, 1.0)
    nothing, p = paired_difference(np.zeros((2, 2)), theirs)
    assert math.isnan(nothing)
    assert p == 1.0


def test_chance_of_a_paired_difference_is_that_of_all_swaps() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = (np.stack([rng.integers(0, 5, 7), np.full(7, 9)], axis=1).astype(float) for _ in "ab")

    def difference(swaps: tuple[bool, ...]) -> float:
        chosen = np.array(swaps)[:, None]
        pair = np.where(chosen, theirs, ours).sum(axis=0), np.where(chosen, ours, theirs).sum(axis=0)
        return float(pair[0][0] / pair[0][1] - pair[1][0] / pair[1][1])

    every = [difference(swaps) for swaps in itertools.product((False, True), repeat=7)]
    apart, p = paired_difference(ours, theirs)
    assert apart == pytest.approx(every[0])
    assert p == pytest.approx(np.mean(np.abs(every) >= abs(every[0]) - 1e-12))
    drawn = paired_difference(ours, theirs, repetitions=100)[1]  # fewer than all swaps: drawn at random
    assert drawn == pytest.approx(p, abs=0.15)
    assert drawn == paired_difference(ours, theirs, repetitions=100)[1]


@pytest.mark.parametrize("theirs", [10, 30, 60])
def test_equal_rates_are_called_different_one_time_in_twenty_however_many_vehicles_each_had(theirs: int) -> None:
    rng = np.random.default_rng(theirs)
    called = 0
    for _ in range(400):
        pair = [np.stack([rng.binomial(of, 0.05, 10), np.full(10, of)], axis=1).astype(float) for of in (60, theirs)]
        called += paired_difference(*pair, repetitions=1024)[1] < 0.05
    assert called / 400 < 0.09
    pair = [np.stack([rng.binomial(60, rate, 10), np.full(10, 60)], axis=1).astype(float) for rate in (0.02, 0.3)]
    assert paired_difference(*pair)[1] < 0.01
