"""Heads act as they say: the spread of actions is that of the policy, and what is stored is enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opencda_marl.core.spec import ActionSpec
from opencda_marl.nn.heads import Categorical, SquashedGaussian, TanhGaussian, make_head


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


def test_the_greedy_level_is_the_median() -> None:
    head = Categorical((0.0, 0.1, 0.2, 1.0), fraction=0.5, log_std=0.0)
    shares = torch.tensor([[0.0, 0.3, 0.3, 0.4], [0.6, 0.0, 0.0, 0.4], [0.3, 0.3, 0.2, 0.2], [0.0, 0.0, 0.4, 0.6]])
    values, stored = head.act({}, "", shares.clamp(min=1e-9).log(), None)
    assert values.squeeze(-1).tolist() == [2.0, 0.0, 1.0, 3.0]
    assert (stored == values).all()


def test_the_greedy_action_of_a_gaussian_is_its_mean() -> None:
    values, _ = TanhGaussian(1, fraction=0.5, log_std=0.0).act({}, "", torch.tensor([[0.3]]), None)
    assert values.item() == pytest.approx(math.tanh(0.3))


def test_the_greedy_action_is_the_quantile_that_was_asked_for() -> None:
    """A lower one never goes faster; and it is the quantile of what is drawn."""
    shares = torch.tensor([[0.05, 0.3, 0.3, 0.35], [0.6, 0.0, 0.0, 0.4]])
    chosen = {}
    for greedy in (0.01, 0.3, 0.4, 0.7, 0.99):
        head = Categorical((0.0, 0.1, 0.2, 1.0), fraction=0.5, log_std=0.0, greedy=greedy)
        chosen[greedy] = head.act({}, "", shares.clamp(min=1e-9).log(), None)[0].squeeze(-1).tolist()
    assert chosen == {0.01: [0, 0], 0.3: [1, 0], 0.4: [2, 0], 0.7: [3, 3], 0.99: [3, 3]}

    mean, spread = torch.tensor([[0.3]]), {"log_std": torch.tensor([-0.5])}
    head = TanhGaussian(1, fraction=0.5, log_std=0.0, greedy=0.2)
    greedy_action = head.act(spread, "", mean, None)[0]
    noise = torch.from_numpy(head.noise(np.random.default_rng(1), 20_000))
    drawn = head.act(spread, "", mean.expand(20_000, 1), noise)[0]
    assert float((drawn < greedy_action).float().mean()) == pytest.approx(0.2, abs=0.01)


# --- soft actor-critic


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.3), (0.2, -2.5)])
def test_a_squashed_gaussians_density_integrates_to_one(mean: float, log_std: float) -> None:
    """And so does its mean: numerically, over all actions."""
    pre_tanh = torch.linspace(-12.0, 12.0, 200_001, dtype=torch.float64)[:, None]
    outputs = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(pre_tanh), 2)
    noise = (pre_tanh - mean) / math.exp(log_std)
    action, log_prob = SquashedGaussian(1).sample(outputs, noise)
    torch.testing.assert_close(action, torch.tanh(pre_tanh))
    assert torch.trapezoid(log_prob.exp(), action[:, 0]).item() == pytest.approx(1.0, abs=1e-5)
    drawn = torch.tanh(mean + math.exp(log_std) * torch.randn(200_000, generator=torch.Generator().manual_seed(0)))
    expected = torch.trapezoid(log_prob.exp() * action[:, 0], action[:, 0]).item()
    assert drawn.mean().item() == pytest.approx(expected, abs=0.005)


def test_a_squashed_gaussian_acts_as_it_is_trained() -> None:
    head = SquashedGaussian(2)
    assert (head.outputs, head.stored) == (4, 2)
    outputs, rows = torch.tensor([[0.5, -0.3, 0.1, -9.0]]), 20_000
    noise = torch.from_numpy(head.noise(np.random.default_rng(0), rows))
    values, stored = head.act({}, "", outputs.expand(rows, 4), noise)
    sampled, log_prob = head.sample(outputs.expand(rows, 4), noise)
    assert torch.equal(values, stored)
    assert torch.equal(values, sampled)
    pre_tanh = torch.atanh(values.double())
    assert pre_tanh[:, 0].std().item() == pytest.approx(math.exp(0.1), rel=0.02)
    assert pre_tanh[:, 1].std().item() == pytest.approx(math.exp(-5.0), rel=0.02)  # the least spread
    greedy, _ = head.act({}, "", outputs, None)
    assert greedy[0].tolist() == pytest.approx([math.tanh(0.5), math.tanh(-0.3)])
    normal = torch.distributions.Normal(torch.tensor([0.5, -0.3]), torch.tensor([math.exp(0.1), math.exp(-5.0)]))
    squashed = torch.distributions.TransformedDistribution(normal, [torch.distributions.TanhTransform()])
    expected = squashed.log_prob(sampled[:50]).sum(-1)
    torch.testing.assert_close(log_prob[:50], expected, atol=2e-2, rtol=1e-3)


def test_a_squashed_gaussian_is_finite_far_out() -> None:
    outputs = torch.tensor([[30.0, 5.0], [-30.0, -50.0]], requires_grad=True)
    action, log_prob = SquashedGaussian(1).sample(outputs, torch.tensor([[3.0], [-3.0]]))
    assert action.tolist() == [[1.0], [-1.0]]
    assert torch.isfinite(log_prob).all()
    (gradient,) = torch.autograd.grad(log_prob.sum(), outputs)
    assert torch.isfinite(gradient).all()
