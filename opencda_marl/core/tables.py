"""Names to "module:attribute" strings; plug-ins add more through entry points. Listing imports nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from opencda_marl.core.errors import ConfigError

__all__ = ["Table"]


class Table:
    """What can be chosen by name.

    Args:
        kind: singular noun for messages, e.g. "learner".
        group: entry-point group that plug-ins register under, e.g. "opencda_marl.learners".
        bundled: name -> "module:attribute".
        about: name -> one line for `list`.
    """

    def __init__(self, kind: str, group: str, bundled: Mapping[str, str], about: Mapping[str, str]) -> None:
        self.kind = kind
        self.group = group
        self._bundled = dict(bundled)
        self._about = dict(about)

    def targets(self) -> dict[str, str]:
        """Every known name with its "module:attribute"; plug-ins cannot replace bundled names."""
        found = {point.name: point.value for point in entry_points(group=self.group)}
        return {**found, **self._bundled}

    def about(self, name: str) -> str:
        """One line on an entry."""
        return self._about.get(name, f"plug-in {self.targets().get(name, '')}")

    def check(self, name: str, *, where: str = "") -> str:
        """The name itself, or an error that lists the nearest one.

        Raises:
            ConfigError: there is no such entry.
        """
        targets = self.targets()
        if name not in targets:
            near = difflib.get_close_matches(name, targets, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(targets))}"
            raise ConfigError(f"{where}there is no {self.kind} named {name!r}", fix=hint)
        return name

    def load(self, name: str) -> Any:
        """Import and return what the name stands for."""
        module, _, attribute = self.targets()[self.check(name)].partition(":")
        return getattr(import_module(module), attribute)
