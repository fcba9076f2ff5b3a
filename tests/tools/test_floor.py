"""The bare loop holds its vehicles and measures only while it does."""

from __future__ import annotations

import pytest

from opencda_marl.core.errors import SimulatorError
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.tools.floor import BAND, Crossing, bare_loop
from opencda_marl.tools.measure import Worker


def _crossing() -> Crossing:
    roads = load_roads(find_network("intersection"))
    lanes = tuple(int(lane) for lane in roads.lane)
    return Crossing(roads.network, roads.entry_edge, roads.exit_edge, lanes)


def test_the_floor_is_measured_at_the_wanted_number_of_vehicles() -> None:
    with Worker(bare_loop, _crossing(), 10, 100) as floor:
        block = floor()
        assert block.steps == 100
        assert abs(block.vehicles - 10) <= BAND * 10
        assert block.seconds > 0
        # the simulation goes on: the second block needs no filling
        assert abs(floor().vehicles - 10) <= BAND * 10


def test_a_number_that_cannot_be_held_is_an_error() -> None:
    with Worker(bare_loop, _crossing(), 5000, 20) as floor, pytest.raises(SimulatorError, match="cannot hold 5000"):
        floor()
