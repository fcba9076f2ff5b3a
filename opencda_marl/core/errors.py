"""Every error a person can meet, and the exit code of each.

OpenCDAError                       1   anything of ours that has no better name
├── ConfigError                    2   unknown key, wrong type, out of range, missing profile
├── SimulatorError                10   the simulator died, or said something impossible
│   ├── BackendMissingError       11   libsumo, traci, sumo or carla is not installed
│   └── DeadlineError             12   the simulator did not answer in time
├── AccountingError               13   scheduled != waiting + running + arrived + collided + removed
├── WorkerError                   14   a worker of the run died, hung, or came apart from the others
├── CheckpointError               20   broken, foreign or missing checkpoint or run folder
├── StorageError                  21   unwritable or full disk
├── NotFiniteError                30   NaN or infinity in observation, reward, loss or weights
├── DeviceError                   31   the device asked for is not there
├── CudaGraphCaptureError         32   a CUDA graph could not be captured; nothing was saved
├── CompilerError                 33   a compiled form was demanded and cannot be made
├── OutOfMemoryError              34   a buffer would not fit
├── RecycleError                  75   no fault: to be started again, with a fresh server
└── Interrupted                  130   Ctrl-C or SIGTERM; what was saved stays
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

__all__ = [
    "RECYCLE",
    "AccountingError",
    "BackendMissingError",
    "CheckpointError",
    "CompilerError",
    "ConfigError",
    "CudaGraphCaptureError",
    "DeadlineError",
    "DeviceError",
    "Interrupted",
    "NotFiniteError",
    "OpenCDAError",
    "OutOfMemoryError",
    "RecycleError",
    "SimulatorError",
    "StorageError",
    "WorkerError",
]

RECYCLE = 75


class OpenCDAError(Exception):
    """An error with a message for a person, and what to do next.

    Args:
        message: what is wrong, and where (file, key, id).
        fix: what to type or change; shown on a line of its own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"


class ConfigError(OpenCDAError):
    """A profile, an option or an override is wrong; nothing was started."""

    exit_code = 2


class SimulatorError(OpenCDAError):
    """The simulator failed, died, or reported something impossible."""

    exit_code = 10


class BackendMissingError(SimulatorError):
    """A simulator's package or program is not installed."""

    exit_code = 11


class DeadlineError(SimulatorError):
    """The simulator did not answer within its deadline."""

    exit_code = 12


class AccountingError(OpenCDAError):
    """The vehicles of an episode do not add up; its figures cannot be trusted."""

    exit_code = 13


class WorkerError(OpenCDAError):
    """A worker of the run died, hung, or came apart from the others; all of them end."""

    exit_code = 14


class CheckpointError(OpenCDAError):
    """A checkpoint or run folder is missing, broken, or made by something else."""

    exit_code = 20


class StorageError(OpenCDAError):
    """A file could not be written: no room, no permission, no folder."""

    exit_code = 21


class NotFiniteError(OpenCDAError):
    """A value became NaN or infinite; the batch was dumped.

    Args:
        message: what is not finite, and where.
        fix: what to change.
        batch: the arrays that it came from, for the run folder; whoever raises it passes what it has.
    """

    exit_code = 30

    def __init__(self, message: str, *, fix: str | None = None, batch: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__(message, fix=fix)
        self.batch = dict(batch or {})


class DeviceError(OpenCDAError):
    """The device asked for is not available."""

    exit_code = 31


class CudaGraphCaptureError(OpenCDAError):
    """A CUDA graph capture failed; the process cannot go on with a sound RNG."""

    exit_code = 32


class CompilerError(OpenCDAError):
    """A compiled form was demanded where none can be made."""

    exit_code = 33


class OutOfMemoryError(OpenCDAError):
    """A buffer would not fit into the memory that is free."""

    exit_code = 34


class RecycleError(OpenCDAError):
    """Not a fault: process and server are to be started again, from the last checkpoint."""

    exit_code = RECYCLE


class Interrupted(OpenCDAError):  # noqa: N818 - a person's wish, not a fault
    """The run was asked to stop (Ctrl-C, SIGTERM)."""

    exit_code = 130
