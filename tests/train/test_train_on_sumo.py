"""Training on real SUMO: equal seeds, equal runs; signals, deaths and deaths of SUMO as a person meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from opencda_marl.config import load_profile, to_yaml
from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.run_folder import read_episodes, read_metrics, read_run, read_status
from opencda_marl.journal import TIMING_FIELDS
from opencda_marl.settings.run import RunSettings

_QUICK = [
    *(
        "max_steps=200",
        "max_minutes=null",
        "max_episodes=4",
        "checkpoint_every=2",
        "evaluation.final=false",
        "workers=1",
    ),
    *("learner.n_steps=250", "learner.minibatch_size=64", "learner.epochs=2", "recording.trajectories_every=2"),
]

# A child of its own: libsumo allows one simulation in a process.
_SCRIPT = """
import os, sys
from pathlib import Path
from opencda_marl.config import from_yaml
from opencda_marl.core.errors import OpenCDAError
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.train import train
run, config, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
step = DrivingEnv.step
def stopping(self, action):
    if self.state.step >= 100 and self.state.ids.max() >= 4_000_000:
        os.kill(os.getpid(), number)
    return step(self, action)
if number:
    DrivingEnv.step = stopping  # a signal in the middle of episode 4
try:
    if config:
        settings = from_yaml(Path(config).read_text())
        train(settings, out=run, listener=lambda event: print(type(event).__name__, flush=True))
    else:
        train(resume=run)
except OpenCDAError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def _settings(*overrides: str, name: str = "quickstart") -> RunSettings:
    return load_profile(f"sumo-marl/intersection/{name}", overrides=[*_QUICK, *overrides]).settings


def _start(
    run: Path, *overrides: str, name: str = "quickstart", resume: bool = False, number: int = 0
) -> subprocess.Popen[str]:
    config = ""
    if not resume:
        file = run.with_name(f"{run.name}.yaml")
        file.write_text(to_yaml(_settings(*overrides, name=name)))
        config = str(file)
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(run), config, str(int(number))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
    )


def _finish(process: subprocess.Popen[str], code: int = 0) -> str:
    said, errors = process.communicate(timeout=200)
    assert process.returncode == code, said + errors
    return errors


def _train(run: Path, *overrides: str, name: str = "quickstart") -> Path:
    _finish(_start(run, *overrides, name=name))
    return run


def _await_episode(process: subprocess.Popen[str], episodes: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        episodes -= line == "EpisodeDone\n"
        if episodes == 0:
            return
    raise AssertionError(process.communicate()[1])


def _lines(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMING_FIELDS} for line in read_episodes(run)]


