"""Matrices whose cells are trained by tests/launch/trainee.py, here or by a launcher in a process of its own.

python matrices.py FOLDER '{"cells": 3, "episodes": 4, "options": {"parallel": 2}}'     launches, as `matrix run` does
python matrices.py matrix runner FOLDER NAME                                            as an engine's runner
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.launch.cells import Cell
from opencda_marl.launch.folder import Matrix, MatrixFolder, Writer
from opencda_marl.launch.launcher import Launcher, Result
from opencda_marl.launch.plan import options_from

ROOT = Path(__file__).parents[2]
RUNNER = (sys.executable, __file__)
PROGRAM = (sys.executable, "-S", str(Path(__file__).with_name("trainee.py")))
QUICK = {"retry_delay": 0.01, "deadlines": {"stopping": 5.0}}


def cell(index: int, episodes: int = 3, **facts: Any) -> Cell:
    """A cell that needs no profile."""
    known: dict[str, Any] = {
        "id": f"{index:012x}",
        "name": f"cell s{index}",
        "profile": "p/cell",
        "family": "sumo",
        "algorithm": "mappo",
        "seed": index,
        "threads": 1,
        "device": "cpu",
        "max_steps": 10,
        "chosen": {"profile": "p/cell", "seed": index},
        "budgets": {"max_episodes": episodes, "max_env_steps": None, "max_minutes": None},
        "display": {},
    }
    return Cell(**{**known, **facts})


def matrix(cells: int | list[Cell], episodes: int = 3, **options: Any) -> Matrix:
    made = [cell(index, episodes) for index in range(cells)] if isinstance(cells, int) else cells
    return Matrix("m", tuple(made), options_from({}, {**QUICK, **options}))


class Heard(list[tuple[str, dict[str, Any]]]):
    """A listener."""

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        if kind != "beat":
            self.append((kind, facts))

    def kinds(self, cell: str | None = None) -> list[str]:
        return [kind for kind, facts in self if cell is None or facts.get("cell") == cell]


def launch(path: Path, made: Matrix, heard: Any = None, **more: Any) -> Result:
    """In this process."""
    with Writer(path) as folder:
        folder.write(made)
        nothing: Any = {
            "served": lambda _cell: False,
            "server_for": None,
            "missing": {},
            "program": PROGRAM,
            **more,
        }
        return Launcher(folder, made, listener=Heard() if heard is None else heard, **nothing).run()


def launch_elsewhere(path: Path, request: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """In a process of its own, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, str(path), json.dumps(request)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def weights(path: Path, made: Matrix) -> dict[str, str]:
    """What each cell has learned."""
    folder = MatrixFolder(path)
    return {one.id: (folder.run(one.id) / "checkpoints/latest/weight").read_text() for one in made.cells}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def runner(path: Path, name: str) -> int:
    """As `matrix runner` does."""
    made = MatrixFolder(path).read()
    nothing: Any = {"served": lambda _cell: False, "server_for": None, "missing": {}}
    with Writer(path, name) as folder:
        result = Launcher(folder, made, listener=Heard(), program=PROGRAM, shared=True, **nothing).run()
    return 130 if result.stopped else 0


def die_at(number: int) -> None:
    """Just before the n-th file that this process gives its name, made or changed."""
    left = iter(range(number - 1, -1, -1))

    def deadly(call: Any) -> Any:
        def counted(*arguments: Any, **more: Any) -> Any:
            if next(left, 1) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **more)

        return counted

    for name in ("replace", "link", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))


def main() -> int:
    if "DIE_AT" in os.environ:
        die_at(int(os.environ["DIE_AT"]))
    if sys.argv[1:3] == ["matrix", "runner"]:
        return runner(Path(sys.argv[3]), sys.argv[4])
    path, request = Path(sys.argv[1]), json.loads(sys.argv[2])
    made = matrix(request["cells"], request["episodes"], **request["options"])
    try:
        result = launch(path, made, lambda kind, facts: say(f"{kind} {facts.get('cell', '')}"))
    except OpenCDAError as error:
        say(str(error))
        return error.exit_code
    return 130 if result.stopped else len(result.failed)


if __name__ == "__main__":
    sys.exit(main())
