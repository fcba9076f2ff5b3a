"""One policy elsewhere than it was trained: among people, half deaf, in densities that it never saw. One table."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opencda_marl.benchmark.measure import Job, Tell, record_machine, run_jobs
from opencda_marl.benchmark.plan import Wanted
from opencda_marl.benchmark.results import density_key, result_of, short_figures, write_result
from opencda_marl.config import config_hash, from_run_folder
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.files import read_regular, require_writable
from opencda_marl.core.machine import git_commit
from opencda_marl.evaluate import find_policy
from opencda_marl.settings.run import RunSettings

__all__ = ["cases_of", "generalise"]

_HEAVY = 300.0  # [vehicles/h/lane]
_SHARES = (0.25, 0.5, 0.75)
_DROPPED = 0.2
_EXTREMES = (50.0, 500.0, 600.0, 700.0)  # [vehicles/h/lane]


def cases_of(settings: RunSettings) -> dict[str, tuple[float, list[str]]]:
    """Name -> density and settings beside the policy's own.

    Args:
        settings: that it was trained in; densities inside its mixture are not new to it.
    """
    rates = settings.demand.rate_vph if isinstance(settings.demand.rate_vph, list) else [settings.demand.rate_vph]
    cases: dict[str, tuple[float, list[str]]] = {"as trained": (_HEAVY, [])}
    for share in _SHARES:
        cases[f"{100 * share:g} % of vehicles, people drive the others"] = (_HEAVY, [f"demand.cav_share={share}"])
    radius = settings.neighbours.radius / 2.0
    cases[f"V2X radius {radius:g} m instead of {2 * radius:g} m"] = (_HEAVY, [f"neighbours.radius={radius:g}"])
    cases[f"{100 * _DROPPED:g} % of neighbour rows lost"] = (_HEAVY, [f"neighbours.dropout={_DROPPED}"])
    cases["others' movements hidden"] = (_HEAVY, ["neighbours.intent=none"])
    for rate in _EXTREMES:
        if not min(rates) <= rate <= max(rates):
            cases[f"{rate:g} vph/lane, never seen in training"] = (rate, [])
    return cases


def generalise(
    policy: str,
    *,
    name: str,
    wanted: Wanted,
    results: Path,
    work: Path,
    workers: int,
    command: str,
    tell: Tell,
) -> dict[str, Any]:
    """Drive every case that is left; typed again it does the rest.

    Args:
        policy: run, checkpoint or `bundled:NAME`.
        name: of the file of results.
        wanted: episodes.
        results: folder of the file.
        work: folder for requests and answers.
        workers: children at once.
        command: that was typed.
        tell: hears (what, done, in all).

    Raises:
        ConfigError: it is a controller.
        CheckpointError: there is no such policy.
        Interrupted: somebody asked to stop; finished cases are in the file.
    """
    found = find_policy(policy)
    if found.folder is None:
        raise ConfigError(
            f"{policy} learned nothing, so there is nothing to generalise", fix="name a run or a checkpoint"
        )
    settings = from_run_folder(found.folder)
    # its files, not where they lie: another clone has the same bundled policies
    weights = hashlib.sha256(read_regular((found.checkpoint or found.folder) / "manifest.json")).hexdigest()[:12]
    identity = f"{config_hash(settings)} {weights}"
    require_writable(results)
    known = result_of(results, name)
    result = known if known.get("identity") == identity else _begin(policy, name, identity, command)
    jobs = []
    for index, (case, (rate, overrides)) in enumerate(cases_of(settings).items()):
        seeds = wanted.traffic(rate, settings.max_steps, settings.simulator.step_length)
        block = result["cases"].get(case)
        if block is not None and block["seeds"] == [seeds.start, seeds.stop]:
            continue
        job = {"policy": str(found.checkpoint), "rates_vph": [rate], "overrides": overrides}
        request = {"jobs": [job], "config": str(found.folder), "seeds": [seeds.start, seeds.stop]}
        order = list(cases_of(settings))
        jobs.append(Job(f"{name}-{index}", request, _recorder(results, result, case, order, rate, overrides)))
    run_jobs(jobs, folder=work, workers=workers, tell=tell, command=command, what=f"{name}, elsewhere")
    return result


def _begin(policy: str, name: str, identity: str, command: str) -> dict[str, Any]:
    return {
        "name": name,
        "policy": policy,
        "kind": "generalisation",
        "identity": identity,
        "commit": git_commit(Path(__file__).resolve().parent),
        "machine": record_machine(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "cases": {},
    }


def _recorder(
    results: Path, result: dict[str, Any], case: str, order: list[str], rate: float, overrides: list[str]
) -> Callable[[Mapping[str, Any]], None]:
    def record(answer: Mapping[str, Any]) -> None:
        block = {"rate_vph": density_key(rate), "settings": overrides, **short_figures(answer)}
        blocks = {**result["cases"], case: block}
        result["cases"] = {one: blocks[one] for one in order if one in blocks}
        result["date"] = time.strftime("%Y-%m-%d")
        write_result(results, result)

    return record
