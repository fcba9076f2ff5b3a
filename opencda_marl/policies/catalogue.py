"""Which policies come with the package. Looking imports nothing that computes."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from opencda_marl.core.errors import CheckpointError

__all__ = ["BUNDLED", "about_bundled", "bundled_names", "find_bundled"]

BUNDLED = "bundled:"
"""What a name of a policy that comes with the package begins with."""

_HERE = Path(__file__).parent


def bundled_names(root: Path | None = None) -> list[str]:
    """What `bundled:` can be followed by, in order; `root`: another folder than the package's."""
    root = root or _HERE
    return sorted(folder.name for folder in root.iterdir() if (folder / "manifest.json").is_file())


def find_bundled(name: str, root: Path | None = None) -> Path:
    """The folder of `bundled:NAME`.

    Raises:
        CheckpointError: there is none of that name.
    """
    wanted, names = name.removeprefix(BUNDLED), bundled_names(root)
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=1)
        fix = f"did you mean {BUNDLED}{near[0]}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise CheckpointError(f"there is no policy {wanted!r} in the package", fix=fix)
    return (root or _HERE) / wanted


def about_bundled(name: str, root: Path | None = None) -> str:
    """One line on a bundled policy; torch is not needed for it."""
    extra = json.loads(((root or _HERE) / name / "state.json").read_bytes())["extra"]
    told = f"{extra['algorithm']}, {extra['episodes']} episodes of {extra['profile']}"
    return f"{told}; {extra['about']}" if extra.get("about") else told
