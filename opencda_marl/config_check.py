"""A tree of plain values -> `RunSettings`, or an error that names every wrong value and where it stands."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from opencda_marl.config_cross import Problem, cross_check
from opencda_marl.config_yaml import Keys, Source, dump_scalar
from opencda_marl.core.errors import ConfigError
from opencda_marl.settings.bounds import Between
from opencda_marl.settings.learning import ALGORITHMS
from opencda_marl.settings.networks import LearnerSettings
from opencda_marl.settings.run import RunSettings

__all__ = [
    "Setting",
    "build",
    "check",
    "describe_type",
    "examine",
    "examine_block",
    "leaves",
    "report",
    "settings_of",
    "source_of",
    "to_tree",
    "yaml_key",
]

_Settings = TypeVar("_Settings")

_TOLD = 30  # mistakes in one message; more are only counted

_LARGEST = 2**53  # of whole numbers without a bound: beyond it floats, which share them out, are no longer exact

_YAML_KEYS = {"individual_weight": "lambda"}  # a word of Python that cannot be a field


def yaml_key(field: str) -> str:
    """The name of a field in a profile."""
    return _YAML_KEYS.get(field, field)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A field of a settings class."""

    key: str  # in YAML
    field: str
    hint: Any  # its type without `Annotated`
    bounds: Between | None
    block: type | None  # the settings class, where the field is a block


@lru_cache(maxsize=64)
def settings_of(cls: type) -> dict[str, Setting]:
    """The fields of a settings class by their key in YAML."""
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Setting] = {}
    for item in dataclasses.fields(cls):
        hint, bounds = hints[item.name], None
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            bounds = next((note for note in notes if isinstance(note, Between)), None)
        block = hint if dataclasses.is_dataclass(hint) else None
        key = yaml_key(item.name)
        found[key] = Setting(key, item.name, hint, bounds, cast("type | None", block))
    return found


def leaves(cls: type, prefix: Keys = (), *, learner: type | None = None) -> Iterator[tuple[Keys, Setting]]:
    """Every setting below a class that is not itself a block, with its full path.

    Args:
        cls: settings class.
        prefix: where it stands.
        learner: settings class of the algorithm, for the block that is each algorithm's own; None: that one is empty.
    """
    for key, setting in settings_of(cls).items():
        if setting.block is None:
            yield (*prefix, key), setting
        else:
            block = learner if setting.block is LearnerSettings and learner is not None else setting.block
            yield from leaves(block, (*prefix, key), learner=learner)


def source_of(sources: Mapping[Keys, Source], keys: Keys) -> Source | None:
    """Where a value, or the nearest block around it, was written; None: it is a default."""
    while keys:
        if keys in sources:
            return sources[keys]
        keys = keys[:-1]
    return None


