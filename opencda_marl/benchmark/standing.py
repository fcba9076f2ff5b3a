"""What of the benchmark is done and what is left, why a file does not count, and about how long the rest takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opencda_marl.benchmark.plan import CHOICE, Entrant, Wanted
from opencda_marl.benchmark.results import density_key, result_of, training
from opencda_marl.launch.folder import MatrixFolder, is_done

__all__ = ["differences", "estimate", "left", "traffic_of"]

_ABSENT = "nothing"
_STEPS = 2400  # of the episodes that the next two are about
_ANY, _PER_RATE = 0.25, 0.0025  # [s] an episode on one core, and more for each vehicle/h/lane: about 1 s at 300
_CHECKPOINTS = 2  # best and latest, between which is chosen
_LISTED = 6  # settings


def left(wanted: Wanted, entrants: Sequence[Entrant], matrix: MatrixFolder, results: Path) -> list[dict[str, Any]]:
    """How each entrant stands: {name, policy, kind, state, again, differs, missing (densities)}; nothing is started.

    States: `train`, `evaluate`, `done`; `again` where the file is of other settings and will be replaced, and then
    `differs` says in which.

    Raises:
        CheckpointError: a file is broken, or holds another entrant's results.
    """
    rows = []
    for entrant in entrants:
        known = result_of(results, entrant.name)
        fresh = known.get("identity") == entrant.identity
        missing = [rate for rate in wanted.densities if not (fresh and _has(known, rate, wanted, entrant))]
        trained = entrant.cell is None or is_done(entrant.cell, matrix.status(entrant.cell.id))
        state = "done" if not missing else "evaluate" if trained else "train"
        row = {"name": entrant.name, "policy": entrant.policy, "kind": entrant.kind, "state": state}
        again = bool(known) and not fresh
        differs = differences(known, entrant) if again else []
        if fresh and missing and entrant.cell is not None and not _of(known, matrix.run(entrant.cell.id)):
            again, missing = True, list(wanted.densities)  # one policy a file
            differs = ["another training of the same settings: the one that made the file is not here"]
        rows.append({**row, "again": again, "differs": differs, "missing": missing})
    return rows


def _of(known: Mapping[str, Any], run: Path) -> bool:
    """Was the policy of these results trained by this run?"""
    told = known.get("training") or {}
    here = training(run) if run.is_dir() else {}
    return bool(told) and all(told.get(name) == here.get(name) for name in ("episodes", "env_steps", "training_s"))


def _has(result: Mapping[str, Any], rate: float, wanted: Wanted, entrant: Entrant) -> bool:
    """Was this density measured on at least the traffic that is wanted?"""
    block = result.get("densities", {}).get(density_key(rate))
    seeds = traffic_of(wanted, entrant, rate)
    return block is not None and block["seeds"][0] == seeds.start and block["seeds"][1] >= seeds.stop


def traffic_of(wanted: Wanted, entrant: Entrant, rate: float) -> range:
    """Seeds that an entrant drives at a density."""
    return wanted.traffic(rate, entrant.settings.max_steps, entrant.settings.simulator.step_length)


def differences(known: Mapping[str, Any], entrant: Entrant) -> list[str]:
    """In which settings a file is not of this entrant, in words: `learner.epochs: 4 in the file, 8 wanted`."""
    there, here = dict(known.get("settings") or {}), entrant.depends_on
    if not there:  # a file from before settings were kept in them: what else it says
        there = {name: known[name] for name in ("profile", "decision_interval") if known.get(name) is not None}
        here = {"profile": entrant.cell.profile} if entrant.cell is not None else {}
        here |= {"decision_interval": entrant.settings.decision_interval}
        there = {name: value for name, value in there.items() if name in here}
        here = {name: value for name, value in here.items() if name in there}
    if entrant.cell is not None:
        there["budget_minutes"], here["budget_minutes"] = (
            known.get("budget_minutes"),
            entrant.cell.budgets["max_minutes"],
        )
    names = sorted(name for name in there.keys() | here.keys() if there.get(name, _ABSENT) != here.get(name, _ABSENT))
    found = [f"{name}: {there.get(name, _ABSENT)} in the file, {here.get(name, _ABSENT)} wanted" for name in names]
    if len(found) > _LISTED:
        found = [*found[:_LISTED], f"and {len(found) - _LISTED} more settings"]
    if not known.get("settings"):
        found.append(f"it is from before files kept all settings, made by: {known.get('command', 'nobody knows what')}")
    return found or ["the content of a network file"]


def estimate(
    stands: Sequence[Mapping[str, Any]],
    wanted: Wanted,
    entrants: Sequence[Entrant],
    matrix: MatrixFolder,
    parallel: int,
) -> dict[str, Any]:
    """About how long the rest takes: {training_minutes, episodes, driving_minutes, minutes}.

    Training takes its budgets, less what is already trained; driving is a rule of thumb for one core with nothing else
    to do. `minutes` is the wall-clock time with `parallel` at once.
    """
    by_name = {entrant.name: entrant for entrant in entrants}
    trainings: list[float] = []  # [min]
    drives: list[tuple[int, float]] = []  # episodes, [s] each
    for row in stands:
        entrant = by_name[row["name"]]
        cell, settings = entrant.cell, entrant.settings
        if row["state"] == "train" and cell is not None:
            spent = matrix.status(cell.id).get("training_s", 0.0)
            spent = spent / 60.0 if isinstance(spent, int | float) else 0.0
            trainings.append(max(0.0, float(cell.budgets["max_minutes"] or 0.0) - spent))
        drives += [(len(traffic_of(wanted, entrant, rate)), _seconds(entrant, rate)) for rate in row["missing"]]
        if row["state"] != "done" and cell is not None and (row["state"] == "train" or row["again"]):
            choices = _CHECKPOINTS * (CHOICE[1] - CHOICE[0])
            drives += [(choices, _seconds(entrant, rate)) for rate in settings.evaluation.rates_vph]
    driving = sum(count * each for count, each in drives) / 60.0
    at_once = max(1, parallel)
    whole = max([sum(trainings) / at_once, *trainings]) + driving / at_once
    return {
        "training_minutes": round(sum(trainings), 1),
        "episodes": sum(count for count, _ in drives),
        "driving_minutes": round(driving, 1),
        "minutes": round(whole, 1),
    }


def _seconds(entrant: Entrant, rate: float) -> float:
    """[s] An episode of held-out traffic, about."""
    return (_ANY + _PER_RATE * rate) * entrant.settings.max_steps / _STEPS
