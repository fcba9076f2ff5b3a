"""One SAC update of others, as their documentation has it: what `bench update --against` measures ours beside.

Everybody gets the same batches, drawn beforehand and in their own form: sampling, storing and the copy to a device are
nobody's. In are forward and backward passes, optimisers, targets, temperature, and what the package does around them
at each step (Stable-Baselines3 reads four losses back and keeps a log; TorchRL makes a TensorDict of its losses). Out
is what it does once per call of its own loop: each update is a call, as in a loop with one update per step.

All have ReLU networks of the same widths, Adam of the same learning rate, twin critics with scalar values and an
automatic temperature. The forms that their documentation starts with are eager; that is what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opencda_marl.core.errors import ConfigError
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.tools.plain_sac import PlainSac, SacRows

__all__ = ["PEERS", "Peer", "make_peer", "require_peers"]

PEERS: dict[str, tuple[str, ...]] = {
    "straightforward": (),
    "sb3": ("stable_baselines3", "gymnasium"),
    "torchrl": ("torchrl", "tensordict"),
}
"""Name -> the packages that it needs."""

_DISCOUNT = 0.99  # the packages have one for all rows


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody's update."""

    step: Callable[[], object]  # one gradient step on the next batch
    weights: Callable[[], list[Tensor]]  # of everything that it changes: actor, critics, targets, temperature


def require_peers(names: Iterable[str]) -> None:
    """Are these known, and installed?

    Raises:
        ConfigError: no; with what to do.
    """
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--against {name}: there is no such update", fix=f"some of {', '.join(PEERS)}")
        missing = [package for package in PEERS[name] if find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"--against {name}: {' and '.join(missing)} not installed", fix="pip install 'opencda-marl[bench]'"
            )


def make_peer(name: str, settings: MasacSettings, batches: Sequence[SacRows]) -> Peer:
    """The update of that name, on batches that come in turn.

    Args:
        name: of PEERS.
        settings: widths, learning rate, tau, temperature.
        batches: at least one; all of one shape, with scalar rewards.

    Raises:
        ConfigError: it is not there.
    """
    require_peers([name])
    torch.manual_seed(0)
    make = {"straightforward": _straightforward, "sb3": _stable_baselines, "torchrl": _torchrl}[name]
    return make(settings, batches)


def _straightforward(settings: MasacSettings, batches: Sequence[SacRows]) -> Peer:
    sac = PlainSac(batches[0].features.shape[1], settings, actions=batches[0].action.shape[1])
    turns = cycle(batches)
    modules = (sac.actor, sac.critics, sac.targets)
    return Peer(
        step=lambda: sac.update(next(turns)),
        weights=lambda: [*(weight for module in modules for weight in module.parameters()), sac.log_alpha],
    )


class _Given:
    """Stands where Stable-Baselines3 has its replay, and hands out what is given."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples

    def sample(self, batch_size: int, env: object = None) -> Any:  # noqa: ARG002 - the replay's signature
        return next(self._samples)


def _stable_baselines(settings: MasacSettings, batches: Sequence[SacRows]) -> Peer:
    """`SAC(...).train(1)` of Stable-Baselines3."""
    import gymnasium
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    class Nowhere(gymnasium.Env[np.ndarray, np.ndarray]):
        """Spaces are all that is needed of it."""

        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (batches[0].features.shape[1],), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (batches[0].action.shape[1],), np.float32)

    model = SAC(
        "MlpPolicy",
        Nowhere(),
        learning_rate=settings.learning_rate,
        buffer_size=1,  # not used
        tau=settings.tau,
        gamma=_DISCOUNT,
        ent_coef=f"auto_{settings.initial_alpha}",
        target_entropy=settings.target_entropy,
        policy_kwargs={"net_arch": list(settings.hidden)},
        device="cpu",
    )
    model.set_logger(Logger(folder=None, output_formats=[]))
    samples = [
        ReplayBufferSamples(
            rows.features, rows.action, rows.following, (rows.discount == 0).float()[:, None], rows.rewards
        )
        for rows in batches
    ]
    model.replay_buffer = _Given(cycle(samples))  # type: ignore[assignment] # all of it that `train` uses
    size = len(batches[0].features)
    alpha = model.log_ent_coef
    assert alpha is not None  # it is automatic
    return Peer(step=lambda: model.train(1, batch_size=size), weights=lambda: [*model.policy.parameters(), alpha])


def _torchrl(settings: MasacSettings, batches: Sequence[SacRows]) -> Peer:
    """`SACLoss` and `SoftUpdate` of TorchRL around its MLPs, all losses in one backward pass."""
    from tensordict import TensorDict
    from torchrl.objectives import SACLoss, SoftUpdate, group_optimizers

    actor, critic = _torchrl_networks(settings, batches[0])
    loss = SACLoss(
        actor,
        critic,
        num_qvalue_nets=2,
        loss_function="l2",
        alpha_init=settings.initial_alpha,
        target_entropy=settings.target_entropy,
    )
    loss.make_value_estimator(gamma=_DISCOUNT)
    targets = SoftUpdate(loss, tau=settings.tau)
    parts = [
        list(loss.actor_network_params.flatten_keys().values()),
        list(loss.qvalue_network_params.flatten_keys().values()),
        [loss.log_alpha],
    ]
    optimiser = group_optimizers(*(torch.optim.Adam(part, lr=settings.learning_rate) for part in parts))
    samples = []
    for rows in batches:
        ended = (rows.discount == 0)[:, None]
        following = {"observation": rows.following, "reward": rows.rewards, "done": ended, "terminated": ended}
        columns = {"observation": rows.features, "action": rows.action, "next": following}
        samples.append(TensorDict(columns, batch_size=[len(rows.features)]))
    turns = cycle(samples)

    def step() -> None:
        found = loss(next(turns))
        (found["loss_actor"] + found["loss_qvalue"] + found["loss_alpha"]).sum().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        targets.step()

    followers = loss.target_qvalue_network_params.flatten_keys()
    return Peer(step=step, weights=lambda: [*(w for part in parts for w in part), *followers.values()])


def _torchrl_networks(settings: MasacSettings, rows: SacRows) -> tuple[Any, Any]:
    """Actor and critic as TorchRL's own SAC example builds them."""
    from tensordict.nn import InteractionType, NormalParamExtractor, TensorDictModule
    from torchrl.data import Bounded
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator

    features, actions = rows.features.shape[1], rows.action.shape[1]
    widths = list(settings.hidden)
    policy = MLP(in_features=features, num_cells=widths, out_features=2 * actions, activation_class=nn.ReLU)
    actor = ProbabilisticActor(
        TensorDictModule(nn.Sequential(policy, NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1.0, 1.0, (actions,)),
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -1.0, "high": 1.0, "tanh_loc": False},
        default_interaction_type=InteractionType.RANDOM,
    )
    values = MLP(in_features=features + actions, num_cells=widths, out_features=1, activation_class=nn.ReLU)
    return actor, ValueOperator(values, in_keys=["action", "observation"])
