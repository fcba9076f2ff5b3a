"""When a run is over, and what its schedules follow."""

from __future__ import annotations

import pytest

from opencda_marl.core.budget import Budget


@pytest.mark.parametrize(
    ("budget", "counted", "used"),
    [
        (Budget(10, None, None), 0.25, 0.25),
        (Budget(None, 12_000, None), 0.5, 0.5),
        (Budget(10, 12_000, None), 0.5, 0.5),  # whichever ends first
        (Budget(None, None, 1.5), 1 / 3, 1 / 3),  # the clock alone
        (Budget(10, None, 1.0), 0.25, 0.5),  # the clock ends the run but does not steer it
        (Budget(2, 100, 0.1), 1.0, 1.0),
    ],
)
def test_shares(budget: Budget, counted: float, used: float) -> None:
    """2.5 episodes, 6,000 steps, 30 s."""
    assert budget.counted(2.5, 6_000, 30.0) == pytest.approx(counted)
    assert budget.used(2.5, 6_000, 30.0) == pytest.approx(used)


def test_what_is_promised() -> None:
    assert Budget(1, None, 1.0).exact
    assert Budget(None, 1, None).exact
    assert not Budget(None, None, 1.0).exact
