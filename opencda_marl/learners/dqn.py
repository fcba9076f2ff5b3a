"""DQN (Mnih et al. 2015) with double Q-learning (van Hasselt et al. 2016): one value per level, for all vehicles.

net      ego, context -> a value of each level. Its target follows it slowly (Polyak), in place of copies now and then.
target   y = r + g Q'(s', argmax_a Q(s', a)): the net says which level is best, the target what it is worth.
loss     (Q(s, a) - y)^2 / 2. Not Huber's: it is dull to what is rare and large, and a crash of -20 is both.
acting   the best level, or any with probability epsilon, which falls linearly with the budget that is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import ActionSpec, ObservationSpec
from opencda_marl.learners.offpolicy import OffPolicyLearner, PureStep
from opencda_marl.nn.actor import Actor
from opencda_marl.nn.blocks import Arrays, Mlp, Shapes
from opencda_marl.nn.context import Encoder
from opencda_marl.nn.flat import Layout, Parameters
from opencda_marl.nn.heads import EpsilonGreedy
from opencda_marl.nn.optimiser import adam, clip_by_norm, linear_schedule
from opencda_marl.nn.torso import Torso
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import DqnSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["METRICS", "DoubleDqn", "make_dqn"]

_Batch = Mapping[str, Tensor]
_State = dict[str, Tensor]

METRICS = ("critic_loss", "value_mean", "target_mean", "gradient_norm", "epsilon")
"""Order of what `DoubleDqn.step` measures."""


class DoubleDqn:
    """Net, loss and the update; see `learners.offpolicy.Algorithm`. The actor is the net: its outputs are values.

    Args:
        settings: of the run.
        observation: layout.
        action: kind; levels.
        encoder: of neighbour rows; None where there are none.
        trained: the encoder is part of the net, else rows bring its context.

    Raises:
        ConfigError: the action is continuous.
    """

    metrics: tuple[str, ...] = METRICS
    conditioned = False
    relabel = 0.0
    components: tuple[str, ...] = ("value",)

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        action: ActionSpec,
        encoder: Encoder | None,
        *,
        trained: bool,
    ) -> None:
        if action.kind != "levels":
            raise ConfigError(f"{settings.algorithm} chooses among levels, but action is {action.kind}")
        self._own = own = own_settings(settings.learner, DqnSettings)
        self._encoder = encoder if trained else None
        self.head = EpsilonGreedy(len(action.levels), epsilon=own.epsilon)
        self._torso = Torso(observation, tuple(own.ego_hidden), encoder, trained=False, activation=own.activation)
        self._values = Mlp(self._torso.width, tuple(own.hidden), self.head.outputs, own.activation)
        self.actor = Actor(self._torso, self._values, "actor.values.", conditioned=False)  # the value of each level
        context: Shapes = self._encoder.shapes("actor.context.") if self._encoder else {}
        self.layout = Layout(self._values.shapes("actor.values.") | self._torso.shapes("actor.") | context)
        self.actor_layout = self.layout

    def initialise(self, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, " size"]]:
        """First weights, and a target equal to them."""
        made: Arrays = self._values.initialise(rng, "actor.values.", gain=0.1) | self._torso.initialise(rng, "actor.")
        made |= self._encoder.initialise(rng, "actor.context.") if self._encoder else {}
        theta = self.layout.flatten(made)
        return {"theta": theta, "target": theta.copy()}

    def _all(self, parameters: Parameters, inputs: _Batch, prefix: str) -> Float[Tensor, "rows levels"]:
        """Values at a view, with the context that these parameters make of its neighbours."""
        rows = {name: inputs[prefix + name] for name in ("ego", "context") if prefix + name in inputs}
        if self._encoder is not None:
            neighbours, counts = inputs[prefix + "neighbours"], inputs[prefix + "counts"]
            real = inputs.get(prefix + "real")
            rows["context"] = self._encoder.encode(parameters, "actor.context.", neighbours, counts, rows["ego"], real)
        return self.actor(parameters, rows)

    def targets(self, parameters: Parameters, following: Parameters, inputs: _Batch) -> Float[Tensor, "rows one"]:
        """r + gamma Q'(s', argmax_a Q(s', a)).

        Args:
            parameters: of the net.
            following: the target's.
            inputs: rewards, discount and the views that follow.
        """
        best = self._all(parameters, inputs, "next_").argmax(-1, keepdim=True)
        worth = self._all(following, inputs, "next_").gather(-1, best)
        return inputs["rewards"] + inputs["discount"][:, None] * worth

    def losses(
        self, theta: Float[Tensor, " size"], target: Float[Tensor, " size"], inputs: _Batch
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss, and what is measured on the way."""
        with torch.no_grad():
            wanted = self.targets(self.layout.views(theta.detach()), self.layout.views(target), inputs)
        taken = inputs["action"].to(torch.int64)
        values = self._all(self.layout.views(theta), inputs, "").gather(-1, taken)  # [rows, one]
        errors = values - wanted
        loss = 0.5 * (errors * errors).mean()
        parts = {"critic_loss": loss, "value_mean": values.mean(), "target_mean": wanted.mean()}
        return loss, {name: part.detach() for name, part in parts.items()}

    def step(self, state: _State, inputs: _Batch) -> tuple[_State, Float[Tensor, " metrics"]]:
        """One gradient step; a pure function with static shapes (see `nn.graph`).

        Args:
            state: theta (a leaf), target, m, v, step.
            inputs: columns of the batch and of the views that follow, `learning_rate`, `tau`; `epsilon`, which is only
                measured.
        """
        theta, target = state["theta"], state["target"]
        loss, found = self.losses(theta, target, inputs)
        (gradient,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            found["epsilon"] = inputs["epsilon"]
            found["gradient_norm"] = torch.linalg.vector_norm(gradient)
            if self._own.max_grad_norm is not None:
                gradient, _ = clip_by_norm(gradient, self._own.max_grad_norm)
            step = state["step"] + 1.0
            theta, m, v = adam(theta, gradient, state["m"], state["v"], step, inputs["learning_rate"])
            target = torch.lerp(target, theta, inputs["tau"])
            after = {"theta": theta, "target": target, "m": m, "v": v, "step": step}
            return after, torch.stack([found[name] for name in METRICS])

    @property
    def steps(self) -> tuple[PureStep, ...]:
        """Every gradient step is the same."""
        return (self.step,)

    def which(self, training_step: int) -> int:  # noqa: ARG002 - of the interface
        """Index into `steps` of the next gradient step."""
        return 0

    def noise(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:  # noqa: ARG002 - of the interface
        """Nothing in a step is random; the epsilon of the moment goes along, to stand among the metrics."""
        return {"epsilon": np.array(self.head.epsilon, np.float32)}

    def random(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows one"]:
        """Uniform levels, before learning starts."""
        return rng.integers(0, self.head.outputs, (rows, 1)).astype(np.float32)

    def progress(self, done: float) -> None:
        """Epsilon falls until `exploration_fraction` of the budget is used."""
        own = self._own
        self.head.epsilon = linear_schedule(own.epsilon, own.epsilon_end, done / own.exploration_fraction)


def make_dqn(
    settings: RunSettings, observation: ObservationSpec, action: ActionSpec, *, spans: Spans | None = None
) -> OffPolicyLearner:
    """The learner of DQN; see `core.spec.Learner`."""
    return OffPolicyLearner(settings, observation, action, DoubleDqn, spans=spans)
