"""One seed, many generators that never meet."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state, simulator_seed


def test_branches_are_part_of_the_format() -> None:
    assert [(branch.name, int(branch)) for branch in Branch] == [
        ("DEMAND", 0),
        ("SIMULATOR", 1),
        ("PREFERENCE", 2),
        ("INITIALISATION", 3),
        ("EXPLORATION", 4),
        ("MINIBATCH", 5),
        ("EVALUATION", 6),
    ]


def test_the_numbers_of_a_seed_never_change() -> None:
    """Written down: a new version that draws other traffic for old seeds would fail here."""
    bits = generator(1, Branch.DEMAND, 1).bit_generator.random_raw(2)
    assert bits.tolist() == [10485372142689056130, 14829241992657733098]
    assert simulator_seed(1, 1) == 589668880
    assert simulator_seed(9000, evaluation=True) == 276709614


def test_same_path_same_numbers_and_no_two_paths_alike() -> None:
    paths = [
        (seed, branch, *twig) for seed in (0, 1, 2**32 - 1) for branch in Branch for twig in ((), (0,), (1,), (0, 1))
    ]
    drawn = {path: tuple(generator(*path).integers(0, 2**62, 4)) for path in paths}
    assert drawn == {path: tuple(generator(*path).integers(0, 2**62, 4)) for path in paths}
    assert len(set(drawn.values())) == len(paths)


def test_training_never_touches_the_evaluation_branch() -> None:
    """Not even where seed and episode are the same numbers."""
    training = {simulator_seed(seed, episode) for seed, episode in itertools.product(range(40), range(1, 40))}
    held_out = {simulator_seed(seed, evaluation=True) for seed in range(40)}
    assert len(training) > 1550
    assert not training & held_out


def test_a_simulator_seed_is_one_that_sumo_accepts() -> None:
    seeds = [simulator_seed(seed, episode) for seed in (0, 1, 2**32 - 1) for episode in range(2000)]
    assert min(seeds) >= 1
    assert max(seeds) < 2**31
    assert len(set(seeds)) == len(seeds)


def test_drawing_more_from_one_leaves_the_others() -> None:
    demand = generator(5, Branch.DEMAND, 3)
    generator(5, Branch.PREFERENCE).random(1000)
    np.random.default_rng(5).random(1000)
    assert demand.random() == generator(5, Branch.DEMAND, 3).random()


@pytest.mark.parametrize("drawn", [0, 1, 7])
def test_a_state_goes_on_where_it_was(drawn: int) -> None:
    source = generator(1, Branch.MINIBATCH)
    source.random(drawn)
    source.integers(0, 5, dtype=np.uint32)  # half of a 64-bit draw is kept for the next one
    state = json.loads(json.dumps(generator_state(source)))
    copy = generator_from_state(state)
    assert copy.integers(0, 5, 9, dtype=np.uint32).tolist() == source.integers(0, 5, 9, dtype=np.uint32).tolist()
    assert copy.permutation(20).tolist() == source.permutation(20).tolist()
