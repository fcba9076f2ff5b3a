"""Who may drive in: a first-come-first-served queue per entry lane, and the test for room.

Shared by the simulators, so that the same vehicles enter at the same moments as long as the traffic
before them is the same.
"""

from __future__ import annotations

from collections import deque

from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Driver, Field, Schedule, TrafficState
from opencda_marl.settings.traffic import VehicleSettings

__all__ = ["Admission", "room_needed"]

_HEADWAY = 1.0  # [s] SUMO's default tau: it demands this much time to the vehicle ahead before it lets one in
_REACTION = 0.05  # [s] slack for the steps in which SUMO brakes, see `room_needed`


def room_needed(speed: float, leader_speed: float, braking: float) -> float:
    """Distance between a vehicle that enters and the one ahead, from which it can always stop in time. [m]

    Both brake equally hard; the one that enters reacts a second late. The discrete steps in which SUMO
    computes the same thing need up to `_REACTION` times the speed more.

    Args:
        speed: of the vehicle that enters. [m/s]
        leader_speed: of the vehicle ahead. [m/s]
        braking: of both. [m/s^2]
    """
    reaction = speed * (_HEADWAY + _REACTION) + leader_speed * _REACTION
    return max(0.0, reaction + (speed * speed - leader_speed * leader_speed) / (2 * braking)) + 0.01


class Admission:
    """Queues of an episode. A vehicle is due at its scheduled time, then waits its turn on its lane.

    Args:
        roads: routes that start on the same lane share a queue.
        vehicle: length, gap, braking and departure speed.
        step_length: [s] how far the vehicle ahead may move before the entering one is placed.
    """

    def __init__(self, roads: Roads, vehicle: VehicleSettings, step_length: float) -> None:
        keys = sorted(set(zip(roads.entry_edge, roads.lane.tolist(), strict=True)))
        index = {key: lane for lane, key in enumerate(keys)}
        self._lane_of_route = [index[key] for key in zip(roads.entry_edge, roads.lane.tolist(), strict=True)]
        self._limits = roads.limit_entry.tolist()
        self._vehicle = vehicle
        self._dt = step_length
        self._lanes = len(keys)
        self._begin_arrays(None)

    def _begin_arrays(self, schedule: Schedule | None) -> None:
        self._times = [] if schedule is None else schedule.times.tolist()
        self._routes = [] if schedule is None else schedule.routes.tolist()
        self._factors = [] if schedule is None else schedule.speed_factors.tolist()
        self._human = [] if schedule is None else (schedule.drivers == Driver.HUMAN).tolist()
        self._next = 0  # first vehicle that is not due yet
        self._queues: list[deque[int]] = [deque() for _ in range(self._lanes)]
        self._pending: list[int | None] = [None] * self._lanes  # admitted, not yet seen on the road
        self._entrants: list[list[tuple[int, int]]] = [[] for _ in range(self._lanes)]  # (slot, id), first in first
        self.waiting = 0  # due but not yet in

    def begin(self, schedule: Schedule) -> None:
        """Forget the last episode."""
        self._begin_arrays(schedule)

    def departure_speed(self, index: int) -> float:
        """Speed at which a scheduled vehicle enters: the set one, within the limit as its driver reads it. [m/s]"""
        factor = self._factors[index] if self._human[index] else 1.0
        limit: float = self._limits[self._routes[index]]
        return min(self._vehicle.departure_speed, limit * factor)

    def admit(self, state: TrafficState, now: float, places: int) -> list[int]:
        """Vehicles of the schedule that may enter in the coming step, at most one a lane.

        Args:
            state: the traffic before the step.
            now: the time after it. [s]
            places: how many slots are free.
        """
        times = self._times
        while self._next < len(times) and times[self._next] <= now:
            self._queues[self._lane_of_route[self._routes[self._next]]].append(self._next)
            self._next += 1
            self.waiting += 1
        if self.waiting == 0:
            return []
        admitted: list[int] = []
        for lane, queue in enumerate(self._queues):
            if queue and self._pending[lane] is None and len(admitted) < places and self._has_room(lane, state):
                index = queue.popleft()
                self._pending[lane] = index
                admitted.append(index)
        return admitted

    def _has_room(self, lane: int, state: TrafficState) -> bool:
        entrants = self._entrants[lane]
        while entrants and not (state.alive[entrants[-1][0]] and state.ids[entrants[-1][0]] == entrants[-1][1]):
            entrants.pop()
        if not entrants:
            return True
        slot = entrants[-1][0]  # nobody overtakes: the last that entered is the rearmost
        vehicle, values = self._vehicle, state.values
        # After the coming step the vehicle ahead is at least here, at least so fast.
        speed = max(0.0, float(values[slot, Field.SPEED]) - vehicle.braking * self._dt)
        rear = float(values[slot, Field.PROGRESS]) + speed * self._dt - vehicle.length
        room = rear - vehicle.length - vehicle.min_gap
        return room >= room_needed(self.departure_speed(self._queues[lane][0]), speed, vehicle.braking)

    def entered(self, index: int, slot: int, identity: int) -> None:
        """A vehicle that was admitted is on the road now."""
        lane = self._lane_of_route[self._routes[index]]
        self._pending[lane] = None
        self._entrants[lane].append((slot, identity))
        self.waiting -= 1

    def longest_wait(self, now: float) -> float:
        """How long the vehicle that waits longest has been due. [s]"""
        if self.waiting == 0:
            return 0.0
        heads = [index for index in self._pending if index is not None]
        heads += [queue[0] for queue in self._queues if queue]
        return float(now - min(self._times[index] for index in heads))
