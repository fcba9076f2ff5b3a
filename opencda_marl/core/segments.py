"""Rows of a replay in immutable pieces, each written to the disk once: a checkpoint costs what changed since the last.

A piece holds the rows that were added since the piece before, and those older ones that changed meanwhile. The
replay is what all pieces give, applied in order. A piece is in memory until a checkpoint has written it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from opencda_marl.core.errors import CheckpointError
from opencda_marl.core.files import array_bytes, part_of, read_regular, sync_folder, write_synced, writing

__all__ = ["Segment", "materialise", "prune_segments"]

_FOLDER = "replay"
_NAME = re.compile(r"\.?rows_\d+_\d+\w*\.safetensors(\.part)?")
_FIX = "the replay lives beside checkpoints/latest alone: start a new run from its policy with --init-from"


class Segment:
    """Some rows, by their numbers in the life of the replay.

    Args:
        first: number of the first row that was added.
        last: one past the number of the last.
        arrays: "number" [rows] int64, and the columns [rows, ...] by name; None: they are in the file.
        facts: name, bytes and hash of the file; None: it was not written yet.
        folder: where the file is.
    """

    def __init__(
        self,
        first: int,
        last: int,
        arrays: Mapping[str, np.ndarray] | None,
        facts: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.first, self.last = first, last
        self._arrays = None if arrays is None else dict(arrays)
        self._facts = None if facts is None else dict(facts)
        self._folder = folder

    @classmethod
    def stored(cls, facts: Mapping[str, Any], checkpoints: Path) -> Segment:
        """One that a checkpoint speaks of.

        Args:
            facts: as `keep` returned them.
            checkpoints: the folder of all checkpoints of the run.

        Raises:
            KeyError, TypeError: those are no facts of a segment.
        """
        known = {name: facts[name] for name in ("name", "bytes", "sha256")}
        if Path(str(known["name"])).name != known["name"]:
            raise TypeError(f"{known['name']!r} is no name of a file")
        return cls(int(facts["first"]), int(facts["last"]), None, known, checkpoints / _FOLDER)

    def read(self) -> dict[str, np.ndarray]:
        """The rows.

        Raises:
            CheckpointError: the file is gone, cut short or changed.
        """
        if self._arrays is not None:
            return self._arrays
        assert self._facts is not None
        assert self._folder is not None
        path = self._folder / self._facts["name"]
        try:
            data = read_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", fix=_FIX) from error
        if len(data) != self._facts["bytes"] or hashlib.sha256(data).hexdigest() != self._facts["sha256"]:
            raise CheckpointError(f"{path} was cut short or changed after it was written", fix=_FIX)
        try:
            return dict(load_arrays(data))
        except (ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a part of a replay: {error}", fix=_FIX) from error

    def keep(self, checkpoints: Path) -> dict[str, Any]:
        """Bring the rows to the disk, unless they are there, and let go of the memory.

        Args:
            checkpoints: the folder of all checkpoints of the run.

        Returns:
            what `stored` needs, as JSON values.

        Raises:
            StorageError: the disk refused; nothing was changed.
        """
        folder = checkpoints / _FOLDER
        if self._facts is None or self._folder != folder:
            data = array_bytes(self.read())
            digest = hashlib.sha256(data).hexdigest()
            # named by content too: several may lie between the same numbers, and none may replace another one
            name = f"rows_{self.first}_{self.last}_{digest[:8]}.safetensors"
            with writing(folder / name):
                folder.mkdir(parents=True, exist_ok=True)
                part = part_of(folder / name)
                try:
                    write_synced(part, data)
                    os.replace(part, folder / name)
                    sync_folder(folder)
                except OSError:
                    part.unlink(missing_ok=True)
                    raise
            self._facts = {"name": name, "bytes": len(data), "sha256": digest}
            self._folder, self._arrays = folder, None
        return {"first": self.first, "last": self.last, **self._facts}


def materialise(segments: Sequence[Segment]) -> dict[str, np.ndarray]:
    """What pieces give, applied in order: each row once, as the last piece that has it says.

    Returns:
        "number" [rows], ascending, and the columns [rows, ...] by name; empty without pieces.

    Raises:
        CheckpointError: the file of one is gone, cut short or changed.
    """
    pieces = [segment.read() for segment in segments]
    if not pieces:
        return {}
    numbers = np.concatenate([piece["number"] for piece in pieces])
    _, from_behind = np.unique(numbers[::-1], return_index=True)
    last = len(numbers) - 1 - from_behind
    return {name: np.concatenate([piece[name] for piece in pieces])[last] for name in pieces[0]}


def prune_segments(checkpoints: Path, kept: Collection[str]) -> None:
    """Delete the pieces that no checkpoint to resume from speaks of.

    Args:
        checkpoints: the folder of all checkpoints of the run.
        kept: names of files to leave.

    Raises:
        StorageError: the folder cannot be changed.
    """
    folder = checkpoints / _FOLDER
    if not folder.is_dir():
        return
    with writing(folder):
        for entry in folder.iterdir():
            if _NAME.fullmatch(entry.name) and entry.name not in kept:  # what others put there is not ours to delete
                entry.unlink()
