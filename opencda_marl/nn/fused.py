"""What stands between the matrix products of an update, each in one pass (`fused.cpp`), with gradients.

Products are torch's, which are as fast as the processor. What torch puts between them is not: a maximum and a mean over
sets are a dozen passes over memory, forth and back, and each of some hundred small operations costs its dispatch. On a
CPU an eager update goes through here; compiled and captured forms see torch's own operations, which define what is
computed, and which `context` and `blocks` fall back to where no compiler is found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import Function

from opencda_marl.nn.native import BENDS, bound, find_library
from opencda_marl.settings.networks import Activation

__all__ = ["Fused", "find_fused", "layers", "passes_form", "sets"]


class Fused:
    """The passes of the compiled library; every tensor is float32, on the CPU and in a row.

    Args:
        library: see `native.find_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, int32, int64, number = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
        self._bend = bound(library.opencda_bend, None, [pointer, int64, int32])
        self._bend_back = bound(library.opencda_bend_back, None, [pointer] * 4 + [int64] * 2 + [int32])
        self._gather = bound(library.opencda_gather, None, [pointer] * 3 + [int64] * 3)
        self._pool = bound(library.opencda_pool, None, [pointer] * 3 + [int64] * 2)
        self._pool_back = bound(library.opencda_pool_back, None, [pointer] * 6 + [int64] * 2)
        self._adam = bound(library.opencda_adam, None, [pointer] * 7 + [int64] + [number] * 4)

    def bend_(self, x: Tensor, activation: Activation) -> Tensor:
        """x = bend(x), in place."""
        self._bend(x.data_ptr(), x.numel(), BENDS[activation])
        return x

    def bend_back(
        self, y: Float[Tensor, "rows width"], gradient: Float[Tensor, "rows width"], activation: Activation | None
    ) -> tuple[Float[Tensor, "rows width"], Float[Tensor, " width"]]:
        """Gradients by what went into a bend, and by the bias that was added before it."""
        out, bias = gradient if activation is None else torch.empty_like(gradient), gradient.new_empty(y.shape[1])
        at = (y.data_ptr(), gradient.data_ptr(), out.data_ptr(), bias.data_ptr())
        self._bend_back(*at, *y.shape, BENDS[activation])
        return out, bias

    def relu_back_(self, y: Float[Tensor, "rows width"], gradient: Float[Tensor, "rows width"]) -> None:
        """The gradient by what went into a relu, in its place."""
        at = gradient.data_ptr()
        self._bend_back(y.data_ptr(), at, at, None, *y.shape, BENDS["relu"])

    def gather(
        self, neighbours: Float[Tensor, "rows neighbours features"], counts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "real features_and_one"]:
        """The real rows, each with a 1 behind it.

        Raises:
            ValueError: a count is not in [0, neighbours].
        """
        rows, longest, features = neighbours.shape
        if rows and not 0 <= int(counts.min()) <= int(counts.max()) <= longest:
            raise ValueError(f"neighbour counts are not in [0, {longest}]")
        out = neighbours.new_empty(int(counts.sum()), features + 1)
        self._gather(neighbours.data_ptr(), counts.data_ptr(), out.data_ptr(), rows, longest, features)
        return out

    def pool(
        self, lines: Float[Tensor, "real hidden"], counts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows twice_hidden"]:
        """Maximum and mean of each set's lines, which are not negative; zero where there are none."""
        hidden = lines.shape[1]
        out = lines.new_empty(len(counts), 2 * hidden)
        self._pool(lines.data_ptr(), counts.data_ptr(), out.data_ptr(), len(counts), hidden)
        return out

    def pool_back(
        self,
        lines: Float[Tensor, "real hidden"],
        counts: Int[Tensor, " rows"],
        pooled: Float[Tensor, "rows twice_hidden"],
        gradient: Float[Tensor, "rows twice_hidden"],
    ) -> Float[Tensor, "real hidden"]:
        """The gradient by what went into the relu that gave the lines."""
        out, scratch = torch.empty_like(lines), lines.new_empty(lines.shape[1])
        at = [tensor.data_ptr() for tensor in (lines, counts, pooled, gradient, out, scratch)]
        self._pool_back(*at, len(counts), lines.shape[1])
        return out

    def adam(
        self, vectors: Iterable[Float[Tensor, " size"]], size: float, floor: float, fresh: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """theta, m and v after a step from theta, gradient, m, v; see `optimiser.adam`."""
        theta, gradient, m, v = vectors
        made = torch.empty_like(theta), torch.empty_like(theta), torch.empty_like(theta)
        at = [tensor.data_ptr() for tensor in (theta, gradient, m, v, *made)]
        self._adam(*at, len(theta), size, floor, *fresh)
        return made


@cache
def _found() -> Fused | None:
    library, _ = find_library()
    return None if library is None else Fused(library)


def passes_form(device: torch.device) -> str:
    """What stands between the products of an eager update on this device, for the init line."""
    if device.type != "cpu":
        return "torch"
    return "c++" if _found() is not None else f"torch ({find_library()[1]})"


def find_fused(*tensors: Tensor) -> Fused | None:
    """The passes, where they can be had for these tensors; None: torch's own operations are to be used."""
    if (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or any(
            tensor.device.type != "cpu" or tensor.dtype != torch.float32 or not tensor.is_contiguous()
            for tensor in tensors
        )
    ):
        return None
    return _found()


def layers(
    fused: Fused,
    x: Float[Tensor, "rows inputs"],
    parameters: Iterable[tuple[Tensor, Tensor]],
    bends: Iterable[Activation | None],
) -> Float[Tensor, "rows outputs"]:
    """Layers bend(x W + b) one after the other, given (W, b) and bend of each; differentiable once."""
    flat = [tensor for both in parameters for tensor in both]
    found: Tensor = _Layers.apply(fused, tuple(bends), x, *flat)  # type: ignore[no-untyped-call] # torch's
    return found


def sets(
    fused: Fused,
    neighbours: Float[Tensor, "rows neighbours features"],
    counts: Int[Tensor, " rows"],
    row0: Float[Tensor, "features_and_one hidden"],
    row1: Float[Tensor, "hidden hidden"],
) -> Float[Tensor, "rows twice_hidden"]:
    """Maximum and mean of relu(relu([row, 1] row0) row1) over each set's real rows; differentiable by the weights.

    Raises:
        ValueError: a count is not in [0, neighbours].
    """
    found: Tensor = _Sets.apply(fused, neighbours, counts, row0, row1)  # type: ignore[no-untyped-call] # torch's
    return found


def _check_first_order() -> None:
    if torch.is_grad_enabled():  # torch's `once_differentiable` would be silent, and a gradient's gradient missing
        raise RuntimeError("passes in C++ are differentiable once: no create_graph")


class _Layers(Function):
    @staticmethod
    def forward(ctx: Any, fused: Fused, bends: tuple[Activation | None, ...], x: Tensor, *parameters: Tensor) -> Tensor:
        outputs = [x]
        for weight, bias, bend in zip(parameters[::2], parameters[1::2], bends, strict=True):
            y = torch.addmm(bias, outputs[-1], weight)
            outputs.append(y if bend is None else fused.bend_(y, bend))
        ctx.fused, ctx.bends = fused, bends
        ctx.save_for_backward(*outputs, *parameters[::2])
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        _check_first_order()
        saved, wanted, count = ctx.saved_tensors, ctx.needs_input_grad, len(ctx.bends)
        outputs, weights = saved[: count + 1], saved[count + 1 :]
        found: list[Tensor | None] = []
        gradient = gradient.contiguous()
        for i in reversed(range(count)):
            gradient, bias = ctx.fused.bend_back(outputs[i + 1], gradient, ctx.bends[i])
            found = [outputs[i].t() @ gradient if wanted[3 + 2 * i] else None, bias, *found]
            if i or wanted[2]:
                gradient = gradient @ weights[i].t()
        return (None, None, gradient if wanted[2] else None, *found)


class _Sets(Function):
    @staticmethod
    def forward(ctx: Any, fused: Fused, neighbours: Tensor, counts: Tensor, row0: Tensor, row1: Tensor) -> Tensor:
        counts = counts.to("cpu", torch.int32).contiguous()
        if counts.shape != neighbours.shape[:1]:
            raise ValueError(f"{tuple(counts.shape)} counts of {len(neighbours)} sets")
        rows = fused.gather(neighbours, counts)
        below = fused.bend_(rows @ row0, "relu")
        above = fused.bend_(below @ row1, "relu")
        pooled = fused.pool(above, counts)
        ctx.fused = fused
        ctx.save_for_backward(rows, below, above, pooled, counts, row1)
        return pooled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        _check_first_order()
        if not any(ctx.needs_input_grad[3:]):
            return (None,) * 5
        rows, below, above, pooled, counts, row1 = ctx.saved_tensors
        upper = ctx.fused.pool_back(above, counts, pooled, gradient.contiguous())
        lower = upper @ row1.t()
        ctx.fused.relu_back_(below, lower)
        return (None, None, None, rows.t() @ lower, below.t() @ upper)
