"""How advantages of several objectives become one."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from opencda_marl.learners.preference import mix_advantages
from opencda_marl.settings.learning import PreferenceSettings


def _mixed(
    advantages: np.ndarray, preference: np.ndarray, scaling: Literal["shared", "component"], team_weight: float = 1.0
) -> np.ndarray:
    weights = PreferenceSettings(scaling=scaling, team_weight=team_weight)
    return mix_advantages(advantages, np.ones_like(advantages), preference, weights)


@pytest.fixture
def advantages() -> np.ndarray:
    """A rare, loud first objective and a quiet, frequent second one."""
    rng = np.random.default_rng(3)
    made = np.zeros((1000, 4))
    made[:10, 1] = -20.0
    made[:, 2] = 0.1 * rng.standard_normal(1000)
    return made


def _part_of(mixed: np.ndarray, objective: np.ndarray) -> float:
    return float(np.corrcoef(mixed, objective)[0, 1] ** 2)


def test_shared_keeps_the_rewards_own_weights(advantages: np.ndarray) -> None:
    even = np.full((1000, 3), 1 / 3)
    mixed = _mixed(advantages, even, "shared", team_weight=0.0)
    expected = advantages.sum(1) - advantages.sum(1).mean()
    np.testing.assert_allclose(mixed, expected / expected.std(), rtol=1e-6)
    assert _part_of(mixed, advantages[:, 1]) > 0.99, "a crash of 20 is not drowned by delays of 0.1"


def test_component_makes_them_equally_loud(advantages: np.ndarray) -> None:
    even = np.full((1000, 3), 1 / 3)
    mixed = _mixed(advantages, even, "component", team_weight=0.0)
    assert _part_of(mixed, advantages[:, 1]) == pytest.approx(0.5, abs=0.1)
    assert _part_of(mixed, advantages[:, 2]) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("scaling", ["shared", "component"])
def test_one_hot_is_the_single_objective(advantages: np.ndarray, scaling: Literal["shared", "component"]) -> None:
    alone = advantages[:, 2] - advantages[:, 2].mean()
    one_hot = np.tile([0.0, 1.0, 0.0], (1000, 1))
    np.testing.assert_allclose(_mixed(advantages, one_hot, scaling, 0.0), alone / alone.std(), rtol=1e-4)


def test_by_hand() -> None:
    pattern = np.array([-1.0, -1.0, 1.0, 1.0])
    parts = np.stack([pattern, 10.0 * pattern[::-1] + 5.0, 100.0 * pattern, 0.001 * pattern], 1)
    rewards = np.ones((4, 4))
    rewards[:, 3] = 0.0  # nothing was given for comfort: what is there is noise
    even = np.array([[0.2, 0.3, 0.5]] * 4, np.float32)
    weights = {"team_weight": 2.0, "individual_weight": 0.5}
    # shared: 2 - 0.5 * 0.2 * 10 + 0.5 * 0.3 * 100 = 16 times the pattern; component: 2 - 0.1 + 0.15
    for scaling in ("shared", "component"):
        mixed = mix_advantages(parts, rewards, even, PreferenceSettings(scaling=scaling, **weights))
        np.testing.assert_allclose(mixed, pattern, rtol=1e-6)
    uneven = even.copy()
    uneven[0] = [1.0, 0.0, 0.0]
    mixed = mix_advantages(parts, rewards, uneven, PreferenceSettings(scaling="component", **weights))
    raw = np.array([-2.0 + 0.5, -2.05, 2.05, 2.05])
    np.testing.assert_allclose(mixed, (raw - raw.mean()) / raw.std(), rtol=1e-6)


def test_without_a_preference_it_is_the_normalised_advantage() -> None:
    mixed = mix_advantages(np.array([[1.0], [2.0], [6.0]]), np.ones((3, 1)), None, PreferenceSettings())
    np.testing.assert_allclose(mixed, np.array([-2.0, -1.0, 3.0]) / np.sqrt(14.0 / 3.0), rtol=1e-6)
