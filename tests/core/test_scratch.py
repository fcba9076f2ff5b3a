"""Temporary folders: one's own stays, a killed process's goes, and nothing else is ever touched."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.files import storage_error
from opencda_marl.core.scratch import drop_scratch_folders, scratch_folder, sweep

_HELD = """
import sys, tempfile
from opencda_marl.core.scratch import scratch_folder
tempfile.tempdir = sys.argv[1]
held = scratch_folder("workers")
print(held.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_left_is_swept_and_what_is_in_use_stays(place: Path) -> None:
    start = [sys.executable, "-c", _HELD, str(place)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        held = Path(other.stdout.readline().strip())
        assert held.name.startswith(f"opencda-marl-scratch-{other.pid}-workers-")
        (held / "file").write_text("x")
        with scratch_folder() as made:
            assert Path(made).parent == place
            assert (held / "file").exists()
        other.kill()
    assert held.exists()
    with scratch_folder() as made:
        assert not held.exists()
    assert not Path(made).exists()
    assert list(place.iterdir()) == []


def test_whoever_ends_at_once_leaves_nothing(place: Path) -> None:
    with scratch_folder("a") as made, scratch_folder("b"):
        (Path(made) / "file").write_text("x")
        sweep()
        assert len(list(place.iterdir())) == 2, "in use"
        drop_scratch_folders()
        assert list(place.iterdir()) == []


def test_nobody_sweeps_a_folder_that_is_being_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may sweep at any moment of the making: here at the worst, before the lock is taken."""
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", lock)
            sweep()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with scratch_folder() as made:
        assert (Path(made) / ".opencda-marl-in-use").exists()


def test_folders_of_people_stay_whatever_they_are_called(place: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = ("2026-11-30", "99999-workers", f"{dead.pid}-abc", f"scratch-{dead.pid}-build-abc", "scratch-notes")
    for name in names:
        (place / f"opencda-marl-{name}").mkdir()
        (place / f"opencda-marl-{name}/checkpoint").write_text("x")
    (place / "opencda-marl-scratch-file").write_text("x")
    behind = place / "mine"
    behind.mkdir()
    (behind / ".opencda-marl-in-use").touch()
    (place / "opencda-marl-scratch-1-link").symlink_to(behind)
    with scratch_folder("build"):
        assert all((place / f"opencda-marl-{name}/checkpoint").exists() for name in names)
        assert (place / "opencda-marl-scratch-file").exists()
        assert behind.exists()


def test_where_there_are_no_locks_nothing_is_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = scratch_folder("build")
    with scratch_folder("build"):
        assert Path(left.name).exists()
    left.cleanup()
    left.cleanup()
    assert list(place.iterdir()) == []


def test_a_full_place_for_temporary_files_is_named_as_that() -> None:
    full = OSError(errno.ENOSPC, "full")
    assert "export TMPDIR=DIR" in str(storage_error(full, Path("/t/opencda-marl-scratch-1-x/types.add.xml")).fix)
    assert "runs clean" in str(storage_error(full, Path("/t/run/checkpoints")).fix)
