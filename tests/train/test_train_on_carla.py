"""Training through CARLA's client on the stand-in (a test double): learners, policies from SUMO, servers that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opencda_marl.config import from_run_folder
from opencda_marl.core.run_folder import read_episodes, read_run
from opencda_marl.standin import StandIn
from tests.programs import benchmark_program

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
def test_a_learner_trains_in_sumo_and_carla_at_once(server: StandIn, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ("max_steps=600", "max_episodes=2", "evaluation.final=false", "learner.n_steps=200")
    _typed("run", "-t", "momarl-cosim/intersection/mappo", "--out", str(run), f"carla.port={server.port}", *small)
    lines = read_episodes(run)
    assert lines[-1]["updates_performed"] > 0
    assert all(line["removed"] == 0 and line["refused"] == 0 for line in lines)
    assert sum(line["arrived"] for line in lines) > 0
    assert read_run(run)["init"]["backend"] == "libsumo and carla, stand-in, a test double"


@pytest.mark.slow
def test_a_policy_from_sumo_drives_and_learns_on_in_carla(server: StandIn, tmp_path: Path) -> None:
    made = tmp_path / "sumo"
    short = ("max_steps=300", "max_episodes=2", "evaluation.final=false")
    _typed("run", "-t", f"{SUMO}mappo", "--out", str(made), *short, "learner.n_steps=200")
    place = f"carla.port={server.port}"
    drive = ("--episodes", "1", "--json", "max_steps=900", "demand.rate_vph=300")
    here = json.loads(_typed("evaluate", str(made), *drive))
    there = json.loads(_typed("evaluate", str(made), "-t", f"{CARLA}mappo", *drive, place))
    assert there["per_episode"][0]["scheduled"] == here["per_episode"][0]["scheduled"], "the same traffic"
    assert here["vehicles"] > 0 < there["vehicles"], "45 s are enough to cross or crash even for a slow driver"
    assert there["checkpoint"] == here["checkpoint"]
    tuned = tmp_path / "carla"
    more = (*short, "learner.n_steps=200", place)
    _typed("run", "-t", f"{CARLA}mappo", "--init-from", str(made), "--out", str(tuned), *more)
    assert read_run(tuned)["init_from"] == here["checkpoint"] or str(made) in read_run(tuned)["init_from"]
    assert read_episodes(tuned)[-1]["updates_performed"] > 0


@pytest.mark.slow
def test_a_run_survives_each_failure_of_its_server_bit_for_bit(tmp_path: Path) -> None:
    """benchmarks/carla_drill.py does it 20 times."""
    drill = benchmark_program("carla_drill")
    undisturbed = drill.reference(tmp_path)
    rates = [line["departed"] for line in read_episodes(undisturbed.path)]
    assert all(count >= 12 for count in rates), "some 15 vehicles an episode"
    for kind in drill.KINDS:
        found = drill.trial(kind, tmp_path, kind.replace(" ", "_"), undisturbed)
        assert found["good"], found


@pytest.mark.slow
def test_the_launcher_gives_each_cell_its_server_and_starts_it_again_when_it_dies(tmp_path: Path) -> None:
    """Two cells, two servers of the stand-in; the first start of one dies in the middle of training."""
    from opencda_marl.launch.ports import is_free
    from opencda_marl.standin import install

    script = install(tmp_path / "carla", ["die@tick:150", ""])
    base = next(port for port in range(21000, 30000, 20) if all(is_free(port + more) for more in range(13)))
    matrix = tmp_path / "matrix"
    settings = (
        "max_steps=100",
        "max_episodes=3",
        "checkpoint_every=1",
        "evaluation.final=false",
        "learner.n_steps=100",
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    place = ("--parallel", "2", "--carla-bin", str(script), "--carla-rpc-port", str(base), "--retries", "simulator=3")
    cells = ("--profiles", f"{CARLA}mappo", "--seeds", "0:2")
    _typed("matrix", "run", str(matrix), *cells, *sets, *place)
    runs = sorted(path.parent for path in matrix.rglob("run.json"))
    assert len(runs) == 2
    assert all(len(read_episodes(run)) == 3 for run in runs)
    ports = {from_run_folder(run).carla.port for run in runs}
    assert ports <= {base, base + 10}
    attempts = [json.loads(file.read_text())["attempts"] for file in matrix.rglob("launch.json")]
    kinds = [attempt["kind"] for listed in attempts for attempt in listed]
    assert kinds.count("finished") == 2
    assert {"simulator", "deadline"} & set(kinds), "the death was met, and the cell tried again"
    assert all(is_free(base + 10 * slot) for slot in range(2)), "no server is left"
