"""Results -> tables, aggregates, verdicts and what is missing. Nothing is measured here."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from opencda_marl.benchmark.plan import CONTROLLERS, LEARNERS, SEEDS_WANTED
from opencda_marl.benchmark.results import EPISODE, density_key, evaluation_of
from opencda_marl.core.speech import counted, number, percent, seconds
from opencda_marl.core.statistics import interquartile_mean, probability_of_improvement, stratified_interval
from opencda_marl.core.verdict import RIVAL_NAMES, RIVALS, in_words, judge

__all__ = [
    "COLUMNS",
    "MEASURES",
    "aggregates",
    "as_csv",
    "as_markdown",
    "beaten",
    "missing",
    "rows_of",
    "scores_of",
    "training_rows",
    "verdicts",
]

COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("policy", str),
    "rate_vph": ("vph/lane", lambda value: f"{value:g}"),
    "success_rate": ("success %", lambda value: percent2(value)),
    "collision_rate": ("collisions %", lambda value: percent2(value)),
    "through_rate": ("through %", percent),
    "near_miss_rate": ("near-misses %", percent),
    "mean_delay_s": ("delay s", lambda value: number(value, 2)),
    "mean_delay_inside_s": ("inside s", lambda value: number(value, 2)),
    "throughput_vph": ("through vph", lambda value: number(value, 0)),
    "stops_per_vehicle": ("stops", lambda value: number(value, 2)),
    "mean_jerk": ("jerk m/s³", lambda value: number(value, 2)),
    "running_at_end": ("inside at end", number),
    "waiting_at_end": ("waiting at end", number),
    "longest_wait_s": ("longest wait s", number),
    "congested": ("congested", lambda value: "-" if value is None else "yes" if value else "no"),
    "vehicles": ("vehicles", str),
}
"""Field of a row -> its heading, and how it is written."""


def percent2(value: float | None) -> str:
    """A share of 1 in percent with two digits: crashes are counted in hundredths."""
    return "-" if value is None else f"{100.0 * value:.2f}"


def rows_of(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each entrant and density that was measured."""
    found = []
    for result in results:
        for rate in densities:
            block = result.get("densities", {}).get(density_key(rate))
            if block is not None:
                row = {name: block.get(name) for name in COLUMNS}
                own = {"name": result["name"], "rate_vph": rate, "through_rate": _through(block)}
                found.append({**row, **own})
    return found


def missing(
    results: Sequence[Mapping[str, Any]],
    densities: Sequence[float],
    entrants: Sequence[str] = (*LEARNERS, *CONTROLLERS),
) -> list[str]:
    """A line for each thing that the whole benchmark would have and these results do not.

    Of runs of one's own (`own`) only densities are asked, not the benchmark's numbers of vehicles and training seeds.
    """
    lines = []
    together = [result["policy"] for result in results if result["kind"] == "learner"]  # mappo-w2 is an entrant, too
    for policy in dict.fromkeys((*entrants, *together)):
        own = [result for result in results if result["policy"] == policy]
        if not own:
            lines.append(f"{policy}: not measured")
            continue
        for result in own:
            absent = [density_key(rate) for rate in densities if density_key(rate) not in result.get("densities", {})]
            if absent:
                lines.append(f"{result['name']}: not measured at {', '.join(absent)} vph")
        own = [result for result in own if not result.get("own")]
        if not own:
            continue
        few = [f"{key}" for key in map(density_key, densities) for r in own if 0 < _vehicles(r, key) < _ENOUGH]
        if few:
            lines.append(f"{policy}: fewer than {_ENOUGH:,} vehicles at {', '.join(dict.fromkeys(few))} vph")
        if own[0]["kind"] == "learner" and len(own) < SEEDS_WANTED:
            lines.append(f"{policy}: {counted(len(own), 'training seed')} of {SEEDS_WANTED}; its spread is not known")
    return lines


_ENOUGH = 5_000


def _vehicles(result: Mapping[str, Any], key: str) -> int:
    return int(result.get("densities", {}).get(key, {}).get("vehicles", 0))


def _through(block: Mapping[str, Any]) -> float | None:
    """arrived / scheduled."""
    arrived, scheduled = (
        sum(row[EPISODE.index(name)] for row in block["per_episode"]) for name in ("arrived", "scheduled")
    )
    return arrived / scheduled if scheduled else None


MEASURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "success_rate": lambda block: block["success_rate"],
    "through_rate": _through,
}
"""What learners are ranked by, shares of 1: who stands still has all the success and gets nobody through."""


def scores_of(
    results: Sequence[Mapping[str, Any]], densities: Sequence[float], name: str = "success_rate"
) -> dict[str, np.ndarray]:
    """Policy -> [runs, densities] of those runs that are complete.

    Args:
        results: files of results.
        densities: that a run must have.
        name: a key of `MEASURES`.
    """
    found: dict[str, list[list[float]]] = {}
    for result in results if densities else ():  # of no densities everything would be complete
        found_blocks = [result.get("densities", {}).get(density_key(rate)) for rate in densities]
        blocks = [None if block is None else MEASURES[name](block) for block in found_blocks]
        if all(value is not None for value in blocks):
            found.setdefault(result["policy"], []).append([float(value) for value in blocks if value is not None])
    return {policy: np.array(rows) for policy, rows in found.items()}


