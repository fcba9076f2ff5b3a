"""`opencda-marl matrix …` as it is typed, with real cells where it counts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from said import ROOT, Said, python

from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.display_matrix import MatrixDisplay, event_line, show_matrix
from opencda_marl.launch.folder import Launch, MatrixFolder, Writer
from opencda_marl.simulators import carla_session

Typed = Callable[..., Said]

MAPPO = "sumo-marl/intersection/route_speed_only_mappo"
SHORT = ("--set", "max_steps=200", "--set", "max_episodes=2", "--set", "evaluation.final=false")
CARLA = "momarl/intersection/"
TABULAR = "sumo-marl/intersection/route_speed_only_qlearning"


def _dry(typed: Typed, *arguments: str) -> Said:
    return typed("matrix", "run", *arguments, "--dry-run")


def test_a_dry_run_shows_cells_and_slots_and_writes_nothing(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "m"
    said = _dry(typed, str(path), "--profiles", MAPPO, "--seeds", "0:3", *SHORT, "--parallel", "2")
    assert said.code == 0
    assert "3 cells" in said.out
    assert "2 episodes" in said.out
    assert not path.exists()


def test_the_documented_command_line_for_carla(typed: Typed, tmp_path: Path) -> None:
    pytest.importorskip("carla")
    page = ("--parallel", "8", "--cuda-visible-devices", "0,1", "--carla-gpus", "0,1", "--carla-rpc-port", "2000")
    profiles = ",".join(f"{CARLA}{name}" for name in ("mappo", "pcmappo", "masac", "pcmasac", "matd3"))
    more = ("--profiles", profiles, "--seeds", "0:2", "--cuda-graph-update", "--keep-carla", "--json")
    answer = _dry(typed, str(tmp_path / "m"), *page, *more).answer
    assert len(answer["cells"]) == 10
    assert {cell["family"] for cell in answer["cells"]} == {"carla"}
    assert [slot["rpc_port"] for slot in answer["slots"]] == [2000 + 10 * k for k in range(8)]
    assert [slot["cuda"] for slot in answer["slots"]] == ["0", "1"] * 4
    assert [slot["adapter"] for slot in answer["slots"]] == [0, 1] * 4
    assert not any("client" in note for note in answer["notes"]), "it is installed here"


def test_cells_without_a_client_fail_with_one_line_and_no_server(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carla_session, "wheel_version", lambda _: None)
    monkeypatch.setattr(carla_session, "find_spec", lambda _: None)
    path = str(tmp_path / "m")
    said = typed("matrix", "run", path, "--profiles", f"{CARLA}masac", "--seeds", "0:1", "--carla-bin", "/nowhere")
    assert said.code == 1
    assert said.out.count("CARLA's client is not installed") == 1
    assert not (tmp_path / "m/slots").exists()
    assert typed("run", "-t", f"{CARLA}masac", "--out", str(tmp_path / "r")).code == 11


def test_a_lone_run_without_a_server_says_how_to_start_one(typed: Typed, tmp_path: Path) -> None:
    pytest.importorskip("carla")
    said = typed("run", "-t", f"{CARLA}masac", "carla.port=2777", "--out", str(tmp_path / "r"))
    assert said.code == 10
    assert "there is no server on 127.0.0.1:2777" in said.err
    assert "CarlaUE4.sh -carla-rpc-port=2777" in said.err
    assert not (tmp_path / "r").exists(), "what was refused leaves nothing"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--seeds", "0:3"), "seeds of which profiles"),
        (("--profiles", MAPPO, "--seeds", "3:1"), "--seeds '3:1'"),
        (("--profiles", MAPPO, "--parallel", "many"), "--parallel 'many'"),
        (("--profiles", MAPPO, "--carla-restart-mode", "docker", "--carla-gpus", "0"), "--carla-gpus does nothing"),
        (("--profiles", MAPPO, "--retries", "simulator"), "--retries 'simulator'"),
        (("--profiles", f"{MAPPO}x"), "there is no profile"),
        (("--profiles", MAPPO, "--set", "max_stps=1"), "max_stps"),
        (("--profiles", MAPPO, "--set", "max_episodes=null"), "has no budget"),
        (("--profiles", MAPPO, "--runners", "2"), "--runners and --engine-set are for an engine"),
        (("--profiles", MAPPO, "--engine-set", "num_gpus=1"), "--runners and --engine-set are for an engine"),
        (("--profiles", MAPPO, "--engine", "ray", "--runners", "0"), "--runners 0"),
        (("--profiles", MAPPO, "--engine", "slurm", "--engine-set", "=1"), "--engine-set '=1'"),
        (("--profiles", MAPPO, "--engine", "pbs"), "'pbs' is not one of"),
        (("--profiles", MAPPO, "--mps"), "--mps: which GPUs?"),
        (("--profiles", MAPPO, "--out", "x"), "--out goes with a matrix file"),
        (("--profiles", MAPPO, "--engine", "ray", "--engine-set", "bogus=1"), "ray has no such option here"),
        (("--profiles", MAPPO, "--engine", "ray", "--engine-set", "memory_gb=much"), "memory_gb is a number from 0"),
        (("--profiles", MAPPO, "--engine", "slurm"), "--engine slurm: Could not detect"),
        (("--profiles", MAPPO, "--cuda-visible-devices", "gpu"), "'gpu' is no GPU"),
        (("--profiles", MAPPO, "--cuda-visible-devices", "0,,1"), "'' is no GPU"),
        (("--profiles", MAPPO, "--deadline", "training=0"), "--deadline training=0: all would be late"),
        (("--profiles", MAPPO, "--carla-gpus", "0"), "--carla-gpus does nothing here"),
        (("--profiles", MAPPO, "--set", "carla.port=3000"), "carla.port cannot be set for a cell"),
        (("--profiles", TABULAR, "--cuda-graph-update"), "--cuda-graph-update does nothing here"),
        (
            ("--profiles", f"{CARLA}masac", "--carla-restart-mode", "docker", "--keep-carla"),
            "--keep-carla does nothing with --carla-restart-mode docker",
        ),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_what_is_refused_before_anything_starts(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], what: str, dry: bool
) -> None:
    if "slurm" in arguments:
        monkeypatch.setenv("PATH", str(tmp_path))  # there is no srun
    said = typed("matrix", "run", str(tmp_path / "m"), *arguments, *(["--dry-run"] if dry else []))
    assert said.code == 2
    assert what in said.err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("dry", [True, False])
def test_a_server_that_is_not_there_and_a_folder_that_cannot_be(typed: Typed, tmp_path: Path, dry: bool) -> None:
    pytest.importorskip("carla")
    more = ["--dry-run"] if dry else []
    carla = ("--profiles", f"{CARLA}masac", "--seeds", "0:1", "--carla-bin", "/nowhere/CarlaUE4.sh")
    said = typed("matrix", "run", str(tmp_path / "m"), *carla, *more)
    assert said.code == 2
    assert "--carla-bin: /nowhere/CarlaUE4.sh is no program" in said.err
    (tmp_path / "file").touch()
    said = typed("matrix", "run", str(tmp_path / "file/m"), "--profiles", MAPPO, *more)
    assert said.code == 21
    assert "/file is no folder" in said.err
    assert not (tmp_path / "m").exists()


def test_what_may_be_meant_is_noted(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opencda_marl.launch.checks.cores", lambda: 2)
    many = ("--profiles", MAPPO, "--seeds", "0:9", "--parallel", "100", "--carla-rpc-port", "3000", "--json")
    assert _dry(typed, str(tmp_path / "m"), *many).answer["notes"] == [
        "no cell of this matrix drives in CARLA: --carla-rpc-port does nothing",
        "9 cells at once keep 9 cores busy, and this machine has 2: they slow each other",
    ]


def test_an_exclusion_of_nothing_and_a_value_given_twice(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    for text, what in (
        ("axes: {seed: '0:2'}\nexclude: [{seed: 7}]", "exclude: no cell is {seed: 7}"),
        ("set: {max_steps: 9}\npairs: [{max_steps: 5}]", "max_steps varies in 'pairs', and is given elsewhere"),
    ):
        file.write_text(f"profile: {MAPPO}\n{text}\n")
        said = _dry(typed, str(file))
        assert (said.code, what in said.err) == (2, True), said.err


def test_a_dry_run_for_an_engine_shows_the_slots_of_a_runner(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    engine = ("--engine", "slurm", "--runners", "4", "--parallel", "2", "--engine-set", "slurm_partition=gpu")
    said = typed(
        "matrix", "run", str(tmp_path), "--profiles", MAPPO, "--seeds", "0:9", *engine, "--dry-run", "--json"
    ).answer
    assert len(said["slots"]) == 2
    assert said["notes"] == ["slurm places 4 runners, told slurm_partition=gpu; each runner has these slots"]
    assert said["options"]["engine_set"] == {"slurm_partition": "gpu"}


def test_runners_that_outlive_their_launcher_are_asked_themselves(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "m"
    _made(path)
    own = path / "runners/r001"
    own.mkdir(parents=True)
    (own / "launcher.json").write_text(
        json.dumps({"phase": "running", "updated": time.time(), "slots": [], "host": "far"})
    )
    told = typed("matrix", "status", str(path), "--json").answer
    assert told["runners"] == {"r001": {"host": "far", "phase": "running"}}
    asked = {"launcher": None, "runners": ["r001"], "asked": True}
    assert typed("matrix", "drain", str(path), "--json").answer == asked
    assert typed("matrix", "stop", str(path), "--no-wait", "--json").answer == asked
    assert sorted(file.name for file in (own / "control").iterdir()) == ["drain", "stop"]


def test_a_runner_as_an_engine_starts_it(typed: Typed, tmp_path: Path) -> None:
    """Its one cell has no settings: that fails, is written where all can read it, and the claim is given back."""
    path = tmp_path / "m"
    _made(path)
    assert typed("matrix", "runner", str(path), "r001").code == 1
    folder = MatrixFolder(path)
    (cell,) = folder.read().cells
    assert folder.read_launch(cell.id).failure == "config"
    assert json.loads((path / "runners/r001/launcher.json").read_bytes())["phase"] == "ended"
    assert sorted(file.name for file in (path / "claims").iterdir()) == [f"{cell.id}.1", f"{cell.id}.1.free"]
    assert typed("matrix", "runner", str(path), "r002").code == 1  # a failed cell is left alone
    assert folder.read_launch(cell.id).made == 1
    with Writer(path, "r003"):
        said = typed("matrix", "runner", str(path), "r003")
    assert said.code == 20
    assert "is being run by process" in said.err


def test_names_of_options_are_whole_in_a_narrow_terminal(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = typed("matrix", "run", "--help").out
    for name in ("--cuda-visible-devices", "--carla-restart-mode", "--cuda-graph-update", "--no-cuda-graph-update"):
        assert name in said


def test_a_line_of_the_log_that_was_cut_off(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "m"
    _made(path)
    (path / "launcher.jsonl").write_text('{"time": 1.0, "event": "draining"}\n{"time": 2.0, "ev\n')
    assert "draining" in typed("matrix", "logs", str(path)).out
    assert typed("matrix", "logs", str(path), "--json").answer["lines"][1] == '{"time": 2.0, "ev'


def test_a_matrix_file(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rates.yaml"
    file.write_text(f"profile: {MAPPO}\naxes: {{seed: '0:2'}}\nbudgets: {{max_episodes: 2}}\nretries: {{error: 0}}\n")
    answer = _dry(typed, "rates.yaml", "--json").answer
    assert (answer["name"], answer["folder"]) == ("rates", str(tmp_path / "runs/rates"))
    assert answer["options"]["retries"] == {"error": 0}
    assert _dry(typed, "rates.yaml", "--out", "elsewhere", "--json").answer["folder"] == str(tmp_path / "elsewhere")
    assert _dry(typed, "rates.yaml", "--profiles", MAPPO).code == 2
    assert _dry(typed, "nowhere.yaml").code == 2


def test_a_folder_alone_needs_to_be_a_matrix(typed: Typed, tmp_path: Path) -> None:
    for command in ("run", "status", "logs", "stop", "drain", "retry", "report"):
        said = typed("matrix", command, str(tmp_path))
        assert (command, said.code) == (command, 20)
        assert "is no matrix" in said.err


def test_two_real_cells_from_the_first_command_to_the_report(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "it's a\nmatrix"
    first = ("--profiles", MAPPO, "--seeds", "0:2", *SHORT, "--parallel", "2")
    said = python(str(ROOT / "scripts/experiments/launch_matrix.py"), str(path), *first, "--json")
    assert said.code == 0, said.err
    assert {key: said.answer[key] for key in ("total", "finished", "failed")} == {
        "total": 2,
        "finished": 2,
        "failed": [],
    }
    folder = MatrixFolder(path)
    cells = folder.read().cells
    assert [folder.status(cell.id)["episodes"] for cell in cells] == [2, 2]
    runs = [json.loads((folder.run(cell.id) / "run.json").read_bytes()) for cell in cells]
    assert {run["profile"] for run in runs} == {MAPPO}
    assert [run["hashes"]["config"][:12] for run in runs] == [cell.id for cell in cells]
    assert {run["threads"] for run in runs} == {1}

    assert typed("matrix", "run", str(path)).code == 0  # nothing to do
    status = typed("matrix", "status", str(path), "--json").answer
    assert (status["total"], status["finished"], status["launcher"]) == (2, 2, None)
    assert "2 finished" in typed("matrix", "status", str(path)).out
    report = typed("matrix", "report", str(path), "--json").answer
    assert [(group["group"], group["seeds"]) for group in report["groups"]] == [("route_speed_only_mappo", 2)]
    assert "route_speed_only_mappo" in typed("matrix", "report", str(path)).out
    events = typed("matrix", "logs", str(path), "--json").answer["lines"]
    assert [event["event"] for event in events][:1] == ["launched"]
    assert sum(event["event"] == "finished" for event in events) == 2
    assert "finished" in typed("matrix", "logs", str(path)).out
    assert "trained: 2 episodes" in typed("matrix", "logs", str(path), cells[0].id[:6]).out

    # a raised budget: the cells go on
    again = python("-m", "opencda_marl.cli", "matrix", "run", str(path), "--set", "max_episodes=3", "--json")
    assert again.answer["finished"] == 2
    assert [folder.status(cell.id)["episodes"] for cell in folder.read().cells] == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [("slurm", "cluster=local"), ("ray", "address=local")])
def test_two_real_cells_by_runners_end_where_they_do_without(
    typed: Typed, tmp_path: Path, engine: tuple[str, str]
) -> None:
    """From the command line to the weights; Ray's cluster and submitit's executor are those of this machine."""
    many, alone = tmp_path / "many", tmp_path / "alone"
    cells = ("--profiles", MAPPO, "--seeds", "0:2", *SHORT, "--json")
    more = ("--engine", engine[0], "--engine-set", engine[1], "--runners", "2")
    half = ("--engine-set", "num_cpus=0.5") if engine[0] == "ray" else ()
    said = python("-m", "opencda_marl.cli", "matrix", "run", str(many), *cells, *more, *half)
    assert said.code == 0, said.err
    assert said.answer["finished"] == 2
    assert python("-m", "opencda_marl.cli", "matrix", "run", str(alone), *cells, "--parallel", "2").code == 0
    for cell in MatrixFolder(many).read().cells:
        found, wanted = (
            Checkpoints(MatrixFolder(path).run(cell.id) / "checkpoints").load("latest").state.tensors
            for path in (many, alone)
        )
        assert set(found) == set(wanted)
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    events = typed("matrix", "logs", str(many), "--json").answer["lines"]
    assert {event["runner"] for event in events if event["event"] == "started"} == {"r001", "r002"}
    # typed again without a word about the engine
    again = python("-m", "opencda_marl.cli", "matrix", "run", str(many), "--json")
    assert again.answer["finished"] == 2


def test_wishes_where_nobody_is_at_work(typed: Typed, tmp_path: Path) -> None:
    path = tmp_path / "m"
    _made(path)
    assert typed("matrix", "stop", str(path), "--json").answer == {"launcher": None, "runners": [], "asked": False}
    assert "no launcher" in typed("matrix", "drain", str(path)).out
    with Writer(path) as writer:
        cell = writer.read().cells[0].id
        writer.write_launch(cell, Launch("failed", made=3, error="why", failure="simulator"))
    assert "simulator: why" in typed("matrix", "status", str(path)).out
    assert "1 failed cell begins anew" in typed("matrix", "retry", str(path)).out
    with Writer(path) as writer:
        writer.write_launch(cell, Launch("failed", made=3, error="why", failure="simulator"))
    assert typed("matrix", "retry", str(path), "--json").answer["cells"] == [cell]
    said = typed("matrix", "run", str(path / "matrix.json"))
    assert (said.code, "is what a matrix folder keeps" in said.err) == (2, True)
    assert MatrixFolder(path).read_launch(cell).state == "waiting"
    assert typed("matrix", "retry", str(path), "nobody").code == 2
    assert typed("matrix", "logs", str(path), "-f", "--json").code == 2
    assert not (path / "control").exists()


def _made(path: Path) -> None:
    """A matrix of one cell that never ran."""
    sys.path.insert(0, str(ROOT / "tests/launch"))
    try:
        from matrices import matrix
    finally:
        sys.path.pop(0)
    with Writer(path) as writer:
        writer.write(matrix(1))


ROW = {
    "cell": "abc", "name": "cell s1", "state": "training", "slot": 0, "episode": 3, "episodes": 10, "success": 0.5,
    "ms_per_step": 1.25, "progress": 0.2, "eta_s": 65.0, "env_steps": 10, "attempts": 2, "failure": "simulator",
    "error": "it\ndied " + "x" * 100, "run": "r",
}  # fmt: skip


def test_the_table_in_a_terminal_and_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Console(force_terminal=True, width=140, height=10, color_system=None)
    rows = [ROW, *({**ROW, "state": "waiting", "name": f"w{k}", "slot": None} for k in range(30))]
    with MatrixDisplay(terminal) as display:
        display("beat", {"rows": rows, "steps_per_s": 1234.5})
        display("finished", {"cell": "abc", "name": "cell s1"})
    shown = capsys.readouterr().out
    for word in ("cell s1", "training in 0", "3/10", "50.0", "1.25", "1:05", "simulator: it died", "1234 steps/s"):
        assert word in shown
    assert "30 waiting" in shown
    assert "more cells" in shown
    now = [0.0]
    plain = Console(width=200)
    with MatrixDisplay(plain, clock=lambda: now[0]) as display:
        display("beat", {"rows": rows, "steps_per_s": None})
        assert capsys.readouterr().out == ""
        now[0] = 31.0
        display("beat", {"rows": rows, "steps_per_s": 10.0})
        assert capsys.readouterr().out == "31 cells: 1 running, 30 waiting; 10 steps/s\n"


def test_names_and_errors_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "a\x1b[2Jb\nc"
    assert event_line("finished", {"cell": "abc", "name": bad}) == "a\\x1b[2Jb\\nc (abc): finished"
    console = Console(width=200)
    with MatrixDisplay(console) as display:
        display("retrying", {"cell": "abc", "name": bad, "failure": "error", "error": bad, "count": 1, "allowed": 2,
                             "delay": 1.0})  # fmt: skip
    row = {**ROW, "name": bad, "error": bad, "episode": 3, "episodes": 2}
    slot = {"index": 1, "trouble": bad}
    show_matrix(console, {"name": bad, "launcher": None, "cells": [row], "slots": [slot], "steps_per_s": None})
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "slot 1: set aside, its server: a\\x1b[2Jb" in shown
    assert "3/2" not in shown  # the budget was lowered


def test_every_event_is_a_line() -> None:
    cell = {"cell": "abc", "name": "c s1", "slot": 1}
    failure = {**cell, "failure": "simulator", "error": "gone", "count": 1, "allowed": 5, "delay": 2.0, "note": "eager"}
    assert event_line("started", {**cell, "attempt": 2}) == "c s1 (abc): started in slot 1, attempt 2"
    assert "failure 1 of 5" in event_line("retrying", failure)
    assert event_line("retrying", failure).endswith("eager")
    assert "FAILED: simulator: gone\n  fix: mend it\n  log: l" in event_line(
        "failed", {**failure, "fix": "mend it", "log": "l"}
    )
    assert "10 episodes saved" in event_line("stopped", {**cell, "saved": 10})
    assert "no failure" in event_line("recycle", {**cell, "saved": 1})
    assert event_line("scaled", {"cells": 3, "before": 2, "steps_per_s": 99.6}) == "100 steps/s with 2: now 3 cells"
    assert event_line("draining", {}) == "draining"
