"""Evaluations beside a training: behind whom they stand, and what happens to them when it is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opencda_marl import held_out
from opencda_marl.config import load_profile
from opencda_marl.core.events import Note, TrainEvent
from opencda_marl.core.run_folder import RunFolder
from opencda_marl.held_out import HeldOut


class _Jobs:
    """A child that never ends; one that cannot begin anew, if so wished."""

    def __init__(self, *_: Any, behind: bool, **__: Any) -> None:
        self.names: tuple[str, ...] = ("episode_4",)
        self.behind, self.hurried, self.fails = behind, 0, False

    def poll(self, *, wait: bool) -> None:
        assert wait

    def close(self) -> None:
        self.names = ()

    def hurry(self) -> None:
        self.hurried += 1
        if self.fails:
            raise OSError(11, "no process can be started")


@pytest.fixture
def heard() -> list[TrainEvent]:
    return []


def _beside(
    path: Path, heard: list[TrainEvent], monkeypatch: pytest.MonkeyPatch, size: int = 2
) -> tuple[HeldOut, _Jobs]:
    monkeypatch.setattr(held_out, "OneAtATime", _Jobs)
    settings = replace(load_profile("sumo-marl/intersection/quickstart").settings, eval_every=4)
    folder = RunFolder.create(path / "run")
    (folder.path / "evaluations").mkdir()
    found = HeldOut(folder, settings, heard.append, done=0, size=size)
    jobs = found._jobs
    assert isinstance(jobs, _Jobs)
    return found, jobs


@pytest.mark.parametrize("size", [1, 2])
def test_it_stands_behind_workers_that_run_in_step(
    tmp_path: Path, heard: list[TrainEvent], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    _, jobs = _beside(tmp_path, heard, monkeypatch, size)
    assert jobs.behind == (size > 1)


def test_only_one_that_stands_still_begins_anew(
    tmp_path: Path, heard: list[TrainEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(held_out.time, "monotonic", lambda: now[0])
    found, jobs = _beside(tmp_path, heard, monkeypatch)
    for driven in range(10):  # slowly, but it gets on
        (tmp_path / "run" / "evaluations" / "episode_4.progress").write_text(str(driven))
        found.finish()
        now[0] += 25.0
    assert jobs.hurried == 0
    now[0] += 10.0
    found.finish()
    assert jobs.hurried == 1
    assert heard == []
    jobs.fails = True
    found.finish()
    (note,) = heard
    assert isinstance(note, Note)
    assert "no process can be started" in note.text


@pytest.mark.parametrize("size", [1, 2])
def test_one_that_never_drives_is_given_up(
    tmp_path: Path, heard: list[TrainEvent], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(held_out.time, "monotonic", lambda: now[0])
    found, _ = _beside(tmp_path, heard, monkeypatch, size)
    found.finish()
    now[0] += 599.0
    found.finish()
    assert found.names == ("episode_4",)
    assert heard == []
    now[0] += 2.0
    found.finish()
    assert found.names == (), "training ends without it"
    (note,) = heard
    assert isinstance(note, Note)
    assert "episode_4 is given up: not one episode in 10 minutes" in note.text