def aggregates(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> list[dict[str, Any]]:
    """Of each learner, over its complete runs and all densities: IQM of each measure with its 95 % interval.

    Returns:
        rows of measure, policy, runs, iqm, low, high, improvement (policy -> probability that a run of ours beats one
        of its); the best first.
    """
    learned = [result for result in results if result["kind"] == "learner"]
    return [row for name in MEASURES for row in _aggregates_of(name, scores_of(learned, densities, name))]


def _aggregates_of(name: str, scores: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    rows = []
    for policy, ours in scores.items():
        low, high = stratified_interval(ours)
        others = {other: theirs for other, theirs in scores.items() if other != policy}
        rows.append(
            {
                "measure": name,
                "policy": policy,
                "runs": len(ours),
                "iqm": interquartile_mean(ours),
                "low": low if len(ours) > 1 else None,  # one run says nothing of its spread
                "high": high if len(ours) > 1 else None,
                "improvement": {other: probability_of_improvement(ours, theirs) for other, theirs in others.items()},
            }
        )
    return sorted(rows, key=lambda row: -row["iqm"])


def training_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What training cost, as text."""
    rows = []
    for result in results:
        told = result.get("training")
        if told is None:
            continue
        times = told.get("time_to_s") or {}
        row = {
            "policy": result["name"],
            "budget min": f"{result['budget_minutes']:g}" if result.get("budget_minutes") else "-",
        }
        row |= {"trained": seconds(told["training_s"]), "env steps": f"{told['env_steps']:,}"}
        row |= {f"{quality} % at 300 vph": seconds(when) for quality, when in times.items()}
        rows.append({**row, "checkpoint": str(result.get("checkpoint", "-")).rpartition("/")[2]})
    return rows


def verdicts(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> dict[str, list[str]]:
    """Entrant that learned -> whom it beats and whom not, in words."""
    return {name: in_words(judged) for name, judged in _judged(results, densities).items()}


def beaten(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> list[dict[str, str]]:
    """A row for each entrant that learned: at which densities it beats each simple driver, and where not and why."""
    return [
        {"policy": name, **{RIVAL_NAMES[rival]: _where(judged, rival, densities) for rival in RIVALS}}
        for name, judged in _judged(results, densities).items()
    ]


def _judged(results: Sequence[Mapping[str, Any]], densities: Sequence[float]) -> dict[str, list[dict[str, Any]]]:
    """Entrant that learned -> every comparison that the results allow, rival by rival."""
    found = {}
    for result in results:
        if result["kind"] != "learner":
            continue
        lines: list[dict[str, Any]] = []
        for key in map(density_key, densities):
            if key in result["densities"]:
                ours = evaluation_of(result, key)
                lines += judge([ours, *_rivals(results, result, key, ours)], result["policy"])
        found[str(result["name"])] = [line for rival in RIVALS for line in lines if line["rival"] == rival]
    return found


def _where(judged: Sequence[Mapping[str, Any]], rival: str, densities: Sequence[float]) -> str:
    """`yes: 100 to 400; NO, more crash: 500`, for one of the drivers."""
    at: dict[str, list[float]] = {}
    for one in judged:
        if one["rival"] == rival and one["vehicles"]:
            worse = [_WORSE[name] for name in _WORSE if one[name] < 0]
            unsure = dict.fromkeys(("equal", "unknown"), "no sure difference")
            says = {"beats": "yes", **unsure}.get(one["verdict"], f"NO, {' and '.join(worse)}")
            at.setdefault(says, []).append(float(one["rate_vph"]))
    return "; ".join(f"{says}: {_spans(rates, densities)}" for says, rates in at.items()) or "not compared"


_WORSE = {"safer": "more crash", "more_through": "fewer get through"}


def _spans(rates: Sequence[float], densities: Sequence[float]) -> str:
    """Neighbours among the densities as `100 to 400`."""
    spans: list[list[float]] = []
    ordered = sorted(densities)
    for rate in sorted(rates):
        if spans and ordered.index(rate) == ordered.index(spans[-1][-1]) + 1:
            spans[-1].append(rate)
        else:
            spans.append([rate])
    return ", ".join(f"{span[0]:g}" if len(span) == 1 else f"{span[0]:g} to {span[-1]:g}" for span in spans)


def _rivals(
    results: Sequence[Mapping[str, Any]], ours: Mapping[str, Any], key: str, answer: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Simple drivers on the same traffic, deciding as often as ours does."""
    rivals = []
    for result in results:
        if result["policy"] not in RIVALS or key not in result.get("densities", {}):
            continue
        alike = result["policy"] == "priority" or result.get("decision_interval") == ours.get("decision_interval")
        theirs = evaluation_of(result, key)
        same = [(r["seed"], r["scheduled"]) for r in theirs["per_episode"]]
        if alike and same == [(r["seed"], r["scheduled"]) for r in answer["per_episode"]]:
            rivals.append(theirs)
    return rivals


def as_markdown(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)]) + "\n"


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of `rows_of` with the names of their fields; absent is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
