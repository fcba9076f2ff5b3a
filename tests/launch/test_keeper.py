"""No orphan, whoever is killed; and nobody else is touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opencda_marl.core.errors import OpenCDAError, StorageError
from opencda_marl.launch.keeper import Kept, find, keep
from opencda_marl.launch.processes import Process, boot_id, descendants, is_alive, read_process
from tests.launch.real import all_gone, until

WRAPPER = "sleep 1000; exit $?"  # as CarlaUE4.sh: the child is not exec'ed
STUBBORN = "trap '' TERM; sleep 1000; sleep 1000"
ESCAPED = "setsid sleep 1000 & sleep 1000"  # leaves group and session

_LAUNCHER = """
import json, os, sys, time
from pathlib import Path
from opencda_marl.launch.keeper import keep
folder, script, survive = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
kept = keep(["sh", "-c", script], env=dict(os.environ), cwd=folder, log=folder / "log", record=folder / "record.json",
            survive=survive, grace=0.5)
print("ready", flush=True)
time.sleep(1000)
"""

Start = Callable[..., Kept]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A shell script under a keeper; ended with the test."""
    kept = []

    def run(script: str, *, survive: bool = False, grace: float = 0.5, folder: Path = tmp_path) -> Kept:
        kept.append(
            keep(
                ["sh", "-c", script],
                env={**os.environ, "COLOUR": "green"},
                cwd=folder,
                log=folder / "log.txt",
                record=folder / "record.json",
                survive=survive,
                grace=grace,
                facts={"port": 2000},
            )
        )
        return kept[-1]

    yield run
    for one in kept:
        one.kill()
        assert one.wait(60.0) is not None


def tree(keeper: int, count: int) -> list[Process]:
    """Keeper, inner keeper and what is below them, once there are `count` of the latter."""
    until(lambda: len(descendants(keeper)) == 1 + count, f"{count} processes under the keeper")
    own = read_process(keeper)
    assert own is not None
    return [own, *descendants(keeper)]


