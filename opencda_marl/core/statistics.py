"""Aggregates over few training runs, after Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice".

A score is a number per run (seed) and task (density). Their package, rliable, brings pandas, statsmodels and SciPy
along for these few lines, so they stand here, in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

__all__ = [
    "interquartile_mean",
    "paired_difference",
    "performance_profile",
    "probability_of_improvement",
    "stratified_interval",
]

_AT_ONCE = 1000  # random swaps: each takes a number an episode

Scores = Float64[np.ndarray, "runs tasks"]


def interquartile_mean(scores: Float64[np.ndarray, "*any"]) -> float:
    """Mean of the middle half; of values that the quartile cuts, the part inside counts.

    The four-value case by hand: the mean of the two in the middle. (SciPy's `trim_mean` drops whole values instead.)

    Raises:
        ValueError: there is no score.
    """
    ordered = np.sort(np.asarray(scores, np.float64), axis=None)
    count = len(ordered)
    if not count:
        raise ValueError("there is no score to take a mean of")
    edges = np.arange(count + 1) / count
    weights = np.clip(np.minimum(edges[1:], 0.75) - np.maximum(edges[:-1], 0.25), 0.0, None)
    return float(weights @ ordered / weights.sum())


def stratified_interval(
    scores: Scores,
    statistic: Callable[[Scores], float] = interquartile_mean,
    *,
    repetitions: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval of a statistic: runs are drawn anew, with replacement, for each task by itself.

    Args:
        scores: at least one run.
        statistic: of such an array.
        repetitions: of the bootstrap.
        confidence: share of the resampled statistics that lie inside.
        seed: of the bootstrap.

    Returns:
        low, high. With one run there is nothing to draw: both are the statistic itself.
    """
    rng = np.random.default_rng(seed)
    runs, tasks = scores.shape
    columns = np.arange(tasks)
    drawn = [statistic(scores[rng.integers(runs, size=(runs, tasks)), columns]) for _ in range(repetitions)]
    rest = 50.0 * (1.0 - confidence)
    low, high = np.percentile(drawn, [rest, 100.0 - rest])
    return float(low), float(high)


def probability_of_improvement(ours: Scores, theirs: Scores) -> float:
    """P(a run of ours beats one of theirs on a task drawn at random); equal scores count half (Mann and Whitney).

    Args:
        ours: higher is better.
        theirs: on the same tasks; it may have another number of runs.
    """
    apart = ours[:, None, :] - theirs[None, :, :]  # [ours, theirs, tasks]
    return float(np.mean((apart > 0.0) + 0.5 * (apart == 0.0)))


def performance_profile(
    scores: Scores, thresholds: Float64[np.ndarray, " thresholds"]
) -> Float64[np.ndarray, " thresholds"]:
    """Share of runs and tasks whose score is above each threshold."""
    found: np.ndarray = (scores.reshape(-1)[None, :] > thresholds[:, None]).mean(axis=1)
    return found


def paired_difference(
    ours: Float64[np.ndarray, "episodes 2"],
    theirs: Float64[np.ndarray, "episodes 2"],
    *,
    repetitions: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Difference of two pooled rates over the same episodes, and how often chance alone makes one as large.

    A permutation test (Fisher 1935). An episode speaks for one driver by how far its hits are from what both drivers'
    common rate would make of its vehicles; if that rate were the same, each could as well speak for the other one. All
    such swaps are tried where there are few of them, else as many as `repetitions` drawn at random.
    Vehicles of an episode meet each other, so the episode is what is exchanged: fewer than six of them, of which all
    speak for one, can never be told from chance at 1 in 20. Where a driver has only a handful of vehicles to an episode
    p is too small: whoever asks sees to it that there are some (`core.verdict`).

    Args:
        ours: counts of each episode: hits, and out of how many.
        theirs: of the same episodes.
        repetitions: random swaps.
        seed: of these.

    Returns:
        ours minus theirs, and p (two-sided, within 0 to 1). NaN and 1 where there was nothing to count.
    """
    counts = np.stack([ours, theirs]).astype(np.float64)  # [driver, episodes, 2]
    whole = counts.sum(axis=1)
    if not whole[:, 1].all():
        return float("nan"), 1.0
    rates = whole[:, 0] / whole[:, 1]
    observed = float(rates[0] - rates[1])
    common = whole[:, 0].sum() / whole[:, 1].sum()
    beyond = (counts[:, :, 0] - common * counts[:, :, 1]) / whole[:, 1:]  # [driver, episodes]
    speaks = beyond[0] - beyond[1]  # its sum is what was observed
    speaks = speaks[np.abs(speaks) > 1e-15]
    exact = 2 ** len(speaks) <= repetitions
    if exact:
        swapped = (np.arange(2 ** len(speaks))[:, None] >> np.arange(len(speaks))) & 1
        as_large, tried = _as_large(swapped, speaks, observed), len(swapped)
    else:  # of random swaps the one that was observed is one more: so p is never 0
        rng, as_large, tried = np.random.default_rng(seed), 1, repetitions + 1
        for begin in range(0, repetitions, _AT_ONCE):
            swapped = rng.integers(2, size=(min(_AT_ONCE, repetitions - begin), len(speaks)), dtype=np.int8)
            as_large += _as_large(swapped, speaks, observed)
    p = as_large / tried
    return observed, float(p)


def _as_large(swapped: np.ndarray, speaks: np.ndarray, observed: float) -> int:
    """How many of these swaps make a difference as large."""
    return int(np.sum(np.abs(speaks.sum() - 2.0 * (swapped @ speaks)) >= abs(observed) - 1e-12))
