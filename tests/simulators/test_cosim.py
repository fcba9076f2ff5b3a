"""SUMO and CARLA at once (CARLA is the stand-in, a test double): mirrored, counted, never fatal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("carla")

from opencda_marl.core.frames import heading_of_carla_yaw, place_of_carla_location, wrap
from opencda_marl.core.roads import Movement
from opencda_marl.core.state import Command, Driver, Field, Schedule, vehicle_id, vehicle_name
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.traffic import DemandSettings, ScenarioSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.carla_map import read_map
from opencda_marl.simulators.cosim import CosimSimulator
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.standin import StandIn

ROADS = load_roads(find_network("intersection"))
XODR = read_map(ScenarioSettings(), ROADS.network)
EASTWARD = int(np.flatnonzero((ROADS.arm == 3) & (ROADS.movement == Movement.STRAIGHT))[0])


@pytest.fixture(scope="module")
def simulator() -> Iterator[CosimSimulator]:
    with StandIn() as server:
        made = partial(CosimSimulator, ROADS, XODR, CarlaSettings(port=server.port), SimulatorSettings())
        with closing(made(VehicleSettings(), DemandSettings())) as found:
            yield found


def _command(simulator: CosimSimulator, state: Any, speed: float) -> Command:
    controlled = state.alive & (state.drivers == Driver.CAV)
    return Command(np.full(simulator.info.slots, speed), controlled)


def _in_carla(simulator: CosimSimulator) -> dict[str, tuple[np.ndarray, float]]:
    """Place and heading of each of our vehicles, as the server has them."""

    def ask(world: Any) -> Any:
        return [
            (actor.attributes["role_name"], actor.get_transform()) for actor in world.get_actors().filter("vehicle.*")
        ]

    found = {}
    for name, there in simulator._session.ask("test", ask):
        place = place_of_carla_location(np.array([there.location.x, there.location.y]))
        heading = float(heading_of_carla_yaw(np.array(there.rotation.yaw)))
        found[name.removeprefix("opencda-marl.")] = (place, heading)
    return found


def test_everybody_is_in_both_at_the_same_place(simulator: CosimSimulator) -> None:
    assert simulator.info.backend == "libsumo and carla, stand-in, a test double"
    demand = DemandSettings(rate_vph=300.0, cav_share=0.5)
    schedule = build_schedule(demand, ROADS, episode=3, horizon=20.0, rng=np.random.default_rng(2))
    state = simulator.reset(schedule, 5)
    compared = {Driver.CAV: 0, Driver.HUMAN: 0}
    for step in range(400):
        state, events = simulator.step(_command(simulator, state, 9.0))
        assert events.refused == 0
        if step % 20 != 19:
            continue
        there = _in_carla(simulator)
        for slot in np.setdiff1d(state.rows(), events.departed).tolist():
            place, heading = there[vehicle_name(int(state.ids[slot]))]
            values, kind = state.values[slot], Driver(int(state.drivers[slot]))
            # CARLA's own are exact; the others stand where SUMO had them a step ago
            late = 1e-4 if kind == Driver.CAV else values[Field.SPEED] * 0.05 + 0.3
            assert np.hypot(*(place - values[[Field.X, Field.Y]])) <= late
            assert abs(float(wrap(np.array(heading - values[Field.HEADING])))) < (1e-4 if kind == Driver.CAV else 0.2)
            compared[kind] += 1
    assert min(compared.values()) > 20


def test_a_human_driver_stops_behind_a_car_that_carla_has(simulator: CosimSimulator) -> None:
    """SUMO's driver sees it where CARLA put it."""
    drivers = np.array([int(Driver.CAV), int(Driver.HUMAN)], np.int8)
    ids = np.array([vehicle_id(4, 0), vehicle_id(4, 1)])
    routes = np.array([EASTWARD, EASTWARD], np.int16)
    state = simulator.reset(Schedule(4, 0.0, ids, np.array([0.0, 2.5]), routes, np.ones(2), drivers), 1)
    for step in range(300):
        state, events = simulator.step(_command(simulator, state, 13.0 if step < 60 else 0.0))
        assert not len(events.ids), events.reasons
    values = state.values[np.argsort(state.ids[state.rows()])]
    assert values[:2, Field.SPEED].max() < 0.1
    assert values[0, Field.PROGRESS] - VehicleSettings().length - values[1, Field.PROGRESS] > 1.0


def test_a_refused_vehicle_is_counted_and_driven_by_sumo_until_it_is_taken(simulator: CosimSimulator) -> None:
    session, carla = simulator._session, simulator._session.carla
    times, driver = np.array([0.0]), np.array([int(Driver.CAV)], np.int8)
    schedule = Schedule(6, 0.0, np.array([vehicle_id(6, 0)]), times, np.array([EASTWARD], np.int16), np.ones(1), driver)
    state = simulator.reset(schedule, 1)
    blueprint = session.blueprints.find("vehicle.carlamotors.firetruck")
    (truck,) = session.batch([carla.command.SpawnActor(blueprint, carla.Transform(carla.Location(-97.5, 5.25, 0.3)))])
    refused = 0
    for _ in range(60):
        state, events = simulator.step(_command(simulator, state, 8.0))
        refused += events.refused
    assert refused >= 1
    slot = int(state.rows()[0])
    assert state.values[slot, Field.PROGRESS] > 25.0, "it drives, whoever drives it"
    assert "e6.v0" in _in_carla(simulator), "once it had passed the truck, CARLA took it"
    session.batch([carla.command.DestroyActor(truck.actor_id)])
