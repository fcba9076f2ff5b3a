"""Pictures of a run: how it learned, and what its traffic looks like. Drawn without a screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opencda_marl.core.files import writing
from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Ending, Field
from opencda_marl.core.statistics import performance_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["density_plot", "learning_plot", "parity_plot", "pooled", "profile_plot", "rolling", "traffic_plot"]

_SMOOTH = 20  # episodes
_MARKS = 6  # on the axis of minutes, about
_FAST = 18.0  # [m/s] end of the colour scale
_SPEEDS = "viridis"
_CRASH = "#c8442f"
_INK = "#22303c"
_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ec",
    "axes.edgecolor": "#9aa5ae",
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "font.size": 10,
    "figure.constrained_layout.use": True,
}
_WEIGHTS = {"success_rate": "vehicles", "collision_rate": "vehicles", "mean_delay_s": "arrived"}
_COLOURS = {"success_rate": "#1b7f5c", "collision_rate": "#c8442f", "return": "#2c5fa8", "mean_delay_s": "#8a5a00"}


def rolling(values: Sequence[float | None], width: int = _SMOOTH) -> np.ndarray:
    """Mean over the last `width` values, absent ones left out; NaN where all are absent. Same length."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    real = np.isfinite(numbers)
    sums = np.cumsum(np.where(real, numbers, 0.0))
    counts = np.cumsum(real)
    sums[width:] -= sums[:-width].copy()
    counts[width:] -= counts[:-width].copy()
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(numbers), np.nan), where=counts > 0)
    return means


def pooled(lines: Sequence[Mapping[str, Any]], name: str, weight: str, width: int = _SMOOTH) -> np.ndarray:
    """A rate over the vehicles of the last `width` episodes, as `runs list` pools it; NaN without vehicles. [lines]

    Args:
        lines: of episodes.jsonl.
        name: the rate, or mean, of an episode.
        weight: the field that says over how many vehicles it is.
        width: episodes.
    """
    weights = [0.0 if line[name] is None else float(line[weight]) for line in lines]
    sums = rolling([w * (line[name] or 0.0) for w, line in zip(weights, lines, strict=True)], width)
    counts = rolling(weights, width)
    means: np.ndarray = np.divide(sums, counts, out=np.full(len(lines), np.nan), where=counts > 0)
    return means


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
        figure.suptitle(
            f"Learning, {len(episodes)} episodes: each, and the last {_SMOOTH} together "
            "(rates and delay over their vehicles; return: mean of episodes)"
        )
    return out


