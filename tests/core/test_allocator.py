"""Memory that is freed stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from opencda_marl.core.allocator import keep_freed_memory

_FAULTS = """
import resource, sys
import numpy as np
from opencda_marl.core.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def work():
    held = [np.ones(2**18, np.float32) for _ in range(4)]  # four arrays of a MiB
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    work()
print(int(kept), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 50)
"""


def _faults(way: str, **environment: str) -> tuple[int, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _FAULTS, way]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean | environment)
    kept, faults = map(int, done.stdout.split())
    return kept, faults


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_arrays_of_the_next_step_cost_no_page_faults() -> None:
    kept, faults = _faults("keep")
    assert kept
    _, usual = _faults("give back")
    assert faults < 20 < usual


def test_whoever_set_the_allocator_by_hand_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert not keep_freed_memory()
