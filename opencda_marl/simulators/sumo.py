"""SUMO <-> arrays: one bulk write, one tick, one bulk read per step.

Positions, angles and speeds are read. The distance driven and the acceleration follow from the speeds as in
SUMO's own Euler step, which saves two of five getters (a test compares them with what those say).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np
from jaxtyping import Float64, Int64

from opencda_marl.core.errors import ConfigError, DeadlineError, SimulatorError
from opencda_marl.core.files import writing
from opencda_marl.core.frames import centre_of_front, sumo_angle
from opencda_marl.core.roads import Roads
from opencda_marl.core.scratch import scratch_folder
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.spans import Spans
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState, vehicle_name
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.admission import Admission
from opencda_marl.simulators.endings import End, book_ends
from opencda_marl.simulators.kernels import compare_targets, fill_values
from opencda_marl.simulators.links import LibsumoLink, Link, Readings, SumoOptions, TraciLink
from opencda_marl.simulators.wheels import choose_backend, inspect_sumo

__all__ = ["SumoSimulator", "choose_backend", "inspect_sumo"]

OUR_SPEED_MODE = 38
"""Obey the target speed; keep limits of acceleration and braking. Off: safe speed, right of way, red lights, and
waiting for foes inside the junction. Otherwise an action would only be a cap, and crashes could not be learned from."""

SUMO_SPEED_MODE = 31
"""SUMO's own driver, all checks on."""

_SLOW = (
    "SUMO runs over TraCI, some 4 to 12 times slower than libsumo at 25 vehicles (the more, the more often targets"
    " change); pip install libsumo for the fast one"
)
_DOCTOR = "run `opencda-marl doctor`"
_NONE = np.zeros(0, np.int64)
_NONE.setflags(write=False)  # shared by all events without any


def _additional(roads: Roads, vehicle: VehicleSettings, demand: DemandSettings) -> str:
    """Vehicle types and routes, as SUMO reads them."""
    shape = (
        f'length="{vehicle.length!r}" width="{vehicle.width!r}" minGap="{vehicle.min_gap!r}" '
        f'accel="{vehicle.acceleration!r}" decel="{vehicle.braking!r}" speedFactor="1" speedDev="0"'
    )
    lines = [
        "<additional>",
        # a vehicle that we drive never brakes harder than its limit, whatever happens
        f'<vType id="ours" {shape} emergencyDecel="{vehicle.braking!r}" carFollowModel="Krauss" sigma="0"/>',
        f'<vType id="human" {shape} emergencyDecel="{max(9.0, vehicle.braking)!r}" '
        f'carFollowModel="{demand.car_following}"'
        + (f' sigma="{vehicle.sigma!r}"/>' if demand.car_following == "Krauss" else "/>"),
    ]
    for route in range(roads.routes):
        edges = quoteattr(f"{roads.entry_edge[route]} {roads.exit_edge[route]}")
        lines.append(f'<route id="r{route}" edges={edges}/>')
    return "\n".join([*lines, "</additional>"])


def _link(backend: str, simulator: SimulatorSettings) -> Link:
    return LibsumoLink() if backend == "libsumo" else TraciLink(gui=simulator.gui, deadline=simulator.deadline)


