"""The losses of soft actor-critic: worked by hand, and against a straightforward form in torch's own modules."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.spec import ActionSpec, Feature, ObservationSpec
from opencda_marl.learners.masac import METRICS, SoftActorCritic
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.flat import as_leaf
from opencda_marl.settings.learning import ContextSettings, PreferenceSettings
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.settings.run import RunSettings

ONE = ObservationSpec("one", 1, (Feature("x", "1", 1.0, ""),), (), 0)
BARE = replace(ONE, ego=tuple(Feature(f"x{i}", "1", 1.0, "") for i in range(5)))
ROWS = ObservationSpec("rows", 1, BARE.ego, tuple(Feature(f"y{i}", "1", 1.0, "") for i in range(4)), 3)


def made(
    algorithm: str = "masac",
    spec: ObservationSpec = BARE,
    *,
    trained: bool = False,
    preference: PreferenceSettings | None = None,
    actions: int = 1,
    **own: Any,
) -> SoftActorCritic:
    settings = RunSettings(
        algorithm=algorithm,
        context=ContextSettings(size=6, hidden=8),
        preference=preference or PreferenceSettings(),
        learner=MasacSettings(**{"hidden": [16, 8], **own}),
    )
    action = ActionSpec("target_speed", size=actions)
    return SoftActorCritic(settings, spec, action, make_encoder(spec, settings.context), trained=trained)


def start(nets: SoftActorCritic, seed: int = 0) -> dict[str, Tensor]:
    """A state in double precision, with targets that are not the weights."""
    rng = np.random.default_rng(seed)
    first = {name: torch.from_numpy(array).double() for name, array in nets.initialise(rng).items()}
    theta = first["theta"] + 0.3 * torch.from_numpy(rng.normal(size=nets.layout.size))
    target = first["target"] + 0.3 * torch.from_numpy(rng.normal(size=len(first["target"])))
    zero = torch.zeros_like(theta)
    return {"theta": theta, "target": target, "m": zero, "v": zero, "step": theta.new_zeros(())}


def inputs_of(
    nets: SoftActorCritic, spec: ObservationSpec = BARE, *, rows: int = 24, seed: int = 1, trained: bool = False
) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    actions = nets.head.stored

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    found = {"action": torch.tanh(normal(rows, actions)), "rewards": normal(rows, len(nets.components))}
    found["discount"] = torch.from_numpy(rng.uniform(0.5, 1.0, rows)) * torch.from_numpy(rng.random(rows) < 0.8)
    for prefix in ("", "next_"):
        found[prefix + "ego"] = normal(rows, len(spec.ego))
        if trained:
            found[prefix + "neighbours"] = normal(rows, spec.max_neighbours, len(spec.neighbour))
            found[prefix + "counts"] = torch.from_numpy(rng.integers(0, spec.max_neighbours + 1, rows).astype(np.int32))
        elif spec.neighbour:
            found[prefix + "context"] = normal(rows, 6)
    if nets.conditioned:
        found["preference"] = found["next_preference"] = torch.from_numpy(rng.dirichlet([1.0, 1.0, 1.0], rows))
    numbers = {"learning_rate": torch.tensor(1e-2, dtype=torch.float64), "tau": torch.tensor(0.05, dtype=torch.float64)}
    noise = {"noise": normal(rows, actions), "next_noise": normal(rows, actions)}
    return found | noise | numbers


# --- by hand: one feature, one row, linear networks


def by_hand(**own: Any) -> tuple[SoftActorCritic, Tensor, Tensor, dict[str, Tensor]]:
    """Policy: mean 0.2, spread 1/2 everywhere. Q1 = x + 2a + 0.5, Q2 = -x + a + 1; the target's are 10 above."""
    nets = made(spec=ONE, hidden=[], **own)
    parameters = {
        "actor.policy.0.weight": np.zeros((1, 2)),
        "actor.policy.0.bias": np.array([0.2, math.log(0.5)]),
        "critic.values.0.weight": np.array([[[1.0]], [[-1.0]]]),
        "critic.values.0.action": np.array([[[2.0]], [[1.0]]]),
        "critic.values.0.bias": np.array([[[0.5]], [[1.0]]]),
        "log_alpha": np.array([math.log(0.25)]),
    }
    theta = torch.from_numpy(nets.layout.flatten(parameters)).double()
    above = parameters["critic.values.0.bias"] + 10.0
    later = {name: parameters[name] for name in parameters if name.startswith("critic.")}
    target = torch.from_numpy(nets._target_layout.flatten({**later, "critic.values.0.bias": above})).double()
    rows: dict[str, list[Any]] = {
        "ego": [[0.3]], "action": [[-0.5]], "rewards": [[1.5]], "discount": [0.9], "next_ego": [[0.1]],
        "noise": [[1.0]], "next_noise": [[-1.0]],
    }  # fmt: skip
    inputs = {name: torch.tensor(value, dtype=torch.float64) for name, value in rows.items()}
    numbers = {"learning_rate": torch.tensor(1e-3), "tau": torch.tensor(0.5)}
    return nets, theta, target, inputs | {name: number.double() for name, number in numbers.items()}


