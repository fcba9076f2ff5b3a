"""Checkpoints: a learner's state as safetensors and JSON, in a folder that is whole or not there.

    checkpoints/episode_40/   tensors.safetensors, state.json, config.yaml, manifest.json (sizes and hashes of the rest)
    checkpoints/latest, best   links to one of them
    checkpoints/replay/        rows of a replay, in pieces that the state of `latest` names (core/segments.py)

A checkpoint is made in a hidden folder, brought to the disk, and then renamed; `latest` is a link that is
replaced by another one in a single rename. So at every instant `latest` is the old checkpoint or the new one.
Loading checks every byte against the manifest: what was cut short, changed or made by something else is
refused with the name of the file. Nothing that is loaded can run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors

from opencda_marl.core.errors import CheckpointError
from opencda_marl.core.files import (
    array_bytes,
    part_of,
    read_regular,
    remove_tree,
    sync_folder,
    typed,
    write_synced,
    writing,
)
from opencda_marl.core.segments import Segment, prune_segments
from opencda_marl.core.spec import LearnerState, ObservationSpec

__all__ = ["Checkpoint", "Checkpoints", "check_observation", "read_checkpoint", "write_checkpoint"]

_FORMAT = "opencda-marl checkpoint"
_VERSION = 1
_TENSORS = "tensors.safetensors"
_STATE = "state.json"
_MANIFEST = "manifest.json"
_NUMBERED = re.compile(r"episode_(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was read."""

    path: Path
    state: LearnerState
    extra: dict[str, Any]  # the run's own: episodes, budgets used, best score, …


def write_checkpoint(
    path: Path, state: LearnerState, extra: Mapping[str, Any], texts: Mapping[str, str] | None = None
) -> None:
    """Make a checkpoint folder.

    Args:
        path: the folder; it must not exist yet.
        state: the learner's.
        extra: JSON values of the run.
        texts: further files by name, e.g. the configuration.

    Raises:
        StorageError: it could not be written; nothing else was touched.
    """
    segments = [segment.keep(path.parent) for segment in state.segments]
    contents = {
        _TENSORS: array_bytes(state.tensors),
        _STATE: json.dumps({"values": state.values, "extra": dict(extra), "segments": segments}).encode(),
        **{name: text.encode() for name, text in (texts or {}).items()},
    }
    files = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    contents[_MANIFEST] = json.dumps({"format": _FORMAT, "version": _VERSION, "files": files}, indent=1).encode()
    part = part_of(path)
    with writing(path):
        try:
            remove_tree(part)
            part.mkdir()
            for name, data in contents.items():
                write_synced(part / name, data)
            sync_folder(part)
            os.rename(part, path)
            sync_folder(path.parent)
        except OSError:
            remove_tree(part)
            raise


