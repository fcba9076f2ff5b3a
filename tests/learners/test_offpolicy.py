"""The plumbing around an algorithm with a replay: when it acts at random, when it learns, what it keeps."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from toy_world import BARE, SPEC, World

from opencda_marl.core.errors import CheckpointError, DeviceError, NotFiniteError, OutOfMemoryError
from opencda_marl.core.segments import Segment, materialise
from opencda_marl.core.spec import LearnerState, ObservationSpec
from opencda_marl.learners import replay as replay_module
from opencda_marl.learners.masac import METRICS
from opencda_marl.settings.learning import PreferenceSettings

ALGORITHMS = ("masac", "pcmasac")


def bits(state: LearnerState) -> tuple[dict[str, bytes], str, dict[str, bytes]]:
    """Everything, however the rows are cut into pieces."""
    rows = {name: column.tobytes() for name, column in materialise(state.segments).items()}
    tensors = {name: array.tobytes() for name, array in state.tensors.items()}
    return tensors, json.dumps(state.values, sort_keys=True), rows


def alone(state: LearnerState) -> LearnerState:
    """As a checkpoint gives it back: through JSON, nothing shared."""
    segments = [
        Segment(s.first, s.last, {name: column.copy() for name, column in s.read().items()}) for s in state.segments
    ]
    tensors = {name: array.copy() for name, array in state.tensors.items()}
    return LearnerState(tensors, json.loads(json.dumps(state.values)), segments)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("encoder", "spec", "own"),
    [
        ("deepsets", SPEC, {}),
        ("attention", SPEC, {"ego_hidden": [8]}),
        ("lstm", SPEC, {}),
        ("lstm", SPEC, {"train_context_encoder": True}),
        ("deepsets", SPEC, {"train_context_encoder": False, "max_grad_norm": 0.5}),
        ("deepsets", BARE, {"alpha": 0.0}),
    ],
)
def test_every_combination_learns_without_complaint(
    algorithm: str, encoder: str, spec: ObservationSpec, own: dict[str, object]
) -> None:
    learner = build(small(algorithm, encoder, **own), spec=spec)
    before = learner.state().tensors
    found = drive(learner, World(1, spec=spec, births=0.5), 5)
    after = learner.state().tensors
    assert len(found) >= 20
    assert (before["theta"] != after["theta"]).mean() > 0.8
    assert (before["target"] != after["target"]).mean() > 0.8
    assert (before["encoder"] == after["encoder"]).all()
    assert np.isfinite(after["measured"]).all()
    assert after["measured"].shape == (learner.counters.training_step, len(METRICS))
    json.dumps(learner.describe())


class Clocked:
    """A learner driven step by step, with an account of what ought to have happened."""

    def __init__(self, seed: int = 2, **own: Any) -> None:
        self.learner = build(small("masac", "deepsets", **own))
        self.own = self.learner._own
        self.world = World(seed, births=0.5)
        self.steps = 0  # env steps since learning began
        self.updates = 0

    def drive(self, episodes: int) -> None:
        learner = self.learner
        for _ in range(episodes):
            step = self.world.reset()
            while not step.done:
                seen = step.observation
                action = learner.act(seen, explore=True)
                step = self.world.step(action)
                learner.store(seen, action, step)
                decisions = sum(len(story) for story in self.world.stories.values())
                if decisions >= self.own.learning_starts and learner._replay.usable >= self.own.batch_size:
                    self.steps += step.steps
                before = learner.counters.training_step
                if learner.ready(step):
                    learner.update(step)
                    self.updates += 1
                    assert learner.counters.training_step > before
                assert learner.counters.training_step == int(self.steps * self.own.updates_per_step + 1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0, 2.5])
def test_so_many_gradient_steps_per_env_step(rate: float) -> None:
    course = Clocked(updates_per_step=rate, hidden=[4], batch_size=4)
    course.drive(8 if rate < 1 else 4)
    counters = course.learner.counters
    assert course.steps > 150
    assert counters.training_step == int(rate * course.steps + 1e-6) > 20
    assert counters.updates_performed == course.updates <= counters.training_step
    if rate == 0.1:
        assert counters.updates_performed == counters.training_step  # one at a time
    decisions = sum(len(story) for story in course.world.stories.values())
    finals = sum(story[-1].truncated for story in course.world.stories.values())
    assert counters.buffer_size == min(1000, decisions + finals)


@pytest.mark.parametrize("rate", [0.1, 0.3, 1 / 3, 0.7])
def test_nothing_is_lost_to_rounding_in_a_long_run(rate: float) -> None:
    learner = build(small("masac", updates_per_step=rate))
    done, owed = 0, 0.0
    for _ in range(200_000):
        owed += rate
        learner._owed = owed
        if learner.ready(None):
            due = int(learner._owed + 1e-9)
            done, owed = done + due, owed - due
    assert abs(done - 200_000 * rate) < 1.0


def test_learning_starts() -> None:
    """Uniform actions before, the policy's after; greedy ones are never random."""
    learner = build(small("masac", learning_starts=60, updates_per_step=1.0))
    world, early, late = World(3, births=0.6), [], []
    observation = World(4).reset().observation
    greedy = [learner.act(observation, explore=False).values for _ in range(2)]
    assert (greedy[0] == greedy[1]).all()
    for _ in range(6):
        step = world.reset()
        while not step.done:
            decisions = sum(len(story) for story in world.stories.values())
            seen = step.observation
            action = learner.act(seen, explore=True)
            assert (action.values == action.extras["stored"]).all()
            assert np.abs(action.values).max() <= 1.0
            if decisions < 60:
                early += action.values[:, 0].tolist()
                assert learner.counters.training_step == 0
                assert not learner.ready(step)
            else:
                late += action.values[:, 0].tolist()
            step = world.step(action)
            learner.store(seen, action, step)
            if learner.ready(step):
                learner.update(step)
    assert len(early) >= 60
    assert len(late) > 60
    assert learner.counters.training_step > 50
    # the first policy's spread is 1 before tanh: 0.63 after it; uniform: 0.58, with as many in each quarter
    quarters = np.histogram(early, bins=4, range=(-1, 1))[0] / len(early)
    np.testing.assert_allclose(quarters, 0.25, atol=0.17)


