"""What every simulator must do, as plain functions: `CONTRACT` is the list, each takes a living simulator and bounds.

A backend's test parametrises over the list. `Bounds` says how exactly it must do what it was told: vehicles that run
on rails do it to the last bit, those with pedals and wheels as well as their controllers can. The simulator's
car-following model must be one that does not crash, its vehicles those of `VehicleSettings()`, its network the
bundled crossing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from opencda_marl.core.roads import Movement, Roads
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Command, Driver, Ending, Events, Field, Schedule, TrafficState, vehicle_id
from opencda_marl.settings.traffic import DemandSettings, VehicleSettings
from opencda_marl.simulators.demand import build_schedule

VEHICLE = VehicleSettings()
NORTH, EAST, SOUTH, WEST = range(4)


@dataclass(frozen=True)
class Bounds:
    """How far a backend may be from what it was told. The defaults are SUMO's: vehicles on rails."""

    speed: float = 1e-6  # [m/s] from a target that is within reach
    overridden: float = 0.0  # share of commanded vehicle-steps
    acceleration: float = 1e-6  # [m/s^2] beyond the limits
    way: float = 1e-6  # [m] between a step of progress and speed * dt
    line: float = 0.02  # [m] front bumper from the centre line
    inside: float = 0.75  # [m] centre from the line in a turn: the middle of a chord as long as the car
    straight: float = 1e-6  # [m] likewise, before the junction
    settled: float = 1e-6  # [m] likewise, a car's length after it
    two_seconds: float = 0.2  # [m] of the way driven in them at 13 m/s


RAILS = Bounds()

Policy = Callable[[TrafficState, Command], None]


def route_of(roads: Roads, arm: int, movement: Movement) -> int:
    """Index of a route of the bundled crossing."""
    return int(np.flatnonzero((roads.arm == arm) & (roads.movement == movement))[0])


def schedule_of(
    vehicles: list[tuple[float, int]], *, driver: Driver = Driver.CAV, episode: int = 0, factor: float = 1.0
) -> Schedule:
    """A schedule written by hand: (time [s], route), in the order of time."""
    count = len(vehicles)
    return Schedule(
        episode=episode,
        rate_vph=0.0,
        ids=np.array([vehicle_id(episode, i) for i in range(count)], np.int64),
        times=np.array([v[0] for v in vehicles], np.float64),
        routes=np.array([v[1] for v in vehicles], np.int16),
        speed_factors=np.full(count, factor),
        drivers=np.full(count, int(driver), np.int8),
    )


def busy(roads: Roads, *, rate: float, cav_share: float, seconds: float, episode: int = 0, seed: int = 5) -> Schedule:
    """Poisson traffic."""
    demand = DemandSettings(rate_vph=rate, cav_share=cav_share)
    return build_schedule(demand, roads, episode=episode, horizon=seconds, rng=np.random.default_rng(seed))


@dataclass
class Log:
    """An episode, step by step; states are copies."""

    states: list[TrafficState] = field(default_factory=list)
    events: list[Events] = field(default_factory=list)

    def column(self, identity: int, what: Field) -> np.ndarray:
        """Values of one vehicle while it lived."""
        return np.array([s.values[s.ids == identity, what][0] for s in self.states if s.alive[s.ids == identity].any()])

    def ends(self) -> dict[int, tuple[Ending, int, str]]:
        """id -> how it ended, partner, reason; fails when one ended twice."""
        found: dict[int, tuple[Ending, int, str]] = {}
        for events in self.events:
            rows = zip(events.ids, events.endings, events.partners, events.reasons, strict=True)
            for identity, ending, partner, reason in rows:
                assert int(identity) not in found, f"vehicle {identity} ended twice"
                found[int(identity)] = Ending(int(ending)), int(partner), reason
        return found


def everybody_at(speed: float) -> Policy:
    """All CAVs get the same target. [m/s]"""

    def policy(state: TrafficState, command: Command) -> None:
        command.controlled[:] = state.alive & (state.drivers == Driver.CAV)
        command.target_speed[:] = speed

    return policy


