"""How advantages of several objectives become one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch

from opencda_marl.learners.mappo import Mappo
from opencda_marl.settings.learning import PreferenceSettings


def _mixed(
    advantages: np.ndarray, preference: np.ndarray, scaling: Literal["shared", "component"], team_weight: float = 1.0
) -> np.ndarray:
    rows = np.arange(len(advantages))
    rollout = SimpleNamespace(column=lambda name: {"preference": preference}[name])
    learner = SimpleNamespace(
        _conditioned=True,
        _settings=SimpleNamespace(preference=PreferenceSettings(scaling=scaling, team_weight=team_weight)),
        _rollout=rollout,
        _over_rollout=lambda values, _: torch.from_numpy(values),
    )
    return Mappo._mix(learner, advantages.copy(), np.ones_like(advantages), rows).numpy()  # type: ignore[arg-type]


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
