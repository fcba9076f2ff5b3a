"""MATD3 and PCMATD3 as learners: they learn, go on exactly, compile to the same, and run on real SUMO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from forms import Step, compare_forms, in_turn
from test_learning import follow, score, tug
from toy_world import BARE, SPEC, SPEED, World

from opencda_marl.config import load_profile, to_yaml
from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.run_folder import read_episodes, read_metrics, read_run
from opencda_marl.core.spec import LearnerState, Observation, ObservationSpec
from opencda_marl.learners.matd3 import METRICS, TwinDelayed
from opencda_marl.learners.offpolicy import OffPolicyLearner
from opencda_marl.learners.preference import draw_preferences
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.graph import UpdateForm, why_not_compiled
from opencda_marl.settings.learning import PreferenceSettings

LEARNING = {
    "hidden": [32], "buffer_size": 4000, "batch_size": 64, "learning_starts": 300, "updates_per_step": 0.5,
    "learning_rate": 3e-3, "learning_rate_end": 3e-3, "tau": 0.02,
}  # fmt: skip
ONE_FOR_ALL = PreferenceSettings(source="fixed", fixed=[1.0, 0.0, 0.0])


def busy(seed: int = 0, **more: Any) -> World:
    return World(seed, births=0.8, horizon=100, **more)


def seen_by_one(first: float) -> Observation:
    """What a vehicle sees whose first feature is this."""
    observation = busy(98).reset().observation
    observation.ego[:, 0] = first
    return observation


def test_it_finds_the_best_action_and_does_not_drive_at_one_speed_for_ever() -> None:
    learner = build(small("matd3", **LEARNING))
    before = score(learner, follow)
    found = [line for line in drive(learner, busy(reward=follow), 12) if line]
    assert before < -0.35
    assert score(learner, follow) > -0.06
    values = [
        float(learner.act(seen_by_one(first), explore=False).values[0, 0]) for first in (-2.0, -1.0, 0.0, 1.0, 2.0)
    ]
    assert (np.diff(values) > 0).all()
    assert values[-1] - values[0] > 1.0
    assert found[-1]["saturated"] < 0.2
    assert found[-1]["actor_gradient_norm"] > 0.0
    assert found[-1]["gradient_steps"] <= learner.counters.training_step


def test_pcmatd3_does_what_the_preference_says() -> None:
    learner = build(small("pcmatd3", preference=PreferenceSettings(), **LEARNING))
    drive(learner, busy(reward=tug), 12)
    observation = busy(98).reset().observation
    mean = []
    for fixed in ([0.9, 0.1, 0.0], [0.5, 0.5, 0.0], [0.1, 0.9, 0.0]):
        greedy = build(small("pcmatd3", preference=PreferenceSettings(source="fixed", fixed=fixed), **LEARNING))
        greedy.load(learner.state(), weights_only=True)
        mean.append(float(greedy.act(observation, explore=False).values.mean()))
    assert mean[0] < mean[1] < mean[2]
    assert mean[2] - mean[0] > 0.7


# --- state and load


def same(left: OffPolicyLearner, right: OffPolicyLearner) -> None:
    one, other = left.state(), right.state()
    assert one.tensors.keys() == other.tensors.keys()
    for name, array in one.tensors.items():
        assert array.tobytes() == other.tensors[name].tobytes(), name
    assert one.values == other.values


def saved(learner: OffPolicyLearner) -> LearnerState:
    """Its state as a checkpoint keeps it."""
    state = learner.state()
    return LearnerState(state.tensors, json.loads(json.dumps(state.values)), state.segments)


@pytest.mark.parametrize(("algorithm", "encoder", "delay"), [("matd3", "deepsets", 3), ("pcmatd3", "lstm", 2)])
def test_loaded_goes_on_exactly(algorithm: str, encoder: str, delay: int) -> None:
    settings = small(algorithm, encoder, policy_delay=delay)
    learner, again = build(settings), build(replace(settings, seed=settings.seed))
    drive(learner, World(1), 4)
    assert learner.counters.training_step > 10
    while learner.counters.training_step % delay == 0:  # until it is in the middle of the critic's steps
        drive(learner, World(5, first_episode=20 + learner.counters.training_step), 1)
    again.load(saved(learner))
    same(learner, again)
    drive(learner, World(2, first_episode=10_000), 3)
    drive(again, World(2, first_episode=10_000), 3)
    same(learner, again)


def test_with_weights_only_the_policy_is_taken_and_the_rest_is_fresh() -> None:
    learner, other = build(small("matd3")), build(small("matd3", seed=9))
    drive(learner, World(1), 4)
    other.load(saved(learner), weights_only=True)
    mine, its = learner.state(), other.state()
    for name in ("theta", "target"):
        assert (mine.tensors[name] == its.tensors[name]).all()
    assert mine.tensors["m"].any()
    assert not its.tensors["m"].any()
    assert its.values["counters"] == dict.fromkeys(its.values["counters"], 0)
    observation = World(3).reset().observation
    one, two = (who.act(observation, explore=False).values for who in (learner, other))
    assert (one == two).all()
    drive(other, World(4), 3)
    assert other.counters.training_step > 0


# --- preferences that are drawn anew


@pytest.mark.parametrize("algorithm", ["pcmatd3", "pcmasac"])
def test_a_share_of_the_preferences_is_drawn_anew_for_both_views_alike(algorithm: str) -> None:
    lean = PreferenceSettings(source="fixed", fixed=[1.0, 0.0, 0.0], concentration=[1.0, 6.0, 3.0])
    learner = build(small(algorithm, preference=lean, relabel=0.25, batch_size=200))
    drive(learner, World(1, births=0.8), 8)
    places = learner._replay.sample(np.random.default_rng(0), 20_000)
    plain = {name: array.copy() for name, array in learner._replay.batch(places).items()}
    batch = learner._replay.batch(places)
    learner._relabel(batch)
    changed = (batch["preference"] != plain["preference"]).any(1)
    assert changed.mean() == pytest.approx(0.25, abs=0.02)
    assert (batch["preference"] == batch["next_preference"]).all()
    assert (plain["preference"] == [1.0, 0.0, 0.0]).all()
    np.testing.assert_allclose(batch["preference"][changed].mean(0), [0.1, 0.6, 0.3], atol=0.01)
    assert all((batch[name] == plain[name]).all() for name in batch if "preference" not in name)
    assert (learner._replay.batch(places)["preference"] == plain["preference"]).all()  # the ring keeps what was


def test_drawing_anew_comes_from_the_learners_generator_and_is_off_by_default() -> None:
    steps = []
    for share in (0.0, 0.5, 0.5, 1.0):
        learner = build(small("pcmatd3", preference=ONE_FOR_ALL, relabel=share))
        drive(learner, World(1), 4)
        steps.append(learner.state().tensors["theta"])
    assert (steps[1] == steps[2]).all()
    assert (steps[0] != steps[1]).any()
    assert (steps[1] != steps[3]).any()
    one, two = (draw_preferences(PreferenceSettings(), np.random.default_rng(1), 5) for _ in range(2))
    assert (one == two).all()
    np.testing.assert_allclose(one.sum(1), 1.0, rtol=1e-6)
    unconditioned = build(small("matd3", relabel=0.5))
    drive(unconditioned, World(1), 4)
    assert unconditioned.counters.training_step > 0


# --- compiled


def compare(algorithm: str, encoder: str, spec: ObservationSpec, dtype: torch.dtype, *, trained: bool) -> None:
    """Both kinds of step over 100 steps, with rates that change."""
    settings = small(algorithm, encoder)
    of_rows = make_encoder(spec, settings.context)
    nets = TwinDelayed(settings, spec, SPEED, of_rows, trained=trained)
    rng = np.random.default_rng(0)
    first = {name: torch.from_numpy(array).to(dtype) for name, array in nets.initialise(rng).items()}
    first |= {name: torch.zeros_like(first["theta"]) for name in ("m", "v")}

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape)).to(dtype)

    def batch(rows: int = 24) -> dict[str, torch.Tensor]:
        found = {"action": normal(rows, 1).tanh(), "rewards": normal(rows, len(nets.components))}
        found |= {"discount": torch.full((rows,), 0.9, dtype=dtype), "next_noise": normal(rows, 1)}
        preference = torch.from_numpy(rng.dirichlet([1.0, 1.0, 1.0], rows)).to(dtype)
        for view in ("", "next_"):
            found[view + "ego"] = normal(rows, len(spec.ego))
            if nets.conditioned:
                found[view + "preference"] = preference
            if trained:
                found[view + "neighbours"] = normal(rows, spec.max_neighbours, len(spec.neighbour))
                counts = rng.integers(0, spec.max_neighbours + 1, rows).astype(np.int32)
                found[view + "counts"] = torch.from_numpy(counts)
            elif of_rows is not None:
                found[view + "context"] = normal(rows, of_rows.size)
        return found

    batches = [batch() for _ in range(3)]

    eager, compiled = ([UpdateForm(step, mode) for step in nets.steps] for mode in ("eager", "compiled"))
    assert all(form.mode == ("eager" if why_not_compiled() else "compiled") for form in compiled)

    def step_of(form: list[UpdateForm]) -> Step:
        return lambda i, state, given: form[nets.which(i)](
            {**state, "step": torch.tensor(float(i), dtype=dtype)}, given
        )

    rates = [{"learning_rate": 1e-2 / (1 + i % 7), "tau": 0.01 * (1 + i % 5)} for i in range(100)]
    inputs = in_turn(batches, rates)
    _, measured = compare_forms(step_of(eager), step_of(compiled), first, inputs, tolerance=1e-9)
    assert measured.shape == (100, len(METRICS))


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    """The short form, because compiling takes long: the plain learner without neighbour rows, in double precision."""
    compare("matd3", "deepsets", BARE, torch.float64, trained=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes minutes where the cores are busy
@pytest.mark.parametrize(
    ("algorithm", "encoder", "trained", "dtype"),
    [
        ("pcmatd3", "deepsets", True, torch.float64),
        ("pcmatd3", "lstm", False, torch.float64),
        ("matd3", "attention", True, torch.float32),
    ],
)
def test_every_compiled_form_equals_eager(algorithm: str, encoder: str, trained: bool, dtype: torch.dtype) -> None:
    compare(algorithm, encoder, SPEC, dtype, trained=trained)


# --- on real SUMO

# A child of its own: libsumo allows one simulation in a process.
_SCRIPT = """
import sys
from pathlib import Path
from opencda_marl.config import from_yaml
from opencda_marl.train import train
train(from_yaml(Path(sys.argv[1]).read_text()), out=Path(sys.argv[2]))
"""
_QUICK = [
    *("max_steps=200", "max_episodes=2", "evaluation.final=false", "learner.hidden=[16]", "learner.batch_size=32"),
    *("learner.learning_starts=100", "learner.buffer_size=1000", "demand.rate_vph=400", "demand.rate_draw=choice"),
]


def train_on_sumo(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """The last line of a short run's episodes."""
    profile = f"sumo-marl/intersection/route_speed_only_{name}"
    config, run = folder / "config.yaml", folder / "run"
    config.write_text(to_yaml(load_profile(profile, overrides=[*_QUICK, *overrides]).settings))
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(config), str(run)],
        capture_output=True, text=True, timeout=280, env={**os.environ, **paths}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_run(run)["init"]["algorithm"] == name
    state = Checkpoints(run / "checkpoints").load().state
    assert np.isfinite(state.tensors["theta"]).all()
    last = read_episodes(run)[-1]
    assert state.values["counters"] == {key: last[key] for key in state.values["counters"]}
    reported = [line for line in read_metrics(run) if line["kind"] == "update"]
    assert len(reported) == last["training_step"] // 200
    return last


@pytest.mark.parametrize("name", ["matd3", "pcmatd3"])
def test_it_acts_and_updates_on_real_sumo(tmp_path: Path, name: str) -> None:
    last = train_on_sumo(tmp_path, name, "learner.updates_per_step=1.5")
    assert last["env_steps"] == 400
    assert last["acting_steps"] >= 40  # two episodes of 20 common decisions, and vehicles that enter in between
    assert last["buffer_size"] > 100
    assert last["updates_performed"] >= 10
    assert last["training_step"] >= 200  # so that a line of metrics was written
