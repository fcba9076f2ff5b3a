"""`with span("update"):` timers in the real loop; free when off.

Spans do not nest: time belongs to the innermost open one. They feed the summary, `profile` and the monitor.
"""

from __future__ import annotations

import time
from types import TracebackType

__all__ = ["SPANS", "Spans"]

SPANS = ("tick", "read", "observe", "act", "reward", "store", "update", "wait", "metrics")
"""Names that the loop uses, in the order of a step."""


class _Span:
    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Spans, name: str) -> None:
        self._owner = owner
        self._name = name

    def __enter__(self) -> None:
        self._owner.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.leave()


class _Off:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_OFF = _Off()


class Spans:
    """Seconds by name. One object per loop, handed to whoever is timed.

    Args:
        enabled: when False every span is a no-op.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = 0.0
        self._made: dict[str, _Span] = {}

    def __call__(self, name: str) -> _Span | _Off:
        """A context manager that charges the time inside it to `name`."""
        if not self.enabled:
            return _OFF
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = _Span(self, name)
        return made

    def enter(self, name: str) -> None:
        """Begin charging `name`; what was charged before pauses."""
        now = time.perf_counter()
        if self._stack:
            top = self._stack[-1]
            self.seconds[top] = self.seconds.get(top, 0.0) + now - self._since
        self._stack.append(name)
        self._since = now

    def leave(self) -> None:
        """End the innermost span."""
        now = time.perf_counter()
        top = self._stack.pop()
        self.seconds[top] = self.seconds.get(top, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by name; starts afresh."""
        taken, self.seconds = self.seconds, {}
        return taken
