"""The one way in which this room compiles: at a kernel's first call, cached on disk, no GIL inside.

Numba's own cache looks at the file that a kernel stands in, not at the kernels that it calls: after an
update of one file alone, stale machine code would run. So the cache folder here is named after the
contents of all files of the room. It lies beside the modules or, where that cannot be written, in the
user's cache folder; `NUMBA_CACHE_DIR` goes before both. Where nothing can be written, each process
compiles anew: slower to start, otherwise the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

import numba

__all__ = ["cache_folder", "kernel"]

_Function = TypeVar("_Function", bound=Callable[..., object])
_ROOM = Path(__file__).parent


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


@cache
def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None: nowhere, no folder can be written."""
    digest = hashlib.sha256()
    for source in sorted(_ROOM.glob("*.py")):
        digest.update(source.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    asked = os.environ.get("NUMBA_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parents = [Path(asked)] if asked else [_ROOM / "__pycache__", Path(user) / "opencda-marl"]
    return next((parent / name for parent in parents if _writable(parent / name)), None)


def kernel(function: _Function) -> _Function:
    """Compile `function`; division by zero gives infinity, as in NumPy."""
    folder = cache_folder()
    settings = vars(numba.config)  # set when numba reads its environment: type checkers do not see the names
    before = settings["CACHE_DIR"]
    if folder is not None:
        settings["CACHE_DIR"] = str(folder)
    try:
        compiled = numba.njit(cache=folder is not None, nogil=True, error_model="numpy")(function)
    finally:
        settings["CACHE_DIR"] = before
    return cast("_Function", compiled)
