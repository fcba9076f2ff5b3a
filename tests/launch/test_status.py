"""Rows of cells from their files: each state, a thousand finished ones, and figures over seeds."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.launch.folder import Launch, MatrixFolder, Writer, is_done, saved_episodes, with_budgets
from opencda_marl.launch.processes import read_process
from opencda_marl.launch.status import find_cell, overview, recent_success, report, row
from tests.launch.matrices import Heard, cell, launch, matrix

FINISHED = {"phase": "finished", "episodes": 3, "env_steps": 300, "training_s": 12.5, "success_rate_last_20": 0.5}


def _status(run: Path, **facts: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "status.json").write_text(json.dumps(facts))


def _lines(run: Path, count: int, **facts: Any) -> None:
    line = {"vehicles": 4, "arrived": 3, "collided": 1, "mean_delay_s": 2.0, "return": -1.0, "pad": "x" * 1000, **facts}
    run.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"episode": number, **line}) + "\n" for number in range(1, count + 1))
    (run / "episodes.jsonl").write_text(text)


def test_done_is_a_matter_of_the_budget() -> None:
    assert is_done(cell(0, 3), FINISHED)
    assert is_done(cell(0, 2), FINISHED)
    assert not is_done(cell(0, 4), FINISHED)
    assert not is_done(cell(0, 3), {**FINISHED, "phase": "interrupted"})
    assert not is_done(cell(0, 3), {"phase": "finished"})
    assert not is_done(cell(0, 3), {})
    steps = cell(0, budgets={"max_episodes": None, "max_env_steps": 300, "max_minutes": None})
    assert is_done(steps, FINISHED)
    assert not is_done(steps, {**FINISHED, "env_steps": 299})
    minutes = cell(0, budgets={"max_episodes": 99, "max_env_steps": None, "max_minutes": 12.5 / 60})
    assert is_done(minutes, FINISHED)


def test_a_thousand_finished_cells_are_recognised_in_two_seconds(tmp_path: Path) -> None:
    made = matrix(1000)
    folder = MatrixFolder(tmp_path)
    for one in made.cells:
        _status(folder.run(one.id), **FINISHED)
        folder.launch(one.id).mkdir(parents=True)
        (folder.launch(one.id) / "launch.json").write_text(json.dumps({"state": "finished", "made": 1}))
    began, busy = time.monotonic(), time.process_time()
    heard = Heard()
    result = launch(tmp_path, made, heard)
    took, spent = time.monotonic() - began, time.process_time() - busy
    assert result.finished == 1000
    assert heard.kinds() == ["launched"]
    assert spent < 2.0
    assert took < 20.0  # a machine that does other things, too
    busy = time.process_time()
    assert overview(folder)["finished"] == 1000
    assert time.process_time() - busy < 2.0


def test_each_state(tmp_path: Path) -> None:
    folder, one = MatrixFolder(tmp_path), cell(0, 10)
    run = folder.run(one.id)
    assert row(folder, one)["state"] == "waiting"

    def state(launched: Launch) -> str:
        return str(row(folder, one, launched)["state"])

    process = read_process(os.getpid())
    assert process is not None
    who = {"number": 1, "slot": 2, "pid": process.pid, "started_ticks": process.start_time}
    running, gone = Launch("running", [who], made=1), Launch("running", [{**who, "started_ticks": 1}], made=1)
    far = {**who, "host": "far"}
    assert state(running) == "starting"
    assert state(gone) == "died"  # its launcher was killed before its first sign of life
    assert state(Launch("running", [{**far, "started": time.time()}])) == "starting"
    assert state(Launch("running", [{**far, "started": time.time() - 1e4}])) == "died"
    _status(run, phase="training", pid=6)  # of an earlier attempt
    assert state(running) == "starting"
    _status(run, phase="training", pid=process.pid, episode=6, step=5, env_steps=550, training_s=11.0, ms_per_step=20.0)
    assert state(running) == "died"  # nobody holds the run
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = row(folder, one, running)
        assert (found["state"], found["slot"], found["episode"]) == ("training", 2, 6)
        assert found["progress"] == pytest.approx(0.55)
        assert found["eta_s"] == pytest.approx(11.0 * 0.45 / 0.55)
        assert found["ms_per_step"] == 20.0
        _status(run, phase="interrupted", pid=process.pid)
        assert state(running) == "ending"
    assert state(running) == "stopped"  # its launcher was killed: it has saved, and nobody has written it down
    _status(run, phase="failed", pid=process.pid)
    assert (state(running), state(gone)) == ("ending", "died")
    for other in ("retrying", "stopped", "failed"):
        assert state(Launch(other)) == other
    assert state(Launch("finished")) == "waiting"  # its budget was raised, or its run was taken away
    _status(run, **{**FINISHED, "episodes": 10})
    assert row(folder, one)["state"] == "finished"
    assert row(folder, one)["progress"] == 1.0
    assert row(folder, one, Launch("finished", made=2, error="earlier"))["attempts"] == 2
    with Writer(tmp_path) as writer:
        writer.write_launch(one.id, Launch("finished", made=1))
    assert row(folder, one)["attempts"] == 1


def test_success_of_the_last_twenty(tmp_path: Path) -> None:
    assert recent_success(tmp_path) is None
    _lines(tmp_path, 3)
    assert recent_success(tmp_path) == 0.75
    _lines(tmp_path, 200)
    with (tmp_path / "episodes.jsonl").open("a") as stream:
        for number in range(10):
            stream.write(json.dumps({"episode": 201 + number, "vehicles": 4, "arrived": 4}) + "\n")
        stream.write('{"episode": 211, "vehi')  # being written
    assert recent_success(tmp_path) == (10 * 3 + 10 * 4) / 80


def test_broken_files_of_a_cell_hide_nothing(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.write(matrix(1))
        writer.write_launch("0" * 12, Launch("failed", error="why", failure="config"))
        assert row(writer, cell(0))["error"] == "why"
        (writer.launch("0" * 12) / "launch.json").write_text("[")
        _status(writer.run("0" * 12), phase="training")
        (writer.run("0" * 12) / "status.json").write_text('{"phase')
        assert row(writer, cell(0))["state"] == "waiting"
        assert overview(writer)["total"] == 1
        (tmp_path / "matrix.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"matrix.json is broken"):
            writer.read()
    with pytest.raises(CheckpointError, match="is no matrix"):
        MatrixFolder(tmp_path / "nowhere").read()


def test_a_matrix_reads_back_as_it_was_written(tmp_path: Path) -> None:
    made = matrix([cell(0), cell(1, 7, family="carla")], parallel=3, cuda_visible_devices=("0", "GPU-a"))
    with Writer(tmp_path) as writer:
        writer.write(made)
    assert MatrixFolder(tmp_path).read() == made


def test_saved_episodes(tmp_path: Path) -> None:
    assert saved_episodes(tmp_path) == 0
    (tmp_path / "checkpoints").mkdir()
    os.symlink("episode_12", tmp_path / "checkpoints/latest")
    assert saved_episodes(tmp_path) == 12


def test_cells_are_found_by_name_and_by_the_beginning_of_their_id() -> None:
    made = matrix([cell(0), cell(1, id="abcdef000000"), cell(2, id="abc000000000")])
    assert find_cell(made, "cell s1").id == "abcdef000000"
    assert find_cell(made, "abcd").seed == 1
    for wrong in ("abc", "nobody", ""):
        with pytest.raises(ConfigError):
            find_cell(made, wrong)


def test_other_budgets() -> None:
    cells = matrix(2).cells
    changed = with_budgets(cells, ["max_episodes=9", "max_minutes=1.5"])
    assert changed[1].budgets == {"max_episodes": 9, "max_env_steps": None, "max_minutes": 1.5}
    assert changed[1].free == ["max_episodes=9", "max_env_steps=null", "max_minutes=1.5"]
    assert changed[1].id == cells[1].id
    for wrong in ("seed=3", "max_episodes=0", "max_episodes=1.5", "max_episodes=true", "max_episodes=null"):
        with pytest.raises(ConfigError):
            with_budgets(cells, [wrong])


def test_a_report_over_seeds(tmp_path: Path) -> None:
    cells = [cell(k, name=f"a s{k}") for k in range(3)] + [cell(9, name="b s9")]
    with Writer(tmp_path) as writer:
        writer.write(matrix(cells))
        for k, arrived in enumerate((2, 3, 4)):
            _lines(writer.run(cells[k].id), 5, arrived=arrived, **{"return": float(k)})
            _status(writer.run(cells[k].id), **FINISHED)
    found = report(MatrixFolder(tmp_path))
    first, second = found["groups"]
    assert (first["group"], first["seeds"], first["finished"]) == ("a", 3, 3)
    assert first["success_rate"] == pytest.approx(0.75)
    assert first["success_rate_error"] == pytest.approx(0.25 / math.sqrt(3))  # of 0.5, 0.75, 1
    assert first["return"] == pytest.approx(1.0)
    assert (second["group"], second["success_rate"], second["success_rate_error"]) == ("b", None, None)
    assert [one["state"] for one in found["cells"]] == ["finished"] * 3 + ["waiting"]
