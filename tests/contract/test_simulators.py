"""The contract, kept by every backend; and what a closed simulator does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from simulator_contract import CONTRACT

from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Command
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.simulators.sumo import SumoSimulator

ROADS = load_roads(find_network("intersection"))


def _sumo(backend: str) -> Callable[[], Simulator]:
    settings = SimulatorSettings(backend=backend)  # type: ignore[arg-type]
    return partial(SumoSimulator, ROADS, settings, VehicleSettings(), DemandSettings())


FACTORIES: dict[str, Callable[[], Simulator]] = {
    "libsumo": _sumo("libsumo"),
    "remote": partial(RemoteSimulator, _sumo("libsumo"), deadline=30.0),
    "traci": _sumo("traci"),
}


@pytest.fixture(scope="module", params=list(FACTORIES))
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    made = FACTORIES[request.param]()
    yield made
    made.close()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(simulator: Simulator, check: Callable[[Simulator], None]) -> None:
    check(simulator)


@pytest.mark.parametrize("name", list(FACTORIES))
def test_closing_twice_is_fine_and_final(name: str) -> None:
    made = FACTORIES[name]()
    command = Command(np.zeros(made.info.slots), np.zeros(made.info.slots, np.bool_))
    made.close()
    made.close()
    with pytest.raises(SimulatorError):
        made.step(command)
