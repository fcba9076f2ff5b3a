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

    A permutation test (Fisher 1935): if the two drivers were alike, each episode's counts could as well be the other
    one's. All such swaps are tried where there are few of them, else as many as `repetitions` drawn at random.
    Vehicles of an episode meet each other, so the episode is what is exchanged: fewer than six of them, of which all
    speak for one, can never be told from chance at 1 in 20.

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
    observed = float(whole[0, 0] / whole[0, 1] - whole[1, 0] / whole[1, 1])
    apart = np.flatnonzero((counts[0] != counts[1]).any(axis=1))  # elsewhere a swap changes nothing
    exact = 2 ** len(apart) <= repetitions
    if exact:
        swapped = (np.arange(2 ** len(apart))[:, None] >> np.arange(len(apart))) & 1
    else:
        swapped = np.random.default_rng(seed).integers(2, size=(repetitions, len(apart)))
    moved = swapped @ (counts[1, apart] - counts[0, apart])  # [swaps, 2] what ours gains by each
    first, second = whole[0] + moved, whole[1] - moved
    known = (first[:, 1] > 0) & (second[:, 1] > 0)
    rates = [np.divide(one[:, 0], one[:, 1], out=np.zeros(len(one)), where=known) for one in (first, second)]
    as_large = (np.abs(rates[0] - rates[1]) >= abs(observed) - 1e-12) | ~known
    # of random swaps the one that was observed is one more: so p is never 0
    p = as_large.mean() if exact else (as_large.sum() + 1) / (len(as_large) + 1)
    return observed, float(p)