# u = 0.2 + 0.5 = 0.7: a = tanh 0.7 = 0.604368; log N = -0.5 + log 2 - 0.918939 = -0.725791;
# log(1 - a^2) = log 0.634740 = -0.454540; log pi = -0.271251
ACTION, LOG_PROB = 0.604368, -0.271251
# u' = 0.2 - 0.5 = -0.3: a' = -0.291313; log(1 - a'^2) = log 0.915137 = -0.088681; log pi' = -0.637110
NEXT_ACTION, NEXT_LOG_PROB = -0.291313, -0.637110


def test_the_target_by_hand() -> None:
    nets, theta, target, inputs = by_hand()
    parameters, following = nets.layout.views(theta), nets._target_layout.views(target)
    found = nets.targets(parameters, following, inputs, torch.tensor(0.25, dtype=torch.float64))
    # Q1' = 0.1 - 0.582626 + 10.5 = 10.017374, Q2' = -0.1 - 0.291313 + 11 = 10.608687: the first
    # 1.5 + 0.9 (10.017374 + 0.25 . 0.637110) = 10.658986
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(10.658986, abs=2e-6)
    ended = {**inputs, "discount": torch.zeros(1, dtype=torch.float64)}
    assert nets.targets(parameters, following, ended, torch.tensor(0.25)).item() == pytest.approx(1.5)


def test_the_losses_by_hand() -> None:
    nets, theta, target, inputs = by_hand()
    theta = as_leaf(theta)
    loss, parts = nets.losses(theta, target, inputs)
    # Q1 = 0.3 - 1 + 0.5 = -0.2, Q2 = -0.3 - 0.5 + 1 = 0.2: (10.858986^2 + 10.458986^2) / 2
    assert parts["critic_loss"].item() == pytest.approx(0.5 * (10.858986**2 + 10.458986**2), rel=1e-6)
    # Q1(a) = 0.3 + 1.208736 + 0.5 = 2.008736, Q2(a) = -0.3 + 0.604368 + 1 = 1.304368; 0.25 . -0.271251 - 1.304368
    assert parts["actor_loss"].item() == pytest.approx(-1.372181, abs=2e-6)
    # log 0.25 . (0.271251 + 1)
    assert parts["alpha_loss"].item() == pytest.approx(math.log(0.25) * 1.271251, abs=3e-6)
    assert parts["alpha"].item() == pytest.approx(0.25, rel=1e-6)
    assert parts["entropy"].item() == pytest.approx(-LOG_PROB, abs=2e-6)
    assert parts["value_mean"].item() == pytest.approx(0.0, abs=1e-7)
    assert parts["target_mean"].item() == pytest.approx(10.658986, abs=2e-6)
    assert loss.item() == pytest.approx(sum(parts[f"{name}_loss"].item() for name in ("critic", "actor", "alpha")))

    gradient = nets.layout.views(torch.autograd.grad(loss, theta)[0])
    # critic: error times input; the actor's loss leaves it alone
    errors = (-10.858986, -10.458986)
    for i, error in enumerate(errors):
        assert gradient["critic.values.0.bias"][i].item() == pytest.approx(error, rel=1e-6)
        assert gradient["critic.values.0.weight"][i].item() == pytest.approx(0.3 * error, rel=1e-6)
        assert gradient["critic.values.0.action"][i].item() == pytest.approx(-0.5 * error, rel=1e-6)
    # by the mean: alpha d log pi / du - (1 - a^2) . 1 of Q2, with d log pi / du = 2 tanh u
    slope = 0.25 * 2.0 * ACTION - (1.0 - ACTION**2)
    assert gradient["actor.policy.0.bias"][0].item() == pytest.approx(slope, abs=2e-6)
    # by log s: u moves by s eps = 0.5, and -log s is in log pi itself
    assert gradient["actor.policy.0.bias"][1].item() == pytest.approx(0.5 * slope - 0.25, abs=2e-6)
    # entropy above its target: alpha falls, since a step goes against the gradient
    assert gradient["log_alpha"].item() == pytest.approx(1.271251, abs=2e-6)


