"""The queues outside, by hand; and the test for room against SUMO's own."""

from __future__ import annotations

import libsumo
import numpy as np
import pytest

from opencda_marl.core.state import Driver, Field, Schedule, TrafficState, vehicle_id
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.admission import Admission, room_needed
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.sumo import SumoSimulator

ROADS = load_roads(find_network("intersection"))
VEHICLE = VehicleSettings()


def _schedule(vehicles: list[tuple[float, int]], driver: Driver = Driver.CAV, factor: float = 1.0) -> Schedule:
    count = len(vehicles)
    return Schedule(
        episode=0,
        rate_vph=0.0,
        ids=np.array([vehicle_id(0, i) for i in range(count)], np.int64),
        times=np.array([v[0] for v in vehicles]),
        routes=np.array([v[1] for v in vehicles], np.int16),
        speed_factors=np.full(count, factor),
        drivers=np.full(count, int(driver), np.int8),
    )


def _enter(state: TrafficState, admission: Admission, index: int, progress: float, speed: float) -> None:
    state.ids[index], state.alive[index] = index, True
    state.values[index, [Field.PROGRESS, Field.SPEED]] = progress, speed
    admission.entered(index, index, index)


def test_one_lane_is_a_queue() -> None:
    admission, state = Admission(ROADS, VEHICLE, 0.05), TrafficState.empty(8)
    admission.begin(_schedule([(1.0, 4), (1.0, 4), (1.2, 5), (9.0, 4)]))
    assert admission.admit(state, 0.95, 8) == []
    assert (admission.waiting, admission.longest_wait(0.95)) == (0, 0.0)
    assert admission.admit(state, 1.0, 8) == [0]
    assert admission.waiting == 2, "admitted is not yet in"
    # the first is asked for; nobody else may be on this lane, but the next lane is free
    assert admission.admit(state, 1.2, 8) == [2]
    _enter(state, admission, 0, 5.0, 13.0)
    _enter(state, admission, 2, 5.0, 13.0)
    assert admission.waiting == 1
    assert admission.admit(state, 1.25, 8) == []
    assert admission.longest_wait(1.25) == pytest.approx(0.25)
    # 13 m/s behind 13 m/s needs 13 m of headway, 2.5 m of gap, 5 m of vehicle, and slack for the steps
    state.values[0, Field.PROGRESS] = 26.0
    assert admission.admit(state, 1.3, 8) == []
    state.values[0, Field.PROGRESS] = 27.0
    assert admission.admit(state, 1.35, 8) == [1]
    assert admission.waiting == 1
    _enter(state, admission, 1, 5.0, 13.0)
    assert (admission.waiting, admission.longest_wait(1.4)) == (0, 0.0)


def test_the_vehicle_ahead_is_the_rearmost_that_still_drives() -> None:
    admission, state = Admission(ROADS, VEHICLE, 0.05), TrafficState.empty(8)
    admission.begin(_schedule([(0.0, 4), (0.0, 4), (0.0, 4)]))
    assert admission.admit(state, 0.0, 8) == [0]
    _enter(state, admission, 0, 60.0, 13.0)
    assert admission.admit(state, 0.05, 8) == [1]
    _enter(state, admission, 1, 8.0, 0.0)
    assert admission.admit(state, 0.1, 8) == []
    # the one in the way crashes and is gone: what counts is the one before it
    state.alive[1] = False
    assert admission.admit(state, 0.15, 8) == [2]


def test_a_slot_that_was_given_to_somebody_else_is_not_mistaken() -> None:
    admission, state = Admission(ROADS, VEHICLE, 0.05), TrafficState.empty(8)
    admission.begin(_schedule([(0.0, 4), (0.0, 4)]))
    admission.admit(state, 0.0, 8)
    _enter(state, admission, 0, 8.0, 0.0)
    state.ids[0] = 77  # another vehicle, on another lane, took the slot
    assert admission.admit(state, 0.05, 8) == [1]


def test_no_more_than_there_are_places() -> None:
    admission = Admission(ROADS, VEHICLE, 0.05)
    admission.begin(_schedule([(0.0, route) for route in range(12)]))
    assert len(admission.admit(TrafficState.empty(5), 0.0, 5)) == 5
    assert admission.waiting == 12


def test_departure_speed_respects_the_limit_as_its_driver_reads_it() -> None:
    admission = Admission(ROADS, VEHICLE, 0.05)
    admission.begin(_schedule([(0.0, 0)], Driver.HUMAN, 0.5))
    assert admission.departure_speed(0) == pytest.approx(8.94)
    admission.begin(_schedule([(0.0, 0)], Driver.CAV, 0.5))
    assert admission.departure_speed(0) == 13.0


@pytest.mark.parametrize("leader", [0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0])
@pytest.mark.parametrize("kind", ["ours", "human"])
def test_where_we_see_room_sumo_places_at_once(leader: float, kind: str) -> None:
    """The vehicle ahead brakes as hard as it can in the very step; from a metre or two less SUMO refuses."""
    simulator = SumoSimulator(ROADS, SimulatorSettings(), VEHICLE, DemandSettings())
    try:
        after = max(0.0, leader - 4.5 * 0.05)
        needed = 2 * VEHICLE.length + VEHICLE.min_gap + room_needed(13.0, after, 4.5)
        placed = []
        for slack in (0.001, -1.8):  # of the front bumper ahead, after the step
            simulator.reset(_schedule([]), 1)
            position = str(needed + slack - after * 0.05)
            libsumo.vehicle.add("a", "r1", "ours", departLane="1", departPos=position, departSpeed=str(leader))
            libsumo.vehicle.setSpeedMode("a", 38)
            libsumo.simulationStep()
            libsumo.vehicle.setSpeed("a", 0.0)
            libsumo.vehicle.add("b", "r1", kind, departLane="1", departPos="5", departSpeed="13")
            libsumo.simulationStep()
            placed.append("b" in libsumo.vehicle.getIDList())
        assert placed == [True, False]
    finally:
        simulator.close()
