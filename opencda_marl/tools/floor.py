"""The floor under every environment step: SUMO itself, driven by the shortest loop that one would write.

Per step one `simulationStep`, and for each vehicle five getters (position, angle, speed, lane position,
acceleration) and one `setSpeed`, in plain Python. The number of vehicles is held by letting one in
whenever there are too few; that is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opencda_marl.core.errors import SimulatorError
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.measure import Block

__all__ = ["BAND", "Crossing", "bare_loop", "driving_speed"]

BAND = 0.2
"""Steps count while the number of vehicles is within this share of the wanted one."""

_FAST = 8.0  # [m/s] of everybody
_CROWD = 400.0  # [m/s] shared by all: the more vehicles, the slower, else they never fill the crossing
_SPEED_MODE = 38  # as the project's: limits of acceleration and braking only
_PATIENCE = 20  # steps outside the band per step inside before giving up


@dataclass(frozen=True, slots=True)
class Crossing:
    """What the loop needs to know, free of everything else; made from `Roads` by the caller."""

    network: str  # path of the .net.xml
    entries: tuple[str, ...]  # one per route
    exits: tuple[str, ...]
    lanes: tuple[int, ...]
    settings: RunSettings = field(default_factory=RunSettings)


def driving_speed(vehicles: int) -> float:
    """At which so many vehicles enter and drive: crowds are slow. [m/s]"""
    return min(_FAST, _CROWD / vehicles)


def bare_loop(crossing: Crossing, vehicles: int, steps: int) -> Callable[[], Block]:
    """Start SUMO in this process and return the measurement of `steps` steps at `vehicles` vehicles.

    Raises:
        SimulatorError: the wanted number of vehicles cannot be held.
    """
    import libsumo

    from opencda_marl.simulators.wheels import set_sumo_home

    set_sumo_home()
    step_length = str(crossing.settings.simulator.step_length)
    options = ["--step-length", step_length, "--step-method.ballistic", "false", "--seed", "1"]
    options += ["--collision.action", "remove", "--collision.check-junctions", "true"]
    options += ["--collision.mingap-factor", "0", "--time-to-teleport", "-1", "--max-depart-delay", "-1"]
    options += ["--no-step-log", "true", "--no-warnings", "true", "--duration-log.disable", "true"]
    libsumo.start(["sumo", "-n", crossing.network, *options])
    vehicle = crossing.settings.scenario.vehicle
    libsumo.vehicletype.setLength("DEFAULT_VEHTYPE", vehicle.length)
    libsumo.vehicletype.setAccel("DEFAULT_VEHTYPE", vehicle.acceleration)
    libsumo.vehicletype.setDecel("DEFAULT_VEHTYPE", vehicle.braking)
    for route, (entry, leave) in enumerate(zip(crossing.entries, crossing.exits, strict=True)):
        libsumo.route.add(f"r{route}", [entry, leave])
    speed = driving_speed(vehicles)
    let_in = _entrance(crossing, speed)

    def measure() -> Block:
        seconds, counted, present, inside = 0.0, 0, 0, 0
        for _ in range(steps * _PATIENCE):
            let_in(vehicles)
            elapsed, inside = _step(speed)
            if abs(inside - vehicles) <= BAND * vehicles:
                seconds, counted, present = seconds + elapsed, counted + 1, present + inside
                if counted == steps:
                    return Block(seconds, counted, present / counted)
        where = Path(crossing.network).name
        raise SimulatorError(
            f"the bare simulator loop cannot hold {vehicles} vehicles on {where}: {inside} are on it",
            fix="measure with fewer: --vehicles N",
        )

    return measure


def _step(speed: float) -> tuple[float, int]:
    """One timed step at `speed` [m/s]: seconds, vehicles."""
    from libsumo import simulationStep, vehicle

    begin = time.perf_counter()
    simulationStep()
    names = vehicle.getIDList()
    for name in names:
        vehicle.getPosition(name)
        vehicle.getAngle(name)
        vehicle.getSpeed(name)
        vehicle.getLanePosition(name)
        vehicle.getAcceleration(name)
        vehicle.setSpeed(name, speed)
    return time.perf_counter() - begin, len(names)


def _entrance(crossing: Crossing, speed: float) -> Callable[[int], None]:
    """Lets a vehicle in, routes in turn, while fewer than wanted are in or about to enter."""
    import libsumo

    made = 0

    def let_in(wanted: int) -> None:
        nonlocal made
        inside: int = libsumo.vehicle.getIDCount()
        waiting = libsumo.simulation.getMinExpectedNumber() - inside
        if inside + min(waiting, 1) >= wanted or waiting >= len(crossing.entries):
            return
        route = made % len(crossing.entries)
        name = f"v{made}"
        made += 1
        libsumo.vehicle.add(name, f"r{route}", departLane=str(crossing.lanes[route]), departSpeed=str(speed))
        libsumo.vehicle.setSpeedMode(name, _SPEED_MODE)
        libsumo.vehicle.setLaneChangeMode(name, 0)

    return let_in
