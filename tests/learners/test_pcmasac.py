"""PCMASAC: behaviour moves with the preference, and its limits are the plain learners.

That the limits hold exactly, in targets and gradients, is shown in `tests/numeric/test_sac_losses.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from driving_school import build, drive, small
from test_learning import follow, score, tug
from test_masac import OWN
from toy_world import World

from opencda_marl.core.spec import Step
from opencda_marl.settings.learning import PreferenceSettings


@pytest.mark.parametrize("relabel", [0.0, 0.5])
def test_pcmasac_does_what_the_preference_says(relabel: float) -> None:
    learner = build(small("pcmasac", updates_per_step=0.3, relabel=relabel, **OWN))
    drive(learner, World(0, births=0.8, horizon=100, reward=tug), 25)
    observation = World(98).reset().observation
    mean = []
    for fixed in ([0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.1, 0.9, 0.0]):
        greedy = build(small("pcmasac", preference=PreferenceSettings(source="fixed", fixed=fixed), **OWN))
        greedy.load(learner.state(), weights_only=True)
        mean.append(float(greedy.act(observation, explore=False).values.mean()))
    assert mean[0] < mean[1] < mean[2]
    assert mean[2] - mean[0] > 0.7


def to_team(step: Step) -> Step:
    """The reward goes to the team; the vehicles' own says the opposite."""
    closed = step.closed
    earned = closed.rewards.sum(1)
    return replace(step, closed=replace(closed, team=earned, rewards=-closed.rewards))


def test_with_lambda_zero_it_learns_what_the_team_earns() -> None:
    preference = PreferenceSettings(individual_weight=0.0)
    learner = build(small("pcmasac", preference=preference, updates_per_step=0.3, **OWN))
    drive(learner, World(0, births=0.8, horizon=100, reward=follow), 25, change=to_team)
    assert score(learner, follow) > -0.06


def second(ego: np.ndarray, action: float) -> np.ndarray:
    """Efficiency is what `follow` wants, safety and comfort the opposite."""
    good = float(follow(ego, action).sum())
    return np.array([-good, good, -good])


def test_without_a_team_a_preference_of_one_objective_is_that_objective() -> None:
    preference = PreferenceSettings(source="fixed", fixed=[0.0, 1.0, 0.0], team_weight=0.0)
    learner = build(small("pcmasac", preference=preference, updates_per_step=0.3, **OWN))
    drive(learner, World(0, births=0.8, horizon=100, reward=second), 25)
    assert score(learner, follow) > -0.06


def test_rewards_are_the_teams_and_the_objectives_in_this_order() -> None:
    learner, world = build(small("pcmasac")), World(3)
    drive(learner, world, 2)
    ring = learner._replay
    batch = ring.batch(np.flatnonzero(ring._ring["usable"]))
    stories = {row.ego.tobytes(): row for story in world.stories.values() for row in story}
    for ego, rewards in zip(batch["ego"], batch["rewards"], strict=True):
        row = stories[ego.tobytes()]
        np.testing.assert_array_equal(rewards, [np.float32(row.team), *row.rewards])
    plain, world = build(small("masac")), World(3)
    drive(plain, world, 2)
    batch = plain._replay.batch(np.flatnonzero(plain._replay._ring["usable"]))
    stories = {row.ego.tobytes(): row for story in world.stories.values() for row in story}
    for ego, rewards in zip(batch["ego"], batch["rewards"], strict=True):
        assert rewards == pytest.approx(stories[ego.tobytes()].rewards.sum(), rel=1e-5, abs=1e-6)
