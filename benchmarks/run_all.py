"""Reproduce the tables of docs/performance.md on this machine: `python benchmarks/run_all.py` (or `make bench`).

Every figure is taken beside its floor in the same minutes, so the ratios carry over to other machines and the
milliseconds do not. Takes about twenty minutes on two cores; leave the machine alone meanwhile. The whole loop with an
off-policy learner has a program of its own, `benchmarks/documented_layout.py`.

    python benchmarks/run_all.py                    all tables, as Markdown
    python benchmarks/run_all.py --only env act     some of them
    python benchmarks/run_all.py --json FILE        the figures behind the tables too
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opencda_marl.core.machine import describe_machine, versions
from opencda_marl.tools.bench import bench
from opencda_marl.tools.peers import PEERS
from opencda_marl.tools.profile import profile

_RECIPE = "sumo-marl/intersection/route_speed_only_pcmappo"
_PAGE = "sumo-marl/intersection/page_layout_pcmappo"
_OFF_POLICY = "sumo-marl/intersection/page_layout_pcmasac"
_SETS = ["context.encoder=deepsets", "context.hidden=64", "learner.train_context_encoder=false"]


def _command(
    what: str, name: str, threads: int, vehicles: int | None, overrides: Sequence[str], against: Sequence[str] = ()
) -> str:
    words = [f"opencda-marl bench {what}", f"-t {name}", f"--threads {threads}"]
    words += [f"--against {','.join(against)}"] if against else []
    return " ".join([*words, *([f"--vehicles {vehicles}"] if vehicles else []), *overrides])


def _bench(
    what: str,
    *,
    name: str = _RECIPE,
    vehicles: int | None = None,
    threads: int = 1,
    overrides: Sequence[str] = (),
    against: Sequence[str] = (),
) -> dict[str, Any]:
    found = bench(what, name=name, vehicles=vehicles, threads=threads, overrides=overrides, against=against)
    return {"command": _command(what, name, threads, vehicles, overrides, against), **found}


def env_table() -> list[dict[str, Any]]:
    """The environment's step at 25 and at 100 vehicles."""
    return [_bench("env", vehicles=vehicles) for vehicles in (25, 100)]


def act_table() -> list[dict[str, Any]]:
    """Acting on one thread and on two."""
    return [_bench("act", vehicles=25, threads=threads) for threads in (1, 2)]


def update_table() -> list[dict[str, Any]]:
    """The update of the recipe and of the page's layout."""
    return [_bench("update", name=name, threads=threads) for name in (_RECIPE, _PAGE) for threads in (1, 2)]


def peers_table() -> list[dict[str, Any]]:
    """A MASAC update beside those of other libraries, which the extra `bench` installs."""
    return [_bench("update", name=_OFF_POLICY, threads=threads, against=list(PEERS)) for threads in (1, 2)]


def run_table() -> list[dict[str, Any]]:
    """Whole runs, learning included."""
    return [
        _bench("run", threads=1),
        _bench("run", vehicles=25, threads=1),
        _bench("run", name=_PAGE, vehicles=25, threads=1),
        _bench("run", name=_PAGE, vehicles=25, threads=2),
        _bench("run", name=_PAGE, vehicles=25, threads=1, overrides=_SETS),
    ]


def profile_table() -> list[dict[str, Any]]:
    """One episode of 2,400 steps at about 14 vehicles under cProfile."""
    found = []
    for name in (_RECIPE, _PAGE):
        with tempfile.TemporaryDirectory() as folder:
            overrides = ["demand.rate_vph=200", "demand.rate_draw=choice"]
            measured = profile(name, folder=Path(folder), overrides=overrides)
            command = f"opencda-marl profile -t {name} {' '.join(overrides)}"
            found.append({"command": command, **measured, "pstats": None})
    return found


def start_table() -> list[dict[str, Any]]:
    """How long the command line takes to answer."""
    questions = {
        "--help": ["--help"],
        "config show": ["config", "show", "-t", _RECIPE],
        "a misspelt key": ["config", "show", "-t", _RECIPE, "max_episode=3"],
    }
    rows = []
    for what, words in questions.items():
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-m", "opencda_marl.cli", *words], capture_output=True, check=False)
            seconds.append(time.perf_counter() - begin)
        rows.append({"command": f"opencda-marl {' '.join(words)}", "name": what, "s": statistics.median(seconds)})
    return rows


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "env": env_table,
    "act": act_table,
    "update": update_table,
    "peers": peers_table,
    "run": run_table,
    "profile": profile_table,
    "start": start_table,
}


def markdown(what: str, results: Sequence[dict[str, Any]]) -> str:
    """One table of the page."""
    if what == "start":
        rows = [[r["name"], f"{r['s']:.2f}"] for r in results]
        return _table(["command line", "s"], rows)
    if what == "profile":
        rows = [
            [
                f"`{r['command']}`",
                f"{r['ms_per_step']:.2f}",
                f"{r['unprofiled']['ms_per_step']:.2f}",
                "yes" if r["identical_summary"] else "NO",
                f"{100 * r['unprofiled']['unaccounted_share']:.1f} %",
            ]
            for r in results
        ]
        return _table(["command", "ms per step, profiled", "plain", "summaries equal", "outside spans"], rows)
    if what == "run":
        return _table(*_run_rows(results))
    head = ["command", "what", "ms", "floor ms", "ratio", "speed-up", "vehicles", "mean rows"]
    rows = []
    for r in results:
        for row in r["rows"]:
            figures = [f"{row['ms_median']:.3f}", f"{row['floor_ms_median']:.3f}"]
            figures += [f"{row['ratio']:.2f}", f"{row['speedup']:.2f}"]
            rows.append([f"`{r['command']}`", row["name"], *figures, f"{row['vehicles']:g}", f"{row['mean_rows']:.1f}"])
    return _table(head, rows)


def _run_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    head = [
        "command",
        "ms per env step",
        "floor ms",
        "vehicles",
        "mean rows",
        "epochs",
        "start s",
        "MiB",
        "outside spans",
    ]
    rows = []
    for r in results:
        figures = [
            f"{r['ms_median']:.2f}",
            f"{r['floor_ms_median']:.3f}",
            f"{r['vehicles']:g}",
            f"{r['mean_rows']:.1f}",
        ]
        figures += [str(r["epochs"]), f"{r['start_s']:.1f}", f"{r['memory_mib']:.0f}"]
        rows.append([f"`{r['command']}`", *figures, f"{100 * r['unaccounted_share']:.1f} %"])
    return head, rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Measure, print Markdown, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    machine = describe_machine()
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions()}
    sys.stdout.write(f"{results['date']}, {machine}\n")
    for what in wanted.only:
        results[what] = TABLES[what]()
        load = [f"{r['load']:.2f}" for r in results[what] if "load" in r]
        others = [f"{r['others']:.2f}" for r in results[what] if "others" in r]
        noted = f"\n\nload before: {', '.join(load)}; CPUs that others used: {', '.join(others)}" if load else ""
        sys.stdout.write(f"\n## {what}\n\n{markdown(what, results[what])}{noted}\n")
        sys.stdout.flush()
        if wanted.json is not None:
            wanted.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
