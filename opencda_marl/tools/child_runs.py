"""Runs in child processes, typed as a person would: what profile, verify-resume and bench look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opencda_marl
from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import remove_tree, write_whole, writing
from opencda_marl.journal import TIMING_FIELDS

__all__ = ["ChildRun", "differing_fields", "sum_up", "without_timing"]


@dataclass(frozen=True, slots=True)
class ChildRun:
    """`opencda-marl run -t PROFILE … --out FOLDER/NAME`, with what it says in FOLDER/NAME.log."""

    profile: str
    folder: Path
    name: str
    config_root: Path | None = None
    overrides: tuple[str, ...] = field(default=())

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder / self.name

    def start(self, *, pstats: Path | None = None, resume: bool = False) -> subprocess.Popen[bytes]:
        """Start it, under cProfile if `pstats` is given; with `resume` go on in the folder that is there.

        Raises:
            StorageError: the log cannot be written.
        """
        under = ["-m", "cProfile", "-o", str(pstats)] if pstats is not None else []
        what = ["--resume", str(self.path)] if resume else self._fresh()
        log = self.folder / f"{self.name}.log"
        with writing(log):
            self.folder.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as stream:
                return subprocess.Popen(
                    [sys.executable, *under, "-m", "opencda_marl.cli", "run", *what],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    env=_environment(),
                )

    def finish(self, process: subprocess.Popen[bytes], *, deadline: float) -> None:
        """Wait until it ends well.

        Raises:
            OpenCDAError: it failed, with the end of what it said, or took longer than `deadline` [s].
        """
        log = self.folder / f"{self.name}.log"
        try:
            code = process.wait(deadline)
        except subprocess.TimeoutExpired as error:
            raise OpenCDAError(f"the run took longer than {deadline:g} s", fix=f"see {log}") from error
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            said = log.read_text(errors="replace").strip().splitlines()[-12:]
            raise OpenCDAError(
                f"the run in {self.path} ended with code {code}:\n" + "\n".join(f"    {line}" for line in said),
                fix=f"all that it said is in {log}",
            )

    def remove(self) -> None:
        """Take the run folder away; what the run said stays.

        Raises:
            StorageError: it cannot be removed.
        """
        with writing(self.path):
            remove_tree(self.path)

    def _fresh(self) -> list[str]:
        root = ["--config-root", str(self.config_root)] if self.config_root is not None else []
        return ["-t", self.profile, *root, "--out", str(self.path), *self.overrides]


def _environment() -> dict[str, str]:
    """This one's, and the package found where it is now, installed or not."""
    here = str(Path(opencda_marl.__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": here if not before else os.pathsep.join((here, before))}


def sum_up(file: Path, answer: Mapping[str, Any], finished: Iterable[ChildRun]) -> None:
    """Write down what a tool found, and remove the runs that it was found by.

    Raises:
        StorageError: no room, or no permission.
    """
    with writing(file):
        write_whole(file, (json.dumps(answer, indent=2) + "\n").encode())
    for run in finished:
        run.remove()


def without_timing(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of episodes.jsonl or metrics.jsonl without what the clock decides."""
    return {key: value for key, value in line.items() if key not in TIMING_FIELDS}


def differing_fields(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], *, what: str = "episode"
) -> list[str]:
    """Every difference between the lines of two runs, timing left out; empty: bit for bit the same.

    Args:
        old: lines of one run.
        new: lines of the other.
        what: of which kind, for the messages.
    """
    found = [] if len(old) == len(new) else [f"{what} lines: {len(old)} and {len(new)}"]
    for index, (left, right) in enumerate(zip(map(without_timing, old), map(without_timing, new), strict=False)):
        place = f"{what} {left.get('episode', index)}"
        for key in sorted(left.keys() | right.keys()):
            if key not in left or key not in right:
                found.append(f"{place}: only one has {key}")
            elif not _same(left[key], right[key]):
                found.append(f"{place}: {key} is {left[key]!r} and {right[key]!r}")
    return found


def _same(left: object, right: object) -> bool:
    """Equal in type and value: 1 is not 1.0, and JSON keeps every bit of a float."""
    return repr(left) == repr(right)
