"""The C++ of acting and of updates as one library: built once per user, for this processor, on first use.

The sources are plain C++ with a C interface, so that one call of the compiler (a second or two) is all that it takes:
no ninja, no torch headers, and a path with a space is no obstacle. What is in it: `lstm`, `dense`, `fused`, `shared`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opencda_marl.core.files import read_regular, write_synced
from opencda_marl.core.programs import await_true, run_program, telling_line
from opencda_marl.core.scratch import scratch_folder
from opencda_marl.settings.networks import Activation

__all__ = ["BENDS", "bound", "build_of_library", "cache_root", "find_compiler", "find_library", "why_not_kept"]

BENDS: dict[Activation | None, int] = {None: 0, "tanh": 1, "relu": 2}
"""What bends a layer's output, as lanes.h numbers it."""

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("lstm.cpp", "dense.cpp", "fused.cpp", "shared.cpp"))
_HEADERS = (Path(__file__).with_name("lanes.h"),)
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-shared", "-fPIC")
_BUILD_SECONDS = 120.0
_STALE = 3600.0  # [s] after which nobody is still writing a file
_DIGEST = hashlib.sha256().digest_size
_LOG = "compiler.log"


@dataclass(frozen=True, slots=True)
class _Found:
    library: ctypes.CDLL | None
    why: str | None = None  # there is none
    build: str = "none"  # which one it is
    unkept: str | None = None  # it was built, but each start has to do so again


_FOUND: dict[tuple[str, ...], _Found] = {}  # by command and cache: a process that asks again need not wait again


