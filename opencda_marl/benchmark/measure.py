"""Evaluations that are left, in child processes; each answer is in the files before the next one is waited for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opencda_marl.benchmark.plan import CHOICE, Entrant, Wanted
from opencda_marl.benchmark.results import density_key, result_of, short_figures, training, write_result
from opencda_marl.benchmark.standing import left, traffic_of
from opencda_marl.config import to_yaml
from opencda_marl.core.children import run_all
from opencda_marl.core.errors import Interrupted
from opencda_marl.core.files import write_whole, writing
from opencda_marl.core.machine import describe_machine, git_commit
from opencda_marl.core.run_folder import read_run
from opencda_marl.core.stopping import StopRequest
from opencda_marl.launch.folder import MatrixFolder
from opencda_marl.report import choose_checkpoint, driven_in, episodes_of

__all__ = ["Job", "Measurement", "Tell", "record_machine", "run_jobs"]

_MODULE = "opencda_marl.evaluate"

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One request to a child, and what becomes of its answer."""

    name: str  # of its files
    request: dict[str, Any]
    record: Callable[[dict[str, Any]], None]


class Measurement:
    """Everything that is left to be evaluated of what is trained.

    Args:
        wanted: densities and episodes.
        matrix: whose cells are trained.
        results: folder of the files.
        command: that was typed, for the record.
        workers: children at once.
        tell: hears (what, episodes driven, episodes in all).
    """

    def __init__(
        self, wanted: Wanted, matrix: MatrixFolder, results: Path, *, command: str, workers: int, tell: Tell
    ) -> None:
        self._wanted, self._matrix, self._results = wanted, matrix, results
        self._command, self._workers, self._tell = command, workers, tell
        self._folder = matrix.path / "evaluations"

    def run(self, entrants: Sequence[Entrant]) -> list[str]:
        """Evaluate what is left; returns the names whose files changed.

        Raises:
            Interrupted: somebody asked to stop; what was finished is in the files.
            OpenCDAError: an evaluation failed.
        """
        stands = {row["name"]: row for row in left(self._wanted, entrants, self._matrix, self._results)}
        due = [entrant for entrant in entrants if stands[entrant.name]["state"] == "evaluate"]
        for entrant in due:
            jobs = self._jobs(entrant, stands[entrant.name])
            run_jobs(
                jobs,
                folder=self._folder,
                workers=self._workers,
                tell=self._tell,
                command=self._command,
                what=f"{entrant.name}, held-out traffic",
            )
        return [entrant.name for entrant in due]

    def _jobs(self, entrant: Entrant, stands: Mapping[str, Any]) -> list[Job]:
        known = {} if stands["again"] else result_of(self._results, entrant.name)
        result = known or self._begin(entrant)
        config = self._config(entrant)
        jobs = []
        for rate in stands["missing"]:
            seeds = traffic_of(self._wanted, entrant, rate)
            policy = (
                entrant.policy
                if entrant.cell is None
                else str(self._matrix.run(entrant.cell.id) / result["checkpoint"])
            )
            request = {
                "jobs": [{"policy": policy, "rates_vph": [rate]}],
                "config": str(config),
                "profile": result["profile"],
                "seeds": [seeds.start, seeds.stop],
            }
            jobs.append(Job(f"{entrant.name}-{density_key(rate)}", request, self._recorder(result, rate)))
        return jobs

    def _recorder(self, result: dict[str, Any], rate: float) -> Callable[[dict[str, Any]], None]:
        def record(answer: dict[str, Any]) -> None:
            there = result_of(self._results, result["name"])  # another command may measure other densities beside
            same = all(there.get(name) == result.get(name) for name in ("identity", "checkpoint", "training"))
            beside = there["densities"] if there and same else {}
            blocks = {**beside, **result["densities"], density_key(rate): short_figures(answer)}
            result["densities"] = dict(sorted(blocks.items(), key=lambda item: float(item[0])))
            result["date"] = time.strftime("%Y-%m-%d")
            write_result(self._results, result)

        return record

    def _config(self, entrant: Entrant) -> Path:
        """A folder with the settings that it drives in."""
        if entrant.cell is not None:
            return self._matrix.run(entrant.cell.id)
        folder = self._matrix.path / "controllers" / entrant.name
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", to_yaml(entrant.settings).encode(), durable=False)
        return folder

    def _begin(self, entrant: Entrant) -> dict[str, Any]:
        """What is known before anything is measured."""
        result: dict[str, Any] = {
            "name": entrant.name,
            "policy": entrant.policy,
            "kind": entrant.kind,
            "identity": entrant.identity,
            "profile": None,
            "decision_interval": entrant.settings.decision_interval,
            "commit": git_commit(Path(__file__).resolve().parent),
            "machine": record_machine(),
            "date": time.strftime("%Y-%m-%d"),
            "command": self._command,
            "settings": entrant.depends_on,
            "densities": {},
        }
        if entrant.cell is None:
            return result
        run = self._matrix.run(entrant.cell.id)
        facts = read_run(run)
        chosen = self._choose(run, entrant)
        trained = {
            "commit": facts.get("git"),
            "machine": record_machine(facts.get("machine", {})),
            "profile": entrant.cell.profile,
        }
        budget = {"seed": entrant.cell.seed, "budget_minutes": entrant.cell.budgets["max_minutes"]}
        return {**result, **trained, **budget, "checkpoint": f"checkpoints/{chosen.name}", "training": training(run)}

    def _choose(self, run: Path, entrant: Entrant) -> Path:
        def jobs(requests: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, Any]:
            answers: dict[str, Any] = {}
            asked = [
                Job(f"{entrant.name}-{name}", dict(request), lambda _answer: None) for name, request in requests.items()
            ]
            found = run_jobs(
                asked, folder=self._folder, workers=self._workers, tell=self._tell, command=self._command, what=what
            )
            for name in requests:
                answers[name] = found[f"{entrant.name}-{name}"]
            return answers

        longer = replace(entrant.settings.evaluation, selection_seeds=list(CHOICE))
        return choose_checkpoint(run, replace(entrant.settings, evaluation=longer), jobs)


