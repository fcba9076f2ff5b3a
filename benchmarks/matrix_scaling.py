"""What a second cell brings: aggregate steps per second of a matrix with 1, 2, ... cells at once.

    python benchmarks/matrix_scaling.py                       1 and 2 SUMO cells, in turns, three times each
    python benchmarks/matrix_scaling.py --cells 1 2 4 8       more of them
    python benchmarks/matrix_scaling.py --json FILE           the figures too

Each measurement is a matrix of its own, with as many cells as slots, so that all train at the same time. Steps count
while every cell trains: from the last one to begin to the first one to end. Start-up and compiling are left out.
What the launcher itself needs is measured beside it, by its own clocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from opencda_marl.core.machine import cores, describe_machine

__all__ = ["main", "overlap_rate"]

PROFILE = "sumo-marl/intersection/route_speed_only_mappo"


def overlap_rate(traces: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Steps per second of all cells together, over the time in which all of them train.

    Args:
        traces: of each cell (time [s], environment steps), at least two.
    """
    begin = max(trace[0][0] for trace in traces)
    end = min(trace[-1][0] for trace in traces)
    if end <= begin:
        raise ValueError("the cells never trained at the same time: use more steps")
    return sum((_at(trace, end) - _at(trace, begin)) / (end - begin) for trace in traces)


def _at(trace: Sequence[tuple[float, float]], when: float) -> float:
    """Steps at a time, linear between two samples."""
    for (t0, s0), (t1, s1) in itertools.pairwise(trace):
        if t0 <= when <= t1 and t1 > t0:
            return s0 + (s1 - s0) * (when - t0) / (t1 - t0)
    return trace[-1][1]


def measure(cells: int, folder: Path, options: argparse.Namespace, first: int = 0) -> dict[str, Any]:
    """One matrix with so many cells at once, from seed `first` on."""
    settings = [f"max_env_steps={options.steps}", "max_episodes=null", "evaluation.final=false", *options.set]
    more = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "opencda_marl.cli", "matrix", "run", str(folder), "--profiles", options.profile]
    command += ["--seeds", f"{first}:{first + cells}", "--parallel", str(cells), *more]
    traces: dict[str, list[tuple[float, float]]] = {}
    costs: list[tuple[float, float, float]] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        ours = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(0.25)
            _sample(folder, traces)
            if traces and (cost := _cost(ours)) is not None:
                costs.append(cost)
        if process.returncode != 0:
            raise SystemExit(f"the matrix in {folder} failed: opencda-marl matrix status {folder}")
    found = [trace for trace in traces.values() if len(trace) > 1]
    if len(found) != cells:
        raise SystemExit(f"only {len(found)} of {cells} cells in {folder} were seen training: use more --steps")
    return {"cells": cells, "steps_per_s": overlap_rate(found), **_launcher(costs)}


def _sample(folder: Path, traces: dict[str, list[tuple[float, float]]]) -> None:
    for file in folder.glob("cells/*/status.json"):
        try:
            status = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        if status.get("phase") not in ("training", "updating") or "env_steps" not in status:
            continue
        trace = traces.setdefault(file.parent.name, [])
        if not trace or status["updated"] > trace[-1][0]:
            trace.append((float(status["updated"]), float(status["env_steps"])))


def _cost(ours: psutil.Process) -> tuple[float, float, float] | None:
    """Now [s], the launcher's processor time so far [s], its memory [bytes]; None: it has ended."""
    try:
        times, memory = ours.cpu_times(), ours.memory_info().rss
    except psutil.Error:
        return None
    return (time.monotonic(), times.user + times.system, memory) if memory else None


def _launcher(costs: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """What the launcher needs while cells train."""
    (began, busy, _), (ended, busier, _) = costs[0], costs[-1]
    return {
        "launcher_core_share": (busier - busy) / max(1e-9, ended - began),
        "launcher_mib": max(memory for _, _, memory in costs) / 2**20,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in turns, so that a machine that grows slower does so for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24_000, help="environment steps of each cell")
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="matrix-scaling-") as place:
        for repeat in range(options.repeats):
            # there and back, and each time with other seeds: neither the order nor one seed's traffic decides
            for cells in options.cells if repeat % 2 == 0 else options.cells[::-1]:
                found.append(measure(cells, Path(place) / f"{cells}-{repeat}", options, first=repeat))
                say(f"{cells:3d} cells  {found[-1]['steps_per_s']:9.0f} steps/s")
    medians = {
        cells: statistics.median(one["steps_per_s"] for one in found if one["cells"] == cells)
        for cells in options.cells
    }
    least = min(medians)
    share = max(one["launcher_core_share"] for one in found)
    say(f"launcher: {share:.2%} of a core, {max(one['launcher_mib'] for one in found):.0f} MiB")
    for cells, rate in medians.items():
        say(f"{cells:3d} cells  {rate:9.0f} steps/s  {rate / medians[least]:5.2f} times {least}")
    answer = {
        "profile": options.profile,
        "steps": options.steps,
        "cores": cores(),
        "machine": describe_machine(),
        "load": psutil.getloadavg(),
        "medians": medians,
        "ratios": {cells: rate / medians[least] for cells, rate in medians.items()},
        "measurements": found,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(answer, indent=1) + "\n")
    return 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
