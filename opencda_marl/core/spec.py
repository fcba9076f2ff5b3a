"""What environment and learners say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from opencda_marl.core.segments import Segment

__all__ = [
    "Action",
    "ActionSpec",
    "Closed",
    "Counters",
    "Feature",
    "Learner",
    "LearnerState",
    "Observation",
    "ObservationSpec",
    "Step",
]


@dataclass(frozen=True, slots=True)
class Feature:
    """One column of an observation."""

    name: str
    unit: str  # before scaling
    scale: float  # the value is divided by it
    about: str


@dataclass(frozen=True, slots=True)
class ObservationSpec:
    """A layout: named, versioned, kept in the run folder."""

    name: str
    version: int
    ego: tuple[Feature, ...]
    neighbour: tuple[Feature, ...]  # empty: no neighbour rows
    max_neighbours: int

    @property
    def scene_size(self) -> int:
        """Length of `Observation.scene`: mean and max over the ego features of everybody."""
        return 2 * len(self.ego)


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """Continuous in [-1, 1], or an index into `levels`."""

    kind: str  # "target_speed", "acceleration" (continuous) or "levels" (discrete)
    size: int = 1  # numbers per vehicle
    levels: tuple[float, ...] = ()  # discrete: fractions of the envelope


@dataclass(slots=True)
class Observation:
    """The vehicles that must act now (or whose last view is needed)."""

    ids: Int64[np.ndarray, " rows"]
    slots: Int64[np.ndarray, " rows"]
    ego: Float32[np.ndarray, "rows ego_features"]
    neighbours: Float32[np.ndarray, "rows neighbours features"]  # rows beyond `counts` are zero
    counts: Int32[np.ndarray, " rows"]  # how many neighbour rows are real; they come first
    scene: Float32[np.ndarray, " scene"]  # mean and max of ego features over all controlled vehicles of this step

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mask(self) -> Bool[np.ndarray, "rows neighbours"]:
        """True where a neighbour row is real."""
        return np.arange(self.neighbours.shape[1])[None, :] < self.counts[:, None]


@dataclass(slots=True)
class Action:
    """What a policy decided for the rows of an observation."""

    values: Float32[np.ndarray, "rows actions"]  # in [-1, 1]; discrete: the index, as a float
    extras: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # the learner's own, one row each (log-prob, context, …)


@dataclass(slots=True)
class Closed:
    """Decisions that ended: at the vehicle's next decision, or with the vehicle, or with the episode."""

    ids: Int64[np.ndarray, " closed"]
    slots: Int64[np.ndarray, " closed"]
    rewards: Float32[np.ndarray, "closed objectives"]  # discounted sum inside the interval
    team: Float32[np.ndarray, " closed"]  # likewise, the team's reward
    elapsed: Float32[np.ndarray, " closed"]  # [s] length of the interval
    terminated: Bool[np.ndarray, " closed"]  # arrived or collided: do not bootstrap
    truncated: Bool[np.ndarray, " closed"]  # episode over or taken out: bootstrap from `Step.final`

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Step:
    """What came of an action: the environment ran until somebody must act again, or the episode ended."""

    observation: Observation  # who must act now; no rows when done
    closed: Closed
    final: Observation  # last view of the rows of `closed` that are truncated, in their order
    everyone: bool  # True: every controlled vehicle is in `observation` (a common decision, no interval is open)
    done: bool
    steps: int  # simulator steps advanced


@dataclass(slots=True)
class Counters:
    """What a learner has really done; shown everywhere."""

    training_step: int = 0  # gradient steps
    updates_performed: int = 0  # calls of update that changed weights
    buffer_size: int = 0  # rows stored and not yet thrown away
    acting_steps: int = 0  # calls of act with at least one row


@dataclass(slots=True)
class LearnerState:
    """Everything a learner needs to go on bit for bit."""

    tensors: dict[str, np.ndarray]  # weights, moments, normalisers, stored rows
    values: dict[str, Any]  # JSON: counters, generators, versions
    segments: list[Segment] = field(default_factory=list)  # rows of a replay, in order


class Learner(Protocol):
    """An algorithm. `act` never changes weights; `update` never touches the environment."""

    counters: Counters

    def describe(self) -> dict[str, Any]:
        """For the init line: algorithm, device, acting_device, threads, encoder, update_mode, parameters, …"""

    def act(self, observation: Observation, *, explore: bool) -> Action:
        """Actions for the rows of an observation; greedy unless `explore`."""

    def store(self, observation: Observation, action: Action, step: Step) -> None:
        """Open a row for each decision of (observation, action), then close those of `step.closed`."""

    def ready(self, step: Step) -> bool:
        """True when an update is due at this moment."""

    def update(self, step: Step) -> dict[str, float]:
        """Learn from what is stored. `step` is the last one stored: its observation bootstraps what goes on.

        Raises:
            NotFiniteError: with the batch, see `core.errors`.
        """

    def progress(self, done: float) -> None:
        """Tell schedules how much of the budget is used, 0 to 1."""

    def state(self) -> LearnerState:
        """A copy of everything."""

    def load(self, state: LearnerState, *, weights_only: bool = False) -> None:
        """Become what `state` describes; with `weights_only` take the policy and normalisers, keep the rest fresh."""

    def invalidate(self) -> None:
        """Forget captured or compiled forms that hold on to old storage (after a load or a world reload)."""

    def close(self) -> None:
        """Free what is held outside Python's memory."""
