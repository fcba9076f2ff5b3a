"""Asked to stop: the first Ctrl-C or SIGTERM is a wish, the second one ends the process at once.

A terminal that is gone (SIGHUP) is a wish too, unless nohup said to ignore it; it comes more than once, and never ends
the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """`requested()` becomes True at the first signal; the loop asks after each step.

    Signals can only be caught in the main thread; in another one nothing is caught and `ask` is the way.
    """

    def __init__(self) -> None:
        self._requested = False
        self.by: int | None = None  # the first signal
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Has somebody asked?"""
        return self._requested

    def ask(self) -> None:
        """Request a stop without a signal."""
        self._requested = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            wanted = [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]
            self._before = {number: signal.signal(number, self._caught) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        if self._requested and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.by = self.by or number
        self._requested = True
