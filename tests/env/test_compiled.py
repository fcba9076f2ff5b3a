"""The cache of compiled kernels: kept beside the package, elsewhere where that cannot be, and never stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opencda_marl

PACKAGE = Path(opencda_marl.__file__).parent
QUESTION = """
import numpy as np
from opencda_marl.env.command import envelope
from opencda_marl.env.compiled import cache_folder
value = envelope(75.5, np.array([85.5, 94.83, 180.0, 17.88, 7.34, 17.88]), 3.0)
print(value, sum(envelope.stats.cache_hits.values()), cache_folder(), sep="|")
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what kernels need, in a path with a space."""
    home = tmp_path / "a path with a space"
    target = home / "opencda_marl"
    for room in ("core", "settings", "env"):
        shutil.copytree(PACKAGE / room, target / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE / "__init__.py", target)
    return home


def _ask(home: Path, **environment: str) -> tuple[float, int, str]:
    """The kernel's answer, how often it came from the cache, and where the cache is."""
    inherited = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    found = subprocess.run(
        [sys.executable, "-c", QUESTION],
        env={**inherited, "PYTHONPATH": str(home), "XDG_CACHE_HOME": str(home / "user cache"), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    value, hits, folder = found.stdout.strip().split("|")
    assert abs(float(value) - (7.34**2 + 60.0) ** 0.5) < 1e-9
    return float(value), int(hits), folder


def test_compiled_once_and_never_stale(package: Path) -> None:
    _, hits, folder = _ask(package)
    assert hits == 0
    assert Path(folder).parent == package / "opencda_marl" / "env" / "__pycache__"
    assert _ask(package)[1:] == (1, folder)
    # another file of the room changes, on which the kernel might depend
    with (package / "opencda_marl" / "env" / "neighbours.py").open("a") as source:
        source.write("\n# a change\n")
    _, hits, other = _ask(package)
    assert hits == 0
    assert other != folder


def test_where_the_package_cannot_be_written(package: Path) -> None:
    # a file where the folder should be stops root too, whom permissions do not
    (package / "opencda_marl" / "env" / "__pycache__").write_text("")
    _, hits, folder = _ask(package)
    assert hits == 0
    assert Path(folder).parent == package / "user cache" / "opencda-marl"
    assert _ask(package)[1:] == (1, folder)
    asked = package / "asked for"
    assert Path(_ask(package, NUMBA_CACHE_DIR=str(asked))[2]).parent == asked


def test_where_nothing_can_be_written(package: Path) -> None:
    (package / "opencda_marl" / "env" / "__pycache__").write_text("")
    (package / "user cache").write_text("")
    for _ in range(2):
        assert _ask(package)[1:] == (0, "None")
