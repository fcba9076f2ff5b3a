"""Every loss against numbers worked by hand, or against torch's own form of the same equation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from opencda_marl.core.spec import ActionSpec, Feature, ObservationSpec
from opencda_marl.learners.mappo import METRICS, Networks, minibatch_step, ppo_loss
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.heads import Categorical, TanhGaussian, gaussian_log_prob, tanh_gaussian_entropy
from opencda_marl.nn.optimiser import adam, clip_by_norm, linear_schedule, rate_schedule
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.run import RunSettings

SPEC = ObservationSpec("one", 1, (Feature("x", "1", 1.0, ""),), (), 0)


class Fixed(Networks):
    """Networks that say what the test wants them to say."""

    def __init__(self, log_prob: list[float], values: list[list[float]], entropy: list[float]) -> None:
        self.log_probs, self.values = torch.tensor(log_prob, requires_grad=True), torch.tensor(values)
        self.entropies = torch.tensor(entropy)
        self.head = self

    def actor(self, parameters: object, batch: object) -> Tensor:
        return torch.zeros(len(self.entropies), 1)

    def critic(self, parameters: object, batch: object) -> Tensor:
        return self.values

    def log_prob(self, *_: object) -> Tensor:
        return self.log_probs

    def entropy(self, *_: object) -> Tensor:
        return self.entropies


def loss_of(
    ratios: list[float], advantages: list[float], *, weight: list[float] | None = None, **more: object
) -> tuple[float, dict[str, float], Tensor]:
    rows = len(ratios)
    values = more.get("values", [[0.0]] * rows)
    returns = more.get("returns", [[0.0]] * rows)
    networks = Fixed([math.log(r) for r in ratios], values, more.get("entropy", [0.0] * rows))
    batch = {
        "log_prob": torch.zeros(rows),
        "action": torch.zeros(rows, 1),
        "advantage": torch.tensor(advantages),
        "returns": torch.tensor(returns),
        "weight": torch.tensor(weight or [1.0] * rows),
    }
    settings = MappoSettings(clip=0.2, value_weight=0.5)
    loss, metrics = ppo_loss(networks, settings, {}, batch, torch.tensor(0.01))
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, networks.log_probs.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: -r A, slope by log r is -r A
        (1.5, 2.0, -2.4, 0.0),  # good and already too likely: clipped at 1.2, no more push
        (0.5, 2.0, -1.0, -1.0),  # good but less likely: not clipped, pushed back
        (0.5, -2.0, 1.6, 0.0),  # bad and already rare: clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),  # bad and likelier: not clipped
    ],
)
def test_clipped_surrogate_on_both_sides_of_both_bounds(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    found, metrics, gradient = loss_of([ratio], [advantage])
    assert found == pytest.approx(loss, rel=1e-6)
    assert metrics["policy_loss"] == pytest.approx(loss, rel=1e-6)
    assert gradient.item() == pytest.approx(slope, rel=1e-6, abs=1e-7)
    assert metrics["clip_fraction"] == float(abs(ratio - 1.0) > 0.2)
    assert metrics["approx_kl"] == pytest.approx(ratio - 1.0 - math.log(ratio), rel=1e-5)


def test_value_loss_is_half_the_square_summed_over_components_and_averaged_over_rows() -> None:
    found, metrics, _ = loss_of(
        [1.0, 1.0], [0.0, 0.0], values=[[1.0, 2.0], [0.0, 0.0]], returns=[[0.0, 0.0], [3.0, 0.0]], entropy=[1.0, 3.0]
    )
    # rows: (1 + 4) / 2 = 2.5 and 9 / 2 = 4.5; mean 3.5; entropy mean 2
    assert metrics["value_loss"] == pytest.approx(3.5)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert found == pytest.approx(0.5 * 3.5 - 0.01 * 2.0)


def test_rows_of_weight_zero_do_not_exist() -> None:
    two = loss_of([1.1, 0.7], [1.0, -1.0], values=[[1.0], [2.0]], returns=[[0.0], [0.0]], entropy=[1.0, 2.0])
    three = loss_of(
        [1.1, 0.7, 1.9], [1.0, -1.0, 99.0], values=[[1.0], [2.0], [50.0]], returns=[[0.0], [0.0], [0.0]],
        entropy=[1.0, 2.0, 77.0], weight=[1.0, 1.0, 0.0],
    )  # fmt: skip
    assert two[0] == pytest.approx(three[0])
    assert two[1] == pytest.approx(three[1])
    assert three[2][2] == 0.0


def test_tanh_log_prob_is_that_of_torch_distributions() -> None:
    rng = np.random.default_rng(0)
    mean, log_std, pre_tanh = (torch.from_numpy(rng.normal(size=(50, 2))) for _ in range(3))
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, [torch.distributions.TanhTransform(cache_size=1)])
    action = torch.tanh(pre_tanh)
    expected = squashed.log_prob(action).sum(-1)
    got = gaussian_log_prob(pre_tanh, mean, log_std)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_tanh_log_prob_by_hand_and_far_out() -> None:
    # u = 0: density of N(0, 1) at 0 and no correction
    at_zero = gaussian_log_prob(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1))
    assert at_zero.item() == pytest.approx(-0.5 * math.log(2 * math.pi))
    # u = 20: 1 - tanh^2 underflows in float32, its logarithm is 2 log 2 - 2 u
    far = gaussian_log_prob(torch.full((1, 1), 20.0), torch.full((1, 1), 20.0), torch.zeros(1))
    assert far.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - (2 * math.log(2.0) - 40.0), rel=1e-6)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.3), (1.1, 0.6), (-2.0, 1.0), (0.5, 1.5)])
def test_entropy_of_the_squashed_gaussian_is_that_of_samples(mean: float, std: float) -> None:
    rng = np.random.default_rng(1)
    drawn = torch.from_numpy(rng.normal(mean, std, (400_000, 1)))
    centre, spread = torch.full_like(drawn, mean), torch.full((1,), math.log(std), dtype=torch.float64)
    expected = -gaussian_log_prob(drawn, centre, spread).mean().item()
    got = tanh_gaussian_entropy(torch.full((1, 1), mean, dtype=torch.float64), spread).item()
    assert got == pytest.approx(expected, abs=0.01)


def test_entropy_turns_down_when_the_spread_saturates() -> None:
    """The plain Gaussian's would grow for ever; the executed action is most spread out near a uniform one."""
    log_std = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64)
    narrow, uniform, saturated = (tanh_gaussian_entropy(torch.zeros(1, 1), s[None].float()).item() for s in log_std)
    assert narrow < uniform
    assert saturated < uniform
    assert uniform < math.log(2.0)  # of the uniform distribution on [-1, 1]


