"""The benchmark's arithmetic: steps per second over the time in which all cells train."""

from __future__ import annotations

import pytest

from benchmarks.matrix_scaling import overlap_rate


def test_only_the_time_in_which_all_train_counts() -> None:
    first = [(0.0, 0.0), (10.0, 1000.0), (20.0, 3000.0)]  # 100, then 200 steps/s
    second = [(5.0, 0.0), (15.0, 500.0)]  # 50 steps/s
    # from 5 to 15 s: 500 + 1000 steps of the first, 500 of the second
    assert overlap_rate([first, second]) == pytest.approx(200.0)
    assert overlap_rate([first]) == pytest.approx(150.0)
    with pytest.raises(ValueError, match="never trained at the same time"):
        overlap_rate([first, [(30.0, 0.0), (40.0, 10.0)]])
