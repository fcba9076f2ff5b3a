"""Settings -> roads, simulator, traffic, environment, learner: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from opencda_marl.core.roads import Roads
from opencda_marl.core.seeds import Branch, generator, simulator_seed
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import ActionSpec, Learner, ObservationSpec
from opencda_marl.core.state import Schedule
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.learners import LEARNERS
from opencda_marl.settings.run import RunSettings
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.sumo import SumoSimulator

__all__ = [
    "Traffic",
    "evaluation_traffic",
    "make_env",
    "make_learner",
    "make_roads",
    "make_simulator",
    "objective_weights",
    "training_traffic",
]

Traffic = Callable[[int], tuple[Schedule, int, int]]
"""Episode -> its schedule, the simulator's seed, the seed that its line names."""


def make_roads(settings: RunSettings, base: Path | None = None) -> Roads:
    """The crossing; read once per process and file.

    Args:
        settings: of the run.
        base: folder that a relative path of a network starts from.

    Raises:
        ConfigError: there is no such network.
    """
    return _roads(find_network(settings.scenario.network, base))


@lru_cache(maxsize=8)
def _roads(network: Path) -> Roads:
    return load_roads(network)


def make_simulator(settings: RunSettings, roads: Roads, *, spans: Spans | None = None) -> Simulator:
    """The simulator that the settings ask for, in this process.

    Raises:
        BackendMissingError: it is not installed.
        SimulatorError: another simulation runs in this process.
    """
    return SumoSimulator(roads, settings.simulator, settings.scenario.vehicle, settings.demand, spans=spans)


def training_traffic(settings: RunSettings, roads: Roads) -> Traffic:
    """Episode k's traffic from (seed, k) alone."""
    horizon = settings.max_steps * settings.simulator.step_length  # [s]

    def traffic(episode: int) -> tuple[Schedule, int, int]:
        rng = generator(settings.seed, Branch.DEMAND, episode)
        schedule = build_schedule(settings.demand, roads, episode=episode, horizon=horizon, rng=rng)
        return schedule, simulator_seed(settings.seed, episode), settings.seed

    return traffic


def evaluation_traffic(settings: RunSettings, roads: Roads, seeds: Sequence[int]) -> Traffic:
    """Held-out traffic: episode i (from 1) is that of the i-th seed, on a branch that training never touches."""
    horizon = settings.max_steps * settings.simulator.step_length  # [s]

    def traffic(episode: int) -> tuple[Schedule, int, int]:
        seed = seeds[episode - 1]
        rng = generator(seed, Branch.EVALUATION, int(Branch.DEMAND))
        schedule = build_schedule(settings.demand, roads, episode=episode, horizon=horizon, rng=rng)
        return schedule, simulator_seed(seed, evaluation=True), seed

    return traffic


def make_env(
    settings: RunSettings,
    *,
    base: Path | None = None,
    traffic: Traffic | None = None,
    spans: Spans | None = None,
) -> DrivingEnv:
    """The environment around a simulator of its own.

    Args:
        settings: of the run.
        base: folder that a relative path of a network starts from.
        traffic: of each episode; None: that of training.
        spans: timers of the loop.
    """
    roads = make_roads(settings, base)
    simulator = make_simulator(settings, roads, spans=spans)
    return DrivingEnv(simulator, settings, traffic or training_traffic(settings, roads), spans=spans)


def make_learner(
    settings: RunSettings, observation: ObservationSpec, action: ActionSpec, *, spans: Spans | None = None
) -> Learner:
    """The learner that `algorithm` names.

    Raises:
        ConfigError: there is no such learner.
        DeviceError: its device is not there.
    """
    learner: Learner = LEARNERS.load(settings.algorithm)(settings, observation, action, spans=spans)
    return learner


def objective_weights(settings: RunSettings) -> list[float] | None:
    """Weights of the objectives in `return`: the fixed preference where there is one, else None (ones)."""
    weights = settings.preference.fixed if settings.algorithm.startswith("pc") else None
    return None if weights is None else [float(weight) for weight in np.asarray(weights)]
