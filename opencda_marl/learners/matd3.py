"""MATD3 (TD3: Fujimoto et al. 2018) and PCMATD3: one deterministic policy that all vehicles share.

nets     actor: ego, context (and preference) -> an action. critic: the same and an action -> two values of each
         component, from two networks side by side. A trained encoder is shared: the critic's loss trains it. Each of
         them has a target that follows it slowly.
losses   squared error of values against those of the targets, at the target's action with clipped noise; and the first
         critic's value of the actor's own action, which it raises.
update   two kinds of step: the critic alone, and, every `policy_delay` steps, critic and actor, after which the targets
         follow. Gradients of a step are all at the same weights. Actor and critic count their own steps of Adam.

PCMATD3 has a vector of rewards and a preference p per vehicle (arXiv 2606.14693): Q(s, a, p) has the team's component
and one per objective, and Q = team_weight * Q_team + individual_weight * p . Q_individual is what the actor maximises
and what the smaller of the twins is chosen by. MATD3 is the same with one component, the sum of the objectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import ActionSpec, ObservationSpec
from opencda_marl.learners.actor_critic import ActorCritic
from opencda_marl.learners.offpolicy import OffPolicyLearner, PureStep
from opencda_marl.nn.context import Encoder
from opencda_marl.nn.flat import Layout, Parameters
from opencda_marl.nn.heads import Deterministic
from opencda_marl.nn.optimiser import adam, clip_by_norm
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import Matd3Settings
from opencda_marl.settings.run import RunSettings

__all__ = ["METRICS", "TwinDelayed", "make_matd3"]

_Batch = Mapping[str, Tensor]
_State = dict[str, Tensor]

_OF_CRITIC = ("critic_loss", "value_mean", "target_mean", "critic_gradient_norm")
_OF_ACTOR = ("actor_loss", "actor_gradient_norm", "saturated")
METRICS = (*_OF_CRITIC, *_OF_ACTOR)
"""Order of what a step measures; where the actor takes none, its figures are those of the last step that it took."""

_SATURATED = 0.99  # actions beyond it leave tanh hardly any slope to come back on


class TwinDelayed:
    """Nets, losses and the update; see `learners.offpolicy.Algorithm`.

    Args:
        settings: of the run.
        observation: layout.
        action: kind.
        encoder: of neighbour rows; None where there are none.
        trained: the encoder is one of the nets, else rows bring its context.

    Raises:
        ConfigError: neither the team's reward nor the vehicle's own has a weight.
    """

    metrics: tuple[str, ...] = METRICS

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        action: ActionSpec,
        encoder: Encoder | None,
        *,
        trained: bool,
    ) -> None:
        self._own = own_settings(settings.learner, Matd3Settings)
        self.head = Deterministic(action.size, noise=self._own.exploration_noise)
        self._nets = nets = ActorCritic(
            settings, observation, action, encoder, trained=trained, outputs=self.head.outputs
        )
        self.conditioned, self.components, self.actor = nets.conditioned, nets.components, nets.actor
        self.relabel = self._own.relabel if self.conditioned else 0.0
        self.actor_layout = nets.actor_layout
        self.layout = Layout(nets.actor_shapes | nets.context_shapes | nets.critic_shapes)
        # the encoder is the critic's
        self._actor, self._critic = slice(0, nets.actor_size), slice(nets.actor_size, self.layout.size)

    def initialise(self, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, " size"]]:
        """First weights, and targets equal to them."""
        theta = self.layout.flatten(self._nets.initialise(rng))
        return {"theta": theta, "target": theta.copy(), "of_actor": np.zeros(len(_OF_ACTOR), np.float32)}

    def targets(self, following: Parameters, inputs: _Batch) -> Float[Tensor, "rows components"]:
        """r + gamma Q'(s', a'), of the twin whose scalarised value is smaller; a' = pi'(s') + clipped noise.

        Args:
            following: the targets' weights.
            inputs: rewards, discount and the views that follow; `next_noise` is standard normal.
        """
        nets, after = self._nets, self._nets.view(following, inputs, "next_")
        noise = self._own.smoothing_noise * inputs["next_noise"]
        noise = noise.clamp(-self._own.smoothing_clip, self._own.smoothing_clip)
        action = (torch.tanh(nets.actor(following, after)) + noise).clamp(-1.0, 1.0)
        smaller = nets.smaller(nets.critic(following, after, action), after.get("preference"))
        return inputs["rewards"] + inputs["discount"][:, None] * smaller

    def losses(
        self, theta: Float[Tensor, " size"], target: Float[Tensor, " size"], inputs: _Batch, *, both: bool
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The critic's loss, with `both` plus the actor's, each of which moves only what it is about; and parts."""
        parameters, fixed = self.layout.views(theta), self.layout.views(theta.detach())
        with torch.no_grad():
            wanted = self.targets(self.layout.views(target), inputs)

        nets, rows = self._nets, self._nets.view(parameters, inputs, "")
        begun = nets.begin(parameters, rows)
        values = nets.finish(parameters, begun, inputs["action"])  # [two, rows, components]
        errors = values - wanted
        loss = critic_loss = 0.5 * (errors * errors).sum((0, 2)).mean()
        parts = {"critic_loss": critic_loss, "value_mean": values.mean(), "target_mean": wanted.mean()}

        if both:
            rows = {name: column.detach() for name, column in rows.items()}  # the actor does not move the encoder
            raw = nets.actor(parameters, rows)
            action = torch.tanh(raw)
            first = {name: weights[:1] for name, weights in fixed.items() if name.startswith("critic.values.")}
            acted = nets.finish(first, begun[:1].detach(), action)
            actor_loss = -nets.scalarised(acted, rows.get("preference")).mean()
            loss = critic_loss + actor_loss
            if self._own.saturation_penalty > 0.0:
                beyond = torch.relu(raw.abs() - math.atanh(_SATURATED))
                loss = loss + self._own.saturation_penalty * (beyond * beyond).mean()
            saturated = (action.detach().abs() > _SATURATED).to(action.dtype).mean()
            parts |= {"actor_loss": actor_loss, "saturated": saturated}
        return loss, {name: part.detach() for name, part in parts.items()}

    def _step(self, state: _State, inputs: _Batch, *, both: bool) -> tuple[_State, Float[Tensor, " metrics"]]:
        theta, target, rate, done = state["theta"], state["target"], inputs["learning_rate"], state["step"]
        loss, found = self.losses(theta, target, inputs, both=both)
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            found["actor_gradient_norm"] = torch.linalg.vector_norm(gradient[self._actor])
            found["critic_gradient_norm"] = torch.linalg.vector_norm(gradient[self._critic])
            if self._own.max_grad_norm is not None:
                gradient, _ = clip_by_norm(gradient, self._own.max_grad_norm)
            actor, critic = (
                (theta[part], gradient[part], state["m"][part], state["v"][part])
                for part in (self._actor, self._critic)
            )
            moved = adam(*critic, done + 1.0, rate)
            # moments of an actor that does not move must not decay, and its steps are counted apart
            acting = adam(*actor, done / self._own.policy_delay + 1.0, rate) if both else (actor[0], *actor[2:])
            theta, m, v = (torch.cat(pair) for pair in zip(acting, moved, strict=True))
            of_actor = state["of_actor"]
            if both:
                target = torch.lerp(target, theta, inputs["tau"])
                of_actor = torch.stack([found[name] for name in _OF_ACTOR])
            after = {"theta": theta, "target": target, "of_actor": of_actor, "m": m, "v": v, "step": done + 1.0}
            return after, torch.cat([torch.stack([found[name] for name in _OF_CRITIC]), of_actor])

    def step(self, state: _State, inputs: _Batch) -> tuple[_State, Float[Tensor, " metrics"]]:
        """One gradient step of critic and actor; then the targets follow. Pure, with static shapes (see `nn.graph`).

        Args:
            state: theta (a leaf), target, of_actor, m, v, step.
            inputs: columns of the batch and of the views that follow, `next_noise`, `learning_rate`, `tau`.
        """
        return self._step(state, inputs, both=True)

    def critic_step(self, state: _State, inputs: _Batch) -> tuple[_State, Float[Tensor, " metrics"]]:
        """One gradient step of the critic alone; see `step`."""
        return self._step(state, inputs, both=False)

    @property
    def steps(self) -> tuple[PureStep, ...]:
        """Critic and actor; the critic alone."""
        return (self.step,) if self._own.policy_delay == 1 else (self.step, self.critic_step)

    def which(self, training_step: int) -> int:
        """Index into `steps`: the actor moves in steps 0, `policy_delay`, 2 `policy_delay`, …"""
        return int(training_step % self._own.policy_delay != 0)

    def noise(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Standard normal, for the targets' actions."""
        return {"next_noise": self.head.noise(rng, rows)}

    def random(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows actions"]:
        """Uniform actions, before learning starts."""
        return rng.uniform(-1.0, 1.0, (rows, self.head.stored)).astype(np.float32)

    def progress(self, done: float) -> None:
        """Nothing of this algorithm changes with the budget."""


def make_matd3(
    settings: RunSettings, observation: ObservationSpec, action: ActionSpec, *, spans: Spans | None = None
) -> OffPolicyLearner:
    """The learner of MATD3 and PCMATD3; see `core.spec.Learner`."""
    return OffPolicyLearner(settings, observation, action, TwinDelayed, spans=spans)
