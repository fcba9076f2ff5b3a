"""Two workers on real SUMO: trained, stopped, killed, hung, resumed, and started by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from opencda_marl.core.errors import Interrupted, WorkerError
from opencda_marl.core.run_folder import read_config, read_episodes, read_run, read_status
from opencda_marl.tools.child_runs import ChildRun
from opencda_marl.tools.verify_resume import differing_runs, verify_resume

PROFILE = "sumo-marl/intersection/route_speed_only_pcmappo"
SHORT = (
    *("workers=2", "max_steps=200", "learner.n_steps=300", "max_minutes=null", "evaluation.final=false"),
    *("checkpoint_every=4", "demand.rate_vph=400"),
)


@contextmanager
def running(folder: Path, *overrides: str, lines: int = 2) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A run that has finished so many episodes."""
    run = ChildRun(PROFILE, folder, "run", overrides=(*SHORT, "max_episodes=4000", *overrides))
    process = run.start()
    try:
        file, give_up = run.path / "episodes.jsonl", time.monotonic() + 120.0
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, (folder / "run.log").read_text()
            assert time.monotonic() < give_up
            time.sleep(0.02)
        yield run.path, process
    finally:
        process.kill()
        process.wait()


def others(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children() if "opencda_marl.worker" in one.cmdline()]


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=10.0)[1]


def test_two_workers_train_one_policy(tmp_path: Path) -> None:
    run = ChildRun(PROFILE, tmp_path, "run", overrides=(*SHORT, "max_episodes=6"))
    run.finish(run.start(), deadline=200.0)
    lines = read_episodes(run.path)
    assert [line["episode"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["env_steps"] for line in lines] == [200, 400, 600, 800, 1000, 1200]
    assert lines[4]["updates_performed"] == lines[5]["updates_performed"] >= 3
    facts = read_run(run.path)
    assert facts["init"]["workers"] == 2
    assert facts["init"]["gradient_sums"] == facts["forms"]["gradient_sums"] == "shared memory"
    assert "workers: 2" in read_config(run.path)
    assert (run.path / "workers/worker_1.log").read_text() == ""
    assert read_status(run.path)["phase"] == "finished"
    # the traffic of an episode is that of a run with one worker
    alone = ChildRun(PROFILE, tmp_path, "alone", overrides=(*SHORT, "workers=1", "max_episodes=1"))
    alone.finish(alone.start(), deadline=200.0)
    (other,) = read_episodes(alone.path)
    assert {k: other[k] for k in ("rate_vph", "scheduled", "seed")} == {
        k: lines[0][k] for k in ("rate_vph", "scheduled", "seed")
    }


def test_ctrl_c_ends_all_of_them_and_nothing_finished_is_lost(tmp_path: Path) -> None:
    with running(tmp_path) as (path, process):
        helpers = others(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == Interrupted.exit_code
        assert len(helpers) == 1
        assert gone(helpers)
    done = len(read_episodes(path))
    assert done % 2 == 0
    assert f"all {done} finished episodes are saved" in (tmp_path / "run.log").read_text()
    assert (path / f"checkpoints/episode_{done}").is_dir()


def _kill(process: subprocess.Popen[bytes], helper: psutil.Process) -> tuple[int, str]:
    helper.kill()
    return WorkerError.exit_code, "worker 1 was killed by signal 9"


def _hang(process: subprocess.Popen[bytes], helper: psutil.Process) -> tuple[int, str]:
    helper.suspend()
    return WorkerError.exit_code, f"lost worker 1 (process {helper.pid}) when they were to "


def _interrupt_beside_a_hung_one(process: subprocess.Popen[bytes], helper: psutil.Process) -> tuple[int, str]:
    helper.suspend()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    return Interrupted.exit_code, "finished episodes are saved"


def _orphan(process: subprocess.Popen[bytes], helper: psutil.Process) -> tuple[int, str]:
    process.kill()
    return -signal.SIGKILL, ""


@pytest.mark.slow
@pytest.mark.parametrize("accident", [_kill, _hang, _interrupt_beside_a_hung_one, _orphan])
def test_an_accident_ends_all_of_them(
    accident: Callable[[subprocess.Popen[bytes], psutil.Process], tuple[int, str]], tmp_path: Path
) -> None:
    with running(tmp_path, "worker_timeout=3") as (path, process):
        (helper,) = others(process)
        code, words = accident(process, helper)
        assert process.wait(60.0) == code
        assert gone([helper])
    said = (tmp_path / "run.log").read_text()
    assert words in said
    assert "Traceback" not in said
    if code > 0:  # the last round was saved, though no checkpoint was due
        assert (path / f"checkpoints/episode_{len(read_episodes(path))}").is_dir()
    done = len(read_episodes(path))
    again = ChildRun(PROFILE, tmp_path, "run", overrides=())
    process = subprocess.Popen(
        [sys.executable, "-m", "opencda_marl.cli", "run", "--resume", str(again.path), f"max_episodes={done + 4}"]
    )
    assert process.wait(200.0) == 0
    assert [line["episode"] for line in read_episodes(path)] == list(range(1, done + 5))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_killed_and_resumed_run_is_the_run_that_was_not(workers: int, tmp_path: Path) -> None:
    found = verify_resume(PROFILE, folder=tmp_path, overrides=(f"workers={workers}",))
    assert found["differences"] == []
    assert found["compared"]["episodes"] == 4 * workers
    assert found["compared"]["gradient_steps"] >= 20


@pytest.mark.slow
def test_torchrun_makes_the_same_run(tmp_path: Path) -> None:
    overrides = (*SHORT, "max_episodes=6")
    run = ChildRun(PROFILE, tmp_path, "run", overrides=overrides)
    run.finish(run.start(), deadline=200.0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "opencda_marl.cli", "run", "-t", PROFILE, "--out", str(tmp_path / "other"), *overrides]
    subprocess.run(command, check=True, timeout=200.0, env={**os.environ, "OMP_NUM_THREADS": "1"})
    differences, compared = differing_runs(run.path, tmp_path / "other")
    assert differences == []
    assert compared["gradient_steps"] > 10
    again = ChildRun(PROFILE, tmp_path, "again", overrides=overrides)
    again.finish(again.start(), deadline=200.0)
    assert differing_runs(run.path, again.path)[0] == []
