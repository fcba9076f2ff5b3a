"""Learners with a replay, and the table, learn to cross on real SUMO: against their own start and a random driver."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.run_folder import read_episodes

_EPISODES = {"masac": 25, "pcmasac": 25, "matd3": 30, "pcmatd3": 30, "dqn": 40, "qlearning": 160}  # of 120 s


def _command(*arguments: str) -> dict[str, Any]:
    """A process of its own: libsumo allows one simulation in each."""
    command = [sys.executable, "-m", "opencda_marl.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _success(policy: str, profile: str) -> float:
    found = _command("evaluate", policy, "-t", profile, "--seeds", "7000:7006", "demand.rate_vph=300")
    assert found["vehicles"] > 300
    return float(found["success_rate"])


@cache
def _random(profile: str) -> float:
    return _success("random", profile)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("algorithm", list(_EPISODES))
def test_it_learns_to_cross(algorithm: str, tmp_path: Path) -> None:
    profile = f"sumo-marl/intersection/route_speed_only_{algorithm}"
    run, budget = tmp_path / "run", f"max_episodes={_EPISODES[algorithm]}"
    line = _command(
        *("run", "-t", profile, "--seed", "1", "--out", str(run), budget),
        *("evaluation.final=false", "recording.tensorboard=false"),
    )
    assert line["acting_steps"] > 200 * _EPISODES[algorithm]
    assert line["updates_performed"] > 100 * _EPISODES[algorithm]
    assert line["training_step"] >= line["updates_performed"]

    episodes = read_episodes(run)
    assert len(episodes) == _EPISODES[algorithm]
    shares = []
    for rows in (episodes[:4], episodes[-8:]):
        ended = sum(row["arrived"] + row["collided"] for row in rows)
        shares.append(sum(row["collided"] for row in rows) / ended)
    assert shares[1] < 0.5 * shares[0], "a smaller share crashes than half of that at the start"

    learned = _success(str(run), profile)
    assert learned > _random("sumo-marl/intersection/route_speed_only_masac") + 0.3
    assert learned > 0.85
