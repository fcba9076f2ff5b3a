"""Workers around a small environment and learner, in threads: rounds, lines, stops, boundaries, refusals."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
from small_world import SPEC, FakeEnv, FakeLearner

from opencda_marl.config import changes, config_hash, to_yaml
from opencda_marl.config_check import check
from opencda_marl.core.errors import CheckpointError, ConfigError, OpenCDAError, StorageError, WorkerError
from opencda_marl.core.events import EpisodeDone
from opencda_marl.core.run_folder import RunFolder, read_episodes, read_metrics
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import LearnerState
from opencda_marl.core.stopping import StopRequest
from opencda_marl.core.torchrun import Place, launched
from opencda_marl.crew import Crew, Start, joined, parted, resolve_workers, spawned, under_torchrun
from opencda_marl.journal import Done, Journal
from opencda_marl.member import Member
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.settings.run import RecordingSettings, RunSettings
from opencda_marl.settings.traffic import SimulatorSettings
from opencda_marl.train import run_loop

SETTINGS = RunSettings(
    seed=3,
    max_episodes=6,
    max_steps=100,
    decision_interval=10,
    checkpoint_every=4,
    workers=2,
    worker_timeout=20.0,
    learner=MappoSettings(n_steps=70),
    recording=RecordingSettings(tensorboard=False),
)

Prepare = Callable[[int, FakeEnv, FakeLearner, StopRequest], None]


def drive(path: Path, settings: RunSettings = SETTINGS, prepare: Prepare = lambda *_: None) -> tuple[Any, list[Any]]:
    """A run of two fakes; what happened to each, and the events."""
    store, heard = dist.HashStore(), []

    def one(rank: int) -> Any:
        stop, spans, learner = StopRequest(), Spans(), FakeLearner(replace(settings, seed=settings.seed + rank))
        env = FakeEnv(settings)
        prepare(rank, env, learner, stop)
        try:
            with closing(Crew(Place(rank, 2, rank, 2), store, spans, stop, settings, "127.0.0.1")) as crew:
                crew.begin()
                if rank:
                    member = Member(settings, learner, spans, crew, crew.receive().episodes)
                    run_loop(env, learner, member, stop, spans, crew)
                    return None if crew.over else crew.meet("stop", 0.0)
                with RunFolder.create(path) as folder:
                    folder.write_config(to_yaml(settings))
                    folder.write_run({"profile": None})
                    journal = Journal(folder, settings, SPEC, learner, spans, Done(), heard.append, crew)
                    crew.hand_out([Start(), Start()])
                    with closing(journal):
                        try:
                            run_loop(env, learner, journal, stop, spans, crew)
                        finally:
                            journal.save(judged=False)
                    return journal
        except OpenCDAError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, (0, 1))), heard


def test_workers_of_different_forms_are_refused_before_the_first_step() -> None:
    store = dist.HashStore()

    def one(rank: int, own: str) -> OpenCDAError | None:
        with closing(Crew(Place(rank, 2, rank, 2), store, Spans(), StopRequest(), SETTINGS, "127.0.0.1")) as crew:
            crew.begin()
            crew.agree({"update_passes": "torch (no C++ compiler: g++ not found)", "kernels": str(rank)})
            try:
                crew.agree({"update_passes": own, "kernels": str(rank)})
            except OpenCDAError as error:
                return error
            return None

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, (0, 1), ("c++", "torch (g++ failed)")))
    for error in found:
        assert isinstance(error, WorkerError)
        assert error.message == (
            "the workers compute updates in different forms: worker 0 in c++; worker 1 in torch (g++ failed)"
        )


def test_rounds_make_one_run(tmp_path: Path) -> None:
    (journal, _), heard = drive(tmp_path / "a")
    lines = read_episodes(tmp_path / "a")
    assert [line["episode"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["env_steps"] for line in lines] == [100, 200, 300, 400, 500, 600]
    assert [event.line["episode"] for event in heard if isinstance(event, EpisodeDone)] == [1, 2, 3, 4, 5, 6]
    assert journal.done.wall_s == pytest.approx(sum(line["wall_s"] for line in lines))
    assert lines[0]["ms_per_step"] == pytest.approx(10.0 * lines[0]["wall_s"])
    assert "wait" in lines[0]["spans"]
    # what each worker counts follows from its own budget of steps, and worker 0 writes down its own updates
    assert [line["training_step"] for line in lines[:2]] == [4, 4]
    metrics = read_metrics(tmp_path / "a")
    assert len(metrics) == 4
    assert [one["env_steps"] for one in metrics] == [140, 280, 440, 580]
    assert [one["done"] for one in metrics] == pytest.approx([n / 600 for n in (140, 280, 440, 580)])
    assert RunFolder.resume(tmp_path / "a").checkpoints.numbered() == [4, 6]


def test_the_traffic_is_that_of_one_worker(tmp_path: Path) -> None:
    """Episode k's traffic follows from (seed, k): whoever drives it meets the same."""
    drive(tmp_path / "two")
    lines = read_episodes(tmp_path / "two")
    for line in lines:
        env = FakeEnv(SETTINGS)
        step = env.reset(line["episode"])
        while not step.done:
            step = env.step(FakeLearner(SETTINGS).act(step.observation, explore=False))
        assert env.record().accounting.collided == line["collided"]


