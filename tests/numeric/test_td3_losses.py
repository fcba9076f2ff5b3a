"""TD3's target, losses and two kinds of step: by hand on linear nets, and against torch's own modules and Adam."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.spec import ActionSpec, Feature, ObservationSpec
from opencda_marl.learners.matd3 import METRICS, TwinDelayed
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.heads import Deterministic
from opencda_marl.settings.learning import PreferenceSettings
from opencda_marl.settings.offpolicy import Matd3Settings
from opencda_marl.settings.run import RunSettings

ONE = ObservationSpec("one", 1, (Feature("x", "1", 1.0, ""),), (), 0)
FOUR = ObservationSpec("four", 1, tuple(Feature(f"x{i}", "1", 1.0, "") for i in range(4)), (), 0)
WANTED = 0.4  # the action that the linear actor takes everywhere


def made(
    algorithm: str = "matd3", spec: ObservationSpec = ONE, preference: PreferenceSettings | None = None, **own: object
) -> TwinDelayed:
    settings = RunSettings(
        algorithm=algorithm,
        learner=Matd3Settings(**{"hidden": [], **own}),
        preference=preference or PreferenceSettings(),
    )
    return TwinDelayed(settings, spec, ActionSpec("target_speed"), None, trained=False)


def linear(action: float = WANTED, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """theta of nets without hidden layers: Q1 = 1 + 2 x + 3 a, Q2 = 4 - a, and an actor that always does the same."""
    first = made()
    arrays = {
        "actor.policy.0.weight": np.zeros((1, 1)),
        "actor.policy.0.bias": np.arctanh([action]),
        "critic.values.0.weight": np.array([2.0, 0.0]).reshape(2, 1, 1),
        "critic.values.0.bias": np.array([1.0, 4.0]).reshape(2, 1, 1),
        "critic.values.0.action": np.array([3.0, -1.0]).reshape(2, 1, 1),
    }
    return torch.from_numpy(first.layout.flatten(arrays)).to(dtype)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def following(noise: float, discount: float, reward: float = 1.0) -> dict[str, Tensor]:
    return {
        "next_ego": column(0.5),
        "next_noise": column(noise),
        "rewards": column(reward),
        "discount": torch.tensor([discount], dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("action", "noise", "discount", "target"),
    [
        (0.4, 0.0, 0.5, 1.0 + 0.5 * 3.2),  # Q1 = 2 + 3 * 0.4 = 3.2, Q2 = 3.6
        (0.4, 1.0, 0.5, 1.0 + 0.5 * 3.4),  # a' = 0.6: Q1 = 3.8, Q2 = 3.4, the other twin is smaller
        (0.4, -4.0, 0.5, 1.0 + 0.5 * 1.7),  # noise -0.8 is cut to -0.5, a' = -0.1: Q1 = 1.7
        (0.4, 4.0, 0.5, 1.0 + 0.5 * 3.1),  # cut to 0.5, a' = 0.9: Q2 = 3.1
        (0.7, 4.0, 0.5, 1.0 + 0.5 * 3.0),  # 0.7 + 0.5 is no action: a' = 1
        (0.4, 1.0, 0.0, 1.0),  # nothing follows
    ],
)
def test_the_target_by_hand(action: float, noise: float, discount: float, target: float) -> None:
    algorithm = made(smoothing_noise=0.2, smoothing_clip=0.5)
    found = algorithm.targets(algorithm.layout.views(linear(action)), following(noise, discount))
    assert found.item() == pytest.approx(target, rel=1e-6)


@pytest.mark.parametrize(("share", "chosen"), [(1.0, [5.0, 0.0, 0.0, 0.0]), (0.5, [0.0, 10.0, 0.0, 0.0])])
def test_the_twin_is_chosen_whole_by_its_scalarised_value(share: float, chosen: list[float]) -> None:
    """[0, 10, 0, 0] and [5, 0, 0, 0] at p = (0.6, 0.3, 0.1): 6 lambda against 5; not the smaller of each."""
    algorithm = made("pcmatd3", preference=PreferenceSettings(team_weight=1.0, individual_weight=share))
    arrays = {name: np.zeros(shape) for name, shape in algorithm.layout.shapes.items()}
    arrays["critic.values.0.bias"] = np.array([[0.0, 10.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]]).reshape(2, 1, 4)
    inputs = following(0.0, 0.5)
    inputs["rewards"] = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    inputs["next_preference"] = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    theta = torch.from_numpy(algorithm.layout.flatten(arrays)).double()
    found = algorithm.targets(algorithm.layout.views(theta), inputs)
    np.testing.assert_allclose(found[0], np.array([1.0, 2.0, 3.0, 4.0]) + 0.5 * np.array(chosen), rtol=1e-6)


def test_losses_and_gradients_by_hand() -> None:
    algorithm = made()
    inputs = {
        "ego": column(0.0, 1.0),
        "action": column(0.5, -1.0),
        "rewards": column(1.0, 2.0),
        "discount": torch.zeros(2, dtype=torch.float64),
        "next_ego": column(0.0, 0.0),
        "next_noise": column(0.0, 0.0),
    }
    theta = as_leaf(linear())
    loss, parts = algorithm.losses(theta, linear(), inputs, both=True)
    # errors 2.5 - 1 and 3.5 - 1; 0 - 2 and 5 - 2: halves of 2.25 + 6.25 and 4 + 9, mean 5.375
    assert parts["critic_loss"].item() == pytest.approx(5.375, rel=1e-6)
    # Q1 at 0.4: 2.2 and 4.2
    assert parts["actor_loss"].item() == pytest.approx(-3.2, rel=1e-6)
    assert loss.item() == pytest.approx(5.375 - 3.2, rel=1e-6)
    assert parts["value_mean"].item() == pytest.approx((2.5 + 3.5 + 0.0 + 5.0) / 4, rel=1e-6)
    assert parts["target_mean"].item() == pytest.approx(1.5)
    assert parts["saturated"].item() == 0.0
    (gradient,) = torch.autograd.grad(loss, theta)
    found = algorithm.layout.views(gradient)
    slope = -3.0 * (1.0 - WANTED**2)  # of -Q1 by the bias under tanh
    assert found["actor.policy.0.bias"].item() == pytest.approx(slope, rel=1e-6)
    assert found["actor.policy.0.weight"].item() == pytest.approx(slope * 0.5, rel=1e-6)  # mean of x
    # the critic's gradient is that of its own loss: mean error by bias, mean error times a by the action's weight
    np.testing.assert_allclose(found["critic.values.0.bias"].ravel(), [(1.5 - 2.0) / 2, (2.5 + 3.0) / 2], rtol=1e-6)
    np.testing.assert_allclose(found["critic.values.0.action"].ravel(), [1.375, (1.25 - 3.0) / 2], rtol=1e-6)


def test_an_action_at_the_end_is_called_saturated() -> None:
    algorithm = made()
    inputs = following(0.0, 0.0) | {"ego": column(0.0), "action": column(0.0)}
    _, parts = algorithm.losses(as_leaf(linear(0.995)), linear(), inputs, both=True)
    assert parts["saturated"].item() == 1.0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_penalty_brings_back_an_actor_that_tanh_has_no_slope_for(sign: float) -> None:
    inputs = following(0.0, 0.0) | {"ego": column(0.0), "action": column(0.0)}
    far = np.tanh(6.0) * sign

    def slope(weight: float, action: float) -> tuple[float, float]:
        algorithm = made(saturation_penalty=weight)
        theta = as_leaf(linear(action))
        loss, parts = algorithm.losses(theta, linear(), inputs, both=True)
        (gradient,) = torch.autograd.grad(loss, theta)
        return float(algorithm.layout.views(gradient)["actor.policy.0.bias"]), float(parts["actor_loss"])

    (without, loss), (found, same) = slope(0.0, far), slope(0.05, far)
    assert abs(without) < 1e-3
    assert found - without == pytest.approx(sign * 2 * 0.05 * (6.0 - np.arctanh(0.99)), rel=1e-5)
    assert same == loss  # the metric is what it was
    assert slope(0.05, 0.98 * sign) == slope(0.0, 0.98 * sign)  # inside it costs nothing


# --- the two kinds of step


def batch(rng: np.random.Generator, algorithm: TwinDelayed, features: int, rows: int = 12) -> dict[str, Tensor]:
    parts = len(algorithm.components)
    shapes = {"ego": features, "next_ego": features, "rewards": parts, "next_noise": 1}
    found = {name: torch.from_numpy(rng.normal(size=(rows, width))) for name, width in shapes.items()}
    found["action"] = torch.from_numpy(rng.uniform(-1, 1, (rows, 1)))
    found["discount"] = torch.from_numpy(rng.choice([0.0, 0.9, 0.95], rows))
    if algorithm.conditioned:
        for name in ("preference", "next_preference"):
            found[name] = torch.from_numpy(rng.dirichlet([1.0, 1.0, 1.0], rows))
    return found


def start(algorithm: TwinDelayed, seed: int = 0) -> dict[str, Tensor]:
    arrays = algorithm.initialise(np.random.default_rng(seed))
    state = {name: torch.from_numpy(array).double() for name, array in arrays.items()}
    return state | {name: torch.zeros_like(state["theta"]) for name in ("m", "v")}


def advance(
    algorithm: TwinDelayed, state: dict[str, Tensor], inputs: dict[str, Tensor], done: int
) -> tuple[dict[str, Tensor], Tensor]:
    state = {**state, "theta": as_leaf(state["theta"]), "step": torch.tensor(float(done), dtype=torch.float64)}
    after, metrics = algorithm.steps[algorithm.which(done)](state, inputs)
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {n: (t.shape, t.dtype) for n, t in state.items()}
    assert not any(tensor.requires_grad for tensor in after.values())
    return after, metrics


def numbers(rate: float = 1e-2, tau: float = 0.1) -> dict[str, Tensor]:
    return {"learning_rate": torch.tensor(rate, dtype=torch.float64), "tau": torch.tensor(tau, dtype=torch.float64)}


def test_in_a_step_of_the_critic_nothing_of_the_actor_moves_and_no_target() -> None:
    algorithm, rng = made(spec=FOUR, hidden=[8]), np.random.default_rng(1)
    state, first = advance(algorithm, start(algorithm), batch(rng, algorithm, 4) | numbers(), 0)
    after, second = advance(algorithm, state, batch(rng, algorithm, 4) | numbers(), 1)
    actor = algorithm.actor_layout.size  # without an encoder all of it is the actor's own
    for name in ("theta", "m", "v"):
        assert (after[name][:actor] == state[name][:actor]).all(), name
        assert (after[name][actor:] != state[name][actor:]).any(), name
    assert state["m"][:actor].abs().max() > 0.0
    assert (after["target"] == state["target"]).all()
    shown = dict(zip(METRICS, range(len(METRICS)), strict=True))
    for name in ("actor_loss", "actor_gradient_norm", "saturated"):
        assert second[shown[name]] == first[shown[name]]
    assert second[shown["critic_loss"]] != first[shown["critic_loss"]]


def test_targets_follow_after_a_step_of_both() -> None:
    algorithm = made(spec=FOUR, hidden=[8])
    begun = start(algorithm)
    after, _ = advance(algorithm, begun, batch(np.random.default_rng(2), algorithm, 4) | numbers(tau=0.25), 0)
    torch.testing.assert_close(after["target"], 0.75 * begun["target"] + 0.25 * after["theta"])
    assert (after["target"][: algorithm.actor_layout.size] != begun["target"][: algorithm.actor_layout.size]).any()


@pytest.mark.parametrize(("delay", "kinds"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (3, [0, 1, 1, 0])])
def test_which_step_comes(delay: int, kinds: list[int]) -> None:
    algorithm = made(policy_delay=delay)
    assert [algorithm.which(done) for done in range(4)] == kinds
    assert len(algorithm.steps) == max(kinds) + 1


# --- as one would write it with torch's modules


def _modules(algorithm: TwinDelayed, theta: Tensor) -> tuple[nn.Sequential, list[nn.Sequential]]:
    """The same nets as modules; a first layer takes the view, then the action."""
    views = {name: view.clone() for name, view in algorithm.layout.views(theta).items()}

    def module(weights: list[tuple[Tensor, Tensor]]) -> nn.Sequential:
        layers: list[nn.Module] = []
        for weight, bias in weights:
            layer = nn.Linear(*weight.shape, dtype=torch.float64)
            layer.weight.data, layer.bias.data = weight.T.contiguous(), bias.reshape(-1)
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    actor = module([(views[f"actor.policy.{i}.weight"], views[f"actor.policy.{i}.bias"]) for i in range(2)])
    critics = []
    for twin in range(2):
        first = torch.cat([views["critic.values.0.weight"][twin], views["critic.values.0.action"][twin]])
        pairs = [(first, views["critic.values.0.bias"][twin])]
        pairs += [(views["critic.values.1.weight"][twin], views["critic.values.1.bias"][twin])]
        critics.append(module(pairs))
    return actor, critics


@pytest.mark.parametrize(("name", "delay", "limit"), [("matd3", 2, None), ("matd3", 3, 0.5), ("pcmatd3", 2, None)])
def test_steps_are_those_of_a_plain_torch_implementation(name: str, delay: int, limit: float | None) -> None:
    weights = PreferenceSettings(team_weight=0.7, individual_weight=1.3)
    own = {"hidden": [8], "policy_delay": delay, "max_grad_norm": limit, "smoothing_noise": 0.4, "smoothing_clip": 0.3}
    algorithm = made(name, FOUR, weights, **own)
    state = start(algorithm)
    actor, critics = _modules(algorithm, state["theta"])
    target_actor, target_critics = copy.deepcopy(actor), copy.deepcopy(critics)
    of_critics = [weight for critic in critics for weight in critic.parameters()]
    actor_adam = torch.optim.Adam(actor.parameters(), lr=1e-2)
    critic_adam = torch.optim.Adam(of_critics, lr=1e-2)

    def mixed(values: Tensor, preference: Tensor | None) -> Tensor:
        if preference is None:
            return values.squeeze(-1)
        return 0.7 * values[:, 0] + 1.3 * (values[:, 1:] * preference).sum(1)

    rng = np.random.default_rng(3)
    for done in range(20):
        b = batch(rng, algorithm, 4)
        p, next_p = b.get("preference"), b.get("next_preference")
        seen = b["ego"] if p is None else torch.cat([b["ego"], p], 1)
        after = b["next_ego"] if next_p is None else torch.cat([b["next_ego"], next_p], 1)
        with torch.no_grad():
            action = torch.tanh(target_actor(after)) + (0.4 * b["next_noise"]).clamp(-0.3, 0.3)
            both = [critic(torch.cat([after, action.clamp(-1, 1)], 1)) for critic in target_critics]
            first = mixed(both[0], next_p) <= mixed(both[1], next_p)
            target = b["rewards"] + b["discount"][:, None] * torch.where(first[:, None], both[0], both[1])
        critic_loss = sum(
            nn.functional.mse_loss(critic(torch.cat([seen, b["action"]], 1)), target) * target.shape[1] / 2
            for critic in critics
        )
        critic_gradients = torch.autograd.grad(critic_loss, of_critics)
        moving = list(zip(of_critics, critic_gradients, strict=True))
        if done % delay == 0:
            loss = -mixed(critics[0](torch.cat([seen, torch.tanh(actor(seen))], 1)), p).mean()
            moving += list(zip(actor.parameters(), torch.autograd.grad(loss, list(actor.parameters())), strict=True))
        for weight, gradient in moving:
            weight.grad = gradient
        if limit is not None:
            nn.utils.clip_grad_norm_([weight for weight, _ in moving], limit)
        critic_adam.step()
        if done % delay == 0:
            actor_adam.step()
            with torch.no_grad():
                for follower, leader in zip([target_actor, *target_critics], [actor, *critics], strict=True):
                    for old, new in zip(follower.parameters(), leader.parameters(), strict=True):
                        old.lerp_(new, 0.1)
        state, _ = advance(algorithm, state, b | numbers(), done)

    for key, modules in (("theta", (actor, critics)), ("target", (target_actor, target_critics))):
        mine = _modules(algorithm, state[key])
        for left, right in zip([mine[0], *mine[1]], [modules[0], *modules[1]], strict=True):
            for one, other in zip(left.parameters(), right.parameters(), strict=True):
                np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-6, atol=1e-9)
    assert (state["theta"] - start(algorithm)["theta"]).norm() > 0.3


# --- limits of the preference-conditioned learner


def _plain_of(conditioned: TwinDelayed, theta: Tensor, plain: TwinDelayed, index: int) -> Tensor:
    """theta of the plain learner whose one component is the conditioned one's component `index`."""
    arrays = {name: view.numpy().copy() for name, view in conditioned.layout.views(theta).items()}
    for part in ("weight", "bias"):
        name = f"critic.values.1.{part}"
        arrays[name] = arrays[name][..., index : index + 1]
    return torch.from_numpy(np.concatenate([arrays[name].ravel() for name in plain.layout.shapes]))