def test_random_actions_are_uniform_and_do_not_follow_the_policy() -> None:
    learner = build(small("masac", learning_starts=10_000))
    learner._state["theta"][:] = 3.0  # a policy that is far out everywhere
    learner.invalidate()
    observation = World(4).reset().observation
    drawn = np.concatenate([learner.act(observation, explore=True).values[:, 0] for _ in range(2000)])
    counts = np.histogram(drawn, bins=10, range=(-1, 1))[0]
    expected = len(drawn) / 10
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-square, 9 degrees of freedom
    assert (np.abs(learner.act(observation, explore=False).values) > 0.99).all()


def test_it_waits_for_a_batch() -> None:
    learner, world = build(small("masac", learning_starts=0, batch_size=50, updates_per_step=1.0)), World(5)
    step = world.reset()
    while learner._replay.usable < 50:
        if step.done:
            step = world.reset()
        assert learner.counters.training_step == 0
        assert not learner.ready(step)
        seen = step.observation
        action = learner.act(seen, explore=True)
        step = world.step(action)
        learner.store(seen, action, step)
    assert learner.ready(step)


def test_nobody_to_act_for_is_not_an_acting_step() -> None:
    learner = build(small("masac"))
    empty = World(4).reset().final
    assert learner.act(empty, explore=True).values.shape == (0, 1)
    assert learner.counters.acting_steps == 0


def test_metrics_every_200_gradient_steps_and_nothing_in_between() -> None:
    learner = build(small("masac", updates_per_step=1.0, hidden=[4], batch_size=4))
    own, measured = learner._checked, []

    def checked(*arguments: Any) -> np.ndarray:
        found = own(*arguments)
        measured.extend(found)
        return found

    learner._checked = checked
    reports, since = 0, 0
    world = World(6, births=0.5)
    learner.progress(0.5)
    for found in drive(learner, world, 14):
        if not found:
            continue
        done = int(found["gradient_steps"])
        part = np.array(measured[since:done])
        assert 200 <= len(part) < 210
        for i, name in enumerate(METRICS):
            assert found[name] == pytest.approx(part[:, i].mean(), rel=1e-5, abs=1e-6)
        assert found["learning_rate"] == pytest.approx(3e-4)
        reports, since = reports + 1, done
    assert reports >= 2
    assert len(learner.state().tensors["measured"]) == learner.counters.training_step - since


