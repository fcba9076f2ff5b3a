"""Networks of dense layers, and sets of rows, for acting in C++ (`dense.cpp`): no gradients, one thread, no dispatch.

A dozen rows through a few small layers are a tenth of a millisecond of arithmetic; through torch they are three times
that, for every operation is looked up, allocated and, with several threads, waited for. Parameters are read
where they lie: whoever is bound to a replica's acts with what was last copied there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opencda_marl.nn.blocks import Mlp
from opencda_marl.nn.flat import Parameters
from opencda_marl.nn.native import BENDS, find_library
from opencda_marl.settings.networks import Activation

__all__ = ["BoundMlp", "BoundSets", "DenseKernel", "find_dense", "unfit"]


class _Layer(ctypes.Structure):
    """As in dense.cpp."""

    _fields_: ClassVar = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("bend", ctypes.c_int32),
    ]


def unfit(parameters: Parameters) -> str | None:
    """Why the kernel cannot read these parameters, for the init line; None: it can."""
    for tensor in parameters.values():
        if tensor.device.type != "cpu":
            return f"on {tensor.device.type}"
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return "parameters are not float32 in a row"
    return None


def find_dense() -> tuple[DenseKernel | None, str | None]:
    """The kernel, built where it is not yet in the cache; or None and why not, for the init line."""
    library, why = find_library()
    return (None, why) if library is None else (DenseKernel(library), None)


class DenseKernel:
    """The dense layers of the compiled library.

    Args:
        library: see `native.find_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lanes = int(library.opencda_dense_lanes())
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.run_mlp = library.opencda_mlp
        self.run_mlp.restype = None
        self.run_mlp.argtypes = [pointer, int32, pointer, pointer, pointer, int64, int32]
        self.run_sets = library.opencda_sets
        self.run_sets.restype = int32
        self.run_sets.argtypes = [pointer] * 7 + [int64] + [int32] * 4

    def mlp(self, mlp: Mlp, parameters: Parameters, prefix: str) -> BoundMlp:
        """The network with these parameters, which it reads at each call."""
        return BoundMlp(self, mlp, parameters, prefix)

    def sets(self, parameters: Parameters, prefix: str) -> BoundSets:
        """The set encoder with these parameters, which it reads at each call; see `context.DeepSets`."""
        return BoundSets(self, parameters, prefix)


def _layer(weight: Tensor, bias: Tensor, activation: Activation | None) -> _Layer:
    return _Layer(weight.data_ptr(), bias.data_ptr(), *weight.shape, BENDS[activation])


def _plain(x: Tensor, inputs: int, what: str) -> Tensor:
    """As C++ reads it: [..., inputs] floats in a row.

    Raises:
        ValueError: it has another width.
    """
    if x.shape[-1] != inputs:
        raise ValueError(f"{x.shape[-1]} {what} instead of {inputs}")
    return x.to(torch.float32).contiguous()


class BoundMlp:
    """Rows through a network, on one thread of the CPU; see `blocks.Mlp`."""

    def __init__(self, kernel: DenseKernel, mlp: Mlp, parameters: Parameters, prefix: str) -> None:
        names = [prefix + name for name, _, _ in mlp.layers()]
        self._held = [(parameters[name + "weight"], parameters[name + "bias"]) for name in names]
        bends: list[Activation | None] = [mlp.activation] * len(mlp.hidden) + [None] * (mlp.outputs is not None)
        layers = [_layer(*both, bend) for both, bend in zip(self._held, bends, strict=True)]
        self._layers = (_Layer * len(layers))(*layers)
        self._at = ctypes.addressof(self._layers)
        self._kernel, self._inputs, self._outputs = kernel, mlp.inputs, mlp.width
        self._widest = _widest(layers, mlp.inputs)
        self._scratch = torch.empty(0)

    def __call__(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows outputs"]:
        """Apply it.

        Raises:
            ValueError: the rows have another width.
        """
        x, rows, widest = _plain(x, self._inputs, "inputs"), len(x), self._widest
        if not self._held:
            return x
        size = (1 + widest) * self._kernel.lanes + 2 * rows * widest
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        out = torch.empty(rows, self._outputs)
        scratch = self._scratch.data_ptr()
        self._kernel.run_mlp(self._at, len(self._held), x.data_ptr(), out.data_ptr(), scratch, rows, widest)
        return out


class BoundSets:
    """Neighbour rows -> contexts, on one thread of the CPU; absent rows are not looked at."""

    def __init__(self, kernel: DenseKernel, parameters: Parameters, prefix: str) -> None:
        names = ("row0", "row1", "pool.weight", "pool.bias")
        self._held = row0, row1, weight, bias = tuple(parameters[prefix + name] for name in names)
        self._features, self._hidden, self._size = len(row0) - 1, row0.shape[1], weight.shape[1]
        self._row0, self._row1 = row0.data_ptr(), row1.data_ptr()
        self._last = _layer(weight, bias, "tanh")
        self._at = ctypes.addressof(self._last)
        self._kernel, self._widest = kernel, max(self._features, 2 * self._hidden)
        self._scratch = torch.empty(0)

    def __call__(
        self, neighbours: Float[Tensor, "rows neighbours features"], counts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows size"]:
        """Contexts of the first `counts` of the neighbours.

        Raises:
            ValueError: the shape is not that of the parameters, or a count is not in [0, neighbours].
        """
        neighbours = _plain(neighbours, self._features, "features per neighbour")
        counts = counts.to(torch.int32).contiguous()
        rows, longest, features = neighbours.shape
        hidden, widest = self._hidden, self._widest
        size = (1 + widest) * self._kernel.lanes + 2 * (longest + rows) * hidden
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        out = torch.empty(rows, self._size)
        broken = self._kernel.run_sets(
            neighbours.data_ptr(),
            counts.data_ptr(),
            self._row0,
            self._row1,
            self._at,
            out.data_ptr(),
            self._scratch.data_ptr(),
            rows,
            longest,
            features,
            hidden,
            widest,
        )
        if broken:
            raise ValueError(f"neighbour counts are not in [0, {longest}]")
        return out


def _widest(layers: Iterable[_Layer], inputs: int) -> int:
    return max([inputs, *(int(layer.outputs) for layer in layers)])
