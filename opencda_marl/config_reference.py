"""Every setting as a row: key, type, default, bounds, and the comment that stands beside it in settings/.

Settings of learners inherit: a row belongs to the class that declares the field first, and to all algorithms whose
settings have it from there; where their defaults differ, each stands with its algorithms.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from opencda_marl.config_check import Setting, describe_type, settings_of, to_tree
from opencda_marl.config_yaml import Keys, dump_scalar
from opencda_marl.settings.bounds import Between
from opencda_marl.settings.learning import ALGORITHMS
from opencda_marl.settings.run import RunSettings

__all__ = ["Row", "markdown", "rows", "updated"]

_BEGIN, _END = "<!-- settings: begin -->", "<!-- settings: end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """One setting."""

    key: str
    kind: str
    default: str
    about: str  # with the unit
    algorithms: tuple[str, ...] = ()  # whose setting it is; (): it is no learner's


def rows() -> list[Row]:
    """All settings, in the order of the classes."""
    return [row for _, _, found in _tables() for row in found]


def markdown() -> str:
    """The table of docs/configuration.md: one for the run itself, one for each block, in `learner` one per class."""
    parts = []
    for heading, about, found in _tables():
        lines = [heading, "", *([about, ""] if about else [])]
        if found:
            lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
            lines += [f"| `{row.key}` | {row.kind} | `{row.default}` | {_cell(row.about)} |" for row in found]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


_Table = tuple[str, str, list[Row]]
"""Heading, words below it, rows."""


def _tables() -> list[_Table]:
    tables: dict[str, _Table] = {"": ("### The run", "", [])}
    defaults = to_tree(RunSettings())
    for key, setting in settings_of(RunSettings).items():
        if key == "learner":
            tables[key] = ("### `learner`", "The block of the algorithm that runs; its own name is an alias.", [])
            tables |= {f"{key} {i}": table for i, table in enumerate(_learners())}
        elif setting.block is None:
            tables[""][2].append(_row((key,), setting, defaults[key], RunSettings))
        else:
            _block(tables, setting.block, (key,), defaults[key])
    return list(tables.values())


def _block(tables: dict[str, _Table], cls: type, keys: Keys, defaults: dict[str, Any]) -> None:
    name = ".".join(keys)
    found: list[Row] = []
    tables[name] = (f"### `{name}`", "", found)
    for key, setting in settings_of(cls).items():
        if setting.block is None:
            found.append(_row((*keys, key), setting, defaults[key], cls))
        else:
            _block(tables, setting.block, (*keys, key), defaults[key])


def _row(keys: Keys, setting: Setting, default: Any, cls: type) -> Row:
    return Row(".".join(keys), _kind(setting), _shown(default), _comments(cls)[setting.field])


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return dump_scalar(value)
    return ", ".join(f"{key}: {dump_scalar(item)}" for key, item in value.items()) or "{}"


def _learners() -> list[_Table]:
    """A table for each class among the algorithms' settings that declares something."""
    tables: dict[type, _Table] = {}
    for cls in dict.fromkeys(part for own in ALGORITHMS.values() for part in reversed(own.__mro__)):
        algorithms = tuple(name for name, own in ALGORITHMS.items() if issubclass(own, cls))
        inherited = {field for parent in cls.__mro__[1:] for field in _comments(parent)}
        new = [item for item in _settings_declared(cls) if item.field not in inherited]
        if new:
            found = [_learners_row(item, cls, algorithms) for item in new]
            title = re.split(r"[.;\n]", inspect.getdoc(cls) or cls.__name__)[0]
            tables[cls] = (f"#### {title}", "For " + ", ".join(f"`{name}`" for name in algorithms) + ".", found)
    return list(tables.values())


def _settings_declared(cls: type) -> list[Setting]:
    declared = _comments(cls)
    return [item for item in settings_of(cls).values() if item.field in declared] if declared else []


def _learners_row(setting: Setting, cls: type, algorithms: tuple[str, ...]) -> Row:
    """One setting of several algorithms."""
    values: dict[str, list[str]] = {}
    for name in algorithms:
        values.setdefault(_shown(getattr(ALGORITHMS[name](), setting.field)), []).append(name)
    alike = len(values) == 1
    default = "; ".join(shown if alike else f"{shown} ({', '.join(names)})" for shown, names in values.items())
    return Row(f"learner.{setting.key}", _kind(setting), default, _comments(cls)[setting.field], algorithms)


def updated(page: str) -> str:
    """A page whose part between the two marks is the table as it should be.

    Raises:
        ValueError: the marks are not there.
    """
    before, _, rest = page.partition(_BEGIN)
    _, mark, after = rest.partition(_END)
    if not mark:
        raise ValueError(f"the page has no {_BEGIN} … {_END}")
    return f"{before}{_BEGIN}\n\n{markdown()}\n{_END}{after}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _kind(setting: Setting) -> str:
    kind = describe_type(setting.hint)
    bounds = setting.bounds
    if bounds is None:
        return kind
    return f"{kind}, {_interval(bounds)}" if _interval(bounds) else kind


def _interval(bounds: Between) -> str:
    if bounds.low is not None and bounds.high is not None:
        return f"{'above ' if bounds.open_low else ''}{bounds.low} to {bounds.high}"
    if bounds.low is not None:
        return f"above {bounds.low}" if bounds.open_low else f"from {bounds.low}"
    return "" if bounds.high is None else f"up to {bounds.high}"


@lru_cache(maxsize=64)
def _comments(cls: type) -> dict[str, str]:
    """The comment at the end of the declaration of each field that the class itself declares."""
    if not dataclasses.is_dataclass(cls):
        return {}
    source = textwrap.dedent(inspect.getsource(cls))
    notes = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.end_lineno or statement.lineno
            about = " ".join(notes[line] for line in range(statement.lineno, last + 1) if line in notes)
            found[statement.target.id] = about
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(updated(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