def test_a_wish_to_stop_is_everybodys(tmp_path: Path) -> None:
    """Worker 1 is asked in the middle of its second episode; the first round is what stays."""

    def prepare(rank: int, env: FakeEnv, learner: FakeLearner, stop: StopRequest) -> None:
        if rank:
            env.at_step = lambda episode, step: stop.ask() if episode == 4 and step == 50 else None

    (journal, member), _ = drive(tmp_path / "a", prepare=prepare)
    assert member == "stop"
    assert journal.done.episodes == 2
    state = RunFolder.resume(tmp_path / "a").checkpoints.load("latest").state
    assert len(state.values["workers"]) == 1


def test_a_worker_that_fails_leaves_the_last_boundary(tmp_path: Path) -> None:
    def prepare(rank: int, env: FakeEnv, learner: FakeLearner, stop: StopRequest) -> None:
        def fail(episode: int, step: int) -> None:
            if rank and episode == 4:
                raise OpenCDAError("the wheel came off")

        env.at_step = fail

    (lost, failed), _ = drive(tmp_path / "a", prepare=prepare)
    assert isinstance(lost, WorkerError)
    assert failed.message == "the wheel came off"
    assert [line["episode"] for line in read_episodes(tmp_path / "a")] == [1, 2]
    assert RunFolder.resume(tmp_path / "a").checkpoints.load("latest").extra["episodes"] == 2


def test_a_worker_whose_episode_is_over_joins_the_others_updates(tmp_path: Path) -> None:
    """Worker 1 is due once more than worker 0: nobody waits for ever."""

    def prepare(rank: int, env: FakeEnv, learner: FakeLearner, stop: StopRequest) -> None:
        learner.settings = replace(SETTINGS, learner=MappoSettings(n_steps=50 if rank else 1000))

    drive(tmp_path / "a", prepare=prepare)
    lines = read_episodes(tmp_path / "a")
    assert [line["updates_performed"] for line in lines] == [2, 2, 4, 4, 6, 6]


def test_a_round_is_never_cut(tmp_path: Path) -> None:
    drive(tmp_path / "a", replace(SETTINGS, max_episodes=3))
    assert len(read_episodes(tmp_path / "a")) == 4


def test_states_are_put_together_and_taken_apart() -> None:
    def state(rank: int) -> LearnerState:
        tensors = {
            "theta": np.arange(4.0),
            "rows": np.full((rank, 2), rank, np.float32),
            "zero": np.array([-0.0 if rank else 0.0]),
        }
        return LearnerState(tensors, {"rank": rank})

    states = [state(rank) for rank in range(3)]
    whole = joined(states)
    assert {name for name in whole.tensors if name.startswith("worker")} == {
        "worker1/rows", "worker2/rows", "worker1/zero", "worker2/zero"
    }  # fmt: skip
    again = parted(LearnerState(whole.tensors, json.loads(json.dumps(whole.values))), 3)
    for one, other in zip(states, again, strict=True):
        assert one.values == other.values
        assert {name: array.tobytes() for name, array in one.tensors.items()} == {
            name: array.tobytes() for name, array in other.tensors.items()
        }
    assert joined(states[:1]) is states[0]
    with pytest.raises(CheckpointError, match="that of 3 workers, but this run has 2"):
        parted(whole, 2)
    with pytest.raises(CheckpointError, match="that of 3 workers, but this run has 1"):
        parted(whole, 1)


