"""The tracks of an episode, as one long table: a row for each vehicle and step."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64, Int64

from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.spec import Closed
from opencda_marl.core.state import Events, TrafficState

__all__ = ["Trajectory"]


class Trajectory:
    """Collects what a simulator showed, step by step."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._rows: list[int] = []  # vehicles in each step
        self._ids: list[Int64[np.ndarray, " rows"]] = []
        self._routes: list[np.ndarray] = []
        self._drivers: list[np.ndarray] = []
        self._values: list[Float64[np.ndarray, "rows fields"]] = []
        self._ends: list[tuple[int, int, int, int]] = []  # step, id, ending, partner
        self._earned: list[tuple[int, Int64[np.ndarray, " closed"], Float32[np.ndarray, "closed objectives"]]] = []

    def add(self, state: TrafficState, events: Events) -> None:
        """One step: every living vehicle, and the last values of those that ended in it."""
        shown = np.concatenate([state.rows(), events.slots])
        self._steps.append(state.step)
        self._rows.append(len(shown))
        self._ids.append(state.ids[shown])
        self._routes.append(state.routes[shown])
        self._drivers.append(state.drivers[shown])
        self._values.append(state.values[shown])
        for identity, ending, partner in zip(events.ids, events.endings, events.partners, strict=True):
            self._ends.append((state.step, int(identity), int(ending), int(partner)))

    def earn(self, step: int, closed: Closed) -> None:
        """What decisions that ended in this step have brought."""
        self._earned.append((step, closed.ids, closed.rewards))

    def arrays(self) -> dict[str, np.ndarray]:
        """Columns of equal length: step, id, route, driver, values [rows, fields]; of the ends (end_…); of decisions
        (reward_step, in which one ended, reward_id, reward [decisions, objectives]).
        """
        if not self._ids:
            return {}
        ends = np.array(self._ends, np.int64).reshape(-1, 4)
        return {
            "step": np.repeat(np.array(self._steps, np.int32), self._rows),
            "id": np.concatenate(self._ids),
            "route": np.concatenate(self._routes),
            "driver": np.concatenate(self._drivers),
            "values": np.concatenate(self._values).astype(np.float32),
            "end_step": ends[:, 0].astype(np.int32),
            "end_id": ends[:, 1].copy(),
            "end_ending": ends[:, 2].astype(np.int8),
            "end_partner": ends[:, 3].copy(),
            **self._rewards(),
        }

    def _rewards(self) -> dict[str, np.ndarray]:
        steps = [np.full(len(ids), step, np.int32) for step, ids, _ in self._earned]
        nobody = np.zeros((0, len(OBJECTIVES)), np.float32)  # where no policy drives no decision ends
        return {
            "reward_step": np.concatenate([np.zeros(0, np.int32), *steps]),
            "reward_id": np.concatenate([np.zeros(0, np.int64), *(ids for _, ids, _ in self._earned)]),
            "reward": np.concatenate([nobody, *(rewards for _, _, rewards in self._earned)]),
        }
