"""What a second worker brings: environment steps per second of one run with 1, 2, ... workers, in turns.

    python benchmarks/workers_scaling.py                      1 and 2 workers, three times each
    python benchmarks/workers_scaling.py --workers 1 2 4      more of them
    python benchmarks/workers_scaling.py --apart              beside them as many runs apart, one worker each
    python benchmarks/workers_scaling.py --json FILE          the figures too

Each measurement is a run of its own with the same budget. Steps count from the end of the first update on, so start-up,
compiling and the first touch of everything are left out. Beside the wall clock stand the seconds of processor time per
1000 steps: on a machine that others use as well they say more, and what they cannot grow below is the same work.
`busy` is the share of the cores that other processes took meanwhile: quote no figure where it is not next to nothing.

Cores share caches, memory and a clock, so N runs at once are each slower than one alone. Their sum (`--apart`) is what
the machine has to give: no run with N workers can have more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from opencda_marl.core.machine import cores, describe_machine
from opencda_marl.core.run_folder import read_episodes
from opencda_marl.tools.child_runs import ChildRun

__all__ = ["main", "steady_rate"]

PROFILE = "sumo-marl/intersection/route_speed_only_pcmappo"
DENSITIES = ("demand.rate_vph=[100, 400]", "demand.rate_draw=range")


def steady_rate(lines: Sequence[Mapping[str, Any]]) -> float:
    """Environment steps per second after the first update; `wall_s` of a line is its share of the run's time."""
    later = [line for line in lines if line["updates_performed"] > 1]
    if not later:
        raise ValueError("too short: there was one update at most")
    return float(sum(line["steps"] for line in later) / sum(line["wall_s"] for line in later))


def measure(
    workers: int, folder: Path, name: str, options: argparse.Namespace, *, apart: bool = False
) -> dict[str, Any]:
    """One run of so many workers; or so many runs at once with one worker each, whose steps are added up."""
    budget = (f"max_env_steps={options.steps // workers if apart else options.steps}", "max_episodes=null")
    fixed = (*budget, "max_minutes=null", "evaluation.final=false", "eval_every=0", *DENSITIES, *options.set)
    kinds = [(f"seed={k + 1}", "workers=1") for k in range(workers)] if apart else [(f"workers={workers}",)]
    runs = [ChildRun(options.profile, folder, f"{name}-{k}", overrides=(*kind, *fixed)) for k, kind in enumerate(kinds)]
    before, machine, began = os.times(), psutil.cpu_times(), time.monotonic()
    for run, process in [(run, run.start()) for run in runs]:
        run.finish(process, deadline=3600.0)
    after, lasted = os.times(), time.monotonic() - began
    ours = after.children_user + after.children_system - before.children_user - before.children_system
    lines = [read_episodes(run.path) for run in runs]
    every = [line for one in lines for line in one]
    others = max(0.0, _worked(psutil.cpu_times()) - _worked(machine) - ours) / lasted / (os.cpu_count() or 1)
    return {
        "workers": workers,
        "apart": apart,
        "steps_per_s": sum(steady_rate(one) for one in lines),
        "processor_s_per_1000_steps": 1000.0 * ours / sum(line["steps"] for line in every),
        "waiting": sum(line["spans"].get("wait", 0.0) for line in every) / sum(line["wall_s"] for line in every),
        "busy": others,
    }


def _worked(times: Any) -> float:
    """[s] of all cores, whoever used them."""
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--apart", action="store_true", help="as many runs apart, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=96_000, help="of each run")
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    kinds = [(workers, False) for workers in options.workers]
    kinds += [(workers, True) for workers in options.workers if workers > 1 and options.apart]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="workers-scaling-") as folder:
        for turn in range(options.rounds):
            for workers, apart in kinds:
                name = f"{turn}-{workers}{'-apart' if apart else ''}"
                row = {"round": turn, **measure(workers, Path(folder), name, options, apart=apart)}
                rows.append(row)
                sys.stdout.write("  ".join(f"{key} {value:.4g}" for key, value in row.items()) + "\n")
                sys.stdout.flush()
    found = [_summary(workers, apart, rows, options.workers[0]) for workers, apart in kinds]
    for one in found:
        sys.stdout.write("  ".join(f"{key} {value:.4g}" for key, value in one.items()) + "\n")
    if options.json is not None:
        machine = {**describe_machine(), "cores": cores()}
        answer = {"what": "workers-scaling", "profile": options.profile, "set": options.set, "steps": options.steps}
        options.json.write_text(json.dumps({**answer, "machine": machine, "summary": found, "rows": rows}, indent=1))


def _summary(workers: int, apart: bool, rows: Sequence[Mapping[str, Any]], first: int) -> dict[str, float]:
    """Medians, and the median of the ratios of runs that stood side by side."""
    own = [row for row in rows if (row["workers"], row["apart"]) == (workers, apart)]
    base = [row for row in rows if (row["workers"], row["apart"]) == (first, False)]
    ratios = [one["steps_per_s"] / other["steps_per_s"] for one, other in zip(own, base, strict=True)]
    keys = ("steps_per_s", "processor_s_per_1000_steps", "waiting", "busy")
    medians = {key: statistics.median(row[key] for row in own) for key in keys}
    return {"workers": workers, "apart": apart, **medians, "times": statistics.median(ratios)}


if __name__ == "__main__":
    main()
