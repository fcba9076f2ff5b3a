"""The page on the architecture names every module, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "opencda_marl"
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")

_ROOMS = (
    "core",
    "settings",
    "simulators",
    "env",
    "learners",
    "nn",
    "tools",
    "launch",
    "policies",
    "benchmark",
    "standin",
)


def _sections() -> dict[str, str]:
    """Room -> its table."""
    found = re.findall(r"^\| module of `(\w+)/` .*\n((?:\|.*\n)+)", TEXT, re.M)
    return dict(found)


def _named(table: str) -> set[str]:
    return {name for row in table.splitlines() for name in re.findall(r"`(\w+\.(?:py|cpp))`", row.split("|")[1])}


def _files(folder: Path) -> set[str]:
    return {file.name for kind in ("*.py", "*.cpp") for file in folder.glob(kind) if file.name != "__init__.py"}


def test_every_module_of_a_room_is_named_and_exists() -> None:
    sections = _sections()
    assert sorted(sections) == sorted(_ROOMS)
    for room, table in sections.items():
        assert _named(table) == _files(PACKAGE / room), room


def test_every_room_and_module_of_the_package_has_a_floor() -> None:
    house = TEXT[TEXT.index("## The house") : TEXT.index("## Room by room")]
    named = {name for row in house.splitlines() if row.startswith("|") for name in re.findall(r"`([\w.]+)/?`", row)}
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert rooms | _files(PACKAGE) <= named
    assert {name for name in named if name.endswith(".py")} <= _files(PACKAGE)
