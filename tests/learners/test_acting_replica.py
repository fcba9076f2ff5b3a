"""Acting on a copy beside training elsewhere: two copies on one CPU, which the code takes for two devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from torch import Tensor
from toy_world import LEVELS, SPEED, World

from opencda_marl.learners import acting, mappo, offpolicy
from opencda_marl.nn.replica import Replica

ELSEWHERE = torch.device("cpu", 0)  # not equal to torch.device("cpu"), though memory is the same
CASES = [("pcmappo", "deepsets"), ("mappo", "lstm"), ("pcmasac", "deepsets"), ("matd3", "lstm"), ("dqn", "attention")]


def make(name: str, encoder: str, **own: Any) -> Any:
    return build(small(name, encoder, **own), action=LEVELS if name == "dqn" else SPEED)


@pytest.mark.parametrize(("name", "encoder"), CASES)
def test_a_learner_acts_on_a_replica_that_is_refreshed_once_an_update(
    monkeypatch: pytest.MonkeyPatch, name: str, encoder: str
) -> None:
    made: list[Replica] = []
    copies: list[Tensor] = []

    class Watched(Replica):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def refresh(self, source: Tensor) -> bool:
            copied = super().refresh(source)
            copies.extend([source] if copied else [])
            return copied

    plain = make(name, encoder)
    expected = drive(plain, World(1), 4)
    monkeypatch.setattr(acting, "Replica", Watched)
    for module in (mappo, offpolicy):
        monkeypatch.setattr(module, "resolve_device", lambda name: ELSEWHERE)
    learner = make(name, encoder, acting_device="cpu", acting_threads=1)
    assert drive(learner, World(1), 4) == expected
    (replica,) = made
    assert replica.engaged
    assert learner.describe()["acting_threads"] == 1
    updates = learner.counters.updates_performed
    assert updates >= 2
    assert updates <= len(copies) <= updates + 1  # the first act, then once after each update that was acted upon
    # two copies: the replica has memory of its own, and the source was what acting needs, no more
    assert all(source.untyped_storage().data_ptr() != replica.flat.untyped_storage().data_ptr() for source in copies)
    assert {source.shape for source in copies} == {replica.flat.shape}
    assert len(replica.flat) < len(learner.state().tensors["theta"]) or name == "dqn"  # whose critic is what acts
    left, right = learner.state().tensors, plain.state().tensors
    assert all(np.array_equal(left[key], right[key]) for key in right)


def test_a_replica_is_refreshed_after_a_load() -> None:
    learner, other = make("pcmasac", "deepsets"), make("pcmasac", "deepsets", seed=9)
    drive(other, World(1), 3)
    drive(learner, World(2), 1)
    learner.load(other.state())
    view = World(4).reset().observation
    assert np.array_equal(learner.act(view, explore=True).values, other.act(view, explore=True).values)
