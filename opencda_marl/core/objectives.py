"""Reward vector x preference -> scalar: the only place where objectives are weighed against each other."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["OBJECTIVES", "scalarise"]

OBJECTIVES = ("safety", "efficiency", "comfort")
"""Order of the reward vector everywhere."""

_Array = TypeVar("_Array")


def scalarise(rewards: _Array, preference: _Array) -> _Array:
    """Weighted sum over the last axis: `[..., objectives] x [..., objectives] -> [...]`.

    Works alike for NumPy arrays and torch tensors; a preference of ones is the plain sum.
    """
    return (rewards * preference).sum(-1)  # type: ignore[operator,no-any-return]