class SumoSimulator:
    """Traffic in SUMO. Under libsumo there can be one in a process; see `RemoteSimulator` for more.

    Args:
        roads: of the network to drive on, see `network.load_roads`.
        simulator: backend, step length, window.
        vehicle: sizes and limits.
        demand: only what drives the vehicles that are not ours.
        spans: gets "tick" (SUMO's step) and "read" (all else).

    Raises:
        BackendMissingError: the backend is not installed.
        ConfigError: the step length is not a whole number of milliseconds, or a path has a comma.
        SimulatorError: another simulation is alive in this process.
    """

    def __init__(
        self,
        roads: Roads,
        simulator: SimulatorSettings,
        vehicle: VehicleSettings,
        demand: DemandSettings,
        *,
        spans: Spans | None = None,
    ) -> None:
        milliseconds = simulator.step_length * 1000
        if abs(milliseconds - round(milliseconds)) > 1e-9:
            raise ConfigError("simulator.step_length: SUMO counts whole milliseconds", fix="0.05, for instance")
        self.roads = roads
        self._spans = spans or Spans(enabled=False)
        self._vehicle = vehicle
        self._dt = round(milliseconds) / 1000.0  # the same double as SUMO's own
        self._gui = simulator.gui
        backend = choose_backend(simulator)
        self._link = _link(backend, simulator)
        self._folder = scratch_folder()
        self._types = Path(self._folder.name) / "types.add.xml"
        self._log = Path(self._folder.name) / "errors.txt"
        try:
            for path in (roads.network, self._folder.name):
                if "," in path:  # SUMO would take it for a list of files
                    raise ConfigError(f"SUMO cannot read from a path with a comma: {path}", fix="move or rename it")
            with writing(self._types):  # TMPDIR may be full
                self._types.write_text(_additional(roads, vehicle, demand), encoding="utf-8")
        except BaseException:
            self._folder.cleanup()
            raise
        # Standing bumper to bumper with its gap, every route has so many vehicles: more wait outside.
        slots = int(np.ceil(roads.length / (vehicle.length + vehicle.min_gap)).sum())
        self.info = SimulatorInfo(
            backend=backend,
            versions={key: value for key, value in inspect_sumo().items() if value is not None},
            step_length=self._dt,
            slots=slots,
            notes=(_SLOW,) if backend == "traci" and not simulator.gui else (),
        )
        last = np.arange(roads.routes), roads.samples - 1
        heading = roads.points[*last, 2]
        self._route_end = np.column_stack([centre_of_front(roads.points[*last, :2], heading, vehicle.length), heading])
        self._admission = Admission(roads, vehicle, self._dt)
        self._state = TrafficState.empty(slots)
        self._schedule: Schedule | None = None
        self._closed = False
        self._begin_arrays()
        self._read_rows((np.zeros(0), np.zeros(0), np.zeros(0)))  # compiles now, not in somebody's first step
        self._write(Command(np.zeros(slots), np.zeros(slots, np.bool_)))

    # ---------------------------------------------------------------- an episode's beginning and end

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        """Begin an episode, see `core.simulator.Simulator`."""
        if self._closed:
            raise SimulatorError("the simulator was closed; make a new one")
        options = SumoOptions(Path(self.roads.network), self._types, self._log, seed, self._dt, self._gui)
        self._schedule = None
        try:
            self._link.begin(options)
            heard = self._link.option("seed")
        except self._link.errors as error:
            raise SimulatorError(
                f"SUMO could not begin episode {schedule.episode} on {self.roads.network}: {self._last_words(error)}",
                fix=_DOCTOR,
            ) from error
        if heard != str(seed):
            raise SimulatorError(f"SUMO runs with seed {heard}, not {seed}")
        state = self._state
        fresh = TrafficState.empty(self.info.slots)
        state.step, state.time = 0, 0.0
        for name in ("ids", "alive", "drivers", "routes", "values"):
            getattr(state, name)[...] = getattr(fresh, name)
        self._schedule = schedule
        self._admission.begin(schedule)
        self._begin_arrays()
        return state

    def _begin_arrays(self) -> None:
        slots = self.info.slots
        self._pending: dict[str, int] = {}  # asked for, not yet on the road: name -> index in the schedule
        self._free = list(range(slots))  # a heap: low slots first
        self._ended: list[int] = []  # slots to be freed in the next step
        self._rows: Int64[np.ndarray, " rows"] = np.zeros(0, np.int64)  # slots of vehicles on the road, ascending
        self._row_names: list[str] = []
        self._names = [""] * slots
        self._told = np.full(slots, np.nan)  # the target speed that SUMO was last told; NaN: none
        self._fresh = np.zeros(slots, np.bool_)  # entered in this step
        self._changed = np.zeros(slots, np.int64)  # scratch
        self._speeds = np.zeros(slots)  # scratch

    def close(self) -> None:
        """End SUMO and remove its files; may be called twice."""
        if not self._closed:
            self._closed = True
            self._schedule = None
            self._link.close()
            self._folder.cleanup()

    def _last_words(self, error: Exception) -> str:
        """What went wrong: SUMO's log, else the exception's words (libsumo's log is empty until the process ends)."""
        try:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            said = ""
        return " ".join(said.splitlines()) if said else f"{error} (see also what SUMO wrote on standard error)"

    # ---------------------------------------------------------------- a step

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        """Write the command, advance one step, read everything; see `core.simulator.Simulator`."""
        if self._schedule is None:
            raise SimulatorError("there is no episode to step in; call reset first")
        spans = self._spans
        try:
            with spans("read"):
                self._free_ended()
                self._admit()
                self._write(command)
            with spans("tick"):
                self._link.tick()
            with spans("read"):
                return self._state, self._read()
        except DeadlineError:
            self._schedule = None
            raise
        except self._link.errors as error:
            episode, step = self._schedule.episode, self._state.step
            self._schedule = None
            raise SimulatorError(
                f"SUMO failed in step {step} of episode {episode}: {self._last_words(error)}",
                fix="start again from the last checkpoint (--resume); if it repeats, run `opencda-marl doctor`",
            ) from error

    def place(
        self, slots: list[int], fronts: Float64[np.ndarray, "vehicles 2"], headings: Float64[np.ndarray, " vehicles"]
    ) -> None:
        """Have vehicles where another simulator has them, at the end of the coming step.

        Args:
            slots: of vehicles on the road.
            fronts: middles of their front bumpers. [m]
            headings: [rad]
        """
        places = (fronts + np.array(self.roads.origin)).tolist()
        for slot, (x, y), angle in zip(slots, places, sumo_angle(headings).tolist(), strict=True):
            self._link.move(self._names[slot], x, y, angle)

    def take_out(self, slots: list[int]) -> None:
        """Remove vehicles; the next step reports their end."""
        for slot in slots:
            self._link.remove(self._names[slot])

    def crash(self, pairs: list[tuple[int, int]], events: Events) -> None:
        """End vehicles that another simulator saw touch, in the step that these events are of.

        Args:
            pairs: of slots.
            events: of the last step; completed.
        """
        before = zip(events.slots.tolist(), map(Ending, events.endings.tolist()), events.partners.tolist(), strict=True)
        ends = [(*told, reason) for told, reason in zip(before, events.reasons, strict=True)]
        ends += self._collide([(self._names[one], self._names[other]) for one, other in pairs])
        self._ended = book_ends(self._state, ends, events)

    def _free_ended(self) -> None:
        for slot in self._ended:
            self._state.ids[slot] = -1
            self._state.drivers[slot] = Driver.NONE
            heapq.heappush(self._free, slot)
        self._ended = []

    def _admit(self) -> None:
        assert self._schedule is not None
        schedule, state = self._schedule, self._state
        now = (state.step + 1) * self._dt
        for index in self._admission.admit(state, now, len(self._free) - len(self._pending)):
            name = vehicle_name(int(schedule.ids[index]))
            route = int(schedule.routes[index])
            human = schedule.drivers[index] == Driver.HUMAN
            self._link.insert(
                name,
                f"r{route}",
                "human" if human else "ours",
                int(self.roads.lane[route]),
                self._vehicle.length,
                self._admission.departure_speed(index),
                float(schedule.speed_factors[index]) if human else 1.0,
            )
            self._pending[name] = index

    def _write(self, command: Command) -> None:
        """Tell SUMO what changed; a target speed sticks until it is told otherwise."""
        names = self._row_names
        count, switched, bad = compare_targets(
            self._rows, command.controlled, command.target_speed, self._told, self._changed, self._speeds
        )
        if bad >= 0:
            speed = float(command.target_speed[self._rows[bad]])
            self._schedule = None  # half of the command is booked as told
            raise SimulatorError(f"vehicle {names[bad]} was told to drive {speed} m/s, which is no speed")
        if count:
            who = [names[i] for i in self._changed[:count].tolist()]
            speeds = self._speeds[:count].tolist()
            if switched:
                self._hand_over(who[:switched], speeds)
            self._link.write(who, speeds)

    def _hand_over(self, names: list[str], speeds: list[float]) -> None:
        """A vehicle that nobody tells a speed must look where it goes by itself, and the other way round."""
        for name, speed in zip(names, speeds, strict=False):
            self._link.take_over(name, OUR_SPEED_MODE if speed >= 0.0 else SUMO_SPEED_MODE)

    def _read(self) -> Events:
        state, link = self._state, self._link
        state.step += 1
        state.time = state.step * self._dt
        ends: list[End] = []
        entered: list[int] = []
        present, departed, arrived = link.changes()
        if departed or arrived or present != len(self._rows):
            entered, ends = self._who_is_there()
        commanded, overridden = self._read_rows(link.read(self._row_names)) if self._row_names else (0, 0)
        collisions = link.collisions()
        if collisions:
            ends += self._collide(collisions)
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
        )
        if ends:
            self._ended = book_ends(self._state, ends, events)
        return events

    def _read_rows(self, readings: Readings) -> tuple[int, int]:
        fronts, angles, speeds = readings
        vehicle = self._vehicle
        commanded, overridden = fill_values(
            self._rows,
            fronts,
            angles,
            speeds,
            self._fresh,
            self._told,
            self._state.values,
            self.roads.origin,
            vehicle.length,
            vehicle.braking,
            vehicle.acceleration,
            self._dt,
        )
        return commanded, overridden

    # ---------------------------------------------------------------- coming and going

    def _who_is_there(self) -> tuple[list[int], list[End]]:
        """One snapshot of ids: who came, who went and why. Updates the rows."""
        there = self._link.names()
        ends = []
        gone = [(int(s), n) for s, n in zip(self._rows, self._row_names, strict=True) if n not in there]
        if gone:
            arrived = self._link.arrived()
            ends = [self._leave(slot, name in arrived) for slot, name in gone]
        entered = [self._enter(name, index) for name, index in self._pending.items() if name in there]
        for slot in entered:
            del self._pending[self._names[slot]]
        self._set_rows({int(s) for s in self._rows} - {slot for slot, _ in gone} | set(entered))
        return entered, ends

    def _set_rows(self, slots: Iterable[int]) -> None:
        self._rows = np.array(sorted(slots), np.int64)
        self._row_names = [self._names[slot] for slot in self._rows]

    def _enter(self, name: str, index: int) -> int:
        assert self._schedule is not None
        schedule, state = self._schedule, self._state
        slot = heapq.heappop(self._free)
        self._names[slot] = name
        state.ids[slot] = schedule.ids[index]
        state.alive[slot] = True
        state.drivers[slot] = schedule.drivers[index]
        state.routes[slot] = schedule.routes[index]
        state.values[slot] = 0.0
        state.values[slot, Field.SCHEDULED_AT] = schedule.times[index]
        state.values[slot, Field.DEPARTED_AT] = state.time
        self._told[slot] = np.nan
        self._fresh[slot] = True
        self._link.follow(name)
        self._admission.entered(index, slot, int(schedule.ids[index]))
        return slot

    def _leave(self, slot: int, reported: bool) -> End:
        """The end of a vehicle that is no longer on the road."""
        values = self._state.values
        route = self._state.routes[slot]
        left = float(self.roads.length[route] - values[slot, Field.PROGRESS])
        furthest = (values[slot, Field.SPEED] + self._vehicle.acceleration * self._dt) * self._dt
        if reported and left <= furthest + 0.1:  # 0.1: SUMO lets go a little before the very end
            values[slot, Field.PROGRESS] = self.roads.length[route]
            values[slot, [Field.X, Field.Y, Field.HEADING]] = self._route_end[route]
            return slot, Ending.ARRIVED, -1, "arrived"
        how = "taken out by SUMO" if reported else "vanished from SUMO"
        return slot, Ending.REMOVED, -1, f"{how} {left:.1f} m before the end of its route"

    def _collide(self, pairs: list[tuple[str, str]]) -> list[End]:
        """Both parties of each crash end, once each, with the first crash reported for them."""
        slot_of = dict(zip(self._row_names, self._rows.tolist(), strict=True))
        partner_of: dict[str, str] = {}
        for pair in pairs:
            for one, other in (pair, pair[::-1]):
                if one in slot_of:
                    partner_of.setdefault(one, other)
        ends = []
        for name, other in partner_of.items():
            partner = int(self._state.ids[slot_of[other]]) if other in slot_of else -1
            ends.append((slot_of[name], Ending.COLLIDED, partner, f"collided with {other}"))
            self._link.remove(name)
        self._set_rows(set(self._rows.tolist()) - {end[0] for end in ends})
        return ends
