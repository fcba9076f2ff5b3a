"""MASAC (Haarnoja et al. 2018) and PCMASAC: soft actor-critic for one policy that all vehicles share.

nets     actor: ego, context (and preference) -> mean and spread. critic: the same and an action -> two values of each
         component, from two networks side by side. A trained encoder is shared: the critic's loss trains it.
losses   squared error of soft values, the actor's expected value and entropy, the temperature.
update   all gradients at the same weights, one step of Adam over all of them, then the targets follow.

PCMASAC has a vector of rewards and a preference p per vehicle (arXiv 2606.14693): Q(s, a, p) has the team's component
and one per objective, and Q = team_weight * Q_team + individual_weight * p . Q_individual is what the actor maximises
and what the smaller of the twins is chosen by. MASAC is the same with one component, the sum of the objectives.
"""

from __future__ import annotations

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
from opencda_marl.nn.heads import SquashedGaussian
from opencda_marl.nn.optimiser import adam, clip_by_norm
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["METRICS", "SoftActorCritic", "make_masac"]

_Batch = Mapping[str, Tensor]
_State = dict[str, Tensor]

METRICS = (
    "critic_loss",
    "actor_loss",
    "alpha_loss",
    "alpha",
    "entropy",
    "value_mean",
    "target_mean",
    "actor_gradient_norm",
    "critic_gradient_norm",
)
"""Order of what `SoftActorCritic.step` measures."""


class SoftActorCritic:
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
        self._own = own_settings(settings.learner, MasacSettings)
        self.head = SquashedGaussian(action.size)
        self._nets = nets = ActorCritic(
            settings, observation, action, encoder, trained=trained, outputs=self.head.outputs
        )
        self.conditioned, self.components, self.actor = nets.conditioned, nets.components, nets.actor
        self.relabel = self._own.relabel if self.conditioned else 0.0
        critic = nets.context_shapes | nets.critic_shapes  # the encoder is the critic's
        self.actor_layout = nets.actor_layout
        self.layout = Layout(nets.actor_shapes | critic | {"log_alpha": (1,)})
        self._critic = slice(nets.actor_size, self.layout.size - 1)
        self._target_layout = Layout(critic)

    def initialise(self, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, " size"]]:
        """First weights, and targets equal to them."""
        made = self._nets.initialise(rng) | {"log_alpha": np.full(1, np.log(self._own.initial_alpha))}
        theta = self.layout.flatten(made)
        return {"theta": theta, "target": theta[self._critic].copy()}

    def targets(
        self, parameters: Parameters, following: Parameters, inputs: _Batch, alpha: Float[Tensor, ""]
    ) -> Float[Tensor, "rows components"]:
        """r + gamma (Q(s', a') - alpha log pi(a' | s')), of the twin whose scalarised value is smaller.

        The entropy is shared out to the components so that their scalarised sum gets it once.
        """
        nets, after = self._nets, self._nets.view(parameters, inputs, "next_")
        action, log_prob = self.head.sample(nets.actor(parameters, after), inputs["next_noise"])
        values = nets.critic(following, nets.view(following, inputs, "next_"), action)
        preference = after.get("preference")
        bonus = (alpha * log_prob / nets.weight(preference))[:, None]
        soft = nets.smaller(values, preference) - bonus
        return inputs["rewards"] + inputs["discount"][:, None] * soft

    def losses(
        self, theta: Float[Tensor, " size"], target: Float[Tensor, " critic"], inputs: _Batch
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The sum of all losses, each of which moves only what it is about, and their parts."""
        parameters, fixed = self.layout.views(theta), self.layout.views(theta.detach())
        tuned = self._own.alpha == "auto"
        alpha = fixed["log_alpha"].exp().squeeze() if tuned else torch.full_like(inputs["tau"], float(self._own.alpha))
        with torch.no_grad():
            wanted = self.targets(fixed, self._target_layout.views(target), inputs, alpha)

        nets, rows = self._nets, self._nets.view(parameters, inputs, "")
        begun = nets.begin(parameters, rows)
        values = nets.finish(parameters, begun, inputs["action"])  # [two, rows, components]
        errors = values - wanted
        critic_loss = 0.5 * (errors * errors).sum((0, 2)).mean()

        rows = {name: column.detach() for name, column in rows.items()}  # the actor does not move the encoder
        action, log_prob = self.head.sample(nets.actor(parameters, rows), inputs["noise"])
        acted = nets.finish(fixed, begun.detach(), action)  # the same critic at the same view
        mixed = nets.scalarised(acted, rows.get("preference"))
        actor_loss = (alpha * log_prob - torch.minimum(mixed[0], mixed[1])).mean()

        entropy = -log_prob.detach().mean()
        alpha_loss = parameters["log_alpha"].squeeze() * (entropy - self._own.target_entropy)
        loss = critic_loss + actor_loss + (alpha_loss if tuned else 0.0)
        parts = {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "alpha_loss": alpha_loss,
            "alpha": alpha,
            "entropy": entropy,
            "value_mean": values.mean(),
            "target_mean": wanted.mean(),
        }
        return loss, {name: part.detach() for name, part in parts.items()}

    def step(self, state: _State, inputs: _Batch) -> tuple[_State, Float[Tensor, " metrics"]]:
        """One gradient step; a pure function with static shapes (see `nn.graph.UpdateForm`).

        Args:
            state: theta (a leaf), target, m, v, step.
            inputs: columns of the batch and of the views that follow, `noise` and `next_noise`, `learning_rate`, `tau`.
        """
        theta, target = state["theta"], state["target"]
        loss, found = self.losses(theta, target, inputs)
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            found["actor_gradient_norm"] = torch.linalg.vector_norm(gradient[: self._critic.start])
            found["critic_gradient_norm"] = torch.linalg.vector_norm(gradient[self._critic])
            if self._own.max_grad_norm is not None:
                gradient, _ = clip_by_norm(gradient, self._own.max_grad_norm)
            step = state["step"] + 1.0
            theta, m, v = adam(theta, gradient, state["m"], state["v"], step, inputs["learning_rate"])
            target = torch.lerp(target, theta[self._critic], inputs["tau"])
            after = {"theta": theta, "target": target, "m": m, "v": v, "step": step}
            return after, torch.stack([found[name] for name in METRICS])

    @property
    def steps(self) -> tuple[PureStep, ...]:
        """Every gradient step is the same."""
        return (self.step,)

    def which(self, training_step: int) -> int:  # noqa: ARG002 - of the interface
        """Index into `steps` of the next gradient step."""
        return 0

    def noise(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Standard normal, for the actions at both views of a batch."""
        return {"noise": self.head.noise(rng, rows), "next_noise": self.head.noise(rng, rows)}

    def random(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows actions"]:
        """Uniform actions, before learning starts."""
        return rng.uniform(-1.0, 1.0, (rows, self.head.stored)).astype(np.float32)

    def progress(self, done: float) -> None:
        """Nothing of this algorithm changes with the budget."""


def make_masac(
    settings: RunSettings, observation: ObservationSpec, action: ActionSpec, *, spans: Spans | None = None
) -> OffPolicyLearner:
    """The learner of MASAC and PCMASAC; see `core.spec.Learner`."""
    return OffPolicyLearner(settings, observation, action, SoftActorCritic, spans=spans)
