"""Rollouts of several workers as one batch, and gradients of its parts as one gradient.

All workers hold the same weights, the same scale of returns and the same order of rows, so each draws the same
minibatches from the pooled rows and works on every N-th row of them. The sum of those gradients is the gradient of the
whole minibatch: what is learned is what one process would learn from all rows, but for the order of a sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opencda_marl.core.errors import WorkerError
from opencda_marl.core.files import array_bytes, arrays_of
from opencda_marl.nn.process_group import ProcessGroup

__all__ = ["pool", "sum_up"]

_Table = dict[str, np.ndarray]
_TAG, _SCENES = "weights' checksum", "scenes"


def pool(
    group: ProcessGroup,
    table: Mapping[str, np.ndarray],
    scenes: Float[np.ndarray, "scenes scene"],
    theta: Float[Tensor, " size"],
) -> tuple[_Table, Float[np.ndarray, "pooled scene"]]:
    """Rows of all workers, those of worker 0 first. Collective.

    Args:
        group: of the workers.
        table: columns of this worker's rows; may have none. `scene` is an index.
        scenes: what it points into.
        theta: weights that the rows were looked at with: they must be the same everywhere.

    Returns:
        the columns of all rows, the scenes that their index points into.

    Raises:
        WorkerError: a worker is gone, or has other weights.
    """
    used, index = np.unique(table["scene"], return_inverse=True)
    tag = zlib.crc32(theta.detach().cpu().numpy().tobytes())
    own = {**table, "scene": index, _SCENES: scenes[used], _TAG: np.array([tag], np.int64)}
    packed = group.share(array_bytes(own))
    tables = [own if rank == group.rank else arrays_of(data) for rank, data in enumerate(packed)]
    tags = [int(found.pop(_TAG)[0]) for found in tables]
    if len(set(tags)) > 1:
        raise WorkerError(
            f"the workers' weights came apart (checksums {', '.join(f'{tag:08x}' for tag in tags)})",
            fix="processors, compilers and builds of PyTorch that differ round differently: use equal machines; where "
            "all workers are on one machine this is a defect of the program, please report it with the profile",
        )
    shared = [found.pop(_SCENES) for found in tables]
    first = np.cumsum([0, *(len(one) for one in shared)])
    for found, offset in zip(tables, first, strict=False):
        found["scene"] = found["scene"] + offset
    return {name: np.concatenate([found[name] for found in tables]) for name in table}, np.concatenate(shared)


def sum_up(
    group: ProcessGroup, gradient: Float[Tensor, " size"], metrics: Float[Tensor, " metrics"]
) -> tuple[Float[Tensor, " size"], Float[Tensor, " metrics"]]:
    """Gradient and metrics of a whole minibatch from those of each worker's part of it. Collective, one exchange.

    Raises:
        WorkerError: a worker is gone.
    """
    both = torch.cat([gradient, metrics])
    group.sum(both)
    return both[: len(gradient)], both[len(gradient) :]
