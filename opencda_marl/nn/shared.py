"""Sums of vectors over the processes of one machine, in memory that they share (`shared.cpp`).

A gradient of a few hundred kilobytes goes through a socket in a millisecond, and each worker waits for it at every
minibatch. Here it is a copy and a sum. The memory has no name: it is open in worker 0, and the others open it through
`/proc`, so that nothing is left behind however a process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import sys
import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

from opencda_marl.nn.native import bound, find_library

__all__ = ["Area", "SharedSum", "find_area", "open_area"]

_APART = 64  # [byte] between two counters
_TOKEN = 32  # [byte] by which a worker knows that it has opened the right memory
_LOOKS = 20_000  # half a millisecond, until Python is asked
_NAP = 1e-4  # [s] between two such turns, once a worker waits for long
_LOOK_UP = 0.1  # [s] between two calls of `meanwhile`


class Area:
    """Memory for `size` workers with vectors of `count` floats.

    Args:
        memory: mapped; it goes with the last object that looks into it.
        size: workers.
        count: floats of a vector.
        library: see `native.find_library`.
        descriptor: to be closed with it, if any.
    """

    def __init__(
        self, memory: mmap.mmap, size: int, count: int, library: ctypes.CDLL, descriptor: int | None = None
    ) -> None:
        self.size, self.count, self._memory, self._descriptor = size, count, memory, descriptor
        self.stride = _stride(count)
        bytes_ = np.frombuffer(memory, np.uint8)
        self.token = bytes(bytes_[:_TOKEN])
        counters = _TOKEN
        counters += -counters % _APART
        self._parts = np.frombuffer(memory, np.float32, 2 * size * self.stride, counters + size * _APART)
        self.counters = bytes_.ctypes.data + counters
        self.reached = np.frombuffer(memory, np.int64, size * _APART // 8, counters)[:: _APART // 8]  # see shared.cpp
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.post = bound(library.opencda_post, None, [pointer, int32, int64])
        self.look = bound(library.opencda_await, int32, [pointer, int32, int64, int64])
        self.add = bound(library.opencda_sum, None, [pointer, int64, int32, pointer, int64])

    def parts(self, turn: int) -> Float32[np.ndarray, "workers stride"]:
        """Everybody's vectors of one turn."""
        both = self._parts.reshape(2, self.size, self.stride)
        found: np.ndarray = both[turn % 2]
        return found

    def close(self) -> None:
        """Let go of it; the system frees it with the last one. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _stride(count: int) -> int:
    return count + -count % (_APART // 4)


def _length(size: int, count: int) -> int:
    return _TOKEN + -_TOKEN % _APART + size * _APART + 2 * size * _stride(count) * 4


def open_area(size: int, count: int) -> tuple[Area, str] | None:
    """New memory, and where and by which token others open it; None: this system has no such memory."""
    library, _ = find_library()
    if library is None or sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None  # an interpreter for older systems than this one (uv's, conda's) may have no such call
    descriptor = None
    try:
        descriptor = os.memfd_create("opencda-marl")
        os.ftruncate(descriptor, _length(size, count))
        memory = mmap.mmap(descriptor, _length(size, count))
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    token = secrets.token_bytes(_TOKEN)
    memory[:_TOKEN] = token
    return Area(memory, size, count, library, descriptor), f"/proc/{os.getpid()}/fd/{descriptor} {token.hex()}"


def find_area(told: str, size: int, count: int) -> Area | None:
    """The memory that worker 0 has opened; None: it cannot be reached from here, as from another machine."""
    library, _ = find_library()
    path, _, token = told.partition(" ")
    if library is None or not path:
        return None
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), _length(size, count))
    except (OSError, ValueError):
        return None
    area = Area(memory, size, count, library)
    return area if area.token.hex() == token else None


class SharedSum:
    """One worker's end.

    Args:
        area: which all of them have.
        rank: of this one.
        processes: ids of all of them, by rank.
        timeout: [s] that another one is waited for.

    Raises:
        OSError: another process cannot be watched from here, or has ended.
    """

    def __init__(self, area: Area, rank: int, processes: list[int], timeout: float) -> None:
        self._area, self._rank, self._timeout = area, rank, timeout
        self._turn = 0
        self._watched: dict[int, int] = {}
        try:
            for other, process in enumerate(processes):
                if process != os.getpid():
                    self._watched[other] = _watch(process)
        except OSError:
            self._let_go()
            raise

    def __call__(self, flat: Float32[np.ndarray, " count"], meanwhile: Callable[[], None]) -> None:
        """Add up everybody's vectors, in place; the same to the bit everywhere.

        Args:
            flat: contiguous.
            meanwhile: called now and then while others are awaited; what it raises ends the waiting.

        Raises:
            ValueError: the vector has another length.
            TimeoutError: another one did not come.
            ConnectionError: another one is gone.
        """
        area, turn = self._area, self._turn + 1
        if flat.shape != (area.count,):
            raise ValueError(f"a vector of shape {flat.shape} where {area.count} numbers are added up")
        parts = area.parts(turn)
        parts[self._rank, : area.count] = flat
        self._turn = turn  # not before: `close` says that this turn's vector is there
        area.post(area.counters, self._rank, self._turn)
        began = looked = time.monotonic()
        while (state := area.look(area.counters, area.size, self._turn, _LOOKS)) != 0:
            if state == 2:
                raise ConnectionError("it has left")
            now = time.monotonic()
            if now - looked > _LOOK_UP:
                meanwhile()
                gone, looked = self._gone(), now
                if area.look(area.counters, area.size, turn, 0) == 0:  # it has written, and then gone, or we slept
                    break
                if gone:
                    raise ConnectionError(gone)
                if now - began > self._timeout:
                    raise TimeoutError
            if now - began > _LOOK_UP:
                time.sleep(_NAP)
        area.add(parts.ctypes.data, area.stride, area.size, flat.ctypes.data, area.count)

    def behind(self) -> list[int]:
        """Ranks of those that have not delivered what this worker waits for."""
        reached = self._area.reached
        return [rank for rank in range(self._area.size) if abs(int(reached[rank])) < self._turn + (reached[rank] < 0)]

    def _gone(self) -> str:
        """Which other process has ended, if one has."""
        for other, descriptor in self._watched.items():
            poll = select.poll()  # unlike select, of any descriptor
            poll.register(descriptor, select.POLLIN)
            if poll.poll(0):
                return f"worker {other} is gone"
        return ""

    def close(self) -> None:
        """Leave; whoever waits hears of it. May be called twice."""
        self._area.post(self._area.counters, self._rank, -1 - self._turn)
        self._let_go()
        self._area.close()

    def _let_go(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)
        self._watched = {}


def _watch(process: int) -> int:
    """Becomes readable when the process ends."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        raise OSError("processes cannot be watched here")
    return os.pidfd_open(process)
