"""The story of an episode told again, one vehicle at a time, from what the simulator showed in each step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from reference_view import ReferenceView

from opencda_marl.core.conflicts import Conflicts
from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState
from opencda_marl.settings.run import RunSettings

PARTS = {
    # every part, with weights that no sum of others gives by chance
    "delay": -0.11,
    "time": -0.013,
    "progress": 0.017,
    "progress_potential": 0.019,
    "arrival": 2.3,
    "collision": -20.9,
    "near_miss": -0.61,
    "yielding": 0.31,
    "acceleration": -0.0023,
    "jerk": -0.00029,
    "stop": -0.037,
}
OBJECTIVE = {
    "collision": 0,
    "near_miss": 0,
    "yielding": 0,
    **dict.fromkeys(("delay", "time", "progress", "progress_potential", "arrival"), 1),
    **dict.fromkeys(("acceleration", "jerk", "stop"), 2),
}


@dataclass
class Shown:
    """What a simulator showed in one step."""

    state: TrafficState
    events: Events
    command: Command | None


class Recorder:
    """A simulator that remembers everything that it says."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.info, self.roads = simulator.info, simulator.roads
        self.log: list[Shown] = []

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        state = self._simulator.reset(schedule, seed)
        self.log = [Shown(state.copy(), Events(), None)]
        return state

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        told = Command(command.target_speed.copy(), command.controlled.copy())
        state, events = self._simulator.step(command)
        self.log.append(Shown(state.copy(), events, told))
        return state, events

    def close(self) -> None:
        self._simulator.close()


@dataclass
class Life:
    """One vehicle of the policy."""

    identity: int
    slot: int
    entered: int  # step
    ended: int | None = None  # step
    ending: Ending | None = None
    decisions: list[int] = field(default_factory=list)  # steps


class ReferenceDrive:
    """Recomputes an episode from its log."""

    def __init__(
        self, settings: RunSettings, roads: Roads, conflicts: Conflicts, log: list[Shown], synchronous: bool
    ) -> None:
        self.settings, self.roads, self.zones, self.log = settings, roads, conflicts, log
        self.dt = settings.simulator.step_length
        self.lives = self._lives(synchronous)
        self._pairs: dict[int, tuple[dict[int, float], set[int], set[int]]] = {}

    def _lives(self, synchronous: bool) -> dict[int, Life]:
        lives: dict[int, Life] = {}
        for t, shown in enumerate(self.log):
            for slot in shown.events.departed:
                if shown.state.drivers[slot] == Driver.CAV:
                    identity = int(shown.state.ids[slot])
                    lives[identity] = Life(identity, int(slot), t)
            for identity, ending in zip(shown.events.ids.tolist(), shown.events.endings.tolist(), strict=True):
                if identity in lives:
                    lives[identity].ended, lives[identity].ending = t, Ending(ending)
        horizon = len(self.log) - 1
        # a vehicle that ended in the step in which it entered makes nobody act
        entries = {life.entered for life in lives.values() if life.ended is None or life.ended > life.entered}
        for life in lives.values():
            last = horizon if life.ended is None else min(life.ended, horizon)
            life.decisions = [
                t
                for t in range(life.entered, last)
                if t == life.entered or t % self.settings.decision_interval == 0 or (synchronous and t in entries)
            ]
        return lives

    def intervals(self, life: Life) -> list[dict[str, object]]:
        """What must be reported for each decision of a vehicle."""
        horizon = len(self.log) - 1
        end = horizon if life.ended is None else life.ended
        out = []
        for n, begin in enumerate(life.decisions):
            last = n == len(life.decisions) - 1
            until = end if last else life.decisions[n + 1]
            rewards, team = np.zeros(3), 0.0
            for t in range(begin + 1, until + 1):
                factor = self.settings.discount_per_second ** ((t - begin - 1) * self.dt)
                for name, value in self.parts(life, t).items():
                    rewards[OBJECTIVE[name]] += factor * PARTS[name] * value
                team += factor * self.team(t)
            ended_by = life.ending if last else None
            out.append(
                {
                    "rewards": rewards,
                    "team": team,
                    "elapsed": (until - begin) * self.dt,
                    "terminated": ended_by in (Ending.ARRIVED, Ending.COLLIDED),
                    "truncated": ended_by is Ending.REMOVED or (last and life.ending is None),
                    "until": until,
                }
            )
        return out

    def team(self, t: int) -> float:
        events, weights = self.log[t].events, self.settings.reward.team
        endings = events.endings.tolist()
        there = int(self.log[t].state.alive.sum()) + len(endings)
        happened = weights.arrival * endings.count(Ending.ARRIVED) + weights.collision * endings.count(Ending.COLLIDED)
        return happened / there if endings else 0.0

    def parts(self, life: Life, t: int) -> dict[str, float]:
        """Every part of one vehicle in the step that led to moment t."""
        before, now = self.log[t - 1].state.values[life.slot], self.log[t].state.values[life.slot]
        route = int(self.log[t].state.routes[life.slot])
        arrived = life.ended == t and life.ending is Ending.ARRIVED
        crashed = life.ended == t and life.ending is Ending.COLLIDED
        position = self.roads.length[route] if arrived else now[Field.PROGRESS]
        driven = position - before[Field.PROGRESS]
        rate, predicted, _ = self.pairs(t)
        gamma = self.settings.discount_per_second**self.dt
        return {
            "delay": self.dt - self._at_limits(before[Field.PROGRESS], position, route),
            "time": self.dt,
            "progress": driven,
            "progress_potential": gamma * (0.0 if crashed else position) - before[Field.PROGRESS],
            "arrival": float(arrived),
            "collision": float(crashed),
            "near_miss": rate.get(life.slot, 0.0) * self.dt,
            "yielding": self.dt * min(max(-now[Field.ACCEL] / 3.0, 0.0), 1.0) * (life.slot in predicted),
            "acceleration": now[Field.ACCEL] ** 2 * self.dt,
            "jerk": abs(now[Field.ACCEL] - before[Field.ACCEL]),
            "stop": self.dt * (now[Field.SPEED] < 0.1),
        }

    def _at_limits(self, begin: float, end: float, route: int) -> float:
        """Time from begin to end at the limits, by adding up millimetres."""
        bounds = [0.0, self.roads.stop_line[route], self.roads.junction_exit[route], 1e9]
        limits = [self.roads.limit_entry[route], self.roads.limit_inside[route], self.roads.limit_exit[route]]
        return sum(
            max(0.0, min(end, high) - max(begin, low)) / limit
            for low, high, limit in zip(bounds[:-1], bounds[1:], limits, strict=True)
        )

    def pairs(self, t: int) -> tuple[dict[int, float], set[int], set[int]]:
        """Rates by slot, slots with a predicted conflict, slots with a near-miss; at moment t."""
        if t not in self._pairs:
            self._pairs[t] = self._look(t)
        return self._pairs[t]

    def _look(self, t: int) -> tuple[dict[int, float], set[int], set[int]]:
        shown = self.log[t]
        state = shown.state.copy()
        state.alive[shown.events.slots] = True  # those that ended are looked at once more
        return look_at_pairs(self.settings, self.roads, self.zones, state)