def launcher(folder: Path, script: str, *, survive: bool = False) -> subprocess.Popen[str]:
    """A process that keeps a child and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(folder), script, str(survive)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 75", 75), ("exit 143", 143), ("kill -9 $$", -9), ("kill -15 $$", -15), ("kill -13 $$", -13)],
)
def test_the_exit_code_is_the_childs(start: Start, script: str, code: int) -> None:
    kept = start(script)
    assert kept.wait(60.0) == code
    assert kept.poll() == kept.stop() == code
    assert json.loads(kept.record.read_bytes())["exit"] == code
    assert find(kept.record) is None


def test_environment_folder_output_and_record(start: Start, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("before\n")
    kept = start('echo $COLOUR; pwd >&2; read line || echo "no input"; ls /proc/self/fd | tr "\\n" " "')
    assert kept.wait(60.0) == 0
    *lines, files = (tmp_path / "log.txt").read_text().splitlines()
    assert lines == ["before", "green", str(tmp_path), "no input"]
    assert files.split() == ["0", "1", "2", "3"]  # the last one is the folder that ls reads
    facts = json.loads(kept.record.read_bytes())
    assert (facts["port"], facts["pid"], facts["start_time"]) == (2000, kept.child_pid, kept.child_start_time)
    assert facts["argv"][:2] == ["sh", "-c"]


def test_the_child_leads_a_session_of_its_own(start: Start) -> None:
    kept = start(WRAPPER)
    child = read_process(kept.child_pid)
    assert child is not None
    assert child.group == child.session == child.pid
    assert child.start_time == kept.child_start_time
    assert kept.alive
    assert kept.poll() is None


def test_a_launcher_killed_leaves_no_orphan(tmp_path: Path) -> None:
    process = launcher(tmp_path, WRAPPER)
    kept = find(tmp_path / "record.json")
    assert kept is not None
    processes = tree(kept.pid, 2)
    end(process)
    until(lambda: all_gone(processes), "orphans of a launcher")
    assert kept.wait(60.0) == -signal.SIGTERM


@pytest.mark.parametrize("script", [WRAPPER, STUBBORN, ESCAPED])
@pytest.mark.parametrize("victim", [0, 1, 2, 3], ids=["outer keeper", "inner keeper", "wrapper", "child"])
def test_whoever_is_killed_no_orphan_is_left(start: Start, script: str, victim: int) -> None:
    kept = start(script, grace=0.2)
    processes = tree(kept.pid, 3 if script == ESCAPED else 2)
    assert processes[2].pid == kept.child_pid
    if victim == 3 and script != WRAPPER:
        for process in processes[3:]:
            os.kill(process.pid, signal.SIGKILL)
        if script == STUBBORN:
            kept.terminate()  # it goes on to its next command, deaf
    else:
        os.kill(processes[victim].pid, signal.SIGKILL)
    assert kept.wait(60.0) is not None
    assert all_gone(processes)


def test_what_the_end_looks_like_when_somebody_was_killed(start: Start, tmp_path: Path) -> None:
    codes = []
    for victim in range(4):
        kept = start(WRAPPER)
        os.kill(tree(kept.pid, 2)[victim].pid, signal.SIGKILL)
        codes.append(kept.wait(60.0))
    # outer keeper: the child got TERM; inner: nobody heard its end; wrapper; its child, as the shell puts it
    assert codes == [-15, -9, -9, 137]


def test_both_keepers_killed(start: Start) -> None:
    kept = start(STUBBORN)
    processes = tree(kept.pid, 2)
    for process in processes[:2]:
        os.kill(process.pid, signal.SIGSTOP)
    for process in processes[:2]:
        os.kill(process.pid, signal.SIGKILL)
    assert kept.wait(60.0) == -signal.SIGKILL
    assert all_gone(processes)


def test_a_stopped_child_is_ended_and_gets_its_term(start: Start, tmp_path: Path) -> None:
    kept = start("trap 'echo heard; exit 5' TERM; echo up; while :; do sleep 0.01; done", grace=30.0)
    until(lambda: "up" in (tmp_path / "log.txt").read_text(), "the child")
    os.kill(kept.child_pid, signal.SIGSTOP)
    assert kept.stop(30.0) == 5
    assert (tmp_path / "log.txt").read_text().split()[-1] == "heard"


def test_a_deaf_and_stopped_group_is_killed(start: Start) -> None:
    kept = start(STUBBORN, grace=30.0)
    processes = tree(kept.pid, 2)
    for process in processes[2:]:
        os.kill(process.pid, signal.SIGSTOP)
    assert kept.stop(0.1) == -signal.SIGKILL
    assert all_gone(processes)


def test_stopped_keepers_do_not_save_their_child(start: Start) -> None:
    kept = start(STUBBORN, grace=30.0)
    processes = tree(kept.pid, 2)
    for process in processes[:2]:
        os.kill(process.pid, signal.SIGSTOP)
    assert kept.stop(0.1) == -signal.SIGKILL
    assert all_gone(processes)


def test_term_comes_once(start: Start, tmp_path: Path) -> None:
    """A trainer takes the second one for impatience and drops what it would have saved."""
    log = tmp_path / "log.txt"
    kept = start("trap 'echo term' TERM; echo up; while [ ! -e enough ]; do sleep 0.02; done; exit 3", grace=60.0)
    until(lambda: "up" in log.read_text(), "the child")
    kept.terminate()
    until(lambda: "term" in log.read_text(), "TERM")
    kept.terminate()
    time.sleep(0.2)
    kept.release()
    time.sleep(0.2)
    (tmp_path / "enough").touch()
    until(lambda: not kept.alive, "the child's end")
    assert log.read_text().split().count("term") == 1
    assert json.loads(kept.record.read_bytes())["exit"] == 3


def test_a_survivor_outlives_its_launcher_and_is_found(tmp_path: Path) -> None:
    process = launcher(tmp_path, WRAPPER, survive=True)
    end(process)
    kept = find(tmp_path / "record.json")
    assert kept is not None
    processes = tree(kept.pid, 2)
    time.sleep(0.3)
    assert kept.alive
    assert not any(all_gone([one]) for one in processes)
    assert kept.stop(30.0) == -signal.SIGTERM
    assert all_gone(processes)
    assert find(tmp_path / "record.json") is None


def test_release_is_the_launchers_end(start: Start) -> None:
    kept = start(WRAPPER)
    kept.release()
    assert kept.wait(60.0) == -signal.SIGTERM
    survivor = start(WRAPPER, survive=True)
    survivor.release()
    assert survivor.wait(0.3) is None


@pytest.mark.parametrize("change", [{"start_time": 5}, {"boot": "another"}, {"exit": 0}, {"keepers": []}])
def test_a_record_of_something_else_is_not_adopted(tmp_path: Path, change: dict[str, object]) -> None:
    """The same number, another process: it is neither found nor touched."""
    stranger = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        then = read_process(stranger.pid)
        assert then is not None
        facts = {"pid": then.pid, "start_time": then.start_time, "boot": boot_id(), "exit": None}
        facts |= {"keepers": [[then.pid, then.start_time - 1], [then.pid, then.start_time - 1]], **change}
        if change == {"start_time": 5}:
            facts["start_time"] = then.start_time - 1
        record = tmp_path / "record.json"
        record.write_text(json.dumps(facts))
        assert find(record) is None
        assert is_alive(then.pid, then.start_time)
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '{"pid": 1}'])
def test_a_broken_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    assert find(tmp_path / "record.json") is None
    assert find(tmp_path / "missing.json") is None


def test_any_path_and_any_size_of_environment(tmp_path: Path) -> None:
    folder = tmp_path / "a b'c\"d\ne $HOME ü"
    folder.mkdir()
    program = folder / "pro gram"
    shutil.copy(shutil.which("sh") or "/bin/sh", program)
    kept = keep(
        [str(program), "-c", 'printf "%s" "$1"; printf "%s" "$WIDE" | wc -c', "x", "a b\n'c'"],
        env={"PATH": os.environ["PATH"], "WIDE": "x" * 100_000},
        cwd=folder,
        log=folder / "log\n1",
        record=folder / "record '1'",
    )
    assert kept.wait(60.0) == 0
    assert (folder / "log\n1").read_text() == "a b\n'c'100000\n"
    assert json.loads((folder / "record '1'").read_bytes())["exit"] == 0


@pytest.mark.parametrize("wrong", ["program", "cwd", "log", "record"])
def test_what_cannot_be_started(tmp_path: Path, wrong: str) -> None:
    missing = tmp_path / "missing" / "x"
    places = {"cwd": tmp_path, "log": tmp_path / "log", "record": tmp_path / "record", "program": Path("/bin/sh")}
    places[wrong] = missing
    before = descendants(os.getpid())
    with pytest.raises(OpenCDAError, match=str(missing)) as caught:
        keep(
            [str(places["program"]), "-c", "touch ran"],
            env=dict(os.environ),
            cwd=places["cwd"],
            log=places["log"],
            record=places["record"],
        )
    assert isinstance(caught.value, StorageError) == (wrong in ("log", "record"))
    assert not (tmp_path / "ran").exists()
    assert descendants(os.getpid()) == before
