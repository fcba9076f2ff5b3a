"""A profile (YAML) -> one validated tree of settings, with file and line of each value.

A profile is named by its path under a config root, without `.yaml`; `extends:` names at most one parent there. Merging
is deep, lists are replaced. `learner:` is the active algorithm's block; the algorithm's own name is an alias of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opencda_marl.config_check import check, examine, examine_block, report, to_tree
from opencda_marl.config_cross import Problem
from opencda_marl.config_files import bundled_root, chain, export_root, find_root, list_profiles
from opencda_marl.config_merge import Combined, combine, settings_class
from opencda_marl.config_yaml import Keys, Source, dump_scalar, parse
from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.core.files import read_regular
from opencda_marl.core.tables import Table
from opencda_marl.settings.run import RunSettings

__all__ = [
    "BUDGETS",
    "DISPLAY",
    "PLACE",
    "Profile",
    "bundled_root",
    "changes",
    "check",
    "computed",
    "config_hash",
    "export_root",
    "from_run_folder",
    "from_yaml",
    "list_profiles",
    "load_profile",
    "require_budget",
    "to_yaml",
]

BUDGETS = ("max_episodes", "max_env_steps", "max_minutes")
"""The first one reached ends a run; they may change when it is resumed."""

DISPLAY = ("evaluation.final", "simulator.gui", "worker_timeout")
"""What is shown, during and after, and patience: no influence on what is learned; may change when a run is resumed."""

PLACE = ("carla.host", "carla.port")
"""Where the server is: likewise."""

_PATHS = ("scenario.network", "scenario.map")

_LATER = {"learner.saturation_penalty": 0.0, "learner.greedy_quantile": 0.5}
"""Settings that came later than the first results, and the value with which everything is as it was."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile's settings, and where they come from."""

    settings: RunSettings
    name: str
    root: Path
    sources: Mapping[Keys, Source] = field(default_factory=dict)  # what is not here is a default
    ignored: tuple[str, ...] = ()  # blocks of other algorithms, one line each


def load_profile(
    name: str,
    *,
    config_root: Path | None = None,
    overrides: Sequence[str] = (),
    tables: Mapping[str, Table] | None = None,
) -> Profile:
    """A profile, its parents, and the command line's `key.sub=value` on top.

    Args:
        name: path under the config root, without `.yaml`.
        config_root: folder of profiles; None: the bundled one.
        overrides: each a YAML scalar or list for one key.
        tables: key -> table that its value (or each of its names) must be in.

    Raises:
        ConfigError: before anything is started, naming key, file, line and what to do.
    """
    root = find_root(config_root)
    combined = combine(chain(name, root), overrides)
    settings = _settle(combined, where=f"profile {name}", tables=tables or {})
    ignored = [
        f"{block.sources[(other,)]}: the block {other!r} is another algorithm's (this run: "
        f"{combined.algorithm}); checked and ignored"
        for other, block in combined.others.items()
    ]
    plain = (root / name).relative_to(root).as_posix().removesuffix(".yaml")
    return Profile(settings, plain, root, combined.document.sources, tuple(ignored))


def _settle(
    combined: Combined,
    *,
    where: str,
    tables: Mapping[str, Table],
    merge_defaults: bool = True,
    files: bool = True,
) -> RunSettings:
    """The settings of a tree, or one error for all that is wrong with it."""
    document, errors = combined.document, list(combined.errors)
    sources = dict(document.sources)
    learner = _class_of(combined.algorithm, errors)
    settings, problems = examine(document.values, learner=learner, merge_defaults=merge_defaults, files=files)
    problems += _wrong_names(document.values if settings is None else to_tree(settings), tables)
    for other, block in combined.others.items():
        sources |= block.sources
        cls = _class_of(other, errors)
        if cls is not None:
            problems += examine_block(cls, block.values[other], (other,))[1]
    if settings is None or problems or errors:
        raise report(problems, sources, where, first=errors, last=combined.others.keys())
    return settings


def _class_of(algorithm: str | None, errors: list[ConfigError]) -> type | None:
    """The settings class of an algorithm; None: there is none, and `errors` says why."""
    try:
        return None if algorithm is None else settings_class(algorithm)
    except ConfigError as error:
        errors.append(error)
        return None


def require_budget(settings: RunSettings) -> None:
    """A run that never ends is refused.

    Raises:
        ConfigError: none of the budgets is set.
    """
    if settings.max_episodes is None and settings.max_env_steps is None and settings.max_minutes is None:
        raise ConfigError(
            "the run has no budget: it would never end", fix=f"set one of {', '.join(BUDGETS)}, e.g. max_minutes=10"
        )


