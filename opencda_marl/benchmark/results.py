"""Results as small JSON files: one an entrant, written again with each density that is done.

    benchmarks/results/mappo-s1.json   who, what it was trained with, on which machine, and a block of figures a density

The files are the truth: tables, plots and pages are made from them alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opencda_marl.benchmark.plan import entrant_of
from opencda_marl.benchmark.shape import EPISODE, ShapeError, check_result, parse
from opencda_marl.config import from_run_folder
from opencda_marl.core.errors import CheckpointError
from opencda_marl.core.files import read_regular, typed, write_whole, writing
from opencda_marl.core.run_folder import read_episodes, read_metrics, read_run

__all__ = [
    "EPISODE",
    "QUALITIES",
    "Found",
    "density_key",
    "evaluation_of",
    "find_results",
    "read_result",
    "read_results",
    "result_of",
    "results_of_run",
    "short_figures",
    "time_to",
    "training",
    "write_result",
]

QUALITIES = (0.95, 0.99, 0.995)
"""Success rates at 300 vph whose first time is told."""

_HEAVY = 300.0  # [vehicles/h/lane]
_LEFT_OUT = ("policy", "profile", "checkpoint", "per_episode", "seeds", "rate_vph", "preference", "comparison")
_DIGITS = 6


def density_key(rate: float) -> str:
    """`300`."""
    return f"{rate:g}"


def short_figures(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What an evaluation says, in the form of the files."""
    figures = {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in answer.items()
        if name not in _LEFT_OUT
    }
    rows = [[row[name] for name in EPISODE] for row in answer["per_episode"]]
    return {**figures, "seeds": list(answer["seeds"]), "per_episode": rows}


def evaluation_of(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A density of a file, in the form of an evaluation again."""
    block = result["densities"][key]
    rows = [dict(zip(EPISODE, row, strict=True)) for row in block["per_episode"]]
    return {**block, "policy": result["policy"], "rate_vph": float(key), "per_episode": rows}


def write_result(folder: Path, result: Mapping[str, Any]) -> Path:
    """One file; lines of it are stable, so that a change shows what changed.

    Raises:
        StorageError: it cannot be written.
    """
    file = folder / f"{result['name']}.json"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    head = {name: value for name, value in result.items() if name not in ("settings", "densities", "cases")}
    lines = json.dumps(head, indent=1).removesuffix("\n}")
    if "settings" in result:  # some two hundred: one line of them
        lines += f',\n "settings": {json.dumps(result["settings"])}'
    for name in ("densities", "cases"):
        if name in result:
            blocks = [f"  {json.dumps(key)}: {json.dumps(block)}" for key, block in result[name].items()]
            lines += f',\n "{name}": {{\n' + ",\n".join(blocks) + "\n }"
    write_whole(file, f"{lines}\n}}\n".encode())
    return file


def results_of_run(run: Path) -> list[dict[str, Any]]:
    """A run folder with its final table: the policy's results, and those of the controllers beside it.

    They are marked as `own`: what the benchmark asks of its results (seeds, vehicles, a command) is not asked of them.

    Raises:
        CheckpointError: it has no table, or one that an earlier version made.
    """
    file, facts = run / "plots" / "comparison.json", read_run(run)
    if not file.is_file():
        raise CheckpointError(
            f"{typed(run)} has no final table", fix=f"opencda-marl run --resume {typed(run)} evaluation.final=true"
        )
    settings = from_run_folder(run)
    common = {
        "decision_interval": settings.decision_interval,
        "commit": facts.get("git"),
        "profile": facts.get("profile"),
    }
    common |= {"machine": facts.get("machine", {}), "date": str(facts.get("created", "-"))[:10], "own": True}
    found: dict[str, dict[str, Any]] = {}
    trained = training(run)
    try:
        for row in json.loads(read_regular(file)):
            own = row["checkpoint"] is not None
            name = run.absolute().name if own else row["policy"]
            policy, kind = (entrant_of(settings), "learner") if own else (row["policy"], "controller")
            result = found.setdefault(name, {"name": name, "policy": policy, "kind": kind, **common, "densities": {}})
            result["densities"][density_key(row["rate_vph"])] = short_figures(row)
            if own:
                result |= {"seed": settings.seed, "checkpoint": str(row["checkpoint"]), "training": trained}
        for result in found.values():
            check_result(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{typed(file)} is not of this version: {why}", fix=f"opencda-marl run --resume {typed(run)} makes it again"
        ) from error
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What files of results hold, and what was wrong with some of them."""

    results: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)  # files that say again what another one says
    broken: list[CheckpointError] = field(default_factory=list)


