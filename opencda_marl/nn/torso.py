"""The part that networks of one learner have in common: ego features, and the context of neighbour rows beside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opencda_marl.core.spec import ObservationSpec
from opencda_marl.nn.blocks import Arrays, Mlp, Shapes
from opencda_marl.nn.context import Encoder
from opencda_marl.nn.flat import Parameters
from opencda_marl.settings.networks import Activation

__all__ = ["Torso"]


class Torso:
    """`torso(parameters, prefix, rows)`; each network has parameters of its own under its own prefix.

    Args:
        observation: layout.
        hidden: widths of the ego network; empty: ego features go in raw.
        encoder: of neighbour rows; None where there are none.
        trained: the encoder's parameters are among the torso's, and rows bring `neighbours` and `counts`; else they
            bring `context`. A context that is given is used in any case.
        activation: of the ego network.
    """

    def __init__(
        self,
        observation: ObservationSpec,
        hidden: tuple[int, ...],
        encoder: Encoder | None,
        *,
        trained: bool,
        activation: Activation = "tanh",
    ) -> None:
        self.ego = Mlp(len(observation.ego), hidden, activation=activation)
        self._encoder = encoder if trained else None
        self.width = self.ego.width + (encoder.size if encoder else 0)

    def shapes(self, prefix: str) -> Shapes:
        """Name -> shape of each parameter."""
        context = self._encoder.shapes(prefix + "context.") if self._encoder else {}
        return {**context, **self.ego.shapes(prefix + "ego.")}

    def initialise(self, rng: np.random.Generator, prefix: str) -> Arrays:
        """First values."""
        context = self._encoder.initialise(rng, prefix + "context.") if self._encoder else {}
        return {**context, **self.ego.initialise(rng, prefix + "ego.")}

    def __call__(self, parameters: Parameters, prefix: str, rows: Mapping[str, Tensor]) -> Float[Tensor, "rows width"]:
        """Apply it to `ego` and to the context."""
        seen = self.ego(parameters, prefix + "ego.", rows["ego"])
        if "context" in rows:
            return torch.cat([seen, rows["context"]], -1)
        if self._encoder is None:
            return seen
        context = self._encoder.encode(parameters, prefix + "context.", rows["neighbours"], rows["counts"], rows["ego"])
        return torch.cat([seen, context], -1)
