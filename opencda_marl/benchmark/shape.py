"""Is a file of results one? Each field's type and bounds, and whether the counts of its episodes add up.

What passes here can be put into tables without another look at it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["EPISODE", "ShapeError", "check_result", "parse"]

EPISODE = ("seed", "scheduled", "departed", "arrived", "collided", "removed", "running", "waiting")
"""Columns of `per_episode`."""

KINDS = ("learner", "controller", "generalisation")
_MOST = 10**15  # of a whole number
_TOLERANCE = 1e-5  # of a share that follows from counts: files hold six digits


class ShapeError(ValueError):
    """What is wrong, with the field's name."""


Check = Callable[[str, Any], None]


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object; NaN, infinity and a name that stands twice are refused, which Python's reader lets through.

    Raises:
        ShapeError: it is something else.
    """
    try:
        found = json.loads(data, parse_constant=_constant, object_pairs_hook=_pairs)
    except ShapeError:
        raise
    except RecursionError as error:
        raise ShapeError("it is nested too deeply") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ShapeError(f"it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ShapeError(f"it holds {_named(found)}, not an object")
    return found


def _constant(name: str) -> Any:
    raise ShapeError(f"it holds {name}, which is no number")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ShapeError(f"{twice!r} stands twice in one object")
    return found


def _named(value: Any) -> str:
    """A value for a message, not longer than a line."""
    if value is None:
        return "null"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _wrong(field: str, what: str, value: Any) -> ShapeError:
    return ShapeError(f"{field} is {_named(value)}, not {what}")


def _text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise _wrong(field, "a text", value)


def _truth(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _wrong(field, "true or false", value)


def _whole(least: int) -> Check:
    def check(field: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise _wrong(field, f"a whole number from {least}", value)

    return check


def _number(low: float = -math.inf, high: float = math.inf) -> Check:
    def check(field: str, value: Any) -> None:
        bad = isinstance(value, bool) or not isinstance(value, int | float)
        if bad or abs(value) > _MOST or not math.isfinite(value) or not low <= value <= high:
            bounds = f" from {low:g} to {high:g}" if high < math.inf else f" from {low:g}" if low > -math.inf else ""
            raise _wrong(field, f"a finite number{bounds}", value)

    return check


def _or_null(inner: Check) -> Check:
    def check(field: str, value: Any) -> None:
        if value is not None:
            inner(field, value)

    return check


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(field, "an object", value)
    return value


_SHARE = _or_null(_number(0.0, 1.0))
_FIGURE = _or_null(_number())

_HEAD: Mapping[str, Check] = {
    "name": _text,
    "policy": _text,
    "identity": _text,
    "profile": _or_null(_text),
    "decision_interval": _or_null(_whole(1)),
    "commit": _or_null(_text),
    "date": _text,
    "command": _text,
    "seed": _whole(0),
    "budget_minutes": _number(0.0),
    "checkpoint": _text,
}
_TRAINING: Mapping[str, Check] = {
    "episodes": _whole(0),
    "env_steps": _whole(0),
    "training_s": _number(0.0),
    "run": _text,
}
_BLOCK: Mapping[str, Check] = {
    "episodes": _whole(1),
    "vehicles": _whole(0),
    "success_rate": _SHARE,
    "collision_rate": _SHARE,
    "mean_delay_s": _FIGURE,
}
"""Of each density or case; these must be there, and every other figure is a number, true, false or null."""

_OPTIONAL: Mapping[str, Check] = {
    **dict.fromkeys(("success_rate_departed", "near_miss_rate", "overridden_share"), _SHARE),
    "congested": _or_null(_truth),
    "decision_interval": _or_null(_whole(1)),
}
_ELSEWHERE = ("rate_vph", "settings")  # of a case: texts


def check_result(result: Mapping[str, Any]) -> None:
    """Raises unless it has the form that `results.write_result` is given.

    Raises:
        ShapeError: with the first field that is wrong.
    """
    for name in ("name", "kind", "policy"):
        if name not in result:
            raise ShapeError(f"it has no {name!r}")
    if result["kind"] not in KINDS:
        raise _wrong("kind", f"one of {', '.join(KINDS)}", result["kind"])
    for name, check in _HEAD.items():
        if name in result:
            check(name, result[name])
    if "/" in result["name"] or result["name"].startswith("."):  # it is a file's name
        raise _wrong("name", "a plain name", result["name"])
    if "machine" in result:
        _object("machine", result["machine"])
    if "settings" in result:
        _object("settings", result["settings"])
    if result["kind"] == "learner" and "identity" in result and "checkpoint" not in result:
        raise ShapeError("it is of a learner, and has no 'checkpoint'")
    if result.get("training") is not None:
        _check_training(_object("training", result["training"]))
    blocks = "cases" if result["kind"] == "generalisation" else "densities"
    if blocks not in result:
        raise ShapeError(f"it has no {blocks!r}")
    for key, block in _object(blocks, result[blocks]).items():
        field = f"{blocks} {key!r}"
        if blocks == "densities":
            _check_density(key)
        _check_block(field, _object(field, block))


def _check_training(told: Mapping[str, Any]) -> None:
    for name, check in _TRAINING.items():
        if name not in told and name != "run":
            raise ShapeError(f"training has no {name!r}")
        if name in told:
            check(f"training.{name}", told[name])
    for quality, when in _object("training.time_to_s", told.get("time_to_s", {})).items():
        _or_null(_number(0.0))(f"training.time_to_s {quality!r}", when)


def _check_density(key: str) -> None:
    try:
        rate = float(key)
    except ValueError:
        rate = math.nan
    if not 0.0 < rate <= _MOST or f"{rate:g}" != key:
        raise ShapeError(f"densities {key!r} is no number of vehicles per hour and lane, as 300")


def _check_block(field: str, block: Mapping[str, Any]) -> None:
    for name in (*_BLOCK, "seeds", "per_episode"):
        if name not in block:
            raise ShapeError(f"{field} has no {name!r}")
    for name, value in block.items():
        if name in ("seeds", "per_episode", *_ELSEWHERE):
            continue
        check = _BLOCK.get(name) or _OPTIONAL.get(name)
        if check is None and isinstance(value, bool):
            continue
        (check or _FIGURE)(f"{field}, {name}", value)
    if not isinstance(block.get("rate_vph", ""), str) or not isinstance(block.get("settings", []), list):
        raise ShapeError(f"{field}: rate_vph is a text, settings a list of texts")
    _check_episodes(field, block)


def _check_episodes(field: str, block: Mapping[str, Any]) -> None:
    """Every seed once, in order; who was scheduled is somewhere; the figures follow from the counts."""
    seeds, rows = block["seeds"], block["per_episode"]
    if not isinstance(seeds, list) or len(seeds) != 2:
        raise _wrong(f"{field}, seeds", "a pair of numbers, half-open", seeds)
    for seed in seeds:
        _whole(0)(f"{field}, seeds", seed)
    if not isinstance(rows, list) or len(rows) != seeds[1] - seeds[0] or len(rows) != block["episodes"]:
        count = len(rows) if isinstance(rows, list) else _named(rows)
        said = f"seeds say {seeds[1] - seeds[0]}, episodes {block['episodes']}"
        raise ShapeError(f"{field}, per_episode holds {count} episodes, {said}")
    ended = arrived = 0
    for index, row in enumerate(rows):
        place = f"{field}, per_episode {index}"
        if not isinstance(row, list) or len(row) != len(EPISODE):
            raise ShapeError(f"{place} is not a list of {len(EPISODE)} numbers: {', '.join(EPISODE)}")
        for name, value in zip(EPISODE, row, strict=True):
            _whole(0)(f"{place}, {name}", value)
        one = dict(zip(EPISODE, row, strict=True))
        if one["seed"] != seeds[0] + index:
            raise ShapeError(f"{place}: seed is {one['seed']}, not {seeds[0] + index}")
        if one["scheduled"] != sum(row[3:]):
            raise ShapeError(f"{place}: {one['scheduled']} were scheduled, and {sum(row[3:])} are told of")
        ended += one["arrived"] + one["collided"] + one["removed"]
        arrived += one["arrived"]
    if block["vehicles"] != ended:
        raise ShapeError(f"{field}: vehicles is {block['vehicles']}, but {ended} ended in per_episode")
    success = block["success_rate"]
    told = None if not ended else arrived / ended
    if (success is None) != (told is None) or (told is not None and abs(success - told) > _TOLERANCE):
        raise ShapeError(f"{field}: success_rate is {_named(success)}, but per_episode makes it {_named(told)}")
