"""Temporary folders that go with their process; those of killed processes are swept away.

A process that is about to end at once calls `drop_scratch_folders`; whoever has killed one calls `sweep`.

Each holds a file that its process keeps locked. The system lets go of the lock when the process ends, however it does,
and a lock is seen from other containers that share the place, too: what is not locked belongs to nobody. Only folders
with that file, of the same user, are ever touched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from opencda_marl.core.files import SCRATCH

__all__ = ["drop_scratch_folders", "scratch_folder", "sweep"]

_LOCK = ".opencda-marl-in-use"
_OPEN: set[str] = set()  # of this process


class _Scratch(tempfile.TemporaryDirectory[str]):
    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix, ignore_cleanup_errors=True)  # what stays is swept by another process
        unseen = Path(self.name, f"{_LOCK}.new")  # locked before anybody who sweeps can see it
        try:
            self._lock = os.open(unseen, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            super().cleanup()
            raise
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(unseen, Path(self.name, _LOCK))
        except OSError:  # a file system without locks: then nobody sweeps here
            os.unlink(unseen)
        _OPEN.add(self.name)

    def cleanup(self) -> None:
        """Remove it; may be called twice."""
        super().cleanup()
        _OPEN.discard(self.name)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def scratch_folder(what: str = "") -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the process; if that is killed, the next process here removes it.

    Args:
        what: it is for, one word, to be seen in its name.

    Raises:
        OSError: there is no place for temporary files, or it is full.
    """
    sweep()
    return _Scratch(f"{SCRATCH}{os.getpid()}-{what}{'-' if what else ''}")


def drop_scratch_folders() -> None:
    """Remove what this process has, because it is about to end without a further word."""
    for name in tuple(_OPEN):
        shutil.rmtree(name, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of processes that are gone.

    Raises:
        OSError: there is no place for temporary files.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove it if it is one of ours and its process is gone."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        descriptor = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:  # none of ours, or another process is sweeping too
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is in use
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
