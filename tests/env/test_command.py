"""Actions, the envelope, and what a command says: metres and metres per second by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_view import ReferenceView
from scripted import CONFLICTS, ROADS, random_state

from opencda_marl.core.roads import Movement
from opencda_marl.core.state import Driver, Field, TrafficState
from opencda_marl.env.command import Commander, action_spec, envelope
from opencda_marl.env.neighbours import road_tables
from opencda_marl.settings.run import RunSettings

ROUTE = road_tables(ROADS, CONFLICTS).route
RIGHT, STRAIGHT, LEFT = (int(np.flatnonzero(ROADS.movement == m)[0]) for m in Movement)


def test_the_envelope_by_hand() -> None:
    # a right turn may be driven at 7.34 m/s; 10 m before it, with 3 m/s^2: sqrt(7.34^2 + 60)
    assert envelope(75.5, ROUTE[RIGHT], 3.0) == pytest.approx(np.sqrt(7.34**2 + 60.0))
    assert envelope(85.5, ROUTE[RIGHT], 3.0) == pytest.approx(7.34)
    assert envelope(0.0, ROUTE[RIGHT], 3.0) == pytest.approx(17.88)
    assert envelope(94.82, ROUTE[RIGHT], 3.0) == pytest.approx(7.34)
    assert envelope(94.84, ROUTE[RIGHT], 3.0) == pytest.approx(17.88)
    assert envelope(80.0, ROUTE[STRAIGHT], 3.0) == pytest.approx(17.88)
    assert envelope(80.5, ROUTE[LEFT], 3.0) == pytest.approx(np.sqrt(11.18**2 + 30.0))


def test_the_envelope_is_the_minimum_over_all_limits_ahead() -> None:
    state, view = random_state(np.random.default_rng(0), 40), None
    settings = RunSettings()
    view = ReferenceView(settings, ROADS, CONFLICTS, state)
    for slot in state.rows():
        found = envelope(view.v(slot, Field.PROGRESS), ROUTE[view.route(slot)], 3.0)
        assert found == pytest.approx(view.envelope(slot))


def test_who_brakes_along_the_envelope_meets_the_limit() -> None:
    position, speed = 0.0, 17.88
    while position < ROADS.stop_line[RIGHT]:
        bound = envelope(position, ROUTE[RIGHT], 3.0)
        assert speed - bound < 3.0 * 0.05 + 1e-2  # comfortable braking was enough
        speed = bound
        position += speed * 0.05
    assert speed <= 7.34 + 3.0 * 0.05


def _one(driver: Driver = Driver.CAV, progress: float = 40.0, speed: float = 10.0) -> TrafficState:
    state = TrafficState.empty(3)
    state.alive[1], state.drivers[1], state.routes[1] = True, driver, STRAIGHT
    state.values[1, [Field.PROGRESS, Field.SPEED]] = progress, speed
    return state


def _commanded(settings: RunSettings, state: TrafficState, action: float) -> float:
    commander = Commander(settings, ROUTE, 3)
    commander.take(np.array([[action]], np.float32), np.array([1]))
    command = commander.command(state)
    assert command.controlled.tolist() == [False, True, False]
    assert command.target_speed[[0, 2]].tolist() == [0.0, 0.0]
    return float(command.target_speed[1])


def test_each_kind_of_action_by_hand() -> None:
    settings = RunSettings()
    assert _commanded(settings, _one(), -1.0) == 0.0
    assert _commanded(settings, _one(), 0.0) == pytest.approx(8.94)
    assert _commanded(settings, _one(), 1.0) == pytest.approx(17.88)
    pedals = replace(settings, action="acceleration")
    assert _commanded(pedals, _one(), 0.5) == pytest.approx(10.0 + 0.5 * 2.6 * 0.05)
    assert _commanded(pedals, _one(), -1.0) == pytest.approx(10.0 - 4.5 * 0.05)
    assert _commanded(pedals, _one(speed=0.1), -1.0) == 0.0
    assert _commanded(pedals, _one(speed=17.87), 1.0) == pytest.approx(17.88)
    assert _commanded(replace(settings, action="levels"), _one(), 6.0) == pytest.approx(0.75 * 17.88)


@pytest.mark.parametrize("driver", [Driver.HUMAN, Driver.RULE, Driver.NONE])
def test_others_are_not_commanded(driver: Driver) -> None:
    command = Commander(RunSettings(), ROUTE, 3).command(_one(driver))
    assert not command.controlled.any()


def test_forgotten_actions_are_not_held() -> None:
    commander = Commander(RunSettings(), ROUTE, 3)
    commander.take(np.array([[0.5]], np.float32), np.array([1]))
    assert commander.acted.tolist() == [False, True, False]
    commander.forget(np.array([1]))
    assert commander.held[1] == 0.0
    assert not commander.acted.any()


def test_action_spec() -> None:
    assert action_spec(RunSettings()).levels == ()
    assert action_spec(RunSettings()).kind == "target_speed"
    spec = action_spec(replace(RunSettings(), action="levels"))
    assert spec.levels == (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
    assert spec.size == 1
