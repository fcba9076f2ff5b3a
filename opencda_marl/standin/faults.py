"""What can go wrong on request: parsed from words, asked by those who serve.

NAME[:VALUE]          from the start, or of the whole process
NAME:METHOD           each time that the client calls it
NAME@frame:N          when the world's frame N is due
NAME@tick:N           when the client's N-th tick_cue comes
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from opencda_marl.core.errors import ConfigError

__all__ = ["FAULTS", "Faults", "next_of", "parse"]

FAULTS = {
    "die": "exits with a segmentation fault's code: die:SECONDS, die:METHOD, die@frame:N, die@tick:N",
    "hang": "accepts connections and never answers; hang:METHOD: that one; from there on: hang@frame:N, hang@tick:N",
    "late": "listens only after late:SECONDS; answers a method only after late:METHOD:SECONDS",
    "drop": "closes the connection unanswered: drop:METHOD, drop@frame:N, drop@tick:N",
    "leak": "takes more memory: leak:MIB each second, leak@tick:MIB each frame",
    "squat": "holds the port without listening",
    "http": "answers as a web server: the client's process is aborted",
    "version": "calls itself another version: version:0.9.15",
    "deaf": "ignores SIGTERM",
    "detach": "leaves the group of its wrapper",
    "malformed": "sends bytes that abort the client's process: malformed:METHOD, malformed@frame:N, malformed@tick:N",
}
"""Names, and what they do."""

Action = Literal["die", "hang", "drop", "malformed"]
_ACTIONS: tuple[Action, ...] = ("die", "hang", "drop", "malformed")
_NUMBER = re.compile(r"\d+(\.\d*)?|inf")
_METHOD = re.compile(r"[a-z_]+")


@dataclass(slots=True)
class Faults:
    """What is to go wrong in one process.

    Attributes:
        alone: words without a method, with their values: `{"late": "2.5", "deaf": ""}`.
        methods: method -> what to do instead of answering.
        late: method -> [s] until its answer.
        frames: number of a frame -> what to do when it is due.
        ticks: likewise, the N-th tick_cue.
        leak_per_frame: [MiB].
    """

    alone: dict[str, str] = field(default_factory=dict)
    methods: dict[str, Action] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)
    frames: dict[int, Action] = field(default_factory=dict)
    ticks: dict[int, Action] = field(default_factory=dict)
    leak_per_frame: float = 0.0

    def number(self, name: str, default: float) -> float:
        """Value of one that is alone: seconds, or MiB a second."""
        return float(self.alone.get(name) or default) if name in self.alone else default


def parse(words: Sequence[str]) -> Faults:
    """Words to faults.

    Raises:
        ConfigError: no such fault, or not with this value.
    """
    found = Faults()
    for word in words:
        if not _take(found, word):
            known = "; ".join(f"{name}: {about}" for name, about in FAULTS.items())
            raise ConfigError(f"there is no fault {word!r}", fix=f"these are known: {known}")
    return found


def _take(found: Faults, word: str) -> bool:
    """Add one word; False: it is not understood."""
    name, _, value = word.partition(":")
    name, _, when = name.partition("@")
    if name not in FAULTS:
        return False
    action = next((one for one in _ACTIONS if one == name), None)
    if when:
        if not _NUMBER.fullmatch(value):
            return False
        if name == "leak" and when == "tick":
            found.leak_per_frame = float(value)
            return True
        if action is None or when not in ("frame", "tick") or not value.isdigit():
            return False
        (found.frames if when == "frame" else found.ticks)[int(value)] = action
        return True
    method, _, seconds = value.partition(":")
    if name == "late" and seconds:
        if not (_METHOD.fullmatch(method) and _NUMBER.fullmatch(seconds)):
            return False
        found.late[method] = float(seconds)
        return True
    if action is not None and _METHOD.fullmatch(value) and value != "inf":
        found.methods[value] = action
        return True
    return _alone(found, name, value)


def _alone(found: Faults, name: str, value: str) -> bool:
    wants_number = name in ("die", "late", "leak")
    wants_nothing = name in ("hang", "squat", "http", "deaf", "detach")
    if wants_number and not _NUMBER.fullmatch(value or ("0" if name == "die" else "")):
        return False
    if wants_nothing and value:
        return False
    if name in ("drop", "malformed") or (name == "version" and not value):
        return False
    found.alone[name] = value or ("0" if name == "die" else "")
    return True


def next_of(listed: str) -> list[str]:
    """The words of this start: the first line of a file, which is struck from it unless it begins with `always`.

    Args:
        listed: path; a file that is not there names no faults.
    """
    if not os.path.exists(listed):
        return []
    with open(listed, encoding="utf-8") as file:
        lines = file.read().splitlines()
    now = lines[0] if lines else ""
    if not now.startswith("always "):
        with open(listed, "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines[1:]))
    return [word.strip() for word in now.removeprefix("always ").split(",") if word.strip()]
