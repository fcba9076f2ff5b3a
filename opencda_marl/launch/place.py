"""A slot, and what is at work in it: one trainer, and where its cells need one, a server that outlives them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
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
    trouble: OpenCDAError | None = None  # why its server does not come up; until it does, no cell that needs one
    failures: int = 0  # of its server to come up, one after another
    again_at: float = 0.0  # [s] when it is tried again
    _since: float = 0.0  # [s] when its server began
    _answers: bool = False
    _trying: bool = False  # again, after a trouble
    _told: bool = False  # was it said that its server starts?

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
            self._begins()
            self.server.begin()
        if self._answers and self.server.alive():
            return True
        waited = time.monotonic() - self._since
        self._answers = self.server.ready()
        facts = self.server.describe()
        if self._answers:
            self.trouble, self.failures, self._trying = None, 0, False
            told = {"port": facts.get("port"), "foreign": _foreign(facts), "note": facts.get("note")}
            self.tell("server_ready", {"slot": self.slot.index, "seconds": round(waited, 1), **told})
        elif waited > limit:
            raise DeadlineError(f"the server of slot {self.slot.index} does not answer after {waited:.0f} s")
        elif not self._told and _starts(facts):
            self._told = True
            self.tell("server_starting", {"slot": self.slot.index, "port": facts.get("port")})
        return self._answers

    def set_aside(self, error: OpenCDAError, delay: float) -> None:
        """Its server does not come up: tried again after `delay` [s]."""
        self.trouble, self.failures, self._trying = error, self.failures + 1, False
        self.again_at = time.monotonic() + delay

    def recover(self, make: Callable[[Slot], Server], limit: float) -> None:
        """Try the server of a slot that was set aside again, when it is time; it takes no cell for that.

        Raises:
            SimulatorError: it does not come up this time either.
        """
        if time.monotonic() < self.again_at:
            return
        if not self._trying:
            self._trying = True
            self._begins()
            if self.server is not None:
                self.server.restart()
        self.served(make, limit)

    def restart_server(self) -> None:
        """After a failure that it may have part in; one that cannot be restarted is told of."""
        if self.server is None:
            return
        self._begins()
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
        trouble = None if self.trouble is None else self.trouble.message
        return {**self.slot.describe(), "cell": cell, "server": server, "trouble": trouble, "failures": self.failures}

    def _begins(self) -> None:
        self._since, self._answers, self._told = time.monotonic(), False, False


def _starts(facts: Mapping[str, Any]) -> bool:
    """Has something been started, rather than looked for? A container is only ever restarted."""
    return facts.get("phase") == ("restarting" if facts.get("mode") == "docker" else "starting")


def _foreign(facts: Mapping[str, Any]) -> bool:
    return facts.get("mode") == "process" and not facts.get("owned")
