"""From a command line to a matrix: which folder, which cells; the same command multiplies nothing out again."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.launch.folder import MatrixFolder, Writer
from opencda_marl.launch.request import Asked, Plan, prepare
from tests.launch.matrices import launch_elsewhere, matrix
from tests.launch.real import until

MAPPO = "sumo-marl/intersection/route_speed_only_mappo"


def _asked(path: Path, **more: Any) -> Asked:
    known = {"profiles": (MAPPO,), "seeds": "0:3", "sets": ("max_episodes=2",)}
    return Asked(path, **{**known, **more})


def _written(plan: Plan) -> Plan:
    with Writer(plan.folder) as folder:
        folder.write_settings(plan.settings)
        folder.write(plan.matrix)
    return plan


def _episodes(plan: Plan) -> set[float | None]:
    return {cell.budgets["max_episodes"] for cell in plan.matrix.cells}


def test_the_same_command_multiplies_nothing_out_again(tmp_path: Path) -> None:
    path = tmp_path / "m"
    first = _written(prepare(_asked(path, options={"parallel": 2})))
    assert (len(first.settings), first.matrix.name) == (3, "m")
    again = prepare(_asked(path))
    assert again.settings == ()
    assert again.matrix.cells == first.matrix.cells
    assert again.matrix.options.parallel == 2
    alone = prepare(Asked(path))
    assert (alone.matrix.cells, alone.matrix.options) == (first.matrix.cells, first.matrix.options)
    profile = MatrixFolder(path).launch(first.matrix.cells[0].id) / f"{MAPPO}.yaml"
    assert profile.is_file()


def test_budgets_change_with_and_without_naming_the_cells(tmp_path: Path) -> None:
    path = tmp_path / "m"
    first = _written(prepare(_asked(path)))
    more = _written(prepare(Asked(path, sets=("max_episodes=5",))))
    assert [cell.id for cell in more.matrix.cells] == [cell.id for cell in first.matrix.cells]
    assert _episodes(more) == {5}
    # the first command again: its budget holds again, though its fingerprint is known
    assert _episodes(_written(prepare(_asked(path)))) == {2}
    assert _episodes(prepare(_asked(path, sets=("max_episodes=7",)))) == {7}
    with pytest.raises(ConfigError, match="only budgets"):
        prepare(Asked(path, sets=("learner.epochs=2",)))
    with pytest.raises(ConfigError, match="makes other cells"):
        prepare(Asked(path, options={"cuda_graph_update": True}))


def test_cells_that_are_no_longer_asked_for_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m"
    _written(prepare(_asked(path)))
    fewer = prepare(_asked(path, seeds="0:2"))
    assert len(fewer.matrix.cells) == 2
    assert "1 cell of an earlier request" in fewer.notes[0]


def test_a_broken_matrix_is_made_again_by_the_command_that_made_it(tmp_path: Path) -> None:
    asked = Asked(tmp_path, profiles=(MAPPO,), seeds="0:2")
    wanted = prepare(asked).matrix
    for text in ("", "{", "[1]"):
        (tmp_path / "matrix.json").write_text(text)
        with pytest.raises(CheckpointError, match="is broken"):
            prepare(Asked(tmp_path))
        assert prepare(asked).matrix.cells == wanted.cells
    (tmp_path / "matrix.json").write_text('{"version": 99}')
    with pytest.raises(CheckpointError, match="of a newer version"):  # that one is whole
        prepare(asked)


def test_what_is_no_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is no matrix"):
        prepare(Asked())
    (tmp_path / "run.json").touch()
    with pytest.raises(CheckpointError, match="is a run, not a matrix"):
        prepare(_asked(tmp_path))
    assert prepare(_asked(None)).folder == Path("runs/matrix")  # type: ignore[arg-type]


def test_two_hundred_cells_are_validated_in_seconds(tmp_path: Path) -> None:
    busy = time.process_time()
    assert len(_written(prepare(_asked(tmp_path / "m", seeds="0:200"))).matrix.cells) == 200
    assert time.process_time() - busy < 20.0
    busy = time.process_time()
    assert len(prepare(_asked(tmp_path / "m", seeds="0:200")).matrix.cells) == 200
    assert time.process_time() - busy < 1.0


def _cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "opencda_marl.cli", "matrix", *arguments]


def test_stop_and_logs_from_another_terminal(tmp_path: Path) -> None:
    path = tmp_path / "m"
    request = {"cells": 3, "episodes": 500, "options": {"parallel": 2}}
    with launch_elsewhere(path, request, TRAINEE_PACE="0.1") as process:
        until(lambda: len(list(path.glob("cells/*/checkpoints/latest"))) >= 2, "two cells save an episode")
        with subprocess.Popen(_cli("logs", str(path), "-f"), stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            assert "matrix m: 3 cells" in follower.stdout.readline()
            seen = subprocess.run(_cli("status", str(path), "--json"), capture_output=True, text=True, check=True)
            assert f'"launcher": {process.pid}' in seen.stdout
            done = subprocess.run(_cli("stop", str(path)), capture_output=True, text=True, check=True)
            assert "has ended" in done.stdout
            assert process.wait(10.0) == 130
            assert any("stopped" in line for line in iter(follower.stdout.readline, "") if "stopped" in line)
            follower.kill()
    assert MatrixFolder(path).owner() is None
    assert matrix(3, 500).cells[0].id == MatrixFolder(path).read().cells[0].id
