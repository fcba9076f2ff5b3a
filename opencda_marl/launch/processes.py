"""What Linux says about processes. A process is known by its number *and* its start: numbers are used again.

Standard library only: the keepers import it, and they have to start at once.
"""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = [
    "Process",
    "boot_id",
    "command_line",
    "descendants",
    "group_members",
    "is_alive",
    "read_process",
    "read_processes",
]

_GONE = "ZX"  # states of what is dead and has not been collected


class Process(NamedTuple):
    """One line of the system's table."""

    pid: int
    state: str  # R, S, D, T, Z, …
    parent: int
    group: int
    session: int
    start_time: int  # clock ticks since the machine started

    @property
    def lives(self) -> bool:
        """Not just an entry that waits to be collected?"""
        return self.state not in _GONE


def read_process(pid: int) -> Process | None:
    """One process; None: there is no such."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the name in brackets may hold anything, brackets and line breaks too
    state, parent, group, session, *rest = text.rpartition(b")")[2].split()
    return Process(pid, state.decode(), int(parent), int(group), int(session), int(rest[15]))


def read_processes() -> list[Process]:
    """All processes, dead ones that were not collected included."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [process for process in found if process is not None]


def is_alive(pid: int, start_time: int) -> bool:
    """Does exactly this process live?"""
    process = read_process(pid)
    return process is not None and process.start_time == start_time and process.lives


def group_members(leader: int, start_time: int) -> list[Process]:
    """Living processes of the group and session that `leader` began.

    Args:
        leader: its number, which the group and the session carry.
        start_time: of the leader. A leader that started at another time leads somebody else's group.
    """
    found = [process for process in read_processes() if leader in (process.group, process.session)]
    if any(process.pid == leader and process.start_time != start_time for process in found):
        return []
    return [process for process in found if process.lives and process.start_time >= start_time]


def descendants(pid: int) -> list[Process]:
    """Living children of `pid`, their children, and so on; parents first."""
    table = read_processes()
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return [process for process in found if process.lives]


def command_line(pid: int) -> list[str]:
    """A process's arguments; empty: it is gone, or of another user who hides them."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [os.fsdecode(part) for part in text.split(b"\0")[:-1]]


def boot_id() -> str:
    """Names this start of this machine: after the next one, or elsewhere, numbers and times mean nothing."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
