"""Where runners are placed: what an engine must be able to do, and the two that there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.scratch import scratch_folder
from opencda_marl.launch.folder import Matrix, MatrixFolder

__all__ = ["MARGIN", "Engine", "Job", "check_engine", "make_engine", "processors"]

MARGIN = 60.0
"""[s] that a runner has for servers and files, after its trainers had theirs to stop."""


class Job(Protocol):
    """A runner that was handed to an engine."""

    def ended(self) -> str | None:
        """How it ended, in words; None: it waits for its turn, or runs."""

    def cancel(self) -> None:
        """It is not wanted any more: one that waits never starts, one that runs is asked to stop (TERM)."""


class Engine(Protocol):
    """An existing scheduler. It knows nothing of cells: it places runners, one on a node or GPU."""

    def runners(self) -> int:
        """How many it would place if nobody said."""

    def place(self, name: str) -> Job:
        """Hand a runner over; returns at once."""

    def adopt(self) -> dict[str, Job]:
        """Runners of an earlier launcher that still wait or run, by name."""

    def close(self) -> None:
        """Let go of it; may be called twice."""


def make_engine(name: str, folder: MatrixFolder, matrix: Matrix, given: Mapping[str, Any]) -> Engine:
    """An engine, connected.

    Args:
        name: ray or slurm.
        folder: of the matrix, on a file system that all machines share.
        matrix: as it stands there.
        given: `--engine-set`.

    Raises:
        ConfigError: an option that it does not know, or it is not installed or not there.
    """
    if name == "ray":
        from opencda_marl.launch.engine_ray import RayEngine

        return RayEngine(folder, matrix, given)
    if name == "slurm":
        from opencda_marl.launch.engine_slurm import SlurmEngine

        return SlurmEngine(folder, matrix, given)
    raise ConfigError(f"--engine {name}: there is no such engine", fix="local, ray or slurm")


def check_engine(name: str, folder: Path, matrix: Matrix, given: Mapping[str, Any]) -> None:
    """Refuse what `make_engine` would refuse, without writing anything or asking a cluster of Ray.

    Raises:
        ConfigError: as there.
    """
    if name == "ray":
        from opencda_marl.launch.engine_ray import check_ray

        check_ray(given)
    elif name == "slurm":
        from opencda_marl.launch.engine_slurm import SlurmEngine, check_path

        check_path(folder.absolute(), given)
        with scratch_folder("slurm") as scratch:  # submitit makes folders when it is asked
            SlurmEngine(MatrixFolder(Path(scratch)), matrix, given).close()


def processors(matrix: Matrix) -> int:
    """Cores that a runner needs: a trainer has its threads, and where it drives in CARLA a server with two more."""
    cells = 1 if matrix.options.parallel == "auto" else matrix.options.parallel
    threads = max((cell.threads for cell in matrix.cells), default=1)
    served = any(cell.family == "carla" for cell in matrix.cells)
    return cells * (threads + (2 if served else 0))
