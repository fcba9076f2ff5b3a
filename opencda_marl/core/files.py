"""Files that are whole or not there, and errors that say what to do about a disk."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from opencda_marl.core.errors import StorageError

__all__ = [
    "SCRATCH",
    "array_bytes",
    "arrays_of",
    "could_be_written",
    "part_of",
    "read_regular",
    "remove_tree",
    "require_empty",
    "require_writable",
    "storage_error",
    "sync_folder",
    "typed",
    "unsuited",
    "write_synced",
    "write_whole",
    "writing",
]

SCRATCH = "opencda-marl-scratch-"
"""What the names of our temporary folders begin with."""

_FIXES = {
    errno.ENOSPC: ("the disk is full", "free some room (`opencda-marl runs clean`), then continue with --resume"),
    errno.EDQUOT: ("your disk quota is used up", "free some room (`opencda-marl runs clean`), then continue"),
    errno.EFBIG: ("the file would be larger than this process may write", "raise the limit: ulimit -f unlimited"),
    errno.EACCES: ("no permission to write there", "change its permissions, or choose another folder"),
    errno.EPERM: ("no permission to write there", "change its permissions, or choose another folder"),
    errno.EROFS: ("the file system is read-only", "make it writable, or choose a folder on another one"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "choose another folder"),
    errno.EEXIST: ("there is a file of that name", "choose another folder, or move the file away"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
    errno.ENOENT: ("the folder is gone", "choose another folder, and do not delete it while running"),
    errno.EMFILE: ("too many files are open", "raise the limit: ulimit -n 4096"),
}


def storage_error(error: OSError, path: Path) -> StorageError:
    """What an operating system's refusal means for a person."""
    code = error.errno if error.errno is not None else 0
    why, fix = _FIXES.get(code, (error.strerror or str(error), "check the disk and its permissions"))
    if code in (errno.ENOSPC, errno.EDQUOT) and any(part.startswith(SCRATCH) for part in path.parts):
        fix = "make room where temporary files go, or name another folder: export TMPDIR=DIR; then type it again"
    return StorageError(f"cannot write {path}: {why}", fix=fix)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns OSError inside the block into StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


def require_writable(folder: Path) -> None:
    """Make a folder, and see that a file can be made in it: before hours of work, not after them.

    Raises:
        StorageError: it cannot be written.
    """
    probe = folder / f".probe-{os.getpid()}.part"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"\n")
        finally:
            probe.unlink(missing_ok=True)


def could_be_written(folder: Path) -> None:
    """What `require_writable` would refuse, as far as it can be seen without making or writing anything.

    Raises:
        StorageError: it is a file, lies below one, or the folder that it would be made in may not be written.
    """
    with writing(folder):
        found = folder
        while not os.path.lexists(found) and found != found.parent:
            found = found.parent
        if not stat.S_ISDIR(found.stat().st_mode):
            raise OSError(errno.EEXIST if found == folder else errno.ENOTDIR, "not a folder")
        if not os.access(found, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "no permission")


def require_empty(folder: Path) -> None:
    """A folder that is made anew: it is not there, or holds nothing.

    Raises:
        StorageError: it holds something, is a file, or cannot be looked at.
    """
    with writing(folder):
        if folder.exists() and any(folder.iterdir()):
            raise StorageError(f"{typed(folder)} is not empty", fix="choose a new folder: --out FOLDER")


def array_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as a safetensors file. It takes the memory as it lies, so a transposed view has to be laid out first."""
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def arrays_of(data: bytes) -> dict[str, np.ndarray]:
    """What `array_bytes` was given."""
    return dict(load(data))


def typed(path: Path) -> str:
    """A path as a person would type it here: relative if it lies below, quoted where a shell needs it."""
    here = Path.cwd()
    shown = str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)
    return shlex.quote(f"./{shown}" if shown.startswith("-") else shown)


_SPLITTING = {" ": "a space", "\t": "a tab", "\n": "a line break", "\r": "a line break", "'": "a quote", '"': "a quote"}


def unsuited(path: Path | str) -> str | None:
    """What keeps a path out of a command line that nobody quotes, in words: `a space`; None: nothing does."""
    return next((_SPLITTING.get(sign, "a backslash") for sign in str(path) if sign in (*_SPLITTING, "\\")), None)


def part_of(path: Path) -> Path:
    """The hidden sibling in which `path` is made before it gets its name."""
    return path.with_name(f".{path.name}.part")


def read_regular(path: Path) -> bytes:
    """What is in a file; a pipe or a device in its place, which could keep us waiting for ever, is refused.

    Raises:
        OSError: as the system says, or "not a regular file".
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "not a regular file", str(path))
        return stream.read()


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until the disk has it.

    Raises:
        OSError: as the system says; callers know what the file is for.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the folder's entries (a rename is not durable before)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file by a new one; a reader sees the old or the new one, never a mixture.

    Args:
        path: the file.
        data: its new content.
        durable: wait for the disk; False for what may be lost with the power (a heartbeat).

    Raises:
        StorageError: nothing was changed.
    """
    part = part_of(path)
    with writing(path):
        try:
            if durable:
                write_synced(part, data)
            else:
                part.write_bytes(data)
            os.replace(part, path)
            if durable:
                sync_folder(path.parent)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def remove_tree(path: Path) -> None:
    """Delete a folder so that a half-deleted one is never taken for a whole one; nothing there is fine.

    Raises:
        OSError: it could not be renamed.
    """
    if not path.is_symlink() and path.is_dir():
        part = part_of(path)
        if path.name.endswith(".part"):
            part = path
        else:
            shutil.rmtree(part, ignore_errors=True)
            os.rename(path, part)
        shutil.rmtree(part, ignore_errors=True)
