"""The soft actor-critic (Haarnoja et al. 2018) that one would write in an afternoon, to measure the learner's against.

Modules of torch, autograd, an optimiser for each of actor, critics and temperature, a Python loop for the targets;
nothing fused, stacked, compiled or kept. It does not waste either: one pass of the actor serves its own loss and the
temperature's.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opencda_marl.settings.offpolicy import MasacSettings

__all__ = ["LOG_STD", "PlainActor", "PlainCritic", "PlainSac", "SacRows"]

LOG_STD = (-5.0, 2.0)
"""Between these the logarithm of the actor's standard deviation is kept."""


@dataclass(slots=True)
class SacRows:
    """What one update learns from: decisions as a replay gives them."""

    features: Float[Tensor, "rows features"]
    action: Float[Tensor, "rows actions"]  # in [-1, 1]
    rewards: Float[Tensor, "rows values"]
    discount: Float[Tensor, " rows"]  # of what follows; 0 where the vehicle has ended
    following: Float[Tensor, "rows features"]
    weights: Float[Tensor, "rows values"] | None = None  # of the values against each other; None: there is one value


def _mlp(width: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class PlainActor(nn.Module):
    """A Gaussian behind a tanh."""

    def __init__(self, features: int, hidden: Sequence[int], actions: int = 1) -> None:
        super().__init__()
        self.net = _mlp(features, hidden, 2 * actions)

    def forward(
        self, features: Float[Tensor, "rows features"]
    ) -> tuple[Float[Tensor, "rows actions"], Float[Tensor, " rows"]]:
        """Actions in [-1, 1] drawn with noise that gradients pass through, and their log-probabilities."""
        mean, log_std = self.net(features).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(*LOG_STD).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        log_prob = normal.log_prob(raw) - torch.log(1.0 - action**2 + 1e-6)  # type: ignore[no-untyped-call]
        return action, log_prob.sum(-1)


class PlainCritic(nn.Module):
    """Values of an action."""

    def __init__(self, features: int, hidden: Sequence[int], actions: int = 1, values: int = 1) -> None:
        super().__init__()
        self.net = _mlp(features + actions, hidden, values)

    def forward(
        self, features: Float[Tensor, "rows features"], action: Float[Tensor, "rows actions"]
    ) -> Float[Tensor, "rows values"]:
        """One network over features and action."""
        return self.net(torch.cat([features, action], -1))  # type: ignore[no-any-return] # nn.Module's call is untyped


class PlainSac:
    """Actor, twin critics, their targets, a temperature, and one update of all of them.

    Args:
        features: width of what actor and critics see.
        settings: widths, learning rate, tau, temperature.
        actions: numbers per action.
        values: that a critic has; above 1 they are weighed by `SacRows.weights`.
    """

    def __init__(self, features: int, settings: MasacSettings, *, actions: int = 1, values: int = 1) -> None:
        self._tau, self._target_entropy = settings.tau, settings.target_entropy
        self.actor = PlainActor(features, settings.hidden, actions)
        self.critics = nn.ModuleList(PlainCritic(features, settings.hidden, actions, values) for _ in range(2))
        self.targets = deepcopy(self.critics)
        self.log_alpha = torch.tensor(settings.initial_alpha).log().requires_grad_()
        self._actor_adam = torch.optim.Adam(self.actor.parameters(), lr=settings.learning_rate)
        self._critic_adam = torch.optim.Adam(self.critics.parameters(), lr=settings.learning_rate)
        self._alpha_adam = torch.optim.Adam([self.log_alpha], lr=settings.learning_rate)

    def critic_loss(self, rows: SacRows) -> Float[Tensor, ""]:
        """Squared errors against r + discount (min Q'(s', a') - alpha log pi(a'|s')), mean over rows, summed.

        With several values the twin that is smaller once weighed gives all of them, and the entropy is shared out so
        that their weighed sum gets it once.
        """
        with torch.no_grad():
            action, log_prob = self.actor(rows.following)
            follows = self._smaller(self.targets, rows, rows.following, action)
            weight = 1.0 if rows.weights is None else rows.weights.sum(-1)
            follows = follows - (self.log_alpha.exp() * log_prob / weight)[:, None]
            wanted = rows.rewards + rows.discount[:, None] * follows
        found = [critic(rows.features, rows.action) for critic in self.critics]
        one, other = (cast(Tensor, ((each - wanted) ** 2).sum(-1).mean()) for each in found)
        return one + other

    def actor_loss(self, rows: SacRows) -> tuple[Float[Tensor, ""], Float[Tensor, " rows"]]:
        """Mean of alpha log pi(a|s) - min Q(s, a), and the log-probabilities."""
        action, log_prob = self.actor(rows.features)
        values = self._smaller(self.critics, rows, rows.features, action)
        weighed = values[:, 0] if rows.weights is None else (values * rows.weights).sum(-1)
        return (self.log_alpha.exp().detach() * log_prob - weighed).mean(), log_prob

    def alpha_loss(self, log_prob: Float[Tensor, " rows"]) -> Float[Tensor, ""]:
        """-log alpha times what the entropy is short of."""
        short = -(log_prob.detach() + self._target_entropy).mean()
        return self.log_alpha * short

    def _smaller(self, twins: nn.ModuleList, rows: SacRows, features: Tensor, action: Tensor) -> Tensor:
        one, other = (cast(Tensor, twin(features, action)) for twin in twins)
        if rows.weights is None:
            return torch.min(one, other)
        first = (one * rows.weights).sum(-1) < (other * rows.weights).sum(-1)
        return torch.where(first[:, None], one, other)

    def update(self, rows: SacRows) -> dict[str, Tensor]:
        """One gradient step of critics, actor and temperature, then of the targets; returns the losses."""
        critic_loss = self.critic_loss(rows)
        self._critic_adam.zero_grad()
        critic_loss.backward()  # type: ignore[no-untyped-call]
        self._critic_adam.step()

        actor_loss, log_prob = self.actor_loss(rows)
        self._actor_adam.zero_grad()
        actor_loss.backward()  # type: ignore[no-untyped-call]
        self._actor_adam.step()

        alpha_loss = self.alpha_loss(log_prob)
        self._alpha_adam.zero_grad()
        alpha_loss.backward()  # type: ignore[no-untyped-call]
        self._alpha_adam.step()

        for parameter, target in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
            target.data.copy_(self._tau * parameter.data + (1.0 - self._tau) * target.data)
        losses = {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha_loss": alpha_loss}
        return {name: loss.detach() for name, loss in losses.items()}
