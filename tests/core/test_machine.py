"""What a run was made on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from opencda_marl.core import machine
from opencda_marl.core.machine import cores, describe_machine, git_commit, peak_memory_mib, versions


def test_versions_are_those_that_are_imported() -> None:
    found = versions()
    assert found["numpy"] == np.__version__
    assert found["python"].startswith("3.")
    assert {"torch", "libsumo", "safetensors"} <= found.keys()


def test_the_machine_is_described_as_json() -> None:
    found = json.loads(json.dumps(describe_machine()))
    assert found["cores"] == cores() >= 1
    assert found["memory_gib"] > 0.1
    assert found["processor"]
    assert len(found["load"]) == 3


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory_mib()
    held = np.ones(int((before + 64) * 2**20 / 8))  # more than everything so far
    assert held.nbytes / 2**20 < peak_memory_mib() < 2 * held.nbytes / 2**20 + before


def _git(folder: Path, *arguments: str) -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, env={**os.environ, **who})


def test_the_commit_says_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_commit(tmp_path) is None
    folder = tmp_path / "a b" / "package"
    folder.mkdir(parents=True)
    (folder / "x.py").write_text("1")
    _git(tmp_path / "a b", "init", "-q")
    _git(tmp_path / "a b", "add", ".")
    _git(tmp_path / "a b", "commit", "-qm", "first")
    clean = git_commit(folder)
    assert clean is not None
    assert len(clean) == 12
    (folder / "x.py").write_text("2")
    assert git_commit(folder) == f"{clean}+changes"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git there
    assert git_commit(folder) is None


def _system(root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(machine, "_PROC", root / "proc")
    monkeypatch.setattr(machine, "_GROUPS", root / "groups")


_WHOLE = "MemTotal: 900 kB\nMemAvailable:     500 kB\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": _WHOLE}, 512_000),
        # a container: the path is the host's, the limit is at the root; files in memory give way
        (
            {
                "proc/meminfo": _WHOLE,
                "proc/self/cgroup": "0::/docker/abc\n",
                "groups/memory.max": "300000\n",
                "groups/memory.current": "250000\n",
                "groups/memory.stat": "anon 100000\ninactive_file 120000\n",
            },
            170_000,
        ),
        # a batch system: the limit is on a group above, the process's own has none
        (
            {
                "proc/meminfo": _WHOLE,
                "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
                "groups/slurm/job_1/step_0/memory.max": "max\n",
                "groups/slurm/job_1/step_0/memory.current": "5\n",
                "groups/slurm/job_1/memory.max": "100000\n",
                "groups/slurm/job_1/memory.current": "40000\n",
            },
            60_000,
        ),
        # version 1
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
                "groups/memory/job/memory.limit_in_bytes": "90000",
                "groups/memory/job/memory.usage_in_bytes": "95000",
                "groups/memory/job/memory.stat": "total_inactive_file 1000\n",
            },
            0,
        ),
    ],
)
def test_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int | None
) -> None:
    _system(tmp_path, monkeypatch, files)
    assert machine.available_memory() == free


def test_memory_of_this_machine() -> None:
    found = machine.available_memory()
    assert found is not None
    assert 2**24 < found < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
