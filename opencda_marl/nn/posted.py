"""Bytes that a process hands to others of its machine, in memory without a name: a write and a read.

Through gloo's sockets some ten megabytes take a tenth of a second and more, in which all workers stand still. The
memory is open in the process that posts, and the others open it through `/proc`, so nothing is left behind.
"""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress

__all__ = ["Posted", "posted", "read"]

_TOKEN = 6  # [byte] behind the data, by which a reader knows that it has opened the right memory; a float holds it


class Posted:
    """What one process has posted.

    Args:
        where: length, descriptor and token, as others are told; whole numbers that a float64 holds exactly. A
            descriptor of -1: nothing could be posted.
    """

    def __init__(self, where: tuple[int, int, int]) -> None:
        self.where = where

    def close(self) -> None:
        """Let go of it; the system frees it. May be called twice."""
        length, descriptor, token = self.where
        self.where = (length, -1, token)
        if descriptor >= 0:
            os.close(descriptor)


def posted(data: bytes) -> Posted:
    """Memory with these bytes, for others to read; without a descriptor where this system has no such memory."""
    token = secrets.token_bytes(_TOKEN)
    descriptor = -1
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        try:
            descriptor = os.memfd_create("opencda-marl")
            _write(descriptor, data)
            _write(descriptor, token)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            descriptor = -1
    return Posted((len(data), descriptor, int.from_bytes(token)))


def read(process: int, where: tuple[int, int, int]) -> bytes | None:
    """What a process has posted; None: it cannot be read from here."""
    length, descriptor, token = where
    if descriptor < 0:
        return None
    with suppress(OSError), open(f"/proc/{process}/fd/{descriptor}", "rb", buffering=0) as file:
        parts = []
        while length and (part := file.read(length)):  # of less than 2 GiB it is one
            parts.append(part)
            length -= len(part)
        if not length and file.read(_TOKEN) == token.to_bytes(_TOKEN):
            return parts[0] if len(parts) == 1 else b"".join(parts)
    return None


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
