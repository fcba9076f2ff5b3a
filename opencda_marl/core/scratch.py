"""Temporary folders that are named by their process; those of killed processes are swept away."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

__all__ = ["scratch_folder"]

_NAME = re.compile(r"opencda-marl-(\d+)-\w+(?:-\w+)?")


def scratch_folder(what: str = "") -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the process; if that is killed, the next process here removes it.

    Args:
        what: it is for, one word, to be seen in its name.

    Raises:
        OSError: there is no place for temporary files, or it is full.
    """
    for folder in Path(tempfile.gettempdir()).glob("opencda-marl-*-*"):
        found = _NAME.fullmatch(folder.name)
        if found and not _alive(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be sweeping too
    name = f"opencda-marl-{os.getpid()}-{what}{'-' if what else ''}"
    return tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True)  # what stays is swept, too


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # somebody else's, or no process id at all
        return True
    return True
