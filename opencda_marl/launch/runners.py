"""Launchers that an engine has placed on other machines, as their files tell of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import opencda_marl
from opencda_marl.core.files import writing
from opencda_marl.launch.folder import MatrixFolder, read_json
from opencda_marl.launch.keeper import Kept, keep
from opencda_marl.launch.plan import Options

__all__ = ["Seat", "live_runners", "together", "within"]

_FRESH = 30.0  # [s] since a heartbeat; machines of a cluster agree about the time that far


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for a runner, wherever an engine takes this object.

    Args:
        folder: of the matrix, under the same path on all machines.
        grace: [s] from TERM to KILL.
        cwd: where trainers run, if there is such a folder on that machine.
        program: takes the arguments of `opencda-marl`; empty: the one that belongs to the Python which is asked.
    """

    folder: Path
    grace: float
    cwd: Path
    program: tuple[str, ...] = ()

    def take(self, name: str) -> Kept:
        """Start a runner here, on the machine that this is called on; it ends with this process.

        Raises:
            StorageError: the folder is not there, or cannot be written.
        """
        there = MatrixFolder(self.folder)
        own = there.runner(name)
        with writing(own):
            own.mkdir(parents=True, exist_ok=True)
        return keep(
            [*(self.program or (sys.executable, "-m", "opencda_marl.cli")), "matrix", "runner", str(there.path), name],
            env=_environment(),
            cwd=self.cwd if self.cwd.is_dir() else there.path,
            log=own / "console.log",
            record=own / "runner.json",
            grace=self.grace,
        )


def _environment() -> dict[str, str]:
    """This process's, with this package where a runner finds it."""
    here = str(Path(opencda_marl.__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    path = here if not before else os.pathsep.join((here, before))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


def within(options: Options, environment: Mapping[str, str]) -> Options:
    """A runner's options: slots go around the GPUs that its engine gave it, unless the command line named some."""
    given = tuple(word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip())
    if options.cuda_visible_devices or not given:
        return options
    return replace(options, cuda_visible_devices=given)


def live_runners(folder: MatrixFolder) -> dict[str, dict[str, Any]]:
    """Heartbeats of the runners that are at work, by name."""
    found = {name: read_json(folder.runner(name) / "launcher.json") for name in folder.runners()}
    now = time.time()
    return {
        name: told
        for name, told in found.items()
        if told.get("phase") not in (None, "ended") and now - float(told.get("updated", 0.0)) < _FRESH
    }


def together(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Slots and steps per second of several runners."""
    rates = [told["steps_per_s"] for told in found.values() if told.get("steps_per_s") is not None]
    slots = [
        {**slot, "runner": name, "host": told.get("host")}
        for name, told in found.items()
        for slot in told.get("slots", ())
    ]
    return {"slots": slots, "steps_per_s": round(sum(rates), 1) if rates else None}