def test_the_folder_where_they_meet_is_swept_should_its_owner_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("opencda_marl.crew.Child", lambda *_, **__: Mock(done=False))
    left = tmp_path / "opencda-marl-scratch-1-workers-x"  # as another run has left it
    left.mkdir()
    (left / ".opencda-marl-in-use").touch()
    crew = spawned(SETTINGS, "", folder=tmp_path / "logs", spans=Spans(), stop=StopRequest())
    (meeting,) = tmp_path.iterdir()
    assert meeting.name.startswith(f"opencda-marl-scratch-{os.getpid()}-workers-")
    crew.close()
    crew.close()
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_find_the_others_says_where_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[c10d] The client socket has timed out\nException raised from /pytorch/socket.cpp:1")

    monkeypatch.setattr("opencda_marl.crew.rendezvous", fail)
    monkeypatch.setenv("MASTER_ADDR", "far")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(WorkerError) as found:
        under_torchrun(Place(1, 2, 1, 2))
    assert found.value.message == "worker 1 of 2 does not reach the others at far:29500"


def test_a_store_that_is_gone_before_all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Mock()
    store.check.side_effect = RuntimeError("[socket.cpp:1] recvValue failed")
    crew = Crew(Place(1, 2, 1, 2), store, Spans(), StopRequest(), SETTINGS, None)
    with pytest.raises(WorkerError, match="worker 1 of 2 does not reach the others any more: one that") as found:
        crew.begin()
    assert "socket.cpp" not in str(found.value)


def test_how_many_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = replace(SETTINGS, workers="auto", learner=MappoSettings())
    for there, found in ((1, 1), (2, 2), (4, 4), (64, 8)):  # 4800 steps between updates: 600 for each of eight
        monkeypatch.setattr("opencda_marl.crew.cores", lambda there=there: there)
        assert resolve_workers(auto, None) == found
        assert resolve_workers(replace(auto, threads=2), None) == max(1, min(there // 2, 8))
    assert resolve_workers(replace(auto, algorithm="masac", learner=MasacSettings()), None) == 1
    assert resolve_workers(replace(auto, simulator=SimulatorSettings(gui=True)), None) == 1
    assert resolve_workers(auto, Place(0, 3, 0, 3)) == 3
    assert resolve_workers(SETTINGS, Place(0, 2, 0, 2)) == 2
    with pytest.raises(ConfigError, match="workers is 2, but 3 processes were started"):
        resolve_workers(SETTINGS, Place(0, 3, 0, 3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (replace(SETTINGS, algorithm="masac", learner=MasacSettings()), "masac learns in one"),
        (replace(SETTINGS, workers=8), "too little for each"),
        (
            replace(SETTINGS, simulator=SimulatorSettings(gui=True, backend="traci")),
            "simulator.gui shows one simulation",
        ),
    ],
)
def test_what_is_refused(settings: RunSettings, words: str) -> None:
    check(SETTINGS)
    with pytest.raises(ConfigError, match=words):
        check(settings)


def test_the_number_is_part_of_a_runs_identity_and_patience_is_not() -> None:
    other = replace(SETTINGS, workers=3)
    assert changes(SETTINGS, other) == ["workers"]
    assert config_hash(SETTINGS) != config_hash(other)
    patient = replace(SETTINGS, worker_timeout=9.0)
    assert changes(SETTINGS, patient) == []
    assert config_hash(SETTINGS) == config_hash(patient)


def test_what_torchrun_says() -> None:
    told = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    assert launched({**told, "LOCAL_WORLD_SIZE": "2"}) == Place(3, 4, 1, 2)
    assert launched({}) is None
    assert launched({"RANK": "3"}) is None
    assert launched({**told, "RANK": "0", "WORLD_SIZE": "1"}) is None
    for wrong in ({"RANK": "x"}, {"RANK": "4"}):
        with pytest.raises(ConfigError):
            launched({**told, **wrong})


def test_workers_that_cannot_meet_say_where_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under TMPDIR, in torch's own words."""

    def full(*_: object) -> None:
        raise RuntimeError("write: No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("opencda_marl.crew.FileStore.set", full)
    with pytest.raises(StorageError, match="cannot meet in a temporary folder: write: No space left") as caught:
        spawned(SETTINGS, "", folder=tmp_path / "logs", spans=Spans(), stop=StopRequest())
    assert "TMPDIR" in str(caught.value.fix)
    assert list(tmp_path.iterdir()) == []
