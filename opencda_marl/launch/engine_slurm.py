"""Runners as jobs of Slurm, through submitit: a job works on a pack of cells, as many at once as `--parallel` says.

A job that Slurm preempts, or whose time is up, saves its cells' last boundaries, and goes back into the queue.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import ConfigError, SimulatorError
from opencda_marl.core.files import write_whole, writing
from opencda_marl.launch.engines import MARGIN, Job, processors
from opencda_marl.launch.folder import Matrix, MatrixFolder, read_json
from opencda_marl.launch.keeper import Kept
from opencda_marl.launch.processes import is_alive, read_process
from opencda_marl.launch.runners import Seat, live_runners

__all__ = ["SlurmEngine", "check_path"]

_HOURS = 24  # of a job, unless told otherwise; submitit's own default is five minutes
_REQUEUES = 1000  # of a job whose time is up
_POLL = 0.2  # [s]
_UNKNOWN = 600.0  # [s] since a job was submitted, within which it need not be known yet


class SlurmEngine:
    """Slurm, or with `cluster=local` jobs on this machine, to try it out.

    Args:
        folder: of the matrix.
        matrix: as it stands there.
        given: parameters of submitit's AutoExecutor: `timeout_min`, `gpus_per_node`, `cpus_per_task`, `mem_gb`, and
            Slurm's own with `slurm_` before them: `slurm_partition`, `slurm_account`, `slurm_qos`, …

    Raises:
        ConfigError: an unknown parameter; submitit or Slurm is not there; a path that Slurm cannot write its logs to.
    """

    def __init__(self, folder: MatrixFolder, matrix: Matrix, given: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ConfigError(
                "--engine slurm: the package submitit is not installed", fix="pip install 'opencda-marl[slurm]'"
            ) from error
        wanted = dict(given)
        self._cluster = str(wanted.pop("cluster", "slurm"))
        self._folder, self._submitit = folder, submitit
        grace = matrix.options.deadline("stopping") + MARGIN
        self._seat = Seat(folder.path, grace, Path.cwd())
        check_path(folder.path, given)
        known = {"timeout_min": 60 * _HOURS, "name": "opencda-marl", "cpus_per_task": processors(matrix)}
        if self._cluster == "slurm":
            known |= {"slurm_signal_delay_s": int(grace)}
        try:
            self._executor = submitit.AutoExecutor(
                folder.path / "jobs" / "%j", cluster=self._cluster, slurm_max_num_timeout=_REQUEUES
            )
            self._executor.update_parameters(**{**known, **wanted})
        except (ValueError, RuntimeError, NameError, AssertionError, TypeError) as error:
            raise ConfigError(
                f"--engine slurm: {error}",
                fix="--engine-set takes submitit's parameters: timeout_min=1440, slurm_partition=gpu, gpus_per_node=1; "
                "without Slurm: --engine local",
            ) from error

    def runners(self) -> int:
        """One job."""
        return 1

    def place(self, name: str) -> Job:
        """A job."""
        try:
            job = self._executor.submit(_Task(self._seat, name))
        except (self._submitit.core.utils.FailedJobError, self._submitit.core.utils.FailedSubmissionError) as error:
            raise SimulatorError(
                f"Slurm refused a job: {error}", fix="see what sbatch says to the same options"
            ) from error
        process = read_process(int(job.job_id)) if self._cluster == "local" else None
        told = {
            "submitted": time.time(),
            "job": job.job_id,
            "cluster": self._cluster,
            "start_time": process.start_time if process else None,
        }
        file = self._folder.runner(name) / "job.json"
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(told).encode())
        return _SlurmJob(job)

    def adopt(self) -> dict[str, Job]:
        """Jobs outlive whoever has submitted them."""
        told = {name: read_json(self._folder.runner(name) / "job.json") for name in self._folder.runners()}
        found: dict[str, Job] = {}
        for name, facts in told.items():
            if facts.get("cluster") != self._cluster:
                continue
            if self._cluster == "local":
                found[name] = _LocalJob(int(facts["job"]), int(facts["start_time"] or 0))
            else:
                job: Any = self._submitit.SlurmJob(self._folder.path / "jobs" / "%j", facts["job"])
                if not self._forgotten(name, job, facts):
                    found[name] = _SlurmJob(job)
        return {name: job for name, job in found.items() if job.ended() is None}

    def _forgotten(self, name: str, job: Any, facts: Mapping[str, Any]) -> bool:
        """Slurm knows nothing of a job for a moment after it was submitted, and long after it has ended."""
        if name in live_runners(self._folder) or time.time() - float(facts.get("submitted", 0.0)) < _UNKNOWN:
            return False
        return bool(job.watcher.get_state(job.job_id, mode="force") == "UNKNOWN")

    def close(self) -> None:
        """Nothing is held."""


def check_path(path: Path, given: Mapping[str, Any]) -> None:
    """Can Slurm write its logs there?

    Raises:
        ConfigError: it cannot.
    """
    if given.get("cluster", "slurm") == "slurm" and any(sign in str(path) for sign in "\n%"):
        raise ConfigError(
            f"--engine slurm: Slurm takes no line break or % in a path: {str(path)!r}", fix="choose another folder"
        )


class _Task:
    """What a job does: it has the runner as its child."""

    def __init__(self, seat: Seat, name: str) -> None:
        self._seat, self._name = seat, name
        self._kept: Kept | None = None

    def __call__(self) -> int:
        """Until the runner ends; its exit code."""
        # Slurm tells every process of a job that its time is up; it would be the end of those that do not expect it
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        kept = self._kept = self._seat.take(self._name)
        signal.signal(signal.SIGUSR2, before)
        for number in (signal.SIGTERM, signal.SIGINT):  # preemption (Slurm requeues the job), scancel
            signal.signal(number, lambda *_: kept.terminate())
        while (code := kept.poll()) is None:
            time.sleep(_POLL)
        return code

    def checkpoint(self) -> Any:
        """Time is up: called by submitit, which puts what is returned into the queue again."""
        from submitit.helpers import DelayedSubmission

        if self._kept is not None:
            self._kept.terminate()
            self._kept.wait(self._seat.grace)
        return DelayedSubmission(_Task(self._seat, self._name))


class _SlurmJob:
    def __init__(self, job: Any) -> None:
        self._job = job
        self._cancelled = False

    def ended(self) -> str | None:
        if not self._job.done():
            return None
        return f"job {self._job.job_id}: {self._job.state.lower()}"

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            try:
                self._job.cancel()
            except (OSError, subprocess.CalledProcessError):  # it has just ended
                self._cancelled = False


class _LocalJob:
    """One of this machine, whose parent is gone."""

    def __init__(self, pid: int, start_time: int) -> None:
        self._pid, self._start_time = pid, start_time

    def ended(self) -> str | None:
        return None if is_alive(self._pid, self._start_time) else f"job {self._pid}: gone"

    def cancel(self) -> None:
        if is_alive(self._pid, self._start_time):
            os.kill(self._pid, signal.SIGTERM)
