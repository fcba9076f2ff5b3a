"""What a figure was measured on, and what a run was made with: versions, processor, memory, load, commit."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["available_memory", "cores", "describe_machine", "git_commit", "peak_memory_mib", "versions"]

_PACKAGES = ("opencda-marl", "torch", "numpy", "numba", "libsumo", "traci", "eclipse-sumo", "safetensors", "pydantic")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes that can still be taken without swapping, within the limit of this process's group; None: not known."""
    found = [limit - used for limit, used in map(_group_memory, _GROUP_FILES) if limit is not None and used is not None]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return min(found) if found else None
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return min([*found, *([] if free is None else [1024 * int(free)])], default=None)


_GROUP_FILES = (  # control groups, version 2 and 1: the limit, and what is in use
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _group_memory(files: tuple[str, str]) -> tuple[int | None, int | None]:
    def number(path: str) -> int | None:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            return None
        return int(text) if text.isdigit() else None  # "max": no limit

    return number(files[0]), number(files[1])


def peak_memory_mib() -> float:
    """The most memory that this process has had, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB here


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, load and system, as JSON values."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],
        "host": platform.node(),
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout that holds `folder`, with `+changes` if files differ; None outside a checkout."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit or None


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a file system that does not answer
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
