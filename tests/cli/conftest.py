"""Commands in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from said import Said

from opencda_marl.cli import main


@pytest.fixture
def typed(capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """`typed("runs", "list")`: the command in this process."""

    def run(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        out, err = capfd.readouterr()
        return Said(int(stop.value.code or 0), out, err)

    return run
