"""One YAML file -> plain values, and the file and line of each key.

YAML 1.2's words, not 1.1's: `yes` and `on` are text, `1e-3` is a number, `010` is ten. Refused, each with its line:
duplicate keys, tags, `${...}`, keys that are not text, several documents, aliases that contain themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from opencda_marl.core.errors import ConfigError

__all__ = ["Document", "Keys", "Source", "dump_scalar", "parse", "parse_value", "read"]

Keys = tuple[str, ...]
"""Where a value stands in the tree: ("learner", "epochs")."""

_MAX_BYTES: Final = 128 * 1024  # a profile has 5 kB
_MAX_VALUES: Final = 20_000  # aliases of aliases grow exponentially
_MAX_DEPTH: Final = 20
_MAX_NUMBER: Final = 100  # characters

_TAG: Final = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value was written: a line of a file, or an argument of the command line."""

    file: Path | None = None
    line: int = 0
    argument: str = ""

    def __str__(self) -> str:
        if self.file is None:
            return f"argument {self.argument!r}"
        here = Path.cwd()
        return f"{self.file.relative_to(here) if self.file.is_relative_to(here) else self.file}:{self.line}"


@dataclass(slots=True)
class Document:
    """A file's values and where each key stands."""

    values: dict[str, Any]
    sources: dict[Keys, Source] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """The safe loader's reader, parser and composer with YAML 1.2's core words."""

    # a class attribute of its own: the parent's table is shared by every user of PyYAML
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own interface


for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        _TAG + _kind, re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


