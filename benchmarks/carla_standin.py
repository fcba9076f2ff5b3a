"""What CARLA's client and its protocol cost: whole steps against the stand-in. Says nothing about CARLA's own speed.

A step is: controls of all vehicles in one batch, a tick, places and velocities of all vehicles from the snapshot. The
client spins on a core while it waits for a frame, so the figures need two that are idle.

    python benchmarks/carla_standin.py [--vehicles 1 15 50] [--steps 1000] [--json]
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import carla
import msgpack

import opencda_marl
from opencda_marl.standin import StandIn

CROSSING = Path(opencda_marl.__file__).parent / "scenarios" / "intersection" / "intersection.xodr"


def counters(port: int) -> dict[str, Any]:
    """Of the stand-in."""
    unpacker = msgpack.Unpacker(raw=False)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(msgpack.packb([0, 1, "standin_counters", [[False]]]))
        while True:
            unpacker.feed(connection.recv(1 << 16))
            for _, _, _, ((_, found),) in unpacker:
                return dict(found)


def percentiles(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile. [ms]"""
    times = sorted(times)
    return {"p50": 1e3 * times[len(times) // 2], "p99": 1e3 * times[len(times) * 99 // 100]}


def repeated(function: Callable[[int], None], steps: int) -> dict[str, float]:
    """Time of each call. [ms]"""
    times = []
    for index in range(steps):
        begun = time.perf_counter()
        function(index)
        times.append(time.perf_counter() - begun)
    return percentiles(times)


def measure(vehicles: int, steps: int) -> dict[str, Any]:
    """One stand-in, one client, one number of vehicles."""
    begun = time.perf_counter()
    with StandIn() as server:
        client = carla.Client("127.0.0.1", server.port)
        client.set_timeout(20.0)
        world = client.generate_opendrive_world(CROSSING.read_text(encoding="utf-8"))
        settings = world.get_settings()
        settings.synchronous_mode, settings.fixed_delta_seconds = True, 0.05
        world.apply_settings(settings)
        started = time.perf_counter() - begun
        kind = world.get_blueprint_library().find("vehicle.tesla.model3")
        cars = [world.spawn_actor(kind, point).id for point in world.get_map().get_spawn_points()[:vehicles]]
        world.tick()
        command = carla.command

        def step(index: int) -> None:
            control = carla.VehicleControl(throttle=0.2 + 0.01 * (index % 7))
            client.apply_batch_sync([command.ApplyVehicleControl(car, control) for car in cars], False)
            world.tick()
            snapshot = world.get_snapshot()
            for car in cars:
                seen = snapshot.find(car)
                seen.get_transform()
                seen.get_velocity()

        repeated(step, 50)
        found = {"vehicles": vehicles, "step_ms": repeated(step, steps)}
        found["tick_ms"] = repeated(lambda _: world.tick(), steps)
        told = counters(server.port)
    found["server_ms"] = {"p50": told["tick_ms_p50"], "p99": told["tick_ms_p99"]}
    return {**found, "start_s": started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vehicles", type=int, nargs="+", default=[1, 15, 50])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = [measure(vehicles, given.steps) for vehicles in given.vehicles]
    if given.json:
        sys.stdout.write(f"{json.dumps(found)}\n")
        return
    sys.stdout.write(
        "| vehicles | whole step p50 / p99 | tick alone p50 | the stand-in's share p50 |\n|---|---|---|---|\n"
    )
    for row in found:
        step, tick, own = row["step_ms"], row["tick_ms"], row["server_ms"]
        times = f"{step['p50']:.2f} / {step['p99']:.2f} ms | {tick['p50']:.2f} ms | {own['p50']:.2f} ms"
        sys.stdout.write(f"| {row['vehicles']} | {times} |\n")


if __name__ == "__main__":
    main()
