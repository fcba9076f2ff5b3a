"""The comparison behind verify-resume can fail, on each kind of thing that it compares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opencda_marl.config import load_profile
from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.errors import CheckpointError, StorageError
from opencda_marl.core.segments import Segment
from opencda_marl.core.spec import LearnerState
from opencda_marl.settings.learning import ALGORITHMS
from opencda_marl.settings.offpolicy import OffPolicySettings
from opencda_marl.tools.child_runs import ChildRun
from opencda_marl.tools.profile import profile
from opencda_marl.tools.verify_resume import differing_runs, differing_states, verify_resume


def _state() -> LearnerState:
    return LearnerState(
        tensors={
            "actor.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
            "optimiser.step": np.array([7.0], dtype=np.float32),
            "normaliser.mean": np.array([0.1, 0.0], dtype=np.float64),
            "rollout.rows": np.zeros((4, 5), dtype=np.float32),
        },
        values={"counters": {"training_step": 12, "updates_performed": 3}, "generator": {"state": [2**100, 5]}},
    )


def _run(folder: Path, state: LearnerState) -> Path:
    """A run folder with four episodes, one update each."""
    folder.mkdir()
    episodes = [
        {"episode": k, "return": 0.1 * k, "steps": 400, "wall_s": k, "ms_per_step": 1.0, "spans": {"tick": 0.1 * k}}
        for k in range(1, 5)
    ]
    metrics = [{"episode": k, "losses/actor": -0.01 / k} for k in range(1, 5)]
    for name, lines in (("episodes", episodes), ("metrics", metrics)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Checkpoints(folder / "checkpoints").save(4, state, {"episode": 4, "env_steps": 1600})
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return _run(tmp_path / "whole", _state()), _run(tmp_path / "resumed", _state())


def _edit_line(run: Path, name: str, change: Callable[[dict[str, object]], object]) -> None:
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    change(lines[2])
    (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_two_equal_runs_are_exact_and_it_says_what_was_compared(runs: tuple[Path, Path]) -> None:
    differences, compared = differing_runs(*runs)
    assert differences == []
    assert compared["tensors"] == 4
    assert compared["numbers"] == 6 + 1 + 2 + 20
    assert compared["replay_rows"] == 0
    assert compared["episodes"] == compared["metrics"] == 4
    assert compared["values"] > 5


def test_what_the_clock_decides_may_differ(runs: tuple[Path, Path]) -> None:
    _edit_line(runs[1], "episodes.jsonl", lambda line: line.update(wall_s=99.0, ms_per_step=5.0, spans={"tick": 9.0}))
    assert differing_runs(*runs)[0] == []


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("episodes.jsonl", "return", 0.3 + 1e-15), ("episodes.jsonl", "steps", 399), ("metrics.jsonl", "losses/actor", 0)],
)
def test_one_changed_field_is_found(runs: tuple[Path, Path], name: str, field: str, value: float) -> None:
    _edit_line(runs[1], name, lambda line: line.update({field: value}))
    differences, _ = differing_runs(*runs)
    assert len(differences) == 1
    assert field in differences[0]
    assert "episode 3" in differences[0]


def test_a_missing_or_repeated_episode_is_found(runs: tuple[Path, Path]) -> None:
    lines = (runs[1] / "episodes.jsonl").read_text().splitlines(keepends=True)
    (runs[1] / "episodes.jsonl").write_text("".join(lines[:3]))
    assert "episode lines: 4 and 3" in differing_runs(*runs)[0]
    (runs[1] / "episodes.jsonl").write_text("".join([*lines[:3], *lines[2:]]))
    assert "episode lines: 4 and 5" in differing_runs(*runs)[0]


def test_one_bit_of_one_weight_is_found(tmp_path: Path) -> None:
    other = _state()
    other.tensors["actor.weight"][1, 2] = np.nextafter(np.float32(5), np.float32(6))
    differences, _ = differing_runs(_run(tmp_path / "a", _state()), _run(tmp_path / "b", other))
    assert len(differences) == 1
    assert differences[0].startswith("tensor actor.weight: 1 of 6 numbers differ, by at most 4.77e-07")


def test_the_sign_of_zero_and_the_payload_of_nan_count() -> None:
    left, right = _state(), _state()
    right.tensors["normaliser.mean"][1] = -0.0
    assert differing_states(left, right) == ["tensor normaliser.mean: its bits differ (NaN or the sign of zero)"]


def test_type_and_shape_count() -> None:
    right = _state()
    right.tensors["optimiser.step"] = right.tensors["optimiser.step"].astype(np.float64)
    right.tensors["rollout.rows"] = right.tensors["rollout.rows"][:3]
    del right.tensors["normaliser.mean"]
    assert differing_states(_state(), right) == [
        "tensor normaliser.mean: only one run has it",
        "tensor optimiser.step: float32[1] and float64[1]",
        "tensor rollout.rows: float32[4, 5] and float32[3, 5]",
    ]


def test_counters_and_generators_count() -> None:
    right = _state()
    right.values["counters"]["training_step"] = 12.0
    right.values["generator"]["state"][0] += 1
    differences = differing_states(_state(), right)
    assert [line.split(":")[0] for line in differences] == [
        "learner value counters.training_step",
        "learner value generator.state.0",
    ]


def _piece(first: int, numbers: list[int], rewards: list[float]) -> Segment:
    arrays = {"number": np.array(numbers), "reward": np.array(rewards, np.float32)}
    return Segment(first, max(numbers) + 1, arrays)


def _with(*pieces: Segment) -> LearnerState:
    state = _state()
    return LearnerState(state.tensors, state.values, list(pieces))


def test_the_rows_of_a_replay_count_and_not_how_they_are_cut(tmp_path: Path) -> None:
    # row 1 is changed by the second piece, which also adds row 3
    left = _with(_piece(0, [0, 1, 2], [0.0, 1.0, 2.0]), _piece(3, [1, 3], [1.5, 3.0]))
    assert differing_states(left, _with(_piece(0, [0, 1, 2, 3], [0.0, 1.5, 2.0, 3.0]))) == []
    right = _with(_piece(0, [0, 1, 2], [0.0, 1.0, 2.0]), _piece(3, [1, 3], [1.5, 3.25]))
    assert differing_states(left, right) == ["replay column reward: 1 of 4 numbers differ, by at most 0.25"]
    unchanged = _with(_piece(0, [0, 1, 2], [0.0, 1.0, 2.0]), _piece(3, [3], [3.0]))
    assert differing_states(left, unchanged) == ["replay column reward: 1 of 4 numbers differ, by at most 0.5"]
    shorter = _with(_piece(0, [0, 1, 2], [0.0, 1.5, 2.0]))
    assert differing_states(left, shorter) == [
        "replay column number: int64[4] and int64[3]",
        "replay column reward: float32[4] and float32[3]",
    ]
    assert len(differing_states(left, _state())) == 2
    # likewise when they come from the disk
    differences, compared = differing_runs(_run(tmp_path / "a", left), _run(tmp_path / "b", right))
    assert differences == ["replay column reward: 1 of 4 numbers differ, by at most 0.25"]
    assert compared["replay_rows"] == 4


def test_the_runs_own_values_count(tmp_path: Path) -> None:
    left, right = _run(tmp_path / "a", _state()), _run(tmp_path / "b", _state())
    shutil.rmtree(right / "checkpoints")
    Checkpoints(right / "checkpoints").save(4, _state(), {"episode": 4, "env_steps": 1599})
    assert differing_runs(left, right)[0] == ["run value env_steps: 1600 and 1599"]


def test_a_run_without_a_checkpoint_is_an_error(runs: tuple[Path, Path]) -> None:
    shutil.rmtree(runs[1] / "checkpoints")
    with pytest.raises(CheckpointError):
        differing_runs(*runs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile",
    [
        *(f"route_speed_only_{algorithm}" for algorithm in ALGORITHMS),
        "page_layout_pcmappo",
        "page_layout_pcmasac",
    ],
)
def test_a_run_that_is_killed_and_resumed_is_the_run_that_was_not(profile: str, tmp_path: Path) -> None:
    found = verify_resume(f"sumo-marl/intersection/{profile}", folder=tmp_path)
    assert found["differences"] == []
    assert found["exact"] is True
    assert found["compared"]["episodes"] == 4
    assert found["compared"]["gradient_steps"] >= 20
    own = load_profile(f"sumo-marl/intersection/{profile}").settings.learner
    assert (found["compared"]["replay_rows"] > 0) == isinstance(own, OffPolicySettings)
    assert found["runs"] == []
    assert {path.suffix for path in tmp_path.iterdir()} == {".log", ".json"}


@pytest.mark.slow
def test_real_runs_of_two_seeds_differ_in_everything_that_is_learned(tmp_path: Path) -> None:
    short = ("max_episodes=2", "max_steps=300", "max_minutes=null", "learner.n_steps=200", "evaluation.final=false")
    paths = []
    for seed in (1, 2):
        name = "sumo-marl/intersection/route_speed_only_mappo"
        run = ChildRun(name, tmp_path, f"seed{seed}", overrides=(*short, f"seed={seed}"))
        run.finish(run.start(), deadline=300.0)
        paths.append(run.path)
    differences, _ = differing_runs(*paths)
    for kind in ("tensor theta", "learner value", "episode 1: return", "metrics of episode"):
        assert any(line.startswith(kind) for line in differences), kind


@pytest.mark.parametrize("tool", [verify_resume, profile])
def test_a_filled_folder_is_refused_before_anything_runs(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(StorageError, match="is not empty") as caught:
        tool("sumo-marl/intersection/quickstart", folder=tmp_path)
    assert caught.value.fix == "choose a new folder: --out FOLDER"
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(StorageError, match=r"is a file|not a folder"):
        tool("sumo-marl/intersection/quickstart", folder=tmp_path / "mine")
