"""Adam, gradient clipping and schedules over flat vectors: pure functions, every number a tensor."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from opencda_marl.nn.fused import find_fused
from opencda_marl.settings.networks import Schedule

__all__ = ["adam", "clip_by_norm", "linear_schedule", "rate_schedule"]

_Vector = Float[Tensor, " size"]
_Number = Float[Tensor, ""]


def adam(
    theta: _Vector,
    gradient: _Vector,
    m: _Vector,
    v: _Vector,
    step: _Number,
    learning_rate: _Number,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> tuple[_Vector, _Vector, _Vector]:
    """One step of Adam (Kingma and Ba 2015, algorithm 1, with the form of torch.optim.Adam).

    Args:
        theta: what is optimised.
        gradient: of the loss by `theta`.
        m: first moment so far.
        v: second moment so far.
        step: number of this step, 1 for the first.
        learning_rate: a tensor, so that a captured form sees it change.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root.

    Returns:
        theta, m and v after the step; nothing is changed in place.
    """
    if (fused := find_fused(theta, gradient, m, v)) is not None:
        count = float(step)
        root = math.sqrt(1.0 - beta2**count)
        rate = float(learning_rate) * root / (1.0 - beta1**count)
        return fused.adam((theta, gradient, m, v), rate, epsilon * root, (1.0 - beta1, 1.0 - beta2))
    m = torch.lerp(m, gradient, 1.0 - beta1)
    v = torch.lerp(v, gradient * gradient, 1.0 - beta2)
    # both corrections as one number each: a root and a division an element, and no more. Stacked, they are numbers in
    # memory to a compiler too, which would else take both powers anew for every few elements.
    correction = (1.0 - beta2**step).sqrt()
    size, floor = torch.stack((learning_rate * correction / (1.0 - beta1**step), epsilon * correction)).unbind()
    return theta - size * (m / (v.sqrt() + floor)), m, v


def clip_by_norm(gradient: _Vector, largest: float) -> tuple[_Vector, _Number]:
    """The gradient scaled down to a norm of at most `largest`, and the norm that it had."""
    norm = torch.linalg.vector_norm(gradient)
    return gradient * (largest / (norm + 1e-6)).clamp(max=1.0), norm


def linear_schedule(first: float, last: float, done: float) -> float:
    """Between `first` and `last` where `done` of the budget is used (0 to 1, clamped)."""
    return first + (last - first) * min(max(done, 0.0), 1.0)


def rate_schedule(kind: Schedule, first: float, last: float, done: float) -> float:
    """A learning rate where `done` of the budget is used (0 to 1, clamped); both ends above 0 where exponential."""
    if kind == "linear":
        return linear_schedule(first, last, done)
    return math.exp(linear_schedule(math.log(first), math.log(last), done))
