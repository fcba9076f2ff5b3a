"""Ports of this machine: whether they can be had, and who has them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from opencda_marl.launch.processes import command_line

__all__ = ["PER_SERVER", "holder", "is_free", "listeners", "taken"]

PER_SERVER = 3
"""A CARLA server takes its RPC port and the two above it (streaming, secondary)."""

_LISTENING = "0A"


def is_free(port: int) -> bool:
    """Could a server listen there now? It is tried out; connections of an earlier one that fade are no hindrance."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
            trial.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def taken(port: int) -> list[int]:
    """Those of a server's three ports that cannot be had."""
    return [number for number in range(port, port + PER_SERVER) if not is_free(number)]


def listeners(port: int, among: Iterable[int] | None = None) -> set[int]:
    """Processes that listen on a port, as far as this user may see.

    Args:
        port: where.
        among: look only at these processes.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit()) if among is None else among
    return {pid for pid in pids if wanted & _open_files(pid)} if wanted else set()


def holder(port: int) -> str:
    """Who has a port, in words."""
    for pid in sorted(listeners(port)):
        program = Path((command_line(pid) or ["?"])[0]).name
        return f"process {pid} ({program})"
    return "a process of somebody else, or one that does not listen"


def _inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # no IPv6
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                found.add(words[9])
    return found


def _open_files(pid: int) -> set[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # gone, or of another user
        return set()
    found = set()
    for name in names:
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return found
