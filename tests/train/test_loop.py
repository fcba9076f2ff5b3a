"""The training loop around a small environment and learner: budgets, checkpoints, resume, stops, accidents."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_world import FakeEnv, FakeLearner, FakeSimulator

from opencda_marl import train as module
from opencda_marl.core.checkpoint import Checkpoints, read_checkpoint, write_checkpoint
from opencda_marl.core.errors import (
    CheckpointError,
    ConfigError,
    CudaGraphCaptureError,
    DeviceError,
    Interrupted,
    NotFiniteError,
    OpenCDAError,
    RecycleError,
    SimulatorError,
    StorageError,
)
from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Finished, Note, Started, TrainEvent
from opencda_marl.core.run_folder import RunFolder, read_config, read_episodes, read_metrics, read_run, read_status
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.stopping import StopRequest
from opencda_marl.evaluate import find_policy
from opencda_marl.journal import TIMING_FIELDS, Journal
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.run import EvaluationSettings, RecordingSettings, RunSettings
from opencda_marl.tools.runs import removable, remove
from opencda_marl.train import train

SETTINGS = RunSettings(
    seed=3,
    max_episodes=6,
    max_steps=100,
    decision_interval=10,
    checkpoint_every=2,
    learner=MappoSettings(n_steps=130),  # updates fall inside episodes, rows wait across boundaries
)


class Made:
    """What the last `train` was made of."""

    env: FakeEnv
    learner: FakeLearner

    def __init__(self) -> None:
        self.prepare: Callable[[FakeEnv, FakeLearner], None] = lambda _env, _learner: None
        self.notes: tuple[str, ...] = ()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    made = Made()

    def make_simulator(settings: RunSettings, *_: object, **__: object) -> FakeSimulator:
        return FakeSimulator(SimulatorInfo("fake", {"fake": "1"}, 0.05, 8, made.notes))

    def make_env(settings: RunSettings, **_: object) -> FakeEnv:
        made.env = FakeEnv(settings)
        return made.env

    def make_learner(settings: RunSettings, *_: object, **__: object) -> FakeLearner:
        made.learner = FakeLearner(settings)
        made.prepare(made.env, made.learner)
        return made.learner

    monkeypatch.setattr(module, "kernels_are_kept", lambda: True)
    monkeypatch.setattr(module, "warm_up", lambda *_: None)
    monkeypatch.setattr(module, "make_simulator", make_simulator)
    monkeypatch.setattr(module, "make_env", make_env)
    monkeypatch.setattr(module, "make_learner", make_learner)
    return made


def _lines(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMING_FIELDS} for line in read_episodes(run)]


def _same(left: Path, right: Path) -> bool:
    """Equal lines, metrics, weights, rows, counters, generators, best."""
    one, other = (Checkpoints(run / "checkpoints").load() for run in (left, right))
    strip = [{key: value for key, value in found.extra.items() if key not in TIMING_FIELDS} for found in (one, other)]
    return (
        _lines(left) == _lines(right)
        and read_metrics(left) == read_metrics(right)
        and one.state.values == other.state.values
        and all(one.state.tensors[name].tobytes() == other.state.tensors[name].tobytes() for name in one.state.tensors)
        and strip[0] == strip[1]
    )


def test_a_world_that_is_loaded_anew_invalidates_what_the_learner_compiled(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "once")
    assert made.learner.invalidated == 0

    def reload(env: FakeEnv, _learner: FakeLearner) -> None:
        env.reload_every = 2  # before episodes 2, 4 and 6

    made.prepare = reload
    train(SETTINGS, out=tmp_path / "anew")
    assert made.learner.invalidated == 3


def test_a_server_that_is_to_be_started_again_ends_the_run_saved(tmp_path: Path, made: Made) -> None:
    def grow(env: FakeEnv, _learner: FakeLearner) -> None:
        def refuse(episode: int, _step: int) -> None:
            if episode == 4:
                raise RecycleError("the server has grown", fix="restart it")

        env.at_step = refuse

    made.prepare = grow
    with pytest.raises(RecycleError, match=r"(?s)grown.*restart it.*--resume") as caught:
        train(SETTINGS, out=tmp_path / "run")
    assert caught.value.exit_code == 75
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 3


def test_a_run_from_beginning_to_end(tmp_path: Path, made: Made) -> None:
    made.notes = ("TraCI is slow",)
    heard: list[Any] = []
    result = train(SETTINGS, out=tmp_path / "run", listener=heard.append, profile="a/b")
    assert result.run_dir == tmp_path / "run"
    assert result.last == read_episodes(result.run_dir)[-1]
    assert [line["episode"] for line in read_episodes(result.run_dir)] == [1, 2, 3, 4, 5, 6]
    line = result.last
    for name in (
        *("episode", "seed", "steps", "return", "scheduled", "waiting", "running", "arrived", "collided", "removed"),
        *("training_step", "updates_performed", "buffer_size", "wall_s", "ms_per_step", "spans"),
    ):
        assert name in line
    assert line["env_steps"] == 600
    assert line["updates_performed"] == 4  # at steps 130, 260, 390, 520
    assert line["scheduled"] == line["waiting"] + line["running"] + line["arrived"] + line["collided"] + line["removed"]
    assert [line["env_steps"] for line in read_metrics(result.run_dir)] == [130, 260, 390, 520]
    # the schedule hears the share of the budget that is done
    assert [line["done"] for line in read_metrics(result.run_dir)] == pytest.approx(
        [n / 600 for n in (130, 260, 390, 520)]
    )
    assert Checkpoints(result.run_dir / "checkpoints").numbered()[-3:] == [2, 4, 6]
    assert made.env.closed == made.learner.closed == 1
    status = read_status(result.run_dir)
    assert (status["phase"], status["episodes"]) == ("finished", 6)
    assert read_run(result.run_dir)["profile"] == "a/b"
    assert read_run(result.run_dir)["init"]["backend"] == "fake"
    kinds = [type(event) for event in heard]
    assert kinds[0] is Started
    assert kinds[-1] is Finished
    assert kinds.count(EpisodeDone) == 6
    assert kinds.count(Checkpointed) == 3
    assert [event.text for event in heard if isinstance(event, Note)] == ["TraCI is slow"]
    assert heard[-1].summary["run_dir"] == str(tmp_path / "run")
    last = [event for event in heard if isinstance(event, EpisodeDone)][-1]
    assert (last.progress, last.eta_s) == (1.0, 0.0)


def test_two_runs_of_one_seed_are_equal_and_of_two_are_not(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "a")
    train(SETTINGS, out=tmp_path / "b")
    train(replace(SETTINGS, seed=4), out=tmp_path / "c")
    assert _same(tmp_path / "a", tmp_path / "b")
    assert not _same(tmp_path / "a", tmp_path / "c")


def test_a_listener_cannot_change_anything(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "a", listener=lambda event: np.random.seed(1))  # noqa: NPY002 - the point
    train(replace(SETTINGS, recording=RecordingSettings(spans=False, tensorboard=False)), out=tmp_path / "b")
    assert _lines(tmp_path / "a") == _lines(tmp_path / "b")


class _Killed(BaseException):
    """As abrupt as a SIGKILL for what is on the disk: nothing of ours catches it."""


@pytest.mark.parametrize("episode", [1, 2, 3, 5, 6])
def test_killed_and_resumed_is_the_same_run(
    tmp_path: Path, made: Made, episode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SETTINGS, out=tmp_path / "whole")

    def kill(at: int, step: int) -> None:
        if at == episode and step == 70:
            patch.setattr(Journal, "save", lambda *_, **__: None)  # whoever is killed saves nothing
            raise _Killed

    made.prepare = lambda env, _learner: setattr(env, "at_step", kill)
    with monkeypatch.context() as patch, pytest.raises(_Killed):
        train(SETTINGS, out=tmp_path / "run")
    made.prepare = lambda _env, _learner: None
    before = len(read_episodes(tmp_path / "run"))
    assert before == episode - 1  # the lines are there, even those beyond the checkpoint
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")
    # a run that was killed before its first checkpoint began at its beginning: nothing was resumed
    assert [entry["episode"] for entry in read_run(tmp_path / "run")["resumed"]] == [(episode - 1) // 2 * 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_the_unfinished_episode_only(tmp_path: Path, made: Made, number: int) -> None:
    train(SETTINGS, out=tmp_path / "whole")

    def send(at: int, step: int) -> None:
        if at == 4 and step == 50:
            os.kill(os.getpid(), number)

    made.prepare = lambda env, _learner: setattr(env, "at_step", send)
    with pytest.raises(Interrupted, match=r"60 steps of episode 4 are dropped; all 3 finished episodes") as caught:
        train(SETTINGS, out=tmp_path / "run")
    assert caught.value.exit_code == 130
    assert f"--resume {tmp_path / 'run'}" in str(caught.value.fix)
    made.prepare = lambda _env, _learner: None
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 3
    status = read_status(tmp_path / "run")
    assert (status["phase"], status["exit_code"]) == ("interrupted", 130)
    assert (made.env.closed, made.learner.closed) == (1, 1)
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")


def test_stopped_in_the_first_episode(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "whole")
    made.prepare = lambda env, _: setattr(env, "at_step", lambda _e, _s: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match="20 steps of episode 1"):
        train(SETTINGS, out=tmp_path / "run")
    made.prepare = lambda _env, _learner: None
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")


def test_a_raised_budget_goes_on(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    result = train(replace(SETTINGS, max_episodes=9), resume=tmp_path / "run")
    assert [line["episode"] for line in read_episodes(tmp_path / "run")] == list(range(1, 10))
    assert "max_episodes: 9" in read_config(tmp_path / "run")
    again = train(resume=tmp_path / "run")  # nothing left to do
    assert again.last == result.last
    assert len(read_episodes(tmp_path / "run")) == 9


def test_only_budgets_may_change(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"learner\.n_steps, seed"):
        train(replace(SETTINGS, seed=9, learner=MappoSettings(n_steps=131)), resume=tmp_path / "run")
    with pytest.raises(ConfigError, match="budget"):
        train(replace(SETTINGS, max_episodes=None), resume=tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


def test_a_run_needs_a_budget_and_settings(tmp_path: Path, made: Made) -> None:
    with pytest.raises(ConfigError, match="budget"):
        train(replace(SETTINGS, max_episodes=None), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="no settings"):
        train(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("budget", "episodes"), [({"max_env_steps": 250}, 3), ({"max_env_steps": 300}, 3), ({"max_minutes": 1e-9}, 1)]
)
def test_budgets_end_with_their_episode(tmp_path: Path, made: Made, budget: dict[str, Any], episodes: int) -> None:
    train(replace(SETTINGS, **budget), out=tmp_path / "run")
    assert len(read_episodes(tmp_path / "run")) == episodes


def test_minutes_add_up_over_resumes(tmp_path: Path, made: Made) -> None:
    settings = replace(SETTINGS, max_episodes=None, max_minutes=0.004)  # 0.24 s
    slow = 0.0

    def count(at: int, step: int) -> None:
        if at == 3 and step == 50 and slow:
            raise _Killed

    made.prepare = lambda env, _learner: setattr(env, "at_step", count)
    train(settings, out=tmp_path / "run")
    found = Checkpoints(tmp_path / "run" / "checkpoints").load().extra
    assert found["wall_s"] >= 0.24
    assert found["wall_s"] == pytest.approx(sum(line["wall_s"] for line in read_episodes(tmp_path / "run")))
    assert "clock" in read_run(tmp_path / "run")["identity"]
    done = len(read_episodes(tmp_path / "run"))
    train(resume=tmp_path / "run")
    assert len(read_episodes(tmp_path / "run")) == done


@pytest.mark.parametrize(("draw", "asked", "ramp"), [("range", 0, 0), ("range", 24, 24), ("choice", 24, 0)])
def test_best_is_the_highest_success_of_the_last_twenty(
    tmp_path: Path, made: Made, draw: Literal["range", "choice"], asked: int, ramp: int
) -> None:
    settings = replace(SETTINGS, seed=1, max_episodes=50, keep=50)
    demand = replace(settings.demand, rate_vph=[300.0, 301.0], ramp_from=300.0, rate_draw=draw, ramp_episodes=asked)
    settings = replace(settings, demand=demand)
    result = train(settings, out=tmp_path / "run")
    lines = read_episodes(result.run_dir)
    chosen = {}
    for thin in (True, False):  # may a window within the ramp, whose traffic is thinner, win?
        expected, highest = 0, (0, -1.0)
        for episode in range(2, 51, 2):
            window = lines[max(0, episode - 20) : episode]
            score = sum(line["arrived"] for line in window) / sum(line["vehicles"] for line in window)
            rank = int(len(window) == 20) + int(not thin and episode - 20 >= ramp)
            if (rank, score) >= highest:
                expected, highest = episode, (rank, score)
        chosen[thin] = expected, highest
    assert 0 < chosen[True][0] < 50  # neither the first nor the last: the test says something
    assert ramp == 0 or chosen[True][0] < chosen[False][0]
    expected, highest = chosen[ramp == 0]
    found = Checkpoints(result.run_dir / "checkpoints").load("best")
    assert found.extra["episodes"] == expected
    assert found.extra["best"] == [*highest, expected]


def test_init_from_takes_the_policy_only(tmp_path: Path, made: Made) -> None:
    first = train(SETTINGS, out=tmp_path / "first")
    best = read_checkpoint(first.run_dir / "checkpoints" / "best").state.tensors["weights"]
    seen: list[Any] = []
    made.prepare = lambda env, learner: setattr(
        env, "at_step", lambda at, step: seen.append((learner.weights.copy(), learner.counters.updates_performed))
    )
    train(SETTINGS, out=tmp_path / "second", init_from=first.run_dir)
    assert (seen[0][0] == best).all()
    assert seen[0][1] == 0
    # killed before its first checkpoint, it starts from there again
    made.prepare = lambda env, _learner: setattr(env, "at_step", _kill_at(1))
    with pytest.raises(_Killed):
        train(SETTINGS, out=tmp_path / "third", init_from=first.run_dir)
    made.prepare = lambda _env, _learner: None
    train(resume=tmp_path / "third")
    assert _same(tmp_path / "second", tmp_path / "third")


def _kill_at(episode: int) -> Callable[[int, int], None]:
    def kill(at: int, step: int) -> None:
        if at == episode and step == 50:
            raise _Killed

    return kill


def test_init_from_something_foreign(tmp_path: Path, made: Made) -> None:
    with pytest.raises(CheckpointError):
        train(SETTINGS, out=tmp_path / "run", init_from=tmp_path / "none")
    assert not (tmp_path / "run").exists()
    state = FakeLearner(SETTINGS).state()
    write_checkpoint(tmp_path / "other", state, {"observation": ["full", 1]})
    with pytest.raises(CheckpointError, match="observation"):
        train(SETTINGS, out=tmp_path / "run", init_from=tmp_path / "other")


def test_a_dying_simulator_loses_nothing_that_was_finished(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "whole")

    def die(at: int, step: int) -> None:
        if at == 6 and step == 50:
            raise SimulatorError("SUMO is gone", fix="look at its log")

    made.prepare = lambda env, _learner: setattr(env, "at_step", die)
    with pytest.raises(SimulatorError, match="SUMO is gone") as caught:
        train(SETTINGS, out=tmp_path / "run")
    assert "--resume" in str(caught.value.fix)
    assert "look at its log" in str(caught.value.fix)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 5
    status = read_status(tmp_path / "run")
    assert (status["phase"], status["exit_code"]) == ("failed", 10)
    made.prepare = lambda _env, _learner: None
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")


def test_what_is_not_finite_is_dumped(tmp_path: Path, made: Made) -> None:
    def fail(count: int) -> None:
        if count == 2:  # in episode 4, at step 390
            raise NotFiniteError("policy_loss is nan", batch={"returns": np.array([1.0, np.nan])})

    made.prepare = lambda _env, learner: setattr(learner, "at_update", fail)
    with pytest.raises(NotFiniteError, match=r"policy_loss is nan \(episode 4, step 90\)") as caught:
        train(SETTINGS, out=tmp_path / "run")
    assert str(tmp_path / "run" / "checkpoints" / "episode_2") in caught.value.message
    dumped = tmp_path / "run" / "not_finite_episode_4.safetensors"
    assert str(dumped) in caught.value.message
    assert np.isnan(load_file(dumped)["returns"][1])
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 2
    assert read_status(tmp_path / "run")["exit_code"] == 30


@pytest.mark.parametrize("update", [0, 2])  # in episodes 2 and 4
def test_a_failed_capture_saves_nothing_and_is_gone_on_from_what_was_saved_before(
    tmp_path: Path, made: Made, update: int
) -> None:
    def fail(count: int) -> None:
        if count == update:
            raise CudaGraphCaptureError("the update could not be captured", fix="learner.update_mode=eager")

    train(SETTINGS, out=tmp_path / "whole")
    made.prepare = lambda _env, learner: setattr(learner, "at_update", fail)
    run = tmp_path / "run"
    with pytest.raises(CudaGraphCaptureError, match="could not be captured"):
        train(SETTINGS, out=run)
    saved = Checkpoints(run / "checkpoints").numbered()
    assert saved == ([2] if update else [])  # no boundary beyond the last regular checkpoint
    assert read_status(run)["exit_code"] == 32
    made.prepare = lambda _env, _learner: None
    train(resume=run)
    assert _same(tmp_path / "whole", run)


def test_a_learner_that_never_acts_cannot_look_like_one_that_does(tmp_path: Path, made: Made) -> None:
    made.prepare = lambda _env, learner: setattr(learner, "acts", False)
    with pytest.raises(OpenCDAError, match="it never acted"):
        train(SETTINGS, out=tmp_path / "run")
    assert not read_episodes(tmp_path / "run") if (tmp_path / "run" / "episodes.jsonl").exists() else True


def test_a_disk_that_fills_up(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(at: int, step: int) -> None:
        if at == 4:
            monkeypatch.setattr(os, "fsync", _no_room)

    made.prepare = lambda env, _learner: setattr(env, "at_step", full)
    with pytest.raises(StorageError, match="the disk is full"):
        train(SETTINGS, out=tmp_path / "run")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 2


def _no_room(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_run_that_is_being_written_is_not_resumed(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    with RunFolder.resume(tmp_path / "run"), pytest.raises(CheckpointError, match="in use by process"):
        train(resume=tmp_path / "run")


def test_lines_that_are_missing_are_not_made_up(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    lines = (tmp_path / "run" / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / "episodes.jsonl").write_bytes(b"".join(lines[:4]))
    with pytest.raises(CheckpointError, match="has 4 lines, but its checkpoint is that of episode 6"):
        train(replace(SETTINGS, max_episodes=8), resume=tmp_path / "run")


def test_trajectories_of_every_nth_and_of_crashes(tmp_path: Path, made: Made) -> None:
    every = replace(SETTINGS, recording=RecordingSettings(trajectories_every=3))
    train(every, out=tmp_path / "every")
    assert sorted(path.name for path in (tmp_path / "every" / "traffic").iterdir()) == [
        "episode_3.safetensors",
        "episode_6.safetensors",
    ]
    crashes = replace(SETTINGS, max_episodes=12, recording=RecordingSettings(crashes=True))
    train(crashes, out=tmp_path / "crashes")
    crashed = {f"episode_{line['episode']}" for line in read_episodes(tmp_path / "crashes") if line["collided"]}
    assert 0 < len(crashed) < 12
    assert {path.stem for path in (tmp_path / "crashes" / "traffic").iterdir()} == crashed


def test_what_auto_meant_is_kept(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """`update_mode: auto` is decided by the first update, noted once, and read from run.json by a resumed run."""
    settings = replace(SETTINGS, learner=MappoSettings(n_steps=130, update_mode="auto"))

    def describe(learner: FakeLearner) -> dict[str, Any]:
        measured = learner.counters.updates_performed > 0
        return {"update_mode": "compiled", "note": "compiled: 2 ms"} if measured else {"update_mode": "auto"}

    monkeypatch.setattr(FakeLearner, "describe", describe)
    monkeypatch.setattr("opencda_marl.journal._SLOW", -1.0)  # any update lasts long enough to be told of
    phases: list[str] = []
    notes: list[str] = []

    def hear(event: TrainEvent) -> None:
        phases.extend([event.status["phase"]] if isinstance(event, Beat) else [])
        notes.extend([event.text] if isinstance(event, Note) else [])

    train(settings, out=tmp_path / "run", listener=hear)
    assert made.learner.settings.learner.update_mode == "auto"
    assert read_run(tmp_path / "run")["init"]["update_mode"] == "compiled"
    assert notes == ["compiled: 2 ms"]
    assert phases.count("compiling") == 1
    assert phases.index("compiling") < phases.index("updating")
    train(replace(settings, max_episodes=7), resume=tmp_path / "run")
    assert made.learner.settings.learner.update_mode == "compiled"
    assert "update_mode: auto" in read_config(tmp_path / "run")


def test_forms_are_kept_at_each_start_and_a_change_is_said(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a compiler that was there is missing, and back again."""
    passes, notes = "c++", []
    monkeypatch.setattr(FakeLearner, "describe", lambda _learner: {"update_passes": passes})

    def hear(event: TrainEvent) -> None:
        notes.extend([event.text] if isinstance(event, Note) else [])

    train(SETTINGS, out=tmp_path / "run", listener=hear)
    train(replace(SETTINGS, max_episodes=7), resume=tmp_path / "run", listener=hear)
    assert notes == []
    passes = "torch (no C++ compiler: g++ not found)"
    train(replace(SETTINGS, max_episodes=8), resume=tmp_path / "run", listener=hear)
    (said,) = notes
    assert said.startswith("computed in another form than before (see run.json): update_passes was c++, is torch;")
    facts = read_run(tmp_path / "run")
    assert facts["forms"] == {"update_passes": "c++"}
    assert [entry["forms"]["update_passes"] for entry in facts["resumed"]] == ["c++", passes]