def test_the_temperature_follows_the_entropy() -> None:
    for aim, sign in ((-1.0, -1), (5.0, 1)):
        nets, theta, target, inputs = by_hand(target_entropy=aim)
        zero = torch.zeros_like(theta)
        state = {"theta": as_leaf(theta), "target": target, "m": zero, "v": zero, "step": theta.new_zeros(())}
        after, _ = nets.step(state, inputs)
        moved = (after["theta"][-1] - theta[-1]).item()
        assert moved == pytest.approx(sign * 1e-3, rel=1e-5)  # Adam's first step is the rate


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_a_fixed_temperature_stays(alpha: float) -> None:
    nets, theta, target, inputs = by_hand(alpha=alpha)
    leaf = as_leaf(theta)
    loss, parts = nets.losses(leaf, target, inputs)
    assert parts["alpha"].item() == alpha
    assert parts["actor_loss"].item() == pytest.approx(alpha * LOG_PROB - 1.304368, abs=2e-6)
    assert parts["target_mean"].item() == pytest.approx(1.5 + 0.9 * (10.017374 - alpha * NEXT_LOG_PROB), abs=3e-6)
    assert loss.item() == pytest.approx(parts["critic_loss"].item() + parts["actor_loss"].item())
    assert torch.autograd.grad(loss, leaf)[0][-1].item() == 0.0


def test_the_targets_follow_by_tau() -> None:
    nets, theta, target, inputs = by_hand()
    zero = torch.zeros_like(theta)
    state = {"theta": as_leaf(theta), "target": target, "m": zero, "v": zero, "step": theta.new_zeros(())}
    after, metrics = nets.step(state, inputs)
    assert after.keys() == state.keys()
    torch.testing.assert_close(after["target"], 0.5 * target + 0.5 * after["theta"][nets._critic])
    assert metrics.shape == (len(METRICS),)
    found = dict(zip(METRICS, metrics.tolist(), strict=True))
    slope = 0.25 * 2.0 * ACTION - (1.0 - ACTION**2)
    # weights of x: zero for the log-spread and the mean is a constant, yet they see x = 0.3
    actor = math.hypot(slope, 0.5 * slope - 0.25) * math.hypot(1.0, 0.3)
    assert found["actor_gradient_norm"] == pytest.approx(actor, rel=1e-5)
    critic = math.hypot(10.858986, 10.458986) * math.sqrt(1.0 + 0.09 + 0.25)
    assert found["critic_gradient_norm"] == pytest.approx(critic, rel=1e-5)


# --- against a straightforward form


