"""A temporary folder per simulator, named by its process; those of killed processes are swept away."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

__all__ = ["scratch_folder"]

_NAME = re.compile(r"opencda-marl-(\d+)-\w+")


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with the process; if that is killed, the next process here removes it."""
    for folder in Path(tempfile.gettempdir()).glob("opencda-marl-*-*"):
        found = _NAME.fullmatch(folder.name)
        if found and not _alive(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be sweeping too
    return tempfile.TemporaryDirectory(prefix=f"opencda-marl-{os.getpid()}-")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # somebody else's, or no process id at all
        return True
    return True
