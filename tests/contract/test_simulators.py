"""The contract, kept by every backend; and what a closed simulator does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
from simulator_contract import CONTRACT, RAILS, Bounds

from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Command
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.traffic import DemandSettings, ScenarioSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.carla_map import read_map
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.simulators.sumo import SumoSimulator
from opencda_marl.standin import StandIn

ROADS = load_roads(find_network("intersection"))


def _sumo(backend: str) -> Callable[[], Simulator]:
    settings = SimulatorSettings(backend=backend)  # type: ignore[arg-type]
    return partial(SumoSimulator, ROADS, settings, VehicleSettings(), DemandSettings())


PEDALS = Bounds(
    speed=0.15,
    overridden=0.02,  # contact pushes vehicles in the step in which they crash
    acceleration=1.0,
    way=0.02,
    line=0.05,
    inside=1.3,
    straight=1e-3,
    settled=0.5,
    two_seconds=0.2,
)
"""CARLA's vehicles have pedals and wheels; the rear axle of a bicycle cuts a right turn by more than SUMO's chord."""

FACTORIES: dict[str, Callable[[], Simulator]] = {
    "libsumo": _sumo("libsumo"),
    "remote": partial(RemoteSimulator, _sumo("libsumo"), deadline=30.0),
    "traci": _sumo("traci"),
}
BOUNDS = {"carla": PEDALS, "cosim": PEDALS}


def _served(name: str, port: int) -> Callable[[], Simulator]:
    from opencda_marl.simulators.carla import CarlaSimulator
    from opencda_marl.simulators.cosim import CosimSimulator

    carla, xodr = CarlaSettings(port=port), read_map(ScenarioSettings(), ROADS.network)
    more = (VehicleSettings(), DemandSettings())
    if name == "cosim":
        return partial(CosimSimulator, ROADS, xodr, carla, SimulatorSettings(), *more)
    return partial(CarlaSimulator, ROADS, xodr, carla, *more, 0.05)


@contextmanager
def _with_server(name: str) -> Iterator[Simulator]:
    """The real client in a child process, against the stand-in, which is a test double."""
    pytest.importorskip("carla")
    with StandIn() as server, closing(RemoteSimulator(_served(name, server.port), deadline=30.0)) as made:
        yield made


@pytest.fixture(scope="module", params=[*FACTORIES, "carla", pytest.param("cosim", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Simulator]]:
    name = request.param
    with _with_server(name) if name in BOUNDS else closing(FACTORIES[name]()) as simulator:
        yield name, simulator


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(backend: tuple[str, Simulator], check: Callable[[Simulator, Bounds], None]) -> None:
    name, simulator = backend
    check(simulator, BOUNDS.get(name, RAILS))


@pytest.mark.parametrize("name", list(FACTORIES))
def test_closing_twice_is_fine_and_final(name: str) -> None:
    made = FACTORIES[name]()
    command = Command(np.zeros(made.info.slots), np.zeros(made.info.slots, np.bool_))
    made.close()
    made.close()
    with pytest.raises(SimulatorError):
        made.step(command)
