"""Bounds of a setting, declared beside it and checked by `config.py`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Between"]


@dataclass(frozen=True, slots=True)
class Between:
    """`Annotated[float, Between(0, 1)]`; None is no bound. `open_low` excludes the lower bound itself.

    For a list or a block of free names every element is held to it.
    """

    low: float | None = None
    high: float | None = None
    open_low: bool = False