def look_at_pairs(
    settings: RunSettings, roads: Roads, zones: Conflicts, state: TrafficState
) -> tuple[dict[int, float], set[int], set[int]]:
    """Rates by slot, slots with a predicted conflict, slots with a near-miss."""
    view = ReferenceView(settings, roads, zones, state)
    view.settings = RunSettings(scenario=settings.scenario)  # intent shared: rewards know the truth
    slots = [int(s) for s in np.flatnonzero(state.alive)]
    rate: dict[int, float] = {}
    predicted: set[int] = set()
    missed: set[int] = set()
    for i in slots:
        worst = 0.0
        found = [(view.ahead(i, j), j) for j in slots if j != i]
        ahead, leader = min(((gap, j) for gap, j in found if gap is not None), default=(None, None))
        closing = 0.0 if leader is None else view.v(i, Field.SPEED) - view.v(leader, Field.SPEED)
        if closing > 0:
            gap = max(ahead - view.length, 0.0)
            worst = max(worst, 1 - gap / closing / 1.5)
            stopping = [view.v(k, Field.SPEED) ** 2 / (2 * settings.scenario.vehicle.braking) for k in (i, leader)]
            if gap / closing < settings.reward.near_miss.time_to_collision and stopping[0] > gap + stopping[1]:
                missed |= {i, leader}
        for j in slots:
            zone = None if j == i else view.zone(i, j)
            if zone is None:
                continue
            if zone[0] > 0 >= zone[2] and view.v(i, Field.SPEED) > 0.1:
                worst = max(worst, 1 - zone[0] / view.v(i, Field.SPEED) / 1.5)
            if _meet(settings, view, i, j, zone):
                predicted |= {i, j}
                stops = [
                    d > 0 and view.v(k, Field.SPEED) ** 2 / (2 * settings.scenario.vehicle.braking) < d
                    for k, d in ((i, zone[0]), (j, zone[2]))
                ]
                if not any(stops):
                    missed |= {i, j}
        rate[i] = worst
    return rate, predicted, missed


def _meet(settings: RunSettings, view: ReferenceView, i: int, j: int, zone: tuple[float, ...]) -> bool:
    """Both fronts reach the zone close together, one of them soon, and not both are in it already."""
    if zone[0] <= 0 and zone[2] <= 0:
        return False
    times = []
    for k, d in ((i, zone[0]), (j, zone[2])):
        if view.v(k, Field.SPEED) <= 0.1:
            return False  # who stands does not reach it; or was there for ever
        times.append(d / view.v(k, Field.SPEED))
    limits = settings.reward.near_miss
    return math.fabs(times[0] - times[1]) < limits.time_gap and min(times) <= limits.horizon
