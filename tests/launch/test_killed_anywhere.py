"""SIGKILL to the launcher just before the n-th thing that it writes: the same command finishes, whatever n is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.matrices import launch, launch_elsewhere, matrix, weights
from tests.launch.real import PATIENCE

EPISODES, CELLS = 3, 2
SOME = (2, 7, 12)
ALL = range(1, 30)


def _killed(path: Path, number: int) -> int:
    """A launcher in a process of its own. Returns: how it ended."""
    request = {"cells": CELLS, "episodes": EPISODES, "options": {"parallel": 2}}
    with launch_elsewhere(path, request, TRAINEE_PACE="0.05", DIE_AT=str(number)) as process:
        process.communicate(timeout=PATIENCE)
        return process.returncode


def _drill(tmp_path: Path, numbers: list[int]) -> None:
    made = matrix(CELLS, EPISODES, parallel=2)
    launch(tmp_path / "undisturbed", made)
    calm = weights(tmp_path / "undisturbed", made)
    for number in numbers:
        path = tmp_path / f"m{number}"
        code = _killed(path, number)
        assert code == (-9 if number < 15 else code), f"there were no {number} writes"
        result = launch(path, made)
        assert (result.finished, result.failed) == (CELLS, ()), number
        assert weights(path, made) == calm, number


def test_some_writes(tmp_path: Path) -> None:
    _drill(tmp_path, list(SOME))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_write(tmp_path: Path) -> None:
    _drill(tmp_path, list(ALL))
