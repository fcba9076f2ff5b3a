"""The PettingZoo view: its own contract test, two at once on SUMO, and the story that it tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from pettingzoo.test import parallel_api_test, parallel_seed_test
from scripted import ROADS, ScriptedSimulator, schedule_of

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Driver, Ending, Schedule, vehicle_name
from opencda_marl.env.pettingzoo import ParallelDriving
from opencda_marl.settings.run import RunSettings
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.simulators.sumo import SumoSimulator


def _crash_at_40(identity: int, age: int) -> Ending | None:
    return Ending.COLLIDED if age == 40 and identity % 3 == 0 else None


def _few(seed: int) -> Callable[[int], tuple[Schedule, int, int]]:
    """Traffic that has all entered long before the end."""

    def episode_of(episode: int) -> tuple[Schedule, int, int]:
        rng = np.random.default_rng([seed, episode])
        schedule = schedule_of(rng.uniform(0, 3, 9), rng.integers(0, 12, 9), episode=episode)
        return schedule, 1, seed

    return episode_of


def _settings(**changes: object) -> RunSettings:
    settings = RunSettings(max_steps=200)
    weights = {"delay": -0.1, "collision": -20.0, "near_miss": -0.6, "arrival": 1.0}
    return replace(settings, reward=replace(settings.reward, weights=weights), **changes)


def _scripted(settings: RunSettings) -> ParallelDriving:
    return ParallelDriving(lambda: ScriptedSimulator(settings, _crash_at_40), settings, _few)


@pytest.mark.parametrize(
    "changes", [{}, {"observation": "ego43"}, {"observation": "ego9"}, {"action": "levels"}], ids=str
)
def test_it_is_a_parallel_env(changes: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    parallel_api_test(_scripted(_settings(**changes)), num_cycles=200)
    assert "Passed" in capsys.readouterr().out


def test_a_seed_gives_the_same_story() -> None:
    settings = _settings()
    parallel_seed_test(lambda: _scripted(settings), num_cycles=10)


def test_every_vehicle_lives_once_and_all_act() -> None:
    settings = _settings()
    env = _scripted(settings)
    views, _ = env.reset(seed=4)
    lives, ended, seconds = set(views), {}, defaultdict(float)
    assert len(env.possible_agents) == 9
    returns = 0.0
    while env.agents:
        for name in env.agents:
            assert env.observation_space(name).contains(views[name]), name
        before = set(env.agents)
        views, rewards, terminations, truncations, infos = env.step(
            {name: np.array([1.0], np.float32) for name in env.agents}
        )
        assert set(views) == before | set(env.agents)
        for name in before:
            seconds[name] += infos[name]["elapsed"]
            assert rewards[name] == pytest.approx(sum(infos[name]["rewards"].values()), rel=1e-5)
            returns += rewards[name]
            if terminations[name] or truncations[name]:
                assert name not in env.agents
                assert name not in ended
                ended[name] = terminations[name]
        for name in set(env.agents) - before:
            assert name not in lives
            assert rewards[name] == 0.0
            assert infos[name] == {}
        lives |= set(env.agents)
    assert lives == set(ended) == set(env.possible_agents)
    crashed = [vehicle_name(k) for k in range(9) if k % 3 == 0]
    assert all(ended[name] for name in crashed)
    assert all(seconds[name] == pytest.approx(40 * 0.05) for name in crashed)
    assert not all(ended.values())  # the episode of 10 s cuts the others off
    record = env._env.record()
    assert record.accounting.collided == 3


def test_mistakes_are_named() -> None:
    env = _scripted(_settings())
    with pytest.raises(OpenCDAError, match="reset"):
        env.step({})
    env.reset()
    with pytest.raises(OpenCDAError, match=r"e0\.v"):
        env.step({})
    with pytest.raises(OpenCDAError, match="nobody"):
        env.step({**{name: np.zeros(1) for name in env.agents}, "nobody": np.zeros(1)})


def test_other_drivers_are_no_agents() -> None:
    settings = _settings()

    def mixed(_: int) -> Callable[[int], tuple[Schedule, int, int]]:
        drivers = np.array([Driver.CAV, Driver.HUMAN, Driver.CAV])
        return lambda episode: (schedule_of(np.zeros(3), np.array([1, 4, 7]), drivers, episode=episode), 1, 1)

    env = ParallelDriving(lambda: ScriptedSimulator(settings), settings, mixed)
    views, _ = env.reset()
    assert set(views) == {"e0.v0", "e0.v2"} == set(env.possible_agents)
    views, _ = env.reset()
    assert set(views) == {"e1.v0", "e1.v2"}
    assert env.state().shape == env.state_space.shape


def _sumo(settings: RunSettings) -> Simulator:
    return SumoSimulator(ROADS, settings.simulator, settings.scenario.vehicle, settings.demand)


def _poisson(seed: int, settings: RunSettings) -> Callable[[int], tuple[Schedule, int, int]]:
    def episode_of(episode: int) -> tuple[Schedule, int, int]:
        rng = np.random.default_rng([seed, episode])
        horizon = settings.max_steps * settings.simulator.step_length
        return build_schedule(settings.demand, ROADS, episode=episode, horizon=horizon, rng=rng), 7 + episode, seed

    return episode_of


def _remote(settings: RunSettings) -> RemoteSimulator:
    return RemoteSimulator(partial(_sumo, settings), deadline=60.0)


def test_two_at_once_on_sumo() -> None:
    settings = _settings(max_steps=240)
    traffic = partial(_poisson, settings=settings)
    pair = [ParallelDriving(partial(_remote, settings), settings, traffic) for _ in range(2)]
    try:
        stories: list[list[Any]] = [[], []]
        views = [env.reset(seed=seed)[0] for env, seed in zip(pair, (5, 5), strict=True)]
        while pair[0].agents:
            for env, story in zip(pair, stories, strict=True):
                seen, rewards, terminated, *_ = env.step({name: np.ones(1, np.float32) for name in env.agents})
                story.append((sorted(seen), sorted(rewards.items()), sorted(terminated.items())))
        assert stories[0] == stories[1]
        assert views[0].keys() == views[1].keys()
        assert len(stories[0]) >= 20
    finally:
        for env in pair:
            env.close()
