"""Pictures of a run: how it learned, and what its traffic looks like. Drawn without a screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opencda_marl.core.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["learning_plot", "rolling"]

_SMOOTH = 20  # episodes
_INK = "#22303c"
_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e9ec",
    "axes.edgecolor": "#9aa5ae",
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "font.size": 10,
    "figure.constrained_layout.use": True,
}
_COLOURS = {"success_rate": "#1b7f5c", "collision_rate": "#c8442f", "return": "#2c5fa8", "mean_delay_s": "#8a5a00"}


def rolling(values: Sequence[float | None], width: int = _SMOOTH) -> np.ndarray:
    """Mean over the last `width` values, absent ones left out; NaN where all are absent. Same length."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    real = np.isfinite(numbers)
    sums = np.cumsum(np.where(real, numbers, 0.0))
    counts = np.cumsum(real)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    return np.divide(sums, counts, out=np.full(len(numbers), np.nan), where=counts > 0)


def learning_plot(episodes: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Success, collisions, delay and return against environment steps; minutes of training above.

    Args:
        episodes: lines of episodes.jsonl.
        metrics: lines of metrics.jsonl; held-out evaluations become points.
        out: the PNG file.

    Returns:
        `out`.
    """
    steps = np.array([line["env_steps"] for line in episodes]) / 1e3
    held_out = _held_out(episodes, metrics)
    with _drawing(out, 11.0, 7.0) as figure:
        axes = figure.subplots(2, 2, sharex=True)
        _curve(axes[0, 0], steps, episodes, "success_rate", "success [%]", held_out)
        _curve(axes[0, 1], steps, episodes, "collision_rate", "collisions [%]", held_out)
        _curve(axes[1, 0], steps, episodes, "return", "return per vehicle", held_out)
        _curve(axes[1, 1], steps, episodes, "mean_delay_s", "delay of arrived vehicles [s]", held_out)
        for axis in axes[1]:
            axis.set_xlabel("environment steps [thousands]")
        for axis in axes[0]:
            _minutes_above(axis, steps, episodes)
        figure.suptitle(f"Learning, {len(episodes)} episodes: each, and the mean of the last {_SMOOTH}")
    return out


def _curve(
    axis: Axes,
    steps: np.ndarray,
    episodes: Sequence[Mapping[str, Any]],
    name: str,
    label: str,
    held_out: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    scale = 100.0 if label.endswith("[%]") else 1.0
    values = [line[name] for line in episodes]
    each = np.array([np.nan if value is None else scale * value for value in values])
    axis.plot(steps, each, ".", ms=3, alpha=0.35, color=_COLOURS[name])
    axis.plot(steps, scale * rolling(values), lw=2, color=_COLOURS[name], label="training")
    if name in held_out:
        points = np.array(held_out[name])
        axis.plot(points[:, 0], scale * points[:, 1], "D", ms=5, mec="white", color=_INK, label="held-out")
        axis.legend(frameon=False)
    axis.set_ylabel(label)
    if scale > 1.0:
        axis.set_ylim(-3, 103)


def _held_out(
    episodes: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, list[tuple[float, float]]]:
    """Field -> (thousand steps, mean over rates) of each held-out evaluation beside training."""
    at = {line["episode"]: line["env_steps"] / 1e3 for line in episodes}
    found: dict[str, dict[int, list[float]]] = {}
    for line in metrics:
        if line["kind"] == "evaluation" and line["episode"] in at:
            for name in ("success_rate", "collision_rate", "mean_delay_s"):
                if line[name] is not None:
                    found.setdefault(name, {}).setdefault(line["episode"], []).append(line[name])
    return {
        name: [(at[episode], float(np.mean(values))) for episode, values in sorted(rows.items())]
        for name, rows in found.items()
    }


def _minutes_above(axis: Axes, steps: np.ndarray, episodes: Sequence[Mapping[str, Any]]) -> None:
    minutes = np.cumsum([line["wall_s"] for line in episodes]) / 60.0
    if len(steps) < 2:
        return
    upper = axis.secondary_xaxis(
        "top", functions=(lambda x: np.interp(x, steps, minutes), lambda m: np.interp(m, minutes, steps))
    )
    upper.set_xlabel("minutes of training")


@contextmanager
def _drawing(out: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that no window system knows of; saved at the end."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=130)
        yield figure
        with writing(out):
            out.parent.mkdir(exist_ok=True)
            figure.savefig(out)