def erratic(seed: int) -> Policy:
    """Every CAV gets a new random target in every step."""
    rng = np.random.default_rng(seed)

    def policy(state: TrafficState, command: Command) -> None:
        command.controlled[:] = state.alive & (state.drivers == Driver.CAV)
        command.target_speed[:] = rng.uniform(0.0, 17.0, len(state.ids))

    return policy


def drive(simulator: Simulator, schedule: Schedule, steps: int, policy: Policy, *, seed: int = 11) -> Log:
    """Run an episode's first steps."""
    state = simulator.reset(schedule, seed)
    command = Command(np.zeros(simulator.info.slots), np.zeros(simulator.info.slots, np.bool_))
    log = Log()
    for _ in range(steps):
        policy(state, command)
        state, events = simulator.step(command)
        log.states.append(state.copy())
        log.events.append(events)
    return log


def _overridden(log: Log) -> float:
    """Share of the commanded vehicle-steps."""
    return sum(e.overridden for e in log.events) / sum(e.commanded for e in log.events)


# -------------------------------------------------------------------- accounting


def accounting_closes_in_every_step(simulator: Simulator, bounds: Bounds) -> None:
    """Whoever is due waits, drives or has ended."""
    schedule = busy(simulator.roads, rate=500, cav_share=0.5, seconds=60)
    log = drive(simulator, schedule, 1200, erratic(1))
    ended = 0
    waited = 0
    for state, events in zip(log.states, log.events, strict=True):
        ended += len(events.ids)
        waited = max(waited, events.waiting)
        due = int((schedule.times <= state.time).sum())
        assert due == events.waiting + int(state.alive.sum()) + ended
        assert (events.waiting == 0) == (events.longest_wait == 0.0)
    assert waited > 0, "this traffic is meant to make some wait outside"
    kinds = {end[0] for end in log.ends().values()}
    assert {Ending.ARRIVED, Ending.COLLIDED} <= kinds, "this traffic is meant to arrive and to crash"


def ids_live_once(simulator: Simulator, bounds: Bounds) -> None:
    """An id enters once, never changes its slot, ends at most once, and frees the slot one step later."""
    log = drive(simulator, busy(simulator.roads, rate=400, cav_share=1.0, seconds=60), 1200, erratic(2))
    slot_of: dict[int, int] = {}
    ended: set[int] = set()
    just_ended: dict[int, int] = {}
    for state, events in zip(log.states, log.events, strict=True):
        for slot, identity in just_ended.items():
            assert state.ids[slot] != identity, "the slot must be free one step after the end"
        just_ended = dict(zip(events.slots.tolist(), events.ids.tolist(), strict=True))
        assert (state.ids[events.slots] == events.ids).all(), "the slot still holds who ended in this step"
        assert not state.alive[events.slots].any()
        assert len(set(state.ids[state.alive].tolist())) == state.alive.sum()
        for slot in np.flatnonzero(state.alive).tolist():
            identity = int(state.ids[slot])
            assert identity >= 0
            assert identity not in ended
            assert slot_of.setdefault(identity, slot) == slot
        ended |= set(just_ended.values())
        assert (state.ids[~state.alive & ~np.isin(np.arange(len(state.ids)), events.slots)] == -1).all()
    assert ended == set(log.ends())
    assert len(ended) > 20


def who_enters_is_announced(simulator: Simulator, bounds: Bounds) -> None:
    """A vehicle enters at its time, its length behind the beginning of its route, at the departure speed."""
    roads = simulator.roads
    schedule = busy(roads, rate=200, cav_share=1.0, seconds=40)
    log = drive(simulator, schedule, 800, everybody_at(8.0))
    seen: set[int] = set()
    for state, events in zip(log.states, log.events, strict=True):
        for slot in events.departed.tolist():
            identity = int(state.ids[slot])
            index = int(np.flatnonzero(schedule.ids == identity)[0])
            values = state.values[slot]
            seen.add(identity)
            assert state.routes[slot] == schedule.routes[index]
            assert state.drivers[slot] == schedule.drivers[index]
            assert values[Field.SCHEDULED_AT] == schedule.times[index]
            assert values[Field.DEPARTED_AT] == state.time
            assert state.time >= schedule.times[index]
            assert values[Field.PROGRESS] == pytest.approx(VEHICLE.length, abs=1e-9)
            assert values[Field.SPEED] == pytest.approx(VEHICLE.departure_speed, abs=1e-9)
            assert values[Field.ACCEL] == 0.0
    everybody = {int(i) for state in log.states for i in state.ids[state.alive]}
    assert seen == everybody


