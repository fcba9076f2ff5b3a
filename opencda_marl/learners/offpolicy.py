"""What learners with a replay have in common: acting, storing, drawing batches, counting, checkpoints.

The algorithm itself (nets, losses, the pure update) is in a file of its own and comes in as an `Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.objectives import OBJECTIVES, scalarise
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Action, ActionSpec, Counters, LearnerState, Observation, ObservationSpec, Step
from opencda_marl.learners.acting import ActingPolicy
from opencda_marl.learners.identity import check_complete, check_identity, identity_of, take
from opencda_marl.learners.preference import draw_preferences
from opencda_marl.learners.replay import Replay
from opencda_marl.nn.actor import ActorNetwork
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.device import resolve_device
from opencda_marl.nn.flat import Layout, as_leaf
from opencda_marl.nn.fused import passes_form
from opencda_marl.nn.graph import make_update
from opencda_marl.nn.heads import ActingHead
from opencda_marl.nn.optimiser import rate_schedule
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import OffPolicySettings
from opencda_marl.settings.run import RunSettings

__all__ = ["Algorithm", "OffPolicyLearner", "PureStep"]

PureStep = Callable[[dict[str, Tensor], Mapping[str, Tensor]], tuple[dict[str, Tensor], Tensor]]
"""(state, inputs) -> (state afterwards, metrics); see `nn.graph.UpdateForm`."""

_REPORT = 200  # gradient steps between two lines of metrics


class Algorithm(Protocol):
    """Nets, losses and the pure update of one algorithm; it holds sizes, never weights."""

    metrics: tuple[str, ...]  # what a step measures, in order
    conditioned: bool  # sees a preference
    relabel: float  # share of a batch whose preferences are drawn anew
    components: tuple[str, ...]  # of the reward
    layout: Layout  # of theta; what acting needs comes first
    actor_layout: Layout  # of what acting needs

    @property
    def actor(self) -> ActorNetwork:
        """Up to its head; the context is in the rows."""

    @property
    def head(self) -> ActingHead:
        """The actor's last step."""

    def initialise(self, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, " size"]]:
        """First values of theta, and of what else is learned without an optimiser (targets)."""

    @property
    def steps(self) -> tuple[PureStep, ...]:
        """The kinds of gradient step; each is pure, with static shapes."""

    def which(self, training_step: int) -> int:
        """Index into `steps` of the next gradient step, after so many."""

    def noise(self, rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        """Random inputs of a step, by name."""

    def random(self, rng: np.random.Generator, rows: int) -> Float32[np.ndarray, "rows actions"]:
        """Actions before learning starts."""

    def progress(self, done: float) -> None:
        """How much of the budget is used, 0 to 1."""


class OffPolicyLearner:
    """The learner; see `core.spec.Learner`.

    Args:
        settings: of the run.
        observation: layout of what vehicles see.
        action: kind of what they do.
        make: the algorithm's class, called with (settings, observation, action, encoder, trained=…).
        spans: timers of the loop.

    Raises:
        DeviceError: the device asked for is not there.
        ConfigError: settings that do not fit together.
    """

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        action: ActionSpec,
        make: Callable[..., Algorithm],
        *,
        spans: Spans | None = None,
    ) -> None:
        self.counters = Counters()
        self._settings, self._own = settings, own_settings(settings.learner, OffPolicySettings)
        self._spans = spans or Spans(enabled=False)
        self._device = resolve_device(settings.device)
        encoder = make_encoder(observation, settings.context)
        wish = self._own.train_context_encoder
        trained = encoder is not None and (encoder.trained if wish is None else wish)
        self._algorithm = made = make(settings, observation, action, encoder, trained=trained)
        rng = generator(settings.seed, Branch.INITIALISATION)
        self._state = {name: self._tensor(array) for name, array in made.initialise(rng).items()}
        self._state |= {"m": torch.zeros_like(self._state["theta"]), "v": torch.zeros_like(self._state["theta"])}
        self._policy = ActingPolicy(
            settings,
            observation,
            encoder,
            trained=trained,
            actor=made.actor,
            layout=made.actor_layout,
            head=made.head,
            conditioned=made.conditioned,
            device=self._device,
            rng=rng,
        )
        self._columns = {"action": ((made.head.stored,), np.float32)}
        self._replay = self._make_replay()
        name = settings.context.encoder
        obstacle = None
        if encoder is not None and trained and not encoder.static:
            obstacle = f"a trained {name} encoder has no static shapes"
        ragged = ("real", "next_real") if trained and encoder is not None and encoder.static else ()
        self._forms = [
            make_update(step, self._own, self._device, obstacle=obstacle, ragged=ragged) for step in made.steps
        ]
        self._ragged = ragged if self._device.type == "cpu" and not self._forms[0].static else ()
        self._encoder = "none" if encoder is None else f"{name} ({'trained' if trained else 'frozen'})"
        self._layouts = {"theta": made.layout, "encoder": self._policy.encoder_layout}
        self._identity = identity_of(settings.algorithm, observation, action, self._encoder, self._layouts)
        self._identity["activation"] = self._own.activation
        self._random = generator(settings.seed, Branch.MINIBATCH)
        self._clock = 0  # env steps of the learner's life
        self._owed = 0.0  # gradient steps that are due
        self._progress = 0.0
        self._measured = np.zeros((0, len(made.metrics)), np.float32)  # of gradient steps not reported yet

    def _make_replay(self) -> Replay:
        components = len(self._algorithm.components)
        columns = self._policy.columns()
        return Replay(columns, self._columns, components=components, capacity=self._own.buffer_size)

    def describe(self) -> dict[str, Any]:
        """See `core.spec.Learner`."""
        notes = [form.note for form in self._forms if form.note]
        return {
            "algorithm": self._settings.algorithm,
            **self._policy.describe(),
            "threads": self._settings.threads,
            "encoder": self._encoder,
            "update_mode": self._forms[0].mode or self._own.update_mode,
            "update_passes": passes_form(self._device),
            "updates_per_step": self._own.updates_per_step,
            "replay": self._replay.describe(),
            "parameters": self._algorithm.layout.size + self._policy.encoder_layout.size,
            **({"note": notes[0]} if notes else {}),
        }

    def act(self, observation: Observation, *, explore: bool) -> Action:
        """See `core.spec.Learner`; random until `learning_starts` decisions are stored."""
        with self._spans("act"):
            rows, stored = len(observation), self._algorithm.head.stored
            if not rows:
                return Action(np.zeros((0, stored), np.float32))
            self.counters.acting_steps += 1
            source = self._state["theta"][: self._algorithm.actor_layout.size]
            action = self._policy.act(observation, source, explore=explore)
            if explore and self._replay.decisions < self._own.learning_starts:
                action.values = action.extras["stored"] = self._algorithm.random(self._random, rows)
            return action

    def store(self, observation: Observation, action: Action, step: Step) -> None:
        """See `core.spec.Learner`."""
        with self._spans("store"):
            if len(observation):
                columns = {**self._policy.view(observation, action), "action": action.extras["stored"]}
                self._replay.open(observation.ids, columns, self._clock)
            closed = step.closed
            finals = self._policy.view(step.final) if len(step.final) else {}
            discounts = self._settings.discount_per_second ** closed.elapsed.astype(np.float64)
            self._clock += step.steps
            self._replay.close(closed, self._rewards(step), discounts, finals, self._clock)
            self._policy.forget(closed.ids[closed.terminated | closed.truncated])
            self.counters.buffer_size = len(self._replay)
            if self._started:
                self._owed += step.steps * self._own.updates_per_step

    @property
    def _started(self) -> bool:
        replay = self._replay
        # a full ring may hold fewer complete decisions than a batch; they are drawn with replacement
        enough = replay.usable >= self._own.batch_size or (len(replay) == replay.capacity and replay.usable > 0)
        return enough and replay.decisions >= self._own.learning_starts

    def _rewards(self, step: Step) -> Float[np.ndarray, "closed components"]:
        rewards = step.closed.rewards
        if self._algorithm.conditioned:
            return np.concatenate([step.closed.team[:, None], rewards], 1)
        return scalarise(rewards, np.ones(len(OBJECTIVES)))[:, None]

    def ready(self, step: Step) -> bool:  # noqa: ARG002 - of the interface
        """See `core.spec.Learner`: when a gradient step is due, `updates_per_step` of them per env step."""
        return self._owed > 1.0 - 1e-9

    def progress(self, done: float) -> None:
        """See `core.spec.Learner`."""
        self._progress = done
        self._algorithm.progress(done)

    def update(self, step: Step) -> dict[str, float]:  # noqa: ARG002 - of the interface
        """See `core.spec.Learner`; what was measured is returned as means, every 200 gradient steps."""
        with self._spans("update"):
            due = int(self._owed + 1e-9)
            self._owed -= due
            own = self._own
            rate = rate_schedule(own.learning_rate_schedule, own.learning_rate, own.learning_rate_end, self._progress)
            numbers = {"learning_rate": torch.tensor(rate), "tau": torch.tensor(self._own.tau)}
            drawn, measured = [], []
            for _ in range(due):
                places = self._replay.sample(self._random, self._own.batch_size)
                batch = self._replay.batch(places)
                wanted = self._relabel(batch)
                drawn.append((places, wanted))
                measured.append(self._gradient_step(batch, numbers))
            self._policy.invalidate()
            self.counters.updates_performed += 1
            self._measured = np.concatenate([self._measured, self._checked(measured, drawn)])
            if len(self._measured) < _REPORT:
                return {}
            means = self._measured.mean(0)
            self._measured = self._measured[:0]
            found = dict(zip(self._algorithm.metrics, map(float, means), strict=True))
            return {**found, "learning_rate": rate, "gradient_steps": float(self.counters.training_step)}

    def _gradient_step(self, batch: dict[str, np.ndarray], numbers: dict[str, Tensor]) -> Tensor:
        batch |= self._algorithm.noise(self._random, len(batch["discount"])) | self._real_rows(batch)
        which = self._algorithm.which(self.counters.training_step)
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()} | numbers  # the form sends them
        state = {**self._state, "theta": as_leaf(self._state["theta"])}
        state["step"] = self._number(float(self.counters.training_step))
        form = self._forms[which]
        form.choose(self._forms[0].mode)  # `auto` decides once for all kinds of steps
        after, metrics = form(state, inputs)
        self._state = {name: tensor for name, tensor in after.items() if name != "step"}
        self.counters.training_step += 1
        return metrics

    def _real_rows(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Where the real neighbours of a batch are, for an encoder that then computes those alone.

        A quarter of them is real. With none or one the compiler would take the length for a constant.
        """
        found = {}
        for name in self._ragged:
            counts = batch[name.replace("real", "counts")]
            mask = np.arange(batch[name.replace("real", "neighbours")].shape[1]) < counts[:, None]
            found[name] = np.flatnonzero(mask)
        return found if all(len(real) > 1 for real in found.values()) else {}

    def _relabel(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Draw a share of the preferences anew, for a decision and for what follows it alike.

        What a decision earned, as a vector, does not depend on what its vehicle wanted: it teaches all preferences.

        Returns:
            the columns that are no longer the replay's.
        """
        if self._algorithm.relabel:
            chosen = self._random.random(len(batch["preference"])) < self._algorithm.relabel
            drawn = draw_preferences(self._settings.preference, self._random, int(chosen.sum()))
            batch["preference"][chosen] = batch["next_preference"][chosen] = drawn
            return {name: batch[name].copy() for name in ("preference", "next_preference")}
        return {}

    def _checked(
        self, measured: list[Tensor], drawn: list[tuple[Int64[np.ndarray, " rows"], dict[str, np.ndarray]]]
    ) -> Float32[np.ndarray, "steps metrics"]:
        """What gradient steps measured.

        Raises:
            NotFiniteError: a loss or a norm is no number; with the batch.
        """
        table = torch.stack(measured).cpu().numpy()  # device sync: the metrics flush
        broken = np.flatnonzero(~np.isfinite(table).all(1))
        if len(broken):
            found = dict(zip(self._algorithm.metrics, map(float, table[broken[0]]), strict=True))
            places, wanted = drawn[broken[0]]
            batch = {name: np.array(array) for name, array in self._replay.batch(places).items()} | wanted
            raise NotFiniteError(f"the loss or its gradient is not finite: {found}", batch=batch)
        return table

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _number(self, value: float) -> Float[Tensor, ""]:
        return torch.tensor(value, device=self._device)

    def state(self) -> LearnerState:
        """See `core.spec.Learner`."""
        arrays = {name: np.array(tensor.cpu().numpy()) for name, tensor in self._state.items()}
        acting, values = self._policy.state()
        rows, replay, segments = self._replay.state()
        own = {
            "identity": self._identity,
            "counters": asdict(self.counters),
            "clock": self._clock,
            "owed": self._owed,
            "progress": self._progress,
            "update_mode": self._forms[0].mode,
            "random": generator_state(self._random),
            "acting": values,
            "replay": replay,
        }
        return LearnerState({**arrays, "measured": self._measured.copy(), **acting, **rows}, own, segments)

    def load(self, state: LearnerState, *, weights_only: bool = False) -> None:
        """See `core.spec.Learner`; with `weights_only` the replay begins empty, and what it holds comes from this run.

        Raises:
            CheckpointError: it is another learner's, or something is missing; nothing was changed.
            OutOfMemoryError: the replay does not fit into the memory that is free.
        """
        tensors, values = state.tensors, state.values
        check_identity(self._identity, values.get("identity", {}), self._layouts)
        if not weights_only:
            check_complete(self.state(), state)
        kept = [name for name in self._state if not (weights_only and name in ("m", "v"))]
        found = {name: take(tensors, name, tuple(self._state[name].shape)) for name in kept}
        replay = self._make_replay()
        if not weights_only:
            replay.load(tensors, values["replay"], state.segments)  # before anything is changed: its files may be gone
        zeros = np.zeros(self._algorithm.layout.size, np.float32)
        self._state = {name: self._tensor(found.get(name, zeros).copy()) for name in self._state}
        self._policy.load(tensors, values.get("acting", {}), weights_only=weights_only)
        self._replay = replay
        self.counters, self._clock, self._owed = Counters(), 0, 0.0
        self._measured = self._measured[:0]
        if not weights_only:
            self.counters = Counters(**values["counters"])
            self._clock, self._owed = values["clock"], values["owed"]
            self.progress(values["progress"])
            self._measured = tensors["measured"].copy()
            for form in self._forms:
                form.choose(values["update_mode"])
            self._random = generator_from_state(values["random"])
        self.invalidate()

    def invalidate(self) -> None:
        """See `core.spec.Learner`."""
        for form in self._forms:
            form.invalidate()
        self._policy.invalidate()

    def close(self) -> None:
        """See `core.spec.Learner`; nothing is held."""