class Plain(nn.Module):
    """As one would write it: a network each, three losses, each with gradients for its own parameters only."""

    def __init__(self, nets: SoftActorCritic, state: dict[str, Tensor], preference: PreferenceSettings) -> None:
        super().__init__()
        self.nets, self.weights = nets, preference
        mine, theirs = nets.layout.views(state["theta"]), nets._target_layout.views(state["target"])
        self.actor = self._network(
            [(mine[f"actor.policy.{i}.weight"], mine[f"actor.policy.{i}.bias"]) for i in range(3)]
        )
        self.critics = nn.ModuleList(self._critic(mine, i) for i in range(2))
        self.late = nn.ModuleList(self._critic(theirs, i) for i in range(2))
        self.log_alpha = nn.Parameter(mine["log_alpha"].clone())

    @staticmethod
    def _network(layers: list[tuple[Tensor, Tensor]]) -> nn.Sequential:
        found: list[nn.Module] = []
        for weight, bias in layers:
            linear = nn.Linear(*weight.shape, dtype=torch.float64)
            linear.weight.data, linear.bias.data = weight.T.clone(), bias.flatten().clone()
            found += [linear, nn.ReLU()]
        return nn.Sequential(*found[:-1])

    def _critic(self, views: dict[str, Tensor], twin: int) -> nn.Sequential:
        layers = []
        for i in range(3):
            weight = views[f"critic.values.{i}.weight"][twin]
            if i == 0:
                weight = torch.cat([weight, views["critic.values.0.action"][twin]])
            layers.append((weight, views[f"critic.values.{i}.bias"][twin]))
        return self._network(layers)

    def policy(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(seen).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5.0, 2.0).exp())
        squashing = torch.distributions.TanhTransform(cache_size=1)
        squashed = torch.distributions.TransformedDistribution(normal, [squashing])
        action = squashing(mean + normal.stddev * noise)
        return action, squashed.log_prob(action).sum(-1)

    def mixed(self, values: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if not self.nets.conditioned:
            return values[:, 0]
        own = sum(inputs["preference"][:, k] * values[:, k + 1] for k in range(3))
        return self.weights.team_weight * values[:, 0] + self.weights.individual_weight * own

    def losses(self, inputs: dict[str, Tensor], alpha: float | None, aim: float) -> tuple[Tensor, Tensor, Tensor]:
        def seen(prefix: str) -> Tensor:
            names = [n for n in ("ego", "context", "preference") if prefix + n in inputs]
            return torch.cat([inputs[prefix + name] for name in names], -1)

        now, then = seen(""), seen("next_")
        weight = self.log_alpha.exp().detach() if alpha is None else torch.tensor(alpha, dtype=torch.float64)
        share = 1.0
        if self.nets.conditioned:
            share = self.weights.team_weight + self.weights.individual_weight
        with torch.no_grad():
            action, log_prob = self.policy(then, inputs["next_noise"])
            both = [critic(torch.cat([then, action], -1)) for critic in self.late]
            first = self.mixed(both[0], inputs) <= self.mixed(both[1], inputs)
            chosen = torch.stack([both[0][i] if first[i] else both[1][i] for i in range(len(first))])
            chosen = chosen - (weight * log_prob / share)[:, None]
            wanted = inputs["rewards"] + inputs["discount"][:, None] * chosen
        values = [critic(torch.cat([now, inputs["action"]], -1)) for critic in self.critics]
        critic_loss = sum(0.5 * nn.functional.mse_loss(v, wanted, reduction="none").sum(-1).mean() for v in values)
        action, log_prob = self.policy(now, inputs["noise"])
        both = [self.mixed(critic(torch.cat([now, action], -1)), inputs) for critic in self.critics]
        actor_loss = (weight * log_prob - torch.min(*both)).mean()
        alpha_loss = -(self.log_alpha * (log_prob.detach() + aim)).mean()
        return critic_loss, actor_loss, alpha_loss

    def learn(self, optimiser: torch.optim.Optimizer, inputs: dict[str, Tensor], own: MasacSettings) -> list[float]:
        alpha = None if own.alpha == "auto" else float(own.alpha)
        critic_loss, actor_loss, alpha_loss = self.losses(inputs, alpha, own.target_entropy)
        parts = [(critic_loss, list(self.critics.parameters())), (actor_loss, list(self.actor.parameters()))]
        parts += [(alpha_loss, [self.log_alpha])] if alpha is None else []
        optimiser.zero_grad()
        for loss, parameters in parts:
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        if own.max_grad_norm is not None:
            learned = [parameter for _, parameters in parts for parameter in parameters]
            nn.utils.clip_grad_norm_(learned, own.max_grad_norm, foreach=False)
        optimiser.step()
        with torch.no_grad():
            for late, critic in zip(self.late.parameters(), self.critics.parameters(), strict=True):
                late += inputs["tau"] * (critic - late)
        return [critic_loss.item(), actor_loss.item(), alpha_loss.item()]


@pytest.mark.parametrize(
    ("algorithm", "spec", "own", "preference"),
    [
        ("masac", BARE, {}, {}),
        ("masac", ROWS, {"alpha": 0.0}, {}),
        ("masac", BARE, {"alpha": 0.3, "max_grad_norm": 0.5}, {}),
        ("masac", BARE, {"actions": 2, "target_entropy": -2.0}, {}),
        ("pcmasac", BARE, {"max_grad_norm": 1.0}, {}),
        ("pcmasac", ROWS, {}, {"team_weight": 0.4, "individual_weight": 2.0}),
    ],
)
def test_twenty_steps_are_those_of_torchs_modules(
    algorithm: str, spec: ObservationSpec, own: dict[str, Any], preference: dict[str, float]
) -> None:
    weights = PreferenceSettings(**preference)
    nets = made(algorithm, spec, preference=weights, **own)
    state = start(nets)
    plain = Plain(nets, state, weights)
    learned = [*plain.actor.parameters(), *plain.critics.parameters(), plain.log_alpha]
    optimiser = torch.optim.Adam(learned, lr=1e-2, foreach=False)
    first = state["theta"].clone()
    for i in range(20):
        inputs = inputs_of(nets, spec, seed=i)
        state, metrics = nets.step({**state, "theta": as_leaf(state["theta"])}, inputs)
        expected = plain.learn(optimiser, inputs, nets._own)
        found = dict(zip(METRICS, metrics.tolist(), strict=True))
        for name, value in zip(("critic_loss", "actor_loss", "alpha_loss"), expected, strict=True):
            assert found[name] == pytest.approx(value, rel=1e-8, abs=1e-8), (i, name)
    assert state["step"].item() == 20.0
    assert (state["theta"] - first).abs().max() > 0.05
    again = Plain(nets, state, weights)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-7, atol=1e-8)


