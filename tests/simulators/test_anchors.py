"""What driving without a policy comes to on the committed network; the bands are wide, the order is not."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from opencda_marl.core.roads import Movement
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.sumo import SumoSimulator
from tests.programs import benchmark_program

SEEDS = range(1, 7)


@pytest.fixture(scope="module")
def anchors() -> ModuleType:
    return benchmark_program("anchors")


@pytest.fixture(scope="module")
def simulator() -> Iterator[SumoSimulator]:
    roads = load_roads(find_network("intersection"))
    made = SumoSimulator(roads, SimulatorSettings(), VehicleSettings(), DemandSettings())
    yield made
    made.close()


def test_free_flow_times(anchors: ModuleType, simulator: SumoSimulator) -> None:
    """What the delay is measured against is what a lone vehicle really takes, on every route."""
    rows = anchors.free_flow(simulator)
    assert len(rows) == 12
    for row in rows:
        assert row["computed"] == pytest.approx(row["measured"], abs=0.1)
    by_movement = [np.mean([r["measured"] for r in rows if r["movement"] == m]) for m in Movement]
    assert by_movement == pytest.approx([13.05, 11.15, 12.80], abs=0.06)


@pytest.mark.slow
def test_crashes_and_travel_times(anchors: ModuleType, simulator: SumoSimulator) -> None:
    found = {
        (policy, rate): anchors.measure(simulator, policy, rate, SEEDS)
        for policy in ("full speed", "random", "priority")
        for rate in (100.0, 200.0, 300.0, 400.0)
    }
    crashed = {key: row["crashed_percent"] for key, row in found.items()}
    for rate, (low, high) in {100.0: (1, 10), 200.0: (8, 24), 300.0: (10, 26), 400.0: (15, 36)}.items():
        assert low < crashed["full speed", rate] < high
        assert crashed["random", rate] > crashed["full speed", rate] + 10
        assert crashed["priority", rate] == 0.0
        assert all(found[policy, rate]["removed"] == 0 for policy in ("full speed", "random", "priority"))
        assert found["full speed", rate]["travel_time_s"] == pytest.approx(12.4, abs=0.3)
        assert 24 < found["random", rate]["travel_time_s"] < 32
    assert 13 < found["priority", 100.0]["travel_time_s"] < 16
    assert 15.5 < found["priority", 200.0]["travel_time_s"] < 21
    assert found["priority", 300.0]["stuck_percent"] > 18, "the priority rule chokes"
    assert found["full speed", 300.0]["stuck_percent"] < 13
