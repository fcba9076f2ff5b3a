"""The on-disk form of a run: one writer at a time, lines that survive a kill, nothing repeated after a resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from opencda_marl.core.errors import CheckpointError, Interrupted, SimulatorError, StorageError, WorkerError
from opencda_marl.core.run_folder import (
    RunFolder,
    best_checkpoint,
    check_run_folder,
    is_running,
    read_config,
    read_episodes,
    read_metrics,
    read_run,
    read_status,
    run_name,
    typed,
)
from opencda_marl.core.spec import LearnerState


def _made(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    folder.write_config("seed: 1\n")
    folder.write_run({"profile": "p"})
    return folder


_HOLDER = """
import sys, time
from pathlib import Path
from opencda_marl.core.run_folder import RunFolder
path = Path(sys.argv[1])
folder = RunFolder.resume(path) if len(sys.argv) == 2 else RunFolder.create(None, root=path, profile="p")
folder.beat("training", episode=3)
print(folder.path, flush=True)
time.sleep(60)
"""


def _holder(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip()
    return process


def _end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("odd", ["plain", "with space", "quote'\"$HOME", "line\nbreak", "ü—路", "-dash"])
def test_what_is_written_can_be_read(tmp_path: Path, odd: str) -> None:
    with _made(tmp_path / odd) as folder:
        folder.episode({"episode": 1, "return": np.float32(0.5), "delay": float("nan"), "parts": {"a": np.int64(3)}})
        folder.episode({"episode": 2, "return": -1.0, "list": (1, 2), "path": tmp_path, "on": np.bool_(True)})
        folder.metrics({"kind": "update", "episode": 2, "loss": float("inf")})
        folder.log("first\nsecond")
        written = folder.arrays("traffic/episode_2", {"x": np.arange(6).reshape(2, 3).T})
        folder.beat("training", episode=2)
        assert is_running(folder.path)
        assert read_status(tmp_path / odd)["phase"] == "training"
    path = tmp_path / odd
    assert read_episodes(path) == [
        {"episode": 1, "return": 0.5, "delay": None, "parts": {"a": 3}},
        {"episode": 2, "return": -1.0, "list": [1, 2], "path": str(tmp_path), "on": True},
    ]
    assert read_metrics(path) == [{"kind": "update", "episode": 2, "loss": None}]
    assert read_config(path) == "seed: 1\n"
    assert read_run(path) == {"profile": "p"}
    assert load_file(written)["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert "first" in (path / "log.txt").read_text()
    assert not is_running(path)
    assert read_status(path)["phase"] == "died"  # nobody said that it was finished
    assert not list(path.rglob("*.part"))


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    _made(tmp_path / "run").close()
    holder = _holder(str(tmp_path / "run"))
    try:
        assert is_running(tmp_path / "run")
        with pytest.raises(CheckpointError, match=rf"in use by process {holder.pid} on ") as caught:
            RunFolder.resume(tmp_path / "run")
        assert caught.value.fix is not None
    finally:
        _end(holder)
    # the kernel gives the lock back, however the process ended
    assert read_status(tmp_path / "run")["phase"] == "died"
    RunFolder.resume(tmp_path / "run").close()


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    with _made(tmp_path / "run"), pytest.raises(CheckpointError, match=str(os.getpid())):
        RunFolder.resume(tmp_path / "run")


def test_a_look_does_not_stop_a_writer(tmp_path: Path) -> None:
    """Readers take the lock for a moment to see whether it is free."""
    _made(tmp_path / "run").close()
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            is_running(tmp_path / "run")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            RunFolder.resume(tmp_path / "run").close()
    finally:
        ended.set()
        thread.join()


def test_names_are_unique_in_the_same_second(tmp_path: Path) -> None:
    processes = [_holder(str(tmp_path), "create") for _ in range(2)]
    folders = [RunFolder.create(None, root=tmp_path, profile="p") for _ in range(3)]
    try:
        assert len(list(tmp_path.iterdir())) == 5
        assert len({folder.path for folder in folders}) == 3
    finally:
        for process in processes:
            _end(process)
        for folder in folders:
            folder.close()


def test_a_name_says_when_what_and_which_seed() -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-quickstart-s7", run_name("sumo-marl/intersection/quickstart", 7, 1e9))
    assert run_name("odd name/ü\n'x", 0, 1e9).endswith("-x-s0")
    assert run_name(None, 0, 1e9).endswith("-run-s0")


def test_a_folder_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="not empty"):
        RunFolder.create(tmp_path / "full")
    with pytest.raises(StorageError, match="cannot write"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(StorageError, match="cannot write"):
        RunFolder.create(tmp_path / "file" / "below")
    RunFolder.create(tmp_path / "empty").close()


def test_paths_as_a_person_would_type_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(tmp_path / "runs" / "a") == "runs/a"
    assert typed(tmp_path / "my runs") == "'my runs'"
    assert typed(tmp_path / "-x") == "./-x"
    assert typed(Path("/elsewhere/a")) == "/elsewhere/a"
    assert typed(Path("runs/a")) == "runs/a"


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "none"):
        for call in (check_run_folder, read_config, read_run, RunFolder.resume):
            with pytest.raises(CheckpointError, match="run folder"):
                call(wrong)
    _made(tmp_path / "run").close()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        best_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text('{"profile": ')
    with pytest.raises(CheckpointError, match=r"run\.json is broken"):
        read_run(tmp_path / "run")


def test_lines_that_somebody_deleted_are_missed_at_once(tmp_path: Path) -> None:
    with _made(tmp_path / "run") as folder:
        folder.episode({"episode": 1})
        folder.sync()
        (folder.path / "episodes.jsonl").unlink()
        folder.episode({"episode": 2})
        with pytest.raises(StorageError, match=r"episodes\.jsonl was deleted"):
            folder.sync()


def test_cut_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    with _made(tmp_path / "run") as folder:
        for episode in range(1, 6):
            folder.episode({"episode": episode})
            folder.metrics({"kind": "update", "episode": episode})
            folder.arrays(f"traffic/episode_{episode}", {"x": np.zeros(1)})
            folder.checkpoints.save(episode, LearnerState({}, {}), {})
        folder.checkpoints.cut(3)
    with RunFolder.resume(tmp_path / "run") as folder:
        # killed in the middle of a line
        with (folder.path / "episodes.jsonl").open("a") as torn:
            torn.write('{"episode": 6, "ret')
        assert [line["episode"] for line in read_episodes(folder.path)] == [1, 2, 3, 4, 5]
        assert folder.cut(3) == 2
        folder.episode({"episode": 4, "again": True})
    assert [line["episode"] for line in read_episodes(tmp_path / "run")] == [1, 2, 3, 4]
    assert [line["episode"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert sorted(path.stem for path in (tmp_path / "run" / "traffic").iterdir()) == [f"episode_{n}" for n in (1, 2, 3)]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    with _made(tmp_path / "run") as folder:
        folder.episode({"episode": 1})
        for bad in ("nonsense", "[1]", '{"no": 1}', '{"episode": "one"}'):
            (folder.path / "episodes.jsonl").write_text(f'{{"episode": 1}}\n{bad}\n{{"episode": 3}}\n')
            with pytest.raises(CheckpointError, match=r"episodes\.jsonl, line 2"):
                read_episodes(folder.path)


def test_the_heartbeat_comes_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("opencda_marl.core.run_folder.time.monotonic", lambda: now)
    with _made(tmp_path / "run") as folder:
        assert folder.beat("training", episode=1, rate=2.0) is not None
        now = 100.9
        assert folder.beat("training", episode=2) is None
        assert read_status(folder.path)["episode"] == 1
        assert folder.beat("updating") is not None  # a new phase is said at once
        now = 102.0
        status = folder.beat("updating", episode=3)
    assert status is not None
    assert (status["episode"], status["rate"], status["pid"]) == (3, 2.0, os.getpid())
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == status


@pytest.mark.parametrize(
    ("error", "phase", "code"),
    [
        (SimulatorError("gone", fix="look"), "failed", 10),
        (Interrupted("stop"), "interrupted", 130),
        (ValueError("bug"), "failed", 1),
    ],
)
def test_how_a_run_ended_is_written_down(tmp_path: Path, error: Exception, phase: str, code: int) -> None:
    with pytest.raises(type(error)), _made(tmp_path / "run") as folder:
        folder.beat("training")
        raise error
    status = read_status(tmp_path / "run")
    assert (status["phase"], status["exit_code"]) == (phase, code)
    assert type(error).__name__ in status["error"]
    text = (tmp_path / "run" / "log.txt").read_text()
    assert ("Traceback" in text) == isinstance(error, ValueError)
    assert not is_running(tmp_path / "run")


def test_what_led_to_an_error_of_ours_is_in_the_log_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as found, _made(tmp_path / "run"):
        try:
            raise RuntimeError("[pair.cc:553] Connection closed by peer")
        except RuntimeError as error:
            raise WorkerError("worker 1 is gone", fix="see") from error
    assert "pair.cc" not in str(found.value) + read_status(tmp_path / "run")["error"]
    said = "failed: WorkerError: worker 1 is gone\n  fix: see\n  because: RuntimeError: [pair.cc:553] Connection closed"
    assert said in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_disk_ends_with_its_own_error(tmp_path: Path) -> None:
    """/dev/full refuses every byte; what was being recorded as the failure is the first error, not the second."""
    _made(tmp_path / "run").close()
    os.symlink("/dev/full", tmp_path / "run" / "episodes.jsonl")
    os.symlink("/dev/full", tmp_path / "run" / "log.txt")
    with (
        pytest.raises(StorageError, match=r"episodes\.jsonl: the disk is full") as caught,
        RunFolder.resume(tmp_path / "run") as folder,
    ):
        folder.episode({"episode": 1})
    assert caught.value.exit_code == 21
    assert not is_running(tmp_path / "run")


def test_something_that_is_no_json_value_is_a_defect(tmp_path: Path) -> None:
    with _made(tmp_path / "run") as folder, pytest.raises(TypeError, match="object"):
        folder.episode({"episode": object()})


def test_a_folder_that_cannot_be_made_is_not_called_gone() -> None:
    for wanted in ({"out": Path("/proc/x")}, {"out": None, "root": Path("/proc/x")}):
        with pytest.raises(StorageError, match="/proc/x cannot be made") as caught:
            RunFolder.create(**wanted)
        assert "--out" in str(caught.value.fix)


def test_a_run_that_was_killed_before_it_began_is_no_obstacle(tmp_path: Path) -> None:
    """Nothing was trained, and there is no run.json to resume from: the same --out may be given again."""
    for name in ("config.yaml", "status.json", ".lock", ".run.json.part"):
        (tmp_path / name).write_text("{}")
    with RunFolder.create(tmp_path) as folder:
        assert folder.path == tmp_path
    (tmp_path / "mine.txt").write_text("a person's")
    with pytest.raises(StorageError, match="not empty"):
        RunFolder.create(tmp_path)
    (tmp_path / "mine.txt").unlink()
    (tmp_path / ".lock").unlink()
    with pytest.raises(StorageError, match="not empty"):  # without our lock config.yaml may be anybody's
        RunFolder.create(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_an_error_at_once(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config("seed: 1\n")
        os.mkfifo(folder.path / "log.txt")
        with pytest.raises(StorageError, match=r"log\.txt"):
            folder.log("nobody reads this")