def test_categorical_head_against_torch_distributions() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, 0.0]])
    head = Categorical((0.0, 0.5, 1.0), fraction=0.8, log_std=-0.5)
    reference = torch.distributions.Categorical(logits=logits)
    chosen = torch.tensor([[2.0], [0.0]])
    torch.testing.assert_close(head.log_prob({}, "", logits, chosen), reference.log_prob(torch.tensor([2, 0])))
    torch.testing.assert_close(head.entropy({}, "", logits), reference.entropy())


def test_adam_is_torchs_adam_with_a_changing_rate() -> None:
    rng = np.random.default_rng(2)
    start = torch.from_numpy(rng.normal(size=7))
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.Adam([parameter], lr=1.0, foreach=False)
    theta, m, v = start.clone(), torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for i in range(1, 51):
        gradient = torch.from_numpy(rng.normal(size=7) * 10.0 ** rng.uniform(-4, 2))
        rate = 0.1 / i
        reference.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        reference.step()
        step = torch.tensor(float(i), dtype=torch.float64)
        theta, m, v = adam(theta, gradient, m, v, step, torch.tensor(rate, dtype=torch.float64))
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_first_step_of_adam_by_hand() -> None:
    theta, m, v = adam(
        torch.tensor([1.0]), torch.tensor([0.5]), torch.zeros(1), torch.zeros(1), torch.tensor(1.0), torch.tensor(0.1)
    )
    # m = 0.05, v = 0.00025; unbiased 0.5 and 0.25; so a step of 0.1 * 0.5 / 0.5
    assert (m.item(), v.item(), theta.item()) == pytest.approx((0.05, 0.00025, 0.9), rel=1e-5)


def test_clipping_keeps_the_direction_and_says_the_norm() -> None:
    gradient, norm = clip_by_norm(torch.tensor([3.0, 4.0]), 1.0)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(gradient, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=1e-6)
    untouched, _ = clip_by_norm(torch.tensor([0.3, 0.4]), 1.0)
    torch.testing.assert_close(untouched, torch.tensor([0.3, 0.4]))


def test_learning_rates_end_where_they_should() -> None:
    found = [rate_schedule("exponential", 1.0, 0.01, x) for x in (-1.0, 0.0, 0.25, 0.5, 1.0, 7.0)]
    assert found == pytest.approx([1, 1, 0.1**0.5, 0.1, 0.01, 0.01])
    assert rate_schedule("linear", 1.0, 0.2, 0.5) == pytest.approx(0.6)
    assert rate_schedule("exponential", 1e-320, 1.0, 0.5) == pytest.approx(1e-160, rel=1e-2)


