"""What matters for learning to cross: MAPPO's recipe with one change a row, at equal training time.

    python benchmarks/ablations.py                          all rows, one after the other (5 minutes and some each)
    python benchmarks/ablations.py --only recipe plain      some of them
    python benchmarks/ablations.py --minutes 10 --seed 2    longer, with another training seed
    python benchmarks/ablations.py --table                  only the table of what is there

Each row is a run of its own in `--out`, on one core, cut by its training time: what costs more a step makes fewer.
Then it drives held-out traffic, greedily, with its last checkpoint. A row whose file is in `--results` is not made
again, and a run that was stopped goes on. Where decisions are more frequent `gae_lambda` is raised so that a crash is
blamed on the same seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opencda_marl.benchmark.measure import record_machine
from opencda_marl.core.files import write_whole
from opencda_marl.core.run_folder import read_episodes

__all__ = ["ROWS", "main", "table"]

PROFILE = "sumo-marl/intersection/route_speed_only_mappo"
ROWS: dict[str, list[str]] = {
    "recipe": [],
    "attention": ["context.encoder=attention"],
    "lstm-frozen": ["context.encoder=lstm"],
    "lstm-trained": ["context.encoder=lstm", "learner.train_context_encoder=true"],
    "every-step": ["decision_interval=1", "learner.gae_lambda=0.9895"],
    "every-2": ["decision_interval=2", "learner.gae_lambda=0.9791"],
    "every-5": ["decision_interval=5", "learner.gae_lambda=0.9487"],
    "nearest": ["neighbours.selection=nearest"],
    "plain": ["observation=plain"],
    "central": ["learner.critic=central"],
    "hidden-intent": ["neighbours.intent=none"],
    "continuous": ["action=target_speed", "learner.entropy=0.003"],
}
"""Changes to the recipe, by name."""

_SHOWN = ("vehicles", "success_rate", "collision_rate", "mean_delay_inside_s", "near_miss_rate")


def _command(*words: str) -> dict[str, Any]:
    """One command in a process of its own, its messages on our stderr.

    Raises:
        SystemExit: it failed.
    """
    line = [sys.executable, "-m", "opencda_marl.cli", *words, "--json"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate()
    except KeyboardInterrupt:  # a terminal has told the command too, which saves what it has
        process.wait()
        raise SystemExit(130) from None
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(words)}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a row to its budget, unless that is done, and evaluate it."""
    run = options.out / f"{name}-s{options.seed}"
    budget = f"max_minutes={options.minutes:g}"
    if (run / "run.json").is_file():
        _command("run", "--resume", str(run), budget)
    else:
        quiet = ("max_episodes=null", "eval_every=0", "evaluation.final=false", "recording.tensorboard=false")
        _command("run", "-t", PROFILE, "--seed", str(options.seed), "--out", str(run), budget, *quiet, *ROWS[name])
    lines = read_episodes(run)
    if not lines:
        raise SystemExit(f"{run}: not one episode in {options.minutes:g} minutes")
    densities = {}
    for rate in options.densities:
        seeds = ("--seeds", f"8000:{8000 + options.episodes}", "--no-compare")
        found = _command("evaluate", str(run / "checkpoints" / "latest"), *seeds, f"demand.rate_vph={rate:g}")
        densities[f"{rate:g}"] = {key: found[key] for key in _SHOWN}
    return {
        "name": name,
        "changes": ROWS[name],
        "seed": options.seed,
        "minutes": options.minutes,
        "env_steps": lines[-1]["env_steps"],
        "densities": densities,
        "machine": record_machine(),
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; a figure is success % / collisions % / mean delay inside."""
    rates = sorted({rate for row in found for rate in row["densities"]}, key=float)
    lines = [
        "| row | changes | minutes | seed | env steps | " + " | ".join(f"greedy, {rate}" for rate in rates) + " |",
        "| --- | --- | --- | --- | --- | " + " | ".join("---" for _ in rates) + " |",
    ]
    for row in found:
        figures = [_figures(row["densities"][rate]) if rate in row["densities"] else "" for rate in rates]
        changes = ", ".join(f"`{change}`" for change in row["changes"])
        cells = [row["name"], changes, f"{row['minutes']:g}", row["seed"], f"{row['env_steps']:,}", *figures]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _figures(block: Mapping[str, Any]) -> str:
    if block["success_rate"] is None:
        return "nobody arrived"
    delay = "" if block["mean_delay_inside_s"] is None else f" / {block['mean_delay_inside_s']:.2f} s"
    return f"{100 * block['success_rate']:.2f} / {100 * block['collision_rate']:.2f}{delay}"


def _positive(text: str) -> float:
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _read(file: Path) -> dict[str, Any]:
    """A row's file.

    Raises:
        SystemExit: it is none.
    """
    try:
        found = dict(json.loads(file.read_text()))
        table([found])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{file} is not the file of a row: {error}; remove it, and the row is made again") from error
    return found


def _stored(options: argparse.Namespace, name: str) -> Path:
    return Path(options.results) / f"{name}-s{options.seed}-{options.minutes:g}min.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is left, print the table of what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--minutes", type=_positive, default=5.0, help="of training")
    parser.add_argument("--seed", type=int, default=1, help="of training")
    parser.add_argument("--densities", type=_positive, nargs="+", default=[300.0, 400.0], help="vehicles/h/lane")
    parser.add_argument("--episodes", type=_count, default=30, help="a density")
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/ablations"))
    parser.add_argument("--table", action="store_true", help="make nothing")
    options = parser.parse_args(arguments)
    found = []
    for name in options.only:
        file = _stored(options, name)
        if not file.is_file() and not options.table:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, f"{json.dumps(measure(name, options), indent=1)}\n".encode())
        if file.is_file():
            found.append(_read(file))
    if not found:
        raise SystemExit(f"there is no row in {options.results} yet")
    sys.stdout.write(f"{table(found)}\n")


if __name__ == "__main__":
    main()
