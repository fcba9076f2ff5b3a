"""The guard behind the policy: nobody shares a zone, and it leaves alone who needs no guarding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scripted import CONFLICTS, ROADS, ScriptedSimulator, pose, sharing, spaced_schedule

from opencda_marl.core.state import Command, Driver, Field, TrafficState
from opencda_marl.env.controllers import make_controller
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.env.neighbours import road_tables
from opencda_marl.env.shield import Shield
from opencda_marl.settings.driving import ShieldSettings
from opencda_marl.settings.run import RunSettings

SETTINGS = RunSettings(shield=ShieldSettings(enabled=True))
STRAIGHT, ACROSS = 1, 4  # from one arm straight on, and from the next one: 92 and 102.5 m to their common zone


def _minute(settings: RunSettings, driver: str) -> tuple[int, int]:
    """A dense minute without physics: how often two were in a common zone, and how many arrived."""
    schedule = spaced_schedule(np.random.default_rng(8), 60)
    env = DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule, 1, 1))
    acting = make_controller(driver, settings, ROADS, CONFLICTS, np.random.default_rng(2))
    step, together = env.reset(0), 0
    while not step.done:
        step = env.step(acting.act(step.observation, env.state))
        together += sharing(env.state)
    return together, env.record().accounting.arrived


@pytest.mark.parametrize("driver", ["full_speed", "random"])
@pytest.mark.parametrize("kind", ["target_speed", "acceleration"])
def test_nobody_shares_a_zone(driver: str, kind: str) -> None:
    settings = replace(SETTINGS, max_steps=1200, decision_interval=1, action=kind)
    together, arrived = _minute(settings, driver)
    assert together == 0
    assert arrived > 20
    unguarded, _ = _minute(replace(settings, shield=ShieldSettings()), driver)
    assert unguarded > 0  # else the minute would prove nothing


def _state(*vehicles: tuple[int, float, float, Driver]) -> TrafficState:
    """Vehicles of (route, progress, speed, driver)."""
    state = TrafficState.empty(4)
    state.step, state.time = 200, 10.0
    for slot, (route, progress, speed, driver) in enumerate(vehicles):
        state.ids[slot], state.alive[slot], state.drivers[slot], state.routes[slot] = slot, True, driver, route
        x, y, heading = pose(ROADS, route, progress)
        state.values[slot] = [x, y, heading, speed, 0.0, progress, 4.0, 5.0 + slot]
    return state


def _guarded(shield: Shield, state: TrafficState, *wishes: float) -> list[float]:
    command = Command(np.zeros(4), np.zeros(4, np.bool_))
    command.target_speed[: len(wishes)] = wishes
    shield.guard(command, state)
    return command.target_speed[: len(wishes)].tolist()


def _shield() -> Shield:
    return Shield(SETTINGS, road_tables(ROADS, CONFLICTS), 4)


def test_who_can_still_stop_does_as_the_policy_says() -> None:
    shield = _shield()
    # 15 m/s take 25 m to stop; two that would meet are left alone 35 m before
    state = _state((STRAIGHT, 92.0 - 35.0, 15.0, Driver.CAV), (ACROSS, 92.0 - 35.0, 15.0, Driver.CAV))
    assert _guarded(shield, state, 15.0, 13.0) == [15.0, 13.0]
    assert shield.changed == 0


def test_who_commits_first_goes_and_the_other_stops() -> None:
    shield = _shield()
    # with 26 m to its first zone the first can just not stop any more: it commits, and goes whatever the policy says;
    # it will be in the common zone 2.2 to 2.8 s from now, the other from 1.6 or 1.7 s to 2.2 or 2.4 s
    state = _state((ACROSS, 92.0 - 26.0, 15.0, Driver.CAV), (STRAIGHT, 92.0 - 26.0, 15.0, Driver.CAV))
    first, second = _guarded(shield, state, 15.0, 15.0)
    assert first == pytest.approx(17.88, abs=0.01)
    assert second < 15.0
    slow, _ = _guarded(shield, state, 2.0, 2.0)
    assert slow == pytest.approx(17.88, abs=0.01)
    # far enough apart both go
    state = _state((STRAIGHT, 92.0 - 26.0, 15.0, Driver.CAV), (ACROSS, 92.0 - 70.0, 15.0, Driver.CAV))
    assert _guarded(_shield(), state, 15.0, 15.0)[1] == 15.0


def test_behind_a_leader_one_can_stop() -> None:
    shield = _shield()
    state = _state((STRAIGHT, 20.0, 12.0, Driver.CAV), (STRAIGHT, 30.0, 0.0, Driver.CAV))
    follower, leader = _guarded(shield, state, 12.0, 5.0)
    assert leader == 5.0
    assert follower**2 / 9 + follower * 0.05 <= 30.0 - 20.0 - 5.0  # within the gap, a step late


def test_strangers_that_cannot_stop_are_respected() -> None:
    mine = (STRAIGHT, 90.0 - 23.0, 15.0, Driver.CAV)
    state = _state(mine, (ACROSS, 102.5 - 22.0, 15.0, Driver.HUMAN))
    assert _guarded(_shield(), state, 15.0)[0] < 15.0
    state = _state(mine, (ACROSS, 40.0, 10.0, Driver.HUMAN))  # it can stop
    assert _guarded(_shield(), state, 15.0)[0] > 15.0


def test_a_slot_has_no_memory_of_who_was_in_it() -> None:
    shield = _shield()
    state = _state((STRAIGHT, 90.0 - 24.0, 15.0, Driver.CAV))
    _guarded(shield, state, 15.0)
    state.ids[0], state.values[0, Field.PROGRESS], state.values[0, Field.SPEED] = 77, 10.0, 13.0
    assert _guarded(shield, state, 5.0) == [5.0]
    shield.clear()
    assert shield.changed == 0
