"""Policies alone: exported, listed, driven by name."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from opencda_marl.assemble import make_env, make_learner
from opencda_marl.config import from_run_folder, load_profile, to_yaml
from opencda_marl.core.checkpoint import read_checkpoint
from opencda_marl.core.errors import CheckpointError, StorageError
from opencda_marl.core.run_folder import RunFolder
from opencda_marl.evaluate import evaluate, find_policy
from opencda_marl.policies import catalogue
from opencda_marl.policies.catalogue import about_bundled, bundled_names, find_bundled
from opencda_marl.policies.export import export_policy

_PROFILES = Path(catalogue.__file__).parents[1] / "profiles/sumo-marl/intersection"
_LEARNERS = ("mappo", "pcmappo", "masac", "matd3", "dqn", "qlearning")


def _run(path: Path, algorithm: str) -> Path:
    """A run folder with an untrained policy and stored rows in it."""
    wanted = ["demand.rate_vph=300.0", "max_steps=300"]
    profile = f"sumo-marl/intersection/route_speed_only_{algorithm}"
    settings = load_profile(profile, overrides=wanted).settings
    env = make_env(settings)
    try:
        spec = env.observation_spec
        learner = make_learner(settings, spec, env.action_spec)
        step = env.reset(1)
        for _ in range(5):
            action = learner.act(step.observation, explore=True)
            before, step = step.observation, env.step(action)
            learner.store(before, action, step)
        state = learner.state()
        learner.close()
    finally:
        env.close()
    with RunFolder.create(path) as folder:
        folder.write_config(to_yaml(settings))
        folder.write_run({"profile": profile, "git": "abc"})
        extra = {"observation": [spec.name, spec.version], "profile": profile, "algorithm": algorithm, "episodes": 7}
        folder.checkpoints.save(7, state, extra, {"config.yaml": to_yaml(settings)}, best=True)
    return path


@pytest.mark.parametrize("algorithm", _LEARNERS)
def test_an_exported_policy_drives_as_the_run_does(tmp_path: Path, algorithm: str) -> None:
    run, out = _run(tmp_path / "run", algorithm), tmp_path / "policies" / "mine"
    answer = export_policy(run, out, about="a test")
    told = evaluate(run, seeds=range(9000, 9001))
    alone = evaluate(out, seeds=range(9000, 9001))
    ours = ("policy", "checkpoint", "profile")
    assert {k: v for k, v in told.items() if k not in ours} == {k: v for k, v in alone.items() if k not in ours}
    assert told["per_episode"][0]["departed"] > 5
    left = set(answer["left_out"])
    assert left
    assert not {"m", "v"} & set(read_checkpoint(out).state.tensors)
    assert not any(name.startswith(("rollout.", "replay", "open.", "closed.")) for name in answer["tensors"])
    assert answer["bytes"] < sum(f.stat().st_size for f in (run / "checkpoints" / "episode_7").iterdir())
    assert bundled_names(out.parent) == ["mine"]
    assert about_bundled("mine", out.parent).startswith(f"{algorithm}, 7 episodes of sumo-marl/intersection/")
    assert about_bundled("mine", out.parent).endswith("; a test")


def test_a_folder_is_replaced_only_when_asked_to(tmp_path: Path) -> None:
    run, out = _run(tmp_path / "run", "qlearning"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("dear to me")
    with pytest.raises(StorageError, match="is there already"):
        export_policy(run, out)
    assert (out / "mine.txt").is_file()
    export_policy(run / "checkpoints" / "best", out, replacing=True)
    assert not (out / "mine.txt").exists()
    assert read_checkpoint(out).extra["commit"] is None  # a checkpoint alone does not say


def test_the_checkpoint_of_the_final_table_is_taken(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", "qlearning")
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "episode_7", checkpoints / "episode_9")
    assert export_policy(run, tmp_path / "a")["checkpoint"] == str(checkpoints / "episode_7")
    (run / "plots").mkdir()
    row = {"policy": "qlearning", "checkpoint": "elsewhere/run/checkpoints/episode_9"}  # the run was moved since
    (run / "plots" / "comparison.json").write_text(json.dumps([row, {"policy": "random", "checkpoint": None}]))
    assert export_policy(run, tmp_path / "b")["checkpoint"] == str(checkpoints / "episode_9")
    shutil.rmtree(checkpoints / "episode_9")
    assert export_policy(run, tmp_path / "c")["checkpoint"] == str(checkpoints / "episode_7")


def test_the_package_holds_its_policies() -> None:
    root = Path(catalogue.__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["opencda_marl"]
    assert "policies/**/*" in data


def test_names_in_the_package(tmp_path: Path) -> None:
    for name in ("mappo", "masac"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    assert find_bundled("bundled:mappo", tmp_path) == tmp_path / "mappo"
    with pytest.raises(CheckpointError, match="no policy 'mapo' in the package") as caught:
        find_bundled("bundled:mapo", tmp_path)
    assert caught.value.fix == "did you mean bundled:mappo?"
    with pytest.raises(CheckpointError) as caught:
        find_bundled("bundled:x", tmp_path)
    assert caught.value.fix == "there are: mappo, masac"


def test_what_is_bundled_is_whole_and_drives() -> None:
    for name in bundled_names():
        checkpoint = read_checkpoint(find_bundled(name))
        assert {"m", "v"}.isdisjoint(checkpoint.state.tensors)
        assert sum(file.stat().st_size for file in checkpoint.path.iterdir()) < 8 * 2**20
        policy = find_policy(f"bundled:{name}")
        assert policy.folder == checkpoint.path
        assert (_PROFILES / f"{Path(str(policy.profile)).name}.yaml").is_file()
        json.dumps(about_bundled(name))


def test_a_lower_greedy_quantile_drives_more_carefully() -> None:
    """A trained policy, changed as `evaluate bundled:mappo learner.greedy_quantile=…` changes it."""
    policy = find_policy("bundled:mappo")
    assert policy.folder is not None
    overrides = ["demand.rate_vph=300", "demand.rate_draw=choice", "max_steps=1200"]
    delays = []
    for quantile in (0.8, 0.5, 0.2):
        settings = from_run_folder(policy.folder, overrides=[*overrides, f"learner.greedy_quantile={quantile}"])
        delays.append(evaluate("bundled:mappo", settings=settings, seeds=range(9000, 9001))["mean_delay_inside_s"])
    assert delays == sorted(delays)
    assert delays[0] < delays[1] < delays[2]
