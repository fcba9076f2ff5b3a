"""Was this process started by torchrun, or by something that speaks the same environment variables?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from opencda_marl.core.errors import ConfigError

__all__ = ["Place", "launched"]

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place among the workers of a run."""

    rank: int  # 0 writes the run folder
    size: int
    local_rank: int  # among those of this machine
    local_size: int


def launched(environment: Mapping[str, str] | None = None) -> Place | None:
    """The place that the environment gives this process; None: nobody started several.

    Args:
        environment: None: that of this process.

    Raises:
        ConfigError: a variable is no number, or they contradict each other.
    """
    found = os.environ if environment is None else environment
    if not all(name in found for name in _NAMES):
        return None
    try:
        rank, size = int(found["RANK"]), int(found["WORLD_SIZE"])
        local_rank, local_size = int(found.get("LOCAL_RANK", rank)), int(found.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise ConfigError(f"RANK and WORLD_SIZE are no numbers: {error}", fix="start it with torchrun") from error
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}", fix="start it with torchrun")
    return Place(rank, size, local_rank, local_size) if size > 1 else None
