"""The rebuilt layout is what it says: rows with what followed them, two encodes, an update that learns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opencda_marl.config import load_profile
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Action, Closed, Observation, ObservationSpec, Step
from opencda_marl.tools.synthetic import Scene, specs


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    sys.modules.pop("documented_layout", None)
    import documented_layout

    return documented_layout


def _documented(layout: Any) -> tuple[Any, ObservationSpec]:
    overrides = ["context.hidden=8", "learner.hidden=[16]", "learner.batch_size=32", "learner.learning_starts=50"]
    settings = load_profile(layout.PROFILE, overrides=overrides).settings
    spec, action = specs(settings)
    return layout.Documented(settings, spec, action, Spans()), spec


def _seen(spec: ObservationSpec, ids: list[int], base: float) -> Observation:
    """Vehicles that see their own id, plus `base`, in every number."""
    number = np.array(ids, np.float32) + np.float32(base)
    ego = np.repeat(number[:, None], len(spec.ego), 1)
    rows = np.zeros((len(ids), spec.max_neighbours, len(spec.neighbour)), np.float32)
    rows[:, 0] = number[:, None]
    who = np.array(ids, np.int64)
    return Observation(who, who, ego, rows, np.ones(len(ids), np.int32), np.zeros(spec.scene_size, np.float32))


def test_a_row_holds_what_followed_its_decision(layout: Any) -> None:
    side, spec = _documented(layout)
    before = _seen(spec, [2, 1, 3], 0.0)
    closed = Closed(
        ids=np.array([3, 1, 2]),  # arrived, goes on, cut off
        slots=np.array([3, 1, 2]),
        rewards=np.array([[3.0, 0, 0], [1.0, 0, 0], [2.0, 0, 0]], np.float32),
        team=np.array([30.0, 10.0, 20.0], np.float32),
        elapsed=np.full(3, 0.05, np.float32),
        terminated=np.array([True, False, False]),
        truncated=np.array([False, False, True]),
    )
    after = Step(_seen(spec, [4, 1], 0.5), closed, _seen(spec, [2], 0.25), everyone=True, done=False, steps=1)
    action = Action(np.array([[0.2], [0.1], [0.3]], np.float32))
    assert side.learn(before, action, after) is False  # too few rows to learn from
    ring = {name: column[:3] for name, column in side.ring.items()}
    assert side.stored == 3
    assert ring["ego"][:, 0].tolist() == [3.0, 1.0, 2.0]
    assert ring["neighbours"][:, 0, 0].tolist() == [3.0, 1.0, 2.0]
    assert ring["action"][:, 0].tolist() == pytest.approx([0.3, 0.1, 0.2])
    assert ring["rewards"][:, :2].tolist() == [[30.0, 3.0], [10.0, 1.0], [20.0, 2.0]]
    discount = 0.98**0.05
    assert ring["discount"].tolist() == pytest.approx([0.0, discount, discount], rel=1e-6)
    assert ring["next_ego"][:, 0].tolist() == [0.0, 1.5, 2.25]
    assert np.array_equal(ring["preference"][1:], ring["next_preference"][1:])  # held for life
    assert ring["preference"].sum(1).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_it_learns_and_leaves_the_encoder_alone(layout: Any) -> None:
    side, spec = _documented(layout)
    scene = Scene(spec, 25)
    encoded: list[int] = []
    side._encoder.register_forward_hook(lambda _, given, __: encoded.append(len(given[0])))
    frozen = [weight.clone() for weight in side._encoder.parameters()]
    nets = [weight.detach().clone() for weight in (*side.sac.actor.parameters(), *side.sac.critics.parameters())]
    learned = []
    step = scene.step(1, 0.05)
    for _ in range(3):
        seen = step.observation
        action = side.act(seen)
        assert action.values.shape == (25, 1) and np.abs(action.values).max() <= 1.0
        step = scene.step(1, 0.05)
        learned.append(side.learn(seen, action, step))
    assert learned == [False, True, True]  # 50 decisions are there after the second step
    assert encoded == [25, 25, 32, 32, 25, 32, 32]  # acting; twice a batch from the second step on
    assert all(torch.equal(old, new) for old, new in zip(frozen, side._encoder.parameters(), strict=True))
    now = (*side.sac.actor.parameters(), *side.sac.critics.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(nets, now, strict=True))


@pytest.mark.slow
def test_both_sides_drive_in_the_same_traffic(layout: Any) -> None:
    found = layout.measure(["lstm"], vehicles=8, steps=30, repeats=2)
    (row,) = found["rows"]
    assert row["vehicles"] == pytest.approx(8, rel=0.2)
    assert row["floor_vehicles"] == pytest.approx(8, rel=0.2)
    assert row["speedup"] > 1.0
    assert {"act", "store", "update", "tick"} <= row["share"].keys()
    assert "| lstm |" in layout._table(found)