@pytest.mark.parametrize(
    ("weights", "index"),
    [
        (PreferenceSettings(team_weight=0.0, individual_weight=1.0), 1),
        (PreferenceSettings(team_weight=0.0, individual_weight=1.0), 3),
        (PreferenceSettings(team_weight=1.0, individual_weight=0.0), 0),
    ],
)
def test_at_its_limits_it_is_the_learner_of_one_component(weights: PreferenceSettings, index: int) -> None:
    """Of one objective without the team and with a one-hot preference; of the team's reward with lambda 0.

    The plain learner sees the preference as three more features, so that both have the same nets. Components without
    a reward, whose outputs begin at zero, stay there: what is left in the critic is the one component.
    """
    wide = replace(FOUR, ego=(*FOUR.ego, *(Feature(f"p{i}", "1", 1.0, "") for i in range(3))))
    conditioned, plain = made("pcmatd3", FOUR, weights, hidden=[8]), made("matd3", wide, hidden=[8])
    mine = start(conditioned)
    views = conditioned.layout.views(mine["theta"])
    for other in {0, 1, 2, 3} - {index}:
        views["critic.values.1.weight"][..., other] = 0.0
    mine["target"] = mine["theta"].clone()
    theirs = start(plain)
    theirs["theta"] = _plain_of(conditioned, mine["theta"], plain, index)
    theirs["target"] = theirs["theta"].clone()
    begun, rng = theirs["theta"], np.random.default_rng(4)
    for done in range(20):
        inputs = batch(rng, conditioned, 4) | numbers()
        if index:
            one_hot = torch.eye(3, dtype=torch.float64)[index - 1].expand(12, 3)
            inputs["preference"] = inputs["next_preference"] = one_hot
        rewards = torch.zeros_like(inputs["rewards"])
        rewards[:, index] = inputs["rewards"][:, index]
        inputs["rewards"] = rewards
        mine, _ = advance(conditioned, mine, inputs, done)
        other = {**inputs, "rewards": rewards[:, index : index + 1]}
        for view in ("", "next_"):
            other[view + "ego"] = torch.cat([other[view + "ego"], other.pop(view + "preference")], 1)
        theirs, _ = advance(plain, theirs, other, done)
    assert (begun - theirs["theta"]).norm() > 0.3
    for key in ("theta", "target"):
        torch.testing.assert_close(_plain_of(conditioned, mine[key], plain, index), theirs[key], rtol=1e-9, atol=1e-9)


