"""An actor's network: ego features and context through the torso, the preference beside them, an MLP over all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from opencda_marl.nn.blocks import Mlp
from opencda_marl.nn.dense import find_dense, unfit
from opencda_marl.nn.flat import Parameters
from opencda_marl.nn.torso import Torso

__all__ = ["ActingActor", "Actor", "ActorNetwork"]

_Rows = Mapping[str, Tensor]
_Outputs = Float[Tensor, "rows outputs"]

ActingActor = Callable[[_Rows], _Outputs]
"""An actor bound to parameters, for acting: no gradients, on the parameters' device; rows bring the context."""


class ActorNetwork(Protocol):
    """What acting needs of an actor, up to its head."""

    def __call__(self, parameters: Parameters, rows: _Rows) -> _Outputs:
        """What the head makes an action of; differentiable."""

    def acting(self, parameters: Parameters) -> tuple[ActingActor, str]:
        """The fastest form that reads these parameters where they lie, and what it is called.

        Made once: numbers that are written there later are the ones it acts with.
        """


class Actor:
    """See `ActorNetwork`.

    Args:
        torso: under `actor.`.
        mlp: over the torso's features, and the preference if there is one.
        prefix: of the MLP's parameters.
        conditioned: rows bring a preference.
    """

    def __init__(self, torso: Torso, mlp: Mlp, prefix: str, *, conditioned: bool) -> None:
        self._torso, self._mlp, self._prefix, self._conditioned = torso, mlp, prefix, conditioned

    def __call__(self, parameters: Parameters, rows: _Rows) -> _Outputs:
        """See `ActorNetwork`; the torso makes the context where rows bring none."""
        seen = self._torso(parameters, "actor.", rows)
        if self._conditioned:
            seen = torch.cat([seen, rows["preference"]], -1)
        return self._mlp(parameters, self._prefix, seen)

    def acting(self, parameters: Parameters) -> tuple[ActingActor, str]:
        """See `ActorNetwork`: compiled on a CPU where that can be, else torch's."""
        why = unfit(parameters)
        kernel, why = (None, why) if why else find_dense()
        if kernel is None:
            return partial(self, parameters), f"torch ({why})"
        ego = kernel.mlp(self._torso.ego, parameters, "actor.ego.")
        mlp = kernel.mlp(self._mlp, parameters, self._prefix)
        beside = ("context", "preference") if self._conditioned else ("context",)

        def act(rows: _Rows) -> _Outputs:
            return mlp(torch.cat([ego(rows["ego"]), *(rows[name] for name in beside if name in rows)], -1))

        return act, "c++"
