"""A stand-in for a CARLA server: speaks its protocol, drives simple vehicles, and fails on request. A test double.

`StandIn` starts one as a process. `install` writes a `CarlaUE4.sh` that takes the real one's arguments and is put
together as the real one is: a shell script that starts the server as a child and waits for it (no exec), so whoever
ends only the script leaves the server running.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from opencda_marl.core.errors import SimulatorError
from opencda_marl.standin.faults import FAULTS

__all__ = ["FAULTS", "StandIn", "install"]

_ROOT = Path(__file__).parents[2]
_START = (
    "import sys; sys.path.insert(0, {root!r}); from opencda_marl.standin.process import main; "
    "sys.exit(main(sys.argv[1:]))"
)
_WRAPPER = """#!/bin/sh
# The stand-in for CARLA's wrapper. As there, the server is a child, and its end is the script's.
{python} -I -c {start} CarlaUE4 --faults={faults} "$@"
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
    words = {"python": sys.executable, "start": _START.format(root=str(_ROOT)), "faults": str(listed.absolute())}
    script.write_text(_WRAPPER.format(**{name: shlex.quote(word) for name, word in words.items()}), encoding="utf-8")
    script.chmod(0o755)
    return script


class StandIn:
    """A stand-in as a process of its own, ended with the `with` block, or with this process.

    Args:
        *faults: words, e.g. `hang:get_map_data`; see FAULTS.
        rpc_port: 0: a free one.
        streaming_port: 0: a free one.
        options: more of `opencda-marl carla-standin`'s, e.g. `["--frame-delay=20"]`.

    Attributes:
        port: for requests.
        streaming_port: for streams.
        process: the server.

    Raises:
        SimulatorError: it did not start; with all that it said.
    """

    def __init__(self, *faults: str, rpc_port: int = 0, streaming_port: int = 0, options: Sequence[str] = ()) -> None:
        words = [f"--rpc-port={rpc_port}", f"--streaming-port={streaming_port}", "--with-stdin", *options]
        words += [f"--fault={fault}" for fault in faults]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START.format(root=str(_ROOT)), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if ", ports " in line:
                break
        else:
            self.stop()
            raise SimulatorError(f"the stand-in did not start; it said: {''.join(said).strip()}")
        self.port, self.streaming_port, *_ = map(int, said[-1].partition(", ports ")[2].split())

    def stop(self) -> None:
        """End it; may be called twice, and when it is dead."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