# -------------------------------------------------------------------- physics


def a_car_told_10_has_10_after_5_seconds(simulator: Simulator, bounds: Bounds) -> None:
    route = route_of(simulator.roads, SOUTH, Movement.STRAIGHT)
    log = drive(simulator, schedule_of([(0.0, route)]), 101, everybody_at(10.0))
    assert log.states[-1].time == pytest.approx(5.05)
    assert log.column(0, Field.SPEED)[-1] == pytest.approx(10.0, abs=0.05)


def eastward_is_heading_0_and_plus_x(simulator: Simulator, bounds: Bounds) -> None:
    cases = {WEST: (0.0, 1.0, 0.0), SOUTH: (np.pi / 2, 0.0, 1.0), EAST: (np.pi, -1.0, 0.0), NORTH: (-np.pi / 2, 0, -1)}
    for arm, (heading, east, north) in cases.items():
        route = route_of(simulator.roads, arm, Movement.STRAIGHT)
        log = drive(simulator, schedule_of([(0.0, route)]), 41, everybody_at(13.0))
        difference = log.column(0, Field.HEADING) - heading
        assert np.abs(np.angle(np.exp(1j * difference))).max() < 1e-3
        x, y = log.column(0, Field.X), log.column(0, Field.Y)
        assert x[-1] - x[0] == pytest.approx(26.0 * east, abs=bounds.two_seconds)  # 2 s at 13 m/s
        assert y[-1] - y[0] == pytest.approx(26.0 * north, abs=bounds.two_seconds)
        # entered half a length behind the front bumper, which is a length along a 100 m arm
        assert (x[0], y[0]) == pytest.approx(
            (-97.5 * east + 5.25 * north, -97.5 * north - 5.25 * east), abs=0.01
        )  # the middle lane is 5.25 m right of the arm's axis


def fronts_follow_the_centre_line(simulator: Simulator, bounds: Bounds) -> None:
    """Progress is that of the front bumper, half a length before the centre, along the heading."""
    roads = simulator.roads
    for route in range(roads.routes):
        log = drive(simulator, schedule_of([(0.0, route)]), 400, everybody_at(7.0))
        progress, heading = log.column(0, Field.PROGRESS), log.column(0, Field.HEADING)
        place = np.stack([log.column(0, Field.X), log.column(0, Field.Y)], axis=1)
        at = np.arange(roads.samples[route]) * roads.spacing
        at[-1] = roads.length[route]
        line = roads.points[route, : roads.samples[route]]

        def on_line(where: np.ndarray, at: np.ndarray = at, line: np.ndarray = line) -> np.ndarray:
            return np.stack([np.interp(where, at, line[:, 0]), np.interp(where, at, line[:, 1])], axis=1)

        front = place + VEHICLE.length / 2 * np.stack([np.cos(heading), np.sin(heading)], axis=1)
        assert np.linalg.norm(front - on_line(progress), axis=1).max() < bounds.line
        off = np.linalg.norm(place - on_line(progress - VEHICLE.length / 2), axis=1)
        assert off.max() < bounds.inside
        assert off[progress < roads.stop_line[route]].max() < bounds.straight
        assert off[progress > roads.junction_exit[route] + VEHICLE.length].max() < bounds.settled


def progress_speed_and_acceleration_agree(simulator: Simulator, bounds: Bounds) -> None:
    """Each is the difference of the one before, over the step."""
    dt = simulator.info.step_length
    log = drive(simulator, busy(simulator.roads, rate=200, cav_share=0.5, seconds=30), 600, erratic(3))
    for identity in {int(i) for state in log.states for i in state.ids[state.alive]}:
        speed, progress = log.column(identity, Field.SPEED), log.column(identity, Field.PROGRESS)
        assert np.abs(np.diff(progress) - speed[1:] * dt).max(initial=0.0) < bounds.way
        assert np.abs(np.diff(speed) / dt - log.column(identity, Field.ACCEL)[1:]).max(initial=0.0) < 1e-6


