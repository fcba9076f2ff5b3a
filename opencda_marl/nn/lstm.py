"""An LSTM for acting in C++: built once per user, equal to the packed module to 1e-6, twice as fast.

The source is plain C++ with a C interface, so that one call of the compiler (a second) is all that it takes:
no ninja, no torch headers, and a path with a space is no obstacle.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["BoundLstm", "LstmKernel", "cache_root", "find_kernel"]

_SOURCE = Path(__file__).with_name("lstm.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_BUILD_SECONDS = 120.0


def cache_root() -> Path:
    """Where compiled kernels are kept: OPENCDA_MARL_CACHE, else the user's cache folder."""
    own = os.environ.get("OPENCDA_MARL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opencda-marl"


def _processor() -> str:
    """What `-march=native` stands for: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(compiler: str, target: Path) -> None:
    """Compile into `target`, which appears whole or not at all: two processes may build at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / target.name
        subprocess.run(
            [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)],
            check=True,
            capture_output=True,
            timeout=_BUILD_SECONDS,
        )
        made.replace(target)


def _built(compiler: str, target: Path) -> LstmKernel:
    """The library of the cache; made when it is missing, and once more when it cannot be loaded."""
    if target.exists():
        try:
            return LstmKernel(target)
        except OSError:  # cut short, or of another machine
            target.unlink(missing_ok=True)
    _build(compiler, target)
    return LstmKernel(target)


def find_kernel() -> tuple[LstmKernel | None, str | None]:
    """The kernel, built where it is not yet in the cache; or None and why not, for the init line."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    compiler = next((found for found in map(shutil.which, names) if found), None)
    if compiler is None:
        return None, f"no C++ compiler: {', '.join(names)} not found"
    key = hashlib.sha256(_SOURCE.read_bytes())
    for part in (*_FLAGS, compiler, platform.machine(), _processor()):
        key.update(part.encode())
    try:
        target = cache_root() / f"lstm-{key.hexdigest()[:20]}.so"
        return _built(compiler, target), None
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[-300:]}"
    except subprocess.TimeoutExpired:
        return None, f"{compiler} did not end within {_BUILD_SECONDS:.0f} s"
    except (OSError, RuntimeError) as error:  # no home folder, unwritable cache, a library of another machine
        return None, str(error)


class LstmKernel:
    """The compiled library.

    Args:
        library: path of the shared object.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self.lanes = int(loaded.opencda_lstm_lanes())
        self.last = loaded.opencda_lstm_last
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
