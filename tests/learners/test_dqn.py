"""DQN as a learner: it learns, its exploration goes on exactly, it compiles to the same, and it runs on real SUMO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from forms import Step, compare_forms, in_turn
from test_learning import pick, score
from test_matd3 import LEARNING, busy, same, saved, train_on_sumo
from toy_world import BARE, LEVELS, SPEC, World

from opencda_marl.core.errors import CheckpointError
from opencda_marl.core.spec import ActionSpec, ObservationSpec
from opencda_marl.learners.dqn import METRICS, DoubleDqn
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.graph import UpdateForm, why_not_compiled


def test_it_finds_the_best_level_at_each_view() -> None:
    learner = build(small("dqn", **LEARNING), action=LEVELS)
    before = score(learner, pick)
    found = []
    for tenth in range(1, 11):
        found += drive(learner, busy(tenth, reward=pick, first_episode=tenth), 1)
        learner.progress(tenth / 10)
    shown = [line["epsilon"] for line in found if line]
    assert 0.05 <= shown[-1] < shown[0] < 1.0
    assert before < -0.35
    assert score(learner, pick) > -0.1
    observation = busy(98).reset().observation
    levels = []
    for first in (-1.5, 1.5):
        observation.ego[:, 0] = first
        levels.append(learner.act(observation, explore=False).values[0, 0])
    assert levels == [0.0, 4.0]


def test_what_it_stores_is_the_level_that_it_took() -> None:
    learner = build(small("dqn", learning_starts=1000), action=LEVELS)
    drive(learner, World(1), 4)
    batch = learner._replay.batch(learner._replay.sample(np.random.default_rng(0), 500))
    assert (batch["action"].shape, batch["rewards"].shape) == ((500, 1), (500, 1))
    assert set(np.unique(batch["action"])) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert learner.counters.training_step == 0  # all of them are random ones, from before the start


def explored(learner: Any, acts: int = 400) -> float:
    """Share of decisions that are not the greedy ones."""
    observation = busy(97).reset().observation
    greedy = learner.act(observation, explore=False).values
    return float(np.mean([(learner.act(observation, explore=True).values != greedy).mean() for _ in range(acts)]))


def test_epsilon_survives_a_resume_and_the_run_goes_on_exactly() -> None:
    own = {"epsilon": 0.8, "epsilon_end": 0.1, "exploration_fraction": 0.5}
    learner, again = (build(small("dqn", **own), action=LEVELS) for _ in range(2))
    drive(learner, World(1), 4)
    learner.progress(0.3)
    assert learner.counters.training_step > 10
    epsilon = 0.8 - 0.6 * 0.7
    state = saved(learner)
    share = explored(learner)
    assert share == pytest.approx(epsilon * 4 / 5, abs=0.06)
    learner.load(state)
    again.load(state)
    same(learner, again)
    assert again._algorithm.head.epsilon == learner._algorithm.head.epsilon == pytest.approx(epsilon)
    assert explored(again) == share  # to the bit: the generator goes on too
    learner.load(state)
    again.load(state)
    drive(learner, World(2, first_episode=10), 3)
    drive(again, World(2, first_episode=10), 3)
    same(learner, again)


def test_with_weights_only_it_explores_from_the_beginning() -> None:
    learner, other = build(small("dqn"), action=LEVELS), build(small("dqn", seed=9), action=LEVELS)
    drive(learner, World(1), 4)
    learner.progress(1.0)
    other.load(saved(learner), weights_only=True)
    mine, its = learner.state().tensors, other.state().tensors
    assert all((mine[name] == its[name]).all() for name in ("theta", "target"))
    assert mine["m"].any()
    assert not its["m"].any()
    assert other._algorithm.head.epsilon == 1.0
    assert other.counters.training_step == 0


def test_levels_of_another_run_are_refused() -> None:
    learner = build(small("dqn"), action=LEVELS)
    drive(learner, World(1), 2)
    other = build(small("dqn"), action=ActionSpec("levels", levels=(0.0, 0.2, 0.5, 0.75, 1.0)))
    with pytest.raises(CheckpointError, match="action"):
        other.load(saved(learner))


# --- compiled


def compare(encoder: str, spec: ObservationSpec, dtype: torch.dtype, *, trained: bool) -> None:
    """A hundred steps, with rates that change."""
    settings = small("dqn", encoder)
    of_rows = make_encoder(spec, settings.context)
    net = DoubleDqn(settings, spec, LEVELS, of_rows, trained=trained)
    rng = np.random.default_rng(0)
    first = {name: torch.from_numpy(array).to(dtype) for name, array in net.initialise(rng).items()}
    first |= {name: torch.zeros_like(first["theta"]) for name in ("m", "v")}

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    def batch(rows: int = 24) -> dict[str, torch.Tensor]:
        found = {"action": torch.from_numpy(rng.integers(0, 5, (rows, 1))).to(dtype), "rewards": normal(rows, 1)}
        found["discount"] = torch.full((rows,), 0.9, dtype=dtype)
        for view in ("", "next_"):
            found[view + "ego"] = normal(rows, len(spec.ego))
            if trained:
                found[view + "neighbours"] = normal(rows, spec.max_neighbours, len(spec.neighbour))
                counts = rng.integers(0, spec.max_neighbours + 1, rows).astype(np.int32)
                found[view + "counts"] = torch.from_numpy(counts)
            elif of_rows is not None:
                found[view + "context"] = normal(rows, of_rows.size)
        return found

    batches = [batch() for _ in range(3)]

    eager, compiled = ([UpdateForm(step, mode) for step in [net.step]] for mode in ("eager", "compiled"))
    assert all(form.mode == ("eager" if why_not_compiled() else "compiled") for form in compiled)

    def step_of(form: list[UpdateForm]) -> Step:
        return lambda i, state, given: form[0]({**state, "step": torch.tensor(float(i), dtype=dtype)}, given)

    rates = [
        {"learning_rate": 1e-2 / (1 + i % 7), "tau": 0.01 * (1 + i % 5), "epsilon": 0.5 / (1 + i)} for i in range(100)
    ]
    inputs = in_turn(batches, rates)
    _, measured = compare_forms(step_of(eager), step_of(compiled), first, inputs, tolerance=1e-9)
    assert measured.shape == (100, len(METRICS))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes minutes where the cores are busy
@pytest.mark.parametrize(
    ("encoder", "spec", "trained", "dtype"),
    [
        ("deepsets", BARE, False, torch.float64),
        ("deepsets", SPEC, True, torch.float64),
        ("lstm", SPEC, False, torch.float64),
        ("attention", SPEC, True, torch.float32),
    ],
)
def test_compiled_equals_eager(encoder: str, spec: ObservationSpec, trained: bool, dtype: torch.dtype) -> None:
    compare(encoder, spec, dtype, trained=trained)


# --- on real SUMO


def test_it_acts_and_updates_on_real_sumo(tmp_path: Path) -> None:
    last = train_on_sumo(tmp_path, "dqn", "learner.updates_per_step=1.5")
    assert last["env_steps"] == 400
    assert last["acting_steps"] >= 40  # two episodes of 20 common decisions, and vehicles that enter in between
    assert last["buffer_size"] > 100
    assert last["updates_performed"] >= 10
    assert last["training_step"] >= 200
