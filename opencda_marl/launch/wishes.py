"""What a person wants of the launcher, by signals."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

__all__ = ["Wishes"]


class Wishes:
    """The first Ctrl-C or TERM asks to stop, the second to kill; a lost terminal asks to stop, unless nohup ignores it.

    Signals can only be caught in the main thread; in another one the attributes are the way.
    """

    def __init__(self) -> None:
        self.stop = self.kill = self.drain = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            wanted = [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]
            self._before = {number: signal.signal(number, self._caught) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        self.kill = self.kill or (self.stop and number != signal.SIGHUP)
        self.stop = True
