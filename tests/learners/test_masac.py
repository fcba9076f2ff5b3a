"""MASAC and PCMASAC learn on toys whose best policy is known, and alike in every form of the update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from forms import compare_forms, in_turn
from test_learning import follow, score
from torch import Tensor
from toy_world import BARE, SPEC, SPEED, World

from opencda_marl.core.spec import ObservationSpec
from opencda_marl.learners import LEARNERS
from opencda_marl.learners.masac import METRICS, SoftActorCritic, make_masac
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.graph import Update, UpdateForm, why_not_compiled

ROWS, UPDATES = 24, 100
OWN = {
    "hidden": [32],
    "batch_size": 64,
    "buffer_size": 5000,
    "learning_starts": 200,
    "learning_rate": 3e-3,
    "learning_rate_end": 3e-3,
    "target_entropy": -2.0,
}


def test_the_table_finds_both() -> None:
    assert LEARNERS.load("masac") is make_masac
    assert LEARNERS.load("pcmasac") is make_masac


@pytest.mark.parametrize(("encoder", "trained"), [("deepsets", True), ("lstm", False)])
def test_masac_finds_the_best_action(encoder: str, trained: bool) -> None:
    learner = build(small("masac", encoder, train_context_encoder=trained, updates_per_step=0.3, **OWN))
    before = score(learner, follow)
    drive(learner, World(0, births=0.8, horizon=100, reward=follow), 25)
    assert before < -0.3
    assert score(learner, follow) > -0.06
    assert learner.counters.training_step > 500


def test_the_temperature_finds_the_entropy_that_was_asked_for() -> None:
    learner = build(small("masac", "deepsets", updates_per_step=0.5, **(OWN | {"target_entropy": -0.7})))
    found = [each for each in drive(learner, World(0, births=0.8, horizon=100, reward=follow), 20) if each]
    assert found[-1]["entropy"] == pytest.approx(-0.7, abs=0.3)
    assert found[-1]["alpha"] != pytest.approx(0.1, rel=0.05)


# --- forms of the update


def problem(
    algorithm: str, encoder: str, spec: ObservationSpec, dtype: torch.dtype, *, trained: bool
) -> tuple[Update, dict[str, Tensor], list[dict[str, Tensor]]]:
    """A gradient step, a first state, and batches to take in turn."""
    settings = small(algorithm, encoder, max_grad_norm=1.0)
    made = make_encoder(spec, settings.context)
    nets = SoftActorCritic(settings, spec, SPEED, made, trained=trained)
    rng = np.random.default_rng(0)
    first = {name: torch.from_numpy(array).to(dtype) for name, array in nets.initialise(rng).items()}
    zero = torch.zeros_like(first["theta"])
    state = {**first, "m": zero, "v": zero, "step": zero.new_zeros(())}

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    def batch() -> dict[str, Tensor]:
        found = {"action": torch.tanh(normal(ROWS, 1)), "rewards": normal(ROWS, len(nets.components))}
        found["discount"] = torch.from_numpy(0.9 * (rng.random(ROWS) < 0.8)).to(dtype)
        found |= {name: torch.from_numpy(array).to(dtype) for name, array in nets.noise(rng, ROWS).items()}
        for prefix in ("", "next_"):
            found[prefix + "ego"] = normal(ROWS, len(spec.ego))
            if algorithm == "pcmasac":
                found[prefix + "preference"] = torch.from_numpy(rng.dirichlet([1.0, 1.0, 1.0], ROWS)).to(dtype)
            if trained:
                found[prefix + "neighbours"] = normal(ROWS, spec.max_neighbours, len(spec.neighbour))
                counts = rng.integers(0, spec.max_neighbours + 1, ROWS)
                found[prefix + "counts"] = torch.from_numpy(counts.astype(np.int32))
            elif made is not None:
                found[prefix + "context"] = normal(ROWS, made.size)
        return found

    return nets.step, state, [batch() for _ in range(3)]


def compare(algorithm: str, encoder: str, spec: ObservationSpec, dtype: torch.dtype, *, trained: bool) -> None:
    step, first, batches = problem(algorithm, encoder, spec, dtype, trained=trained)
    form = UpdateForm(step, "compiled")  # the whole step as one graph, or an error
    assert form.mode == ("eager" if why_not_compiled() else "compiled"), form.note
    rates = [{"learning_rate": 1e-2 / (1 + i % 7), "tau": 0.05 * (1 + i % 3)} for i in range(UPDATES)]
    inputs = in_turn(batches, rates)
    eager, measured = compare_forms(
        lambda _, state, given: step(state, given),
        lambda _, state, given: form(state, given),
        first,
        inputs,
        tolerance=1e-7,
    )
    assert eager["step"].item() == UPDATES
    assert measured.shape == (UPDATES, len(METRICS))


def test_compiled_equals_eager() -> None:
    """The short form, because compiling takes long: the plain learner without neighbour rows, in double precision."""
    compare("masac", "deepsets", BARE, torch.float64, trained=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes minutes where the cores are busy
@pytest.mark.parametrize(
    ("algorithm", "encoder", "spec", "trained", "dtype"),
    [
        ("masac", "deepsets", SPEC, True, torch.float32),
        ("pcmasac", "attention", SPEC, True, torch.float64),
        ("pcmasac", "lstm", SPEC, False, torch.float32),
        ("pcmasac", "deepsets", SPEC, True, torch.float64),
    ],
)
def test_every_compiled_form_equals_eager(
    algorithm: str, encoder: str, spec: ObservationSpec, trained: bool, dtype: torch.dtype
) -> None:
    compare(algorithm, encoder, spec, dtype, trained=trained)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_learner_that_compiles_learns_what_the_eager_one_learns_and_keeps_its_mode() -> None:
    eager, compiled = build(small("pcmasac")), build(small("pcmasac", update_mode="compiled"))
    for learner in (eager, compiled):
        drive(learner, World(1, births=0.5), 6)
    one, other = eager.state(), compiled.state()
    assert one.values["counters"] == other.values["counters"]
    np.testing.assert_allclose(other.tensors["theta"], one.tensors["theta"], atol=2e-3)
    assert other.values["update_mode"] in ("compiled", "eager")
    moved = build(small("pcmasac"))
    moved.load(other)  # checkpoints go from one form to another
    assert (moved.state().tensors["theta"] == other.tensors["theta"]).all()
