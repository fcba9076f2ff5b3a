"""Layers as functions of named parameters: `block(parameters, prefix, x)`. First values come from NumPy generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from opencda_marl.nn.flat import Parameters
from opencda_marl.nn.fused import find_fused, layers
from opencda_marl.settings.networks import Activation

__all__ = ["ACTIVATIONS", "Mlp", "TwinMlp", "linear", "orthogonal"]

_FEW = 8  # outputs, up to which a product of transposes is two to three times faster on CPUs, both ways

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}
"""What bends a layer's output."""

Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


def orthogonal(
    rng: np.random.Generator, inputs: int, outputs: int, gain: float = 1.0
) -> Float64[np.ndarray, "inputs outputs"]:
    """A random matrix whose shorter side is orthonormal, times `gain` (Saxe et al. 2014)."""
    normal = rng.standard_normal((max(inputs, outputs), min(inputs, outputs)))
    basis, upper = np.linalg.qr(normal)
    basis = basis * np.sign(np.diag(upper))  # without it the distribution would not be uniform
    return gain * (basis if inputs >= outputs else basis.T)


def linear(parameters: Parameters, prefix: str, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    """x W + b, with W [inputs, outputs] in `<prefix>weight` and b in `<prefix>bias`."""
    weight, bias = parameters[prefix + "weight"], parameters[prefix + "bias"]
    if torch.compiler.is_compiling():
        return x @ weight + bias  # the sum is fused with what comes after
    return torch.addmm(bias, x, weight) if x.ndim == 2 else x @ weight + bias


@dataclass(frozen=True, slots=True)
class Mlp:
    """Linear layers with an activation after each but the last one.

    Args:
        inputs: width of what goes in.
        hidden: widths of the layers that end in an activation.
        outputs: width of the last, linear layer; None: the network ends with the last activation.
        activation: name of it.
    """

    inputs: int
    hidden: tuple[int, ...]
    outputs: int | None = None
    activation: Activation = "tanh"

    @property
    def width(self) -> int:
        """Width of what comes out."""
        if self.outputs is not None:
            return self.outputs
        return self.hidden[-1] if self.hidden else self.inputs

    def layers(self) -> list[tuple[str, int, int]]:
        """Name, width of what goes in and of what comes out, of each layer."""
        widths = [self.inputs, *self.hidden] + ([] if self.outputs is None else [self.outputs])
        return [(f"{i}.", a, b) for i, (a, b) in enumerate(pairwise(widths))]

    def shapes(self, prefix: str) -> Shapes:
        """Name -> shape of each parameter."""
        found: Shapes = {}
        for name, a, b in self.layers():
            found |= {f"{prefix}{name}weight": (a, b), f"{prefix}{name}bias": (b,)}
        return found

    def initialise(self, rng: np.random.Generator, prefix: str, *, gain: float = 1.0) -> Arrays:
        """Orthogonal weights (gain sqrt(2) inside, `gain` for a linear last layer), zero biases."""
        made: Arrays = {}
        layers = self.layers()
        for i, (name, a, b) in enumerate(layers):
            last = self.outputs is not None and i == len(layers) - 1
            made[f"{prefix}{name}weight"] = orthogonal(rng, a, b, gain if last else math.sqrt(2.0))
            made[f"{prefix}{name}bias"] = np.zeros(b)
        return made

    def __call__(
        self, parameters: Parameters, prefix: str, x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows width"]:
        """Apply it."""
        names = [prefix + name for name, _, _ in self.layers()]
        both = [(parameters[name + "weight"], parameters[name + "bias"]) for name in names]
        if x.ndim == 2 and both and (fused := find_fused(x, *both[0])) is not None:
            bends: list[Activation | None] = [self.activation] * len(self.hidden)
            return layers(fused, x, both, bends + [None] * (self.outputs is not None))
        bend = ACTIVATIONS[self.activation]
        for i in range(len(self.hidden)):
            x = bend(linear(parameters, f"{prefix}{i}.", x))
        return x if self.outputs is None else linear(parameters, f"{prefix}{len(self.hidden)}.", x)


def _side_by_side(
    bias: Float[Tensor, "two one outputs"],
    x: Float[Tensor, "two rows inputs"],
    weight: Float[Tensor, "two inputs outputs"],
) -> Float[Tensor, "two rows outputs"]:
    """x W + b for each of two, in the form that is fastest where it runs."""
    if weight.shape[-1] <= _FEW:
        return torch.bmm(weight.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2) + bias
    # compiled, the sum is fused with what comes after
    return torch.bmm(x, weight) + bias if torch.compiler.is_compiling() else torch.baddbmm(bias, x, weight)


@dataclass(frozen=True, slots=True)
class TwinMlp:
    """Two networks of the same form side by side, of a view and an action, in one product per layer.

    What the first layer makes of the view is apart from what it makes of the action (`begin`, `finish`): values of
    several actions at the same view share the one, and the gradient by an action does not pay for the view's columns.

    Args:
        inputs: width of the view.
        actions: width of the action.
        hidden: widths of the layers that end in an activation.
        outputs: width of the last, linear layer.
        activation: name of it.
    """

    inputs: int
    actions: int
    hidden: tuple[int, ...]
    outputs: int
    activation: Activation = "relu"

    def _one(self) -> Mlp:
        return Mlp(self.inputs + self.actions, self.hidden, self.outputs, self.activation)

    def shapes(self, prefix: str) -> Shapes:
        """Name -> shape of each parameter: behind a first axis of two, biases as rows, the action's weights apart."""
        first = (self.hidden or (self.outputs,))[0]
        found: Shapes = {}
        for name, shape in self._one().shapes(prefix).items():
            found[name] = (2, 1, *shape) if len(shape) == 1 else (2, *shape)
        found[f"{prefix}0.weight"] = (2, self.inputs, first)
        return {**found, f"{prefix}0.action": (2, self.actions, first)}

    def initialise(self, rng: np.random.Generator, prefix: str, *, gain: float = 1.0) -> Arrays:
        """First values, drawn apart for each of the two."""
        pair = [self._one().initialise(rng, prefix, gain=gain) for _ in range(2)]
        made = {name: np.stack([one[name] for one in pair]) for name in pair[0]}
        first = made[f"{prefix}0.weight"]
        made[f"{prefix}0.weight"], made[f"{prefix}0.action"] = first[:, : self.inputs], first[:, self.inputs :]
        return {name: made[name].reshape(shape) for name, shape in self.shapes(prefix).items()}

    def begin(
        self, parameters: Parameters, prefix: str, x: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "two rows first"]:
        """The first layer's sums, without the action's share."""
        return _side_by_side(parameters[f"{prefix}0.bias"], x.expand(2, *x.shape), parameters[f"{prefix}0.weight"])

    def finish(
        self,
        parameters: Parameters,
        prefix: str,
        begun: Float[Tensor, "two rows first"],
        action: Float[Tensor, "rows actions"],
    ) -> Float[Tensor, "two rows outputs"]:
        """Values of an action at a view that `begin` was given."""
        weight = parameters[f"{prefix}0.action"]
        # one action: a product of a column and a row, which needs no matrix product
        share = action * weight if self.actions == 1 else torch.matmul(action, weight)
        both = begun + share
        for i in range(1, len(self.hidden) + 1):
            both = _side_by_side(
                parameters[f"{prefix}{i}.bias"],
                ACTIVATIONS[self.activation](both),
                parameters[f"{prefix}{i}.weight"],
            )
        return both

    def __call__(
        self,
        parameters: Parameters,
        prefix: str,
        x: Float[Tensor, "rows inputs"],
        action: Float[Tensor, "rows actions"],
    ) -> Float[Tensor, "two rows outputs"]:
        """Apply both."""
        return self.finish(parameters, prefix, self.begin(parameters, prefix, x), action)