def limits_of_acceleration_hold(simulator: Simulator, bounds: Bounds) -> None:
    log = drive(simulator, busy(simulator.roads, rate=300, cav_share=1.0, seconds=40), 800, erratic(4))
    accel = np.concatenate([s.values[s.alive, Field.ACCEL] for s in log.states])
    assert accel.max() == pytest.approx(VEHICLE.acceleration, abs=bounds.acceleration)
    assert accel.min() == pytest.approx(-VEHICLE.braking, abs=bounds.acceleration)
    assert min(s.values[s.alive, Field.SPEED].min(initial=0.0) for s in log.states) >= 0.0
    assert _overridden(log) <= bounds.overridden
    assert sum(e.commanded for e in log.events) > 1000


def an_arrival_is_at_the_end(simulator: Simulator, bounds: Bounds) -> None:
    roads = simulator.roads
    for movement in Movement:
        route = route_of(roads, EAST, movement)
        log = drive(simulator, schedule_of([(0.0, route)]), 800, everybody_at(7.0))
        assert log.ends() == {0: (Ending.ARRIVED, -1, "arrived")}
        step = next(i for i, e in enumerate(log.events) if len(e.ids))
        state, slot = log.states[step], int(log.events[step].slots[0])
        assert not state.alive[slot]
        assert state.values[slot, Field.PROGRESS] == roads.length[route]
        end = roads.points[route, roads.samples[route] - 1]
        back = VEHICLE.length / 2 * np.array([np.cos(end[2]), np.sin(end[2])])
        assert state.values[slot, [Field.X, Field.Y]] == pytest.approx(end[:2] - back, abs=1e-9)
        # 13 m/s falls to 7 at 4.5 m/s2 in 1.33 s (13.3 m), the rest is driven at 7 m/s
        expected = 4 / 3 + (roads.length[route] - VEHICLE.length - 40 / 3) / 7.0
        assert state.time - state.values[slot, Field.DEPARTED_AT] == pytest.approx(expected, abs=0.15)


# -------------------------------------------------------------------- control


def a_command_into_a_wall_of_traffic_is_obeyed(simulator: Simulator, bounds: Bounds) -> None:
    """Straight into the back of a standing car, and across the path of another: no hidden driver interferes."""
    roads = simulator.roads
    route = route_of(roads, WEST, Movement.STRAIGHT)

    def ram(state: TrafficState, command: Command) -> None:
        command.controlled[:] = state.alive
        command.target_speed[:] = np.where((state.ids == 0) & (state.time > 3.0), 0.0, 13.0)

    log = drive(simulator, schedule_of([(0.0, route), (2.5, route)]), 200, ram)
    ends = log.ends()
    assert ends[0][:2] == (Ending.COLLIDED, 1)
    assert ends[1][:2] == (Ending.COLLIDED, 0)
    assert np.abs(log.column(1, Field.SPEED) - 13.0).max() < bounds.speed
    assert _overridden(log) <= bounds.overridden

    across = route_of(roads, NORTH, Movement.STRAIGHT)
    # their paths meet 105.25 m and 94.75 m from the arms' ends
    log = drive(simulator, schedule_of([(0.0, across), (10.5 / 13.0, route)]), 200, everybody_at(13.0))
    ends = log.ends()
    assert {ends[0][:2], ends[1][:2]} == {(Ending.COLLIDED, 1), (Ending.COLLIDED, 0)}
    assert np.abs(log.column(0, Field.SPEED) - 13.0).max() < bounds.speed
    assert _overridden(log) <= bounds.overridden


def control_given_up_is_given_back(simulator: Simulator, bounds: Bounds) -> None:
    """A released vehicle drives by itself: it speeds up, and stops behind one that stands."""
    route = route_of(simulator.roads, NORTH, Movement.STRAIGHT)

    def release(state: TrafficState, command: Command) -> None:
        command.controlled[:] = state.alive & (state.time < 3.0)
        command.target_speed[:] = 3.0

    log = drive(simulator, schedule_of([(0.0, route)]), 200, release)
    at = [round(s.time, 2) for s in log.states].index(3.0)
    assert log.column(0, Field.SPEED)[at] == pytest.approx(3.0, abs=0.05)
    assert log.column(0, Field.SPEED)[-1] > 13.0

    def behind(state: TrafficState, command: Command) -> None:
        command.controlled[:] = state.alive & ((state.ids == 0) | (state.time < 4.0))
        command.target_speed[:] = np.where((state.ids == 0) & (state.time > 3.0), 0.0, 13.0)

    log = drive(simulator, schedule_of([(0.0, route), (2.5, route)]), 300, behind)
    assert log.ends() == {}
    assert log.column(1, Field.SPEED)[-1] < 0.1


