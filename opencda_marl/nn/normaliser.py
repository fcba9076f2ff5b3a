"""Running mean and spread of returns, and the critic's last layer kept true to them (PopArt, van Hasselt 2016)."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

__all__ = ["RunningScale", "preserve_outputs"]

_SMALLEST = 1e-2  # of the spread: a component that never changes must not be blown up
_DECAY = 0.9  # per update: about the last ten count


class RunningScale:
    """Exponential averages of a component's mean and mean square, without the pull of their start at zero.

    Args:
        components: how many are tracked side by side.
    """

    def __init__(self, components: int) -> None:
        self._mean = np.zeros(components)
        self._square = np.zeros(components)
        self._weight = 0.0  # of what has been seen; 1 in the long run

    @property
    def mean(self) -> Float64[np.ndarray, " components"]:
        """0 before anything was seen."""
        return np.asarray(self._mean / self._weight) if self._weight else np.zeros_like(self._mean)

    @property
    def std(self) -> Float64[np.ndarray, " components"]:
        """1 before anything was seen."""
        if not self._weight:
            return np.ones_like(self._mean)
        variance = self._square / self._weight - self.mean**2
        return np.asarray(np.sqrt(np.maximum(variance, _SMALLEST**2)))

    def tensors(self, device: torch.device) -> tuple[Float[Tensor, " components"], Float[Tensor, " components"]]:
        """Mean and spread, for networks on a device."""
        mean, std = (torch.as_tensor(x, dtype=torch.float32, device=device) for x in (self.mean, self.std))
        return mean, std

    def observe(self, values: Float[np.ndarray, "rows components"]) -> None:
        """Take in the values of one update."""
        values = np.asarray(values, np.float64)
        self._mean = _DECAY * self._mean + (1.0 - _DECAY) * values.mean(0)
        self._square = _DECAY * self._square + (1.0 - _DECAY) * (values**2).mean(0)
        self._weight = _DECAY * self._weight + (1.0 - _DECAY)

    def state(self) -> Float64[np.ndarray, "three components"]:
        """Everything, for a checkpoint."""
        return np.stack([self._mean, self._square, np.full_like(self._mean, self._weight)])

    def load(self, state: Float64[np.ndarray, "three components"]) -> None:
        """Become what `state` returned."""
        self._mean, self._square = state[0].copy(), state[1].copy()
        self._weight = float(state[2, 0])


def preserve_outputs(
    weight: Float[Tensor, "inputs components"],
    bias: Float[Tensor, " components"],
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
) -> None:
    """Change a last layer in place so that `output * std + mean` is what it was.

    Args:
        weight: of the layer.
        bias: of the layer.
        before: (mean, std) that its outputs were to be scaled by.
        after: (mean, std) that they will be scaled by.
    """
    (old_mean, old_std), (new_mean, new_std) = before, after
    weight.mul_(old_std / new_std)
    bias.mul_(old_std).add_(old_mean - new_mean).div_(new_std)
