"""The nets that MASAC and MATD3 have in common: an actor, twin critics of each component, and a view's way into them.

Nothing is learned here: losses and the order of an update stand in the algorithms' own files. A trained encoder is
shared by actor and critic, under `actor.context.`, because whoever acts needs it; which loss moves it is theirs to say.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.spec import ActionSpec, ObservationSpec
from opencda_marl.nn.actor import Actor
from opencda_marl.nn.blocks import Arrays, Mlp, Shapes, TwinMlp
from opencda_marl.nn.context import Encoder
from opencda_marl.nn.flat import Layout, Parameters
from opencda_marl.nn.torso import Torso
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import OffPolicySettings
from opencda_marl.settings.run import RunSettings

__all__ = ["ActorCritic"]

_Rows = Mapping[str, Tensor]
_Values = Float[Tensor, "*twins rows components"]
_Begun = Float[Tensor, "twins rows first"]


class ActorCritic:
    """Actor and twin critics as functions of named parameters.

    Args:
        settings: of the run; an algorithm whose name begins with `pc` sees a preference and has a vector of rewards.
        observation: layout.
        action: kind.
        encoder: of neighbour rows; None where there are none.
        trained: the encoder is one of the nets, else rows bring its context.
        outputs: width of the actor's last layer.

    Raises:
        ConfigError: neither the team's reward nor the vehicle's own has a weight.
    """

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        action: ActionSpec,
        encoder: Encoder | None,
        *,
        trained: bool,
        outputs: int,
    ) -> None:
        own, weights = own_settings(settings.learner, OffPolicySettings), settings.preference
        self.conditioned = settings.algorithm.startswith("pc")
        self.components: tuple[str, ...] = ("team", *OBJECTIVES) if self.conditioned else ("value",)
        self._team, self._individual = weights.team_weight, weights.individual_weight
        if self.conditioned and not self._team + self._individual:
            raise ConfigError(
                "preference.team_weight and preference.lambda are both 0: there is nothing to maximise",
                fix="preference.team_weight=1",
            )
        self._encoder = encoder if trained else None
        self._torso = Torso(observation, tuple(own.ego_hidden), encoder, trained=False, activation=own.activation)
        hidden, seen = tuple(own.hidden), self._torso.width + (len(OBJECTIVES) if self.conditioned else 0)
        self._policy = Mlp(seen, hidden, outputs, own.activation)
        self.actor = Actor(self._torso, self._policy, "actor.policy.", conditioned=self.conditioned)
        self._twins = TwinMlp(seen, action.size, hidden, len(self.components), own.activation)
        self.actor_shapes: Shapes = self._policy.shapes("actor.policy.") | self._torso.shapes("actor.")
        self.context_shapes: Shapes = self._encoder.shapes("actor.context.") if self._encoder else {}
        self.critic_shapes: Shapes = self._torso.shapes("critic.") | self._twins.shapes("critic.values.")
        self.actor_layout = Layout(self.actor_shapes | self.context_shapes)  # of what acting needs
        self.actor_size = Layout(self.actor_shapes).size

    def initialise(self, rng: np.random.Generator) -> Arrays:
        """First values. The first policy is near the middle, where tanh is steep."""
        made: Arrays = self._policy.initialise(rng, "actor.policy.", gain=0.01) | self._torso.initialise(rng, "actor.")
        made |= self._encoder.initialise(rng, "actor.context.") if self._encoder else {}
        return made | self._torso.initialise(rng, "critic.") | self._twins.initialise(rng, "critic.values.", gain=0.1)

    def view(self, parameters: Parameters, inputs: _Rows, prefix: str) -> dict[str, Tensor]:
        """The columns of a view, with the context that these parameters make of its neighbours."""
        names = ("ego", "context", "preference")
        rows = {name: inputs[prefix + name] for name in names if prefix + name in inputs}
        if self._encoder is not None:
            neighbours, counts = inputs[prefix + "neighbours"], inputs[prefix + "counts"]
            real = inputs.get(prefix + "real")
            rows["context"] = self._encoder.encode(parameters, "actor.context.", neighbours, counts, rows["ego"], real)
        return rows

    def critic(self, parameters: Parameters, rows: _Rows, action: Float[Tensor, "rows actions"]) -> _Values:
        """Values of both twins, [two, rows, components]; the context is in the rows."""
        return self.finish(parameters, self.begin(parameters, rows), action)

    def begin(self, parameters: Parameters, rows: _Rows) -> _Begun:
        """The view's share of the critics' first layer; see `nn.blocks.TwinMlp`."""
        seen = self._torso(parameters, "critic.", rows)
        seen = torch.cat([seen, rows["preference"]], -1) if self.conditioned else seen
        return self._twins.begin(parameters, "critic.values.", seen)

    def finish(self, parameters: Parameters, begun: _Begun, action: Float[Tensor, "rows actions"]) -> _Values:
        """Values of an action at a view that `begin` was given."""
        return self._twins.finish(parameters, "critic.values.", begun, action)

    def scalarised(self, values: _Values, preference: Tensor | None) -> Float[Tensor, "*twins rows"]:
        """What the actor maximises: team_weight Q_team + individual_weight p . Q_individual, or the one value."""
        if preference is None:
            return values[..., 0]
        return self._team * values[..., 0] + self._individual * (values[..., 1:] * preference).sum(-1)

    def weight(self, preference: Tensor | None) -> Float[Tensor, " rows"] | float:
        """The sum of the weights that `scalarised` gives to the components."""
        return 1.0 if preference is None else self._team + self._individual * preference.sum(-1)

    def smaller(self, values: _Values, preference: Tensor | None) -> Float[Tensor, "rows components"]:
        """Of two twins, row by row, the one whose scalarised value is smaller."""
        mixed = self.scalarised(values, preference)
        return torch.where((mixed[0] <= mixed[1])[:, None], values[0], values[1])
