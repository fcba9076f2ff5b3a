"""Several files and the command line -> one tree: aliases of the learner's block, overrides, deep merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from opencda_marl.config_check import source_of
from opencda_marl.config_cross import looks_like_path
from opencda_marl.config_yaml import Document, Keys, Source, dump_scalar, parse_value
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.tables import Table
from opencda_marl.settings.learning import ALGORITHMS
from opencda_marl.settings.run import RunSettings

__all__ = ["Combined", "combine", "settings_class"]

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


@dataclasses.dataclass(frozen=True, slots=True)
class Combined:
    """One tree, the algorithm it is for, and what in it is for other algorithms."""

    document: Document
    algorithm: str | None  # None: there is no such algorithm, as one of the errors says
    others: Mapping[str, Document]  # algorithm -> {algorithm: block}
    errors: Sequence[ConfigError]  # what could not be merged; the rest was


def combine(documents: Sequence[Document], overrides: Sequence[str]) -> Combined:
    """Merge files (oldest parent first) and `key.sub=value` arguments, in this order.

    Nothing is raised: an argument that is not understood, an unknown algorithm and a block given twice stand in
    `errors`, so that they can be told together with what else is wrong.
    """
    errors: list[ConfigError] = []
    parsed = [_tried(errors, _parse_override, text) for text in overrides]
    arguments = [argument for argument in parsed if argument is not None]
    algorithm = _tried(errors, _algorithm, documents, arguments)
    others: dict[str, Document] = {}
    merged = Document({})
    for document in documents:
        _merge(merged, _canonical(document, algorithm, others, errors))
    _tried(errors, _refuse_both, arguments, algorithm)
    for argument in arguments:
        _merge(merged, _tried(errors, _alias_argument, argument, algorithm, others) or Document({}))
    if algorithm is None:
        merged.values.pop("algorithm", None)  # told already
    _resolve_paths(merged)
    return Combined(merged, algorithm, others, errors)


def _tried(
    errors: list[ConfigError],
    function: Callable[_Arguments, _Answer],
    *given: _Arguments.args,
    **named: _Arguments.kwargs,
) -> _Answer | None:
    """The function's answer; None: it raised, and `errors` holds what."""
    try:
        return function(*given, **named)
    except ConfigError as error:
        errors.append(error)
        return None


def settings_class(algorithm: str) -> type:
    """The settings class of an algorithm; a plug-in's learner carries its own as `Settings`.

    Raises:
        ConfigError: there is no such algorithm, or it brings no settings.
    """
    if algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    learner = _algorithms().load(algorithm)
    found = getattr(learner, "Settings", None)
    if not dataclasses.is_dataclass(found):
        raise ConfigError(
            f"the plug-in learner {algorithm!r} brings no settings",
            fix="give its class an attribute 'Settings', a frozen dataclass",
        )
    return cast("type", found)


def _algorithms() -> Table:
    return Table("learner", "opencda_marl.learners", dict.fromkeys(ALGORITHMS, ""), {})


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(_algorithms().targets())  # reads the metadata of every installed package


def _algorithm(documents: Sequence[Document], arguments: Iterable[Document]) -> str:
    for document in (*list(arguments)[::-1], *documents[::-1]):
        if "algorithm" in document.values:
            value = document.values["algorithm"]
            source = document.sources[("algorithm",)]
            if not isinstance(value, str):
                raise ConfigError(f"{source}: algorithm is text, not {dump_scalar(value)}", fix="e.g. pcmappo")
            return _algorithms().check(value, where=f"{source}: ")
    return RunSettings().algorithm


def _canonical(
    document: Document, algorithm: str | None, others: dict[str, Document], errors: list[ConfigError]
) -> Document:
    """The document with the algorithm's own block as `learner`; blocks of other algorithms go to `others`."""
    rest = Document(dict(document.values), dict(document.sources))
    for name in _names():
        if name not in rest.values:
            continue
        block = Document({name: rest.values.pop(name)}, {})
        for keys in [keys for keys in rest.sources if keys[0] == name]:
            block.sources[keys] = rest.sources.pop(keys)
        if name != algorithm:
            _merge(others.setdefault(name, Document({})), block)
            continue
        if "learner" in rest.values:
            errors.append(_both(block.sources[(name,)], name, f"'learner' in line {rest.sources[('learner',)].line}"))
        _merge(rest, _as_learner(block, name))
    return rest


def _as_learner(block: Document, name: str) -> Document:
    sources = {("learner", *keys[1:]): source for keys, source in block.sources.items()}
    return Document({"learner": block.values[name]}, sources)


def _both(source: Source, name: str, other: str) -> ConfigError:
    return ConfigError(
        f"{source}: {name!r} and 'learner' are the same block, and both are given ({other})",
        fix="keep one of the two names",
    )


def _parse_override(argument: str) -> Document:
    name, equals, text = argument.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(
            f"argument {argument!r} is not understood", fix="settings are given as key=value or key.sub=value"
        )
    if keys[0] == "extends":
        raise ConfigError(f"argument {argument!r}: 'extends' stands in files only", fix="use -t to choose a profile")
    value: Any = parse_value(text, argument)
    for key in reversed(keys):
        value = {key: value}
    source = Source(argument=argument)
    return Document(value, {keys[:depth]: source for depth in range(1, len(keys) + 1)})


def _refuse_both(arguments: Iterable[Document], algorithm: str | None) -> None:
    """`learner.x=1 pcmappo.y=2`: two names of one block on one command line."""
    given = {next(iter(argument.values)): next(iter(argument.sources.values())) for argument in arguments}
    if algorithm is not None and "learner" in given and algorithm in given:
        raise _both(given[algorithm], algorithm, str(given["learner"]))


def _alias_argument(argument: Document, algorithm: str | None, others: dict[str, Document]) -> Document:
    name = next(iter(argument.values))
    if name == algorithm:
        return _as_learner(argument, name)
    if name not in _names():
        return argument
    if algorithm is None:  # it may be the block of the algorithm that is meant: checked as it stands
        _merge(others.setdefault(name, Document({})), argument)
        return Document({})
    raise ConfigError(
        f"{argument.sources[(name,)]}: this run's algorithm is {algorithm}, so {name!r} would do nothing",
        fix=f"write {algorithm}.… or learner.…",
    )


def _merge(base: Document, extra: Document) -> None:
    """`extra` over `base`, in place: blocks key by key, everything else replaced."""
    for keys, source in extra.sources.items():
        if keys not in base.sources or not (_is_block(base.values, keys) and _is_block(extra.values, keys)):
            base.sources[keys] = source  # a block stays where it was first opened
    base.values = _merged(base.values, extra.values)


def _is_block(values: Any, keys: Keys) -> bool:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return isinstance(values, dict)


def _merged(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _resolve_paths(document: Document) -> None:
    """Paths are relative to the folder of the file that names them; on the command line, to where one is."""
    block = document.values.get("scenario")
    if not isinstance(block, dict):
        return
    for key in ("network", "map"):
        value = block.get(key)
        if not isinstance(value, str) or (key == "network" and not looks_like_path(value)):
            continue
        source = source_of(document.sources, ("scenario", key))
        base = source.file.parent if source is not None and source.file is not None else Path.cwd()
        block[key] = str((base / Path(value).expanduser()).resolve())
