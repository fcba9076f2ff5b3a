"""What the last layer of an actor means: a squashed Gaussian, or a choice among levels.

Both kinds answer to the same names, so that a learner does not ask which one it has:
`outputs`, `stored`, `initial_bias`, `shapes`, `initialise`, `noise`, `act`, `log_prob`, `entropy`.
What is stored of an action is what its probability can be computed from without loss.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn.functional import softplus

from opencda_marl.core.spec import ActionSpec
from opencda_marl.nn.blocks import Arrays, Shapes
from opencda_marl.nn.flat import Parameters

__all__ = [
    "ActingHead",
    "Categorical",
    "Deterministic",
    "EpsilonGreedy",
    "Head",
    "SquashedGaussian",
    "TanhGaussian",
    "gaussian_log_prob",
    "make_head",
    "tanh_correction",
    "tanh_gaussian_entropy",
]

LOG_STD = (-5.0, 2.0)
"""Range of a Gaussian's log standard deviation."""

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(16)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()

_Rows = Float[Tensor, " rows"]
_Outputs = Float[Tensor, "rows outputs"]
_Actions = Float[Tensor, "rows actions"]


def tanh_correction(pre_tanh: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    """log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), stable where tanh is 1 in float32 (SAC, appendix C)."""
    return 2.0 * (math.log(2.0) - pre_tanh - softplus(-2.0 * pre_tanh))


def gaussian_log_prob(
    pre_tanh: Float[Tensor, "rows actions"],
    mean: Float[Tensor, "rows actions"],
    log_std: Float[Tensor, "*rows actions"],
) -> Float[Tensor, " rows"]:
    """Log-density of tanh(u) for u ~ N(mean, std): that of u, corrected for the squashing, summed over actions."""
    scaled = (pre_tanh - mean) * torch.exp(-log_std)
    density = -0.5 * scaled * scaled - log_std - 0.5 * math.log(2.0 * math.pi)
    return (density - tanh_correction(pre_tanh)).sum(-1)


def tanh_gaussian_entropy(
    mean: Float[Tensor, "rows actions"], log_std: Float[Tensor, "*rows actions"]
) -> Float[Tensor, " rows"]:
    """Entropy of tanh(u) in nats: that of the Gaussian plus E[log(1 - tanh(u)^2)].

    The expectation is a Gauss-Hermite sum over 16 nodes: exact enough (1e-3 for a spread up to 1), without noise,
    and differentiable by mean and spread. The Gaussian's own entropy would reward spreading into both ends for ever.
    """
    # a captured update must not copy from the host: made once. The compiler, which keeps no caches, makes constants
    made = _quadrature if torch.compiler.is_compiling() else _kept_quadrature
    nodes, weights = made(mean.dtype, mean.device)
    points = mean[..., None] + torch.exp(log_std)[..., None] * nodes  # [rows, actions, nodes]
    expected = (tanh_correction(points) * weights).sum(-1)
    return (log_std + 0.5 * math.log(2.0 * math.pi * math.e) + expected).sum(-1)


class ActingHead(Protocol):
    """What acting needs of an actor's last step."""

    outputs: int  # width of the actor's last layer
    stored: int  # numbers stored per action

    def noise(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows noises"]:
        """What `act` needs to explore."""

    def act(
        self, parameters: Parameters, prefix: str, outputs: _Outputs, noise: Tensor | None
    ) -> tuple[_Actions, _Actions]:
        """Actions and what to store of them; without noise greedy ones."""


def _quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss-Hermite sum."""
    nodes = torch.as_tensor(_NODES, dtype=dtype, device=device)
    return nodes, torch.as_tensor(_WEIGHTS, dtype=dtype, device=device)


@lru_cache(maxsize=8)
def _kept_quadrature(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(mode=False):  # they serve training too, whoever asks first
        return _quadrature(dtype, device)


@runtime_checkable
class Head(ActingHead, Protocol):
    """An actor's last step, with the probabilities that policy gradients need."""

    def initial_bias(self) -> np.ndarray:
        """Of the last layer, [outputs]: what the first policy does."""

    def shapes(self, prefix: str) -> Shapes:
        """Parameters beside those of the network."""

    def initialise(self, prefix: str) -> Arrays:
        """Their first values."""

    def log_prob(self, parameters: Parameters, prefix: str, outputs: _Outputs, stored: _Actions) -> _Rows:
        """Of stored actions."""

    def entropy(self, parameters: Parameters, prefix: str, outputs: _Outputs) -> _Rows:
        """In nats."""


class TanhGaussian:
    """Mean from the network, one spread for all states, squashed into [-1, 1]. Stored is u, before tanh.

    Args:
        size: numbers per action.
        fraction: first mean, as a share of the way from -1 to 1.
        log_std: first log standard deviation, before tanh.
        greedy: quantile that is the greedy action, in (0, 1).
    """

    def __init__(self, size: int, *, fraction: float, log_std: float, greedy: float = 0.5) -> None:
        self.outputs = size
        self.stored = size
        self._greedy = NormalDist().inv_cdf(greedy)  # [standard deviations]
        self._fraction = fraction
        self._log_std = log_std

    def initial_bias(self) -> np.ndarray:
        """See `Head`."""
        return np.full(self.outputs, math.atanh(2.0 * self._fraction - 1.0))

    def shapes(self, prefix: str) -> Shapes:
        """See `Head`."""
        return {prefix + "log_std": (self.outputs,)}

    def initialise(self, prefix: str) -> Arrays:
        """See `Head`."""
        return {prefix + "log_std": np.full(self.outputs, self._log_std)}

    def noise(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows actions"]:
        """Standard normal."""
        return rng.standard_normal((rows, self.outputs), np.float32)

    def act(
        self, parameters: Parameters, prefix: str, outputs: _Outputs, noise: Tensor | None
    ) -> tuple[_Actions, _Actions]:
        """See `Head`."""
        if noise is None and self._greedy == 0.0:
            return torch.tanh(outputs), outputs
        away = self._greedy if noise is None else noise
        pre_tanh = outputs + torch.exp(self._spread(parameters, prefix)) * away
        return torch.tanh(pre_tanh), pre_tanh

    def log_prob(self, parameters: Parameters, prefix: str, outputs: _Outputs, stored: _Actions) -> _Rows:
        """See `Head`."""
        return gaussian_log_prob(stored, outputs, self._spread(parameters, prefix))

    def entropy(self, parameters: Parameters, prefix: str, outputs: _Outputs) -> _Rows:
        """See `tanh_gaussian_entropy`."""
        return tanh_gaussian_entropy(outputs, self._spread(parameters, prefix))

    def _spread(self, parameters: Parameters, prefix: str) -> Tensor:
        return parameters[prefix + "log_std"].clamp(*LOG_STD)


class SquashedGaussian:
    """Mean and spread from the network, squashed into [-1, 1] (SAC). Stored is the action itself.

    Args:
        size: numbers per action.
    """

    def __init__(self, size: int) -> None:
        self.outputs = 2 * size
        self.stored = size

    def noise(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows actions"]:
        """Standard normal."""
        return rng.standard_normal((rows, self.stored), np.float32)

    def act(
        self,
        parameters: Parameters,  # noqa: ARG002 - of the interface
        prefix: str,  # noqa: ARG002
        outputs: _Outputs,
        noise: Tensor | None,
    ) -> tuple[_Actions, _Actions]:
        """See `ActingHead`."""
        mean, log_std = self._parts(outputs)
        action = torch.tanh(mean if noise is None else mean + torch.exp(log_std) * noise)
        return action, action

    def sample(self, outputs: _Outputs, noise: _Actions) -> tuple[_Actions, _Rows]:
        """Actions and their log-densities, differentiable by the outputs (the reparameterised form)."""
        mean, log_std = self._parts(outputs)
        pre_tanh = mean + torch.exp(log_std) * noise
        # (pre_tanh - mean) / std is the noise
        density = -0.5 * noise * noise - log_std - 0.5 * math.log(2.0 * math.pi)
        return torch.tanh(pre_tanh), (density - tanh_correction(pre_tanh)).sum(-1)

    def _parts(self, outputs: _Outputs) -> tuple[_Actions, _Actions]:
        mean, log_std = outputs.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)


class Deterministic:
    """One action per state, squashed into [-1, 1] (TD3). Stored is the action as executed, noise included.

    Args:
        size: numbers per action.
        noise: standard deviation of what exploring adds, in units of the action.
    """

    def __init__(self, size: int, *, noise: float) -> None:
        self.outputs = size
        self.stored = size
        self._noise = noise

    def noise(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows actions"]:
        """Standard normal."""
        return rng.standard_normal((rows, self.stored), np.float32)

    def act(
        self,
        parameters: Parameters,  # noqa: ARG002 - of the interface
        prefix: str,  # noqa: ARG002
        outputs: _Outputs,
        noise: Tensor | None,
    ) -> tuple[_Actions, _Actions]:
        """See `ActingHead`."""
        action = torch.tanh(outputs)
        if noise is not None:
            action = (action + self._noise * noise).clamp(-1.0, 1.0)
        return action, action


class EpsilonGreedy:
    """The level with the largest value, or any of them with probability `epsilon` (DQN). Stored is the index.

    Args:
        levels: how many there are.
        epsilon: the first one; it is a number of the head's that changes.
    """

    def __init__(self, levels: int, *, epsilon: float) -> None:
        self.outputs = levels
        self.stored = 1
        self.epsilon = epsilon

    def noise(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows two"]:
        """Uniform in [0, 1): whether to take any level, and which."""
        return rng.random((rows, 2), np.float32)

    def act(
        self,
        parameters: Parameters,  # noqa: ARG002 - of the interface
        prefix: str,  # noqa: ARG002
        outputs: _Outputs,
        noise: Tensor | None,
    ) -> tuple[_Actions, _Actions]:
        """See `ActingHead`."""
        chosen = outputs.argmax(-1, keepdim=True).to(outputs.dtype)
        if noise is not None:
            drawn = (noise[:, 1:] * self.outputs).floor()
            chosen = torch.where(noise[:, :1] < self.epsilon, drawn, chosen)
        return chosen, chosen


class Categorical:
    """A choice among levels. Values and what is stored are the index.

    Greedy is a quantile, by default the median: levels are speeds, and between going and braking lies caution. The
    likeliest level is another policy than the one that was trained: bolder wherever braking has the smaller share.

    Args:
        levels: fractions that the indices stand for, ascending.
        fraction: the level that the first policy likes best.
        log_std: how widely: a Gaussian of that spread over [-1, 1], as for continuous actions.
        greedy: the quantile that is the greedy level, in (0, 1).
    """

    def __init__(self, levels: tuple[float, ...], *, fraction: float, log_std: float, greedy: float = 0.5) -> None:
        self.outputs = len(levels)
        self.stored = 1
        self._levels = np.asarray(levels, np.float64)
        self._fraction = fraction
        self._log_std = log_std
        self._greedy = greedy

    def initial_bias(self) -> np.ndarray:
        """See `Head`."""
        spread = math.exp(self._log_std) / 2.0  # levels span 1 where actions span 2
        return np.asarray(-0.5 * ((self._levels - self._fraction) / spread) ** 2)

    def shapes(self, prefix: str) -> Shapes:  # noqa: ARG002 - of the interface
        """None."""
        return {}

    def initialise(self, prefix: str) -> Arrays:  # noqa: ARG002 - of the interface
        """None."""
        return {}

    def noise(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows one"]:
        """Uniform in [0, 1)."""
        return rng.random((rows, 1), np.float32)

    def act(
        self,
        parameters: Parameters,  # noqa: ARG002 - of the interface
        prefix: str,  # noqa: ARG002
        outputs: _Outputs,
        noise: Tensor | None,
    ) -> tuple[_Actions, _Actions]:
        """By the inverse of the distribution function, at the noise or, greedy, at its quantile."""
        where: Tensor | float = self._greedy if noise is None else noise
        index = (torch.softmax(outputs, -1).cumsum(-1) <= where).sum(-1, keepdim=True)
        index = index.clamp(max=self.outputs - 1)  # rounding may leave the sum below 1
        chosen = index.to(outputs.dtype)
        return chosen, chosen

    def log_prob(
        self,
        parameters: Parameters,  # noqa: ARG002 - of the interface
        prefix: str,  # noqa: ARG002
        outputs: _Outputs,
        stored: _Actions,
    ) -> _Rows:
        """See `Head`."""
        return torch.log_softmax(outputs, -1).gather(-1, stored.to(torch.int64)).squeeze(-1)

    def entropy(
        self,
        parameters: Parameters,  # noqa: ARG002 - of the interface
        prefix: str,  # noqa: ARG002
        outputs: _Outputs,
    ) -> _Rows:
        """See `Head`."""
        logs = torch.log_softmax(outputs, -1)
        return -(logs.exp() * logs).sum(-1)


def make_head(action: ActionSpec, *, fraction: float, log_std: float, greedy: float = 0.5) -> Head:
    """The head for a kind of action; the other arguments are those of both."""
    if action.kind == "levels":
        return Categorical(action.levels, fraction=fraction, log_std=log_std, greedy=greedy)
    return TanhGaussian(action.size, fraction=fraction, log_std=log_std, greedy=greedy)
