"""Run folders listed and removed: never one that is at work, never something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from said import Said

from opencda_marl.core.errors import CheckpointError
from opencda_marl.core.run_folder import RunFolder
from opencda_marl.core.spec import LearnerState
from opencda_marl.tools.runs import list_runs, removable, remove

Typed = Callable[..., Said]


def _run(root: Path, name: str, *, saved: bool, phase: str = "finished") -> Path:
    path = root / name
    with RunFolder.create(path) as folder:
        folder.write_config("seed: 1\n")
        folder.write_run({"profile": "p"})
        folder.beat(phase)
        folder.episode({"episode": 1, "arrived": 3, "vehicles": 4})
        if saved:
            folder.checkpoints.save(1, LearnerState({}, {}), {}, {"config.yaml": "seed: 1\n"}, best=True)
    return path


def test_a_row_says_what_a_run_is(tmp_path: Path) -> None:
    _run(tmp_path, "a", saved=True)
    _run(tmp_path, "b", saved=False, phase="failed")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.yaml").write_text("x")
    rows = {Path(row["run"]).name: row for row in list_runs(tmp_path)}
    assert {*rows} == {"a", "b", "c"}
    assert (rows["a"]["phase"], rows["a"]["checkpoint"], rows["a"]["episodes"]) == ("finished", "best", 1)
    assert rows["a"]["success_rate"] == 0.75
    assert rows["a"]["bytes"] > 100
    assert (rows["b"]["phase"], rows["b"]["checkpoint"]) == ("failed", None)
    assert rows["c"]["phase"] == "broken"
    assert "run.json" in rows["c"]["error"]
    assert list_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize("spoil", ["pipe", "run.json"])
def test_a_run_that_cannot_be_read_is_listed_and_stays(tmp_path: Path, spoil: str) -> None:
    run = _run(tmp_path, "a", saved=True)
    if spoil == "pipe":
        (run / "config.yaml").unlink()
        os.mkfifo(run / "config.yaml")
    else:
        (run / "run.json").write_text("{")
    (row,) = list_runs(tmp_path)
    assert row["phase"] == "broken"
    assert ("config.yaml" if spoil == "pipe" else "run.json") in row["error"]
    assert removable(tmp_path) == removable(tmp_path, keep=0) == []  # its checkpoints may be all right


def test_what_may_go(tmp_path: Path) -> None:
    old, empty, new = (_run(tmp_path, name, saved=name != "empty") for name in ("old", "empty", "new"))
    assert [row["run"] for row in removable(tmp_path)] == [str(empty)]
    assert len(removable(tmp_path, keep=1)) == 2
    assert removable(tmp_path, keep=9) == []
    assert [row["run"] for row in removable(tmp_path, named=[new, old])] == [str(new), str(old)]
    with pytest.raises(CheckpointError):
        removable(tmp_path, named=[tmp_path])


def test_a_running_one_never_goes(tmp_path: Path) -> None:
    path = _run(tmp_path, "a", saved=False)
    with RunFolder.resume(path):
        assert removable(tmp_path) == []
        assert removable(tmp_path, keep=0) == []
        with pytest.raises(CheckpointError, match="is running"):
            remove(path)
    remove(path)
    assert not path.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_the_commands(typed: Typed, tmp_path: Path) -> None:
    _run(tmp_path, "good", saved=True)
    empty = _run(tmp_path, "empty", saved=False)
    said = typed("runs", "list", "--root", str(tmp_path))
    assert "good" in said.out
    assert "75.0" in said.out
    assert len(typed("runs", "list", "--root", str(tmp_path), "--json").answer["runs"]) == 2
    said = typed("runs", "clean", "--root", str(tmp_path))
    assert "nothing is removed yet" in said.out
    assert empty.exists()
    assert typed("runs", "clean", "--root", str(tmp_path), "--yes", "--json").answer == {"removed": [str(empty)]}
    assert not empty.exists()
    assert "none in" in typed("runs", "clean", "--root", str(tmp_path)).out
    assert typed("runs", "clean", str(tmp_path / "nowhere"), "--yes").code == CheckpointError.exit_code
    assert typed("runs", "list", "--root", str(tmp_path / "nowhere")).out.startswith("no runs in")