# --- whose gradient


def gradient_of(nets: SoftActorCritic, state: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    theta = as_leaf(state["theta"])
    loss, _ = nets.losses(theta, state["target"], inputs)
    return nets.layout.views(torch.autograd.grad(loss, theta)[0])


@pytest.mark.parametrize("algorithm", ["masac", "pcmasac"])
def test_each_loss_moves_only_what_it_is_about(algorithm: str) -> None:
    nets = made(algorithm, ROWS, trained=True, ego_hidden=[7])
    state, inputs = start(nets), inputs_of(nets, ROWS, trained=True)
    before = gradient_of(nets, state, inputs)
    assert all(gradient.abs().max() > 0 for gradient in before.values()), "every parameter learns"
    encoder = {name for name in before if name.startswith("actor.context.")}
    actor = {name for name in before if name.startswith("actor.")} - encoder
    critic = {name for name in before if name.startswith("critic.")} | encoder
    assert len(encoder) == 4
    assert actor | critic | {"log_alpha"} == before.keys()

    def changed(**more: Tensor) -> set[str]:
        after = gradient_of(nets, state, {**inputs, **more})
        return {name for name in before if not torch.equal(before[name], after[name])}

    # the noise of the policy's own action is the actor's business, and the temperature's
    assert changed(noise=inputs["noise"] + 0.1) == actor | {"log_alpha"}
    # what was done, and what came of it, is the critic's, and the encoder's with it
    assert changed(rewards=inputs["rewards"] + 0.1) == critic
    assert changed(action=inputs["action"] * 0.9) == critic
    assert changed(next_noise=inputs["next_noise"] + 0.1) == critic


def test_a_trained_encoder_has_the_gradient_of_the_critics_loss() -> None:
    nets = made("masac", ROWS, trained=True)
    state, inputs = start(nets), inputs_of(nets, ROWS, trained=True)
    theta = as_leaf(state["theta"])
    parameters = nets.layout.views(theta)
    with torch.no_grad():
        alpha = parameters["log_alpha"].exp().squeeze()
        wanted = nets.targets(parameters, nets._target_layout.views(state["target"]), inputs, alpha)
    errors = nets._nets.critic(parameters, nets._nets.view(parameters, inputs, ""), inputs["action"]) - wanted
    loss = sum(0.5 * errors[i].pow(2).sum(-1).mean() for i in range(2))
    expected = nets.layout.views(torch.autograd.grad(loss, theta)[0])
    found = gradient_of(nets, state, inputs)
    for name in found:
        if not name.startswith("actor.policy.") and name != "log_alpha":
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)


def test_the_target_encodes_with_its_own_encoder() -> None:
    nets = made("masac", ROWS, trained=True)
    state, inputs = start(nets), inputs_of(nets, ROWS, trained=True)
    parameters, late = nets.layout.views(state["theta"]), nets._target_layout.views(state["target"])
    alpha = torch.tensor(0.0, dtype=torch.float64)
    found = nets.targets(parameters, late, inputs, alpha)
    action, _ = nets.head.sample(
        nets.actor(parameters, nets._nets.view(parameters, inputs, "next_")), inputs["next_noise"]
    )  # the policy sees what it sees when it acts
    values = nets._nets.critic(late, nets._nets.view(late, inputs, "next_"), action)
    torch.testing.assert_close(found, inputs["rewards"] + inputs["discount"][:, None] * values.amin(0))


