"""A stand-in for a CARLA server: takes CarlaUE4.sh's arguments, and fails on request.

It is put together as the real one is: a shell script that starts the server as a child and waits for it (no exec), so
whoever ends only the script leaves the server running. The server answers the version request on its port and holds
the two ports above; it drives nothing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from opencda_marl.standin import server

__all__ = ["FAULTS", "install"]

FAULTS = server.FAULTS
"""Names of faults; those with a number take it after a colon: `die:2`."""

_WRAPPER = """#!/bin/sh
# The stand-in for CARLA's wrapper. As there, the server is a child, and its end is the script's.
{python} -I -S {server} CarlaUE4 --faults {faults} "$@"
"""


def install(folder: Path, faults: Sequence[str] = ()) -> Path:
    """Write `CarlaUE4.sh` into a folder.

    Args:
        folder: made if it is not there.
        faults: one for each start, the first one first; `""` is a start without a fault, and so is each start after
            the last one. `always NAME`, as the last one, is never used up. Several in one start are joined by commas.

    Returns:
        The script, to be given as --carla-bin.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "faults"
    listed.write_text("".join(f"{fault}\n" for fault in faults), encoding="utf-8")
    script = folder / "CarlaUE4.sh"
    words = {"python": sys.executable, "server": server.__file__, "faults": str(listed.absolute())}
    script.write_text(_WRAPPER.format(**{name: shlex.quote(word) for name, word in words.items()}), encoding="utf-8")
    script.chmod(0o755)
    return script