def traffic_plot(roads: Roads, tracks: Mapping[str, np.ndarray], step_length: float, title: str, out: Path) -> Path:
    """An episode: where everybody drove and how fast, and when who was how far from the stop line.

    Args:
        roads: of the crossing.
        tracks: as `env.trajectory()` gives them.
        step_length: [s].
        title: a line above.
        out: the PNG file.

    Returns:
        `out`.
    """
    values = tracks["values"]  # [rows, fields]
    routes = tracks["route"]
    speed = values[:, Field.SPEED]
    time = tracks["step"] * step_length
    ahead = values[:, Field.PROGRESS] - roads.stop_line[routes]  # [m] past the stop line
    order = np.lexsort((tracks["step"], tracks["id"]))
    with _drawing(out, 14.0, 8.0) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=(1.0, 1.25), squeeze=False)[0]
        axis = left.subplots()
        points = axis.scatter(
            values[:, Field.X], values[:, Field.Y], c=speed, s=1.5, cmap=_SPEEDS, vmin=0.0, vmax=_FAST, rasterized=True
        )
        crashed = np.isin(tracks["id"], tracks["end_id"][tracks["end_ending"] == Ending.COLLIDED])
        last = order[np.append(np.diff(tracks["id"][order]) != 0, True)] if len(order) else order
        where = last[crashed[last]]
        axis.plot(values[where, Field.X], values[where, Field.Y], "x", ms=6, mew=1.5, color=_CRASH)
        axis.set_aspect("equal")
        axis.set_xlabel("x [m]")
        axis.set_ylabel("y [m]")
        axis.set_title(f"Tracks; crashes marked: {len(where)} vehicles")
        left.colorbar(points, ax=axis, orientation="horizontal", fraction=0.05, pad=0.02, label="speed [m/s]")
        inside = float((roads.junction_exit - roads.stop_line).max())  # [m]
        panels = right.subplots(len(roads.arms), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for arm, panel in enumerate(panels):
            _time_space(panel, order[roads.arm[routes[order]] == arm], tracks["id"], time, ahead, speed, where)
            panel.axhspan(0.0, inside, color="#eceff2", zorder=0)
            panel.set_ylabel(f"from {roads.arms[arm]}\n[m]")
        panels[0].set_title("Distance past the stop line over time, by arm (shaded: the junction)")
        panels[-1].set_xlabel("time [s]")
        figure.suptitle(title)
    return out


def _time_space(
    axis: Axes,
    rows: np.ndarray,
    ids: np.ndarray,
    time: np.ndarray,
    ahead: np.ndarray,
    speed: np.ndarray,
    crashes: np.ndarray,
) -> None:
    """Lines of the vehicles of one arm, coloured by speed; `rows` are sorted by vehicle and step."""
    from matplotlib.collections import LineCollection

    joined = np.flatnonzero(np.diff(ids[rows]) == 0)
    here, there = rows[joined], rows[joined + 1]
    ends = np.stack([np.stack([time[i], ahead[i]], axis=-1) for i in (here, there)], axis=1)  # [segments, 2, 2]
    lines = LineCollection(list(ends), array=speed[here], cmap=_SPEEDS, lw=1.0, rasterized=True)
    lines.set_clim(0.0, _FAST)
    axis.add_collection(lines)
    mine = crashes[np.isin(crashes, rows)]
    axis.plot(time[mine], ahead[mine], "x", ms=6, mew=1.5, color=_CRASH)
    axis.autoscale_view()


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
    mean = rolling(values) if name not in _WEIGHTS else pooled(episodes, name, _WEIGHTS[name])
    axis.plot(steps, scale * mean, lw=2, color=_COLOURS[name], label="training")
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
    if len(steps) < 2:
        return
    from matplotlib.ticker import MaxNLocator

    minutes: np.ndarray = np.cumsum([0.0, *(line["wall_s"] for line in episodes)]) / 60.0
    marks = np.asarray(MaxNLocator(_MARKS).tick_values(0.0, float(minutes[-1])))
    marks = marks[(marks >= 0.0) & (marks <= minutes[-1])]
    upper = axis.secondary_xaxis("top")
    # fixed places: an axis that is computed goes on beyond the run, where there is no time
    upper.set_xticks(np.interp(marks, minutes, np.append(0.0, steps)), [f"{mark:g}" for mark in marks])
    upper.set_xlabel("minutes of training")


_FIGURES = {"collision_rate": "collisions [%]", "through_rate": "got through [%]", "mean_delay_s": "delay [s]"}


def density_plot(curves: Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]], out: Path) -> Path:
    """Figures against density: a line a policy through the mean of its runs, a point a run.

    Args:
        curves: field (of `_FIGURES`) -> policy -> density -> values of its runs.
        out: the PNG file.
    """
    names = list(dict.fromkeys(policy for values in curves.values() for policy in values))
    looks = _looks(names)
    with _drawing(out, 14.0, _height(names)) as figure:
        axes = figure.subplots(1, len(_FIGURES))
        for axis, (name, label) in zip(axes, _FIGURES.items(), strict=True):
            scale = 100.0 if label.endswith("[%]") else 1.0
            for policy, values in curves.get(name, {}).items():
                rates = sorted(values)
                means = [scale * float(np.mean(values[rate])) for rate in rates]
                axis.plot(rates, means, **looks[policy])
                points = [(rate, scale * value) for rate in rates for value in values[rate]]
                axis.plot(*zip(*points, strict=True), ".", ms=5, color=looks[policy]["color"])
            axis.set_xlabel("vehicles per hour and lane")
            axis.set_ylabel(label)
        figure.suptitle("Held-out traffic by density: mean of the runs, and each run")
        _legend(figure, names)
    return out


def profile_plot(scores: Mapping[str, np.ndarray], out: Path) -> Path:
    """Performance profiles: the share of runs and densities with more success than a threshold.

    Args:
        scores: policy -> [runs, densities], shares of 1.
        out: the PNG file.
    """
    thresholds = np.linspace(0.5, 1.0, 251)
    looks = _looks(list(scores))
    with _drawing(out, 10.0, _height(list(scores))) as figure:
        axis = figure.subplots()
        for policy, found in scores.items():
            axis.plot(100.0 * thresholds, performance_profile(found, thresholds), **looks[policy])
        axis.set_xlabel("success [%]")
        axis.set_ylabel("share of runs and densities above it")
        figure.suptitle("Performance profiles: how often success is above a threshold")
        _legend(figure, list(scores))
    return out


