"""Standard streams that fail: nobody reads any more, or the disk behind them is full."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO

__all__ = ["into_nothing"]


def into_nothing(stream: IO[str] | None) -> None:
    """What is still to be written to a stream that failed is dropped, at the end of the process too."""
    with suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, stream.fileno())  # type: ignore[union-attr]
        finally:
            os.close(nothing)
