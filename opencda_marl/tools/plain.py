"""What one would write in an afternoon: the networks and the PPO update that the learner's are measured against.

Modules of torch, autograd, one Adam, a loop over shuffled minibatches; nothing fused, compiled or kept. Sizes
are the settings' own, so that both sides do the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from opencda_marl.settings.learning import ContextSettings, MappoSettings
from opencda_marl.settings.networks import NetworkSettings

__all__ = ["PackedLstm", "PlainNets", "Rows", "Sizes", "plain_act", "plain_update"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of what goes in and out."""

    ego: int
    scene: int
    neighbour: int  # features of a neighbour row
    preference: int  # 0: none; else actor and critic see it, and there is one value per objective too

    @property
    def values(self) -> int:
        """Values per vehicle: the team's, and one per objective."""
        return 1 + self.preference


@dataclass(slots=True)
class Rows:
    """What one update learns from."""

    ego: Float[Tensor, "rows ego"]
    neighbours: Float[Tensor, "rows neighbours features"]
    mask: Bool[Tensor, "rows neighbours"]
    context: Float[Tensor, "rows context"]  # of a frozen encoder
    scene: Float[Tensor, "rows scene"]
    preference: Float[Tensor, "rows preference"]
    action: Float[Tensor, "rows one"]  # before squashing
    log_prob: Float[Tensor, " rows"]
    advantage: Float[Tensor, " rows"]
    target: Float[Tensor, "rows values"]

    def at(self, index: Int64[Tensor, " chosen"]) -> Rows:
        """Some of the rows."""
        return Rows(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def _mlp(sizes: Sequence[int], last: int | None = None, bend: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(sizes):
        layers += [nn.Linear(width, following), bend()]
    if last is not None:
        layers.append(nn.Linear(sizes[-1], last))
    return nn.Sequential(*layers)


class PackedLstm(nn.Module):
    """The usual encoder of rows of different number: pack, run, take the last state."""

    def __init__(self, features: int, context: ContextSettings) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, context.hidden, batch_first=True)
        self.out = nn.Linear(context.hidden, context.size)

    def forward(
        self, rows: Float[Tensor, "batch neighbours features"], mask: Bool[Tensor, "batch neighbours"]
    ) -> Float[Tensor, "batch context"]:
        """The context; a vehicle without neighbours gets that of one row of zeros."""
        lengths = mask.sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.out(hidden[0])  # type: ignore[no-any-return] # nn.Module's call is untyped


class _DeepSets(nn.Module):
    def __init__(self, features: int, context: ContextSettings) -> None:
        super().__init__()
        self.row = _mlp([features, context.hidden, context.hidden], bend=nn.ReLU)
        self.out = nn.Linear(2 * context.hidden, context.size)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        each = self.row(rows)  # [batch, neighbours, hidden]
        real = mask[..., None]
        mean = (each * real).sum(1) / real.sum(1).clamp(min=1)
        most = each.masked_fill(~real, 0.0).max(1).values
        return self.out(torch.cat([mean, most], -1))  # type: ignore[no-any-return] # as above


class _Attention(nn.Module):
    def __init__(self, features: int, context: ContextSettings) -> None:
        super().__init__()
        self.row = _mlp([features, context.hidden], bend=nn.ReLU)
        self.query = nn.Parameter(torch.zeros(1, 1, context.hidden))
        self.attend = nn.MultiheadAttention(context.hidden, context.heads, batch_first=True)
        self.out = nn.Linear(context.hidden, context.size)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        each = self.row(rows)
        query = self.query.expand(len(rows), -1, -1)
        nobody = ~mask
        nobody = nobody & ~nobody.all(1, keepdim=True)  # attention over nothing would be NaN
        found, _ = self.attend(query, each, each, key_padding_mask=nobody, need_weights=False)
        return self.out(found[:, 0])  # type: ignore[no-any-return] # as above


_ENCODERS: dict[str, type[PackedLstm] | type[_DeepSets] | type[_Attention]] = {
    "lstm": PackedLstm,
    "deepsets": _DeepSets,
    "attention": _Attention,
}


_BENDS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class PlainNets(nn.Module):
    """Actor and critic, each with an encoder of its own where it is trained."""

    def __init__(self, sizes: Sizes, context: ContextSettings, learner: NetworkSettings, *, frozen: bool) -> None:
        super().__init__()
        make, bend = _ENCODERS[context.encoder], _BENDS[learner.activation]
        self.frozen = frozen
        self.actor_encoder = make(sizes.neighbour, context)
        self.critic_encoder = self.actor_encoder if frozen else make(sizes.neighbour, context)
        self.actor_ego = _mlp([sizes.ego, *learner.ego_hidden], bend=bend)
        self.critic_ego = _mlp([sizes.ego, *learner.ego_hidden], bend=bend)
        seen = (learner.ego_hidden or [sizes.ego])[-1] + context.size + sizes.preference
        self.actor = _mlp([seen, *learner.hidden], 1, bend)
        self.critic = _mlp([seen + sizes.scene, *learner.hidden], sizes.values, bend)
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def trained(self) -> list[nn.Parameter]:
        """Parameters that an update changes."""
        kept = {id(p) for p in self.actor_encoder.parameters()} if self.frozen else set()
        return [p for p in self.parameters() if id(p) not in kept]

    def mean(self, rows: Rows) -> Float[Tensor, " rows"]:
        """Of the action, before squashing."""
        context = rows.context if self.frozen else self.actor_encoder(rows.neighbours, rows.mask)
        return self.actor(torch.cat([self.actor_ego(rows.ego), context, rows.preference], -1))[:, 0]  # type: ignore[no-any-return] # as above

    def values(self, rows: Rows) -> Float[Tensor, "rows values"]:
        """Of the state: the team's, then one per objective."""
        context = rows.context if self.frozen else self.critic_encoder(rows.neighbours, rows.mask)
        return self.critic(torch.cat([self.critic_ego(rows.ego), context, rows.scene, rows.preference], -1))  # type: ignore[no-any-return] # as above


@torch.no_grad()
def plain_act(nets: PlainNets, rows: Rows) -> Float[Tensor, " rows"]:
    """Encode, sample, squash: actions in [-1, 1]. The encoder runs whether it is frozen or not."""
    context = nets.actor_encoder(rows.neighbours, rows.mask)
    mean = nets.actor(torch.cat([nets.actor_ego(rows.ego), context, rows.preference], -1))[:, 0]
    normal = torch.distributions.Normal(mean, nets.log_std.exp())
    return torch.tanh(normal.sample())  # type: ignore[no-untyped-call]


def plain_update(nets: PlainNets, optimiser: torch.optim.Optimizer, rows: Rows, learner: MappoSettings) -> int:
    """The clipped objective of PPO (Schulman et al. 2017) over shuffled minibatches.

    Returns:
        how many minibatches were taken.
    """
    taken = 0
    total = len(rows.ego)
    for _ in range(learner.epochs):
        order = torch.randperm(total)
        for begin in range(0, total, learner.minibatch_size):
            part = rows.at(order[begin : begin + learner.minibatch_size])
            normal = torch.distributions.Normal(nets.mean(part), nets.log_std.exp())
            squashed = torch.log(1.0 - torch.tanh(part.action[:, 0]) ** 2 + 1e-6)
            log_prob = normal.log_prob(part.action[:, 0]) - squashed  # type: ignore[no-untyped-call]
            ratio = (log_prob - part.log_prob).exp()
            advantage = (part.advantage - part.advantage.mean()) / (part.advantage.std() + 1e-8)
            clipped = ratio.clamp(1.0 - learner.clip, 1.0 + learner.clip)
            actor_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            critic_loss = ((nets.values(part) - part.target) ** 2).mean()
            entropy = normal.entropy().mean()  # type: ignore[no-untyped-call]
            loss = actor_loss - learner.entropy * entropy + learner.value_weight * critic_loss
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(nets.trained(), learner.max_grad_norm)
            optimiser.step()
            taken += 1
    return taken