def test_a_library_that_is_compiled_at_each_start_is_spoken_of(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opencda_marl.train.why_not_kept", lambda: "compiled C++ cannot be kept in /x")
    notes: list[str] = []
    train(SETTINGS, out=tmp_path / "run", listener=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    assert notes == ["compiled C++ cannot be kept in /x"]


def test_a_stop_while_the_last_evaluation_is_awaited(tmp_path: Path, made: Made) -> None:
    """The budget is used up and saved; whoever pressed Ctrl-C does not want a table now."""

    def stop(event: TrainEvent) -> None:
        if isinstance(event, EpisodeDone) and event.progress == 1.0:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="training was done, and all 6 episodes are saved"):
        train(SETTINGS, out=tmp_path / "run", listener=stop)
    assert train(resume=tmp_path / "run").last["episode"] == 6
    assert read_status(tmp_path / "run")["phase"] == "finished"


def test_time_is_accounted_for(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    for line in read_episodes(tmp_path / "run"):
        assert 0 < sum(line["spans"].values()) <= line["wall_s"]
        assert line["ms_per_step"] == pytest.approx(1e3 * line["wall_s"] / line["steps"])


_REPORTED = replace(SETTINGS, evaluation=EvaluationSettings(final=True))


def test_the_run_is_not_over_before_its_report_is(tmp_path: Path, made: Made) -> None:
    """Somebody who cleans up meanwhile must find it at work: phase and lock."""
    seen: list[tuple[str, list[dict[str, Any]]]] = []

    def report(folder: RunFolder, _stop: StopRequest) -> None:
        seen.append((read_status(folder.path)["phase"], removable(tmp_path, keep=0)))
        with pytest.raises(CheckpointError, match="is running"):
            remove(folder.path)

    train(_REPORTED, out=tmp_path / "run", report=report)
    assert seen == [("evaluating", [])]
    assert read_status(tmp_path / "run")["phase"] == "finished"
    train(SETTINGS, out=tmp_path / "other", report=report)
    assert len(seen) == 1


def test_a_report_that_fails_is_not_finished(tmp_path: Path, made: Made) -> None:
    def report(_folder: RunFolder, _stop: StopRequest) -> None:
        raise StorageError("the disk is full")

    with pytest.raises(StorageError):
        train(_REPORTED, out=tmp_path / "run", report=report)
    assert read_status(tmp_path / "run")["phase"] == "failed"


def _notes(**wanted: Any) -> list[str]:
    notes: list[str] = []
    train(listener=lambda event: notes.append(event.text) if isinstance(event, Note) else None, **wanted)
    return notes


def test_a_run_that_the_clock_ended_says_so(tmp_path: Path, made: Made) -> None:
    run = tmp_path / "run"
    settings = replace(SETTINGS, max_minutes=1e-9)
    (note,) = _notes(settings=settings, out=run)
    assert note.startswith("stopped by max_minutes=1e-09 after 1 of 6 episodes; to train longer: opencda-marl run ")
    assert f" --resume {run} " in note
    assert note.endswith(" max_minutes=1")
    assert "bit" not in read_run(run)["identity"]
    assert "1 of 6 episodes" in read_run(run)["identity"]
    (note,) = _notes(resume=run)
    assert note.startswith("nothing was trained, the budget is used up: stopped by max_minutes=1e-09 after 1 of ")
    assert _notes(settings=replace(settings, max_minutes=9.0), resume=run) == []
    assert "bit for bit, as far as max_minutes" in read_run(run)["identity"]
    (note,) = _notes(settings=replace(settings, max_episodes=None, max_env_steps=300), out=tmp_path / "steps")
    assert "after 100 of 300 steps; to train longer" in note


def test_what_is_to_be_known_of_the_end_stands_under_the_table_again(tmp_path: Path, made: Made) -> None:
    """The table takes minutes and fills the screen: what was said before it is gone from sight."""
    heard: list[str] = []

    def listen(event: TrainEvent) -> None:
        heard.extend([event.text] if isinstance(event, Note) else [])

    settings = replace(_REPORTED, max_minutes=1e-9)
    train(settings, out=tmp_path / "run", listener=listen, report=lambda *_: heard.append("table"))
    assert len(heard) == 3
    assert heard[0].startswith("stopped by max_minutes=1e-09 after 1 of 6 episodes")
    assert heard[1:] == ["table", heard[0]]
    assert heard[0] in (tmp_path / "run/log.txt").read_text().splitlines()[-1]


@pytest.mark.parametrize("episode", [4, 6])
def test_an_episode_that_is_over_when_the_signal_comes_is_recorded(tmp_path: Path, made: Made, episode: int) -> None:
    train(SETTINGS, out=tmp_path / "whole")

    def send(at: int, step: int) -> None:
        if at == episode and step == 90:  # the last decision of a hundred steps
            os.kill(os.getpid(), signal.SIGINT)

    made.prepare = lambda env, _learner: setattr(env, "at_step", send)
    with pytest.raises(Interrupted, match="nothing is lost" if episode < 6 else "training was done"):
        train(SETTINGS, out=tmp_path / "run")
    assert [line["episode"] for line in read_episodes(tmp_path / "run")] == list(range(1, episode + 1))
    made.prepare = lambda _env, _learner: None
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")


def test_time_left_is_told_from_the_first_update_on(tmp_path: Path, made: Made) -> None:
    told: list[bool] = []

    def hear(event: TrainEvent) -> None:
        told.extend([event.eta_s is not None] if isinstance(event, EpisodeDone) else [])

    train(SETTINGS, out=tmp_path / "run", listener=hear)
    assert told == [False, True, True, True, True, True]  # the first update is made at step 130, in episode 2


def test_a_budget_that_is_used_up_is_said(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    (note,) = _notes(settings=replace(SETTINGS, max_episodes=1), resume=tmp_path / "run")
    assert note.startswith("nothing was trained, the budget is used up: 6 episodes; to train longer: ")
    assert note.endswith(" max_episodes=12")


def test_the_log_holds_what_was_said(tmp_path: Path, made: Made) -> None:
    made.notes = ("TraCI is slow",)
    train(SETTINGS, out=tmp_path / "run")
    said = [line.split("  ", 1)[1] for line in (tmp_path / "run/log.txt").read_text().splitlines()]
    starts = ["run: ", "init: algorithm=mappo", "plan: 6 ", "note: TraCI", "episode 1  ", "episode 6  ", "trained: 6 "]
    assert len(said) == len(starts)
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True)), said
    assert not any("{" in line for line in said)


def test_whatever_fails_the_last_boundary_is_saved(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "whole")

    def die(at: int, step: int) -> None:
        if at == 6 and step == 50:
            raise ZeroDivisionError

    made.prepare = lambda env, _learner: setattr(env, "at_step", die)
    with pytest.raises(ZeroDivisionError):
        train(SETTINGS, out=tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 5
    made.prepare = lambda _env, _learner: None
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")


def test_a_line_that_cannot_be_written_is_no_part_of_what_is_saved(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(SETTINGS, out=tmp_path / "whole")
    write = RunFolder.episode

    def refuse(folder: RunFolder, line: dict[str, Any]) -> None:
        if line["episode"] == 4:
            raise StorageError("the disk is full")
        write(folder, line)

    monkeypatch.setattr(RunFolder, "episode", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        train(SETTINGS, out=tmp_path / "run")
    monkeypatch.setattr(RunFolder, "episode", write)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().extra["episodes"] == 3
    train(resume=tmp_path / "run")
    assert _same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_start_leaves_nothing_in_the_way(tmp_path: Path, made: Made, there: bool) -> None:
    def refuse(_env: FakeEnv, _learner: FakeLearner) -> None:
        raise DeviceError("there is no such device")

    out = tmp_path / "run"
    if there:
        out.mkdir()
    made.prepare = refuse
    with pytest.raises(DeviceError):
        train(SETTINGS, out=out)
    assert out.exists() == there
    made.prepare = lambda _env, _learner: None
    train(SETTINGS, out=out)


def test_a_run_json_without_its_fields_is_broken(tmp_path: Path, made: Made) -> None:
    train(SETTINGS, out=tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        train(resume=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        find_policy(tmp_path / "run")
