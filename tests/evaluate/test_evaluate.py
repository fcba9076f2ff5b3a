"""Driving held-out traffic on real SUMO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from opencda_marl.assemble import evaluation_traffic, make_env, make_learner, make_roads, training_traffic
from opencda_marl.config import load_profile, to_yaml
from opencda_marl.core.checkpoint import read_checkpoint, write_checkpoint
from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.core.run_folder import RunFolder
from opencda_marl.core.spec import LearnerState
from opencda_marl.evaluate import evaluate, find_policy
from opencda_marl.settings.run import RunSettings

_NAMES = (
    *("policy", "profile", "episodes", "vehicles", "success_rate", "success_rate_departed", "collision_rate"),
    *("near_miss_rate", "mean_delay_s", "mean_delay_inside_s", "mean_travel_time_s", "throughput_vph"),
    *("running_at_end", "waiting_at_end", "overridden_share", "return"),
)


def _settings(*overrides: str) -> RunSettings:
    wanted = ["demand.rate_vph=300.0", "max_steps=600", *overrides]
    return load_profile("sumo-marl/intersection/quickstart", overrides=wanted).settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with an untrained policy in it."""
    settings = _settings()
    path = tmp_path_factory.mktemp("runs") / "run"
    env = make_env(settings)
    try:
        learner = make_learner(settings, env.observation_spec, env.action_spec)
        state: LearnerState = learner.state()
        spec = env.observation_spec
        learner.close()
    finally:
        env.close()
    with RunFolder.create(path) as folder:
        folder.write_config(to_yaml(settings))
        folder.write_run({"profile": "a/profile"})
        extra = {"observation": [spec.name, spec.version], "profile": "a/profile"}
        folder.checkpoints.save(1, state, extra, {"config.yaml": to_yaml(settings)}, best=True)
        folder.checkpoints.save(2, state, {**extra, "observation": ["ego9", 1]}, {"config.yaml": to_yaml(settings)})
    return path


def test_the_names_that_programs_read(run: Path) -> None:
    found = evaluate(run, seeds=range(9000, 9002))
    assert set(_NAMES) <= found.keys()
    assert (found["policy"], found["profile"], found["episodes"]) == (str(run), "a/profile", 2)
    assert found["checkpoint"] == str(run / "checkpoints" / "episode_1")  # best, not latest
    assert found["seeds"] == [9000, 9002]
    assert found["preference"] == [0.6, 0.3, 0.1]
    assert [row["seed"] for row in found["per_episode"]] == [9000, 9001]
    assert found["vehicles"] == sum(row["arrived"] + row["collided"] + row["removed"] for row in found["per_episode"])
    json.dumps(found)


def test_the_same_seeds_give_the_same_figures(run: Path) -> None:
    first = evaluate(run, seeds=range(9000, 9002))
    by_path = evaluate(run / "checkpoints" / "episode_1", seeds=range(9000, 9002))
    assert {**first, "policy": ""} == {**by_path, "policy": ""}
    alone = evaluate(run, seeds=range(9001, 9002))
    assert alone["per_episode"][0] == first["per_episode"][1]  # an episode follows from its seed alone
    assert evaluate(run, seeds=range(9000, 9010), episodes=1)["per_episode"] == first["per_episode"][:1]


def test_controllers_differ_as_they_should() -> None:
    seeds = range(9000, 9003)
    settings = _settings()
    found = {name: evaluate(name, settings=settings, profile="p", seeds=seeds) for name in ("random", "full_speed")}
    found |= {name: evaluate(name, settings=settings, seeds=seeds) for name in ("priority", "rule_based")}
    assert found["random"]["profile"] == "p"
    assert found["random"]["checkpoint"] is None
    assert found["priority"]["collision_rate"] == found["rule_based"]["collision_rate"] == 0.0
    assert found["full_speed"]["collision_rate"] < found["random"]["collision_rate"]
    assert found["full_speed"]["mean_delay_s"] < found["priority"]["mean_delay_s"]
    assert found["priority"]["overridden_share"] is None  # nothing was commanded: every vehicle is SUMO's
    assert found["full_speed"]["overridden_share"] < 0.01
    scheduled = {name: [row["scheduled"] for row in answer["per_episode"]] for name, answer in found.items()}
    assert len({tuple(row) for row in scheduled.values()}) == 1  # the same traffic for everybody


def test_the_crossing_under_other_rules() -> None:
    seeds = range(9000, 9002)
    names = ("priority", "all_way_stop", "signals")
    found = {name: evaluate(name, settings=_settings(), seeds=seeds) for name in names}
    assert {answer["collision_rate"] for answer in found.values()} == {0.0}
    assert len({tuple(row["scheduled"] for row in answer["per_episode"]) for answer in found.values()}) == 1
    assert len({answer["mean_delay_s"] for answer in found.values()}) == 3  # three rules, three ways to be late
    assert found["all_way_stop"]["stops_per_vehicle"] > 0.5
    elsewhere = _settings()
    elsewhere = replace(elsewhere, scenario=replace(elsewhere.scenario, network="elsewhere.net.xml"))
    with pytest.raises(ConfigError, match="signals is a rule that SUMO's drivers keep"):
        evaluate("signals", settings=load_profile("momarl/intersection/mappo").settings, episodes=1)
    with pytest.raises(ConfigError, match="signals needs a form of the crossing of its own"):
        evaluate("signals", settings=elsewhere, seeds=seeds)


