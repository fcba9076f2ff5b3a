"""The recipes learn to cross, on real SUMO: against their own start and a random driver, on held-out traffic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.run_folder import read_episodes

_EPISODES = 120  # of 120 s: 288,000 steps, two minutes on a core


def _command(*arguments: str) -> dict[str, Any]:
    """A process of its own: libsumo allows one simulation in each."""
    command = [sys.executable, "-m", "opencda_marl.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _success(policy: str, profile: str) -> float:
    seeds = ("--seeds", "7000:7008", "demand.rate_vph=300")
    found = _command("evaluate", policy, "-t", profile, *seeds)
    assert found["vehicles"] > 500
    return float(found["success_rate"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("algorithm", ["mappo", "pcmappo"])
def test_the_recipe_learns_to_cross(algorithm: str, tmp_path: Path) -> None:
    profile = f"sumo-marl/intersection/route_speed_only_{algorithm}"
    run = tmp_path / "run"
    budget = (f"max_episodes={_EPISODES}", "evaluation.final=false", "recording.tensorboard=false")
    line = _command("run", "-t", profile, "--out", str(run), *budget)
    assert line["updates_performed"] >= 20  # each of 4,800 or 14,400 steps
    assert line["acting_steps"] > 10 * _EPISODES

    episodes = read_episodes(run)
    crashed = [sum(row["collided"] for row in rows) for rows in (episodes[:10], episodes[-10:])]
    assert crashed[1] < 0.5 * crashed[0], "fewer than half as many crashes as at the start"

    learned = _success(str(run), profile)
    assert learned > _success("random", profile) + 0.3
    assert learned > 0.8  # one short run is one sample: 87 to 99 % were seen after so many episodes