def record_machine(facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What figures depend on; not whose machine it was, nor what else it did.

    Args:
        facts: as a run recorded them; None: of this machine.
    """
    facts = describe_machine() if facts is None else facts
    return {name: facts[name] for name in ("system", "processor", "cores", "memory_gib") if name in facts}


def run_jobs(
    jobs: Sequence[Job], *, folder: Path, workers: int, tell: Tell, command: str, what: str = "held-out traffic"
) -> dict[str, Any]:
    """Answers of all jobs by name; each is recorded as soon as it is there.

    Args:
        jobs: the first ones are started first.
        folder: of their files.
        workers: at once.
        tell: hears (what, episodes driven, episodes in all).
        command: that does the rest after a stop.
        what: for `tell`.

    Raises:
        Interrupted: somebody asked to stop.
        OpenCDAError: one failed.
    """
    waiting = {job.name: job for job in jobs}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)  # nothing may have been trained here
    for name in waiting:
        for kind in ("answer.json", "progress"):  # of an earlier launch
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    files = [folder / f"{job.name}.progress" for job in jobs]
    total = sum(episodes_of(job.request) for job in jobs)

    def collect() -> None:
        for name, job in list(waiting.items()):
            file = folder / f"{name}.answer.json"
            if file.is_file():
                rows = json.loads(file.read_bytes())
                if len(job.request["jobs"]) == 1 and len(rows) == 1:
                    job.record(rows[0])
                del waiting[name]

    with StopRequest() as stop:

        def going_on(_done: int) -> bool:
            collect()
            tell(what, sum(map(driven_in, files)), total)
            return not stop.requested()

        requests = {job.name: job.request for job in jobs}
        try:
            found = run_all(_MODULE, requests, folder=folder, workers=workers, going_on=going_on)
        finally:
            collect()  # what ended beside one that failed is measured all the same
        if stop.requested():
            raise Interrupted(
                f"stopped: {len(jobs) - len(waiting)} of {len(jobs)} evaluations are done and saved",
                fix=f"for the rest: {command}",
            )
    return found
