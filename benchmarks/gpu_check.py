"""Eager = CUDA graph, for every learner with networks, on synthetic traffic; one table; exit code 1 on any difference.

Two learners of one seed live through the same traffic: one updates eagerly, the other by a CUDA graph (with --cpu: by
the compiler), and the eager one decides for both. On the way the graph is captured anew after a reload of the world and
after a load. Then both act on the same views with the same noise. A capture that must fail is tried in a process of its
own. Needs torch (2.11 or newer), NumPy and safetensors: jaxtyping is stood in for where it is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field, fields
from typing import Any


def _stand_in_for_jaxtyping() -> None:
    """Shapes in annotations are checked in tests alone: here `Float[Tensor, "rows"]` may be `Tensor`."""

    class Array:
        def __class_getitem__(cls, item: Any) -> Any:
            return item[0]

    class StandIn(types.ModuleType):
        def __getattr__(self, name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return Array

    sys.modules["jaxtyping"] = StandIn("jaxtyping")


if importlib.util.find_spec("jaxtyping") is None:
    _stand_in_for_jaxtyping()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from opencda_marl.core.errors import CudaGraphCaptureError  # noqa: E402
from opencda_marl.core.spec import (  # noqa: E402
    Action,
    ActionSpec,
    Closed,
    Feature,
    Learner,
    Observation,
    ObservationSpec,
    Step,
)
from opencda_marl.learners import LEARNERS  # noqa: E402
from opencda_marl.nn.graph import Inputs, State, UpdateForm, why_not_compiled  # noqa: E402
from opencda_marl.settings.learning import ALGORITHMS, ContextSettings  # noqa: E402
from opencda_marl.settings.networks import NetworkSettings  # noqa: E402
from opencda_marl.settings.run import RunSettings  # noqa: E402

EGO, ROW, NEIGHBOURS = 22, 31, 12  # as the full layout
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
SMALL_STEPS = {"n_steps": 200, "epochs": 2, "target_kl": None, "learning_starts": 100, "buffer_size": 5000}
TOLERANCE = 1e-3  # of how far the weights have moved; the same kernels in the same order are far below
RATIO = 0.05  # of spreads of actions


@dataclass
class Row:
    """A line of the table."""

    name: str
    steps: int = 0
    apart: float = 0.0  # of how far the weights have moved
    actions: float = 0.0  # largest difference of an action
    eager_ms: float = 0.0
    other_ms: float = 0.0
    failures: list[str] = field(default_factory=list)


class Traffic:
    """Vehicles that come and go, with the timing that `core.spec.Step` promises: a decision every ten steps."""

    def __init__(self, vehicles: int, seed: int, *, discrete: bool) -> None:
        features = [
            tuple(Feature(f"{kind}{i}", "1", 1.0, "") for i in range(n)) for kind, n in (("e", EGO), ("r", ROW))
        ]
        self.spec = ObservationSpec("synthetic", 1, features[0], features[1], NEIGHBOURS)
        self.action = ActionSpec("levels", levels=LEVELS) if discrete else ActionSpec("target_speed")
        self._rng = np.random.default_rng(seed)
        self._ids = np.arange(vehicles, dtype=np.int64)
        self._next = vehicles

    def view(self, ids: np.ndarray) -> Observation:
        """What these vehicles see."""
        rng, rows = self._rng, len(ids)
        counts = rng.integers(0, NEIGHBOURS + 1, rows).astype(np.int32)
        ego = rng.normal(0.0, 0.5, (rows, EGO)).astype(np.float32)
        neighbours = rng.normal(0.0, 0.5, (rows, NEIGHBOURS, ROW)).astype(np.float32)
        neighbours[np.arange(NEIGHBOURS)[None, :] >= counts[:, None]] = 0.0
        scene = np.concatenate([ego.mean(0), ego.max(0)]) if rows else np.zeros(2 * EGO, np.float32)
        return Observation(ids, ids, ego, neighbours, counts, scene.astype(np.float32))

    def first(self) -> Step:
        """Everybody has just driven in."""
        none = np.zeros(0, np.int64)
        flags, numbers = np.zeros(0, np.bool_), np.zeros(0, np.float32)
        closed = Closed(none, none, np.zeros((0, 3), np.float32), numbers, numbers, flags, flags)
        return Step(self.view(self._ids), closed, self.view(none), everyone=True, done=False, steps=10)

    def step(self, action: Action) -> Step:
        """Everybody's decision closes; one vehicle in fifty arrives and another one in fifty is taken out."""
        rng, rows, ids = self._rng, len(self._ids), self._ids
        chance = rng.random(rows)
        terminated, truncated = chance < 0.02, chance > 0.98
        rewards = rng.normal(-0.05, 0.05, (rows, 3)) - 0.05 * action.values[:, :1] ** 2
        closed = Closed(
            ids,
            ids,
            rewards.astype(np.float32),
            rng.normal(0.0, 0.05, rows).astype(np.float32),
            np.full(rows, 0.5, np.float32),
            terminated,
            truncated,
        )
        gone = terminated | truncated
        self._ids = ids.copy()
        self._ids[gone] = self._next + np.arange(int(gone.sum()))
        self._next += int(gone.sum())
        final = self.view(ids[truncated])
        return Step(self.view(self._ids), closed, final, everyone=True, done=False, steps=10)