def _same(left: Path, right: Path) -> bool:
    one, other = (Checkpoints(run / "checkpoints").load() for run in (left, right))
    assert one.state.tensors.keys() == other.state.tensors.keys()
    return (
        _lines(left) == _lines(right)
        and read_metrics(left) == read_metrics(right)
        and all(one.state.tensors[name].tobytes() == other.state.tensors[name].tobytes() for name in one.state.tensors)
        and one.state.values == other.state.values
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield _train(tmp_path_factory.mktemp("runs") / "it's a run")


def test_two_runs_of_one_seed_are_equal(whole: Path, tmp_path: Path) -> None:
    assert _same(whole, _train(tmp_path / "again"))
    assert not _same(whole, _train(tmp_path / "other", "seed=2"))
    for line in read_episodes(whole):
        assert set(TIMING_FIELDS) <= line.keys()
        assert line["scheduled"] == sum(line[name] for name in ("waiting", "running", "arrived", "collided", "removed"))
    last = read_episodes(whole)[-1]
    assert (last["steps"], last["env_steps"], last["episode"]) == (200, 800, 4)
    assert last["updates_performed"] >= 2
    assert last["training_step"] > last["updates_performed"]
    assert (whole / "traffic" / "episode_4.safetensors").is_file()
    init = read_run(whole)["init"]
    for name in ("backend", "algorithm", "device", "acting_device", "threads", "torch", "encoder", "update_mode"):
        assert init[name]
    assert init["parameters"] > 10_000
    assert read_status(whole)["phase"] == "finished"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_stopped_and_resumed_is_the_same_run(whole: Path, tmp_path: Path, number: int) -> None:
    run = tmp_path / "it's a run"
    process = _start(run, number=number)
    errors = _finish(process, -9 if number == signal.SIGKILL else 130)
    assert len(read_episodes(run)) == 3  # one beyond the last regular checkpoint
    saved = Checkpoints(run / "checkpoints").load().extra["episodes"]
    if number == signal.SIGKILL:
        assert saved == 2
        assert read_status(run)["phase"] == "died"
    else:
        assert saved == 3
        assert "of episode 4 are dropped; all 3 finished episodes are saved" in errors
        assert "--resume" in errors
        assert read_status(run)["phase"] == "interrupted"
    _finish(_start(run, resume=True))
    assert _same(whole, run)


def test_mappo_and_discrete_actions_train_too(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "max_episodes=2", "action=levels", name="route_speed_only_mappo")
    assert read_episodes(run)[-1]["updates_performed"] == 1


def test_held_out_evaluation_does_not_disturb_training(whole: Path, tmp_path: Path) -> None:
    chosen = ("evaluation.selection_seeds=[8000,8001]", "evaluation.rates_vph=[200.0]")
    run = _train(tmp_path / "run", "eval_every=2", *chosen)
    found = [line for line in read_metrics(run) if line["kind"] == "evaluation"]
    # the second one comes at the end at the latest; the first may have been overtaken by it
    assert [line["episode"] for line in found] in ([2, 4], [4])
    assert found[-1]["rate_vph"] == 200.0
    assert found[-1]["seeds"] == [8000, 8001]
    scores = [(line["success_rate"] or 0.0, -(line["collision_rate"] or 0.0), line["episode"]) for line in found]
    best = Checkpoints(run / "checkpoints").find("best")
    assert best is not None
    assert best.name in {f"episode_{score[2]}" for score in scores if score[:2] == max(scores)[:2]}
    assert _lines(run) == _lines(whole)
    one, other = (Checkpoints(path / "checkpoints").load().state.tensors for path in (whole, run))
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize("lost", ["all of it", pytest.param("its second half", marks=pytest.mark.slow)])
def test_a_lost_evaluation_is_made_up_for_on_resume(tmp_path: Path, lost: str) -> None:
    """Killed before, or while, what held-out evaluation found was written down."""
    chosen = ("evaluation.selection_seeds=[8000,8001]", "evaluation.rates_vph=[200.0,300.0]")
    run = _train(tmp_path / "run", "eval_every=4", *chosen)
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    whole = [line for line in lines if json.loads(line)["kind"] == "evaluation"]
    assert [json.loads(line)["rate_vph"] for line in whole] == [200.0, 300.0]
    kept = [] if lost == "all of it" else whole[:1]
    metrics.write_text("".join([line for line in lines if line not in whole] + kept))
    (run / "checkpoints" / "best").unlink()
    _finish(_start(run, resume=True), 0)
    found = [line for line in read_metrics(run) if line["kind"] == "evaluation"]
    assert [line["rate_vph"] for line in found] == [json.loads(line)["rate_vph"] for line in (*kept, *whole)]
    assert [line["return"] for line in found[-2:]] == [json.loads(line)["return"] for line in whole]
    best = Checkpoints(run / "checkpoints").find("best")
    assert best is not None
    assert best.name == "episode_4"
    _finish(_start(run, resume=True), 0)
    assert len([line for line in read_metrics(run) if line["kind"] == "evaluation"]) == len(found)


def test_a_killed_trainer_takes_its_children_along(tmp_path: Path) -> None:
    process = _start(tmp_path / "run", "max_episodes=400", "eval_every=1", "evaluation.selection_seeds=[0,400]")
    _await_episode(process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGKILL)
    process.communicate()
    gone, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
    assert gone


def test_a_dying_sumo_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(run, "simulator.backend=traci", "max_episodes=100")
    _await_episode(process, 3)
    sumo = [child for child in psutil.Process(process.pid).children(recursive=True) if "sumo" in child.name()]
    assert len(sumo) == 1
    sumo[0].kill()
    errors = _finish(process, 10)
    assert "--resume" in errors
    assert Checkpoints(run / "checkpoints").load().extra["episodes"] >= 3
    assert read_status(run)["exit_code"] == 10
    assert [line["episode"] for line in read_episodes(run)] == list(range(1, len(read_episodes(run)) + 1))


def test_time_is_accounted_for(whole: Path) -> None:
    """Loosely here, on short episodes and a busy machine; docs/performance.md has the figure."""
    lines = read_episodes(whole)[1:]
    named = sum(sum(line["spans"].values()) for line in lines)
    assert named > 0.75 * sum(line["wall_s"] for line in lines)
    for name in ("tick", "read", "observe", "act", "reward", "store"):
        assert all(line["spans"][name] > 0 for line in lines)


def test_the_status_is_fresh_while_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(run, "max_episodes=400")
    _await_episode(process, 2)
    status = json.loads((run / "status.json").read_text())
    assert status["phase"] in ("training", "updating")
    assert status["pid"] == process.pid
    assert abs(time.time() - status["updated"]) < 10
    process.send_signal(signal.SIGTERM)
    _finish(process, 130)