def test_the_learning_rate_follows_progress() -> None:
    rates = {"learning_rate": 1e-3, "learning_rate_end": 1e-4}
    learner = build(small("masac", updates_per_step=5.0, batch_size=4, hidden=[4], **rates))
    learner.progress(0.5)
    found = [each for each in drive(learner, World(6, births=0.5), 3) if each]
    assert found[0]["learning_rate"] == pytest.approx(5.5e-4)


@pytest.mark.parametrize("algorithm", [pytest.param("masac", marks=pytest.mark.slow), "pcmasac"])
@pytest.mark.parametrize("encoder", ["deepsets", "lstm"])
def test_resumed_is_uninterrupted(algorithm: str, encoder: str) -> None:
    """Saved with metrics pending and a gradient step half due, loaded by another learner: the same bits ever after."""
    settings = small(algorithm, encoder, buffer_size=150, updates_per_step=0.7)
    if algorithm == "pcmasac":
        settings = replace(settings, learner=replace(settings.learner, relabel=0.3))
    learner, world = build(settings), World(10, births=0.4)
    drive(learner, world, 5)
    learner.progress(0.25)
    learner.state()  # a boundary before: rows are in more than one piece
    drive(learner, world, 1)
    saved = alone(learner.state())
    assert len(saved.segments) > 1
    assert learner._replay.total > 150  # the ring has wrapped
    assert learner.counters.training_step > 50
    assert len(saved.tensors["measured"]) > 0
    uninterrupted = drive(learner, world, 4)

    again, twin = build(replace(settings, seed=77)), World(10, births=0.4)
    drive(build(settings), twin, 6)  # the same traffic
    drive(again, World(11), 3)  # it had a life of its own
    again.load(saved)
    assert bits(again.state()) == bits(saved)
    assert drive(again, twin, 4) == uninterrupted
    assert bits(again.state()) == bits(learner.state())


def test_loading_draws_nothing_and_a_state_is_a_copy() -> None:
    learner, world = build(small("pcmasac")), World(12)
    drive(learner, world, 3)
    saved = learner.state()
    before = bits(saved)
    drive(learner, world, 3)
    assert bits(saved) == before
    learner.load(saved)
    assert bits(learner.state()) == before


def test_weights_only_takes_the_policy_and_leaves_the_rest_fresh() -> None:
    settings = small("pcmasac", "lstm")
    learner, world = build(settings), World(13)
    drive(learner, world, 6)
    state = learner.state()
    assert state.tensors["m"].any()
    other = build(replace(settings, seed=5))
    drive(other, World(14), 3)
    bare = LearnerState(state.tensors, state.values, [])  # a checkpoint whose replay is elsewhere
    other.load(bare, weights_only=True)
    tensors = other.state().tensors
    for name in ("theta", "target", "encoder"):
        assert (tensors[name] == state.tensors[name]).all()
    for name in ("m", "v", "measured"):
        assert not tensors[name].any()
    counters = asdict(other.counters)
    assert counters == dict.fromkeys(counters, 0)
    assert other.state().segments == []
    observation = world.reset().observation
    greedy = [each.act(observation, explore=False).values for each in (learner, other)]
    assert (greedy[0] == greedy[1]).all()
    assert drive(other, World(15), 6)