# --- preferences


def embedded(nets: SoftActorCritic, single: SoftActorCritic, column: int, flat: Tensor) -> Tensor:
    """Parameters of PCMASAC that do in one component what MASAC's do, and do not look at the preference."""
    whole = nets.layout.views(torch.zeros(nets.layout.size, dtype=torch.float64))
    rng = torch.Generator().manual_seed(0)
    for name, tensor in single.layout.views(flat).items():
        if name.startswith("critic.values.2."):
            whole[name].copy_(torch.randn(whole[name].shape, generator=rng, dtype=torch.float64))
            whole[name][..., column] = tensor[..., 0]
        elif name.endswith(".0.weight"):
            whole[name][..., : tensor.shape[-2], :] = tensor
        else:
            whole[name].copy_(tensor)
    return torch.cat([tensor.flatten() for tensor in whole.values()])


@pytest.mark.parametrize(
    ("column", "team", "individual", "hot"),
    [(0, 1.0, 0.0, None), (0, 2.5, 0.0, None), (1, 0.0, 1.0, 0), (2, 0.0, 1.0, 1), (3, 0.0, 1.0, 2)],
)
def test_the_limits_are_the_plain_learner(column: int, team: float, individual: float, hot: int | None) -> None:
    """lambda 0: that of the team's reward. No team and a preference of one objective: that of this objective."""
    weights = PreferenceSettings(team_weight=team, individual_weight=individual)
    nets, single = made("pcmasac", preference=weights), made("masac")
    state = start(single)
    theta = embedded(nets, single, column, state["theta"])
    late = embedded(nets, single, column, torch.cat([state["theta"][: single._critic.start], state["target"],
                                                     state["theta"][-1:]]))[nets._critic]  # fmt: skip
    inputs = inputs_of(nets)
    if hot is not None:
        inputs["preference"] = inputs["next_preference"] = torch.eye(3, dtype=torch.float64)[hot].expand(24, 3)
    scale = team if hot is None else individual
    alone = {name: tensor for name, tensor in inputs.items() if not name.endswith("preference")}
    alone["rewards"] = inputs["rewards"][:, [column]]
    # a weight of the only component is the inverse weight of the entropy
    alpha = torch.tensor(0.25, dtype=torch.float64)
    views = nets.layout.views(theta), nets._target_layout.views(late)
    found = nets.targets(*views, inputs, scale * alpha)[:, column]
    plain = single.layout.views(state["theta"]), single._target_layout.views(state["target"])
    torch.testing.assert_close(found, single.targets(*plain, alone, alpha)[:, 0])
    if scale == 1.0:
        one, other = gradient_of(nets, {"theta": theta, "target": late}, inputs), gradient_of(single, state, alone)
        for name, gradient in other.items():
            if name.startswith("actor.") or name == "log_alpha":
                mine = one[name][: gradient.shape[0]] if name.endswith(".0.weight") else one[name]
                torch.testing.assert_close(mine, gradient)
            elif name.startswith("critic.values.2."):
                torch.testing.assert_close(one[name][..., [column]], gradient)


def test_the_scalarised_target_has_the_entropy_once() -> None:
    weights = PreferenceSettings(team_weight=0.7, individual_weight=1.3)
    nets = made("pcmasac", preference=weights)
    state, inputs = start(nets), inputs_of(nets)
    parameters, late = nets.layout.views(state["theta"]), nets._target_layout.views(state["target"])
    alpha = torch.tensor(0.4, dtype=torch.float64)
    p = inputs["preference"]

    def mix(values: Tensor) -> Tensor:
        return 0.7 * values[..., 0] + 1.3 * (p * values[..., 1:]).sum(-1)

    view = nets._nets.view(parameters, inputs, "next_")
    action, log_prob = nets.head.sample(nets.actor(parameters, view), inputs["next_noise"])
    smaller = mix(nets._nets.critic(late, view, action)).amin(0)
    expected = mix(inputs["rewards"]) + inputs["discount"] * (smaller - alpha * log_prob)
    torch.testing.assert_close(mix(nets.targets(parameters, late, inputs, alpha)), expected)


def test_weights_that_leave_nothing_to_maximise() -> None:
    with pytest.raises(ConfigError, match=r"team_weight and preference\.lambda are both 0"):
        made("pcmasac", preference=PreferenceSettings(team_weight=0.0, individual_weight=0.0))
