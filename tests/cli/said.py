"""What a command leaves, and Python in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Said:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """The object on stdout's last line; stdout holds nothing else."""
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        return json.loads(lines[0])


def python(*arguments: str, cwd: Path | None = None, **more: Any) -> Said:
    """Python with the checkout on its path, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd or ROOT, capture_output=True, text=True, check=False, timeout=500, **more
    )
    return Said(done.returncode, done.stdout, done.stderr)