def test_linear_schedule_ends_where_it_should() -> None:
    assert [linear_schedule(1.0, 0.2, x) for x in (-1.0, 0.0, 0.5, 1.0, 7.0)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])


def test_a_minibatch_step_is_the_loss_torch_adam_and_clip_grad_norm() -> None:
    """The flat, pure step against what one writes with modules' tools: the same parameters after five steps."""
    settings = RunSettings(learner=MappoSettings(hidden=[8], ego_hidden=[], max_grad_norm=0.05))
    networks = Networks(settings, SPEC, ActionSpec("target_speed"), None, trained=False)
    rng = np.random.default_rng(3)
    theta = torch.from_numpy(networks.initialise(rng)).double()
    rows = 16
    batch = {
        "ego": torch.from_numpy(rng.normal(size=(rows, 1))),
        "scene": torch.from_numpy(rng.normal(size=(rows, 2))),
        "action": torch.from_numpy(rng.normal(size=(rows, 1))),
        "log_prob": torch.from_numpy(rng.normal(size=rows)),
        "advantage": torch.from_numpy(rng.normal(size=rows)),
        "returns": torch.from_numpy(rng.normal(size=(rows, 1))),
        "weight": torch.ones(rows, dtype=torch.float64),
    }
    bonus = torch.tensor(0.01, dtype=torch.float64)
    inputs = {**batch, "learning_rate": torch.tensor(1e-2, dtype=torch.float64), "entropy_weight": bonus}

    leaves = {name: torch.nn.Parameter(view.clone()) for name, view in networks.layout.views(theta).items()}
    optimiser = torch.optim.Adam(leaves.values(), lr=1e-2, foreach=False)
    moments = {"m": torch.zeros_like(theta), "v": torch.zeros_like(theta)}
    state = {"theta": theta, **moments, "step": torch.zeros((), dtype=torch.float64)}
    for _ in range(5):
        optimiser.zero_grad()
        loss, _ = ppo_loss(networks, settings.learner, leaves, batch, bonus)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.05, foreach=False)
        optimiser.step()
        given = {**state, "theta": as_leaf(state["theta"])}
        state, metrics = minibatch_step(networks, settings.learner, given, inputs)
        assert state.keys() == given.keys()
        found = dict(zip(METRICS, metrics.tolist(), strict=True))
        assert found["gradient_norm"] == pytest.approx(norm.item(), rel=1e-9)
        both = math.hypot(found["actor_gradient_norm"], found["critic_gradient_norm"])
        assert found["gradient_norm"] == pytest.approx(both, rel=1e-9)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-9)
    flat = torch.cat([leaf.detach().reshape(-1) for leaf in leaves.values()])
    torch.testing.assert_close(state["theta"], flat, rtol=1e-10, atol=1e-10)
    assert state["step"].item() == 5.0


def test_every_parameter_has_a_gradient() -> None:
    for algorithm in ("mappo", "pcmappo"):
        settings = RunSettings(algorithm=algorithm, learner=MappoSettings(hidden=[8], ego_hidden=[4]))
        networks = Networks(settings, SPEC, ActionSpec("levels", levels=(0.0, 1.0)), None, trained=False)
        rng = np.random.default_rng(4)
        theta = torch.from_numpy(networks.initialise(rng) + rng.normal(0, 0.1, networks.layout.size)).float()
        rows, parts = 32, len(networks.components)
        names = {"ego": 1, "scene": 2, "preference": 3, "returns": parts}
        batch = {n: torch.from_numpy(rng.normal(size=(rows, w)).astype(np.float32)) for n, w in names.items()}
        batch |= {n: torch.from_numpy(rng.normal(size=rows).astype(np.float32)) for n in ("log_prob", "advantage")}
        batch |= {"action": torch.zeros(rows, 1), "weight": torch.ones(rows)}
        leaf = as_leaf(theta)
        loss, _ = ppo_loss(networks, settings.learner, networks.layout.views(leaf), batch, torch.tensor(0.01))
        (gradient,) = torch.autograd.grad(loss, leaf)
        for name, view in networks.layout.views(gradient).items():
            assert view.abs().max() > 0, name


def test_heads_begin_where_the_settings_say() -> None:
    head = TanhGaussian(1, fraction=0.8, log_std=-0.5)
    values, _ = head.act({"log_std": torch.tensor([-0.5])}, "", torch.from_numpy(head.initial_bias())[None], None)
    assert (values.item() + 1.0) / 2.0 == pytest.approx(0.8)
    levels = Categorical((0.0, 0.25, 0.5, 0.75, 1.0), fraction=0.8, log_std=-0.5)
    index, _ = levels.act({}, "", torch.from_numpy(levels.initial_bias())[None], None)
    assert index.item() == 3.0
