"""An LSTM for acting in C++ (`lstm.cpp`): equal to the packed module to 1e-6, twice as fast."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opencda_marl.nn.native import find_library

__all__ = ["BoundLstm", "LstmKernel", "find_kernel"]


def find_kernel() -> tuple[LstmKernel | None, str | None]:
    """The kernel, built where it is not yet in the cache; or None and why not, for the init line."""
    library, why = find_library()
    return (None, why) if library is None else (LstmKernel(library), None)


class LstmKernel:
    """The LSTM of the compiled library.

    Args:
        library: see `native.find_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lanes = int(library.opencda_lstm_lanes())
        self.last = library.opencda_lstm_last
        self.last.restype = None
        self.last.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int32] * 4

    def bind(
        self,
        weight_input: Float[Tensor, "gates features"],
        weight_hidden: Float[Tensor, "gates hidden"],
        bias: Float[Tensor, " gates"],
    ) -> BoundLstm:
        """The LSTM with these parameters, which are copied into the kernel's order."""
        features, hidden = weight_input.shape[1], weight_hidden.shape[1]
        padded = -(-hidden // self.lanes) * self.lanes  # units beyond `hidden` have zero weights and stay zero
        rows = torch.cat([bias[:, None], weight_input, weight_hidden], 1).detach().cpu().to(torch.float32)
        table = torch.zeros(4, padded, 1 + features + padded)
        table[:, :hidden, : 1 + features + hidden] = rows.view(4, hidden, -1)
        blocks = table.view(4, padded // self.lanes, self.lanes, -1).permute(1, 3, 0, 2)  # block, line, gate, lane
        return BoundLstm(self, blocks.contiguous(), features=features, hidden=hidden, padded=padded)


class BoundLstm:
    """Neighbour rows -> last hidden states, on one thread of the CPU."""

    def __init__(self, kernel: LstmKernel, weights: Tensor, *, features: int, hidden: int, padded: int) -> None:
        self._kernel = kernel
        self._weights = weights
        self._features = features
        self._hidden = hidden
        self._padded = padded
        self._scratch = torch.empty(0)
        self._order = np.empty(0, np.int32)
        self._inputs = np.empty(0, np.uintp)

    def __call__(
        self, neighbours: Float[Tensor, "rows neighbours features"], counts: Int[Tensor, " rows"]
    ) -> Float[Tensor, "rows hidden"]:
        """Hidden states after the nearest row; zero where there is no row.

        Raises:
            ValueError: the shape is not that of the parameters, or a count is not in [0, neighbours].
        """
        rows, longest, features = neighbours.shape
        if features != self._features:
            raise ValueError(f"{features} features per neighbour instead of {self._features}")
        counts = counts.to(torch.int32).contiguous()
        if rows and (int(counts.min()) < 0 or int(counts.max()) > longest):
            raise ValueError(f"neighbour counts are not in [0, {longest}]")  # C++ would read beyond the rows
        neighbours = neighbours.to(torch.float32).contiguous()
        if len(self._order) < rows:
            self._order = np.empty(rows, np.int32)
            self._inputs = np.empty(rows, np.uintp)
            self._scratch = torch.empty(3 * rows * self._padded)
        out = torch.empty(rows, self._padded)
        self._kernel.last(
            neighbours.data_ptr(),
            counts.data_ptr(),
            self._weights.data_ptr(),
            self._order.ctypes.data,
            self._inputs.ctypes.data,
            self._scratch.data_ptr(),
            out.data_ptr(),
            rows,
            longest,
            self._features,
            self._padded,
        )
        return out[:, : self._hidden]