# --- the first policy, and exploring


def test_the_first_policy_is_where_tanh_is_steep_and_sees_what_it_gets() -> None:
    """A policy that begins saturated, or whose last layer hides its inputs, drives at one speed for ever."""
    for name in ("matd3", "pcmatd3"):
        algorithm = made(name, FOUR, hidden=[256, 256])
        theta = as_leaf(start(algorithm)["theta"])
        rows = batch(np.random.default_rng(5), algorithm, 4, rows=200)
        rows["ego"] *= 5.0
        outputs = algorithm.actor(algorithm.layout.views(theta), rows)
        assert outputs.abs().max() < 0.3
        assert outputs.std() > 1e-3
        (gradient,) = torch.autograd.grad(torch.tanh(outputs).sum(), theta)
        assert gradient[: algorithm.actor_layout.size].norm() > 1.0


def test_exploration_noise_is_in_units_of_the_action_and_cut_at_its_ends() -> None:
    head = Deterministic(1, noise=0.3)
    noise = head.noise(np.random.default_rng(6), 20_000)
    outputs = torch.full((20_000, 1), float(np.arctanh(0.2)))
    action, stored = head.act({}, "", outputs, torch.from_numpy(noise))
    assert action is stored
    assert action.mean().item() == pytest.approx(0.2, abs=0.01)
    inside = action[action.abs() < 1.0]
    assert inside.std().item() == pytest.approx(0.3, abs=0.01)
    by_hand, _ = head.act({}, "", outputs[:3], torch.tensor([[1.0], [3.0], [-5.0]]))
    np.testing.assert_allclose(by_hand.ravel(), [0.5, 1.0, -1.0], rtol=1e-6)
    greedy, _ = head.act({}, "", outputs[:1], None)
    assert greedy.item() == pytest.approx(0.2)


def test_a_learner_that_could_not_want_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to maximise"):
        made("pcmatd3", preference=PreferenceSettings(team_weight=0.0, individual_weight=0.0))
