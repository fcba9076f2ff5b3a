"""When a run is over, and what its schedules follow."""

from __future__ import annotations

import pytest

from opencda_marl.core.budget import Budget, Pace


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


def test_time_left_where_updates_come_once_in_several_episodes() -> None:
    """Four episodes of 1 s and an update of 4 s: 2 s an episode, from the first update on."""
    pace = Pace(Budget(100, None, None), 0, 0)
    for episode in (1, 2, 3):
        assert pace.left(episode, 0, episode, elapsed=episode, updates=0) is None
    assert pace.left(4, 0, 8.0, elapsed=8.0, updates=1) == pytest.approx(96 * 2.0)
    assert pace.left(100, 0, 200.0, elapsed=200.0, updates=25) == 0.0


def test_time_left_where_every_step_updates() -> None:
    """The replay is filled in 10 episodes of 1 s; with updates one takes 20 s, and that is the pace of what comes."""
    pace = Pace(Budget(100, None, None), 0, 0)
    for episode in range(1, 11):
        assert pace.left(episode, 0, episode, elapsed=episode, updates=0) is None
    assert pace.left(11, 0, 30.0, elapsed=30.0, updates=200) == pytest.approx(89 * 20.0)
    assert pace.left(12, 0, 50.0, elapsed=50.0, updates=400) == pytest.approx(88 * 20.0)


def test_time_left_of_a_clock_and_of_a_resumed_run() -> None:
    clock = Pace(Budget(None, None, 5.0), 3, 0)
    assert clock.left(4, 0, 60.0, elapsed=10.0, updates=0) == pytest.approx(240.0), "a clock needs no update"
    both = Pace(Budget(100, None, 5.0), 50, 0)
    assert both.left(51, 0, 200.0, elapsed=4.0, updates=0) is None
    assert both.left(52, 0, 204.0, elapsed=8.0, updates=1) == pytest.approx(96.0), "the clock comes first: 48 x 4 s"
    assert both.left(90, 0, 210.0, elapsed=160.0, updates=20) == pytest.approx(40.0), "episodes come first"
