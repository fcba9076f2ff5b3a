"""Heads act as they say: the spread of actions is that of the policy, and what is stored is enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opencda_marl.core.spec import ActionSpec
from opencda_marl.nn.heads import Categorical, TanhGaussian, make_head


def test_kinds_of_action() -> None:
    assert isinstance(make_head(ActionSpec("levels", levels=(0.0, 1.0)), fraction=0.5, log_std=0.0), Categorical)
    for kind in ("target_speed", "acceleration"):
        assert isinstance(make_head(ActionSpec(kind), fraction=0.5, log_std=0.0), TanhGaussian)


def test_gaussian_actions_are_spread_as_the_policy_says() -> None:
    head = TanhGaussian(1, fraction=0.5, log_std=-1.0)
    parameters = {"log_std": torch.tensor([-1.0])}
    rows = 20_000
    noise = torch.from_numpy(head.noise(np.random.default_rng(0), rows))
    values, stored = head.act(parameters, "", torch.full((rows, 1), 0.7), noise)
    assert stored.mean().item() == pytest.approx(0.7, abs=0.01)
    assert stored.std().item() == pytest.approx(math.exp(-1.0), rel=0.02)
    assert torch.equal(values, torch.tanh(stored))


def test_spread_is_held_within_bounds() -> None:
    head = TanhGaussian(1, fraction=0.5, log_std=0.0)
    noise = torch.ones(1, 1)
    for log_std, bound in ((-50.0, -5.0), (50.0, 2.0)):
        _, stored = head.act({"log_std": torch.tensor([log_std])}, "", torch.zeros(1, 1), noise)
        assert stored.item() == pytest.approx(math.exp(bound))


def test_levels_are_drawn_as_often_as_the_policy_says() -> None:
    head = Categorical((0.0, 0.5, 1.0), fraction=0.5, log_std=0.0)
    shares = torch.tensor([0.2, 0.5, 0.3])
    rows = 30_000
    noise = torch.from_numpy(head.noise(np.random.default_rng(0), rows))
    values, stored = head.act({}, "", shares.log().expand(rows, 3), noise)
    assert torch.equal(values, stored)
    found = torch.bincount(values[:, 0].long(), minlength=3) / rows
    torch.testing.assert_close(found, shares, atol=0.01, rtol=0.0)


def test_the_last_level_is_the_limit_of_rounding() -> None:
    head = Categorical((0.0, 1.0), fraction=0.5, log_std=0.0)
    values, _ = head.act({}, "", torch.zeros(1, 2), torch.ones(1, 1))
    assert values.item() == 1.0


def test_greedy_is_the_likeliest() -> None:
    assert (
        Categorical((0.0, 0.5, 1.0), fraction=0.5, log_std=0.0)
        .act({}, "", torch.tensor([[0.0, 2.0, 1.0]]), None)[0]
        .item()
        == 1.0
    )
    values, _ = TanhGaussian(1, fraction=0.5, log_std=0.0).act({}, "", torch.tensor([[0.3]]), None)
    assert values.item() == pytest.approx(math.tanh(0.3))
