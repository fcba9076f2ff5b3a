"""What the benchmark of workers computes from the lines of a run."""

from __future__ import annotations

import pytest

from benchmarks.workers_scaling import steady_rate


def test_steps_count_after_the_first_update() -> None:
    lines = [
        {"updates_performed": 1, "steps": 100, "wall_s": 50.0},
        {"updates_performed": 2, "steps": 100, "wall_s": 0.5},
        {"updates_performed": 3, "steps": 300, "wall_s": 1.5},
    ]
    assert steady_rate(lines) == 200.0
    with pytest.raises(ValueError, match="too short"):
        steady_rate(lines[:1])
