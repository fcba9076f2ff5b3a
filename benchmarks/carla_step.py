"""What a step through CARLA's client costs: ours against a bare loop of batch, tick and read; and a whole env step.

    python benchmarks/carla_step.py                              against stand-ins of its own
    python benchmarks/carla_step.py --host H --port P            against a real server: fills docs/performance.md
    python benchmarks/carla_step.py --json FILE                  the figures too

15 vehicles. The bare loop and ours run in turns, each in a child process (as in training) and in this process, on a
fresh world each time; medians of blocks. Of a stand-in its own time for a step, by its own clock, is subtracted: what
is left is the client's work, and the way there and back. A real server has no such clock, so nothing is subtracted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from carla_drill import counters

from opencda_marl.assemble import make_roads
from opencda_marl.config import load_profile
from opencda_marl.core.machine import describe_machine
from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import Simulator, SimulatorInfo
from opencda_marl.core.spec import Action
from opencda_marl.core.state import Command, Driver, Events, Schedule, TrafficState, vehicle_id
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.simulators.carla import CarlaSimulator
from opencda_marl.simulators.carla_map import entries, read_map
from opencda_marl.simulators.carla_session import Session
from opencda_marl.simulators.remote import RemoteSimulator
from opencda_marl.standin import StandIn

__all__ = ["BareLoop", "main", "measure"]

VEHICLES = 15
_SLOW = 3.0  # [m/s] nobody reaches the junction within a block
_SETTLE, _STEPS, _RESETS = 60, 200, 5


class BareLoop:
    """The least that a step can be: one batch of controls, one tick, one read of the snapshot; vehicles stand.

    It looks like a simulator so that it can live in the same child as ours; it reports no state.
    """

    def __init__(self, roads: Roads, xodr: str, settings: CarlaSettings, step_length: float, slots: int) -> None:
        self.roads = roads
        self.info = SimulatorInfo("bare loop", step_length=step_length, slots=slots)
        self._state = TrafficState.empty(slots)
        self._session = Session(settings, xodr, step_length)
        self._carla, self._actors = self._session.carla, []
        self._begin = entries(roads, 5.0)
        self._blueprint = self._session.blueprints.find(settings.blueprint)

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:  # noqa: ARG002 - the look of a simulator
        """Vehicles in a row on each arm."""
        command, carla = self._carla.command, self._carla
        self._session.batch([command.DestroyActor(actor) for actor in self._actors])
        self._session.tick()
        spawning = []
        for number in range(VEHICLES):
            route, behind = number % self.roads.routes, 10.0 * (number // self.roads.routes)
            yaw = float(self._begin.yaw[route])
            x, y = self._begin.location[route].tolist()
            x, y = x + behind * math.cos(math.radians(yaw)), y + behind * math.sin(math.radians(yaw))
            place = carla.Transform(carla.Location(x, y, 0.3), carla.Rotation(yaw=yaw))
            spawning.append(command.SpawnActor(self._blueprint, place))
        self._actors = [answer.actor_id for answer in self._session.batch(spawning) if not answer.error]
        assert len(self._actors) == VEHICLES
        self._session.tick()
        return self._state

    def step(self, command: Command) -> tuple[TrafficState, Events]:  # noqa: ARG002 - likewise
        """Batch, tick, read."""
        carla = self._carla
        control = carla.VehicleControl(0.0, 0.0, 0.5)
        orders = [carla.command.ApplyVehicleControl(actor, control) for actor in self._actors]
        if orders:
            self._session.batch(orders)
        snapshot = self._session.tick()
        found: list[float] = []
        for actor in self._actors:
            one = snapshot.find(actor)
            transform, velocity = one.get_transform(), one.get_velocity()
            place = transform.location
            found += (place.x, place.y, place.z, transform.rotation.yaw, velocity.x, velocity.y)
        np.array(found)
        self._state.step += 1
        return self._state, Events()

    def close(self) -> None:
        """Leave the server as it was."""
        self._session.close()


def _schedule(roads: Roads, episode: int = 1) -> Schedule:
    """One vehicle on every route, and three more behind."""
    times = np.array([0.0] * roads.routes + [1.5] * (VEHICLES - roads.routes))
    routes = np.arange(VEHICLES, dtype=np.int16) % roads.routes
    ids = np.array([vehicle_id(episode, i) for i in range(VEHICLES)], np.int64)
    drivers = np.full(VEHICLES, int(Driver.CAV), np.int8)
    return Schedule(episode, 0.0, ids, times, routes.astype(np.int16), np.ones(VEHICLES), drivers)


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[tuple[CarlaSettings, Callable[[], float]]]:
    """Where a server is, and its own time for a step so far [ms], NaN if it does not tell."""
    if options.port is not None:
        yield CarlaSettings(host=options.host, port=options.port), lambda: math.nan
        return
    with StandIn() as server:
        yield CarlaSettings(port=server.port), lambda: float(counters(server.port)["tick_ms_p50"])


def _block(simulator: Simulator, roads: Roads, *, moving: bool) -> tuple[float, list[float]]:
    """[ms] a step, median; [ms] of resets with everybody on the road."""
    command = Command(np.full(simulator.info.slots, _SLOW), np.ones(simulator.info.slots, np.bool_))
    state = simulator.reset(_schedule(roads), 1)
    for _ in range(_SETTLE):
        simulator.step(command)
    times = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        simulator.step(command)
        times.append(1e3 * (time.perf_counter() - begun))
    assert not moving or state.alive.sum() == VEHICLES
    resets = []
    for episode in range(2, 2 + _RESETS):
        begun = time.perf_counter()
        simulator.reset(_schedule(roads, episode), 1)
        resets.append(1e3 * (time.perf_counter() - begun))
        for _ in range(_SETTLE):
            simulator.step(command)
    return statistics.median(times), resets


def _env_block(env: DrivingEnv) -> float:
    """[ms] a step with backend, observation, command and reward; everybody decides in every step. Median."""
    step = env.reset(1)
    times = []
    for number in range(_SETTLE + _STEPS):
        rows = len(step.observation)
        action = Action(np.full((rows, 1), -0.6, np.float32))
        begun = time.perf_counter()
        step = env.step(action)
        if number >= _SETTLE:
            times.append(1e3 * (time.perf_counter() - begun) / max(1, step.steps))
    return statistics.median(times)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, in turns."""
    settings = load_profile("momarl/intersection/mappo", overrides=["decision_interval=1", "max_steps=1000"]).settings
    roads = make_roads(settings)
    xodr, vehicle, dt = read_map(settings.scenario, roads.network), settings.scenario.vehicle, 0.05
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(options.repeats):
        for where in ("child", "same process"):
            for name in ("bare", "ours"):
                with _server(options) as (carla, own):
                    if name == "bare":
                        made: Callable[[], Simulator] = partial(BareLoop, roads, xodr, carla, dt, 316)
                    else:
                        made = partial(CarlaSimulator, roads, xodr, carla, vehicle, settings.demand, dt)
                    simulator = RemoteSimulator(made, deadline=60.0) if where == "child" else made()
                    with closing(simulator):
                        each, resets = _block(simulator, roads, moving=name == "ours")
                        note(f"{where}, {name}", each)
                        note(f"{where}, {name}, server", own())
                        if name == "ours" and where == "child":
                            note("reset", statistics.median(resets))
        with _server(options) as (carla, _):
            note("env", _env(settings, roads, xodr, carla))
    return _sum_up(found, options)


