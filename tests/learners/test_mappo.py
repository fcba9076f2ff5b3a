"""The learner as the trainer sees it: acting, storing, updating, saving, and refusing what it must refuse."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from toy_world import BARE, LEVELS, SPEC, SPEED, World

from opencda_marl.core.errors import CheckpointError, ConfigError, DeviceError, NotFiniteError
from opencda_marl.core.spec import ActionSpec, LearnerState, ObservationSpec
from opencda_marl.learners import LEARNERS
from opencda_marl.learners.mappo import Mappo
from opencda_marl.settings.learning import PreferenceSettings
from opencda_marl.settings.run import RunSettings

ALGORITHMS = ("mappo", "pcmappo")


def bits(state: LearnerState) -> tuple[dict[str, bytes], str]:
    return {name: array.tobytes() for name, array in state.tensors.items()}, json.dumps(state.values, sort_keys=True)


def test_the_table_finds_both() -> None:
    assert LEARNERS.load("mappo") is Mappo
    assert LEARNERS.load("pcmappo") is Mappo


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("encoder", "spec", "action", "own"),
    [
        ("deepsets", SPEC, SPEED, {}),
        ("attention", SPEC, LEVELS, {}),
        ("lstm", SPEC, SPEED, {}),
        ("lstm", SPEC, SPEED, {"train_context_encoder": True}),
        ("deepsets", SPEC, LEVELS, {"train_context_encoder": False, "critic": "local"}),
        ("deepsets", BARE, SPEED, {"ego_hidden": []}),
    ],
)
def test_every_combination_learns_without_complaint(
    algorithm: str, encoder: str, spec: ObservationSpec, action: ActionSpec, own: dict[str, object]
) -> None:
    settings = small(algorithm, encoder, **own)
    learner = build(settings, spec=spec, action=action)
    before = learner.state().tensors
    metrics = drive(learner, World(1, spec=spec, births=0.5), 5)
    after = learner.state().tensors
    assert len(metrics) >= 2
    for found in metrics:
        assert all(np.isfinite(value) for value in found.values())
        assert found["epochs"] == 2.0
    tags = [""] if algorithm == "mappo" else ["_team", "_safety", "_efficiency", "_comfort"]
    for tag in tags:
        assert {f"explained_variance{tag}", f"value_mean{tag}", f"value_std{tag}"} <= metrics[0].keys()
    assert (before["theta"] != after["theta"]).mean() > 0.9
    assert (before["encoder"] == after["encoder"]).all()
    counters = learner.counters
    assert counters.updates_performed == len(metrics)
    assert counters.training_step == sum(2 * -(-int(found["rows"]) // 32) for found in metrics)
    assert counters.acting_steps > 50
    json.dumps(learner.describe())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("encoder", ["deepsets", "lstm"])
def test_old_log_probs_are_those_of_the_policy_that_acted(algorithm: str, encoder: str) -> None:
    """With steps too small to matter every ratio is 1: what is looked back at is what was done."""
    learner = build(small(algorithm, encoder, learning_rate=1e-12, learning_rate_end=0.0))
    for found in drive(learner, World(2), 5):
        assert abs(found["approx_kl"]) < 1e-6
        assert found["clip_fraction"] == 0.0


def test_log_prob_of_executed_actions() -> None:
    """The acted distribution, from many draws at one observation, is the one that the update believes in."""
    learner = build(small(initial_log_std=-1.0, initial_fraction=0.6))
    world = World(3)
    observation = world.reset().observation
    pre_tanh = np.array([learner.act(observation, explore=True).extras["stored"][0, 0] for _ in range(3000)])
    greedy = learner.act(observation, explore=False)
    assert pre_tanh.mean() == pytest.approx(greedy.extras["stored"][0, 0], abs=0.03)
    assert pre_tanh.std() == pytest.approx(np.exp(-1.0), rel=0.05)
    assert greedy.values[0, 0] == pytest.approx(0.2, abs=0.05)  # 0.6 of the way from -1 to 1, nearly everywhere


def test_greedy_acting_draws_nothing_and_repeats() -> None:
    learner = build(small("pcmappo"))
    observation = World(4).reset().observation
    before = bits(learner.state())[1]
    first, again = (learner.act(observation, explore=False).values for _ in range(2))
    assert (first == again).all()
    assert json.loads(bits(learner.state())[1])["acting"] == json.loads(before)["acting"]


def _actor_size(learner: Mappo) -> int:
    return next(i for i, name in enumerate(_names(learner)) if name.startswith("critic."))


def _names(learner: Mappo) -> list[str]:
    """The name that each number of theta belongs to."""
    layout = learner.state().values["identity"]["layouts"]["theta"]
    return [name for name, shape in layout for _ in range(int(np.prod(shape)))]


def test_advantages_come_from_the_average_of_the_critics_weights() -> None:
    learner = build(small(average_decay=0.9))
    drive(learner, World(4), 3)
    saved, size = learner.state(), _actor_size(learner)
    theta, average = (saved.tensors[name].copy() for name in ("theta", "average"))
    assert (theta[size:] != average[size:]).any()

    def explained(**changed: np.ndarray) -> float:
        again = build(small(average_decay=0.9))
        again.load(LearnerState({**saved.tensors, **changed}, saved.values))
        return drive(again, World(4), 1)[0]["explained_variance"]

    theta[size:], average[size:] = 0.0, 0.0
    assert explained(theta=theta) == explained()
    assert explained(average=average) != explained()


def test_the_average_of_the_critic_follows_the_scale_of_returns() -> None:
    learner, world = build(small(average_decay=0.9)), World(4)
    while learner.counters.updates_performed < 2:
        drive(learner, world, 1)
    before, count = learner.state(), learner.counters.updates_performed
    while learner.counters.updates_performed == count:
        drive(learner, world, 1)
    after = learner.state()
    (mean, std), (new_mean, new_std) = (_scale(state.tensors["scale"]) for state in (before, after))
    assert abs(new_std - std) > 1e-3
    last = [i for i, name in enumerate(_names(learner)) if name.startswith("critic.values.1.")]
    old = before.tensors["average"][last].astype(np.float64)
    carried = old * std / new_std
    carried[-1] += (mean - new_mean) / new_std  # the bias
    kept = (count + 1) / (count + 10)
    expected = kept * carried + (1.0 - kept) * after.tensors["theta"][last]
    np.testing.assert_allclose(after.tensors["average"][last], expected, rtol=1e-4, atol=1e-6)


def _scale(saved: np.ndarray) -> tuple[float, float]:
    mean, square = saved[0, 0] / saved[2, 0], saved[1, 0] / saved[2, 0]
    return mean, float(np.sqrt(square - mean**2))


def test_a_checkpoint_whose_average_is_of_the_actor_alone_still_loads() -> None:
    learner = build(small(average_decay=0.9))
    drive(learner, World(4), 3)
    saved, size = learner.state(), _actor_size(learner)
    again = build(small(average_decay=0.9))
    again.load(LearnerState({**saved.tensors, "average": saved.tensors["average"][:size]}, saved.values))
    found = again.state().tensors
    assert (found["average"][:size] == saved.tensors["average"][:size]).all()
    assert (found["average"][size:] == saved.tensors["theta"][size:]).all()
    with pytest.raises(CheckpointError, match="average"):
        again.load(LearnerState({**saved.tensors, "average": saved.tensors["average"][: size - 1]}, saved.values))


def test_greedy_acting_uses_the_average_of_the_weights() -> None:
    learner, world = build(small("pcmappo", average_decay=0.5)), World(4)
    thetas = []
    for _ in range(6):
        before = learner.counters.updates_performed
        drive(learner, world, 1)
        assert learner.counters.updates_performed <= before + 1
        if learner.counters.updates_performed > before:
            thetas.append(learner.state().tensors["theta"])
    assert len(thetas) > 2
    saved = learner.state()
    size = _actor_size(learner)
    start = build(small("pcmappo", average_decay=0.5)).state().tensors["theta"][:size]
    decays = [min(0.5, k / (k + 9.0)) for k in range(1, len(thetas) + 1)]
    expected = start.astype(np.float64)
    for kept, theta in zip(decays, thetas, strict=True):
        expected = kept * expected + (1.0 - kept) * theta[:size]
    np.testing.assert_allclose(saved.tensors["average"][:size], expected, rtol=1e-4, atol=1e-6)

    observation = world.reset().observation
    greedy = learner.act(observation, explore=False).values
    drawn = learner.act(observation, explore=True).extras["stored"]
    again = learner.act(observation, explore=False).values
    assert (greedy == again).all()
    last = build(small("pcmappo", average_decay=0.0))
    last.load(LearnerState({k: v for k, v in saved.tensors.items() if k != "average"}, saved.values))
    assert (last.act(observation, explore=True).extras["stored"] == drawn).all()  # exploring is with the last weights
    assert (last.act(observation, explore=False).values != greedy).any()
    actor = saved.tensors["average"][:size]
    averaged = {**saved.tensors, "theta": np.concatenate([actor, saved.tensors["theta"][size:]])}
    last.load(LearnerState({k: v for k, v in averaged.items() if k != "average"}, saved.values))
    assert (last.act(observation, explore=False).values == greedy).all()


def test_an_average_is_optional_in_a_checkpoint_of_weights() -> None:
    """A policy that was trained without one drives with its last weights under settings that ask for one."""
    plain, world = build(small("mappo", average_decay=0.0)), World(4)
    drive(plain, world, 3)
    asked = build(small("mappo", average_decay=0.9))
    asked.load(plain.state(), weights_only=True)
    observation = world.reset().observation
    acted = [x.act(observation, explore=False).values for x in (plain, asked)]
    assert (acted[0] == acted[1]).all()


def test_nobody_to_act_for_is_not_an_acting_step() -> None:
    learner = build(small())
    world = World(4)
    empty = world.reset().final
    assert learner.act(empty, explore=True).values.shape == (0, 1)
    assert learner.counters.acting_steps == 0


def test_ready_waits_for_n_steps_and_for_a_common_decision() -> None:
    learner = build(small(n_steps=20))
    world = World(5, interval=5, horizon=400)
    step = world.reset()
    clock, due, seen = 0, 20, set()
    for _ in range(150):
        observation = step.observation
        action = learner.act(observation, explore=True)
        step = world.step(action)
        learner.store(observation, action, step)
        clock += step.steps
        ready = learner.ready(step)
        assert ready == (clock >= due and (step.everyone or step.done))
        seen.add((ready, step.everyone))
        if ready:
            learner.update(step)
            assert learner.counters.buffer_size == 0
            due = clock + 20
        if step.done:
            step = world.reset()
    assert {(True, True), (False, True), (False, False)} <= seen


def test_schedules_follow_progress() -> None:
    learner = build(small(learning_rate=1e-3, learning_rate_end=1e-4, entropy=0.1, entropy_end=0.0))
    learner.progress(0.5)
    found = drive(learner, World(6), 3)[0]
    assert found["learning_rate"] == pytest.approx(5.5e-4)
    assert found["entropy_weight"] == pytest.approx(0.05)


def test_a_policy_that_moves_too_far_ends_the_update() -> None:
    learner = build(small(learning_rate=0.3, learning_rate_end=0.3, target_kl=0.01, epochs=50))
    found = drive(learner, World(7), 3)[0]
    assert found["epochs"] < 50
    assert found["approx_kl"] > 0.01


def test_values_stay_when_the_scale_of_returns_moves() -> None:
    learner = build(small(learning_rate=1e-12, learning_rate_end=0.0))
    world = World(8)
    drive(learner, world, 1)
    batch = {
        "ego": torch.randn(9, 4), "scene": torch.randn(9, 8),
        "neighbours": torch.randn(9, 3, 5), "counts": torch.full((9,), 2, dtype=torch.int32),
    }  # fmt: skip
    before, _ = learner._look_back(batch)
    scale = learner.state().tensors["scale"]
    assert drive(learner, world, 3)
    assert (learner.state().tensors["scale"] != scale).any()
    after, _ = learner._look_back(batch)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_a_frozen_encoders_context_is_stored_and_final_views_are_encoded() -> None:
    learner = build(small("mappo", "lstm", n_steps=10_000))
    world = World(9, deaths=0.1)
    drive(learner, world, 2)
    tensors = learner.state().tensors
    assert "rollout.rows.neighbours" not in tensors
    assert tensors["rollout.rows.context"].shape[1] == 6
    stories = [story for story in world.stories.values() if story[-1].truncated]
    assert stories
    by_ego = {row.tobytes(): context for row, context in zip(
        tensors["rollout.finals.ego"], tensors["rollout.finals.context"], strict=True)}  # fmt: skip
    for story in stories:
        ego = story[-1].final_ego
        world.ego, world.present = {0: ego}, {0: 0}
        expected = learner.act(world._observe([0]), explore=False).extras["context"][0]
        np.testing.assert_allclose(by_ego[ego.tobytes()], expected, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("encoder", ["deepsets", "lstm"])
def test_resumed_is_uninterrupted(algorithm: str, encoder: str) -> None:
    """Saved in the middle of a rollout and loaded by another learner: the same bits ever after."""
    settings = small(algorithm, encoder, n_steps=150, average_decay=0.9 if encoder == "lstm" else 0.0)
    learner, world = build(settings), World(10)
    drive(learner, world, 4)
    saved = learner.state()
    assert learner.counters.buffer_size > 0  # a partial rollout
    assert learner.counters.updates_performed > 0
    text = json.loads(json.dumps(saved.values))
    kept = LearnerState({name: array.copy() for name, array in saved.tensors.items()}, text)
    uninterrupted = drive(learner, world, 4)

    again, twin = build(replace(settings, seed=77)), World(10)
    drive(build(settings), twin, 4)  # the same traffic
    drive(again, World(11), 2)  # it had a life of its own
    again.load(kept)
    assert bits(again.state()) == bits(saved)
    resumed = drive(again, twin, 4)
    assert resumed == uninterrupted
    assert bits(again.state()) == bits(learner.state())


def test_loading_draws_nothing_and_a_state_is_a_copy() -> None:
    learner, world = build(small("pcmappo")), World(12)
    drive(learner, world, 2)
    saved = learner.state()
    before = bits(saved)
    drive(learner, world, 3)
    assert bits(saved) == before
    learner.load(saved)
    assert bits(learner.state()) == before


def test_weights_only_takes_the_policy_and_leaves_the_rest_fresh() -> None:
    settings = small("mappo", "lstm")
    learner, world = build(settings), World(13)
    drive(learner, world, 4)
    other = build(replace(settings, seed=5))
    drive(other, World(14), 1)
    other.load(learner.state(), weights_only=True)
    tensors = other.state().tensors
    assert (tensors["theta"] == learner.state().tensors["theta"]).all()
    assert (tensors["scale"] == learner.state().tensors["scale"]).all()
    assert not tensors["m"].any()
    assert not tensors["v"].any()
    assert (other.counters.training_step, other.counters.updates_performed, other.counters.buffer_size) == (0, 0, 0)
    observation = world.reset().observation
    greedy = [x.act(observation, explore=False).values for x in (learner, other)]
    assert (greedy[0] == greedy[1]).all()


def broken(**changes: object) -> LearnerState:
    state = build(small("pcmappo")).state()
    for name, value in changes.items():
        if name.startswith("tensor_"):
            if value is None:
                del state.tensors[name[7:]]
            else:
                state.tensors[name[7:]] = value
        elif value is None:
            del state.values[name]
        else:
            state.values[name] = value
    return state


@pytest.mark.parametrize(
    ("settings", "spec", "action", "words"),
    [
        (small("mappo"), SPEC, SPEED, "algorithm: the checkpoint has 'pcmappo'"),
        (small("pcmappo"), replace(SPEC, name="other"), SPEED, "observation"),
        (small("pcmappo"), replace(SPEC, ego=SPEC.ego[:2]), SPEED, "ego features"),
        (small("pcmappo"), replace(SPEC, max_neighbours=9), SPEED, "neighbour rows"),
        (small("pcmappo"), SPEC, LEVELS, "action"),
        (small("pcmappo", "attention"), SPEC, SPEED, "encoder"),
        (small("pcmappo", hidden=[17]), SPEC, SPEED, r"theta: the checkpoint's parameter .* has shape"),
        (small("pcmappo", hidden=[16, 16]), SPEC, SPEED, "theta: the checkpoint's parameter"),
    ],
)
def test_a_foreign_checkpoint_is_refused_by_name(
    settings: RunSettings, spec: ObservationSpec, action: ActionSpec, words: str
) -> None:
    learner = build(settings, spec=spec, action=action)
    before = bits(learner.state())
    for weights_only in (False, True):
        with pytest.raises(CheckpointError, match=words):
            learner.load(broken(), weights_only=weights_only)
    assert bits(learner.state()) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_theta": None}, "no tensor 'theta'"),
        ({"tensor_m": np.zeros(3, np.float32)}, r"'m' has shape \(3,\)"),
        ({"tensor_scale": np.full((3, 4), np.nan)}, "'scale' holds NaN"),
        ({"shuffling": None}, "no value 'shuffling'"),
        ({"identity": {}}, "does not say its algorithm"),
        ({"tensor_rollout.rows.ego": None}, "rollout"),
        ({"tensor_preference.ids": None}, "preference.ids"),
        ({"acting": {}}, "no value .acting.exploration"),
    ],
)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(changes: dict[str, object], words: str) -> None:
    learner = build(small("pcmappo"))
    drive(learner, World(15), 1)
    before = bits(learner.state())
    with pytest.raises(CheckpointError, match=words):
        learner.load(broken(**changes))
    assert bits(learner.state()) == before


def test_a_reward_that_is_not_finite_stops_the_update_with_its_rows() -> None:
    learner, world = build(small(n_steps=10_000)), World(16)
    drive(learner, world, 2)
    state = learner.state()
    state.tensors["rollout.rows.rewards"][3, 1] = np.inf
    learner.load(state)
    with pytest.raises(NotFiniteError, match="rewards of 1 of") as caught:
        learner.update(world.reset())
    assert caught.value.batch["id"].tolist() == [state.tensors["rollout.rows.id"][3]]


def test_an_observation_that_is_not_finite_stops_the_update() -> None:
    learner, world = build(small(n_steps=10_000)), World(17)
    drive(learner, world, 2)
    state = learner.state()
    state.tensors["rollout.rows.ego"][2, 0] = np.inf  # tanh would swallow it
    learner.load(state)
    with pytest.raises(NotFiniteError, match="ego of 1 of"):
        learner.update(world.reset())


def test_a_loss_that_is_not_finite_stops_the_update_with_its_minibatch() -> None:
    learner, world = build(small(learning_rate=1.0, learning_rate_end=1.0, max_grad_norm=1e6)), World(18)
    drive(learner, world, 1)
    state = learner.state()
    state.tensors["v"][:] = -1.0  # no sound optimiser has this: its root is NaN
    learner.load(state)
    weights = learner.state().tensors["theta"]
    with pytest.raises(NotFiniteError, match="loss or its gradient is not finite") as caught:
        drive(learner, world, 3)
    assert caught.value.batch["ego"].shape == (32, 4)
    assert (learner.state().tensors["theta"] == weights).all()  # the last good ones


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="cuda"):
        build(replace(small(), device="cuda"))


def test_a_preference_off_the_simplex() -> None:
    with pytest.raises(ConfigError, match=r"preference\.fixed .* sum to 1"):
        build(small("pcmappo", preference=PreferenceSettings(fixed=[0.5, 0.4, 0.4])))


def test_the_init_line_names_what_runs() -> None:
    found = build(small("pcmappo", "lstm")).describe()
    assert found["algorithm"] == "pcmappo"
    assert found["device"] == found["acting_device"] == "cpu"
    assert found["threads"] == found["acting_threads"] == 1
    assert found["encoder"] == "lstm (frozen)"
    assert found["encoder_form"] in ("c++",) or found["encoder_form"].startswith("packed (")
    assert found["update_mode"] == "eager"
    assert found["torch"].startswith(torch.__version__)
    assert found["parameters"] > 1000
    assert "note" not in found


def test_a_trained_lstm_is_not_compiled_and_says_so() -> None:
    learner = build(small("mappo", "lstm", train_context_encoder=True, update_mode="compiled"))
    assert learner.describe()["update_mode"] == "eager"
    assert "trained lstm" in learner.describe()["note"]


def test_invalidate_and_close_are_harmless() -> None:
    learner, world = build(small()), World(19)
    drive(learner, world, 2)
    observation = world.reset().observation
    before = learner.act(observation, explore=False).values
    learner.invalidate()
    assert (learner.act(observation, explore=False).values == before).all()
    learner.close()
