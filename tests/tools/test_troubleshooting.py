"""The troubleshooting page quotes messages that the program really has."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "troubleshooting.md"


def _headings() -> list[str]:
    return [line.removeprefix("### ") for line in _PAGE.read_text().splitlines() if line.startswith("### ")]


@lru_cache
def _messages() -> tuple[str, ...]:
    """Every text of the program; what is filled in later is a hole."""
    found = []
    for file in (_ROOT / "opencda_marl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def _quoted(heading: str) -> bool:
    """All fixed parts of the heading stand in one message, in their order."""
    parts = [part.strip() for part in heading.split("…") if part.strip(" :,;()")]
    for message in _messages():
        at = 0
        for part in parts:
            at = message.find(part, at)
            if at < 0:
                break
            at += len(part)
        else:
            return True
    return False


@pytest.mark.parametrize("heading", _headings())
def test_the_message_exists(heading: str) -> None:
    assert _quoted(heading), f"no message of the program reads like {heading!r}"


def test_an_invented_message_is_found_out() -> None:
    assert not _quoted("the flux capacitor … is not charged")


def test_every_exit_code_is_explained() -> None:
    from opencda_marl.core import errors

    codes = {
        cls.exit_code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.OpenCDAError)
    }
    told = {
        int(code)
        for line in _PAGE.read_text().splitlines()
        if line.startswith("| ") and line[2].isdigit()
        for code in line.split("|")[1].split(",")
    }
    assert told == codes
