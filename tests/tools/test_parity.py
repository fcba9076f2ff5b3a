"""SUMO and CARLA laid over each other: differences by hand, a wrong sign shows as metres, the command end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.state import FIELDS, Ending, Field
from opencda_marl.env.trajectory import Trajectory
from opencda_marl.plots import parity_plot
from opencda_marl.tools.parity import compare

DT = 0.05


def _tracks(speed: float, *, begin: int = 1, north: float = 3.0, turned: float = 0.0, steps: int = 100) -> Any:
    """One vehicle eastward from x = -50; `turned` [rad] is added to its heading."""
    step = np.arange(begin, begin + steps)
    values = np.zeros((steps, FIELDS), np.float32)
    values[:, Field.PROGRESS] = 5.0 + speed * DT * np.arange(steps)
    values[:, Field.X], values[:, Field.Y] = values[:, Field.PROGRESS] - 57.5, north
    values[:, Field.HEADING], values[:, Field.SPEED] = turned, speed
    return {
        "step": step.astype(np.int32),
        "id": np.full(steps, 7),
        "values": values,
        "end_step": step[-1:].astype(np.int32),
        "end_id": np.array([7]),
        "end_ending": np.array([int(Ending.ARRIVED)], np.int8),
        "reward_step": step[9::10].astype(np.int32),
        "reward_id": np.full(len(step[9::10]), 7),
        "reward": np.tile(np.array([[0.0, -speed / 100.0, 0.0]], np.float32), (len(step[9::10]), 1)),
    }


def test_differences_by_hand() -> None:
    """10 m/s and 9 m/s, entered two steps later, 0.2 m beside: at one place, 0.2 m, and 1 m/s, apart."""
    found = compare(_tracks(10.0), _tracks(9.0, begin=3, north=3.2), DT)
    assert found["place_m"]["max"] == pytest.approx(0.2, abs=1e-5)
    assert found["heading_deg"]["max"] == 0.0
    assert found["speed_ms"]["median"] == pytest.approx(1.0)
    assert found["departure_s"]["median"] == pytest.approx(2 * DT)
    # the last place of the slow one, 5 + 0.45 * 99 m along: it took 99 steps, the fast one nine tenths of them
    assert found["time_s"]["max"] == pytest.approx(99 * DT * 0.1, abs=1e-4)
    assert found["frames_agree"]
    assert found["reward"] == {"median": 0.0, "p95": 0.0, "max": 0.0}, "no decision ended in the same step"
    assert found["ends"]["sumo"] == {"arrived": 1, "collided": 0, "removed": 0}


def test_a_wrong_sign_or_angle_shows() -> None:
    mirrored = compare(_tracks(10.0), _tracks(10.0, north=-3.0), DT)
    assert mirrored["place_m"]["median"] == pytest.approx(6.0)
    assert not mirrored["frames_agree"]
    turned = compare(_tracks(10.0), _tracks(10.0, turned=np.pi / 2), DT)
    assert turned["heading_deg"]["median"] == pytest.approx(90.0)
    assert not turned["frames_agree"]
    whole = compare(_tracks(10.0, turned=np.pi), _tracks(10.0, turned=-np.pi), DT)
    assert whole["frames_agree"], "the same direction"


def test_rewards_of_the_same_decisions() -> None:
    found = compare(_tracks(10.0), _tracks(8.0), DT)
    assert found["reward"]["median"] == pytest.approx(0.02, abs=1e-6)
    assert found["errors"]["step"].tolist() == list(range(10, 101, 10))
    assert found["errors"]["reward"] == pytest.approx(0.02, abs=1e-6), "the slower one lost less"


def test_without_a_policy_there_are_no_decisions(tmp_path: Path) -> None:
    empty = Trajectory()._rewards()
    one, other = _tracks(10.0) | empty, _tracks(9.0) | empty
    found = compare(one, other, DT)
    assert found["reward"] == {"median": 0.0, "p95": 0.0, "max": 0.0}
    assert parity_plot(one, other, found["errors"], DT, "priority", tmp_path / "p.png").is_file()


def test_nobody_in_both() -> None:
    other = _tracks(10.0)
    other["id"] = other["id"] + 1
    with pytest.raises(ConfigError, match="no vehicle drove in both simulators"):
        compare(_tracks(10.0), other, DT)


def test_the_plot(tmp_path: Path) -> None:
    one, other = _tracks(10.0), _tracks(9.0)
    errors = compare(one, other, DT)["errors"]
    assert parity_plot(one, other, errors, DT, "SUMO and CARLA", tmp_path / "p.png").stat().st_size > 10_000


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("carla")
    from opencda_marl.cli import main
    from opencda_marl.standin import StandIn

    run: Callable[..., None] = main
    with StandIn() as server:
        words = ["parity", "-t", "momarl/intersection/mappo", "max_steps=160", f"carla.port={server.port}", "--json"]
        with pytest.raises(SystemExit) as stop:
            run([*words, "--out", str(tmp_path), "--policy", "full_speed"])
    assert not stop.value.code
    answer = json.loads(capfd.readouterr().out)
    assert answer["frames_agree"]
    assert answer["compared"] > 3
    assert answer["place_m"]["median"] < 0.05
    assert answer["departure_s"]["max"] == 0.0, "the same demand"
    assert answer["reward"]["median"] < 0.01
    assert Path(answer["plot"]).is_file()
