"""Child processes answer, fail loudly, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from opencda_marl.core import children
from opencda_marl.core.children import Child, OneAtATime, run_all
from opencda_marl.core.errors import OpenCDAError

_MODULE = """
import os, sys, time
from opencda_marl.core.children import answer, end_with_parent, read_request
request = read_request(sys.argv[1])
end_with_parent()
if "say" in request:
    print(request["say"], flush=True)
if "place" in request:
    import tempfile
    from opencda_marl.core.scratch import scratch_folder
    tempfile.tempdir = request["place"]
    held = scratch_folder("child")
if "fail" in request:
    raise ValueError("nothing works")
time.sleep(request.get("sleep", 0.0))
answer(request, {"twice": 2 * request["value"], "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "child_for_test.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return "child_for_test"


def test_a_job_is_answered_with_one_thread(tmp_path: Path, module: str) -> None:
    child = Child(module, {"value": 21, "say": "noise on stdout"}, folder=tmp_path / "jobs", name="a b'c")
    assert child.wait(30)
    found = child.result()
    assert (found["twice"], found["threads"]) == (42, "1")
    assert found["pid"] != os.getpid()


@pytest.mark.parametrize("by", ["parent", "itself"])
def test_a_child_that_is_ended_leaves_no_temporary_folder(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    child = Child(module, {"value": 1, "sleep": 60.0, "place": str(place)}, folder=tmp_path / "jobs", name="job")
    give_up = time.monotonic() + 30.0
    while not list(place.glob("*/.opencda-marl-in-use")):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    if by == "itself":
        assert child._process.stdin is not None
        child._process.stdin.close()  # as when the parent is gone
        assert child.wait(30.0)
    child.close()
    assert list(place.iterdir()) == []


def test_a_failure_says_what_the_child_said(tmp_path: Path, module: str) -> None:
    child = Child(module, {"value": 1, "fail": True}, folder=tmp_path, name="job")
    child.wait(30)
    with pytest.raises(OpenCDAError, match="nothing works") as caught:
        child.result()
    assert "job.log" in str(caught.value.fix)


def test_an_old_answer_is_not_taken_for_a_new_one(tmp_path: Path, module: str) -> None:
    first = Child(module, {"value": 1}, folder=tmp_path, name="job")
    first.wait(30)
    first.result()
    second = Child(module, {"value": 1, "fail": True}, folder=tmp_path, name="job")
    second.wait(30)
    with pytest.raises(OpenCDAError):
        second.result()


def test_some_at_once_in_order_of_asking(tmp_path: Path, module: str) -> None:
    seen = []
    requests = {f"job{value}": {"value": value} for value in range(4)}
    found = run_all(module, requests, folder=tmp_path, workers=2, going_on=lambda done: not seen.append(done))
    assert {name: answer["twice"] for name, answer in found.items()} == {f"job{value}": 2 * value for value in range(4)}
    assert seen[0] == 0
    assert seen == sorted(seen)


def test_going_on_can_end_it(tmp_path: Path, module: str) -> None:
    before = psutil.Process().children()  # other tests of this process may keep some (a compiler's pool)
    began = time.monotonic()
    long = {"job": {"value": 1, "sleep": 60}}
    assert run_all(module, long, folder=tmp_path, workers=2, going_on=lambda _: False) == {}
    found = run_all(module, long, folder=tmp_path, workers=1, going_on=lambda _: time.monotonic() - began < 1.0)
    assert found == {}
    assert time.monotonic() - began < 20
    assert set(psutil.Process().children()) <= set(before)


def test_one_at_a_time_keeps_the_newest(tmp_path: Path, module: str) -> None:
    before = psutil.Process().children()
    jobs = OneAtATime(module, folder=tmp_path)
    assert jobs.poll() is None
    assert jobs.ask("one", {"value": 1, "sleep": 0.3}) is None
    assert jobs.ask("two", {"value": 2}) is None
    assert jobs.ask("three", {"value": 3}) == "two"
    assert jobs.names == ("one", "three")
    found = []
    while jobs.names:
        ended = jobs.poll(wait=True)
        if ended is not None:
            found.append((ended[0], ended[1]["twice"]))
    assert found == [("one", 2), ("three", 6)]
    jobs.ask("four", {"value": 4, "sleep": 60})
    jobs.close()
    jobs.close()
    assert set(psutil.Process().children()) <= set(before)


def test_a_failed_job_does_not_stop_the_next(tmp_path: Path, module: str) -> None:
    jobs = OneAtATime(module, folder=tmp_path)
    jobs.ask("one", {"value": 1, "fail": True})
    jobs.ask("two", {"value": 2})
    found = None
    with pytest.raises(OpenCDAError, match="one"):
        while jobs.names:
            jobs.poll(wait=True)
    while found is None:
        found = jobs.poll(wait=True)
    assert found[0] == "two"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(tmp_path: Path, module: str, number: int) -> None:
    script = (
        "import sys, time; from pathlib import Path; from opencda_marl.core.children import Child\n"
        f"child = Child({module!r}, {{'value': 1, 'sleep': 60}}, folder=Path(sys.argv[1]), name='job')\n"
        "print(child._process.pid, flush=True); time.sleep(60)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    child.wait(10)


def _niceness(process: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, process)


@pytest.mark.parametrize("behind", [True, False])
def test_a_job_that_stands_behind_others(tmp_path: Path, module: str, behind: bool) -> None:
    """Its priority is the least of the system; once it is in a hurry it begins anew with that of its parent."""
    before = set(psutil.Process().children())  # other tests may have left some

    def ours() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if each not in before]

    jobs = OneAtATime(module, folder=tmp_path, behind=behind)
    try:
        jobs.ask("first", {"value": 1, "sleep": 60.0})
        (started,) = ours()
        assert _niceness(started.pid) == (19 if behind else _niceness(0))
        group = Path(f"/proc/{started.pid}/autogroup")
        if behind and group.exists():  # time is shared between sessions first
            assert group.read_text().split()[-2:] == ["nice", "19"]
        jobs.hurry()
        (now,) = ours()
        assert (now == started) != behind
        assert _niceness(now.pid) == _niceness(0)
        assert jobs.names == ("first",)
    finally:
        jobs.close()
    assert not ours()


def test_a_job_in_a_hurry_answers_and_so_does_the_one_behind_it(tmp_path: Path, module: str) -> None:
    jobs = OneAtATime(module, folder=tmp_path, behind=True)
    jobs.ask("first", {"value": 1, "sleep": 1.0})
    jobs.ask("second", {"value": 2})
    jobs.hurry()
    jobs.hurry()
    answers = {}
    while jobs.names:
        found = jobs.poll(wait=True)
        if found is not None:
            answers[found[0]] = found[1]["twice"]
    assert answers == {"first": 2, "second": 4}


def test_an_answer_is_not_lost_where_the_next_job_cannot_be_started(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = OneAtATime(module, folder=tmp_path)
    jobs.ask("first", {"value": 1})
    jobs.ask("second", {"value": 2})

    def refused(*_: object, **__: object) -> Child:
        raise OSError(11, "no process can be started")

    monkeypatch.setattr(children, "Child", refused)
    with pytest.raises(OSError, match="no process"):
        while jobs.names:
            jobs.poll(wait=True)
    assert jobs.names == ("first",)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    jobs.ask("third", {"value": 3})
    answers = []
    while jobs.names:
        found = jobs.poll(wait=True)
        if found is not None:
            answers.append((found[0], found[1]["twice"]))
    assert answers == [("first", 2), ("third", 6)]


def test_a_failed_child_without_a_log_is_an_error_like_others(tmp_path: Path, module: str) -> None:
    child = Child(module, {"value": 1, "fail": True}, folder=tmp_path, name="job")
    assert child.wait(30)
    (tmp_path / "job.log").unlink()
    with pytest.raises(OpenCDAError, match="it left no words"):
        child.result()
