"""Run folders: what there is, and what can go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.errors import CheckpointError, StorageError
from opencda_marl.core.files import remove_tree, writing
from opencda_marl.core.run_folder import (
    RunFolder,
    check_run_folder,
    is_running,
    read_episodes,
    read_run,
    read_status,
)

__all__ = ["list_runs", "removable", "remove"]

_RECENT = 20  # episodes that the success rate is over


def list_runs(root: Path) -> list[dict[str, Any]]:
    """The run folders in a folder, the last written to last; one that cannot be read says why instead of hiding.

    Returns:
        rows of {run, profile, phase, episodes, success_rate, checkpoint, bytes, updated [s since the epoch], error}.
    """
    folders = [path for path in root.iterdir() if os.path.lexists(path / "config.yaml")] if root.is_dir() else []
    return sorted((_row(path) for path in folders), key=lambda row: (row["updated"], row["run"]))


def _row(path: Path) -> dict[str, Any]:
    size, updated = _size(path)
    row = {"run": str(path), "bytes": size, "updated": updated, "error": None, "episodes": 0}
    row |= dict.fromkeys(("profile", "phase", "success_rate", "checkpoint"))
    try:
        if not (path / "config.yaml").is_file():
            raise CheckpointError(f"{path / 'config.yaml'} is not a regular file")
        row |= {"profile": read_run(path).get("profile"), "phase": read_status(path).get("phase")}
        lines = read_episodes(path)
        ended = sum(line.get("vehicles", 0) for line in lines[-_RECENT:])
        row["episodes"] = len(lines)
        row["success_rate"] = sum(line["arrived"] for line in lines[-_RECENT:]) / ended if ended else None
        checkpoints = Checkpoints(path / "checkpoints")
        row["checkpoint"] = next((name for name in ("best", "latest") if checkpoints.find(name) is not None), None)
    except CheckpointError as error:
        row |= {"phase": "broken", "error": error.message}
    return row


def _size(path: Path) -> tuple[int, float]:
    """Bytes below a folder, and when it was last written to."""
    total, updated = 0, path.stat().st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found = (Path(folder) / name).lstat()
            except FileNotFoundError:  # a running one replaces its files
                continue
            total += found.st_size
            updated = max(updated, found.st_mtime)
    return total, updated


def removable(root: Path, *, named: Sequence[Path] = (), keep: int | None = None) -> list[dict[str, Any]]:
    """Runs that may be removed; one that a process is at work in never is.

    Args:
        root: folder of runs.
        named: exactly these; empty: those without a checkpoint.
        keep: all but this many of the newest ones instead. One that cannot be read goes only if it is named.

    Raises:
        CheckpointError: something named is no run folder, or is running.
    """
    if named:
        for path in named:
            check_run_folder(path)
            if is_running(path):
                raise CheckpointError(f"{path} is running", fix="stop it first")
        return [_row(path) for path in named]
    readable = [row for row in list_runs(root) if row["error"] is None]
    rows = [row for row in readable if not is_running(Path(row["run"]))]
    if keep is not None:
        return rows[: max(0, len(rows) - keep)]
    return [row for row in rows if row["checkpoint"] is None]


def remove(path: Path) -> None:
    """Remove a run folder.

    Raises:
        CheckpointError: it is no run folder, or is running.
        StorageError: it cannot be removed.
    """
    removable(path.parent, named=[path])
    with RunFolder.resume(path), writing(path):  # nobody begins to work in it meanwhile
        remove_tree(path)
    if path.exists():
        raise StorageError(f"{path} could not be removed entirely", fix="check its permissions")
