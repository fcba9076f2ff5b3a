"""The preference-conditioned learner: at the ends of its settings it is the plain one, and it mixes as written."""

from __future__ import annotations

import numpy as np
import pytest
from driving_school import build, drive, small, with_rewards
from toy_world import World

from opencda_marl.core.spec import LearnerState
from opencda_marl.learners.mappo import Mappo
from opencda_marl.settings.learning import PreferenceSettings

OWN = {
    "n_steps": 100, "epochs": 1, "minibatch_size": 256, "max_grad_norm": 1e6, "entropy": 0.01, "learning_rate": 1e-3,
    "value_weight": 0.0,
}  # fmt: skip
ONE_HOT = {0: [1.0, 0.0, 0.0], 1: [0.0, 1.0, 0.0], 2: [0.0, 0.0, 1.0]}


def named(learner: Mappo) -> dict[str, np.ndarray]:
    theta, found, at = learner.state().tensors["theta"], {}, 0
    for name, shape in learner.state().values["identity"]["layouts"]["theta"]:
        size = int(np.prod(shape))
        found[name] = theta[at : at + size].reshape(shape).copy()
        at += size
    return found


def put(learner: Mappo, arrays: dict[str, np.ndarray]) -> None:
    state = learner.state()
    theta = np.concatenate([arrays[name].ravel() for name in named(learner)])
    learner.load(LearnerState({**state.tensors, "theta": theta, "average": theta}, state.values))


def blind_pair(preference: PreferenceSettings, index: int | None) -> tuple[Mappo, Mappo]:
    """A conditioned learner that does not look at its preference yet, and the plain one with its weights.

    The plain one's critic is what gives the value of objective `index`, or the team's (None).
    """
    conditioned = build(small("pcmappo", preference=preference, **OWN))
    plain = build(small("mappo", **OWN))
    arrays = named(conditioned)
    arrays["actor.policy.0.weight"][-3:] = 0.0
    arrays["critic.values.0.weight"][-3:] = 0.0
    put(conditioned, arrays)
    twin = named(plain)
    output = 0 if index is None else 1 + index  # of the critic
    for name in twin:
        value = arrays[name]
        if name in ("critic.values.1.weight", "critic.values.1.bias"):
            value = value[..., output : output + 1]
        elif name in ("actor.policy.0.weight", "critic.values.0.weight"):
            value = value[:-3]
        assert value.shape == twin[name].shape, name
        twin[name] = value
    put(plain, twin)
    return conditioned, plain


def assert_same_actor(conditioned: Mappo, plain: Mappo, before: dict[str, np.ndarray]) -> None:
    arrays, twin = named(conditioned), named(plain)
    moved = 0.0
    for name in twin:
        if name.startswith("actor."):
            mine = arrays[name][:-3] if arrays[name].shape != twin[name].shape else arrays[name]
            np.testing.assert_allclose(mine, twin[name], rtol=1e-4, atol=2e-5)
            moved += float(np.abs(twin[name] - before[name]).sum())
    assert moved > 0.1  # the update did something


@pytest.mark.parametrize("index", [0, 1, 2])
def test_without_the_team_and_with_one_objective_it_is_the_single_objective_learner(index: int) -> None:
    preference = PreferenceSettings(source="fixed", fixed=ONE_HOT[index], team_weight=0.0, individual_weight=1.0)
    conditioned, plain = blind_pair(preference, index)
    before = named(plain)
    left = drive(conditioned, World(1, births=0.5), 2)[:1]
    right = drive(plain, World(1, births=0.5), 2, change=lambda step: with_rewards(step, index))[:1]
    assert left[0]["policy_loss"] == pytest.approx(right[0]["policy_loss"], abs=1e-5)
    assert left[0][f"explained_variance_{('safety', 'efficiency', 'comfort')[index]}"] == pytest.approx(
        right[0]["explained_variance"], abs=1e-4
    )
    assert_same_actor(conditioned, plain, before)


def test_with_lambda_zero_it_is_the_plain_learner_on_the_teams_reward() -> None:
    conditioned, plain = blind_pair(PreferenceSettings(team_weight=1.0, individual_weight=0.0), None)
    before = named(plain)
    left = drive(conditioned, World(2, births=0.5), 2)[:1]
    right = drive(plain, World(2, births=0.5), 2, change=lambda step: with_rewards(step, None))[:1]
    assert left[0]["policy_loss"] == pytest.approx(right[0]["policy_loss"], abs=1e-5)
    assert left[0]["explained_variance_team"] == pytest.approx(right[0]["explained_variance"], abs=1e-4)
    assert_same_actor(conditioned, plain, before)


def test_one_critic_gives_all_values_and_sees_the_preference() -> None:
    learner = build(small("pcmappo"))
    bodies = {name: array.shape for name, array in named(learner).items() if name.startswith("critic.values.")}
    plain = {name: array.shape for name, array in named(build(small("mappo"))).items() if name.startswith("critic.v")}
    assert bodies["critic.values.1.weight"] == (16, 4)
    assert plain["critic.values.1.weight"] == (16, 1)
    assert bodies["critic.values.0.weight"][0] == plain["critic.values.0.weight"][0] + 3
    assert len(bodies) == len(plain) == 4

    drive(learner, World(4), 3)
    state = learner.state()
    found = []
    for fixed in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]):
        twin = build(small("pcmappo", preference=PreferenceSettings(source="fixed", fixed=fixed)))
        twin.load(state, weights_only=True)
        step = World(5).reset()
        rows = {**twin._policy.view(step.observation), "scene": np.zeros(len(step.observation), np.int64)}
        found.append(twin._look_back(twin._tensors(rows, step.observation.scene[None]))[0][0])
    assert found[0].shape == (4,)
    assert (found[0] != found[1]).all()  # the team's value too: what the others want decides what becomes of the team
    assert (found[0] == found[2]).all()


def test_a_vehicles_preference_is_stored_with_each_of_its_decisions() -> None:
    learner = build(small("pcmappo", n_steps=10_000))
    drive(learner, World(6, deaths=0.01), 1)
    tensors = learner.state().tensors
    ids, preference = tensors["rollout.rows.id"], tensors["rollout.rows.preference"]
    np.testing.assert_allclose(preference.sum(1), 1.0, rtol=1e-5)
    per_vehicle = {identity: {p.tobytes() for p in preference[ids == identity]} for identity in np.unique(ids)}
    assert all(len(held) == 1 for held in per_vehicle.values())
    assert len(set.union(*per_vehicle.values())) == len(per_vehicle)
    assert max((ids == identity).sum() for identity in per_vehicle) > 3
    assert tensors["preference.ids"].tolist() == []  # everybody has ended with the episode
