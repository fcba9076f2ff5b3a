"""Neighbour rows that get lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scripted import CONFLICTS, ROADS, random_state

from opencda_marl.core.spec import Observation
from opencda_marl.core.state import Driver
from opencda_marl.env.observe import full
from opencda_marl.settings.run import RunSettings


def _view(dropout: float, *, step: int = 7, seed: int = 1) -> Observation:
    settings = RunSettings(seed=seed)
    settings = replace(settings, neighbours=replace(settings.neighbours, dropout=dropout))
    state = random_state(np.random.default_rng(1), 40)
    state.step = step
    slots = len(state.ids)
    rows = state.rows(Driver.CAV)
    return full(settings, ROADS, CONFLICTS).observe(state, np.zeros(slots), np.zeros(slots, np.bool_), rows)


def test_some_rows_are_lost_and_the_others_move_up_unchanged() -> None:
    whole, part = _view(0.0), _view(0.5)
    assert 0 < part.counts.sum() < whole.counts.sum()
    for i, (before, after) in enumerate(zip(whole.counts, part.counts, strict=True)):
        kept = part.neighbours[i, :after]
        at = [next(k for k in range(before) if np.array_equal(whole.neighbours[i, k], row)) for row in kept]
        assert at == sorted(set(at))  # in their order
        assert not part.neighbours[i, after:].any()
    np.testing.assert_array_equal(part.ego, whole.ego)
    assert _view(1.0).counts.sum() == 0


def test_the_share_is_kept_and_draws_follow_from_step_and_seed_alone() -> None:
    whole = _view(0.0).counts.sum()
    share = np.mean([_view(0.2, step=step).counts.sum() / whole for step in range(100)])
    assert abs(share - 0.8) < 0.02
    np.testing.assert_array_equal(_view(0.3).neighbours, _view(0.3).neighbours)
    assert not np.array_equal(_view(0.3).counts, _view(0.3, step=8).counts)
    assert not np.array_equal(_view(0.3).counts, _view(0.3, seed=2).counts)
