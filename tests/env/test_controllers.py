"""Drivers without learning: what they answer, and (slow) how they fare on SUMO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scripted import CONFLICTS, ROADS, ScriptedSimulator, pose, random_state, schedule_of, sharing, spaced_schedule

from opencda_marl.core.errors import ConfigError, OpenCDAError
from opencda_marl.core.metrics import EpisodeRecord, pool
from opencda_marl.core.spec import Observation
from opencda_marl.core.state import Driver, Field, Schedule, TrafficState
from opencda_marl.env.controllers import RuleBased, make_controller
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.env.observe import full
from opencda_marl.settings.run import RunSettings
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.sumo import SumoSimulator

RNG = np.random.default_rng(0)


def _view(settings: RunSettings, state: TrafficState) -> Observation:
    slots = len(state.ids)
    rows = state.rows(Driver.CAV)
    return full(settings, ROADS, CONFLICTS).observe(state, np.zeros(slots), np.zeros(slots, np.bool_), rows)


def test_simple_drivers() -> None:
    settings = RunSettings()
    state = random_state(np.random.default_rng(1), 20)
    seen = _view(settings, state)
    fast = make_controller("full_speed", settings, ROADS, CONFLICTS, RNG).act(seen, state)
    assert fast.values.shape == (len(seen), 1)
    assert (fast.values == 1.0).all()
    chance = make_controller("random", settings, ROADS, CONFLICTS, np.random.default_rng(3))
    first, second = (chance.act(seen, state).values for _ in range(2))
    assert (np.abs(first) <= 1).all()
    assert not np.array_equal(first, second)
    again = make_controller("random", settings, ROADS, CONFLICTS, np.random.default_rng(3)).act(seen, state)
    np.testing.assert_array_equal(again.values, first)
    levels = replace(settings, action="levels")
    assert (make_controller("full_speed", levels, ROADS, CONFLICTS, RNG).act(seen, state).values == 8.0).all()
    drawn = make_controller("random", levels, ROADS, CONFLICTS, RNG).act(seen, state).values
    assert set(drawn.ravel().tolist()) <= set(range(9))


def test_priority_drives_nobody() -> None:
    settings, state = RunSettings(), random_state(np.random.default_rng(1), 5)
    priority = make_controller("priority", settings, ROADS, CONFLICTS, RNG)
    state.drivers[:] = Driver.HUMAN
    assert priority.act(_view(settings, state), state).values.shape == (0, 1)
    state.drivers[:] = Driver.CAV
    with pytest.raises(OpenCDAError, match="cav_share"):
        priority.act(_view(settings, state), state)


def test_an_unknown_controller_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="rule_based"):
        make_controller("rule_base", RunSettings(), ROADS, CONFLICTS, RNG)


def _meeting(mine: float, other: float, speed: float = 12.0) -> TrafficState:
    """Two that cross: from north straight on (entered first), and from east straight on."""
    state = TrafficState.empty(4)
    state.step, state.time = 200, 10.0
    for slot, (route, progress) in enumerate(((1, mine), (4, other))):
        state.ids[slot], state.alive[slot], state.drivers[slot] = slot, True, Driver.CAV
        state.routes[slot] = route
        x, y, heading = pose(ROADS, route, progress)
        state.values[slot] = [x, y, heading, speed, 0.0, progress, 4.0, 5.0 + slot]
    return state


def test_first_come_first_served() -> None:
    settings = RunSettings()
    # alone it goes as fast as it may; with the other at the same distance, who came first still does, the other waits
    state = _meeting(52.0, 62.5)  # 40 m before the zone, both
    wish = RuleBased(settings, ROADS, CONFLICTS, RNG).act(_view(settings, state), state).values[:, 0]
    speeds = (wish + 1) / 2 * 17.88
    assert speeds[0] > 12.5
    assert speeds[1] < 12.0
    state.values[[0, 1], Field.DEPARTED_AT] = 6.0, 5.0
    wish = RuleBased(settings, ROADS, CONFLICTS, RNG).act(_view(settings, state), state).values[:, 0]
    speeds = (wish + 1) / 2 * 17.88
    assert speeds[0] < 12.0
    assert speeds[1] > 12.5
    # far enough apart nobody waits
    state = _meeting(60.0, 20.0)
    wish = RuleBased(settings, ROADS, CONFLICTS, RNG).act(_view(settings, state), state).values[:, 0]
    assert ((wish + 1) / 2 * 17.88 > 12.5).all()


def test_a_promise_is_kept() -> None:
    """Who was let in before the other is not asked to brake when the other comes first in the order."""
    settings = RunSettings()
    driver = RuleBased(settings, ROADS, CONFLICTS, RNG)
    state = _meeting(20.0, 60.0)
    driver.act(_view(settings, state), state)
    state.values[:, Field.PROGRESS] += 6.0
    state.time += 0.5
    wish = driver.act(_view(settings, state), state).values[:, 0]
    assert (wish[1] + 1) / 2 * 17.88 > 12.5


def test_it_keeps_its_distance() -> None:
    settings = RunSettings()
    state = _meeting(30.0, 40.0)
    state.routes[1] = 1  # the second now drives ahead on the same lane, and stands
    state.values[1, Field.SPEED] = 0.0
    state.values[1, Field.DEPARTED_AT] = 4.0
    wish = RuleBased(settings, ROADS, CONFLICTS, RNG).act(_view(settings, state), state).values[:, 0]
    # 2.5 m of room behind the gap: it stops as fast as it can
    assert (wish[0] + 1) / 2 * 17.88 <= 12.0 - 4.5 * 0.5 + 1e-6


@pytest.mark.parametrize("kind", ["target_speed", "acceleration", "levels"])
@pytest.mark.parametrize("interval", [1, 10])
def test_nobody_shares_a_zone(kind: str, interval: int) -> None:
    """A dense minute without physics: two vehicles are never in a common zone."""
    settings = RunSettings(max_steps=900, decision_interval=interval, action=kind)
    rng = np.random.default_rng(8)
    schedule = spaced_schedule(rng, 60)
    env = DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule, 1, 1))
    driver = make_controller("rule_based", settings, ROADS, CONFLICTS, rng)
    step, together = env.reset(0), 0
    while not step.done:
        step = env.step(driver.act(step.observation, env.state))
        together += sharing(env.state)
    assert together == 0
    assert env.record().accounting.arrived > 35


def test_rule_driven_vehicles_beside_the_policy() -> None:
    settings = RunSettings(max_steps=600)
    times = np.array([0.0, 0.2, 3.0, 3.1])
    drivers = np.array([Driver.CAV, Driver.RULE, Driver.RULE, Driver.RULE])
    schedule = schedule_of(times, np.array([1, 4, 7, 10]), drivers)
    simulator = ScriptedSimulator(settings)
    env = DrivingEnv(simulator, settings, lambda _: (schedule, 1, 1))
    driver = make_controller("full_speed", settings, ROADS, CONFLICTS, RNG)
    step = env.reset(0)
    together = 0
    while not step.done:
        assert step.observation.ids.tolist() == [0]
        step = env.step(driver.act(step.observation, env.state))
        together += sharing(env.state)
    assert together == 0
    assert env.record().accounting.arrived == 4
    assert simulator.commands[40][1].sum() == 2  # both were told a speed


# ---------------------------------------------------------------- on SUMO


def _drive(name: str, rate: float, episodes: int, first_seed: int = 10000) -> list[EpisodeRecord]:
    settings = RunSettings()
    demand = replace(settings.demand, rate_vph=rate, cav_share=0.0 if name == "priority" else 1.0)
    simulator = SumoSimulator(ROADS, settings.simulator, settings.scenario.vehicle, demand)

    def traffic(episode: int) -> tuple[Schedule, int, int]:
        seed = first_seed + episode
        rng = np.random.default_rng(seed)
        return build_schedule(demand, ROADS, episode=episode, horizon=120.0, rng=rng), seed, seed

    env = DrivingEnv(simulator, settings, traffic)
    driver = make_controller(name, settings, ROADS, env.conflicts, np.random.default_rng(1))
    records = []
    try:
        for episode in range(episodes):
            step = env.reset(episode)
            while not step.done:
                step = env.step(driver.act(step.observation, env.state))
            records.append(env.record())
    finally:
        env.close()
    return records


@pytest.mark.slow
@pytest.mark.parametrize("rate", [200.0, 300.0, 400.0])
def test_near_misses_are_calibrated(rate: float) -> None:
    """SUMO's own right of way never crashes and stays under 5 %; full speed is far above it."""
    calm, wild = pool(_drive("priority", rate, 8)), pool(_drive("full_speed", rate, 3))
    assert calm["collision_rate"] == 0.0
    assert calm["near_miss_rate"] < 0.05
    assert wild["collision_rate"] > 0.1
    assert wild["near_miss_rate"] > 0.25