def cache_root() -> Path:
    """Where compiled kernels are kept: OPENCDA_MARL_CACHE, else the user's cache folder.

    Raises:
        RuntimeError: the user has no home folder.
    """
    own = os.environ.get("OPENCDA_MARL_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opencda-marl"


def find_compiler() -> tuple[list[str] | None, str]:
    """The C++ compiler as a command: what CXX says, arguments and all, else the first that is found.

    Returns:
        the command, its program with its path; or None and why there is none.
    """
    own = os.environ.get("CXX", "").strip()
    if not own:
        names = ["g++", "c++", "clang++"]
        found = next(filter(None, map(shutil.which, names)), None)
        return (None, f"{', '.join(names)} not found") if found is None else ([found], "")
    try:
        command = [own] if shutil.which(own) else shlex.split(own)  # a path may have a space
    except ValueError as error:
        return None, f"CXX is {own!r}, which is no command: {str(error).lower()}"
    program = shutil.which(command[0]) if command else None
    return (None, f"{own} not found (CXX)") if program is None else ([program, *command[1:]], "")


def bound(function: Any, result: Any, types: list[Any]) -> Any:
    """A function of the library with the types of its result and arguments."""
    function.restype, function.argtypes = result, types
    return function


def find_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, built where it is not yet in the cache; or None and why not, for the init line.

    Raises:
        Interrupted, SystemExit: a signal came while it was compiled; see `run_program`.
    """
    command, why = find_compiler()
    if command is None:
        return None, f"no C++ compiler: {why}"
    found = _FOUND.get(_asked(command))
    if found is None:
        found = _FOUND[_asked(command)] = _find(command)
    return found.library, found.why


def why_not_kept() -> str | None:
    """Why the library that this process has found is compiled again at each start, and what to do; None: it is not."""
    command, _ = find_compiler()
    found = None if command is None else _FOUND.get(_asked(command))
    return None if found is None else found.unkept


def build_of_library() -> str:
    """Which library this process computes with: one for each version of the sources, compiler command and processor, so
    two of another name may round differently; `none` where there is none.

    Raises:
        Interrupted, SystemExit: see `find_library`.
    """
    find_library()
    command, _ = find_compiler()
    return "none" if command is None else _FOUND[_asked(command)].build


def _asked(command: Sequence[str]) -> tuple[str, ...]:
    return (*command, *(os.environ.get(name, "") for name in ("OPENCDA_MARL_CACHE", "XDG_CACHE_HOME", "HOME")))


def _find(command: Sequence[str]) -> _Found:
    """From the cache; built where it is missing, damaged, or has not what it should have."""
    key = _key(command)
    target = _target(key)
    found = _kept(target)
    if found is None:
        with _alone(target):
            found = _kept(target) or _made(command, target)  # another process may have built it meanwhile
    return found if found.library is None else replace(found, build=key)


def _made(command: Sequence[str], target: Path | None) -> _Found:
    """Built now."""
    try:
        with scratch_folder("build") as folder:
            return _built(command, Path(folder), target)
    except (OSError, TimeoutError) as error:  # no temporary folder, no process, too slow
        return _Found(None, str(error))


def _kept(target: Path | None) -> _Found | None:
    """The library of the cache; None: it is to be built."""
    if target is not None and _whole(target):
        with suppress(OSError):  # it cannot be loaded
            return _Found(_loaded(target))
    return None


@contextmanager
def _alone(target: Path | None) -> Iterator[None]:
    """Nobody else builds this library meanwhile: of processes that start together one compiles, the others take what it
    has made, so that they compute in one form. Where no file can be locked, or one takes too long, they build at once.

    Raises:
        Interrupted, SystemExit: a signal came while another process was awaited; see `await_true`.
    """
    if target is None:
        yield
        return
    lock, held = target.with_name(f".{target.name}.lock"), []

    def take() -> bool:
        descriptor = _locked(lock)
        held.extend([] if descriptor is None else [descriptor])
        return bool(held)

    try:
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            await_true(take, what="another process's compiler", limit=_BUILD_SECONDS)
        yield
    finally:
        for descriptor in held:
            with suppress(OSError):
                lock.unlink()
            os.close(descriptor)


def _locked(lock: Path) -> int | None:
    """A descriptor that holds the lock, which ends with the process; None: another process has it.

    Raises:
        OSError: there cannot be such a file here, or it cannot be locked.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:  # else its last holder has removed it
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _key(command: Sequence[str]) -> str:
    """Of the library of these sources, this command and this processor."""
    key = hashlib.sha256()
    for source in (*_SOURCES, *_HEADERS):
        key.update(source.read_bytes())
    for part in (*_FLAGS, *command, platform.machine(), _processor()):
        key.update(part.encode())
    return key.hexdigest()[:20]


def _target(key: str) -> Path | None:
    """Where that library is kept; None: there is no such place."""
    try:
        return cache_root() / f"kernels-{key}.so"
    except RuntimeError:
        return None


def _processor() -> str:
    """What `-march=native` stands for: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _built(command: Sequence[str], folder: Path, target: Path | None) -> _Found:
    """The library as the compiler makes it in a temporary folder; a copy is kept in the cache.

    Raises:
        OSError: the compiler cannot be started.
        TimeoutError: it does not end.
    """
    made, output = folder / "kernels.so", folder / _LOG
    code = run_program([*command, *_FLAGS, *map(str, _SOURCES), "-o", str(made)], output=output, limit=_BUILD_SECONDS)
    if code != 0 or not made.is_file():
        return _Found(None, f"{shlex.join(command)} failed: {_last_words(code, output.read_bytes(), target)}")
    data = made.read_bytes()
    unkept = "there is no home folder" if target is None else _keep(target, data + hashlib.sha256(data).digest())
    why = ""
    # the copy comes second: a loader that has opened a bad one goes by its name, and nothing may run in some /tmp
    for path in [made] if target is None or unkept is not None else [made, target]:
        try:
            return _Found(_loaded(path), unkept=None if unkept is None else _advice(target, unkept))
        except OSError as error:
            why = why or telling_line(str(error).replace(str(made), "the library"))
    if target is not None:
        with suppress(OSError):
            target.unlink()
    return _Found(None, f"what {shlex.join(command)} has made cannot be used: {why}")


def _last_words(code: int, said: bytes, target: Path | None) -> str:
    """Why a compiler failed, in one line, and where all that it said is."""
    line = telling_line(said.decode(errors="replace")) or f"exit code {code}, and it said nothing"
    if not said.strip() or target is None or _keep(target.with_name(_LOG), said) is not None:
        return line
    return f"{line} (all that it said is in {target.with_name(_LOG)})"


def _advice(target: Path | None, why: str) -> str:
    where = "anywhere" if target is None else f"in {target.parent}"
    fix = f"remove {target}, or set" if target is not None and target.is_dir() else "set"
    return (
        f"compiled C++ cannot be kept {where}, so each start compiles it again: {why}; "
        f"{fix} OPENCDA_MARL_CACHE to a folder that you may write to"
    )


def _keep(target: Path, data: bytes) -> str | None:
    """Write a file of the cache, which appears whole or not at all: two processes may build at once.

    Returns:
        what keeps it from being written; None: nothing did.
    """
    part = target.with_name(f".{target.name}-{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(".*.part"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink(missing_ok=True)
        try:
            write_synced(part, data)
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def _whole(target: Path) -> bool:
    """Is it what `_built` has written? Its digest stands behind it, where no loader looks: mapping a library that was
    cut short would end the process.
    """
    try:
        data = read_regular(target)
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _loaded(path: Path) -> ctypes.CDLL:
    """The library in a file.

    Raises:
        OSError: it cannot be loaded, or a function of the sources is not in it.
    """
    library = ctypes.CDLL(str(path))
    names = {name for source in _SOURCES for name in re.findall(r"^\w+ (opencda_\w+)\(", source.read_text(), re.M)}
    missing = sorted(name for name in names if not hasattr(library, name))
    if missing:
        raise OSError(f"it has no {', '.join(missing)}")
    return library
