"""The compiled update is the eager one: over a hundred of them, with rates that change."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from forms import compare_forms, in_turn
from torch import Tensor
from toy_world import BARE, LEVELS, SPEC, SPEED, World

from opencda_marl.core.spec import ActionSpec, ObservationSpec
from opencda_marl.learners.mappo import METRICS, Networks, minibatch_step
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.graph import Update, UpdateForm, why_not_compiled

ROWS, UPDATES = 24, 100


def problem(
    algorithm: str, encoder: str, spec: ObservationSpec, action: ActionSpec, dtype: torch.dtype, *, trained: bool
) -> tuple[Update, Tensor, list[dict[str, Tensor]]]:
    """A minibatch step, first parameters, and minibatches to take in turn (the last with padding)."""
    settings = small(algorithm, encoder)
    made = make_encoder(spec, settings.context)
    networks = Networks(settings, spec, action, made, trained=trained)
    rng = np.random.default_rng(0)
    theta = torch.from_numpy(networks.initialise(rng)).to(dtype)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    def batch(padding: int) -> dict[str, Tensor]:
        weight = torch.ones(ROWS, dtype=dtype)
        weight[ROWS - padding :] = 0.0
        found = {
            "ego": normal(ROWS, len(spec.ego)),
            "scene": normal(ROWS, spec.scene_size),
            "action": torch.from_numpy(rng.integers(0, 5, (ROWS, 1))).to(dtype),
            "log_prob": -1.0 + 0.1 * normal(ROWS),
            "advantage": normal(ROWS),
            "returns": normal(ROWS, len(networks.components)),
            "weight": weight,
        }
        if algorithm == "pcmappo":
            found["preference"] = torch.from_numpy(rng.dirichlet([1.0, 1.0, 1.0], ROWS)).to(dtype)
        if trained:
            found["neighbours"] = normal(ROWS, spec.max_neighbours, len(spec.neighbour))
            found["counts"] = torch.from_numpy(rng.integers(0, spec.max_neighbours + 1, ROWS).astype(np.int32))
        elif made is not None:
            found["context"] = normal(ROWS, made.size)
        return found

    return partial(minibatch_step, networks, settings.learner), theta, [batch(p) for p in (0, 0, 5)]


def compare(
    algorithm: str, encoder: str, spec: ObservationSpec, action: ActionSpec, dtype: torch.dtype, *, trained: bool
) -> None:
    step, theta, batches = problem(algorithm, encoder, spec, action, dtype, trained=trained)
    form = UpdateForm(step, "compiled")
    assert form.mode == ("eager" if why_not_compiled() else "compiled"), form.note  # eager: torch's path has a space
    first = {"theta": theta, "m": torch.zeros_like(theta), "v": torch.zeros_like(theta), "step": theta.new_zeros(())}
    rates = [{"learning_rate": 1e-2 / (1 + i % 7), "entropy_weight": 0.01 * (i % 3)} for i in range(UPDATES)]
    inputs = in_turn(batches, rates)
    eager, measured = compare_forms(
        lambda _, state, given: step(state, given),
        lambda _, state, given: form(state, given),
        first,
        inputs,
        tolerance=1e-9,
    )
    assert eager["step"].item() == UPDATES
    assert measured.shape == (UPDATES, len(METRICS))


def test_compiled_equals_eager() -> None:
    """The short form, because compiling takes long: the plain learner without neighbour rows, in double precision."""
    compare("mappo", "deepsets", BARE, SPEED, torch.float64, trained=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes minutes where the cores are busy
@pytest.mark.parametrize(
    ("algorithm", "encoder", "spec", "action", "trained", "dtype"),
    [
        ("mappo", "deepsets", SPEC, SPEED, True, torch.float32),
        ("pcmappo", "attention", SPEC, LEVELS, True, torch.float64),
        ("pcmappo", "lstm", SPEC, SPEED, False, torch.float32),
        ("mappo", "deepsets", BARE, LEVELS, False, torch.float64),
        ("pcmappo", "deepsets", SPEC, SPEED, True, torch.float64),
        ("pcmappo", "deepsets", SPEC, SPEED, True, torch.float32),
    ],
)
def test_every_compiled_form_equals_eager(
    algorithm: str, encoder: str, spec: ObservationSpec, action: ActionSpec, trained: bool, dtype: torch.dtype
) -> None:
    compare(algorithm, encoder, spec, action, dtype, trained=trained)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_learner_that_compiles_learns_what_the_eager_one_learns_and_keeps_its_mode() -> None:
    eager, compiled = build(small("pcmappo")), build(small("pcmappo", update_mode="compiled"))
    left = drive(eager, World(1), 4)
    right = drive(compiled, World(1), 4)
    assert len(left) == len(right) >= 2
    for name, value in left[0].items():
        assert right[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    again = build(small("pcmappo", update_mode="auto"))
    again.load(compiled.state())
    mode = "eager" if why_not_compiled() else "compiled"
    assert again.describe()["update_mode"] == mode
    assert mode == "eager" or "as this run decided before" in again.describe()["note"]
