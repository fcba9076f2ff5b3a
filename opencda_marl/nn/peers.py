"""The processes of a run's other workers, for messages: who is it that does not answer, and what became of it?"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Peer", "here", "named", "parsed"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker's process.

    Args:
        rank: of the worker.
        process: its id.
        host: name of its machine.
        place: names what its id means something in: this start of the machine, this namespace of processes.
    """

    rank: int
    process: int
    host: str
    place: str

    @property
    def state(self) -> str | None:
        """`gone`, `stopped` (by SIGSTOP or Ctrl-Z) or `running`; None: it cannot be seen from here."""
        if not self.place or self.place != _place():
            return None
        try:
            # after the name in brackets, which may hold anything
            letter = Path(f"/proc/{self.process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        except (OSError, IndexError):
            return None
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(letter, "running")

    def __str__(self) -> str:
        where = "" if self.place == _place() else f" on {self.host}"
        return f"worker {self.rank} (process {self.process}{where})"


def here() -> bytes:
    """What this process tells the others of itself; see `parsed`."""
    return json.dumps([os.getpid(), socket.gethostname(), _place()]).encode()


def parsed(told: Sequence[bytes]) -> list[Peer]:
    """What all have told, by rank."""
    return [Peer(rank, *json.loads(data)) for rank, data in enumerate(told)]


def named(peers: Iterable[Peer]) -> str:
    """`worker 1 (process 5)`, or several of them."""
    return " and ".join(map(str, peers))


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
