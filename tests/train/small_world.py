"""An environment and a learner of a few lines, so that the loop around them is tested in milliseconds.

They are honest where it counts: the traffic follows from (seed, episode), the learner's weights from everything that it
has seen and drawn, so a resumed run that missed anything ends up elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opencda_marl.core.metrics import EpisodeRecord
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.spec import (
    Action,
    ActionSpec,
    Closed,
    Counters,
    Feature,
    LearnerState,
    Observation,
    ObservationSpec,
    Step,
)
from opencda_marl.core.state import Accounting
from opencda_marl.settings.run import RunSettings

SPEC = ObservationSpec("fake", 3, (Feature("x", "m", 1.0, "a number"),), (), 0)
_VEHICLES = 4


def _observation(ids: np.ndarray, values: np.ndarray) -> Observation:
    rows = len(ids)
    return Observation(
        ids, np.arange(rows), values.astype(np.float32)[:, None], np.zeros((rows, 0, 0), np.float32),
        np.zeros(rows, np.int32), np.zeros(2, np.float32),
    )  # fmt: skip


_NOBODY = _observation(np.zeros(0, np.int64), np.zeros(0))


def _closed(ids: np.ndarray, rewards: np.ndarray) -> Closed:
    rows = len(ids)
    none = np.zeros(rows, np.bool_)
    return Closed(
        ids, np.arange(rows), rewards.astype(np.float32), np.zeros(rows, np.float32), np.full(rows, 0.5, np.float32),
        none, none,
    )  # fmt: skip


@dataclass
class FakeSimulator:
    """Says what it is."""

    info: SimulatorInfo

    def close(self) -> None:
        return None


class FakeEnv:
    """Four vehicles for the whole episode; now and then one of them collides."""

    observation_spec = SPEC
    action_spec = ActionSpec("target_speed")
    reload_every = 0  # episodes

    @property
    def world(self) -> int:
        return self._episode // self.reload_every if self.reload_every else 0

    def __init__(self, settings: RunSettings) -> None:
        self.closed = 0
        self.at_step: Callable[[int, int], None] = lambda _episode, _step: None  # a place for accidents
        self._settings = settings
        self._traced = False
        self._episode = 0

    def record_trajectory(self, on: bool) -> None:
        self._traced = on

    def trajectory(self) -> dict[str, np.ndarray]:
        assert self._traced
        return {"x": np.arange(self._step)}

    def reset(self, episode: int) -> Step:
        self._episode, self._step, self._sum = episode, 10, 0.0  # nobody is there in the first ten steps
        self._rng = generator(self._settings.seed, Branch.DEMAND, episode)
        self._ids = episode * 1_000_000 + np.arange(_VEHICLES)
        return Step(self._seen(), _closed(self._ids[:0], np.zeros((0, 3))), _NOBODY, True, False, 10)

    def _seen(self) -> Observation:
        return _observation(self._ids, self._rng.normal(size=_VEHICLES))

    def step(self, action: Action) -> Step:
        self.at_step(self._episode, self._step)
        self._step += self._settings.decision_interval
        rewards = np.repeat(-np.abs(action.values), 3, axis=1)
        self._sum += float(rewards.sum())
        done = self._step >= self._settings.max_steps
        seen = _NOBODY if done else self._seen()
        return Step(seen, _closed(self._ids, rewards), _NOBODY, True, done, self._settings.decision_interval)

    def record(self) -> EpisodeRecord:
        collided = int(self._rng.random() < 0.4)
        return EpisodeRecord(
            episode=self._episode,
            seed=self._settings.seed,
            rate_vph=300.0,
            steps=self._step,
            seconds=self._step * 0.05,
            accounting=Accounting(_VEHICLES, 0, 1, _VEHICLES - 1 - collided, collided, 0),
            departed=_VEHICLES,
            returns=[self._sum, self._sum, self._sum],
            returned=_VEHICLES,
            parts={"delay": self._sum},
            acting_rows=_VEHICLES * self._step // self._settings.decision_interval,
        )

    def close(self) -> None:
        self.closed += 1


@dataclass
class FakeLearner:
    """Weights that remember everything."""

    settings: RunSettings
    counters: Counters = field(default_factory=Counters)
    acts: bool = True

    def __post_init__(self) -> None:
        self.weights = generator(self.settings.seed, Branch.INITIALISATION).normal(size=3)
        self.rows: list[float] = []
        self.since = 0
        self.heard = 0.0
        self.closed = self.invalidated = 0
        self._rng = generator(self.settings.seed, Branch.EXPLORATION)
        self.at_update: Callable[[int], None] = lambda _count: None

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu", "update_mode": "eager", "parameters": 3}

    def act(self, observation: Observation, *, explore: bool) -> Action:
        self.counters.acting_steps += int(self.acts)
        noise = self._rng.normal(size=(len(observation), 1)) if explore else 0.0
        return Action((self.weights.sum() + noise + observation.ego).astype(np.float32))

    def store(self, observation: Observation, action: Action, step: Step) -> None:
        self.rows += [float(value) for value in action.values[:, 0]]
        self.since += step.steps
        self.counters.buffer_size = len(self.rows)

    def ready(self, step: Step) -> bool:
        return self.since >= self.settings.learner.n_steps

    def update(self, step: Step) -> dict[str, float]:
        self.at_update(self.counters.updates_performed)
        self.weights = 0.9 * self.weights + (1.0 - self.heard) * np.mean(self.rows or [0.0]) + self._rng.normal(size=3)
        self.rows, self.since = [], 0
        self.counters.buffer_size = 0
        self.counters.training_step += 4
        self.counters.updates_performed += 1
        return {"policy_loss": float(self.weights[0]), "done": self.heard}

    def progress(self, done: float) -> None:
        self.heard = done

    def state(self) -> LearnerState:
        counters = copy.copy(self.counters)
        values = {
            "rng": generator_state(self._rng),
            "since": self.since,
            "heard": self.heard,
            "counters": [
                counters.training_step,
                counters.updates_performed,
                counters.buffer_size,
                counters.acting_steps,
            ],
        }
        return LearnerState({"weights": self.weights.copy(), "rows": np.array(self.rows)}, values)

    def load(self, state: LearnerState, *, weights_only: bool = False) -> None:
        self.weights = state.tensors["weights"].copy()
        if not weights_only:
            self.rows = state.tensors["rows"].tolist()
            self.since, self.heard = state.values["since"], state.values["heard"]
            self.counters = Counters(*state.values["counters"])
            self._rng = generator_from_state(state.values["rng"])

    def invalidate(self) -> None:
        self.invalidated += 1

    def close(self) -> None:
        self.closed += 1
