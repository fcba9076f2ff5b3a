"""Learners learn: on toys whose best policy is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driving_school import build, drive, small
from toy_world import LEVELS, SPEC, SPEED, World

from opencda_marl.core.spec import ActionSpec
from opencda_marl.settings.learning import PreferenceSettings


def score(learner: object, value_of: object, episodes: int = 4) -> float:
    """Mean reward of the greedy policy, on traffic of its own."""
    world, total, rows = World(99, spec=SPEC), 0.0, 0
    for _ in range(episodes):
        step = world.reset()
        while not step.done:
            action = learner.act(step.observation, explore=False)
            for ego, value in zip(step.observation.ego, action.values[:, 0], strict=True):
                total, rows = total + float(value_of(ego, float(value)).sum()), rows + 1
            step = world.step(action)
    return total / rows


def follow(ego: np.ndarray, action: float) -> np.ndarray:
    """The best action is tanh of the first feature."""
    return np.array([-((action - np.tanh(ego[0])) ** 2), 0.0, 0.0])


def pick(ego: np.ndarray, index: float) -> np.ndarray:
    """Level 0 where the first feature is negative, else level 4."""
    best = 4.0 if ego[0] > 0 else 0.0
    return np.array([-abs(index - best) / 4.0, 0.0, 0.0])


OWN = {
    "n_steps": 300,
    "epochs": 8,
    "minibatch_size": 128,
    "hidden": [32],
    "learning_rate": 1e-2,
    "learning_rate_end": 1e-2,
    "initial_fraction": 0.5,
}


@pytest.mark.parametrize(
    ("encoder", "action", "reward", "good"), [("deepsets", SPEED, follow, -0.06), ("attention", LEVELS, pick, -0.25)]
)
def test_mappo_finds_the_best_action(encoder: str, action: ActionSpec, reward: object, good: float) -> None:
    learner = build(small("mappo", encoder, **OWN), action=action)
    before = score(learner, reward)
    drive(learner, World(0, births=0.8, horizon=100, reward=reward), 40)
    after = score(learner, reward)
    assert before < -0.35
    assert after > good


def tug(ego: np.ndarray, action: float) -> np.ndarray:
    """Safety wants to stand, efficiency wants to go."""
    return np.array([-(action + 1.0), action - 1.0, 0.0]) / 2.0


def test_pcmappo_does_what_the_preference_says() -> None:
    learner = build(small("pcmappo", **OWN))
    drive(learner, World(0, births=0.8, horizon=100, reward=tug), 40)
    observation = World(98).reset().observation
    mean = []
    for fixed in ([0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.1, 0.9, 0.0]):
        greedy = build(small("pcmappo", preference=PreferenceSettings(source="fixed", fixed=fixed), **OWN))
        greedy.load(learner.state(), weights_only=True)
        mean.append(float(greedy.act(observation, explore=False).values.mean()))
    assert mean[0] < mean[1] < mean[2]
    assert mean[2] - mean[0] > 0.7


def given(ego: np.ndarray, action: float) -> np.ndarray:
    """Whatever one does, the reward is a function of what was seen."""
    return np.array([2.0 * np.tanh(ego[0]) + 3.0, 0.0, 0.0])


def test_the_critic_learns_returns_in_units_of_the_reward() -> None:
    settings = replace(small("mappo", **OWN), discount_per_second=0.0)  # the return is the reward
    learner = build(settings)
    found = drive(learner, World(0, births=0.8, horizon=100, reward=given), 20)
    assert found[0]["explained_variance"] < 0.5
    assert found[-1]["explained_variance"] > 0.9
    step = World(97).reset()
    rows = {**learner._policy.view(step.observation), "scene": np.zeros(len(step.observation), np.int64)}
    values, _ = learner._look_back(learner._tensors(rows, step.observation.scene[None]))
    expected = [given(ego, 0.0)[0] for ego in step.observation.ego]
    np.testing.assert_allclose(values[:, 0], expected, atol=0.8)
