"""Training through CARLA's client on the stand-in (a test double): learners, policies from SUMO, servers that fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.run_folder import read_episodes, read_run
from opencda_marl.standin import StandIn

pytest.importorskip("carla")

ROOT = Path(__file__).parents[2]
SUMO, CARLA = "sumo-marl/intersection/route_speed_only_", "momarl/intersection/"


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with StandIn() as made:
        yield made


def _typed(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "opencda_marl.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_masac_trains_for_1200_steps(server: StandIn, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ("learner.learning_starts=50", "learner.batch_size=32", "learner.buffer_size=5000")
    more = ("max_episodes=2", "evaluation.final=false", f"carla.port={server.port}", *small)
    said = _typed("run", "-t", f"{CARLA}masac", "--out", str(run), *more)
    lines = read_episodes(run)
    assert lines[-1]["env_steps"] == 1200
    assert lines[-1]["updates_performed"] > 0
    assert all(line["removed"] == 0 and line["refused"] == 0 for line in lines)
    assert sum(line["departed"] for line in lines) > 20
    facts = read_run(run)
    assert facts["init"]["backend"] == "carla (stand-in, a test double)"
    assert facts["init"]["simulator_versions"] == {"client": "0.9.16", "server": "0.9.16"}
    assert "test double" in said


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["mappo", "pcmappo", "pcmasac", "matd3"])
def test_the_other_learners_train(server: StandIn, tmp_path: Path, algorithm: str) -> None:
    run = tmp_path / "run"
    small = ("max_steps=300", "max_episodes=3", "evaluation.final=false", "carla.world_reload_every=2")
    on_policy = (
        ("learner.n_steps=200",) if "ppo" in algorithm else ("learner.learning_starts=40", "learner.batch_size=32")
    )
    _typed("run", "-t", f"{CARLA}{algorithm}", "--out", str(run), f"carla.port={server.port}", *small, *on_policy)
    assert read_episodes(run)[-1]["env_steps"] == 900
    assert read_episodes(run)[-1]["updates_performed"] > 0


@pytest.mark.slow
def test_a_policy_from_sumo_drives_and_learns_on_in_carla(server: StandIn, tmp_path: Path) -> None:
    made = tmp_path / "sumo"
    short = ("max_steps=300", "max_episodes=2", "evaluation.final=false")
    _typed("run", "-t", f"{SUMO}mappo", "--out", str(made), *short, "learner.n_steps=200")
    place = f"carla.port={server.port}"
    here = json.loads(_typed("evaluate", str(made), "--episodes", "1", "--json", "max_steps=300"))
    there = json.loads(
        _typed("evaluate", str(made), "-t", f"{CARLA}mappo", "--episodes", "1", "--json", "max_steps=300", place)
    )
    assert there["per_episode"][0]["scheduled"] == here["per_episode"][0]["scheduled"], "the same traffic"
    assert there["vehicles"] > 0
    assert there["checkpoint"] == here["checkpoint"]
    tuned = tmp_path / "carla"
    more = (*short, "learner.n_steps=200", place)
    _typed("run", "-t", f"{CARLA}mappo", "--init-from", str(made), "--out", str(tuned), *more)
    assert read_run(tuned)["init_from"] == here["checkpoint"] or str(made) in read_run(tuned)["init_from"]
    assert read_episodes(tuned)[-1]["updates_performed"] > 0


def _drill() -> Any:
    spec = importlib.util.spec_from_file_location("carla_drill", ROOT / "benchmarks" / "carla_drill.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_run_survives_each_failure_of_its_server_bit_for_bit(tmp_path: Path) -> None:
    """benchmarks/carla_drill.py does it 20 times."""
    drill = _drill()
    undisturbed = drill.reference(tmp_path)
    rates = [line["departed"] for line in read_episodes(undisturbed.path)]
    assert all(count >= 12 for count in rates), "some 15 vehicles an episode"
    for kind in drill.KINDS:
        found = drill.trial(kind, tmp_path, kind.replace(" ", "_"), undisturbed)
        assert found["good"], found
