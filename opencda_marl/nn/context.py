"""Encoders of neighbour rows: `[rows, neighbours, features] -> [rows, size]`.

Rows of neighbours beyond `counts` are absent: whatever finite numbers stand there, they change nothing. An encoder is a
description (sizes, names of parameters); its parameters are handed to it, so that the same encoder serves a
flat vector that is trained, a frozen one and a replica's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.spec import ObservationSpec
from opencda_marl.nn import ENCODERS
from opencda_marl.nn.blocks import Arrays, Shapes, linear, orthogonal
from opencda_marl.nn.dense import DenseKernel, find_dense, unfit
from opencda_marl.nn.flat import Parameters
from opencda_marl.nn.fused import find_fused, layers, sets
from opencda_marl.nn.lstm import LstmKernel, find_kernel
from opencda_marl.settings.learning import ContextSettings

__all__ = ["ActingEncoder", "Attention", "DeepSets", "Encoder", "Lstm", "encoder_version", "make_encoder"]

_Neighbours = Float[Tensor, "rows neighbours features"]
_Counts = Int[Tensor, " rows"]
_Ego = Float[Tensor, "rows ego_features"]
_Real = Int[Tensor, " real"]
_Context = Float[Tensor, "rows size"]

ActingEncoder = Callable[[_Neighbours, _Counts, _Ego], _Context]
"""An encoder bound to parameters, for acting: no gradients, on the parameters' device."""


@runtime_checkable
class Encoder(Protocol):
    """What a learner needs of an encoder; a plug-in's constructor takes (ObservationSpec, ContextSettings)."""

    size: int  # length of the context
    trained: bool  # what `train_context_encoder: null` means
    static: bool  # shapes inside `encode` do not depend on counts, so that it can be compiled

    def shapes(self, prefix: str) -> Shapes:
        """Name -> shape of each parameter."""

    def initialise(self, rng: np.random.Generator, prefix: str) -> Arrays:
        """First values of the parameters."""

    def encode(
        self,
        parameters: Parameters,
        prefix: str,
        neighbours: _Neighbours,
        counts: _Counts,
        ego: _Ego,
        real: _Real | None = None,
    ) -> _Context:
        """The context of each row; differentiable.

        Args:
            parameters: by name.
            prefix: of the encoder's own names.
            neighbours: rows beyond `counts` are absent.
            counts: real neighbours of each row.
            ego: features of the row's own vehicle.
            real: where the real ones stand among `rows * neighbours`, for whoever knows; an encoder with static shapes
                may then compute those alone, inside of a compiled graph too.
        """

    def acting(self, parameters: Parameters, prefix: str) -> tuple[ActingEncoder, str]:
        """The fastest form for these parameters as they are now, and what it is called.

        Made anew whenever the parameters change.
        """


_MANY = 128
"""Rows of a batch from which on absent neighbours are left out instead of computed."""


def make_encoder(spec: ObservationSpec, settings: ContextSettings) -> Encoder | None:
    """The encoder that the settings name; None where the observation has no neighbour rows."""
    if not spec.neighbour:
        return None
    encoder: Encoder = ENCODERS.load(settings.encoder)(spec, settings)
    return encoder


def encoder_version(flat: Float[Tensor, " size"]) -> str:
    """Names the parameters by their bits: contexts of equal versions are interchangeable."""
    return hashlib.sha256(flat.detach().cpu().numpy().tobytes()).hexdigest()[:16]


def _rows_to_compute(
    neighbours: _Neighbours, counts: _Counts, real: _Real | None
) -> tuple[Float[Tensor, "lines features_and_mask"], Float[Tensor, "rows neighbours"], _Real | None]:
    """Rows with their mask as one more feature, absent ones all zero or left out.

    The weight of that feature is the layer's bias, so that after a relu an absent row is still exactly zero
    and needs no masking in the layers above, as long as they have no bias.

    Returns:
        the rows, the mask [rows, neighbours] (1 where a row is real), and where the rows belong among all of
        them; None: they are all there.
    """
    index = torch.arange(neighbours.shape[1], device=counts.device, dtype=counts.dtype)
    mask = (index < counts[:, None]).to(neighbours.dtype)
    if real is None:
        real = _real_rows(mask)
    if real is None:
        column = mask[..., None]
        rows = torch.cat([neighbours * column, column], -1)
        return rows.view(-1, neighbours.shape[-1] + 1), mask, None
    rows = neighbours.reshape(-1, neighbours.shape[-1]).index_select(0, real)
    return torch.cat([rows, rows.new_ones(len(real), 1)], -1), mask, real


