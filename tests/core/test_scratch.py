"""Temporary folders: one's own stays, a killed process's goes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from opencda_marl.core.scratch import scratch_folder


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, other = tmp_path / f"opencda-marl-{dead.pid}-abc", tmp_path / f"opencda-marl-{dead.pid}-workers-a_c"
    mine = tmp_path / f"opencda-marl-{os.getpid()}-abc"
    foreign = tmp_path / "opencda-marl-notes-of-2024"
    for folder in (left, other, mine, foreign):
        folder.mkdir()
        (folder / "file").write_text("x")
    with scratch_folder() as made:
        assert Path(made).parent == tmp_path
        assert not left.exists()
        assert not other.exists()
        assert (mine / "file").exists()
        assert (foreign / "file").exists()
    assert not Path(made).exists()
