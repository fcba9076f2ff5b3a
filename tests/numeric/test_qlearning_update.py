"""Steps of the Q table, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from opencda_marl.learners.qlearning import learn


def _rows(*rows: tuple[int, int, float, float, int]) -> dict[str, np.ndarray]:
    state, action, reward, discount, after = zip(*rows, strict=True)
    return {
        "state": np.array(state),
        "action": np.array(action),
        "reward": np.array(reward),
        "discount": np.array(discount),
        "after": np.array(after),
    }


def _table() -> tuple[np.ndarray, np.ndarray]:
    values = np.array([[1.0, 2.0], [4.0, -3.0], [0.0, 10.0]])
    return values, np.full((3, 2), 9)


def test_an_ordinary_a_truncated_and_a_terminal_decision() -> None:
    """What goes on and what was cut bootstrap alike; what is over does not, whatever stands in `after`."""
    values, visits = _table()
    found = learn(
        values, visits, _rows((0, 0, -1.0, 0.5, 1), (1, 1, 2.0, 0.9, 2), (2, 1, -20.0, 0.0, 2)), 0.1, "visits"
    )
    # y = -1 + 0.5 * max(4, -3) = 1;   y = 2 + 0.9 * 10 = 11;   y = -20; each moves a tenth: n = 10
    np.testing.assert_allclose(found["td_error"], [0.0, 14.0, -30.0])
    np.testing.assert_allclose(found["value"], [1.0, -3.0, 10.0])
    np.testing.assert_allclose(found["rate"], [0.1, 0.1, 0.1])
    np.testing.assert_allclose(values, [[1.0, 2.0], [4.0, -1.6], [0.0, 7.0]])
    assert visits.tolist() == [[10, 9], [9, 10], [9, 10]]


def test_targets_are_of_the_table_before_the_step() -> None:
    values, visits = np.array([[0.0], [5.0]]), np.zeros((2, 1), np.int64)
    learn(values, visits, _rows((0, 0, 0.0, 1.0, 1), (1, 0, 1.0, 1.0, 0)), 1.0, "constant")
    np.testing.assert_allclose(values, [[5.0], [1.0]])  # not 1 + 5


def test_the_first_visits_average_their_targets() -> None:
    """1/n: after targets 3, then 5 and 10 at once, then -2, the entry is their mean; what it was at first is gone."""
    values, visits = np.full((1, 1), 77.0), np.zeros((1, 1), np.int64)
    learn(values, visits, _rows((0, 0, 3.0, 0.0, 0)), 0.01, "visits")
    assert values[0, 0] == pytest.approx(3.0)
    learn(values, visits, _rows((0, 0, 5.0, 0.0, 0), (0, 0, 10.0, 0.0, 0)), 0.01, "visits")
    assert values[0, 0] == pytest.approx(6.0)
    learn(values, visits, _rows((0, 0, -2.0, 0.0, 0)), 0.01, "visits")
    assert values[0, 0] == pytest.approx(4.0)
    assert visits[0, 0] == 4


def test_the_rate_never_falls_below_the_setting() -> None:
    values, visits = np.zeros((1, 1)), np.full((1, 1), 999)
    found = learn(values, visits, _rows((0, 0, 8.0, 0.0, 0)), 0.25, "visits")
    assert found["rate"][0] == pytest.approx(0.25)
    assert values[0, 0] == pytest.approx(2.0)


@pytest.mark.parametrize("schedule", ["constant", "visits"])
def test_an_entry_met_twice_moves_as_if_one_came_after_the_other(schedule: str) -> None:
    """Errors 6 and 10 from 0, half of the mean twice: 8 * (1 - 1/4) = 6. The order does not matter."""
    for rewards in ((6.0, 10.0), (10.0, 6.0)):
        values, visits = np.zeros((2, 2)), np.full((2, 2), 100)
        rows = _rows((1, 0, rewards[0], 0.0, 0), (1, 0, rewards[1], 0.0, 0), (0, 1, 4.0, 0.0, 0))
        found = learn(values, visits, rows, 0.5, schedule)
        np.testing.assert_allclose(values, [[0.0, 2.0], [6.0, 0.0]])
        np.testing.assert_allclose(found["rate"], [0.75, 0.75, 0.5])
        assert visits.tolist() == [[100, 101], [102, 100]]


def test_equal_targets_at_once_are_equal_targets_one_by_one() -> None:
    together, apart = np.full((1, 1), 5.0), np.full((1, 1), 5.0)
    counts = [np.full((1, 1), 3), np.full((1, 1), 3)]
    row = (0, 0, -1.0, 0.0, 0)
    for schedule in ("constant", "visits"):
        learn(together, counts[0], _rows(row, row, row), 0.2, schedule)
        for _ in range(3):
            learn(apart, counts[1], _rows(row), 0.2, schedule)
        if schedule == "constant":
            np.testing.assert_allclose(together, apart)  # 5 -> -1 + 6 * 0.8^3
            assert together[0, 0] == pytest.approx(2.072)