class _Builder:
    """Walks a file's nodes once; fails at the first thing that is not plain."""

    def __init__(self, file: Path | None, argument: str) -> None:
        self._file = file
        self._argument = argument
        self._left = _MAX_VALUES
        self._open: set[int] = set()
        self.sources: dict[Keys, Source] = {}

    def source(self, node: yaml.Node) -> Source:
        return Source(self._file, node.start_mark.line + 1, self._argument)

    def fail(self, node: yaml.Node, message: str, fix: str) -> ConfigError:
        return ConfigError(f"{self.source(node)}: {message}", fix=fix)

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        self._left -= 1
        if self._left < 0 or len(keys) > _MAX_DEPTH:
            raise self.fail(node, "too many or too deeply nested values", "a profile holds a few dozen settings")
        if id(node) in self._open:
            raise self.fail(node, "an alias contains itself", "write the block out")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, keys)
            if isinstance(node, yaml.SequenceNode):
                self._plain_tag(node, "seq")
                return [self.value(item, (*keys, str(i))) for i, item in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._open.discard(id(node))

    def _plain_tag(self, node: yaml.Node, *kinds: str) -> str:
        kind = str(node.tag).removeprefix(_TAG)
        if kind not in kinds:
            raise self.fail(node, f"the tag {node.tag!r} is not used in profiles", "write a plain value")
        return kind

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        self._plain_tag(node, "map")
        merges = [block for key, block in node.value if key.tag == f"{_TAG}merge"]
        values = self._merged(merges, keys)
        seen: dict[str, Source] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self._key(key_node)
            if key in seen:
                raise self.fail(
                    key_node, f"the key {key!r} stands twice (first in line {seen[key].line})", "keep one of the two"
                )
            seen[key] = self.sources[(*keys, key)] = self.source(key_node)
            values[key] = self.value(value_node, (*keys, key))
        return values

    def _merged(self, merges: list[yaml.Node], keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for merge in merges:
            blocks = merge.value if isinstance(merge, yaml.SequenceNode) else [merge]
            for block in reversed(blocks):  # the first one named wins
                if not isinstance(block, yaml.MappingNode):
                    raise self.fail(block, "'<<' takes the alias of a block", "e.g. '<<: *common'")
                values.update(self.value(block, keys))
        return values

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != f"{_TAG}str":
            shown = node.value if isinstance(node, yaml.ScalarNode) else "a block"
            raise self.fail(node, f"the key {shown!r} is not text", "keys are names of settings")
        self._no_interpolation(node)
        return str(node.value)

    def _no_interpolation(self, node: yaml.ScalarNode) -> None:
        if "${" in node.value:
            raise self.fail(
                node,
                f"{node.value!r}: '${{...}}' is not filled in here",
                "write the value, or give it on the command line as key=value",
            )

    def _scalar(self, node: yaml.Node) -> Any:
        assert isinstance(node, yaml.ScalarNode)
        kind = self._plain_tag(node, "str", "bool", "int", "float", "null")
        text = str(node.value)
        self._no_interpolation(node)
        if kind == "str":
            if "\0" in text:
                raise self.fail(node, "a text with a null character", "remove it")
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        try:
            return _number(text, kind)
        except ValueError:
            raise self.fail(node, f"{text[:40]!r} is not a number", "write a plain number") from None


def _number(text: str, kind: str) -> int | float:
    if len(text) > _MAX_NUMBER:
        raise ValueError
    if kind == "float":
        return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)  # YAML writes .inf and .nan
    bare = text.lstrip("+-")
    base = {"0o": 8, "0x": 16}.get(bare[:2], 10)
    return int(text, base)


def read(file: Path) -> Document:
    """A profile file's values.

    Raises:
        ConfigError: unreadable, not UTF-8, too large, or not plain YAML; with file and line.
    """
    try:
        if not file.is_file():
            raise ConfigError(f"{file} is not a file", fix="name a YAML file")
        with file.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", fix="check the file's permissions") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{file} has more than {_MAX_BYTES // 1024} kB: that is no profile", fix="name a profile")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{Source(file, line)}: not UTF-8 text", fix="save the file as UTF-8") from error
    return parse(text, file)


def parse(text: str, file: Path) -> Document:
    """A profile's values from its text.

    Args:
        text: YAML.
        file: named in errors.

    Raises:
        ConfigError: not plain YAML, empty, or not a block of settings; with file and line.
    """
    node, builder = _compose(text, file, "")
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null"):
        raise ConfigError(f"{Source(file, 1)}: the file is empty", fix="a profile needs at least 'algorithm: mappo'")
    if isinstance(node, yaml.SequenceNode):
        raise builder.fail(node, "a list, not a block of settings", "write 'key: value' lines, without '- '")
    if not isinstance(node, yaml.MappingNode):
        raise builder.fail(node, "not a block of settings", "write 'key: value' lines")
    values = builder.value(node, ())
    return Document(values, builder.sources)


def parse_value(text: str, argument: str) -> Any:
    """The right side of `key=value`: a YAML scalar or list.

    Raises:
        ConfigError: not a scalar or list; names the argument.
    """
    node, builder = _compose(text, None, argument)
    if node is None or not text.strip():
        raise ConfigError(
            f"{Source(argument=argument)} has no value", fix=f"write {argument}VALUE, or {argument}null for nothing"
        )
    if isinstance(node, yaml.MappingNode):
        raise builder.fail(node, "a value is a scalar or a list", "give each key of a block apart: key.sub=value")
    return builder.value(node, ())


def _compose(text: str, file: Path | None, argument: str) -> tuple[yaml.Node | None, _Builder]:
    where = argument and str(Source(argument=argument))
    try:
        loader = _Loader(text)
        return loader.get_single_node(), _Builder(file, argument)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        fix = "check the indentation and the quotes there"
        if error.problem and "'\\t'" in error.problem:
            fix = "indent with spaces, not with tabs"
        elif error.problem and "single document" in (error.context or ""):
            fix = "a profile is one document: remove '---' and what follows"
        raise ConfigError(f"{where or Source(file, line)}: not valid YAML: {error.problem}", fix=fix) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(
            f"{where or Source(file, line)}: not text: {error.reason}", fix="use a text editor"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where or Source(file, 1)}: nested too deeply", fix="write a flat list") from error


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same value."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_WORD = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")


def dump_scalar(value: Any) -> str:
    """A value as one line of YAML that reads back as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(dump_scalar(item) for item in value) + "]"
    if isinstance(value, str):
        if _WORD.fullmatch(value) and parse_value(value, "") == value:
            return value
        text = yaml.dump(value, Dumper=_Dumper, default_style='"', allow_unicode=True, width=10**9)
        return str(text).removesuffix("\n")
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    # 1e-05 is a number in YAML 1.2 and text in 1.1, which most readers still follow
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text
