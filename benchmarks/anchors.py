"""What driving without a policy comes to on the bundled crossing: figures that a policy must be seen against.

    python benchmarks/anchors.py                     the tables, as Markdown (about a minute on one core)
    python benchmarks/anchors.py --seeds 1 2 3 4     other traffic
    python benchmarks/anchors.py --json FILE         the figures behind them too

free flow    a lone vehicle at the envelope: as fast as the limits ahead allow with 3 m/s^2 of braking
full speed   everybody at the envelope, blind to everybody else
random       everybody at a share of the envelope drawn anew twice a second
priority     SUMO's human drivers under the right of way
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.roads import Movement, Roads
from opencda_marl.core.seeds import Branch, generator, simulator_seed
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.state import Accounting, Command, Driver, Ending, Field, Schedule, TrafficState
from opencda_marl.settings.driving import EnvelopeSettings
from opencda_marl.settings.traffic import DemandSettings, SimulatorSettings, VehicleSettings
from opencda_marl.simulators.demand import build_schedule
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.sumo import SumoSimulator

__all__ = ["envelope", "free_flow", "main", "measure"]

STEPS = 2400  # 120 s
DECISION = 10  # steps between two random draws
RATES = (100.0, 200.0, 300.0, 400.0)  # [vehicles/h/lane]
Policy = Callable[[TrafficState, Float64[np.ndarray, " slots"]], Float64[np.ndarray, " slots"]]


def envelope(roads: Roads, state: TrafficState, braking: float) -> Float64[np.ndarray, " slots"]:
    """Upper bound of each vehicle's speed: the limit here, and those ahead from where braking still meets them. [m/s]

    Args:
        roads: limits and where they begin.
        state: the traffic.
        braking: comfortable. [m/s^2]
    """
    route, at = state.routes, state.values[:, Field.PROGRESS]
    before, inside = at < roads.stop_line[route], at < roads.junction_exit[route]
    bound = np.where(before, roads.limit_entry[route], np.where(inside, roads.limit_inside[route], np.inf))
    bound = np.minimum(bound, np.where(inside, np.inf, roads.limit_exit[route]))
    for limit, begins in ((roads.limit_inside, roads.stop_line), (roads.limit_exit, roads.junction_exit)):
        ahead = begins[route] - at
        slowed = np.sqrt(limit[route] ** 2 + 2 * braking * np.maximum(ahead, 0.0))
        bound = np.where(ahead > 0, np.minimum(bound, slowed), bound)
    return bound


def _full_speed(_: TrafficState, bound: Float64[np.ndarray, " slots"]) -> Float64[np.ndarray, " slots"]:
    return bound


def _random(seed: int) -> Policy:
    rng = np.random.default_rng(seed)
    share = np.zeros(0)

    def policy(state: TrafficState, bound: Float64[np.ndarray, " slots"]) -> Float64[np.ndarray, " slots"]:
        nonlocal share
        if state.step % DECISION == 0:
            share = rng.uniform(size=len(bound))
        return share * bound

    return policy


def _episode(simulator: Simulator, schedule: Schedule, seed: int, policy: Policy, steps: int) -> dict[str, Any]:
    """Drive; returns counts, and travel times of those that arrived with their routes."""
    braking = EnvelopeSettings().comfort_braking
    state = simulator.reset(schedule, seed)
    command = Command(np.zeros(simulator.info.slots), np.zeros(simulator.info.slots, np.bool_))
    account = Accounting()
    times: list[tuple[int, float]] = []
    present = 0
    for _ in range(steps):
        command.controlled[:] = state.alive & (state.drivers == Driver.CAV)
        command.target_speed[:] = policy(state, envelope(simulator.roads, state, braking))
        state, events = simulator.step(command)
        present += int(state.alive.sum())
        for slot, ending in zip(events.slots.tolist(), events.endings.tolist(), strict=True):
            if ending == Ending.ARRIVED:
                times.append((int(state.routes[slot]), state.time - float(state.values[slot, Field.DEPARTED_AT])))
        account.arrived += int((events.endings == Ending.ARRIVED).sum())
        account.collided += int((events.endings == Ending.COLLIDED).sum())
        account.removed += int((events.endings == Ending.REMOVED).sum())
        account.waiting = events.waiting
    account.running, account.scheduled = int(state.alive.sum()), len(schedule.ids)
    account.check(schedule.episode)
    return {"account": account, "times": times, "present": present / steps}


def free_flow(simulator: Simulator) -> list[dict[str, Any]]:
    """A lone vehicle on each route: measured, and as `Roads.free_flow_time` computes it. [s]"""
    roads, vehicle, braking = simulator.roads, VehicleSettings(), EnvelopeSettings().comfort_braking
    rows = []
    for route in range(roads.routes):
        alone = Schedule(
            episode=0,
            rate_vph=0.0,
            ids=np.zeros(1, np.int64),
            times=np.zeros(1),
            routes=np.array([route], np.int16),
            speed_factors=np.ones(1),
            drivers=np.array([Driver.CAV], np.int8),
        )
        measured = _episode(simulator, alone, 1, _full_speed, 600)["times"][0][1]
        computed = roads.free_flow_time(route, vehicle.departure_speed, vehicle.acceleration, braking)
        rows.append(
            {"route": route, "movement": int(roads.movement[route]), "measured": measured, "computed": computed}
        )
    return rows


def measure(simulator: Simulator, policy: str, rate: float, seeds: Sequence[int]) -> dict[str, Any]:
    """One controller at one rate, pooled over episodes of 120 s.

    Args:
        simulator: on the bundled crossing.
        policy: "full speed", "random" or "priority".
        rate: [vehicles/h/lane]
        seeds: one episode each.
    """
    demand = DemandSettings(rate_vph=rate, cav_share=0.0 if policy == "priority" else 1.0)
    total, times, present = Accounting(), [], 0.0
    for seed in seeds:
        rng = generator(seed, Branch.EVALUATION, int(Branch.DEMAND))
        schedule = build_schedule(demand, simulator.roads, episode=0, horizon=STEPS * 0.05, rng=rng)
        act = _random(seed) if policy == "random" else _full_speed
        found = _episode(simulator, schedule, simulator_seed(seed, evaluation=True), act, STEPS)
        for name in ("scheduled", "waiting", "running", "arrived", "collided", "removed"):
            setattr(total, name, getattr(total, name) + getattr(found["account"], name))
        times += [seconds for _, seconds in found["times"]]
        present += found["present"] / len(seeds)
    ended = total.arrived + total.collided + total.removed
    return {
        "policy": policy,
        "rate_vph": rate,
        "scheduled": total.scheduled,
        "crashed_percent": 100.0 * total.collided / ended,
        "removed": total.removed,
        "travel_time_s": float(np.mean(times)) if times else None,
        "stuck": total.running + total.waiting,
        "stuck_percent": 100.0 * (total.running + total.waiting) / total.scheduled,
        "vehicles": present,
    }


def main(arguments: Sequence[str]) -> str:
    """Measure everything; returns the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 7)))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    roads = load_roads(find_network("intersection"))
    simulator = SumoSimulator(roads, SimulatorSettings(), VehicleSettings(), DemandSettings())
    try:
        alone = free_flow(simulator)
        rows = [
            measure(simulator, policy, rate, chosen.seeds)
            for policy in ("full speed", "random", "priority")
            for rate in RATES
        ]
    finally:
        simulator.close()
    if chosen.json:
        chosen.json.write_text(json.dumps({"free_flow": alone, "traffic": rows}, indent=2) + "\n", encoding="utf-8")
    lines = ["| movement | free flow, measured [s] | computed [s] |", "|---|---|---|"]
    groups = [(m.name.lower(), [row for row in alone if row["movement"] == m]) for m in Movement]
    for name, same in [*groups, ("mean", alone)]:
        measured, computed = (float(np.mean([row[key] for row in same])) for key in ("measured", "computed"))
        lines.append(f"| {name} | {measured:.2f} | {computed:.2f} |")
    lines += [
        "",
        f"{len(chosen.seeds)} episodes of 120 s each:",
        "",
        "| controller | vph/lane | vehicles | crashed % | travel time [s] | still inside or waiting | mean present |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['policy']} | {r['rate_vph']:.0f} | {r['scheduled']} | {r['crashed_percent']:.1f} | "
        f"{r['travel_time_s']:.1f} | {r['stuck']} ({r['stuck_percent']:.0f} %) | {r['vehicles']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
