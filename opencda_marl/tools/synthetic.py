"""Rows that look like traffic to a learner, without traffic: for measuring acting and updates alone."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.spec import ActionSpec, Closed, Observation, ObservationSpec, Step
from opencda_marl.settings.offpolicy import DqnSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["Scene", "specs"]

_ROWS = (10, 13)  # neighbour rows of a vehicle, as on the bundled crossing at 25 vehicles


def specs(settings: RunSettings) -> tuple[ObservationSpec, ActionSpec]:
    """Of the full layout with at least as many neighbour rows as a scene has, and one continuous action.

    That is what the forms have that learners are measured against, whatever the profile's action is. DQN knows levels
    alone; it has those of the profile.
    """
    from opencda_marl.env.command import action_spec
    from opencda_marl.env.layouts import full_spec

    among_levels = isinstance(settings.learner, DqnSettings)
    action = action_spec(settings) if among_levels else ActionSpec("target_speed")
    return full_spec(max(settings.neighbours.max, _ROWS[1])), action


class Scene:
    """The same vehicles again and again, each time with other numbers.

    Args:
        spec: layout of the observations.
        vehicles: rows of each.
        seed: of the numbers.
    """

    def __init__(self, spec: ObservationSpec, vehicles: int, seed: int = 0) -> None:
        self._spec = spec
        self._rng = np.random.default_rng(seed)
        self._ids = np.arange(vehicles, dtype=np.int64)

    def observation(self) -> Observation:
        """What everybody sees."""
        rng, spec, rows = self._rng, self._spec, len(self._ids)
        few, many = (min(limit, spec.max_neighbours) for limit in _ROWS)
        counts: Int32[np.ndarray, " rows"] = rng.integers(few, many + 1, rows).astype(np.int32)
        ego = rng.normal(0.0, 0.5, (rows, len(spec.ego))).astype(np.float32)
        neighbours = rng.normal(0.0, 0.5, (rows, spec.max_neighbours, len(spec.neighbour))).astype(np.float32)
        neighbours[np.arange(spec.max_neighbours)[None, :] >= counts[:, None]] = 0.0
        scene = np.concatenate([ego.mean(0), ego.max(0)])
        return Observation(self._ids, self._ids, ego, neighbours, counts, scene)

    def nobody(self) -> Observation:
        """An observation without rows."""
        spec, none = self._spec, np.zeros(0, np.int64)
        return Observation(
            none,
            none,
            np.zeros((0, len(spec.ego)), np.float32),
            np.zeros((0, spec.max_neighbours, len(spec.neighbour)), np.float32),
            np.zeros(0, np.int32),
            np.zeros(spec.scene_size, np.float32),
        )

    def step(self, interval: int, step_length: float) -> Step:
        """Everybody's decision closes with some reward, and everybody must decide anew.

        Args:
            interval: simulator steps between two decisions.
            step_length: [s] of each.
        """
        rows = len(self._ids)
        closed = Closed(
            self._ids,
            self._ids,
            self._rng.normal(-0.05, 0.05, (rows, len(OBJECTIVES))).astype(np.float32),
            np.zeros(rows, np.float32),
            np.full(rows, interval * step_length, np.float32),
            np.zeros(rows, np.bool_),
            np.zeros(rows, np.bool_),
        )
        return Step(self.observation(), closed, self.nobody(), everyone=True, done=False, steps=interval)
