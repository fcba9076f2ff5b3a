"""Settings -> roads, simulator, traffic, environment, learner: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from opencda_marl.core.allocator import keep_freed_memory
from opencda_marl.core.roads import Roads
from opencda_marl.core.seeds import Branch, generator, simulator_seed
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import ActionSpec, Learner, ObservationSpec
from opencda_marl.core.state import Schedule
from opencda_marl.env.compiled import cache_folder
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.learners import LEARNERS
from opencda_marl.nn.process_group import ProcessGroup
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import WITH_SERVER
from opencda_marl.simulators.carla import CarlaSimulator
from opencda_marl.simulators.carla_map import read_map
from opencda_marl.simulators.carla_session import check_client
from opencda_marl.simulators.cosim import CosimSimulator
from opencda_marl.simulators.demand import build_schedule, draw_rate, ramped, spread_place
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.rehearsal import Rehearsal
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.simulators.sumo import SumoSimulator

__all__ = [
    "Traffic",
    "evaluation_traffic",
    "kernels_are_kept",
    "make_env",
    "make_learner",
    "make_roads",
    "make_simulator",
    "quiet_process",
    "training_traffic",
    "warm_up",
]

Traffic = Callable[[int], tuple[Schedule, int, int]]
"""Episode -> its schedule, the simulator's seed, the seed that its line names."""


def make_roads(settings: RunSettings) -> Roads:
    """The crossing; read once per process and file.

    Raises:
        ConfigError: there is no such network.
    """
    return _roads(find_network(settings.scenario.network))


@lru_cache(maxsize=8)
def _roads(network: Path) -> Roads:
    return load_roads(network)


def make_simulator(settings: RunSettings, roads: Roads, *, spans: Spans | None = None) -> Simulator:
    """The simulator that the settings ask for: SUMO in this process, CARLA's client in a child of it.

    Raises:
        BackendMissingError: it is not installed.
        SimulatorError: another simulation runs in this process; there is no server, or one that cannot be used.
        DeadlineError: the server does not answer.
    """
    if settings.simulator.backend in WITH_SERVER:
        return _with_server(settings, roads, spans)
    return SumoSimulator(roads, settings.simulator, settings.scenario.vehicle, settings.demand, spans=spans)


def _with_server(settings: RunSettings, roads: Roads, spans: Spans | None) -> Simulator:
    carla, scenario = settings.carla, settings.scenario
    check_client()  # what is missing is said at once, and without a child
    xodr = read_map(scenario, roads.network)
    made: Callable[[], Simulator]
    if settings.simulator.backend == "cosim":
        made = partial(CosimSimulator, roads, xodr, carla, settings.simulator, scenario.vehicle, settings.demand)
    else:
        step_length = settings.simulator.step_length
        made = partial(CarlaSimulator, roads, xodr, carla, scenario.vehicle, settings.demand, step_length)
    # the child's own deadlines come first, and say more; these are for a client that hangs or spins
    return RemoteSimulator(
        made,
        deadline=3 * carla.tick_timeout + 5.0,
        patience=carla.connect_timeout + 3 * carla.load_timeout,
        setting="carla.tick_timeout",
        spans=spans,
    )


def training_traffic(settings: RunSettings, roads: Roads) -> Traffic:
    """Episode k's traffic from (seed, k), and with several workers from their number.

    Several workers drive in rounds and wait for the slowest of a round, and dense traffic takes longer. So the episodes
    of a round share the rate, that of the first of them; who drives where and when is each episode's own. Where rates
    are spread evenly, a round is a turn.
    """
    horizon = settings.max_steps * settings.simulator.step_length  # [s]
    workers = settings.workers if isinstance(settings.workers, int) else 1  # `auto` is resolved before anybody drives
    begin = float(generator(settings.seed, Branch.DEMAND, 0).uniform())  # episodes count from 1

    def rate_of(episode: int, rng: np.random.Generator) -> float:
        turn = (episode - 1) // workers
        place = spread_place(begin, turn) if settings.demand.rate_draw == "spread" else None
        return draw_rate(ramped(settings.demand, episode), rng, place)

    def traffic(episode: int) -> tuple[Schedule, int, int]:
        rng = generator(settings.seed, Branch.DEMAND, episode)
        rate = rate_of(episode, rng)
        first = episode - (episode - 1) % workers
        if first != episode:
            rate = rate_of(first, generator(settings.seed, Branch.DEMAND, first))
        schedule = build_schedule(settings.demand, roads, episode=episode, horizon=horizon, rng=rng, rate=rate)
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
    traffic: Traffic | None = None,
    simulator: Simulator | None = None,
    spans: Spans | None = None,
) -> DrivingEnv:
    """The environment around a simulator of its own.

    Args:
        settings: of the run.
        traffic: of each episode; None: that of training.
        simulator: None: a new one, as the settings say. The environment closes it.
        spans: timers of the loop.
    """
    roads = make_roads(settings)
    moving = simulator or make_simulator(settings, roads, spans=spans)
    return DrivingEnv(moving, settings, traffic or training_traffic(settings, roads), spans=spans)


def make_learner(
    settings: RunSettings,
    observation: ObservationSpec,
    action: ActionSpec,
    *,
    spans: Spans | None = None,
    group: ProcessGroup | None = None,
) -> Learner:
    """The learner that `algorithm` names.

    Args:
        settings: of the run.
        observation: layout of what vehicles see.
        action: kind of what they do.
        spans: timers of the loop.
        group: of the workers that learn together; None: there is one, and any learner will do.

    Raises:
        ConfigError: there is no such learner.
        DeviceError: its device is not there.
    """
    together = {} if group is None else {"group": group}
    learner: Learner = LEARNERS.load(settings.algorithm)(settings, observation, action, spans=spans, **together)
    return learner


def kernels_are_kept() -> bool:
    """Is compiled code of the environment on the disk? Else compiling it takes a while."""
    folder = cache_folder()
    return folder is not None and any(folder.rglob("*.nbi"))


def warm_up(settings: RunSettings, simulator: Simulator, learner: Learner) -> None:
    """Compile and import what an episode needs, in a rehearsal without SUMO; nobody remembers it afterwards.

    Args:
        settings: of the run.
        simulator: whose roads and size to rehearse with; it is not touched.
        learner: acts, and is then put back into the state that it is in now.
    """
    info = simulator.info
    stage = Rehearsal(simulator.roads, slots=info.slots, step_length=info.step_length)
    shorter = replace(settings, max_steps=4 * settings.decision_interval)
    before = learner.state()
    with closing(DrivingEnv(stage, shorter, stage.traffic)) as env:
        env.record_trajectory(True)
        step = env.reset(0)
        while not step.done:
            step = env.step(learner.act(step.observation, explore=True))
        env.record()
    learner.load(before)


@contextmanager
def quiet_process(threads: int | None) -> Iterator[None]:
    """Torch has so many threads and NumPy's BLAS one: two pools used in turn wait for each other (23 times slower).

    Memory that is freed stays with the process, where torch is used.

    Args:
        threads: of torch; None: nobody needs torch here, so it is not imported.
    """
    with threadpool_limits(1, "blas"):
        if threads is None:
            yield
            return
        import torch

        keep_freed_memory()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
