"""What a trainer is told, what its end means, and its signs of life."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.config import from_run_folder, load_profile, to_yaml
from opencda_marl.core import errors
from opencda_marl.core.run_folder import RunFolder, read_run
from opencda_marl.launch.folder import Launch, MatrixFolder
from opencda_marl.launch.plan import Options, Slot
from opencda_marl.launch.trainers import (
    Outcome,
    Watch,
    argv,
    classify,
    environment,
    forgiven,
    in_matrix,
    kind_of,
    make_eager,
    retry_delay,
    said_last,
)
from tests.launch.matrices import cell


def test_a_fresh_cell_and_one_that_goes_on(tmp_path: Path) -> None:
    folder, one = MatrixFolder(tmp_path), cell(1)
    run, root = folder.run(one.id), folder.launch(one.id)
    fresh = ["-t", "p/cell", "--config-root", str(root), "--out", str(run)]
    budgets = ["max_episodes=3", "max_env_steps=null", "max_minutes=null"]
    start = [sys.executable, "-m", "opencda_marl.cli", "run"]
    assert argv(folder, one) == [*start, *fresh, *budgets]
    assert argv(folder, one, ["learner.update_mode=eager"])[-1] == "learner.update_mode=eager"
    place = ["carla.host=127.0.0.1", "carla.port=2010"]
    assert argv(folder, one, port=2010) == [*start, *fresh, *budgets, *place], "the slot's server"
    run.mkdir(parents=True)
    (run / ".lock").touch()
    (run / "config.yaml").touch()  # killed before it had written down what it is
    assert argv(folder, one) == [*start, *fresh, *budgets]
    assert not run.exists()
    run.mkdir()
    (run / "run.json").touch()
    assert argv(folder, one, ["learner.update_mode=eager"]) == [*start, "--resume", str(run), *budgets]
    assert argv(folder, one, port=2010) == [*start, "--resume", str(run), *budgets, *place]
    (run / "run.json").unlink()
    (run / "checkpoints").mkdir()  # somebody took run.json away: what was trained stays
    assert argv(folder, one)[4] == "--resume"


def test_the_environment() -> None:
    given = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "5", "OMP_NUM_THREADS": "8", "PYTHONPATH": "mine"}
    found = environment(Slot(0), cell(0), given)
    assert found["CUDA_VISIBLE_DEVICES"] == "5"
    assert "CUDA_DEVICE_ORDER" not in found
    assert {found[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")} == {"1"}
    assert found["PYTHONPATH"].split(":")[1] == "mine"
    found = environment(Slot(1, cuda="3", threads=2), cell(0, threads=2), given)
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("3", "PCI_BUS_ID")
    assert found["OMP_NUM_THREADS"] == "2"
    assert given["OMP_NUM_THREADS"] == "8"


SAID = "loading …\nTraceback\nerror: the port is taken\n  by somebody\n  fix: choose another one\n"


@pytest.mark.parametrize(
    ("code", "console", "asked", "kind", "text"),
    [
        (0, "", None, "error", "the trainer ended well, but its budget is not used up"),
        (10, SAID, None, "simulator", "the port is taken"),
        (12, SAID, None, "deadline", "the port is taken"),
        (21, "", None, "storage", "exit code 21"),
        (30, SAID, None, "not_finite", "the port is taken"),
        (32, SAID, None, "capture", "the port is taken"),
        (34, SAID, None, "memory", "the port is taken"),
        (75, "", None, "recycle", None),
        (
            130,
            "stopped",
            None,
            "signal",
            "ended from outside, not by the launcher",
        ),
        (130, "stopped", "stop", "stopped", None),
        (-15, "", "stop", "stopped", None),
        (-9, "", "stop", "stopped", None),
        (10, SAID, "stop", "simulator", "the port is taken"),
        (-9, "", None, "signal", "killed by signal 9 (out of memory?)"),
        (-11, "", None, "signal", "killed by signal 11"),
        (-9, "", "deadline: no sign of life", "deadline", "no sign of life"),
        (-9, "", "simulator: its server died", "simulator", "its server died"),
        (1, "Traceback\nValueError: no\n", None, "error", "ValueError: no"),
        (1, "Traceback\ntorch.OutOfMemoryError: CUDA out of memory\n", None, "memory", None),
        (1, "Traceback\nnumpy._core._exceptions._ArrayMemoryError: Unable\n", None, "memory", None),
    ],
)
def test_what_an_end_means(code: int, console: str, asked: str | None, kind: str, text: str | None) -> None:
    found = classify(code, console, finished=False, asked=asked)
    assert found.kind == kind
    if text is not None or kind in ("stopped", "recycle"):
        assert found.text == text
    assert found.failed == (kind not in ("stopped", "recycle"))
    assert classify(code, console, finished=True, asked=asked).kind == "finished"


def test_what_an_earlier_trainer_said_is_not_told(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_text(f"{SAID}{SAID}ValueError: mine\n")
    assert classify(1, said_last(log), finished=False).text == "the port is taken"
    assert classify(1, said_last(log, 2 * len(SAID.encode())), finished=False).text == "ValueError: mine"
    assert said_last(tmp_path / "nowhere") == ""
    log.write_text("x" * 100_000 + "\nerror: late\n")
    assert classify(1, said_last(log), finished=False).text == "late"


def test_the_fix_is_told() -> None:
    assert classify(10, SAID, finished=False).fix == "choose another one"


def test_every_error_of_the_tree_has_a_class_of_its_own() -> None:
    kinds = [
        kind_of(kind("x"))
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and kind is not errors.OpenCDAError
    ]
    # a worker that died counts as whoever was killed: both go on from what was saved
    assert kinds.count("signal") == 2
    assert len(set(kinds)) == len(kinds) - 1
    assert "error" not in kinds
    assert kind_of(errors.OpenCDAError("x")) == "error"


def _launch(*attempts: tuple[str, int, int], fresh: int = 0) -> Launch:
    told = [
        {"number": number, "kind": kind, "from": begun, "saved": saved}
        for number, (kind, begun, saved) in enumerate(attempts, start=1)
    ]
    return Launch(attempts=told, made=len(told), fresh=fresh)


def test_failures_in_a_row() -> None:
    options = Options(retries={"simulator": 2})
    same = ("simulator", 0, 0)
    assert forgiven(_launch(same), "simulator", options) == 1
    assert forgiven(_launch(same, same), "simulator", options) == 2
    assert forgiven(_launch(same, same, same), "simulator", options) is None
    assert forgiven(_launch(same, same, same, fresh=1), "simulator", options) == 2
    assert forgiven(_launch(same, same, ("simulator", 0, 5)), "simulator", options) == 1
    assert forgiven(_launch(("simulator", 0, 5), ("simulator", 5, 5), same), "simulator", options) is None
    # others in between neither help nor count
    assert forgiven(_launch(same, ("error", 0, 0), same), "simulator", options) == 2
    assert forgiven(_launch(("not_finite", 0, 9)), "not_finite", options) is None


def test_retries_wait_longer_and_longer() -> None:
    options = Options(retry_delay=1.0)
    assert [retry_delay(count, options) for count in (1, 2, 3, 20)] == [1.0, 2.0, 4.0, 60.0]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _watched(tmp_path: Path) -> tuple[Watch, Clock]:
    clock = Clock()
    limits = {"starting": 20.0, "compiling": 100.0, "training": 5.0, "evaluating": 30.0}
    return Watch(tmp_path, 7, Options(deadlines=limits), clock=clock), clock


def _beat(phase: str, updated: float, pid: int = 7) -> dict[str, Any]:
    return {"phase": phase, "updated": updated, "pid": pid}


def _pass(watch: Watch, clock: Clock, status: dict[str, Any], seconds: float) -> str | None:
    """Look every second, as the launcher does."""
    found = None
    for _ in range(int(seconds)):
        clock.now += 1.0
        found = watch.overdue(status)
    return found


def test_a_deadline_for_each_phase(tmp_path: Path) -> None:
    watch, clock = _watched(tmp_path)
    assert _pass(watch, clock, {}, 19) is None
    assert "while starting" in (_pass(watch, clock, {}, 3) or "")
    for phase, limit in (("compiling", 100), ("training", 5), ("evaluating", 30)):
        watch, clock = _watched(tmp_path)
        assert _pass(watch, clock, _beat(phase, 1.0), limit) is None
        assert f"while {phase} (limit {limit} s)" in (_pass(watch, clock, _beat(phase, 1.0), 3) or "")


def test_signs_of_life(tmp_path: Path) -> None:
    watch, clock = _watched(tmp_path)
    for k in range(50):
        assert _pass(watch, clock, _beat("training", float(k)), 4) is None
    # the file of an earlier attempt is no sign of this one
    watch, clock = _watched(tmp_path)
    assert _pass(watch, clock, _beat("training", 1.0, pid=6), 18) is None
    assert _pass(watch, clock, _beat("training", 2.0, pid=6), 4) is not None
    # children that evaluate for it write how far they are
    watch, clock = _watched(tmp_path)
    (tmp_path / "evaluations").mkdir()
    for k in range(3):
        (tmp_path / f"evaluations/e{k}.progress").touch()
        assert _pass(watch, clock, _beat("evaluating", 1.0), 25) is None
    assert _pass(watch, clock, _beat("evaluating", 1.0), 10) is not None


def test_a_launcher_that_was_stopped_itself_blames_nobody(tmp_path: Path) -> None:
    watch, clock = _watched(tmp_path)
    assert watch.overdue(_beat("training", 1.0)) is None
    clock.now += 500.0
    assert watch.overdue(_beat("training", 1.0)) is None
    assert _pass(watch, clock, _beat("training", 1.0), 7) is not None


def test_eager_after_a_failed_capture(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = load_profile(
        "sumo-marl/intersection/route_speed_only_masac", overrides=["learner.cuda_graph_update=true"]
    ).settings
    with RunFolder.create(run) as folder:
        folder.write_config(to_yaml(settings))
        folder.write_run({"profile": "p", "resumed": []})
    make_eager(run, "it is eager now")
    found: Any = from_run_folder(run).learner
    assert (found.update_mode, found.cuda_graph_update) == ("eager", False)
    assert read_run(run)["fallback"] == {"update_mode": "eager", "why": "it is eager now"}
    assert read_run(run)["profile"] == "p"
    assert "it is eager now" in (run / "log.txt").read_text()
    make_eager(tmp_path / "nowhere", "")  # it had not begun
    assert not (tmp_path / "nowhere").exists()


def test_a_fix_inside_a_matrix_speaks_of_the_matrix() -> None:
    def said(fix: str | None) -> str | None:
        return in_matrix(Outcome("storage", "no room", fix), Path("runs/a b"))

    again = "opencda-marl matrix retry 'runs/a b'; opencda-marl matrix run 'runs/a b'"
    assert said("free some room, then continue with --resume") == f"free some room, then {again}"
    assert said("start again from the last checkpoint (--resume); it has a limit") == f"{again}; it has a limit"
    assert (said("chmod it"), said(None)) == ("chmod it", None)