def test_rivals_drive_the_same_traffic(run: Path) -> None:
    heard: list[tuple[int, int]] = []
    seeds, settings = range(9000, 9002), _settings("max_steps=300")
    answer = evaluate(
        run,
        settings=settings,
        seeds=seeds,
        progress=lambda done, total: heard.append((done, total)),
        rivals=["random", "priority"],
    )
    assert heard == [(done, 6) for done in range(1, 7)]
    assert [one["rival"] for one in answer["comparison"]] == ["random", "priority"]
    alone = evaluate("random", settings=settings, seeds=seeds)
    assert answer["comparison"][0]["collision_rate"] == [answer["collision_rate"], alone["collision_rate"]]
    json.dumps(answer)


def test_a_shield_is_the_policys_alone(run: Path) -> None:
    settings, seeds = _settings("shield.enabled=true"), range(9000, 9001)
    bare = _settings()
    answer = evaluate(run, settings=settings, seeds=seeds, rivals=["full_speed"])
    alone = evaluate("full_speed", settings=bare, seeds=seeds)
    assert alone["collision_rate"] > 0.0
    assert answer["comparison"][0]["collision_rate"][1] == alone["collision_rate"]
    assert evaluate("full_speed", settings=settings, seeds=seeds)["collision_rate"] < alone["collision_rate"]


def test_levels_are_the_policys_alone() -> None:
    figures = [
        evaluate("rule_based", settings=_settings(f"action={action}"), seeds=range(9000, 9002))
        for action in ("levels", "target_speed")
    ]
    assert figures[0]["mean_jerk"] == figures[1]["mean_jerk"] is not None


def test_held_out_traffic_is_not_that_of_training() -> None:
    settings = _settings()
    roads = make_roads(settings)
    train, held_out = training_traffic(settings, roads), evaluation_traffic(settings, roads, [settings.seed])
    assert train(1)[0].times.tolist() != held_out(1)[0].times.tolist()
    assert train(1)[1] != held_out(1)[1]
    other = evaluation_traffic(replace(settings, seed=99), roads, [settings.seed])
    assert other(1)[0].times.tolist() == held_out(1)[0].times.tolist()  # the run's own seed does not matter
    assert other(1)[1:] == held_out(1)[1:] == (held_out(1)[1], settings.seed)
    assert make_roads(settings) is roads  # read once


def test_trajectory_and_progress(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    out = tmp_path / "tracks.safetensors"
    evaluate(
        "full_speed",
        settings=_settings("max_steps=200"),
        seeds=range(2),
        trajectory=out,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert heard == [(1, 2), (2, 2)]
    tracks = load_file(out)
    assert len(tracks["step"]) == len(tracks["id"]) == len(tracks["values"]) > 100


def test_what_cannot_be_evaluated(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random needs a profile"):
        evaluate("random")
    with pytest.raises(ConfigError, match="11 episodes cannot be driven on 10 seeds"):
        evaluate("random", settings=_settings(), episodes=11)
    with pytest.raises(CheckpointError, match="no run, checkpoint or controller 'radom'") as caught:
        evaluate("radom", settings=_settings())
    for words in ("runs list", "RUN/checkpoints/best", "list policies", "rule_based"):
        assert words in (caught.value.fix or ""), "all that could have been meant"
    with pytest.raises(CheckpointError):
        evaluate(tmp_path, settings=_settings())
    with pytest.raises(CheckpointError, match="trained on the observation"):
        evaluate(run / "checkpoints" / "latest")
    assert find_policy("priority").checkpoint is None


def test_what_is_missing_is_said_with_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is neither a run .* nor a checkpoint"):
        evaluate(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint") as caught:
        evaluate(run / "checkpoints" / "episode_7")
    assert caught.value.fix == "there are: best, latest, episode_1, episode_2"
    with pytest.raises(CheckpointError, match="was trained on the observation") as caught:
        evaluate(run / "checkpoints" / "episode_2")
    assert caught.value.fix is not None
    assert caught.value.fix.endswith(f"opencda-marl evaluate {run / 'checkpoints' / 'episode_2'}")
    older = read_checkpoint(run / "checkpoints" / "episode_1")
    name, version = older.extra["observation"]
    write_checkpoint(
        tmp_path / "older",
        older.state,
        {**older.extra, "observation": [name, version - 1]},
        {"config.yaml": (run / "config.yaml").read_text()},
    )
    with pytest.raises(CheckpointError, match=rf"\['{name}', {version - 1}\], but there is") as caught:
        evaluate(tmp_path / "older")
    assert "train it again" in str(caught.value.fix)


def test_a_grid_of_preferences_is_called_so(run: Path) -> None:
    settings = _settings("preference.source=grid", "max_steps=100")
    assert evaluate(run, settings=settings, seeds=range(9000, 9001))["preference"] == "grid"
    assert evaluate("random", settings=_settings("algorithm=mappo"), seeds=range(1))["preference"] is None


def test_a_child_answers_the_same(run: Path, tmp_path: Path) -> None:
    here = evaluate(run / "checkpoints" / "episode_1", seeds=range(9000, 9001))
    request = tmp_path / "request.json"
    tracks = tmp_path / "tracks.safetensors"
    job = {"policy": str(run / "checkpoints" / "episode_1"), "rates_vph": [300.0, 100.0]}
    job |= {"trajectory": str(tracks), "trajectory_rate_vph": 300.0}
    asked = {"jobs": [job], "config": str(run), "profile": "a/profile", "seeds": [9000, 9001]}
    request.write_text(json.dumps({**asked, "answer": str(tmp_path / "answer.json")}))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-m", "opencda_marl.evaluate", str(request)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.wait(120) == 0
    rows = json.loads((tmp_path / "answer.json").read_text())
    assert rows[0] == json.loads(json.dumps(here))
    assert [row["rate_vph"] for row in rows] == [300.0, 100.0]
    assert rows[1]["vehicles"] < rows[0]["vehicles"]
    assert len(load_file(tracks)["step"]) > 100