def find_results(sources: Sequence[Path]) -> Found:
    """Files of results, and those in folders, by name; nothing is raised.

    Each entrant and training seed counts once in a source: of copies, the file that bears its entrant's name.
    """
    found = Found([])
    for source in sources:
        kept: dict[tuple[Any, ...], tuple[Path, dict[str, Any]]] = {}
        for file in _files(source):
            try:
                result = read_result(file)
            except CheckpointError as error:
                found.broken.append(error)
                continue
            known = kept.get(_who(result))
            if known is None:
                kept[_who(result)] = (file, result)
                continue
            one, other = (file, result), known
            if known[0].stem == known[1]["name"] or file.stem != result["name"]:
                one, other = known, (file, result)
            kept[_who(result)] = one
            same = "says the same as" if one[1] == other[1] else "is of the same entrant and training seed as"
            found.notes.append(f"left out: {typed(other[0])} {same} {typed(one[0])}, and counts once")
        found.results.extend(result for _, result in kept.values())
    return found


def _files(source: Path) -> Iterator[Path]:
    yield from sorted(source.glob("*.json")) if source.is_dir() else [source]


def _who(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for two measurements of one thing."""
    if result["kind"] == "generalisation":
        return (result["kind"], result["name"])
    which = result.get("seed", result["name"])
    return (result["kind"], result["policy"], which, result.get("decision_interval"))


def read_result(file: Path) -> dict[str, Any]:
    """One file of results.

    Raises:
        CheckpointError: it cannot be read, or some field is not as it should be; file and field are named.
    """
    try:
        result = parse(read_regular(file))
        check_result(result)
    except OSError as error:
        raise CheckpointError(
            f"{typed(file)} cannot be read: {error.strerror}", fix="mend that, or remove it"
        ) from error
    except ShapeError as error:
        raise CheckpointError(
            f"{typed(file)} is no file of results: {error}", fix="measure it again, or remove it"
        ) from error
    return result


def read_results(sources: Sequence[Path]) -> list[dict[str, Any]]:
    """Likewise, where a broken file is an error.

    Raises:
        CheckpointError: some are broken; all of them are named.
    """
    found = find_results(sources)
    if found.broken:
        raise CheckpointError("; ".join(error.message for error in found.broken), fix=found.broken[0].fix)
    return found.results


def result_of(folder: Path, name: str) -> dict[str, Any]:
    """What the file of one entrant holds; empty: there is none.

    Raises:
        CheckpointError: it is broken, or holds another entrant's results.
    """
    file = folder / f"{name}.json"
    if not file.exists():
        return {}
    result = read_result(file)
    if result["name"] != name:
        raise CheckpointError(
            f"{typed(file)} holds the results of {result['name']}",
            fix=f"name it {result['name']}.json, or remove it",
        )
    return result


def training(run: Path) -> dict[str, Any]:
    """What training cost, and when it was how good.

    Raises:
        CheckpointError: a line of the run lacks something.
    """
    lines = read_episodes(run)
    try:
        spent = sum(line["wall_s"] for line in lines)
        return {
            "episodes": len(lines),
            "env_steps": lines[-1]["env_steps"] if lines else 0,
            "training_s": round(spent, 1),
            "time_to_s": time_to(lines, read_metrics(run)),
            "run": typed(run),
        }
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"episodes.jsonl or metrics.jsonl in {typed(run)} is not of this version: {error}",
            fix="train it again with this version",
        ) from error


def time_to(
    episodes: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]], qualities: Sequence[float] = QUALITIES
) -> dict[str, float | None]:
    """Seconds of training until the first held-out evaluation at 300 vph with at least this success; None: never.

    Args:
        episodes: lines of episodes.jsonl.
        metrics: lines of metrics.jsonl.
        qualities: shares of 1.
    """
    clock, at = 0.0, {}
    for line in episodes:
        clock += line["wall_s"]
        at[line["episode"]] = clock
    seen = sorted(
        (at[line["episode"]], line["success_rate"])
        for line in metrics
        if line["kind"] == "evaluation"
        and line["rate_vph"] == _HEAVY
        and line["success_rate"] is not None
        and line["episode"] in at
    )
    return {
        f"{100 * quality:g}": next((round(when, 1) for when, rate in seen if rate >= quality), None)
        for quality in qualities
    }