def _real_rows(mask: Float[Tensor, "rows neighbours"]) -> _Real | None:
    """Where the real rows are among all, if it pays to compute those alone: a quarter of them is real in the recipe.

    None (compute them all, absent ones give zero) where shapes must be static or a count would wait for the device.
    """
    if torch.compiler.is_compiling() or mask.device.type != "cpu" or len(mask) < _MANY:
        return None
    return mask.view(-1).nonzero()[:, 0]


def _back_in_place(
    lines: Float[Tensor, "lines width"], mask: Float[Tensor, "rows neighbours"], real: _Real | None
) -> Float[Tensor, "rows neighbours width"]:
    """What was made of the rows, absent ones zero."""
    if real is not None:
        lines = lines.new_zeros(mask.numel(), lines.shape[-1]).index_copy(0, real, lines)
    return lines.view(*mask.shape, lines.shape[-1])


def _row_weight(rng: np.random.Generator, features: int, hidden: int) -> np.ndarray:
    """First layer of the rows: orthogonal for the features, zero for the mask (the bias)."""
    return np.concatenate([orthogonal(rng, features, hidden, math.sqrt(2.0)), np.zeros((1, hidden))])


class DeepSets:
    """A shared network per row, then maximum and mean over the real rows (Zaheer et al. 2017)."""

    trained: ClassVar[bool] = True
    static: ClassVar[bool] = True

    def __init__(self, spec: ObservationSpec, settings: ContextSettings) -> None:
        self.size = settings.size
        self._features = len(spec.neighbour)
        self._hidden = settings.hidden
        self._kernel: DenseKernel | None = None
        self._why_torch: str | None = None

    def shapes(self, prefix: str) -> Shapes:
        """See `Encoder`."""
        hidden = self._hidden
        return {
            prefix + "row0": (self._features + 1, hidden),
            prefix + "row1": (hidden, hidden),
            prefix + "pool.weight": (2 * hidden, self.size),
            prefix + "pool.bias": (self.size,),
        }

    def initialise(self, rng: np.random.Generator, prefix: str) -> Arrays:
        """See `Encoder`."""
        hidden = self._hidden
        return {
            prefix + "row0": _row_weight(rng, self._features, hidden),
            prefix + "row1": orthogonal(rng, hidden, hidden, math.sqrt(2.0)),
            prefix + "pool.weight": orthogonal(rng, 2 * hidden, self.size, math.sqrt(2.0)),
            prefix + "pool.bias": np.zeros(self.size),
        }

    def encode(
        self,
        parameters: Parameters,
        prefix: str,
        neighbours: _Neighbours,
        counts: _Counts,
        ego: _Ego,  # noqa: ARG002 - of the interface: sets look the same to everybody
        real: _Real | None = None,
    ) -> _Context:
        """See `Encoder`."""
        weights = [parameters[prefix + name] for name in ("row0", "row1", "pool.weight", "pool.bias")]
        if not neighbours.requires_grad and (fused := find_fused(neighbours, *weights)) is not None:
            return layers(fused, sets(fused, neighbours, counts, *weights[:2]), [(weights[2], weights[3])], ["tanh"])
        rows, mask, real = _rows_to_compute(neighbours, counts, real)
        hidden = torch.relu(rows @ parameters[prefix + "row0"])  # absent rows stay zero
        hidden = _back_in_place(torch.relu(hidden @ parameters[prefix + "row1"]), mask, real)
        mean = hidden.sum(1) / mask.sum(1, keepdim=True).clamp(min=1.0)
        # zero is the least that a real row can give, so absent rows never win the maximum
        pooled = torch.cat([hidden.amax(1), mean], -1)
        return torch.tanh(linear(parameters, prefix + "pool.", pooled))

    def acting(self, parameters: Parameters, prefix: str) -> tuple[ActingEncoder, str]:
        """Compiled on a CPU where that can be, else torch's."""
        why = unfit({name: parameters[name] for name in self.shapes(prefix)})
        if why is None and self._kernel is None and self._why_torch is None:
            self._kernel, self._why_torch = find_dense()
        if why is not None or self._kernel is None:
            return partial(self.encode, parameters, prefix), f"deepsets ({why or self._why_torch})"
        bound = self._kernel.sets(parameters, prefix)

        def act(neighbours: _Neighbours, counts: _Counts, ego: _Ego) -> _Context:  # noqa: ARG001 - of the interface
            return bound(neighbours, counts)

        return act, "c++"


