"""Traffic in motion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opencda_marl.animation import animate
from opencda_marl.assemble import make_roads
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.state import FIELDS, Driver, Ending, Field
from opencda_marl.settings.run import RunSettings

_ROADS = make_roads(RunSettings())


def _tracks(vehicles: int = 12, steps: int = 400) -> dict[str, np.ndarray]:
    step, ids = (grid.ravel() for grid in np.meshgrid(np.arange(1, steps + 1), np.arange(vehicles), indexing="ij"))
    route = ids % _ROADS.routes
    values = np.zeros((len(ids), FIELDS), np.float32)
    progress = 0.4 * step + 5.0 * ids
    at = np.minimum((progress / _ROADS.spacing).astype(int), _ROADS.samples[route] - 1)
    values[:, [Field.X, Field.Y, Field.HEADING]] = _ROADS.points[route, at]
    values[:, Field.SPEED] = 8.0
    return {
        "step": step.astype(np.int32),
        "id": ids,
        "driver": np.where(ids == 0, Driver.HUMAN, Driver.CAV).astype(np.int8),
        "values": values,
        "end_step": np.array([240], np.int32),
        "end_id": np.array([3]),
        "end_ending": np.array([int(Ending.COLLIDED)], np.int8),
    }


def test_a_gif_moves_and_stays_small(tmp_path: Path) -> None:
    out = animate(_ROADS, _tracks(), 0.05, tmp_path / "new" / "crossing.gif", begin=2.0, seconds=16.0)
    assert out.stat().st_size < 1.5 * 2**20
    with Image.open(out) as image:
        assert image.n_frames > 60
        assert image.info["duration"] == 100
        first = np.asarray(image.convert("RGB")).astype(int)
        image.seek(40)
        later = np.asarray(image.convert("RGB")).astype(int)
    moved = (np.abs(first - later).sum(axis=2) > 60).mean()
    assert 0.001 < moved < 0.2


def test_a_strip_has_four_moments(tmp_path: Path) -> None:
    out = animate(_ROADS, _tracks(), 0.05, tmp_path / "crossing.png", begin=2.0, seconds=16.0)
    with Image.open(out) as image:
        assert image.size[0] > 4 * 400
        assert image.size[1] == 440


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a GIF nor a PNG"):
        animate(_ROADS, _tracks(), 0.05, tmp_path / "x.mp4")
    with pytest.raises(ConfigError, match="the tracks end before 30 s"):
        animate(_ROADS, _tracks(), 0.05, tmp_path / "x.gif")
    with pytest.raises(ConfigError, match="the tracks end before 0 s"):
        animate(_ROADS, {}, 0.05, tmp_path / "x.gif", begin=0.0)
