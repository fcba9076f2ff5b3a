"""How vehicles leave an episode, in every simulator the same way."""

from __future__ import annotations

import numpy as np

from opencda_marl.core.state import Ending, Events, TrafficState

__all__ = ["End", "book_ends"]

End = tuple[int, Ending, int, str]
"""Slot, how, partner's id or -1, reason."""


def book_ends(state: TrafficState, ends: list[End], events: Events) -> list[int]:
    """Write the ends of a step into its events, by slot; nobody who ended is alive.

    Returns:
        their slots, to be freed in the next step.
    """
    ends.sort()
    slots = np.array([end[0] for end in ends], np.int64)
    state.alive[slots] = False
    events.slots = slots
    events.ids = state.ids[slots]
    events.endings = np.array([end[1] for end in ends], np.int64)
    events.partners = np.array([end[2] for end in ends], np.int64)
    events.reasons = tuple(end[3] for end in ends)
    return [int(slot) for slot in slots]
