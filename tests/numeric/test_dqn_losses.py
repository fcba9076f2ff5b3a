"""Double DQN's target, loss and step: by hand on a linear net, and against torch's own modules and Adam."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.spec import ActionSpec, Feature, ObservationSpec
from opencda_marl.learners.dqn import METRICS, DoubleDqn
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.heads import EpsilonGreedy
from opencda_marl.settings.offpolicy import DqnSettings
from opencda_marl.settings.run import RunSettings

ONE = ObservationSpec("one", 1, (Feature("x", "1", 1.0, ""),), (), 0)
FOUR = ObservationSpec("four", 1, tuple(Feature(f"x{i}", "1", 1.0, "") for i in range(4)), (), 0)
LEVELS = ActionSpec("levels", levels=(0.0, 0.5, 1.0))


def made(spec: ObservationSpec = ONE, **own: object) -> DoubleDqn:
    settings = RunSettings(algorithm="dqn", action="levels", learner=DqnSettings(**{"hidden": [], **own}))
    return DoubleDqn(settings, spec, LEVELS, None, trained=False)


def linear(slopes: list[float], offsets: list[float]) -> Tensor:
    """theta of a net without hidden layers: Q(x) = offsets + slopes x."""
    arrays = {"actor.values.0.weight": np.array([slopes]), "actor.values.0.bias": np.array(offsets)}
    return torch.from_numpy(made().layout.flatten(arrays)).double()


ONLINE = linear([0.0, 1.0, -1.0], [1.0, 0.0, 0.0])  # at x = 2: 1, 2, -2; at x = 0: 1, 0, 0
TARGET = linear([0.0, 0.0, 0.0], [10.0, 3.0, 7.0])


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def inputs(**changes: Tensor) -> dict[str, Tensor]:
    found = {
        "ego": column(2.0, 0.0),
        "action": column(2.0, 1.0),
        "rewards": column(1.0, -20.0),
        "discount": torch.tensor([0.5, 0.0], dtype=torch.float64),
        "next_ego": column(2.0, 0.0),
    }
    return found | changes


def test_the_net_chooses_and_the_target_says_what_it_is_worth() -> None:
    algorithm = made()
    found = algorithm.targets(
        algorithm.layout.views(ONLINE),
        algorithm.layout.views(TARGET),
        inputs(discount=torch.tensor([0.5, 0.25], dtype=torch.float64)),
    )
    # at x' = 2 level 1 is best and worth 3, not 10; at x' = 0 level 0 is best and worth 10
    np.testing.assert_allclose(found.ravel(), [1.0 + 0.5 * 3.0, -20.0 + 0.25 * 10.0])


def test_nothing_follows_a_terminal_decision() -> None:
    algorithm = made()
    found = algorithm.targets(algorithm.layout.views(ONLINE), algorithm.layout.views(TARGET), inputs())
    np.testing.assert_allclose(found.ravel(), [2.5, -20.0])


def test_the_loss_is_half_the_square_and_moves_the_level_that_was_taken() -> None:
    theta = as_leaf(ONLINE)
    algorithm = made()
    loss, parts = algorithm.losses(theta, TARGET, inputs())
    # taken: Q(2, level 2) = -2 and Q(0, level 1) = 0; errors -4.5 and 20; halves of 20.25 and 400, mean
    assert loss.item() == pytest.approx((20.25 + 400.0) / 4)
    assert parts["value_mean"].item() == pytest.approx(-1.0)
    assert parts["target_mean"].item() == pytest.approx(-8.75)
    (gradient,) = torch.autograd.grad(loss, theta)
    found = algorithm.layout.views(gradient)
    np.testing.assert_allclose(found["actor.values.0.bias"], [0.0, 10.0, -2.25])
    np.testing.assert_allclose(found["actor.values.0.weight"][0], [0.0, 0.0, -4.5])


@pytest.mark.parametrize("limit", [None, 0.5])
def test_steps_are_those_of_a_plain_torch_implementation(limit: float | None) -> None:
    algorithm, rng = made(FOUR, hidden=[8], max_grad_norm=limit), np.random.default_rng(0)
    arrays = algorithm.initialise(rng)
    state = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    state |= {name: torch.zeros_like(state["theta"]) for name in ("m", "v")}
    begun = state["theta"]

    def module(theta: Tensor) -> nn.Sequential:
        views = algorithm.layout.views(theta)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        for i in range(2):
            net[2 * i].weight.data = views[f"actor.values.{i}.weight"].T.clone()
            net[2 * i].bias.data = views[f"actor.values.{i}.bias"].clone()
        return net

    net = module(state["theta"])
    target = copy.deepcopy(net)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for done in range(20):
        b = {name: torch.from_numpy(rng.normal(size=(12, 4))) for name in ("ego", "next_ego")}
        b["rewards"] = torch.from_numpy(rng.normal(size=(12, 1)))
        b["action"] = torch.from_numpy(rng.integers(0, 3, (12, 1))).double()
        b["discount"] = torch.from_numpy(rng.choice([0.0, 0.95], 12))
        with torch.no_grad():
            best = net(b["next_ego"]).argmax(1)
            worth = target(b["next_ego"])[torch.arange(12), best]
            wanted = b["rewards"][:, 0] + b["discount"] * worth
        values = net(b["ego"])[torch.arange(12), b["action"][:, 0].long()]
        loss = nn.functional.mse_loss(values, wanted) / 2
        optimiser.zero_grad()
        loss.backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(net.parameters(), limit)
        optimiser.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)
        b |= {
            "epsilon": torch.tensor(0.5, dtype=torch.float64),
            "learning_rate": torch.tensor(1e-2),
            "tau": torch.tensor(0.1, dtype=torch.float64),
        }
        state |= {"theta": as_leaf(state["theta"]), "step": torch.tensor(float(done), dtype=torch.float64)}
        state, metrics = algorithm.step(state, b)
        assert metrics[METRICS.index("epsilon")].item() == 0.5
        assert metrics[METRICS.index("critic_loss")].item() == pytest.approx(loss.item(), rel=1e-6)
    for key, other in (("theta", net), ("target", target)):
        for one, its in zip(module(state[key]).parameters(), other.parameters(), strict=True):
            np.testing.assert_allclose(one.detach(), its.detach(), rtol=1e-6, atol=1e-7)
    assert (state["theta"] - begun).norm() > 0.3


# --- acting


def test_epsilon_falls_until_its_share_of_the_budget_is_used() -> None:
    algorithm = made(epsilon=1.0, epsilon_end=0.05, exploration_fraction=0.4)
    assert algorithm.head.epsilon == 1.0
    for done, expected in ((0.0, 1.0), (0.1, 1.0 - 0.25 * 0.95), (0.2, 0.525), (0.4, 0.05), (1.0, 0.05), (0.2, 0.525)):
        algorithm.progress(done)
        assert algorithm.head.epsilon == pytest.approx(expected)


def test_epsilon_greedy_by_hand_and_in_the_mean() -> None:
    head = EpsilonGreedy(4, epsilon=0.3)
    values = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).expand(4, 4)
    noise = torch.tensor([[0.29, 0.0], [0.31, 0.0], [0.0, 0.74], [0.0, np.nextafter(np.float32(1), np.float32(0))]])
    chosen, stored = head.act({}, "", values, noise)
    assert chosen is stored
    assert chosen.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert head.act({}, "", values, None)[0].ravel().tolist() == [1.0] * 4
    many = torch.from_numpy(head.noise(np.random.default_rng(1), 40_000))
    found = head.act({}, "", values[:1].expand(40_000, 4), many)[0].ravel()
    shares = torch.bincount(found.long(), minlength=4) / 40_000
    np.testing.assert_allclose(shares, [0.075, 0.775, 0.075, 0.075], atol=0.01)


def test_actions_before_learning_are_any_level() -> None:
    found = made().random(np.random.default_rng(2), 3000)
    assert (found.shape, found.dtype) == ((3000, 1), np.float32)
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [0.0, 1.0, 2.0]
    assert counts.min() > 900


def test_a_continuous_action_is_refused() -> None:
    settings = RunSettings(algorithm="dqn", learner=DqnSettings())
    with pytest.raises(ConfigError, match="levels"):
        DoubleDqn(settings, ONE, ActionSpec("target_speed"), None, trained=False)