def test_a_frozen_encoders_stored_context_is_that_of_encoding_afresh() -> None:
    """Every row, and every view that follows one, last views included."""
    for encoder in ("lstm", "deepsets"):
        learner = build(small("pcmasac", encoder, train_context_encoder=False))
        world = World(9, deaths=0.1, births=0.5)
        drive(learner, world, 4)
        ring = learner._replay
        assert "neighbours" not in ring._ring
        batch = ring.batch(np.flatnonzero(ring._ring["usable"]))
        stories = {row.ego.tobytes() for story in world.stories.values() for row in story}
        finals = {story[-1].final_ego.tobytes() for story in world.stories.values() if story[-1].truncated}
        seen_finals = 0
        parameters = learner._policy.encoder_layout.views(learner._policy._encoder_flat)
        for prefix in ("", "next_"):
            for ego, context in zip(batch[prefix + "ego"], batch[prefix + "context"], strict=True):
                assert ego.tobytes() in stories | finals
                seen_finals += ego.tobytes() in finals
                world.ego, world.present = {0: ego}, {0: 0}
                seen = world._observe([0])
                rows = [torch.from_numpy(array) for array in (seen.neighbours, seen.counts, seen.ego)]
                expected = learner._policy._encoder.encode(parameters, "", *rows)[0].numpy()
                np.testing.assert_allclose(context, expected, atol=1e-6)
        assert seen_finals > 5
        assert (np.abs(batch["next_context"]).max(1) > 1e-3).mean() > 0.5


def test_preferences_are_stored_with_every_view() -> None:
    learner = build(small("pcmasac"))
    world = World(9, births=0.5)
    drive(learner, world, 3)
    ring = learner._replay
    places = np.flatnonzero(ring._ring["usable"])
    batch = {name: column.copy() for name, column in ring.batch(places).items()}
    np.testing.assert_allclose(batch["preference"].sum(1), 1.0, rtol=1e-6)
    assert (batch["preference"] == batch["next_preference"]).all()
    for identity in np.unique(ring._ring["id"][places]):
        assert len(np.unique(batch["preference"][ring._ring["id"][places] == identity], axis=0)) == 1
    assert len(np.unique(batch["preference"], axis=0)) > 5


def test_redrawn_preferences_are_those_of_both_views_and_leave_the_ring_alone() -> None:
    settings = small("pcmasac", preference=PreferenceSettings(source="fixed", fixed=[1.0, 0.0, 0.0]), relabel=0.5)
    learner = build(settings)
    drive(learner, World(9, births=0.5), 4)
    batch = learner._replay.batch(learner._replay.sample(np.random.default_rng(0), 400))
    learner._relabel(batch)
    drawn = (batch["preference"] != [1.0, 0.0, 0.0]).any(1)
    assert 0.4 < drawn.mean() < 0.6
    assert (batch["preference"] == batch["next_preference"]).all()
    np.testing.assert_allclose(batch["preference"].sum(1), 1.0, rtol=1e-6)
    stored = learner._replay._ring["preference"][: len(learner._replay)]
    assert (stored == np.float32([1.0, 0.0, 0.0])).all()
    assert build(small("masac", relabel=0.5))._algorithm.relabel == 0.0


def broken(**changes: object) -> LearnerState:
    learner = build(small("pcmasac"))
    drive(learner, World(20), 3)
    state = alone(learner.state())
    for name, value in changes.items():
        table: dict[str, Any] = state.tensors if name.startswith("tensor_") else state.values
        key = name.removeprefix("tensor_")
        if value is None:
            del table[key]
        else:
            table[key] = value
    return state


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_theta": None}, "no tensor 'theta'"),
        ({"tensor_m": np.zeros(3, np.float32)}, r"'m' has shape \(3,\)"),
        ({"tensor_target": None}, "no tensor 'target'"),
        ({"tensor_v": np.float32([np.nan])}, "'v'"),
        ({"tensor_replay.open": None}, r"replay\.open"),
        ({"tensor_measured": np.zeros((0, 2), np.float32)}, "'measured'"),
        ({"tensor_preference.ids": None}, r"preference\.ids"),
        ({"random": None}, "no value 'random'"),
        ({"replay": {}}, r"no value 'replay\.total'"),
        ({"acting": {}}, "no value .acting.exploration"),
        ({"identity": {}}, "does not say its algorithm"),
    ],
)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(changes: dict[str, object], words: str) -> None:
    learner = build(small("pcmasac"))
    drive(learner, World(15), 3)
    before = bits(learner.state())
    with pytest.raises(CheckpointError, match=words):
        learner.load(broken(**changes))
    assert bits(learner.state()) == before