class Attention:
    """Multi-head attention of the ego vehicle over its rows (Vaswani et al. 2017)."""

    trained: ClassVar[bool] = True
    static: ClassVar[bool] = True

    def __init__(self, spec: ObservationSpec, settings: ContextSettings) -> None:
        if settings.hidden % settings.heads:
            raise ConfigError(
                f"context.hidden {settings.hidden} is not a multiple of context.heads {settings.heads}",
                fix=f"context.hidden={settings.heads * max(1, settings.hidden // settings.heads)}",
            )
        self.size = settings.size
        self._ego = len(spec.ego)
        self._features = len(spec.neighbour)
        self._hidden = settings.hidden
        self._heads = settings.heads

    def shapes(self, prefix: str) -> Shapes:
        """See `Encoder`."""
        hidden = self._hidden
        return {
            prefix + "query.weight": (self._ego, hidden),
            prefix + "query.bias": (hidden,),
            prefix + "row0": (self._features + 1, hidden),
            prefix + "keys_values": (hidden, 2 * hidden),
            prefix + "pool.weight": (hidden, self.size),
            prefix + "pool.bias": (self.size,),
        }

    def initialise(self, rng: np.random.Generator, prefix: str) -> Arrays:
        """See `Encoder`."""
        hidden = self._hidden
        return {
            prefix + "query.weight": orthogonal(rng, self._ego, hidden),
            prefix + "query.bias": np.zeros(hidden),
            prefix + "row0": _row_weight(rng, self._features, hidden),
            prefix + "keys_values": np.concatenate(
                [orthogonal(rng, hidden, hidden), orthogonal(rng, hidden, hidden, math.sqrt(2.0))], 1
            ),
            prefix + "pool.weight": orthogonal(rng, hidden, self.size, math.sqrt(2.0)),
            prefix + "pool.bias": np.zeros(self.size),
        }

    def encode(
        self,
        parameters: Parameters,
        prefix: str,
        neighbours: _Neighbours,
        counts: _Counts,
        ego: _Ego,
        real: _Real | None = None,
    ) -> _Context:
        """See `Encoder`."""
        rows, mask, real = _rows_to_compute(neighbours, counts, real)
        hidden = torch.relu(rows @ parameters[prefix + "row0"])
        heads = (self._heads, self._hidden // self._heads)
        both = _back_in_place(hidden @ parameters[prefix + "keys_values"], mask, real)
        keys, values = both.view(*mask.shape, 2, *heads).unbind(2)
        query = linear(parameters, prefix + "query.", ego).view(len(ego), 1, *heads)
        scores = (keys * query).sum(-1) * query.shape[-1] ** -0.5  # [rows, neighbours, heads]
        weights = torch.softmax(scores + (mask[..., None] - 1.0) * 1e9, 1)
        # without any real row the weights are uniform, but absent values are zero: so is their sum
        pooled = (weights[..., None] * values).sum(1).view(len(ego), self._hidden)
        return torch.tanh(linear(parameters, prefix + "pool.", pooled))

    def acting(self, parameters: Parameters, prefix: str) -> tuple[ActingEncoder, str]:
        """See `Encoder`."""
        return partial(self.encode, parameters, prefix), "attention"


class Lstm:
    """The last hidden state of an LSTM over the rows, farthest first, then a linear layer and tanh.

    Gates in the order of torch: input, forget, cell, output.
    """

    trained: ClassVar[bool] = False
    static: ClassVar[bool] = False  # packed rows have as many lines as there are real rows

    def __init__(self, spec: ObservationSpec, settings: ContextSettings) -> None:
        self.size = settings.size
        self._features = len(spec.neighbour)
        self._hidden = settings.hidden
        self._kernel: LstmKernel | None = None
        self._why_packed: str | None = None

    def shapes(self, prefix: str) -> Shapes:
        """See `Encoder`."""
        hidden = self._hidden
        return {
            prefix + "input": (4 * hidden, self._features),
            prefix + "hidden": (4 * hidden, hidden),
            prefix + "bias": (4 * hidden,),
            prefix + "pool.weight": (hidden, self.size),
            prefix + "pool.bias": (self.size,),
        }

    def initialise(self, rng: np.random.Generator, prefix: str) -> Arrays:
        """Orthogonal gates and a forget bias of 1: frozen, it must remember and spread by itself."""
        hidden = self._hidden
        bias = np.zeros(4 * hidden)
        bias[hidden : 2 * hidden] = 1.0
        return {
            prefix + "input": np.concatenate([orthogonal(rng, self._features, hidden).T for _ in range(4)]),
            prefix + "hidden": np.concatenate([orthogonal(rng, hidden, hidden).T for _ in range(4)]),
            prefix + "bias": bias,
            prefix + "pool.weight": orthogonal(rng, hidden, self.size, math.sqrt(2.0)),
            prefix + "pool.bias": np.zeros(self.size),
        }

    def encode(
        self,
        parameters: Parameters,
        prefix: str,
        neighbours: _Neighbours,
        counts: _Counts,
        ego: _Ego,  # noqa: ARG002 - of the interface
        real: _Real | None = None,  # noqa: ARG002 - likewise: packing finds them itself
    ) -> _Context:
        """See `Encoder`."""
        lines, lengths, order = _pack(neighbours, counts)
        last = neighbours.new_zeros(len(neighbours), self._hidden)
        if len(order):
            start = neighbours.new_zeros(1, len(order), self._hidden)
            gates = [parameters[prefix + "input"], parameters[prefix + "hidden"], parameters[prefix + "bias"]]
            gates.append(torch.zeros_like(gates[2]))  # torch has two biases, which are only ever added
            _, hidden, _ = torch.lstm(lines, lengths, (start, start), gates, True, 1, 0.0, False, False)
            last = last.index_copy(0, order, hidden[0])
        return torch.tanh(linear(parameters, prefix + "pool.", last))

    def acting(self, parameters: Parameters, prefix: str) -> tuple[ActingEncoder, str]:
        """The compiled kernel on a CPU where it can be built, else the packed module."""
        if parameters[prefix + "bias"].device.type != "cpu":
            return partial(self.encode, parameters, prefix), "packed"
        if self._kernel is None and self._why_packed is None:
            self._kernel, self._why_packed = find_kernel()
        if self._kernel is None:
            return partial(self.encode, parameters, prefix), f"packed ({self._why_packed})"
        bound = self._kernel.bind(*(parameters[prefix + name] for name in ("input", "hidden", "bias")))

        def act(neighbours: _Neighbours, counts: _Counts, ego: _Ego) -> _Context:  # noqa: ARG001 - of the interface
            return torch.tanh(linear(parameters, prefix + "pool.", bound(neighbours, counts)))

        return act, "c++"


def _pack(neighbours: _Neighbours, counts: _Counts) -> tuple[Tensor, Tensor, Tensor]:
    """Real rows time step by time step, farthest first, sequences sorted by length.

    Returns:
        lines [all, features], how many there are of each time step (int64 on the CPU), and the index of each
        sequence in `neighbours` (those without rows left out).
    """
    lengths, order = counts.to(torch.int64).sort(descending=True, stable=True)
    active = int((lengths > 0).sum())  # device sync: packing is the one encoder without static shapes
    lengths, order = lengths[:active], order[:active]
    time = torch.arange(neighbours.shape[1], device=counts.device)[:, None]
    running = time < lengths  # [time, sequences]
    sequence = order.expand_as(running)[running]
    line = (lengths - 1 - time)[running]  # the nearest neighbour is row 0 and comes last
    per_step = running.sum(1).cpu()
    return neighbours[sequence, line], per_step[per_step > 0], order
