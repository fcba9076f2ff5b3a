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
    whole = _numbers(_PROC / "meminfo").get("MemAvailable:")
    found = [] if whole is None else [1024 * whole]
    found += [free for folder, names in _groups() if (free := _free_in_group(folder, names)) is not None]
    return max(0, min(found)) if found else None


_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_NEW = ("memory.max", "memory.current", "inactive_file")  # version 2: the limit, what is in use, files in memory
_OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # version 1
_Names = tuple[str, str, str]


def _groups() -> list[tuple[Path, _Names]]:
    """Folders of the control groups that this process is in, and names of what is in them; each may set a limit."""
    found: list[tuple[Path, _Names]] = []
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        _, kinds, place = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, names = (_GROUPS / "memory", _OLD) if kinds else (_GROUPS, _NEW)
        group = root / place.strip("/")
        # inside of a container the path is the host's, and the group's own files are at the root
        found += [(folder, names) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return found


def _free_in_group(folder: Path, names: _Names) -> int | None:
    limit, used = (_read(folder / name).strip() for name in names[:2])
    if not limit.isdigit() or not used.isdigit():  # "max": no limit
        return None
    # files that were read count as used, but they give way
    return int(limit) - int(used) + _numbers(folder / "memory.stat").get(names[2], 0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
