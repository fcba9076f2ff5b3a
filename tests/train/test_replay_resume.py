"""Learners with a replay on real SUMO: they act and learn by their counters; resumed is uninterrupted, rows too."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_train_on_sumo import _SCRIPT, _finish, _lines

from opencda_marl.config import load_profile, to_yaml
from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.run_folder import read_episodes, read_metrics, read_run
from opencda_marl.core.segments import materialise
from opencda_marl.core.spec import LearnerState

_QUICK = [
    *("max_steps=300", "max_minutes=null", "max_episodes=4", "checkpoint_every=2", "evaluation.final=false"),
    *("learner.learning_starts=80", "learner.batch_size=32", "learner.hidden=[32,32]", "learner.updates_per_step=0.3"),
    *("demand.rate_vph=300", "recording.tensorboard=false"),
]


def _start(
    run: Path, algorithm: str, *overrides: str, resume: bool = False, number: int = 0, profile: str | None = None
) -> subprocess.Popen[str]:
    config = ""
    if not resume:
        name = f"sumo-marl/intersection/{profile or f'route_speed_only_{algorithm}'}"
        file = run.with_name(f"{run.name}.yaml")
        file.write_text(to_yaml(load_profile(name, overrides=[*_QUICK, *overrides]).settings))
        config = str(file)
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(run), config, str(int(number))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _latest(run: Path) -> LearnerState:
    return Checkpoints(run / "checkpoints").load().state


def _rows(run: Path) -> dict[str, bytes]:
    return {name: column.tobytes() for name, column in materialise(_latest(run).segments).items()}


def _same(left: Path, right: Path) -> bool:
    one, other = _latest(left), _latest(right)
    return (
        _lines(left) == _lines(right)
        and read_metrics(left) == read_metrics(right)
        and one.tensors.keys() == other.tensors.keys()
        and all(one.tensors[name].tobytes() == other.tensors[name].tobytes() for name in one.tensors)
        and one.values == other.values
        and _rows(left) == _rows(right)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("runs") / "it's a run"
    _finish(_start(run, "pcmasac"))
    yield run


def _check_counters(run: Path) -> None:
    """What the counters must say of a run that acted and learned."""
    lines, state = read_episodes(run), _latest(run)
    rows = materialise(state.segments)
    last = lines[-1]
    assert last["env_steps"] == 1200
    assert last["acting_steps"] > 100
    assert last["buffer_size"] == len(rows["number"]) == state.values["replay"]["total"]
    assert state.values["replay"]["decisions"] == sum(line["decisions"] for line in lines)
    # 0.3 per env step from when 80 decisions were there, which is in the first or second episode
    assert 100 < last["training_step"] <= 0.3 * 1200
    assert 100 < last["updates_performed"] <= last["training_step"]
    growing = [line["training_step"] for line in lines]
    assert growing == sorted(growing)
    assert 85 <= growing[-1] - growing[-2] <= 95
    found = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert len(found) == last["training_step"] // 200
    assert all(np.isfinite([line["critic_loss"], line["entropy"], line["alpha"]]).all() for line in found)
    # every vehicle that ended is there with its last decision, and nothing follows it
    ended = rows["usable"] & (rows["next"] == -1)
    assert ended.sum() == sum(line["arrived"] + line["collided"] for line in lines)
    assert not rows["discount"][ended].any()
    assert (rows["discount"][rows["usable"] & (rows["next"] >= 0)] > 0.9).all()
    assert np.abs(rows["action"]).max() <= 1.0
    assert read_run(run)["init"]["replay"].startswith("100k decisions, ")


def test_pcmasac_acts_and_learns(whole: Path) -> None:
    _check_counters(whole)


def test_masac_acts_and_learns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _finish(_start(run, "masac"))
    _check_counters(run)


def test_the_layout_of_the_published_timings_acts_and_learns(tmp_path: Path) -> None:
    """A decision and a gradient step every env step, and the frozen encoder's context in the ring."""
    run = tmp_path / "run"
    _finish(
        _start(
            run, "pcmasac", "max_steps=150", "max_episodes=2", "learner.updates_per_step=1",
            "learner.update_mode=eager", profile="page_layout_pcmasac",
        )
    )  # fmt: skip
    last, state = read_episodes(run)[-1], _latest(run)
    rows = materialise(state.segments)
    assert last["env_steps"] == 300
    assert last["acting_steps"] > 150  # nobody is there in the first steps of an episode
    assert 100 < last["updates_performed"] <= last["training_step"] <= 300
    assert last["training_step"] >= last["env_steps"] - read_episodes(run)[0]["env_steps"]
    assert last["buffer_size"] == len(rows["number"]) > last["acting_steps"]
    assert rows["context"].shape[1] == 64
    assert "neighbours" not in rows
    assert (rows["rewards"].shape[1], rows["preference"].shape[1]) == (4, 3)
    assert read_run(run)["init"]["encoder"] == "lstm (frozen)"


def test_what_the_replay_takes_is_said_before_the_first_episode(whole: Path) -> None:
    log = (whole / "log.txt").read_text()
    init = next(line for line in log.splitlines() if "  init: " in line)
    for size in ("replay=100k decisions, 189 MiB (25k: 47 MiB, 100k: 189 MiB, 1M: 1.8 GiB)", "updates_per_step=0.3"):
        assert size in init
    assert log.index(init) < log.index("  episode 1 ")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_stopped_and_resumed_is_the_same_run(whole: Path, tmp_path: Path, number: int) -> None:
    run = tmp_path / "it's a run"
    errors = _finish(_start(run, "pcmasac", number=number), -9 if number == signal.SIGKILL else 130)
    saved = Checkpoints(run / "checkpoints").load().extra["episodes"]
    assert saved == (2 if number == signal.SIGKILL else 3)
    assert number == signal.SIGKILL or "--resume" in errors
    assert _rows(run) != _rows(whole)
    _finish(_start(run, "pcmasac", resume=True))
    assert _same(whole, run)


def test_checkpoints_share_the_rows(whole: Path) -> None:
    pieces = sorted((whole / "checkpoints" / "replay").iterdir())
    assert len(pieces) == 4  # one an episode
    rows = sum(piece.stat().st_size for piece in pieces)
    bytes_per_row = _latest(whole).values["replay"]["bytes_per_row"]
    assert rows < 1.2 * (bytes_per_row + 8) * len(materialise(_latest(whole).segments)["number"])
    for name in ("episode_2", "episode_4"):
        whole_size = sum(file.stat().st_size for file in (whole / "checkpoints" / name).iterdir())
        assert whole_size < 4 * 4.5 * _latest(whole).tensors["theta"].size


def test_a_checkpoint_that_was_copied_elsewhere_can_be_evaluated(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoints" / "episode_2", tmp_path / "policy")
    command = ["evaluate", str(tmp_path / "policy"), "--seeds", "9000:9001", "max_steps=200", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "opencda_marl.cli", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"success_rate"' in done.stdout


def test_a_piece_that_is_gone_is_named_and_helped(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    piece = min((run / "checkpoints" / "replay").iterdir())
    piece.unlink()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("max_episodes: 4", "max_episodes: 5"))
    errors = _finish(_start(run, "pcmasac", resume=True), 20)
    assert piece.name in errors
    assert "--init-from" in errors