class Pair:
    """Two learners of one seed and what happens to both."""

    def __init__(self, eager: Learner, other: Learner, traffic: Traffic) -> None:
        self.learners = (eager, other)
        self.seconds: tuple[list[float], list[float]] = ([], [])  # of a gradient step, per update
        self._traffic, self._step = traffic, traffic.first()

    def live(self, gradient_steps: int) -> None:
        """Until so many more have been taken."""
        until = self.learners[0].counters.training_step + gradient_steps
        while self.learners[0].counters.training_step < until:
            observation = self._step.observation
            chosen = [learner.act(observation, explore=True) for learner in self.learners]
            self._step = self._traffic.step(chosen[0])
            for learner, own, seconds in zip(self.learners, chosen, self.seconds, strict=True):
                extras = {**own.extras, "stored": chosen[0].extras["stored"]}
                learner.store(observation, Action(chosen[0].values, extras), self._step)
                if learner.ready(self._step):
                    before, begin = learner.counters.training_step, time.perf_counter()
                    learner.update(self._step)
                    taken = max(1, learner.counters.training_step - before)
                    seconds.append((time.perf_counter() - begin) / taken)

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Theta of both."""
        eager, other = (learner.state().tensors["theta"] for learner in self.learners)
        return eager.astype(np.float64), other.astype(np.float64)

    def actions(self, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """What both do with the same views and the same noise: their generators have drawn alike."""
        views = [self._traffic.view(np.arange(500, dtype=np.int64)) for _ in range(rounds)]
        eager, other = (
            np.concatenate([learner.act(view, explore=True).values for view in views]) for learner in self.learners
        )
        return eager, other


def settings_of(name: str, encoder: str, mode: str, device: str) -> RunSettings:
    """Of a learner at the page's shapes, small in time alone."""
    kind: Any = ALGORITHMS[name]
    known = {item.name for item in fields(kind)}
    own = {key: value for key, value in SMALL_STEPS.items() if key in known}
    return RunSettings(
        algorithm=name,
        device=device,
        context=ContextSettings(encoder=encoder),
        learner=kind(**own, update_mode=mode, acting_device="cpu"),
    )


