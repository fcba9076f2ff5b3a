"""The figures of an episode, counted as it goes; `core.metrics` says what each means."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.metrics import EARLY_MARGIN, EpisodeRecord
from opencda_marl.core.spec import Observation
from opencda_marl.core.state import Accounting, Ending, Events, Field, Schedule, TrafficState
from opencda_marl.env.near_miss import Proximity
from opencda_marl.env.reward import RewardParts
from opencda_marl.settings.run import RunSettings

__all__ = ["Book"]

_STANDS, _MOVES = 0.1, 1.0  # [m/s] a stop begins below the one and is over above the other


class Book:
    """Counts one episode.

    Args:
        settings: of the run.
        free_flow: [s] of each route, see `Roads.free_flow_time`.
        schedule: of the episode.
        seed: of its traffic, for the record.
        parts: of the reward.
        measured: are near-misses looked for?
        comfort: are stops and jerk measured? It costs a few microseconds a step, so training goes without.
    """

    def __init__(
        self,
        settings: RunSettings,
        free_flow: list[float],
        schedule: Schedule,
        seed: int,
        parts: RewardParts,
        *,
        measured: bool,
        comfort: bool = False,
    ) -> None:
        step_length = settings.simulator.step_length
        self.record = EpisodeRecord(
            episode=schedule.episode,
            seed=seed,
            rate_vph=schedule.rate_vph,
            near_missed=0 if measured else None,
            stops=0 if comfort else None,
            returns=[0.0] * parts.matrix.shape[1],
            parts=dict.fromkeys(parts.names, 0.0),
        )
        self._schedule, self._parts, self._measured = schedule, parts, measured
        self._early = settings.max_steps * step_length - EARLY_MARGIN  # [s] departed later: not counted as early
        self._free_flow = free_flow
        self._missed: set[int] = set()  # ids
        self._waiting = 0
        self._step_length = step_length
        self._standing = np.zeros(0, np.bool_)  # [slots]
        self._accel = np.zeros(0)  # [slots] of the step before, m/s^2
        self._there = np.zeros(0, np.bool_)  # [slots] who was there in the step before

    def count(self, state: TrafficState, events: Events, proximity: Proximity) -> None:
        """One step."""
        record = self.record
        record.commanded += events.commanded
        record.overridden += events.overridden
        record.refused += events.refused
        self._waiting = events.waiting
        if events.waiting:
            record.longest_wait = max(record.longest_wait, events.longest_wait)
        if self._measured and proximity.any_missed:
            self._missed.update(state.ids[proximity.missed].tolist())
        if record.stops is not None:
            self._feel(state, events)
        if len(events.departed):
            record.departed += len(events.departed)
            record.departed_early += int((state.values[events.departed, Field.DEPARTED_AT] < self._early).sum())
        if len(events.slots):
            for slot, ending in zip(events.slots.tolist(), events.endings.tolist(), strict=True):
                self._end(state, slot, Ending(ending))

    def _feel(self, state: TrafficState, events: Events) -> None:
        """Stops and jerk of those that were there in the step before, too."""
        if len(self._standing) != len(state.alive):
            self._standing, self._there = np.zeros_like(state.alive), np.zeros_like(state.alive)
            self._accel = np.zeros(len(state.alive))
        record = self.record
        self._there[events.departed] = False  # somebody else was in that slot
        self._standing[events.departed] = False
        stayed = state.alive & self._there
        accel, speed = state.values[:, Field.ACCEL], state.values[:, Field.SPEED]
        record.jerk_sum += float(np.abs(accel[stayed] - self._accel[stayed]).sum()) / self._step_length
        record.jerk_steps += int(stayed.sum())
        stands = stayed & (speed < _STANDS) & ~self._standing
        record.stops = (record.stops or 0) + int(stands.sum())
        self._standing = (self._standing | stands) & (speed <= _MOVES)
        self._accel[:] = accel
        self._there = state.alive.copy()

    def _end(self, state: TrafficState, slot: int, ending: Ending) -> None:
        record, accounting = self.record, self.record.accounting
        if ending is Ending.COLLIDED:
            accounting.collided += 1
        elif ending is Ending.REMOVED:
            accounting.removed += 1
        else:
            accounting.arrived += 1
            scheduled, departed = state.values[slot, [Field.SCHEDULED_AT, Field.DEPARTED_AT]].tolist()
            free = self._free_flow[state.routes[slot]]
            record.arrived_early += departed < self._early
            record.travel_time_sum += state.time - departed
            record.delay_inside_sum += state.time - departed - free
            record.delay_sum += state.time - scheduled - free

    def count_rows(self, observation: Observation) -> None:
        """Vehicles that act, and how many others they see."""
        self.record.acting_rows += len(observation)
        self.record.neighbour_rows += float(observation.counts.sum())

    def add_lives(self, lives: Float64[np.ndarray, "vehicles parts"]) -> None:
        """Everything that vehicles earned between their first decision and their end, undiscounted."""
        record = self.record
        record.returned += len(lives)
        total = lives.sum(axis=0)  # [parts]
        for objective, gained in enumerate((total @ self._parts.matrix).tolist()):
            record.returns[objective] += gained
        for name, weight, amount in zip(self._parts.names, self._parts.weights.tolist(), total.tolist(), strict=True):
            record.parts[name] += weight * amount

    def finish(self, state: TrafficState) -> None:
        """The episode is over."""
        record = self.record
        record.steps, record.seconds = state.step, state.time
        if self._measured:
            record.near_missed = len(self._missed)
        due = int((self._schedule.times <= state.time).sum())  # the others were never to come in this episode
        ended = record.accounting
        record.accounting = Accounting(
            scheduled=due,
            waiting=self._waiting,
            running=int(state.alive.sum()),
            arrived=ended.arrived,
            collided=ended.collided,
            removed=ended.removed,
        )
