"""Make the bundled networks: plain XML -> netconvert -> .net.xml (SUMO) and .xodr (CARLA).

`python -m opencda_marl.scenarios.build` rebuilds all of them. What netconvert writes about the time and
place of the build is taken out, so the same sources and version give the same bytes; the command, the
version and the hashes stand in BUILD.json beside each network.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import SimulatorError
from opencda_marl.simulators.wheels import program

__all__ = ["NETWORKS", "build", "build_all"]

NETWORKS: dict[str, tuple[str, ...]] = {
    "intersection": (),
    "intersection_all_way_stop": ("all_way_stop.nod.xml",),
    "intersection_signals": ("signals.nod.xml",),
}
"""Network -> node files read after the crossing's own; each is the same crossing under another rule."""

_HERE = Path(__file__).parent
_SOURCE = _HERE / "intersection"
_OPTIONS = (
    "--no-turnarounds",
    "true",
    "--offset.disable-normalization",  # keep the origin at the junction's centre
    "true",
    "--junctions.internal-link-detail",  # points of a turn: within 4 mm (right) and 10 mm (left) of the true curve
    "20",
    "--precision",
    "3",
)
_STAMP = re.compile(r"<!-- generated on .*?-->\n*", re.DOTALL)
_DATE = re.compile(r'(<header [^>]*?) date="[^"]*"')
_HEADER = re.compile(r"<header ([^>]*)/>")
_PLACED = r"<header \1><geoReference>+proj=tmerc +lat_0=0 +lon_0=0</geoReference></header>"
"""CARLA's client warns of a map that lies nowhere on Earth."""


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _arguments(name: str) -> list[str]:
    nodes = ",".join(("intersection.nod.xml", *NETWORKS[name]))
    return [
        "--node-files",
        nodes,
        "--edge-files",
        "intersection.edg.xml",
        "--connection-files",
        "intersection.con.xml",
        *_OPTIONS,
    ]


def build(name: str, destination: Path) -> dict[str, Any]:
    """Build one network into a folder and write BUILD.json there.

    Args:
        name: a key of `NETWORKS`.
        destination: made when missing; files of the same names are replaced.

    Returns:
        the contents of BUILD.json: command, version, sha256 of sources and results.

    Raises:
        BackendMissingError: netconvert is not installed.
        SimulatorError: netconvert refused the sources.
    """
    netconvert = program("netconvert")
    destination.mkdir(parents=True, exist_ok=True)
    results = (f"{name}.net.xml", f"{name}.xodr")
    arguments = _arguments(name)
    with tempfile.TemporaryDirectory() as scratch:
        outputs = ["--output-file", f"{scratch}/{results[0]}", "--opendrive-output", f"{scratch}/{results[1]}"]
        done = subprocess.run(
            [netconvert, *arguments, *outputs], cwd=_SOURCE, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SimulatorError(f"netconvert could not build {name!r}: {done.stderr.strip()}")
        for result in results:
            text = (Path(scratch) / result).read_text(encoding="utf-8")
            text = _HEADER.sub(_PLACED, _DATE.sub(r"\1", _STAMP.sub("", text)))
            (destination / result).write_text(text, encoding="utf-8", newline="\n")
    said = subprocess.run([netconvert, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted(["intersection.nod.xml", "intersection.edg.xml", "intersection.con.xml", *NETWORKS[name]])
    record = {
        "command": ["netconvert", *arguments, "--output-file", results[0], "--opendrive-output", results[1]],
        "directory": "intersection",  # where the sources are
        "edited": "the comment with the time of the build, and the date in the OpenDRIVE header, are removed",
        "version": said.splitlines()[0].removeprefix("Eclipse SUMO netconvert ").strip(),
        "sources": {file: _sha256(_SOURCE / file) for file in sources},
        "results": {file: _sha256(destination / file) for file in results},
    }
    (destination / "BUILD.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def build_all() -> None:
    """Rebuild every bundled network in place."""
    for name in NETWORKS:
        build(name, _HERE / name)


if __name__ == "__main__":
    build_all()