def read_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint folder, or the one that a link points to.

    Raises:
        CheckpointError: missing, cut short, changed, or made by something else.
    """
    folder = _followed(path)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}", fix=_others(path))
    contents = {name: _verified(folder / name, facts) for name, facts in _manifest(folder).items()}
    try:
        tensors = load_tensors(contents[_TENSORS])
        state = json.loads(contents[_STATE])
        segments = [Segment.stored(facts, folder.parent) for facts in state.get("segments", [])]
        return Checkpoint(folder, LearnerState(tensors, state["values"], segments), state["extra"])
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint of this program: {error}", fix=_OTHER) from error


_OTHER = "take another one: checkpoints/best, or checkpoints/episode_N"
_UPDATE = "update opencda-marl, or take another checkpoint"


def _others(path: Path) -> str:
    """What to say where a checkpoint is missing: which ones there are beside it."""
    if path.parent.name != "checkpoints" or not path.parent.is_dir():
        return (
            "name a run folder (opencda-marl runs list), a checkpoint in one (RUN/checkpoints/best), or "
            "a policy of the package (opencda-marl list policies)"
        )
    beside = Checkpoints(path.parent)
    links = [name for name in ("best", "latest") if (path.parent / name).exists()]
    known = ", ".join([*links, *(f"episode_{number}" for number in beside.numbered())])
    return f"there are: {known}" if known else "there are none: train longer"


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / _MANIFEST
    try:
        found = json.loads(read_regular(path))
        if found["format"] != _FORMAT:
            raise CheckpointError(f"{path} says {found['format']!r}: this is no checkpoint of this program", fix=_OTHER)
        if found["version"] > _VERSION:
            raise CheckpointError(
                f"{path} has version {found['version']}; this program reads up to {_VERSION}",
                fix=_UPDATE,
            )
        return {
            str(name): {"bytes": facts["bytes"], "sha256": facts["sha256"]} for name, facts in found["files"].items()
        }
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): not a checkpoint, or one that was never finished", fix=_OTHER
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is broken: {error}", fix=_OTHER) from error


def _verified(path: Path, facts: Mapping[str, Any]) -> bytes:
    try:
        data = read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", fix=_OTHER) from error
    if len(data) != facts["bytes"]:
        raise CheckpointError(f"{path} has {len(data)} bytes, not {facts['bytes']}: it was cut short", fix=_OTHER)
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise CheckpointError(f"{path} was changed after it was written (its hash differs)", fix=_OTHER)
    return data


def _followed(path: Path) -> Path:
    """The folder itself; where links cannot be made, `latest` is a file with a name in it."""
    if path.is_file():
        name = path.read_bytes()[:200].decode(errors="replace").strip()
        return path.parent / name if _NUMBERED.fullmatch(name) else path
    return path.parent / os.readlink(path) if path.is_symlink() else path


def check_observation(found: Checkpoint, spec: ObservationSpec, *, fix: str) -> None:
    """Raise unless the checkpoint's policy sees what `spec` says.

    Args:
        found: by `read_checkpoint`.
        spec: what there is to see now.
        fix: where it is another layout; another version of the same one cannot be chosen.

    Raises:
        CheckpointError: it sees something else.
    """
    seen, here = found.extra.get("observation"), [spec.name, spec.version]
    if seen == here:
        return
    if isinstance(seen, list) and seen[:1] == here[:1]:
        fix = "train it again, or use the version of the program that it was trained with"
    raise CheckpointError(f"{found.path} was trained on the observation {seen}, but there is {here} here", fix=fix)


class Checkpoints:
    """The checkpoints of a run: numbered ones, and the links `latest` and `best`.

    Args:
        folder: `checkpoints/` of the run.
        keep: numbered ones to keep beside those that `latest` and `best` point to.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        episode: int,
        state: LearnerState,
        extra: Mapping[str, Any],
        texts: Mapping[str, str] | None = None,
        *,
        best: bool = False,
        pinned: Collection[str] = (),
    ) -> Path:
        """Write `episode_N`, then point `latest` (and `best`) to it, then drop old ones.

        An episode that `latest` already stands for is left as it is: it is the same state.

        Args:
            episode: episodes done when the state was taken.
            state: the learner's.
            extra: JSON values of the run.
            texts: further files by name.
            best: is it the best so far?
            pinned: names that must not be dropped now.

        Raises:
            StorageError: it could not be written; the earlier ones are as they were.
        """
        name = f"episode_{episode}"
        target = self.folder / name
        if self.find("latest") != target or not target.is_dir():
            with writing(target):
                self.folder.mkdir(exist_ok=True)
                remove_tree(target)  # left by a run that was killed before `latest` knew of it
            write_checkpoint(target, state, extra, texts)
            self._point("latest", name)
            prune_segments(self.folder, [segment.keep(self.folder)["name"] for segment in state.segments])
        if best:
            self._point("best", name)
        self._prune(pinned)
        return target

    def point_best(self, name: str) -> None:
        """Let `best` stand for a checkpoint that is there; without it nothing happens.

        Raises:
            StorageError: the link could not be written.
        """
        if (self.folder / name).is_dir():
            self._point("best", name)

    def numbered(self) -> list[int]:
        """Episodes of the numbered checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NUMBERED.fullmatch(entry.name) for entry in self.folder.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def find(self, name: str = "latest") -> Path | None:
        """The folder that a name stands for; None: there is none. Without `latest`, the highest number is it."""
        path = self.folder / name
        if path.is_symlink() or path.exists():
            return _followed(path)
        numbers = self.numbered()
        return self.folder / f"episode_{numbers[-1]}" if name == "latest" and numbers else None

    def load(self, name: str = "latest") -> Checkpoint:
        """Read one.

        Raises:
            CheckpointError: it is missing or broken; a run goes on from `latest` alone, so a new one has to begin.
        """
        path = self.find(name)
        if path is None:
            known = ", ".join(f"episode_{n}" for n in self.numbered()) or "none"
            raise CheckpointError(f"{self.folder} has no checkpoint {name!r}", fix=f"there are: {known}")
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            whole = self._newest_whole()
            if whole is not None:
                error.fix = (
                    f"begin a new run with the policy of the newest whole one: "
                    f"opencda-marl run -t PROFILE --init-from {typed(whole)}"
                )
            elif error.fix != _UPDATE:
                error.fix = "this run has no whole checkpoint: put it back from a copy, or begin a new run"
            raise

    def _newest_whole(self) -> Path | None:
        for number in reversed(self.numbered()):
            path = self.folder / f"episode_{number}"
            try:
                read_checkpoint(path)
            except CheckpointError:
                continue
            return path
        return None

    def cut(self, episode: int) -> None:
        """Delete numbered ones beyond an episode, and what a killed process left half-made.

        Raises:
            StorageError: the folder cannot be changed.
        """
        with writing(self.folder):
            for number in self.numbered():
                if number > episode:
                    remove_tree(self.folder / f"episode_{number}")
            for entry in self.folder.glob(".*.part") if self.folder.is_dir() else ():
                remove_tree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _point(self, link: str, name: str) -> None:
        path = self.folder / link
        part = part_of(path)
        with writing(path):
            part.unlink(missing_ok=True)
            try:
                os.symlink(name, part)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
                write_synced(part, name.encode())  # a file system without links
            if path.is_dir() and not path.is_symlink():  # a copy that turned links into folders
                os.rename(path, self.folder / ".copied.part")
            os.replace(part, path)
            sync_folder(self.folder)
            remove_tree(self.folder / ".copied.part")

    def _prune(self, pinned: Collection[str]) -> None:
        held = {found.name for found in (self.find("latest"), self.find("best")) if found is not None}
        others = [number for number in self.numbered() if f"episode_{number}" not in held.union(pinned)]
        with writing(self.folder):
            for number in others[: max(0, len(others) - self.keep)]:
                remove_tree(self.folder / f"episode_{number}")