def describe_type(hint: Any) -> str:
    """An annotation in words: 'a whole number or null'."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        names = ", ".join(dump_scalar(value) for value in get_args(hint))
        return f"one of {names}" if len(get_args(hint)) > 1 else names
    if get_origin(hint) is list:
        plural = {int: "whole numbers", float: "numbers", str: "names"}
        return f"a list of {plural[get_args(hint)[0]]}"
    if get_origin(hint) is dict:
        return f"a block of 'name: {describe_type(get_args(hint)[1]).removeprefix('a ')}' lines"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    return words.get(hint, "a block of settings")


def build(
    tree: Mapping[str, Any],
    sources: Mapping[Keys, Source],
    *,
    learner: type,
    merge_defaults: bool = True,
    files: bool = True,
    where: str = "the settings",
) -> RunSettings:
    """One validated run; arguments as `examine`.

    Raises:
        ConfigError: every unknown key, wrong type and value out of range, each with where it stands.
    """
    settings, problems = examine(tree, learner=learner, merge_defaults=merge_defaults, files=files)
    if settings is None or problems:
        raise report(problems, sources, where)
    return settings


def examine(
    tree: Mapping[str, Any], *, learner: type | None, merge_defaults: bool = True, files: bool = True
) -> tuple[RunSettings | None, list[Problem]]:
    """Everything that is wrong with a run's values; what settings mean together only where each is right by itself.

    Args:
        tree: plain values, with the learner's block under `learner`.
        learner: settings class of the algorithm; None: it is unknown, and its block cannot be checked.
        merge_defaults: blocks of free names (`reward.weights`) start from their defaults.
        files: networks and maps must exist (not so for a finished run that is only looked at).

    Returns:
        the settings (None where they cannot be made), what is wrong with them.
    """
    rest = {key: value for key, value in tree.items() if key != "learner"}
    settings, problems = _examined(RunSettings, rest, (), learner=learner, merge_defaults=merge_defaults)
    if learner is None:
        return None, problems
    inner, wrong = examine_block(learner, tree.get("learner", {}), ("learner",), merge_defaults=merge_defaults)
    problems += wrong
    if settings is None or inner is None:
        return None, problems
    settings = dataclasses.replace(settings, learner=inner)
    return settings, problems or cross_check(settings, files=files)


def examine_block(cls: type, tree: Any, keys: Keys, *, merge_defaults: bool = True) -> tuple[Any, list[Problem]]:
    """A learner's block by itself, and everything that is wrong with it.

    Args:
        cls: its settings class.
        tree: plain values.
        keys: where it stands.
        merge_defaults: as `examine`.
    """
    if isinstance(tree, dict):
        return _examined(cls, tree, keys, learner=cls, merge_defaults=merge_defaults)
    return None, [_wrong_block(keys, tree)]


def _examined(
    cls: type[_Settings], tree: Mapping[str, Any], keys: Keys, *, learner: type | None, merge_defaults: bool
) -> tuple[_Settings | None, list[Problem]]:
    """Unknown keys, types and bounds, all in one go."""
    problems: list[Problem] = []
    clean = _known(cls, tree, keys, problems, learner=learner, merge_defaults=merge_defaults)
    made = _typed(cls, clean, keys, problems)
    told = {problem.keys for problem in problems}
    problems += [problem for problem in _out_of_bounds(cls, clean, keys) if problem.keys not in told]
    return made, problems


def check(settings: RunSettings) -> None:
    """Hold settings that were made in Python to the same rules as a profile.

    Raises:
        ConfigError: as `build`.
    """
    build(to_tree(settings), {}, learner=type(settings.learner), merge_defaults=False)


def to_tree(settings: Any) -> dict[str, Any]:
    """Plain values under their YAML keys."""
    tree: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        tree[yaml_key(item.name)] = to_tree(value) if dataclasses.is_dataclass(value) else value
    return tree


def _wrong_block(keys: Keys, value: Any) -> Problem:
    name = ".".join(keys)
    if value is None:
        return Problem(keys, f"{name} is an empty block", "put settings below it, or remove the line")
    return Problem(keys, f"{name} is a block of settings, not {_shown(value)}", f"e.g. {_example(keys)}")


def _example(keys: Keys) -> str:
    return f"'{keys[-1]}:' and below it, indented, 'key: value' lines"


def _known(
    cls: type,
    tree: Mapping[str, Any],
    keys: Keys,
    problems: list[Problem],
    *,
    learner: type | None,
    merge_defaults: bool,
) -> dict[str, Any]:
    """The tree under field names, without unknown keys (each a problem)."""
    known = settings_of(cls)
    clean: dict[str, Any] = {}
    for key, value in tree.items():
        setting = known.get(key)
        path = (*keys, key)
        if setting is None:
            problems.append(_unknown(path, known, learner))
        elif setting.block is not None:
            if isinstance(value, dict):
                clean[setting.field] = _known(
                    setting.block, value, path, problems, learner=learner, merge_defaults=merge_defaults
                )
            else:
                problems.append(_wrong_block(path, value))
        elif get_origin(setting.hint) is dict and isinstance(value, dict) and merge_defaults:
            clean[setting.field] = {**_default(cls, setting.field), **value}
        else:
            clean[setting.field] = value
    return clean


def _default(cls: type, field: str) -> dict[str, Any]:
    factory = next(item.default_factory for item in dataclasses.fields(cls) if item.name == field)
    return cast("Callable[[], dict[str, Any]]", factory)()


def _unknown(path: Keys, known: Mapping[str, Setting], learner: type | None) -> Problem:
    """A key that is not among the `known` ones of its block, in a run whose learner has these settings."""
    name, key = ".".join(path), path[-1]
    here = ".".join(path[:-1])
    message = f"unknown key {name!r}"
    if "." in key:
        return Problem(path, message, "nest it: one level of indentation for each part of the name")
    if key in _YAML_KEYS:
        return Problem(path, message, f"did you mean {'.'.join((*path[:-1], _YAML_KEYS[key]))!r}?")
    elsewhere = [".".join(keys) for keys, _ in leaves(RunSettings, learner=learner) if keys[-1] == key]
    if elsewhere:
        return Problem(path, message, f"did you mean {' or '.join(repr(one) for one in elsewhere[:3])}?")
    algorithms: Mapping[str, type] = ALGORITHMS
    owners = [algorithm for algorithm, cls in algorithms.items() if key in settings_of(cls)]
    if owners:
        return Problem(path, message, f"only {', '.join(owners)} have it: remove it, or choose one of them")
    # an algorithm's own name is an alias of `learner` at the top
    near = difflib.get_close_matches(key, [*known, *(ALGORITHMS if len(path) == 1 else ())], n=1)
    if near:
        return Problem(path, message, f"did you mean {'.'.join((*path[:-1], near[0]))!r}?")
    return Problem(path, message, f"known{f' in {here}' if here else ''}: {', '.join(known)}")


def _typed(cls: type[_Settings], tree: dict[str, Any], keys: Keys, problems: list[Problem]) -> _Settings | None:
    try:
        return cast("_Settings", _adapter(cast("type", cls)).validate_json(json.dumps(tree), strict=True))
    except ValidationError as error:
        seen: set[Keys] = set()
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            found = _wrong_type(cls, tree, keys, tuple(str(part) for part in item["loc"]))
            if found.keys not in seen:
                seen.add(found.keys)
                problems.append(found)
    return None


@lru_cache(maxsize=64)
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _wrong_type(cls: type, tree: dict[str, Any], keys: Keys, loc: Keys) -> Problem:
    """The setting that pydantic complains about: the union's branches in `loc` are dropped."""
    fields = {setting.field: setting for setting in settings_of(cls).values()}
    setting = fields[loc[0]]
    path = (*keys, setting.key)
    value = tree[setting.field]
    if setting.block is not None and isinstance(value, dict):
        return _wrong_type(setting.block, value, path, loc[1:])
    if get_origin(setting.hint) is dict and isinstance(value, dict) and len(loc) > 1:
        path, value = (*path, loc[1]), value[loc[1]]
        wanted = describe_type(get_args(setting.hint)[1])
        return Problem(path, f"{'.'.join(path)} is {wanted}, not {_shown(value)}", f"write {wanted}")
    wanted = describe_type(setting.hint)
    return Problem(path, f"{'.'.join(path)} is {wanted}, not {_shown(value)}", _type_fix(setting.hint, value))


