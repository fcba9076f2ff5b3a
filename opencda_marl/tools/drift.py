"""Did the code change, or the machine? Two profiles of one program, compared function by function.

When another process takes a share of the machine every function slows down alike. So functions that have
nothing to do with each other and moved by one common factor say: that was not the change under test. What
is left after dividing by the common factor is.
"""

from __future__ import annotations

import math
import pstats
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.tools.measure import median

__all__ = ["LOOP", "Cost", "compare", "read_costs", "shares_of_the_loop", "short_path"]

LOOP = "run_loop"
"""Where an episode begins and ends."""

_Function = tuple[str, int, str]  # file, line, name

_MOVED = 1.3  # a common factor from here on (or its inverse) is another process's doing
_STEP = 1.25  # families within this factor of the common one moved in step with it
_MAJORITY = 0.7  # of the families must have moved in step
_FAMILIES = 5  # fewer say nothing about unrelated code
_CALLS = 20  # in both profiles, for a cost per call that means something
_SHARE = 0.001  # of the whole profile's time, in both
_LISTED = 15  # functions named in each list
_IN_THE_LOOP = 0.5  # of a function's time in both profiles; below, it is (also) what a start costs
_SAME_STEPS = 0.02  # two numbers of steps that differ by less are the same amount of work
_CALLS_OF, _TIME_OF = 1, 3  # where a profile's edge from caller to function holds its calls and its whole time
_ROUNDS = 50  # of handing shares down the graph of calls; deeper than any stack that matters

_SIMULATOR_STEP = re.compile(r"opencda_marl/simulators/(?!rehearsal)\w+\.py:step")  # a warm-up only rehearses

_START_UP = re.compile(
    r"importlib|_imp\.|marshal\.|/inspect\.py:|/typing\.py:|^(numba|llvmlite)/|"
    r"built-in method builtins\.(getattr|hasattr|setattr|exec|compile|__import__|__build_class__)>"
)
"""Imports, introspection and the compiling of kernels: the same whatever the loop does, and also inside it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one function: calls and the time in its own lines."""

    calls: int
    seconds: float  # [s]
    in_loop: float = 1.0  # share of the seconds that was spent on behalf of the loop

    @property
    def each(self) -> float:
        """[s] per call."""
        return self.seconds / self.calls