@pytest.mark.slow
def test_rule_based_crosses_without_crashes() -> None:
    records = _drive("rule_based", 300.0, 10)
    found = pool(records)
    assert found["vehicles"] > 1000
    assert found["collision_rate"] == 0.0
    assert found["success_rate"] == 1.0
    assert found["mean_delay_s"] < 2.0
    assert found["running_at_end"] < 20


@pytest.mark.slow
def test_speeds_are_obeyed_to_the_last_step() -> None:
    found = pool(_drive("random", 300.0, 2))
    assert found["overridden_share"] < 1e-3


def test_a_few_seconds_on_sumo() -> None:
    """The whole room on the real simulator: every scheduled vehicle is accounted for, nobody is overridden."""
    settings = RunSettings(max_steps=400)
    simulator = SumoSimulator(ROADS, settings.simulator, settings.scenario.vehicle, settings.demand)

    def traffic(episode: int) -> tuple[Schedule, int, int]:
        rng = np.random.default_rng(episode)
        return build_schedule(settings.demand, ROADS, episode=episode, horizon=20.0, rng=rng), 5, episode

    env = DrivingEnv(simulator, settings, traffic)
    driver: Callable[..., object] = make_controller("rule_based", settings, ROADS, env.conflicts, RNG)
    try:
        step, told = env.reset(3), set()
        while not step.done:
            step = env.step(driver.act(step.observation, env.state))
            ended = step.closed.terminated | step.closed.truncated
            assert not told & set(step.closed.ids[ended].tolist())
            told |= set(step.closed.ids[ended].tolist())
        record = env.record()
    finally:
        env.close()
    assert record.accounting.scheduled > 10
    assert len(told) == record.departed
    assert record.overridden == 0
    assert record.accounting.collided == 0
