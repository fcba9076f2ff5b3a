"""What a run tells whoever shows it. A listener reads these; it cannot steer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Beat", "Checkpointed", "EpisodeDone", "Evaluated", "Finished", "Listener", "Note", "Started", "TrainEvent"]


@dataclass(frozen=True, slots=True)
class Started:
    """Everything is set up; the first step comes next."""

    run_dir: Path
    init: dict[str, Any]  # the init line: backend, algorithm, device, threads, encoder, update_mode, …
    episode: int  # done before, 0 for a fresh run
    plan: str = ""  # until when it trains, on what traffic, and what comes then


@dataclass(frozen=True, slots=True)
class Beat:
    """The heartbeat, once a second at most: what status.json says."""

    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EpisodeDone:
    """A line of episodes.jsonl."""

    line: dict[str, Any]
    progress: float  # of the budget, 0 to 1
    eta_s: float | None  # [s] of training left; None: nothing was updated yet, so nobody knows


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out evaluation beside training: one row a rate."""

    episode: int  # of the checkpoint
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint was written."""

    path: Path
    episode: int
    best: bool


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the person, said once."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The budget is used up."""

    summary: dict[str, Any]


TrainEvent = Started | Beat | EpisodeDone | Evaluated | Checkpointed | Note | Finished
Listener = Callable[[TrainEvent], None]
