"""CARLA <-> arrays: one batch of controls, one tick, one snapshot read per step.

Nothing is asked of single actors in the loop. Who is alive says the snapshot, never the client's own objects. A
vehicle that enters is spawned after the tick of its step, where and as fast as SUMO would place it, so its first
movement is that of the next step. Use it through `RemoteSimulator`: the client can abort its process.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from opencda_marl.core.conflicts import conflict_zones
from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.frames import centre_of_front
from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.spans import Spans
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState, vehicle_name
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.traffic import CARLA_VERSION, DemandSettings, VehicleSettings
from opencda_marl.simulators.admission import Admission
from opencda_marl.simulators.boxes import touching
from opencda_marl.simulators.carla_control import MEMORY, READING, decide, follow, gains
from opencda_marl.simulators.carla_map import check_roads, entries
from opencda_marl.simulators.carla_reading import RAW, settle, take_in
from opencda_marl.simulators.carla_session import STAND_IN_SAID, Session
from opencda_marl.simulators.carla_vehicles import Arrival, Fleet, Place, Sensors
from opencda_marl.simulators.endings import End, book_ends
from opencda_marl.simulators.right_of_way import Drivers

__all__ = ["CarlaSimulator"]

_BELOW = 3.0  # [m] under the road: it fell off
_EMERGENCY = 9.0  # [m/s^2] braking of drivers that are not ours, as in SUMO
_REFERENCE, _PATH_ERROR = MEMORY.index("reference"), MEMORY.index("path_error")
_NONE = np.zeros(0, np.int64)
_NONE.setflags(write=False)  # shared by all events without any


class CarlaSimulator:
    """Traffic in a CARLA server; see `core.simulator.Simulator`.

    Args:
        roads: of the scenario's network.
        xodr: the same roads as an OpenDRIVE text.
        carla: server and controllers.
        vehicle: sizes and limits.
        demand: only what drives the vehicles that are not ours.
        step_length: [s]
        spans: gets "tick" (waiting for the server) and "read" (all else).

    Raises:
        BackendMissingError, SimulatorError, DeadlineError, ConfigError: see `Session`.
    """

    def __init__(
        self,
        roads: Roads,
        xodr: str,
        carla: CarlaSettings,
        vehicle: VehicleSettings,
        demand: DemandSettings,
        step_length: float,
        *,
        spans: Spans | None = None,
    ) -> None:
        self.roads, self._settings, self._vehicle, self._dt = roads, carla, vehicle, step_length
        self._spans = spans or Spans(enabled=False)
        slots = int(np.ceil(roads.length / (vehicle.length + vehicle.min_gap)).sum())  # as in SUMO
        self._session = Session(carla, xodr, step_length)
        try:
            self._heights = check_roads(self._session.carla, self._session.town, roads)
            self._entries = entries(roads, vehicle.length)
            self._fleet = Fleet(self._session, carla, slots, self._place(0, "measured", 0.0))
            self._sensors = Sensors(self._session) if carla.collisions == "sensor" else None
        except BaseException:
            self._session.close()
            raise
        self._gains = gains(
            carla,
            wheelbase=self._fleet.wheelbase,
            max_steer=self._fleet.max_steer,
            length=vehicle.length,
            dt=step_length,
        )
        self._limits = np.array([vehicle.acceleration, vehicle.braking, max(_EMERGENCY, vehicle.braking)])
        last = np.arange(roads.routes), roads.samples - 1
        heading = roads.points[*last, 2]
        self._route_end = np.column_stack([centre_of_front(roads.points[*last, :2], heading, vehicle.length), heading])
        self._admission = Admission(roads, vehicle, step_length)
        self._drivers = Drivers(roads, conflict_zones(roads), vehicle, demand, slots, step_length)
        self._state = TrafficState.empty(slots)
        self._schedule: Schedule | None = None
        self._closed = False
        self._episodes = 0  # since the world was loaded
        self.info = self._describe(slots)
        self._begin_arrays()
        self._compile()

    def _describe(self, slots: int) -> SimulatorInfo:
        session, fleet, vehicle = self._session, self._fleet, self._vehicle
        notes = [STAND_IN_SAID] if session.stands_in else []
        notes += session.notes
        if max(abs(fleet.length - vehicle.length), abs(fleet.width - vehicle.width)) > 0.3:
            notes.append(
                f"{self._settings.blueprint} is {fleet.length:.2f} by {fleet.width:.2f} m, and scenario.vehicle says "
                f"{vehicle.length:g} by {vehicle.width:g} m: progress and collisions go by the latter"
            )
        return SimulatorInfo(
            backend="carla (stand-in, a test double)" if session.stands_in else "carla",
            versions={"client": CARLA_VERSION, "server": session.server_version},
            step_length=self._dt,
            slots=slots,
            notes=tuple(notes),
        )

    def _begin_arrays(self) -> None:
        slots = self.info.slots
        self._pending: list[Arrival] = []  # admitted, not yet on the road
        self._free = list(range(slots))  # a heap: low slots first
        self._ended: list[int] = []  # slots to be freed in the next step
        self._rows: Int64[np.ndarray, " rows"] = np.zeros(0, np.int64)  # slots of vehicles on the road, ascending
        self._reading = np.zeros((slots, len(READING)))
        self._memory = np.zeros((slots, len(MEMORY)))
        self._progress = np.zeros(slots)
        self._target = np.zeros(slots)  # [m/s] in this step
        self._commanded = np.zeros(slots, np.bool_)
        self._fresh = np.zeros(slots, np.bool_)
        self._pedals = np.zeros((slots, 3))
        self._pairs = np.zeros((slots, 2), np.int64)

    def _compile(self) -> None:
        """Now, not in somebody's first step."""
        rows = np.zeros(1, np.int64)
        self._take_in(rows, np.zeros((1, len(RAW))))
        self._drivers.drive(rows, self._state, self._commanded, self._target)
        self._control(rows)
        touching(rows, self._reading, 1.0, 1.0, self._pairs)
        self._begin_arrays()
        self._state.values[:] = 0.0

    # ---------------------------------------------------------------- an episode's beginning and end

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        """Begin an episode, see `core.simulator.Simulator`."""
        if self._closed:
            raise SimulatorError("the simulator was closed; make a new one")
        self._schedule = None
        every = self._settings.world_reload_every
        if every and self._episodes >= every:
            self._fleet.forget()
            self._session.load()
            self._episodes = 0
            self._state.world += 1
        else:
            self._fleet.clear(self._sensors)
        self._fleet.weigh()
        self._episodes += 1
        state, fresh = self._state, TrafficState.empty(self.info.slots)
        state.step, state.time = 0, 0.0
        for name in ("ids", "alive", "drivers", "routes", "values"):
            getattr(state, name)[...] = getattr(fresh, name)
        self._admission.begin(schedule)
        self._drivers.begin(seed)
        self._begin_arrays()
        self._schedule = schedule
        return state

    def close(self) -> None:
        """Leave the server asynchronous and empty of ours; may be called twice."""
        if not self._closed:
            self._closed = True
            self._schedule = None
            self._fleet.leave(self._sensors)
            self._session.close()

    # ---------------------------------------------------------------- a step

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        """One batch of controls, one tick, one snapshot; see `core.simulator.Simulator`."""
        if self._schedule is None:
            raise SimulatorError("there is no episode to step in; call reset first")
        spans = self._spans
        with spans("read"):
            self._free_ended()
            self._admit()
            commands = self._decide(command)
        with spans("tick"):
            if commands:
                self._session.batch(commands)
            snapshot = self._session.tick()
        with spans("read"):
            return self._state, self._read(snapshot)

    def _free_ended(self) -> None:
        for slot in self._ended:
            self._state.ids[slot] = -1
            self._state.drivers[slot] = Driver.NONE
            heapq.heappush(self._free, slot)
        self._ended = []

    def _admit(self) -> None:
        now = (self._state.step + 1) * self._dt
        for index in self._admission.admit(self._state, now, len(self._free) - len(self._pending)):
            self._pending.append(Arrival(index))

    def _decide(self, command: Command) -> list[Any]:
        rows = self._rows
        np.copyto(self._commanded, command.controlled)
        np.copyto(self._target, command.target_speed)
        wanted = self._target[rows][self._commanded[rows]]
        if not (np.isfinite(wanted).all() and (wanted >= 0.0).all()):
            self._refuse()
        if not len(rows):
            return []
        self._drivers.drive(rows, self._state, self._commanded, self._target)
        self._control(rows)
        return self._fleet.controls(rows.tolist(), self._pedals[: len(rows)].tolist())

    def _control(self, rows: Int64[np.ndarray, " rows"]) -> None:
        ours, pedals = self._commanded, self._pedals
        decide(rows, self._reading, self._memory, self._target, ours, self._limits, self._gains, pedals)

    def _refuse(self) -> None:
        self._schedule = None
        for slot in self._rows[self._commanded[self._rows]].tolist():
            speed = float(self._target[slot])
            if not 0.0 <= speed < math.inf:
                name = vehicle_name(int(self._state.ids[slot]))
                raise SimulatorError(f"vehicle {name} was told to drive {speed} m/s, which is no speed")

    def _take_in(self, rows: Int64[np.ndarray, " rows"], raw: Float64[np.ndarray, "rows 6"]) -> tuple[int, int]:
        roads, vehicle = self.roads, self._vehicle
        take_in(rows, raw, roads.origin, self._fleet.box, vehicle.length, self._dt, self._fresh, self._reading)
        follow(
            rows,
            self._reading,
            self._memory,
            self._progress,
            self._state.routes,
            roads.points,
            roads.samples,
            roads.length,
            roads.spacing,
            vehicle.length,
            self._settings.steering.preview,
        )
        reference = self._memory[:, _REFERENCE]
        return settle(rows, self._reading, self._progress, reference, self._commanded, self._dt, self._state.values)

    def _read(self, snapshot: Any) -> Events:
        state = self._state
        state.step += 1
        state.time = state.step * self._dt
        rows, raw, lost = self._fleet.read(self._rows.tolist(), snapshot)
        commanded, overridden = self._take_in(rows, raw) if len(rows) else (0, 0)
        ends: list[End] = [(slot, Ending.REMOVED, -1, "vanished from CARLA") for slot in lost]
        ends += self._finished(rows, raw)
        if len(rows) > 1 or self._sensors is not None:
            ends += self._collided(rows, {end[0] for end in ends}, snapshot.frame)
        if ends or self._pending:
            gone = {end[0] for end in ends}
            entered, refused = self._come_and_go(gone)
            self._rows = np.array(sorted({*self._rows.tolist()} - gone | set(entered)), np.int64)
        else:
            entered, refused = [], 0
        waiting = self._admission.waiting
        events = Events(
            ids=_NONE,
            slots=_NONE,
            endings=_NONE,
            partners=_NONE,
            departed=np.array(sorted(entered), np.int64) if entered else _NONE,
            waiting=waiting,
            longest_wait=self._admission.longest_wait(state.time) if waiting else 0.0,
            commanded=commanded,
            overridden=overridden,
            refused=refused,
        )
        if ends:
            self._ended = book_ends(state, ends, events)
        return events

    # ---------------------------------------------------------------- coming and going

    def _finished(self, rows: Int64[np.ndarray, " rows"], raw: Float64[np.ndarray, "rows 6"]) -> list[End]:
        """Those at the end of their route, and those that are not on it any more."""
        routes = self._state.routes[rows]
        arrived = self._progress[rows] >= self.roads.length[routes]
        astray = np.abs(self._memory[rows, _PATH_ERROR]) > self._settings.off_route
        fallen = raw[:, RAW.index("z")] < self._heights[routes] - _BELOW
        if not (arrived | astray | fallen).any():
            return []
        ends: list[End] = []
        values = self._state.values
        for i in np.flatnonzero(arrived | astray | fallen).tolist():
            slot, route = int(rows[i]), int(routes[i])
            if fallen[i]:
                ends.append((slot, Ending.REMOVED, -1, "fell off the road"))
            elif astray[i]:
                away = abs(float(self._memory[slot, _PATH_ERROR]))
                ends.append((slot, Ending.REMOVED, -1, f"strayed {away:.1f} m from its route"))
            else:
                values[slot, Field.PROGRESS] = self.roads.length[route]
                values[slot, [Field.X, Field.Y, Field.HEADING]] = self._route_end[route]
                ends.append((slot, Ending.ARRIVED, -1, "arrived"))
        return ends

    def _collided(self, rows: Int64[np.ndarray, " rows"], gone: set[int], frame: int) -> list[End]:
        """Both parties of each crash end, once each, with the first crash found for them."""
        if self._sensors is not None:
            pairs = self._fleet.slots_of(self._sensors.collect(frame))
        else:
            vehicle = self._vehicle
            count = touching(rows, self._reading, vehicle.length, vehicle.width, self._pairs)
            pairs = [(a, b) for a, b in self._pairs[: min(count, len(self._pairs))].tolist()]
        partner_of: dict[int, int] = {}
        for one, other in pairs:
            if one in gone or other in gone:
                continue
            partner_of.setdefault(one, other)
            if other >= 0:
                partner_of.setdefault(other, one)
        ends: list[End] = []
        for slot, other in partner_of.items():
            partner = int(self._state.ids[other]) if other >= 0 else -1
            with_whom = vehicle_name(partner) if other >= 0 else "something that is no vehicle of ours"
            ends.append((slot, Ending.COLLIDED, partner, f"collided with {with_whom}"))
        return ends

    def _come_and_go(self, gone: set[int]) -> tuple[list[int], int]:
        """Destroy those that ended, spawn those that may enter; returns new slots, and how many tries were refused."""
        assert self._schedule is not None
        schedule = self._schedule
        places = []
        for arrival in self._pending:
            name = vehicle_name(int(schedule.ids[arrival.index]))
            speed = self._admission.departure_speed(arrival.index)
            places.append(self._place(int(schedule.routes[arrival.index]), name, speed))
        spawned, refused = self._fleet.exchange(sorted(gone), self._pending, places, self._sensors)
        entered = []
        for arrival, actor in spawned:
            entered.append(self._enter(arrival.index, actor))
        came = {id(arrival) for arrival, _ in spawned}
        self._pending = [arrival for arrival in self._pending if id(arrival) not in came]
        return entered, refused

    def _place(self, route: int, name: str, speed: float) -> Place:
        begin = self._entries
        x, y = begin.location[route].tolist()
        return Place(name, x, y, float(self._heights[route]), float(begin.yaw[route]), speed)

    def _enter(self, index: int, actor: int) -> int:
        assert self._schedule is not None
        schedule, state = self._schedule, self._state
        slot = heapq.heappop(self._free)
        route = int(schedule.routes[index])
        speed, begin = self._admission.departure_speed(index), self._entries
        state.ids[slot] = schedule.ids[index]
        state.alive[slot] = True
        state.drivers[slot] = schedule.drivers[index]
        state.routes[slot] = route
        values = state.values[slot]
        values[:] = 0.0
        place = (begin.x[route], begin.y[route], begin.heading[route])
        values[[Field.X, Field.Y, Field.HEADING]] = place
        values[Field.SPEED], values[Field.PROGRESS] = speed, self._vehicle.length
        values[Field.SCHEDULED_AT], values[Field.DEPARTED_AT] = schedule.times[index], state.time
        self._reading[slot] = (*place, speed, 0.0)
        self._memory[slot] = (speed, speed, 0.0, 0.0, begin.heading[route], 0.0, 0.0)
        self._progress[slot] = self._vehicle.length
        self._fresh[slot] = True
        self._fleet.board(slot, actor)
        self._drivers.enter(slot, schedule, index)
        self._admission.entered(index, slot, int(schedule.ids[index]))
        return slot
