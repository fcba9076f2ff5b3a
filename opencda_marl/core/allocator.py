"""How the C library keeps memory that was freed.

A gradient step takes and frees some arrays of a megabyte. glibc gives such memory back to the system and asks for it
again at the next step, which costs a page fault for every 4 KiB: some hundred a step, three per cent of its time.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

# options of mallopt(3), from malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 * 2**20  # [bytes] glibc takes no more; larger arrays go back to the system when they are freed
_KEPT = 256 * 2**20  # [bytes] of free memory at the top of the heap
_BY_HAND = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for its next gradient step.

    Returns:
        whether it will. Not where the environment says how memory is kept, and not without glibc.
    """
    if any(os.environ.get(name) for name in _BY_HAND):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept: int = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _KEPT))
