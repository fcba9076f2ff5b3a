"""Every setting as a row: key, type, default, bounds, and the comment that stands beside it in settings/."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opencda_marl.config_check import Setting, describe_type, leaves, settings_of, to_tree
from opencda_marl.config_yaml import Keys, dump_scalar
from opencda_marl.settings.bounds import Between
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


def rows() -> list[Row]:
    """All settings, in the order of the classes."""
    defaults = to_tree(RunSettings())
    comments = dict(_comments(RunSettings, ()))
    found = []
    for keys, setting in leaves(RunSettings):
        value = defaults
        for key in keys:
            value = value[key]
        default = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else dump_scalar(value)
        found.append(Row(".".join(keys), _kind(setting), default, comments.get(keys, "")))
    return found


def markdown() -> str:
    """The table of docs/configuration.md: one for the run itself, one for each block."""
    tables: dict[str, list[Row]] = {}
    for row in rows():
        tables.setdefault(row.key.rpartition(".")[0], []).append(row)
    parts = []
    for block, members in tables.items():
        lines = [f"### `{block}`" if block else "### The run", ""]
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        lines += [f"| `{row.key}` | {row.kind} | `{row.default}` | {_cell(row.about)} |" for row in members]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


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


def _comments(cls: type, prefix: Keys) -> Iterator[tuple[Keys, str]]:
    """The comment at the end of each field's declaration."""
    source = textwrap.dedent(inspect.getsource(cls))
    notes = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    declared = {
        statement.target.id: statement
        for statement in body.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for key, setting in settings_of(cls).items():
        if setting.block is not None:
            yield from _comments(setting.block, (*prefix, key))
            continue
        statement = declared[setting.field]
        last = statement.end_lineno or statement.lineno
        about = " ".join(notes[line] for line in range(statement.lineno, last + 1) if line in notes)
        yield (*prefix, key), about


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(updated(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