def to_yaml(settings: RunSettings, sources: Mapping[Keys, Source] | None = None) -> str:
    """Every setting, as a profile that reads back as the same settings.

    Args:
        settings: to write out.
        sources: when given, a comment says where each value comes from; the rest are defaults.
    """
    return "\n".join(_lines(to_tree(settings), (), sources)) + "\n"


def from_yaml(text: str, *, file: Path | None = None, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings that `to_yaml` wrote.

    Args:
        text: a whole tree; what is missing takes its default.
        file: named in errors.
        overrides: `key.sub=value`.

    Raises:
        ConfigError: as `load_profile`; network files need not exist.
    """
    combined = combine([parse(text, file or Path("config.yaml"))], overrides)
    return _settle(combined, where="the settings", tables={}, merge_defaults=False, files=False)


def from_run_folder(folder: Path, *, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings that a run was started with; `folder` may also be one of its checkpoints.

    Raises:
        CheckpointError: the folder has no readable config.
        ConfigError: its config, or an override, is not valid.
    """
    file = folder / "config.yaml"
    try:
        text = read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{folder} is not a run folder: config.yaml cannot be read", fix="see what there is: opencda-marl runs list"
        ) from error
    return from_yaml(text, file=file, overrides=overrides)


def config_hash(settings: RunSettings) -> str:
    """What is computed, in 16 hex digits: network files by their content; budgets, display, place left out.

    A setting that came later than the first results is left out, too, while it switches nothing on: so a run keeps its
    name, and nothing that is finished begins again.
    """
    flat = computed(settings)
    for key in _PATHS:
        if flat[key] is not None and Path(flat[key]).is_file():
            flat[key] = hashlib.sha256(Path(flat[key]).read_bytes()).hexdigest()
    if flat["demand.ramp_episodes"] == 0:
        del flat["demand.ramp_episodes"], flat["demand.ramp_from"]
    for key, nothing in _LATER.items():
        if flat.get(key) == nothing:
            del flat[key]
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]


def computed(settings: RunSettings) -> dict[str, Any]:
    """`learner.epochs` -> its value, of all settings that decide what is computed; budgets, display, place left out."""
    flat = {".".join(keys): value for keys, value in _flat(to_tree(settings), ())}
    return {key: value for key, value in flat.items() if key not in (*BUDGETS, *DISPLAY, *PLACE)}


def changes(old: RunSettings, new: RunSettings) -> list[str]:
    """Keys that differ, budgets, display and the server's place left out: what a resumed run may not change."""
    before, after = (dict(_flat(to_tree(one), ())) for one in (old, new))
    names = {".".join(keys) for keys in before.keys() | after.keys() if before.get(keys) != after.get(keys)}
    return sorted(names - {*BUDGETS, *DISPLAY, *PLACE})


def _wrong_names(tree: Mapping[str, Any], tables: Mapping[str, Table]) -> Iterator[Problem]:
    """Names that no table holds; what is no name at all is the types' business."""
    flat = dict(_flat(tree, ()))
    for key, table in tables.items():
        keys = tuple(key.split("."))
        named = {path: value for path, value in flat.items() if path[: len(keys)] == keys}
        for path, value in named.items():
            # a block of free names (`reward.weights.delay`), a list of names, or one name
            names = [path[len(keys)]] if len(path) > len(keys) else value if isinstance(value, list) else [value]
            for name in names:
                if isinstance(name, str) and (wrong := _unknown_name(table, name)) is not None:
                    yield Problem(path, f"{key}: {wrong.message}", wrong.fix or "")


def _unknown_name(table: Table, name: str) -> ConfigError | None:
    try:
        table.check(name)
    except ConfigError as error:
        return error
    return None


def _flat(tree: Mapping[str, Any], keys: Keys) -> Iterator[tuple[Keys, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, (*keys, key))
        else:
            yield (*keys, key), value


def _lines(tree: Mapping[str, Any], keys: Keys, sources: Mapping[Keys, Source] | None) -> Iterator[str]:
    indent = "  " * len(keys)
    for key, value in tree.items():
        path = (*keys, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{dump_scalar(key)}:"
            yield from _lines(value, path, sources)
            continue
        source = None if sources is None else sources.get(path)
        note = f"  # {source}" if source else ""
        yield f"{indent}{dump_scalar(key)}: {dump_scalar(value) if value != {} else '{}'}{note}"
