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
    repetitions: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Difference of two pooled rates over the same episodes, and its interval; episodes are drawn anew, in pairs.

    Args:
        ours: counts of each episode: hits, and out of how many.
        theirs: of the same episodes.
        repetitions: of the bootstrap.
        confidence: of the interval.
        seed: of the bootstrap.

    Returns:
        ours minus theirs, low, high. NaN where there was nothing to count.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(ours), size=(repetitions, len(ours)))
    sums = [counts[drawn].sum(axis=1) for counts in (ours, theirs)]  # [repetitions, 2] each
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = [counts[:, 0] / counts[:, 1] for counts in sums]
        whole = [counts.sum(axis=0) for counts in (ours, theirs)]
        apart = [float(np.divide(*counts)) if counts[1] else float("nan") for counts in whole]
        differences = rates[0] - rates[1]
    known = differences[np.isfinite(differences)]
    if not len(known):
        return float("nan"), float("nan"), float("nan")
    rest = 50.0 * (1.0 - confidence)
    low, high = np.percentile(known, [rest, 100.0 - rest])
    return apart[0] - apart[1], float(low), float(high)
