"""Pictures hold what the lines say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from opencda_marl.assemble import make_roads
from opencda_marl.core.errors import StorageError
from opencda_marl.core.state import FIELDS, Ending, Field
from opencda_marl.plots import (
    _minutes_above,
    density_plot,
    learning_plot,
    pooled,
    profile_plot,
    rolling,
    traffic_plot,
)
from opencda_marl.settings.run import RunSettings


def test_rolling_mean_by_hand() -> None:
    assert rolling([1.0, 2.0, 3.0, 4.0], 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    assert rolling([1.0, None, 3.0, None, None], 2).tolist()[:4] == [1.0, 1.0, 3.0, 3.0]
    assert np.isnan(rolling([None, 1.0], 5)[0])
    assert rolling([None, 1.0], 5)[1] == 1.0
    assert len(rolling([])) == 0


@pytest.mark.parametrize("width", [1, 3, 20])
def test_rolling_mean_by_brute_force(width: int) -> None:
    rng = np.random.default_rng(width)
    values = [float(v) if rng.random() < 0.7 else None for v in rng.normal(size=60)]
    expected = []
    for at in range(60):
        window = [v for v in values[max(0, at + 1 - width) : at + 1] if v is not None]
        expected.append(np.mean(window) if window else np.nan)
    assert np.allclose(rolling(values, width), expected, equal_nan=True)


def test_rates_are_pooled_over_vehicles_as_lists_of_runs_do() -> None:
    lines = [_line(1, success_rate=1.0, vehicles=1), _line(2, success_rate=0.5, vehicles=9)]
    lines += [_line(3, success_rate=None, vehicles=0), _line(4, success_rate=0.0, vehicles=10)]
    assert pooled(lines, "success_rate", "vehicles").tolist() == pytest.approx([1.0, 0.55, 0.55, 5.5 / 20])
    assert pooled(lines, "success_rate", "vehicles", 1)[1] == 0.5
    assert np.isnan(pooled(lines[2:3], "success_rate", "vehicles")[0])
    delays = [_line(1, mean_delay_s=None, arrived=0), _line(2, mean_delay_s=3.0, arrived=2)]
    assert pooled(delays, "mean_delay_s", "arrived")[1] == 3.0


@pytest.mark.parametrize("seconds", [0.3, 1.5, 60.0])
def test_minutes_above_neither_overlap_nor_go_beyond_the_run(tmp_path: Path, seconds: float) -> None:
    from matplotlib.figure import Figure

    lines = [_line(k, wall_s=seconds * (10 if k == 1 else 1)) for k in range(1, 6)]  # the first one compiles
    figure = Figure(figsize=(5.5, 3.5))
    axis = figure.subplots()
    steps = np.array([line["env_steps"] for line in lines]) / 1e3
    axis.plot(steps, steps)
    _minutes_above(axis, steps, lines)
    figure.draw_without_rendering()
    (upper,) = axis.child_axes
    places, labels = upper.get_xticks(), [label.get_text() for label in upper.get_xticklabels()]
    assert 2 <= len(places) <= 9
    assert places.max() <= steps[-1]
    assert [float(text) for text in labels] == sorted({float(text) for text in labels})
    total = sum(line["wall_s"] for line in lines) / 60.0
    assert float(labels[-1]) <= total
    half = np.interp(float(labels[1]), np.cumsum([0.0, *(line["wall_s"] for line in lines)]) / 60.0, [0.0, *steps])
    assert places[1] == pytest.approx(half)


def _line(episode: int, **changes: Any) -> dict[str, Any]:
    line = {"episode": episode, "env_steps": 2400 * episode, "wall_s": 1.5, "success_rate": 0.5, "collision_rate": 0.4}
    line |= {"vehicles": 20, "arrived": 10}
    return {**line, "return": -3.0, "mean_delay_s": 2.0, **changes}


def _looks_like_something(path: Path) -> bool:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    return pixels.shape[0] > 500 and pixels.shape[1] > 900 and 0.005 < (pixels < 200).mean() < 0.9


@pytest.mark.parametrize("episodes", [0, 1, 2, 60])
def test_learning(tmp_path: Path, episodes: int) -> None:
    lines = [_line(k, success_rate=None if k == 1 else 0.5, mean_delay_s=None) for k in range(1, episodes + 1)]
    metrics = [
        {"kind": "update", "episode": 1, "policy_loss": 0.1},
        {"kind": "evaluation", "episode": 2, "success_rate": 0.9, "collision_rate": 0.1, "mean_delay_s": None},
    ]
    out = learning_plot(lines, metrics, tmp_path / "plots" / "learning.png")
    assert _looks_like_something(out)


def test_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("")
    with pytest.raises(StorageError):
        learning_plot([_line(1)], [], tmp_path / "plots" / "learning.png")


@pytest.mark.parametrize("vehicles", [0, 5])
def test_traffic(tmp_path: Path, vehicles: int) -> None:
    roads = make_roads(RunSettings())
    steps = 40
    ids = np.repeat(np.arange(vehicles), steps)
    route = (ids % roads.routes).astype(np.int16)
    step = np.tile(np.arange(1, steps + 1), vehicles).astype(np.int32)
    values = np.zeros((len(ids), FIELDS), np.float32)
    values[:, Field.PROGRESS] = 2.0 * step + ids
    values[:, Field.SPEED] = 10.0
    samples = np.minimum((values[:, Field.PROGRESS] / roads.spacing).astype(int), roads.samples[route] - 1)
    values[:, Field.X], values[:, Field.Y] = roads.points[route, samples, 0], roads.points[route, samples, 1]
    shuffled = np.argsort(step, kind="stable")  # as the recorder has it: by step, then by vehicle
    ended = min(vehicles, 2)
    tracks = {
        "step": step[shuffled],
        "id": ids[shuffled],
        "route": route[shuffled],
        "values": values[shuffled],
        "end_id": np.arange(ended),
        "end_ending": np.full(ended, int(Ending.COLLIDED), np.int8),
    }
    assert _looks_like_something(traffic_plot(roads, tracks, 0.05, "title", tmp_path / "traffic.png"))


@pytest.mark.parametrize("count", [1, 14, 40])
@pytest.mark.parametrize("which", ["densities", "profiles"])
def test_a_legend_covers_nothing_and_no_two_lines_look_alike(
    which: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"entrant-{index}-with-a-rather-long-name" for index in range(count)]
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, _out: drawn.append(self))
    if which == "densities":
        own = {name: {100.0: [0.1, 0.2], 200.0: [0.3]} for name in names}
        density_plot({"collision_rate": own, "through_rate": own, "mean_delay_s": own}, tmp_path / "x.png")
    else:
        profile_plot({name: np.array([[0.9, 0.8]]) for name in names}, tmp_path / "x.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == count
    assert all(not box.overlaps(axis.get_tightbbox()) for axis in figure.axes)
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.x1 + 1
    assert all(axis.get_window_extent().width > 150 for axis in figure.axes)
    looks = {(line.get_color(), line.get_linestyle()) for line in legend.get_lines()}
    assert len(looks) == count