def read_costs(path: Path) -> dict[str, Cost]:
    """Functions of a `.pstats` file by name; line numbers are dropped, since an edit moves them.

    In a profile that holds no loop everything counts as the loop's.

    Raises:
        OpenCDAError: the file is missing or no profile.
    """
    try:
        entries = cast(Any, pstats.Stats(str(path))).stats  # not in the stubs; the documented content of the file
    except (OSError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise OpenCDAError(f"{path} cannot be read as a profile: {error}", fix="give a .pstats file") from error
    looping = any(key[2] == LOOP for key in entries)
    shares = shares_of_the_loop(entries) if looping else dict.fromkeys(entries, 1.0)
    costs: dict[str, Cost] = {}
    for key, (_, calls, own, _cumulative, _callers) in entries.items():
        file, _line, function = key
        name = function if file == "~" else f"{short_path(file)}:{function}"
        before = costs.get(name, Cost(0, 0.0))
        seconds = before.seconds + own
        looped = before.seconds * before.in_loop + own * shares[key]
        costs[name] = Cost(before.calls + calls, seconds, looped / seconds if seconds > 0 else shares[key])
    return costs


def shares_of_the_loop(entries: Mapping[_Function, Any]) -> dict[_Function, float]:
    """How much of each function's time was spent on behalf of the loop, 0 to 1.

    A profile knows callers one step up. So shares are handed down the graph of calls, each caller's in proportion
    to the time that it spent in the function (as gprof does: Graham, Kessler and McKusick 1982). For our own functions
    the proportion is that of calls: a warm-up calls them once or twice, and most of that time is their first call's.
    """
    shares = {key: float(key[2] == LOOP) for key in entries}
    for _ in range(_ROUNDS):
        for key, (_, _, _, _, callers) in entries.items():
            weight = _CALLS_OF if "opencda_marl/" in key[0] else _TIME_OF
            whole = sum(edge[weight] for edge in callers.values())
            if key[2] != LOOP and whole > 0:
                shares[key] = sum(shares[caller] * edge[weight] for caller, edge in callers.items()) / whole
    return shares


def short_path(file: str) -> str:
    """A path from the package or site-packages on, so that two installations compare."""
    parts = Path(file).parts
    for marker in ("site-packages", "opencda_marl"):
        if marker in parts:
            at = len(parts) - 1 - parts[::-1].index(marker)
            return "/".join(parts[at + (marker == "site-packages") :])
    return "/".join(parts[-2:])


def _family(name: str) -> str:
    """Functions of one file, one extension module or one built-in type stand or fall together."""
    if match := re.search(r"of '([^']+)' objects", name):  # <method 'append' of 'list' objects>
        return match[1]
    if match := re.search(r"<built-in method (?:(.+)\.)?[^.]+>", name):
        return match[1] or "builtins"
    return name.rpartition(":")[0] or name


def compare(old: Mapping[str, Cost], new: Mapping[str, Cost]) -> dict[str, Any]:
    """What moved between two profiles, and whether everything moved together.

    Args:
        old: the profile before.
        new: the profile now.

    Returns:
        {comparable, steps, moved_together, factor, families, in_step, functions, changed}: `steps` are the simulator
        steps of both, and `comparable` says that they are as many (else costs per call mean different work, since
        episodes fill and empty); `factor` is the median of the
        families' new / old cost per call; `functions` names those that moved with it when it is another
        process's doing; `changed` lists what of the loop differs beyond the common factor, dearest first.
    """
    ratios = _ratios(old, new)
    families: dict[str, list[float]] = {}
    for name, ratio in ratios.items():
        families.setdefault(_family(name), []).append(ratio)
    each = {family: median(values) for family, values in families.items()}
    factor = median(list(each.values())) if each else 1.0
    in_step = sum(_near(ratio / factor, _STEP) for ratio in each.values())
    together = len(each) >= _FAMILIES and not _near(factor, _MOVED) and in_step >= _MAJORITY * len(each)
    common = factor if together else 1.0
    dearest = sorted(ratios, key=lambda name: new[name].seconds, reverse=True)
    steps = [_steps(side) for side in (old, new)]
    return {
        "comparable": max(steps) - min(steps) <= _SAME_STEPS * max(steps),
        "steps": steps,
        "moved_together": together,
        "factor": round(factor, 3),
        "families": len(each),
        "in_step": in_step,
        "functions": [name for name in dearest if _near(ratios[name] / factor, _STEP)][:_LISTED] if together else [],
        "changed": [
            {"function": name, "factor": round(ratios[name] / common, 3), "seconds": round(new[name].seconds, 4)}
            for name in dearest
            if not _near(ratios[name] / common, _MOVED) and not _is_start_up(name, old, new)
        ][:_LISTED],
    }


def _ratios(old: Mapping[str, Cost], new: Mapping[str, Cost]) -> dict[str, float]:
    """New / old cost per call of the functions that both profiles know well enough."""
    floor = {id(side): _SHARE * sum(cost.seconds for cost in side.values()) for side in (old, new)}
    return {
        name: new[name].each / old[name].each
        for name in old.keys() & new.keys()
        if all(side[name].calls >= _CALLS and side[name].seconds > floor[id(side)] for side in (old, new))
    }


def _steps(costs: Mapping[str, Cost]) -> int:
    """Simulator steps that a profile holds; 0: none, or not of ours."""
    return sum(cost.calls for name, cost in costs.items() if _SIMULATOR_STEP.fullmatch(name))


def _is_start_up(name: str, old: Mapping[str, Cost], new: Mapping[str, Cost]) -> bool:
    """What a start costs depends on caches and disks, not on the code under test."""
    return min(old[name].in_loop, new[name].in_loop) < _IN_THE_LOOP or _START_UP.search(name) is not None


def _near(ratio: float, factor: float) -> bool:
    return abs(math.log(ratio)) < math.log(factor)