def check(name: str, encoder: str, mode: str, device: str, *, updates: int, vehicles: int) -> Row:
    """Everything about one learner."""
    row = Row(f"{name}, {encoder}")
    traffic = Traffic(vehicles, 7, discrete=name == "dqn")
    make = LEARNERS.load(name)
    eager, other = (
        make(settings_of(name, encoder, form, device), traffic.spec, traffic.action) for form in ("eager", mode)
    )
    pair = Pair(eager, other, traffic)
    began = pair.weights()[0]

    def compare(when: str) -> None:
        left, right = pair.weights()
        moved = float(np.linalg.norm(left - began))
        row.apart = max(row.apart, float(np.linalg.norm(left - right)) / moved)
        if not (moved > 0.0 and row.apart < TOLERANCE):
            row.failures.append(f"weights differ {when}: {row.apart:.1e} of the way")

    pair.live(updates // 2)
    compare("after the first updates")
    for seconds in pair.seconds:
        seconds[:] = seconds[1:]  # the first one captured or compiled
    kept = tuple(list(seconds) for seconds in pair.seconds)
    other.invalidate()
    pair.live(updates // 4)
    compare("after a reload of the world")
    other.load(eager.state())
    pair.live(updates // 4)
    compare("after a load")
    row.steps = other.counters.training_step
    if other.describe()["update_mode"] != mode:
        row.failures.append(f"it ran {other.describe()['update_mode']}: {other.describe().get('note')}")
    left, right = pair.actions(4)
    row.actions = float(np.abs(left - right).max()) if name != "dqn" else float((left != right).mean())
    if abs(left.mean() - right.mean()) > RATIO or abs(left.std() - right.std()) > RATIO * max(left.std(), 0.1):
        row.failures.append("the distributions of actions differ")
    row.eager_ms, row.other_ms = (1e3 * statistics.median(found or [float("nan")]) for found in kept)
    return row


def waits(state: State, inputs: Inputs) -> tuple[State, torch.Tensor]:
    """No update: it asks the device for a number, which a capture forbids."""
    scale = 2.0 if inputs["x"].sum().item() > 0 else 1.0
    return {"theta": state["theta"].detach() * scale}, inputs["x"]


def fail(device: str) -> int:
    """A capture that must fail: the exit code of its error, 0 if there was none."""
    state = {"theta": torch.ones(3, device=device)}
    try:
        UpdateForm(waits, "cuda_graph", device=torch.device(device))(state, {"x": torch.ones(3, device=device)})
    except CudaGraphCaptureError as error:
        return error.exit_code
    return 0


def held(device: str) -> str | None:
    """An autograd graph through the parameters, built outside of the update; what is wrong if that is let pass."""
    theta = torch.ones(3, device=device, requires_grad=True)
    outside = (theta * 2.0).sum()
    try:
        UpdateForm(waits, "cuda_graph", device=torch.device(device))({"theta": theta}, {"x": theta.detach()})
    except CudaGraphCaptureError as error:
        return None if "holds an autograd graph through theta" in error.message else error.message
    return f"a graph through the parameters ({outside.shape}) was let pass"


def cases(wanted: str | None) -> list[tuple[str, str]]:
    """Learners with networks, each with a trained encoder; one with the frozen LSTM of the page."""
    names = [name for name, kind in ALGORITHMS.items() if issubclass(kind, NetworkSettings)]
    found = [*((name, "deepsets") for name in names), ("pcmasac", "lstm"), ("pcmappo", "attention")]
    return [case for case in found if wanted is None or case[0] in wanted.split(",")]


def table(rows: list[Row], mode: str) -> str:
    """What is printed."""
    lines = [
        f"{'learner':22}{'steps':>6}{'weights apart':>15}{'actions apart':>15}{'eager ms':>10}{mode + ' ms':>15}  "
    ]
    for row in rows:
        figures = f"{row.steps:6d}{row.apart:15.1e}{row.actions:15.1e}{row.eager_ms:10.2f}{row.other_ms:15.2f}"
        lines.append(f"{row.name:22}{figures}  {'; '.join(row.failures) or 'ok'}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Eager = CUDA graph, for every learner, on synthetic traffic.")
    parser.add_argument("--cpu", action="store_true", help="compile instead, on the CPU")
    parser.add_argument("--compiled", action="store_true", help="on the GPU: check the compiled form as well")
    parser.add_argument("--learners", help="only these, with commas between")
    parser.add_argument("--updates", type=int, default=200, help="gradient steps of each learner")
    parser.add_argument("--vehicles", type=int, default=25)
    parser.add_argument("--fail", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    device = "cpu" if asked.cpu else "cuda"
    if not asked.cpu and not torch.cuda.is_available():
        sys.stderr.write(f"torch {torch.__version__} sees no CUDA device; --cpu checks without one\n")
        return 31
    if asked.fail:
        return fail(device)
    modes = ["compiled"] if asked.cpu else ["cuda_graph", *(["compiled"] if asked.compiled else [])]
    if asked.cpu and (reason := why_not_compiled()) is not None:
        sys.stderr.write(f"nothing can be compiled here: {reason}\n")
        return 33
    place = "CPU" if asked.cpu else torch.cuda.get_device_name()
    sys.stdout.write(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {place}\n")
    good = True
    for mode in modes:
        rows = [
            check(name, encoder, mode, device, updates=asked.updates, vehicles=asked.vehicles)
            for name, encoder in cases(asked.learners)
        ]
        sys.stdout.write(table(rows, mode) + "\n")
        good = good and not any(row.failures for row in rows)
    if not asked.cpu:
        code = subprocess.run([sys.executable, __file__, "--fail"], check=False).returncode
        wrong = held(device)
        sys.stdout.write(f"a capture that must fail: exit code {code} ({'ok' if code == 32 else 'wrong, 32 is due'})\n")
        sys.stdout.write(f"a graph through the parameters: {wrong or 'refused, ok'}\n")
        good = good and code == 32 and wrong is None
    sys.stdout.write("all equal\n" if good else "there are differences\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