def _type_fix(hint: Any, value: Any) -> str:
    options = get_args(hint) if get_origin(hint) is Literal else ()
    near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
    if near:
        return f"did you mean {near[0]}?"
    if hint is bool and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f"write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if isinstance(value, str) and hint in (int, float) and value.replace(".", "", 1).isdigit():
        return "remove the quotes"
    return f"write {describe_type(hint)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a block of settings"
    text = f'"{value}"' if isinstance(value, str) else dump_scalar(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _out_of_bounds(cls: type, tree: Mapping[str, Any], keys: Keys) -> Iterator[Problem]:
    """Numbers outside their bounds in a tree under field names; what is no number is the types' business."""
    for setting in settings_of(cls).values():
        value = tree.get(setting.field)
        path = (*keys, setting.key)
        if setting.block is not None:
            if isinstance(value, dict):
                yield from _out_of_bounds(setting.block, value, path)
            continue
        bounds = setting.bounds or Between()
        named = {(*path, key): item for key, item in value.items()} if isinstance(value, dict) else {path: value}
        for place, item in named.items():
            for name, number in _numbers(item, ".".join(place)):
                text = _wanted(number, bounds)
                if text:
                    yield Problem(place, f"{name} is {_shown(number)}; it must be {text}", f"write {text}")


def _wanted(number: float, bounds: Between) -> str:
    """What a number must be that is not allowed; empty: it is."""
    if isinstance(number, int):
        if bounds.high is None and abs(number) > _LARGEST:
            return f"at most {_LARGEST}"
    elif not math.isfinite(number):
        return "a finite number"
    return "" if _inside(number, bounds) else _interval(bounds)


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(item, f"{name}[{i}]")


def _inside(number: float, bounds: Between) -> bool:
    if bounds.low is not None and (number < bounds.low or (bounds.open_low and number == bounds.low)):
        return False
    return bounds.high is None or number <= bounds.high


def _interval(bounds: Between) -> str:
    low, high = bounds.low, bounds.high
    if low is None:
        return f"at most {high}" if high is not None else "a finite number"
    if high is None:
        return f"{'above' if bounds.open_low else 'at least'} {low}"
    return f"above {low} and at most {high}" if bounds.open_low else f"between {low} and {high}"


def report(
    problems: Sequence[Problem],
    sources: Mapping[Keys, Source],
    where: str,
    *,
    first: Sequence[ConfigError] = (),
    last: Collection[str] = (),
) -> ConfigError:
    """One error for all problems, in the order of the files' lines.

    Args:
        problems: at least one, or one in `first`.
        sources: where values were written.
        where: named where no file gave the value.
        first: errors that say themselves where they are; told before the others.
        last: blocks whose problems come behind all others.
    """

    def place(problem: Problem) -> tuple[bool, int, str, int]:
        source = source_of(sources, problem.keys)
        behind = problem.keys[0] in last
        return (behind, 1, "", 0) if source is None else (behind, 0, str(source.file or ""), source.line)

    told = [(error.message, error.fix or "") for error in first]
    ordered = sorted(problems, key=place)
    told += [(f"{source_of(sources, one.keys) or where}: {one.message}", one.fix) for one in ordered]
    if len(told) == 1:
        return ConfigError(told[0][0], fix=told[0][1])
    listed = [f"{line}\n      {fix}" for line, fix in told]
    tail = [f"and {len(listed) - _TOLD} more"] if len(listed) > _TOLD else []
    return ConfigError(
        f"{len(listed)} settings are wrong\n    " + "\n    ".join(listed[:_TOLD] + tail),
        fix="correct each; 'opencda-marl config reference' lists what can be set",
    )