def test_a_checkpoint_whose_rows_are_gone_is_refused_and_changes_nothing() -> None:
    learner = build(small("pcmasac"))
    drive(learner, World(15), 3)
    before = bits(learner.state())
    state = broken()
    for segments in ([], state.segments[1:]):
        with pytest.raises(CheckpointError, match=r"replay has \d+ of \d+ rows"):
            learner.load(LearnerState(state.tensors, state.values, segments))
        assert bits(learner.state()) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (small("masac"), "algorithm: the checkpoint has 'pcmasac'"),
        (small("pcmasac", "attention"), "encoder"),
        (small("pcmasac", hidden=[17]), r"theta: the checkpoint's parameter .* has shape"),
        (small("mappo"), "algorithm: the checkpoint has 'pcmasac'"),
    ],
)
def test_a_foreign_checkpoint_is_refused_by_name(settings: Any, words: str) -> None:
    learner, state = build(settings), broken()
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match=words):
            learner.load(state, weights_only=weights_only)


def test_a_loss_that_is_not_finite_stops_the_update_with_its_batch() -> None:
    learner, world = build(small("masac")), World(18)
    drive(learner, world, 3)
    learner._state["target"][:] = torch.inf
    with pytest.raises(NotFiniteError, match=r"loss or its gradient is not finite: .*'critic_loss'") as caught:
        drive(learner, world, 3)
    assert caught.value.batch["ego"].shape == (16, 4)
    assert {"action", "rewards", "discount", "next_ego"} <= caught.value.batch.keys()


def test_a_dumped_batch_has_the_preferences_that_were_drawn_anew() -> None:
    one = PreferenceSettings(source="fixed", fixed=[1.0, 0.0, 0.0])
    learner, world = build(small("pcmasac", preference=one, relabel=1.0)), World(18)
    drive(learner, world, 3)
    learner._state["target"][:] = torch.inf
    with pytest.raises(NotFiniteError) as caught:
        drive(learner, world, 3)
    batch = caught.value.batch
    assert len(np.unique(batch["preference"], axis=0)) > 10
    assert (batch["preference"] == batch["next_preference"]).all()


def test_a_replay_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "available_memory", lambda: 2**20)
    settings = small("masac", buffer_size=1_000_000)
    learner = build(settings)
    assert learner.act(World(0).reset().observation, explore=False).values.shape[1] == 1  # evaluation needs no ring
    assert "1M decisions" in learner.describe()["replay"]
    with pytest.raises(OutOfMemoryError, match=r"learner\.buffer_size 1000000"):
        learner.load(learner.state())  # what a trainer does before a run is announced
    with pytest.raises(OutOfMemoryError, match=r"learner\.buffer_size 1000000"):
        drive(learner, World(0), 1)
    other = build(settings)
    other.load(learner.state(), weights_only=True)


def test_the_init_line_names_what_runs() -> None:
    found = build(small("pcmasac", "lstm")).describe()
    assert found["algorithm"] == "pcmasac"
    assert found["device"] == found["acting_device"] == "cpu"
    assert found["encoder"] == "lstm (frozen)"
    assert found["update_mode"] == "eager"
    assert found["updates_per_step"] == 0.2
    assert found["replay"].startswith("1k decisions, ")
    assert found["parameters"] > 1000
    assert "note" not in found


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="cuda"):
        build(replace(small("masac"), device="cuda"))


def test_invalidate_and_close_are_harmless() -> None:
    learner, world = build(small("masac")), World(19)
    drive(learner, world, 3)
    observation = world.reset().observation
    before = learner.act(observation, explore=False).values
    learner.invalidate()
    assert (learner.act(observation, explore=False).values == before).all()
    learner.close()


def test_a_ring_of_the_size_of_a_batch_learns() -> None:
    """It also holds open rows and last views, so there are never as many complete decisions as it has rows."""
    learner = build(small("masac", buffer_size=1000, batch_size=1000, learning_starts=0, updates_per_step=0.02))
    drive(learner, World(5, births=0.9, horizon=200), 8)
    assert learner.counters.buffer_size == 1000
    assert learner.counters.training_step > 0


def test_a_policy_under_another_activation_is_another_policy() -> None:
    state = build(small("masac", activation="relu")).state()
    with pytest.raises(CheckpointError, match="activation"):
        build(small("masac", activation="tanh")).load(state, weights_only=True)