def _env(settings: RunSettings, roads: Roads, xodr: str, carla: CarlaSettings) -> float:
    vehicle, dt = settings.scenario.vehicle, settings.simulator.step_length
    made = partial(CarlaSimulator, roads, xodr, carla, vehicle, settings.demand, dt)
    simulator = RemoteSimulator(made, deadline=60.0)
    with closing(DrivingEnv(simulator, replace(settings, carla=carla), lambda _: (_schedule(roads), 1, 1))) as env:
        return _env_block(env)


def _sum_up(found: dict[str, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians; the ratio of the client's work, by pairs of turns."""
    answer: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    for where in ("child", "same process"):
        work = {}
        for name in ("bare", "ours"):
            own = [0.0 if math.isnan(value) else value for value in found[f"{where}, {name}, server"]]
            work[name] = [total - part for total, part in zip(found[f"{where}, {name}"], own, strict=True)]
            answer[f"{where}, {name}, client"] = statistics.median(work[name])
        pairs = zip(work["ours"], work["bare"], strict=True)
        answer[f"{where}, ratio"] = statistics.median(ours / bare for ours, bare in pairs)
    server = "stand-in (a test double)" if options.port is None else f"{options.host}:{options.port}"
    return {
        "figures": {name: None if math.isnan(value) else round(value, 3) for name, value in answer.items()},
        "turns": {name: [round(value, 3) for value in values] for name, values in found.items()},
        "server": server,
        "load": os.getloadavg()[0],
        "machine": describe_machine(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="of a server that runs; without it stand-ins are started")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    answer = measure(options)
    figures, say = answer["figures"], sys.stdout.write
    say(f"against {answer['server']}, {VEHICLES} vehicles, {options.repeats} turns; ms a step, medians\n")
    for where in ("child", "same process"):
        for name in ("bare", "ours"):
            key = f"{where}, {name}"
            say(f"{key:24s} {figures[key]:7.3f}   the server's own {figures[f'{key}, server'] or math.nan:7.3f}   ")
            say(f"client {figures[f'{key}, client']:7.3f}\n")
        say(f"{where + ', ratio':24s} {figures[f'{where}, ratio']:7.2f}\n")
    say(f"{'backend, view, reward':24s} {figures['env']:7.3f}\n{'reset':24s} {figures['reset']:7.3f}\n")
    say(f"load of the machine at the end: {answer['load']:.1f}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