_DASHES = ("-", "--", ":", "-.")
_LINES = 10  # colours before the next kind of dash
_COLUMN = 24  # names in a column of a legend


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dash of each name: no two alike among forty."""
    return {
        name: {"color": f"C{index % _LINES}", "ls": _DASHES[index // _LINES % len(_DASHES)]}
        for index, name in enumerate(names)
    }


def _height(names: Sequence[str]) -> float:
    """[inches] of a figure whose legend stands beside it, a name a line."""
    return max(4.6, 0.6 + 0.24 * min(len(names), _COLUMN))


def _legend(figure: Figure, names: Sequence[str]) -> None:
    """To the right of all axes, where it covers no line; long names are cut in the middle."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look, label=_cut(name)) for name, look in _looks(names).items()]
    if handles:
        columns = -(-len(handles) // _COLUMN)
        figure.legend(handles=handles, loc="outside right upper", frameon=False, ncols=columns)


def _cut(name: str, longest: int = 28) -> str:
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[-(longest // 2 - 1) :]}"


def parity_plot(
    sumo: Mapping[str, np.ndarray],
    carla: Mapping[str, np.ndarray],
    errors: Mapping[str, np.ndarray],
    step_length: float,
    title: str,
    out: Path,
) -> Path:
    """The same episode in two simulators: how far apart; who is there, arrives, crashes, how fast; what is earned.

    Args:
        sumo, carla: as `env.trajectory()` gives them.
        errors: `progress` and `place` of each sample [m]; `step` and `reward` of each decision in both.
        step_length: [s].
        title: a line above.
        out: the PNG file.

    Returns:
        `out`.
    """
    with _drawing(out, 15.0, 7.0) as figure:
        axes = figure.subplots(2, 3)
        axes[0, 0].plot(errors["progress"], errors["place"], ".", ms=1.5, alpha=0.4, color=_CRASH, rasterized=True)
        axes[0, 0].set_xlabel("progress along the route [m]")
        axes[0, 0].set_ylabel("apart at the same progress [m]")
        for name, tracks, colour, width in (("SUMO", sumo, "#2c5fa8", 3.0), ("CARLA", carla, "#e0a03a", 1.2)):
            steps = np.arange(1, int(tracks["step"].max()) + 1)
            time, there = steps * step_length, np.bincount(tracks["step"], minlength=len(steps) + 1)[1:]
            speeds = np.bincount(tracks["step"], weights=tracks["values"][:, Field.SPEED], minlength=len(steps) + 1)[1:]
            mean = np.divide(speeds, there, out=np.full(len(steps), np.nan), where=there > 0)
            axes[0, 1].plot(time, mean, color=colour, lw=width, label=name)
            axes[1, 0].plot(time, there, color=colour, lw=width, label=name)
            order = np.argsort(tracks["reward_step"], kind="stable")
            earned = np.cumsum(tracks["reward"].sum(-1)[order])
            when = tracks["reward_step"][order] * step_length
            axes[0, 2].step(when, earned, where="post", color=colour, lw=width, label=name)
            for ending, line in ((Ending.ARRIVED, "-"), (Ending.COLLIDED, ":")):
                when = np.sort(tracks["end_step"][tracks["end_ending"] == ending]) * step_length
                label = f"{name}, {ending.name.lower()}"
                counts = np.arange(len(when) + 1)
                axes[1, 1].step(np.append(0.0, when), counts, line, where="post", color=colour, lw=width, label=label)
        axes[0, 1].set_ylabel("mean speed [m/s]")
        axes[1, 0].set_ylabel("vehicles on the road")
        axes[1, 1].set_ylabel("vehicles so far")
        axes[0, 2].set_ylabel("reward of all vehicles so far")
        axes[1, 2].plot(errors["step"] * step_length, errors["reward"], ".", ms=2.0, alpha=0.5, color=_CRASH)
        axes[1, 2].set_ylabel("reward of the same decision, CARLA - SUMO")
        for axis in (axes[0, 1], axes[0, 2], axes[1, 0], axes[1, 1], axes[1, 2]):
            axis.set_xlabel("time [s]")
        for axis in (axes[0, 1], axes[0, 2], axes[1, 0], axes[1, 1]):
            axis.legend(frameon=False, fontsize=8)
        figure.suptitle(title)
    return out


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
