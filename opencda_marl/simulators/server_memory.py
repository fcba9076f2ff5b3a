"""How much memory a server on this machine has taken, found by the port that it listens on."""

from __future__ import annotations

import psutil

__all__ = ["server_memory"]

_HERE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def server_memory(host: str, port: int) -> int | None:
    """Resident memory of whoever listens on a port, children included. [bytes]

    Args:
        host: of the server.
        port: likewise.

    Returns:
        None: it runs elsewhere, or belongs to another user.
    """
    if host not in _HERE:
        return None
    try:
        found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return None
    total = 0
    for pid in {c.pid for c in found if c.pid is not None and c.laddr and c.laddr.port == port}:
        try:
            process = psutil.Process(pid)
            total += sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        except psutil.Error:
            continue  # gone, or not ours to look at
    return total or None
