"""A simulator without physics: vehicles obey at once, and end when a script says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from opencda_marl.core.conflicts import conflict_zones
from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState, vehicle_id
from opencda_marl.settings.run import RunSettings
from opencda_marl.simulators.network import find_network, load_roads

ROADS = load_roads(find_network("intersection"))
CONFLICTS = conflict_zones(ROADS)
STEP = 0.05


def pose(roads: Roads, route: int, progress: float, length: float = 5.0) -> tuple[float, float, float]:
    """Centre and heading of a vehicle whose front bumper is at `progress`."""
    place = min(max(progress - length / 2, 0.0), float(roads.length[route])) / roads.spacing
    k = min(int(place), int(roads.samples[route]) - 2)
    (x, y, heading), (x2, y2, heading2) = roads.points[route, k].tolist(), roads.points[route, k + 1].tolist()
    turned = (heading2 - heading + np.pi) % (2 * np.pi) - np.pi
    t = min(place - k, 1.0)
    return x + t * (x2 - x), y + t * (y2 - y), heading + t * turned


def schedule_of(times: np.ndarray, routes: np.ndarray, drivers: np.ndarray | None = None, episode: int = 0) -> Schedule:
    """A schedule of vehicles that the policy drives, unless told otherwise."""
    order = np.argsort(times, kind="stable")
    count = len(times)
    kinds = np.full(count, Driver.CAV) if drivers is None else drivers
    return Schedule(
        episode=episode,
        rate_vph=300.0,
        ids=np.array([vehicle_id(episode, k) for k in range(count)], np.int64),
        times=np.asarray(times, np.float64)[order],
        routes=np.asarray(routes)[order].astype(np.int16),
        speed_factors=np.ones(count),
        drivers=np.asarray(kinds)[order].astype(np.int8),
    )


def spaced_schedule(rng: np.random.Generator, count: int) -> Schedule:
    """Vehicles that enter each lane at least 2.5 s apart."""
    times = np.concatenate([np.cumsum(2.5 + rng.exponential(4.0, count // 12)) for _ in range(12)])
    return schedule_of(times, np.repeat(np.arange(12), count // 12))


def sharing(state: TrafficState) -> int:
    """Pairs of vehicles that are both in their common zone, or that touch on their lane."""
    rows, found = state.rows().tolist(), 0
    for i in rows:
        for j in rows:
            a, b = state.routes[i], state.routes[j]
            mine, its = state.values[i, Field.PROGRESS], state.values[j, Field.PROGRESS]
            if i < j and CONFLICTS.exists[a, b]:
                inside = CONFLICTS.entry[a, b] < mine < CONFLICTS.exit[a, b] + 5.0
                found += inside and CONFLICTS.entry[b, a] < its < CONFLICTS.exit[b, a] + 5.0
            elif i < j and a == b:
                found += abs(mine - its) < 5.0
    return found


class ScriptedSimulator:
    """Drives along the routes at the commanded speed, as far as acceleration allows.

    Args:
        settings: vehicle and step length.
        script: `(identity, age in steps) -> Ending or None`, asked each step; None lets it drive on. A vehicle also
            arrives at the end of its route.
        slots: capacity.
        noise: [m/s] standard deviation of what is added to each speed.
    """

    def __init__(
        self,
        settings: RunSettings,
        script: Callable[[int, int], Ending | None] = lambda _identity, _age: None,
        slots: int = 64,
        noise: float = 0.0,
    ) -> None:
        self.info = SimulatorInfo("scripted", step_length=settings.simulator.step_length, slots=slots)
        self.roads = ROADS
        self._settings = settings
        self._script = script
        self._noise = noise
        self._state = TrafficState.empty(slots)
        self._age = np.zeros(slots, np.int64)
        self.commands: list[tuple[np.ndarray, np.ndarray]] = []

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        state = self._state
        state.step, state.time = 0, 0.0
        state.ids[:], state.alive[:], state.values[:] = -1, False, 0.0
        self._schedule, self._next = schedule, 0
        self._random = np.random.default_rng(seed)
        self.commands = []
        return state

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        state, values = self._state, self._state.values
        dt, vehicle = self._settings.simulator.step_length, self._settings.scenario.vehicle
        self.commands.append((command.target_speed.copy(), command.controlled.copy()))
        state.ids[~state.alive] = -1  # freed one step after the end
        state.step += 1
        state.time = state.step * dt
        ended = []
        for slot in state.rows():
            before = values[slot, Field.SPEED]
            wish = command.target_speed[slot] if command.controlled[slot] else 12.0
            wish += self._noise * self._random.standard_normal() if self._noise else 0.0
            speed = np.clip(wish, max(before - vehicle.braking * dt, 0.0), before + vehicle.acceleration * dt)
            self._place(slot, values[slot, Field.PROGRESS] + speed * dt, speed, (speed - before) / dt)
            self._age[slot] += 1
            ending = self._script(int(state.ids[slot]), int(self._age[slot]))
            if ending is None and values[slot, Field.PROGRESS] >= self.roads.length[state.routes[slot]]:
                ending = Ending.ARRIVED
            if ending is not None:
                state.alive[slot] = False
                ended.append((slot, ending))
        departed = self._enter()
        for slot in departed.tolist():  # it may end in the very step in which it enters
            ending = self._script(int(state.ids[slot]), 0)
            if ending is not None:
                state.alive[slot] = False
                ended.append((slot, ending))
        slots = np.array([slot for slot, _ in ended], np.int64)
        events = Events(
            ids=state.ids[slots].copy(),
            slots=slots,
            endings=np.array([int(ending) for _, ending in ended], np.int64),
            partners=np.full(len(ended), -1, np.int64),
            reasons=tuple("scripted" for _ in ended),
            departed=departed,
            waiting=int((self._schedule.times <= state.time).sum()) - self._next,
            commanded=int(command.controlled.sum()),
        )
        return state, events

    def _enter(self) -> np.ndarray:
        state, schedule, slots = self._state, self._schedule, []
        while self._next < len(schedule.ids) and schedule.times[self._next] <= state.time:
            free = np.flatnonzero((state.ids < 0) & ~state.alive)
            if not len(free):
                break
            slot, k = free[0], self._next
            state.ids[slot], state.alive[slot] = schedule.ids[k], True
            state.routes[slot], state.drivers[slot] = schedule.routes[k], schedule.drivers[k]
            self._age[slot] = 0
            self._place(slot, 5.1, self._settings.scenario.vehicle.departure_speed, 0.0)
            state.values[slot, Field.SCHEDULED_AT] = schedule.times[k]
            state.values[slot, Field.DEPARTED_AT] = state.time
            slots.append(slot)
            self._next += 1
        return np.array(slots, np.int64)

    def _place(self, slot: int, progress: float, speed: float, acceleration: float) -> None:
        values = self._state.values[slot]
        values[Field.PROGRESS], values[Field.SPEED], values[Field.ACCEL] = progress, speed, acceleration
        values[Field.X], values[Field.Y], values[Field.HEADING] = pose(
            self.roads, int(self._state.routes[slot]), progress
        )

    def close(self) -> None:
        pass


def random_state(rng: np.random.Generator, count: int, slots: int = 40, roads: Roads = ROADS) -> TrafficState:
    """Vehicles anywhere on the crossing, of any driver, in slots in random order."""
    state = TrafficState.empty(slots)
    state.step, state.time = 900, 45.0
    for index, slot in enumerate(rng.permutation(slots)[:count]):
        route = int(rng.integers(roads.routes))
        # half of them near the junction, where everything happens
        low, high = (70.0, 125.0) if rng.random() < 0.5 else (0.0, float(roads.length[route]))
        progress = rng.uniform(low, high)
        state.ids[slot], state.alive[slot] = vehicle_id(3, index), True
        state.routes[slot] = route
        state.drivers[slot] = rng.choice([Driver.CAV, Driver.CAV, Driver.HUMAN, Driver.RULE])
        values = state.values[slot]
        values[Field.PROGRESS] = progress
        values[Field.X], values[Field.Y], values[Field.HEADING] = pose(roads, route, progress)
        values[Field.SPEED] = rng.choice([0.0, rng.uniform(0, 18)])
        values[Field.ACCEL] = rng.uniform(-4.5, 2.6)
        values[Field.DEPARTED_AT] = rng.uniform(10, 45)
        values[Field.SCHEDULED_AT] = values[Field.DEPARTED_AT] - rng.uniform(0, 3)
    return state
