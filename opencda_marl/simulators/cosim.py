"""SUMO and CARLA at once: SUMO lets vehicles in and drives those that nobody commands, CARLA drives the commanded ones.

Both have everybody: what CARLA drives is put into SUMO where CARLA has it, so that SUMO's drivers see it; what SUMO
drives is put into CARLA likewise. A step is CARLA's tick and then SUMO's, so in CARLA the others stand where they were
at the end of the last step. Who is admitted and who has arrived, SUMO says; who has crashed, SUMO and the boxes.

A vehicle that CARLA refuses to spawn is driven by SUMO until it takes it; that is counted, and never fatal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64

from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.frames import carla_location, carla_yaw, front_of_centre
from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.spans import Spans
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState, vehicle_name
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.traffic import CARLA_VERSION, DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.boxes import touching
from opencda_marl.simulators.carla_control import MEMORY, READING, decide, follow, gains
from opencda_marl.simulators.carla_map import check_roads, entries
from opencda_marl.simulators.carla_reading import settle, take_in
from opencda_marl.simulators.carla_session import STAND_IN_SAID, Session
from opencda_marl.simulators.carla_vehicles import Fleet, Place
from opencda_marl.simulators.sumo import SumoSimulator

__all__ = ["CosimSimulator"]

_LONGEST_PAUSE = 20  # steps between two tries to spawn a vehicle
_REFERENCE, _PATH_ERROR = MEMORY.index("reference"), MEMORY.index("path_error")


class CosimSimulator:
    """See `core.simulator.Simulator`; to be used through `RemoteSimulator`, as CARLA's alone.

    Args:
        roads: of the scenario's network.
        xodr: the same roads as an OpenDRIVE text.
        carla: server and controllers.
        simulator: SUMO's step length; its backend is chosen as for SUMO alone.
        vehicle: sizes and limits.
        demand: what drives the others.
        spans: gets "tick" (both simulators) and "read" (all else).
    """

    def __init__(
        self,
        roads: Roads,
        xodr: str,
        carla: CarlaSettings,
        simulator: SimulatorSettings,
        vehicle: VehicleSettings,
        demand: DemandSettings,
        *,
        spans: Spans | None = None,
    ) -> None:
        self.roads, self._settings, self._vehicle = roads, carla, vehicle
        self._dt = simulator.step_length
        self._spans = spans or Spans(enabled=False)
        self._sumo = SumoSimulator(roads, simulator, vehicle, demand)
        try:
            self._session = Session(carla, xodr, self._dt)
        except BaseException:
            self._sumo.close()
            raise
        try:
            self._heights = check_roads(self._session.carla, self._session.town, roads)
            begin = entries(roads, vehicle.length)
            x, y = begin.location[0].tolist()
            at = Place("measured", x, y, float(self._heights[0]), float(begin.yaw[0]), 0.0)
            self._fleet = Fleet(self._session, carla, self._sumo.info.slots, at)
        except BaseException:
            self._session.close()
            self._sumo.close()
            raise
        fleet = self._fleet
        self._gains = gains(
            carla, wheelbase=fleet.wheelbase, max_steer=fleet.max_steer, length=vehicle.length, dt=self._dt
        )
        self._limits = np.array([vehicle.acceleration, vehicle.braking, vehicle.braking])
        self._command = Command(np.zeros(self._sumo.info.slots), np.zeros(self._sumo.info.slots, np.bool_))
        self._state: TrafficState | None = None
        self._closed = False
        self._episodes = 0
        self._worlds = 0
        self.info = self._describe()
        self._begin_arrays()

    def _describe(self) -> SimulatorInfo:
        session, sumo = self._session, self._sumo.info
        stands_in = ", stand-in, a test double" if session.stands_in else ""
        return SimulatorInfo(
            backend=f"{sumo.backend} and carla{stands_in}",
            versions={**sumo.versions, "client": CARLA_VERSION, "server": session.server_version},
            step_length=self._dt,
            slots=sumo.slots,
            notes=(*([STAND_IN_SAID] if session.stands_in else ()), *session.notes, *sumo.notes),
        )

    def _begin_arrays(self) -> None:
        slots = self.info.slots
        self._reading = np.zeros((slots, len(READING)))
        self._memory = np.zeros((slots, len(MEMORY)))
        self._progress = np.zeros(slots)
        self._fresh = np.zeros(slots, np.bool_)
        self._pedals = np.zeros((slots, 3))
        self._pairs = np.zeros((slots, 2), np.int64)
        self._driven = np.zeros(slots, np.bool_)  # by CARLA, in the last step
        self._pause: dict[int, tuple[int, int]] = {}  # slot without an actor -> failures, steps until the next try

    # ---------------------------------------------------------------- an episode's beginning and end

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        """Begin an episode in both."""
        if self._closed:
            raise SimulatorError("the simulator was closed; make a new one")
        every = self._settings.world_reload_every
        if every and self._episodes >= every:
            self._fleet.forget()
            self._session.load()
            self._episodes, self._worlds = 0, self._worlds + 1
        else:
            self._fleet.clear(None)
        self._fleet.weigh()
        self._episodes += 1
        self._begin_arrays()
        self._state = self._sumo.reset(schedule, seed)
        self._state.world = self._worlds
        return self._state

    def close(self) -> None:
        """End SUMO; leave the server asynchronous and empty of ours. May be called twice."""
        if not self._closed:
            self._closed = True
            self._state = None
            self._fleet.leave(None)
            self._session.close()
            self._sumo.close()

    # ---------------------------------------------------------------- a step

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        """CARLA's tick with everybody in it, then SUMO's; see `core.simulator.Simulator`."""
        if self._state is None:
            raise SimulatorError("there is no episode to step in; call reset first")
        state, spans = self._state, self._spans
        with spans("read"):
            rows = state.rows()
            here = np.array([slot for slot in rows.tolist() if self._fleet.aboard(slot)], np.int64)
            driven = here[command.controlled[here]]
            orders = self._orders(command, here, driven)
        with spans("tick"):
            if orders:
                self._session.batch(orders)
            snapshot = self._session.tick()
        with spans("read"):
            driven, lost = self._read(driven, snapshot)
            before = state.values[driven, Field.SPEED].copy()
            self._hand_to_sumo(command, driven, lost)
        with spans("tick"):
            state, events = self._sumo.step(self._command)
        with spans("read"):
            self._merge(state, events, driven, before, command)
            self._collide(state, events, driven)
            self._come_and_go(state, events)
        return state, events

    def _orders(
        self, command: Command, here: Int64[np.ndarray, " rows"], driven: Int64[np.ndarray, " rows"]
    ) -> list[Any]:
        """Pedals for those that CARLA drives, places for the others."""
        state = self._state
        assert state is not None
        mirrored = here[~command.controlled[here]]
        self._driven[mirrored] = False
        taken = driven[~self._driven[driven]]
        if len(taken):
            self._take_over(taken)
        orders = [self._fleet.mirroring(slot, place) for slot, place in self._places(mirrored)]
        orders += [self._fleet.pushing(slot, place) for slot, place in self._places(taken)]
        if len(driven):
            told, limits = command.controlled, self._limits
            target = np.nan_to_num(command.target_speed)  # SUMO refuses what is no speed, below
            decide(driven, self._reading, self._memory, target, told, limits, self._gains, self._pedals)
            orders += self._fleet.controls(driven.tolist(), self._pedals[: len(driven)].tolist())
        return orders

    def _take_over(self, slots: Int64[np.ndarray, " rows"]) -> None:
        """CARLA drives from here on: the controllers begin with what the vehicle does."""
        assert self._state is not None
        values = self._state.values[slots]
        self._reading[slots, :3] = values[:, [Field.X, Field.Y, Field.HEADING]]
        self._reading[slots, 3], self._reading[slots, 4] = values[:, Field.SPEED], 0.0
        self._memory[slots] = 0.0
        self._memory[slots, :2] = values[:, [Field.SPEED]]
        self._progress[slots] = values[:, Field.PROGRESS]
        self._driven[slots] = True
        self._follow(slots)

    def _follow(self, slots: Int64[np.ndarray, " rows"]) -> None:
        assert self._state is not None
        roads, ahead = self.roads, self._settings.steering.preview
        place = (self._state.routes, roads.points, roads.samples, roads.length, roads.spacing)
        follow(slots, self._reading, self._memory, self._progress, *place, self._vehicle.length, ahead)

    def _places(self, slots: Int64[np.ndarray, " rows"]) -> list[tuple[int, Place]]:
        """Where SUMO has these vehicles, in CARLA's frame."""
        state = self._state
        assert state is not None
        values = state.values[slots]
        locations = carla_location(values[:, [Field.X, Field.Y]] + np.array(self.roads.origin)).tolist()
        yaws, speeds = carla_yaw(values[:, Field.HEADING]).tolist(), values[:, Field.SPEED].tolist()
        found = []
        for slot, (x, y), yaw, speed in zip(slots.tolist(), locations, yaws, speeds, strict=True):
            name, height = vehicle_name(int(state.ids[slot])), float(self._heights[state.routes[slot]])
            found.append((slot, Place(name, x, y, height, yaw, speed)))
        return found

    def _read(self, driven: Int64[np.ndarray, " rows"], snapshot: Any) -> tuple[Int64[np.ndarray, " rows"], list[int]]:
        """Where CARLA has those that it drives, and who is not to be found, or not on its route any more."""
        rows, raw, lost = self._fleet.read(driven.tolist(), snapshot)
        if len(rows):
            take_in(
                rows,
                raw,
                self.roads.origin,
                self._fleet.box,
                self._vehicle.length,
                self._dt,
                self._fresh,
                self._reading,
            )
            self._follow(rows)
        astray = rows[np.abs(self._memory[rows, _PATH_ERROR]) > self._settings.off_route]
        lost += astray.tolist()
        return np.array([slot for slot in rows.tolist() if slot not in lost], np.int64), lost

    def _hand_to_sumo(self, command: Command, driven: Int64[np.ndarray, " rows"], lost: list[int]) -> None:
        assert self._state is not None
        np.copyto(self._command.controlled, command.controlled)
        np.copyto(self._command.target_speed, command.target_speed)
        self._command.target_speed[driven] = np.hypot(self._reading[driven, 3], self._reading[driven, 4])
        bad = command.controlled & ~((command.target_speed >= 0.0) & np.isfinite(command.target_speed))
        self._command.target_speed[bad] = command.target_speed[bad]
        if lost:
            self._sumo.take_out(lost)
        inside = driven[self._progress[driven] < self.roads.length[self._state.routes[driven]]]
        headings = self._reading[inside, 2]
        self._sumo.place(
            inside.tolist(), front_of_centre(self._reading[inside, :2], headings, self._vehicle.length), headings
        )

    def _merge(
        self,
        state: TrafficState,
        events: Events,
        driven: Int64[np.ndarray, " rows"],
        before: np.ndarray,
        command: Command,
    ) -> None:
        """What CARLA drives is where CARLA has it; an arrival stays where SUMO put it."""
        gone = events.slots[events.endings != Ending.COLLIDED]
        kept = ~np.isin(driven, gone)
        rows = driven[kept]
        state.values[rows, Field.SPEED] = before[kept]
        reference = self._memory[:, _REFERENCE]
        told, off = settle(rows, self._reading, self._progress, reference, command.controlled, self._dt, state.values)
        events.commanded, events.overridden = told, off

    def _collide(self, state: TrafficState, events: Events, driven: Int64[np.ndarray, " rows"]) -> None:
        """Boxes that overlap, one of them CARLA's: SUMO looks at lanes, and does not see every contact there is."""
        rows, vehicle = state.rows(), self._vehicle
        if not len(driven) or len(rows) < 2:
            return
        count = touching(rows, state.values, vehicle.length, vehicle.width, self._pairs)
        pairs = [
            (a, b) for a, b in self._pairs[: min(count, len(self._pairs))].tolist() if {a, b} & set(driven.tolist())
        ]
        if pairs:
            self._sumo.crash(pairs, events)

    # ---------------------------------------------------------------- coming and going

    def _come_and_go(self, state: TrafficState, events: Events) -> None:
        """Destroy in CARLA who ended, spawn who entered, and who was refused before."""
        carla = self._session.carla.command
        ended = [slot for slot in events.slots.tolist() if self._fleet.aboard(slot)]
        self._driven[events.slots] = False
        for slot in events.slots.tolist():
            self._pause.pop(slot, None)
        orders = [carla.DestroyActor(actor) for actor in self._fleet.dismiss(ended, None)]
        for slot in events.departed.tolist():
            self._driven[slot] = False
            if state.alive[slot]:
                self._pause[slot] = (0, 0)
        due = []
        for slot, (failures, pause) in self._pause.items():
            if pause > 0:
                self._pause[slot] = (failures, pause - 1)
            else:
                due.append(slot)
        places = self._places(np.array(sorted(due), np.int64)) if due else []
        for slot, place in places:
            spawning = self._fleet.spawning(place, self._settings.spawn_height)
            if state.drivers[slot] == Driver.HUMAN:  # it is only ever put somewhere
                spawning = spawning.then(carla.SetSimulatePhysics(carla.FutureActor, False))
            orders.append(spawning)
        if not orders:
            return
        answers = self._session.batch(orders)[len(orders) - len(places) :]
        for (slot, _), answer in zip(places, answers, strict=True):
            if answer.error:
                failures = self._pause[slot][0]
                self._pause[slot] = (failures + 1, min(2**failures, _LONGEST_PAUSE) - 1)
                events.refused += 1
            else:
                del self._pause[slot]
                self._fleet.board(slot, answer.actor_id)
