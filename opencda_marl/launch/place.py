"""A slot, and what is at work in it: one trainer, and where its cells need one, a server that outlives them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from opencda_marl.core.errors import DeadlineError, OpenCDAError
from opencda_marl.launch.cells import Cell
from opencda_marl.launch.keeper import Kept
from opencda_marl.launch.plan import Slot
from opencda_marl.launch.trainers import Watch

__all__ = ["Listener", "Place", "Server"]

Listener = Callable[[str, dict[str, Any]], None]
"""Hears what happened: the kind of an event, and its facts. `beat` comes once a second with all rows."""


class Server(Protocol):
    """A simulator's server of one slot (launch/servers.py)."""

    def begin(self) -> None:
        """Start it if it is needed; returns at once."""

    def ready(self) -> bool:
        """Does it answer? Raises SimulatorError if it never will."""

    def restart(self) -> None:
        """End it and begin anew; returns at once."""

    def terminate(self) -> None:
        """Ask it to end, as `stop` does, without waiting."""

    def stop(self) -> None:
        """End it, if it is ours and not to be kept."""

    def alive(self) -> bool:
        """Is it there?"""

    def describe(self) -> dict[str, Any]:
        """For launcher.json."""


@dataclass(slots=True)
class Place:
    """What the launcher holds of a slot. `tell` hears of its server."""

    slot: Slot
    tell: Listener
    cell: Cell | None = None
    kept: Kept | None = None
    watch: Watch | None = None
    asked: str | None = None  # why the trainer was ended: `stop`, or a class of failures and what happened
    asked_at: float = 0.0  # [s] when that was
    said_from: int = 0  # byte of console.log where its trainer began to speak
    mps: bool = False  # does its trainer hang on the GPU's multi-process service?
    server: Server | None = None
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=120))  # time [s], steps
    _since: float = 0.0  # [s] when its server began
    _answers: bool = False

    @property
    def free(self) -> bool:
        """Is there room for a cell?"""
        return self.cell is None

    def began(self, kept: Kept, watch: Watch) -> None:
        """A trainer is at work."""
        self.kept, self.watch, self.asked = kept, watch, None
        self.samples.clear()

    def ask_to_stop(self) -> None:
        """The trainer is to save its last boundary and end."""
        assert self.kept is not None
        self.asked, self.asked_at = "stop", time.monotonic()
        self.kept.terminate()

    def end(self, why: str) -> None:
        """The trainer is beyond asking."""
        assert self.kept is not None
        self.asked, self.asked_at = why, time.monotonic()
        self.kept.kill()

    def clear(self) -> None:
        """The trainer is gone, and so is its cell."""
        self.cell, self.kept, self.watch = None, None, None

    def served(self, make: Callable[[Slot], Server], limit: float) -> bool:
        """Does the server answer? It is made and started if there is none.

        Args:
            make: makes it.
            limit: [s] that it may take.

        Raises:
            SimulatorError: it never will.
        """
        if self.server is None:
            self.server = make(self.slot)
            self._since, self._answers = time.monotonic(), False
            self.server.begin()
            self.tell("server_starting", {"slot": self.slot.index, **self.server.describe()})
        if self._answers and self.server.alive():
            return True
        waited = time.monotonic() - self._since
        self._answers = self.server.ready()
        if self._answers:
            note = self.server.describe().get("note")
            self.tell("server_ready", {"slot": self.slot.index, "seconds": round(waited, 1), "note": note})
        elif waited > limit:
            raise DeadlineError(f"the server of slot {self.slot.index} does not answer after {waited:.0f} s")
        return self._answers

    def restart_server(self) -> None:
        """After a failure that it may have part in; one that cannot be restarted is told of."""
        if self.server is None:
            return
        self._since, self._answers = time.monotonic(), False
        try:
            self.server.restart()
        except OpenCDAError as error:
            self.tell("server_failed", {"slot": self.slot.index, "error": error.message})

    def stop_server(self) -> None:
        """At the end of everything."""
        if self.server is None:
            return
        try:
            self.server.stop()
        except OpenCDAError as error:
            self.tell("server_failed", {"slot": self.slot.index, "error": error.message})

    def describe(self) -> dict[str, Any]:
        """For launcher.json."""
        cell = None if self.cell is None else self.cell.id
        server = None if self.server is None else self.server.describe()
        return {**self.slot.describe(), "cell": cell, "server": server}
