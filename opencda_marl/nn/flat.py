"""Parameters as one flat vector: one copy refreshes a replica, one pair of moments optimises everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

__all__ = ["Layout", "Parameters", "as_leaf"]

Parameters = Mapping[str, Tensor]
"""Name -> view into a flat vector."""


class Layout:
    """Which named array lies where in a flat vector.

    Args:
        shapes: name -> shape, in the order of the vector.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self._names = tuple(self.shapes)
        self._shapes = tuple(self.shapes.values())
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.size = sum(self._sizes)

    def views(self, flat: Float[Tensor, " size"]) -> dict[str, Tensor]:
        """Name -> view of `flat`; differentiable, and the gradient comes back in one concatenation."""
        pieces = torch.split(flat, self._sizes)
        return {name: piece.view(shape) for name, piece, shape in zip(self._names, pieces, self._shapes, strict=True)}

    def flatten(self, arrays: Mapping[str, np.ndarray]) -> Float32[np.ndarray, " size"]:
        """One vector from arrays by name.

        Raises:
            ValueError: a name or a shape is not the layout's.
        """
        if arrays.keys() != self.shapes.keys():
            raise ValueError(f"names differ: {sorted(arrays.keys() ^ self.shapes.keys())}")
        for name, shape in self.shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name}: shape {arrays[name].shape} instead of {shape}")
        if not arrays:
            return np.zeros(0, np.float32)
        return np.concatenate([np.ravel(arrays[name]) for name in self._names]).astype(np.float32)

    def part(self, prefix: str) -> slice:
        """Where the arrays lie whose names begin with `prefix`; they must be neighbours.

        Raises:
            ValueError: there are none, or others lie between them.
        """
        chosen = [name.startswith(prefix) for name in self._names]
        first = next((i for i, taken in enumerate(chosen) if taken), len(chosen))
        last = first + sum(chosen)
        if first == last or not all(chosen[first:last]):
            raise ValueError(f"no contiguous part {prefix!r} in {self._names}")
        return slice(sum(self._sizes[:first]), sum(self._sizes[:last]))

    def as_json(self) -> list[Any]:
        """Names and shapes in order, for a checkpoint."""
        return [[name, list(shape)] for name, shape in self.shapes.items()]

    def mismatch(self, saved: list[Any]) -> str | None:
        """The first difference from what `as_json` wrote, in words; None when there is none."""
        mine = self.as_json()
        for (name, shape), (other, size) in zip(mine, saved, strict=False):
            if name != other:
                return f"parameter {other!r} where {name!r} is expected"
            if shape != list(size):
                return f"parameter {name!r} has shape {list(size)} instead of {shape}"
        if len(mine) != len(saved):
            longer = mine if len(mine) > len(saved) else saved
            word = "missing" if longer is mine else "unknown"
            return f"parameter {longer[min(len(mine), len(saved))][0]!r} is {word}"
        return None


def as_leaf(flat: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
    """The same storage as a leaf to differentiate by.

    Made outside of what is compiled: not every version of the compiler lets a tensor of the graph become a leaf.
    """
    return flat.detach().requires_grad_()
