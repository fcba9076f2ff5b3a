"""The C++ of acting and of updates as one library: built once per user, for this processor, on first use.

The sources are plain C++ with a C interface, so that one call of the compiler (a second or two) is all that it takes:
no ninja, no torch headers, and a path with a space is no obstacle. What is in it: `lstm`, `dense`, `fused`, `shared`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from opencda_marl.core.files import read_regular, write_synced
from opencda_marl.settings.networks import Activation

__all__ = ["BENDS", "bound", "cache_root", "find_library"]

BENDS: dict[Activation | None, int] = {None: 0, "tanh": 1, "relu": 2}
"""What bends a layer's output, as lanes.h numbers it."""

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("lstm.cpp", "dense.cpp", "fused.cpp", "shared.cpp"))
_HEADERS = (Path(__file__).with_name("lanes.h"),)
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
_BUILD_SECONDS = 120.0
_BROKEN: dict[str, str] = {}  # compiler -> what became of it: a process that asks again need not wait again
_DIGEST = hashlib.sha256().digest_size


def cache_root() -> Path:
    """Where compiled kernels are kept: OPENCDA_MARL_CACHE, else the user's cache folder."""
    own = os.environ.get("OPENCDA_MARL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opencda-marl"


def _processor() -> str:
    """What `-march=native` stands for: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(compiler: str, target: Path) -> None:
    """Compile into `target`, which appears whole or not at all: two processes may build at once.

    Its digest stands behind it, where no loader looks: mapping a library that was cut short would end the process.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / target.name
        subprocess.run(
            [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(made)],
            check=True,
            capture_output=True,
            timeout=_BUILD_SECONDS,
        )
        data = made.read_bytes()
        write_synced(made, data + hashlib.sha256(data).digest())
        made.replace(target)


def _whole(target: Path) -> bool:
    """Is it what `_build` has written?"""
    try:
        data = read_regular(target)
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _built(compiler: str, target: Path) -> ctypes.CDLL:
    """The library of the cache; made when it is missing or damaged."""
    if not _whole(target):
        _build(compiler, target)
    return ctypes.CDLL(str(target))


def bound(function: Any, result: Any, types: list[Any]) -> Any:
    """A function of the library with the types of its result and arguments."""
    function.restype, function.argtypes = result, types
    return function


def find_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, built where it is not yet in the cache; or None and why not, for the init line."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    compiler = next((found for found in map(shutil.which, names) if found), None)
    if compiler is None:
        return None, f"no C++ compiler: {', '.join(names)} not found"
    if compiler in _BROKEN:
        return None, _BROKEN[compiler]
    key = hashlib.sha256()
    for source in (*_SOURCES, *_HEADERS):
        key.update(source.read_bytes())
    for part in (*_FLAGS, compiler, platform.machine(), _processor()):
        key.update(part.encode())
    try:
        target = cache_root() / f"kernels-{key.hexdigest()[:20]}.so"
        return _built(compiler, target), None
    except subprocess.CalledProcessError as error:
        _BROKEN[compiler] = f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[-300:]}"
        return None, _BROKEN[compiler]
    except subprocess.TimeoutExpired:
        _BROKEN[compiler] = f"{compiler} did not end within {_BUILD_SECONDS:.0f} s"
        return None, _BROKEN[compiler]
    except (OSError, RuntimeError) as error:  # no home folder, unwritable cache, a library of another machine
        return None, str(error)
