"""A crossing without physics on which an environment runs once before the first real step, so that all is compiled.

One vehicle a route drives at 5 m/s whatever it is told; the first arrives, the second and third collide, the fourth is
taken out.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64

from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState, vehicle_id

__all__ = ["Rehearsal"]

_SPEED = 5.0  # [m/s]
_ENDINGS = (Ending.ARRIVED, Ending.COLLIDED, Ending.COLLIDED, Ending.REMOVED)
_LAST = 4  # step in which those end


class Rehearsal:
    """See `core.simulator.Simulator`.

    Args:
        roads: of the run.
        slots: capacity of the run's simulator.
        step_length: [s]
    """

    def __init__(self, roads: Roads, *, slots: int, step_length: float) -> None:
        self.roads = roads
        self.info = SimulatorInfo("rehearsal", step_length=step_length, slots=slots)
        self._state = TrafficState.empty(slots)
        self._count = min(slots, max(roads.routes, len(_ENDINGS) + 2))

    def traffic(self, episode: int) -> tuple[Schedule, int, int]:
        """A vehicle on every route, at once."""
        numbers = np.arange(self._count)
        drivers = np.full(self._count, int(Driver.CAV), np.int8)
        drivers[-1] = Driver.RULE
        schedule = Schedule(
            episode=episode,
            rate_vph=0.0,
            ids=np.array([vehicle_id(episode, number) for number in numbers.tolist()], np.int64),
            times=np.zeros(self._count),
            routes=(numbers % self.roads.routes).astype(np.int16),
            speed_factors=np.ones(self._count),
            drivers=drivers,
        )
        return schedule, 1, 0

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:  # noqa: ARG002 - nothing is random
        """See `core.simulator.Simulator`."""
        self._schedule = schedule
        self._state = TrafficState.empty(self.info.slots)
        return self._state

    def step(self, command: Command) -> tuple[TrafficState, Events]:  # noqa: ARG002 - nobody obeys
        """See `core.simulator.Simulator`."""
        state, dt = self._state, self.info.step_length
        state.step += 1
        state.time = state.step * dt
        events = Events()
        if state.step == 1:
            events.departed = self._enter()
        state.ids[~state.alive] = -1
        rows = state.rows()
        state.values[rows, Field.PROGRESS] += _SPEED * dt
        if state.step == _LAST:
            slots = rows[: min(len(_ENDINGS), len(rows) - 2)]
            state.alive[slots] = False
            events.slots, events.ids = slots, state.ids[slots]
            events.endings = np.array(_ENDINGS[: len(slots)], np.int64)
            events.partners = np.full(len(slots), -1, np.int64)
            events.reasons = ("rehearsed",) * len(slots)
        return state, events

    def _enter(self) -> Int64[np.ndarray, " departed"]:
        state, slots = self._state, np.arange(self._count)
        state.ids[slots], state.alive[slots] = self._schedule.ids, True
        state.routes[slots], state.drivers[slots] = self._schedule.routes, self._schedule.drivers
        places = self.roads.points[state.routes[slots], 0]
        state.values[slots, Field.X], state.values[slots, Field.Y] = places[:, 0], places[:, 1]
        state.values[slots, Field.HEADING] = places[:, 2]
        state.values[slots, Field.SPEED] = _SPEED
        state.values[slots, Field.PROGRESS] = 5.0
        return slots

    def close(self) -> None:
        """See `core.simulator.Simulator`."""
