"""One seed, many generators: every source of randomness has a branch of its own.

A branch is a spawn key of `numpy.random.SeedSequence`; branches never overlap, so a run that draws
more preferences still meets the same traffic. Episode k's traffic depends on (seed, k) alone;
where several workers drive in rounds, its rate is that of the first episode of its round.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

__all__ = ["Branch", "generator", "generator_from_state", "generator_state", "simulator_seed"]


class Branch(IntEnum):
    """What a generator is for. Numbers are part of the format: never reorder."""

    DEMAND = 0
    SIMULATOR = 1
    PREFERENCE = 2
    INITIALISATION = 3
    EXPLORATION = 4
    MINIBATCH = 5
    EVALUATION = 6


def generator(seed: int, branch: Branch, *path: int) -> np.random.Generator:
    """The generator of a branch, or of a twig of it (an episode, a worker).

    Args:
        seed: the run's seed, or the evaluation seed of an episode.
        branch: what the numbers are for.
        path: further coordinates, e.g. the episode's index.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(int(branch), *path))))


def simulator_seed(seed: int, *path: int, evaluation: bool = False) -> int:
    """A seed that SUMO accepts: 1 <= s < 2**31, from (seed, path)."""
    key = (int(Branch.EVALUATION), int(Branch.SIMULATOR)) if evaluation else (int(Branch.SIMULATOR),)
    state = np.random.SeedSequence(seed, spawn_key=(*key, *path)).generate_state(1, np.uint32)
    return int(state[0]) % (2**31 - 2) + 1


def generator_state(source: np.random.Generator) -> dict[str, Any]:
    """The generator's state as a JSON value (integers of any size)."""
    return dict(source.bit_generator.state)


def generator_from_state(state: dict[str, Any]) -> np.random.Generator:
    """The generator whose next number is the one that `generator_state` saw coming."""
    bits = np.random.PCG64()
    bits.state = state  # type: ignore[assignment] # JSON has no TypedDict
    return np.random.Generator(bits)