def drivers_of_the_simulator_never_crash(simulator: Simulator, bounds: Bounds) -> None:
    """Human drivers under right of way; nothing is commanded, nothing is counted as overridden."""
    log = drive(simulator, busy(simulator.roads, rate=300, cav_share=0.0, seconds=120), 2400, everybody_at(13.0))
    ends = log.ends()
    assert {end[0] for end in ends.values()} == {Ending.ARRIVED}
    assert len(ends) > 50
    assert sum(e.commanded + e.overridden for e in log.events) == 0


# -------------------------------------------------------------------- identity


def _same(one: Log, other: Log) -> bool:
    return all(
        np.array_equal(a.ids, b.ids)
        and np.array_equal(a.alive, b.alive)
        and np.array_equal(a.values, b.values)
        and np.array_equal(e.ids, f.ids)
        and np.array_equal(e.partners, f.partners)
        and (e.reasons, e.waiting, e.longest_wait) == (f.reasons, f.waiting, f.longest_wait)
        for a, b, e, f in zip(one.states, other.states, one.events, other.events, strict=True)
    )


def the_past_leaves_no_trace(simulator: Simulator, bounds: Bounds) -> None:
    """(schedule, seed) alone decide an episode, whatever ran before, complete or not."""
    roads = simulator.roads
    schedule = busy(roads, rate=300, cav_share=0.5, seconds=30)
    first = drive(simulator, schedule, 600, erratic(6), seed=3)
    drive(simulator, busy(roads, rate=500, cav_share=0.2, seconds=20, seed=9, episode=4), 333, erratic(7), seed=8)
    again = drive(simulator, schedule, 600, erratic(6), seed=3)
    drive(simulator, schedule, 7, erratic(6), seed=3)
    third = drive(simulator, schedule, 600, erratic(6), seed=3)
    assert _same(first, again)
    assert _same(first, third)


def another_seed_is_another_episode(simulator: Simulator, bounds: Bounds) -> None:
    schedule = busy(simulator.roads, rate=200, cav_share=0.0, seconds=20)
    one = drive(simulator, schedule, 400, everybody_at(13.0), seed=1)
    other = drive(simulator, schedule, 400, everybody_at(13.0), seed=2)
    assert not _same(one, other)


def a_reset_begins_afresh(simulator: Simulator, bounds: Bounds) -> None:
    """In mid-episode: nobody is there, the clock stands at 0, the same object is handed out."""
    schedule = busy(simulator.roads, rate=400, cav_share=1.0, seconds=30)
    log = drive(simulator, schedule, 300, everybody_at(9.0))
    assert log.states[-1].alive.any()
    state = simulator.reset(schedule, 1)
    assert (state.step, state.time) == (0, 0.0)
    assert not state.alive.any()
    assert (state.ids == -1).all()
    assert (state.values == 0.0).all()
    command = Command(np.zeros(simulator.info.slots), np.zeros(simulator.info.slots, np.bool_))
    assert simulator.step(command)[0] is state


CONTRACT: list[Callable[[Simulator, Bounds], None]] = [
    accounting_closes_in_every_step,
    ids_live_once,
    who_enters_is_announced,
    a_car_told_10_has_10_after_5_seconds,
    eastward_is_heading_0_and_plus_x,
    fronts_follow_the_centre_line,
    progress_speed_and_acceleration_agree,
    limits_of_acceleration_hold,
    an_arrival_is_at_the_end,
    a_command_into_a_wall_of_traffic_is_obeyed,
    control_given_up_is_given_back,
    drivers_of_the_simulator_never_crash,
    the_past_leaves_no_trace,
    another_seed_is_another_episode,
    a_reset_begins_afresh,
]
