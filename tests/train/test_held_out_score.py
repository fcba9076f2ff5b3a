"""Which of two checkpoints is the better one."""

from __future__ import annotations

from typing import Any

import pytest

from opencda_marl.held_out import CRASH, held_out_score


def _rows(crashes: float, delay: float, waiting: float = 0.0, through: float = 400.0) -> list[dict[str, Any]]:
    """An evaluation of 4 episodes at three rates; `crashes` of all that ended."""
    row = {
        "success_rate": 1.0 - crashes,
        "collision_rate": crashes,
        "mean_delay_s": delay,
        "waiting_at_end": waiting,
        "running_at_end": 10.0,
        "vehicles": through,
        "episodes": 4,
    }
    return [row] * 3


def test_a_crash_is_worth_its_seconds() -> None:
    assert held_out_score(_rows(0.001, 0.6)) > held_out_score(_rows(0.0, 1.5))  # one crash of a short evaluation
    assert held_out_score(_rows(0.0, 1.5)) > held_out_score(_rows(0.021, 0.45))  # time won at the price of safety
    assert held_out_score(_rows(0.0, CRASH * 0.01)) == pytest.approx(held_out_score(_rows(0.01, 0.0)))


def test_who_lets_nobody_in_loses() -> None:
    standing = _rows(0.0, 0.0, waiting=80.0, through=4.0)
    assert held_out_score(standing) < held_out_score(_rows(0.2, 20.0))


def test_nobody_arrived() -> None:
    nobody = [{**row, "mean_delay_s": None} for row in _rows(1.0, 0.0)]
    assert held_out_score(nobody) < held_out_score(_rows(0.5, 30.0))
