"""A SUMO network file -> `Roads`. Reads the XML itself: no SUMO is needed, and none is started.

Any network with one junction in the middle will do: its arms are numbered clockwise from north, and every
movement through it that cars may drive is a route. Turnarounds are not routes: nobody is scheduled for one.
"""

from __future__ import annotations

import difflib
import gzip
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.roads import Movement, Roads

__all__ = ["bundled_networks", "find_network", "load_roads"]

_SCENARIOS = Path(__file__).parents[1] / "scenarios"
_SPACING = 0.5  # [m] a chord of a right turn strays 5 mm from its arc
_SUFFIXES = (".net.xml", ".net.xml.gz")
_MOVEMENTS = {
    "r": Movement.RIGHT,
    "R": Movement.RIGHT,
    "s": Movement.STRAIGHT,
    "l": Movement.LEFT,
    "L": Movement.LEFT,
}

_Line = Float64[np.ndarray, "vertices 2"]


@dataclass(frozen=True, slots=True)
class _Lane:
    edge: str
    index: int
    length: float  # [m] as SUMO counts it; the drawn line may differ
    speed: float  # [m/s]
    line: _Line
    open_to_cars: bool


@dataclass(frozen=True, slots=True)
class _Movement:
    """One connection through the junction: entry lane, lanes inside, exit lane."""

    lanes: tuple[_Lane, ...]
    kind: Movement
    arm: int
    exit_arm: int


def bundled_networks() -> tuple[str, ...]:
    """Names that `find_network` knows without a path."""
    return tuple(
        sorted(folder.name for folder in _SCENARIOS.iterdir() if (folder / f"{folder.name}.net.xml").is_file())
    )


def find_network(name: str, base: Path | None = None) -> Path:
    """The file of a network.

    Args:
        name: a bundled name ("intersection"), or the path of a .net.xml (or .net.xml.gz).
        base: folder that a relative path starts from; None: the working directory.

    Raises:
        ConfigError: there is no such network; near names are listed.
    """
    if name in bundled_networks():
        return _SCENARIOS / name / f"{name}.net.xml"
    path = Path(name).expanduser()
    if not path.is_absolute():
        path = (base or Path.cwd()) / path
    if path.is_file():
        if not path.name.endswith(_SUFFIXES):
            raise ConfigError(
                f"scenario.network: {path} is not a SUMO network (its name must end in .net.xml)",
                fix="netconvert makes one, e.g. from OpenStreetMap or plain XML",
            )
        return path.resolve()
    folder = path.parent
    nearby = [p.name for p in folder.iterdir() if p.name.endswith(_SUFFIXES)] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, nearby, n=1) or difflib.get_close_matches(name, bundled_networks(), n=1)
    bundled = f"bundled networks: {', '.join(bundled_networks())}; or the path of a .net.xml"
    raise ConfigError(
        f"scenario.network: there is no network {name!r} ({path} does not exist)",
        fix=f"did you mean {near[0]!r}? {bundled}" if near else bundled,
    )


def _number(element: ET.Element, key: str, path: Path) -> float:
    try:
        return float(element.attrib[key])
    except (KeyError, ValueError) as error:
        where = element.get("id", element.tag)
        raise ConfigError(f"{path}: {element.tag} {where!r} has no number for {key!r}") from error


def _parse(path: Path) -> ET.Element:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rb") as stream:
                root = ET.parse(stream).getroot()
        else:
            root = ET.parse(path).getroot()
    except (ET.ParseError, EOFError, zlib.error, OSError) as error:
        raise ConfigError(f"{path} cannot be read as a SUMO network: {error}") from error
    if root.tag != "net":
        raise ConfigError(f"{path} is not a SUMO network: its first element is <{root.tag}>, not <net>")
    return root


def _open_to_cars(lane: ET.Element) -> bool:
    allow, disallow = lane.get("allow"), lane.get("disallow")
    if allow is not None:
        return "passenger" in allow.split() or allow == "all"
    return disallow is None or not {"passenger", "all"} & set(disallow.split())


def _lanes(root: ET.Element, path: Path) -> dict[str, _Lane]:
    lanes = {}
    for edge in root.iter("edge"):
        for lane in edge.iter("lane"):
            # a vertex may carry a height; the plane is enough here
            line = np.array([[float(v) for v in point.split(",")[:2]] for point in lane.attrib["shape"].split()])
            lanes[lane.attrib["id"]] = _Lane(
                edge=edge.attrib["id"],
                index=int(lane.attrib["index"]),
                length=_number(lane, "length", path),
                speed=_number(lane, "speed", path),
                line=line,
                open_to_cars=_open_to_cars(lane),
            )
    return lanes


def _middle(root: ET.Element, path: Path) -> ET.Element:
    """The one junction that anything drives through; turning around at the end of an arm does not count."""
    ends = {e.attrib["id"]: e.get("to") for e in root.iter("edge") if not e.get("function")}
    through = [c for c in root.iter("connection") if c.get("dir") in _MOVEMENTS and c.attrib["to"] in ends]
    used = {ends[c.attrib["from"]] for c in through if c.attrib["from"] in ends}
    found = [j for j in root.iter("junction") if j.get("id") in used]
    if len(found) != 1:
        names = ", ".join(sorted(j.attrib["id"] for j in found)) or "none"
        raise ConfigError(
            f"{path}: one junction, and arms that lead nowhere else, are needed; found {len(found)}: {names}",
            fix="cut the network down with netconvert, e.g. --keep-edges.in-boundary, and --geometry.remove for bends",
        )
    return found[0]


def _bearing(x: float, y: float) -> float:
    """Clockwise from north-west, so that a northern arm comes first even if it leans west. [rad]"""
    return float(np.mod(np.arctan2(x, y) + np.pi / 4, 2 * np.pi))


def _arms(root: ET.Element, middle: ET.Element, path: Path) -> tuple[tuple[str, ...], dict[str, int]]:
    """Names of the arms in order, and the arm of each edge that touches the junction."""
    junctions = {j.attrib["id"]: j for j in root.iter("junction")}
    cx, cy, centre = _number(middle, "x", path), _number(middle, "y", path), middle.attrib["id"]
    entries: dict[str, str] = {}  # outer junction -> entry edge
    exits: dict[str, str] = {}
    outer: dict[str, str] = {}  # edge -> outer junction
    for edge in root.iter("edge"):
        if edge.get("function"):
            continue
        begin, end, name = edge.attrib["from"], edge.attrib["to"], edge.attrib["id"]
        if end == centre:
            outer[name] = begin
            entries.setdefault(begin, name)
        elif begin == centre:
            outer[name] = end
            exits.setdefault(end, name)
    places = sorted(
        {*entries, *exits},
        key=lambda j: (_bearing(_number(junctions[j], "x", path) - cx, _number(junctions[j], "y", path) - cy), j),
    )
    arms = tuple(entries.get(place, exits.get(place, "")) for place in places)
    return arms, {edge: places.index(place) for edge, place in outer.items()}


def _movements(root: ET.Element, lanes: dict[str, _Lane], arm_of: dict[str, int], path: Path) -> list[_Movement]:
    connections = list(root.iter("connection"))
    onward = {f"{c.attrib['from']}_{c.attrib['fromLane']}": c for c in connections if c.attrib["from"].startswith(":")}
    found = []
    for c in connections:
        kind = _MOVEMENTS.get(c.get("dir", ""))
        entry, leave = f"{c.attrib['from']}_{c.attrib['fromLane']}", f"{c.attrib['to']}_{c.attrib['toLane']}"
        if c.attrib["from"] not in arm_of or kind is None:
            continue
        if entry not in lanes or leave not in lanes or not (lanes[entry].open_to_cars and lanes[leave].open_to_cars):
            continue
        inside: list[_Lane] = []
        via = c.get("via")
        while via is not None:
            inside.append(lanes[via])
            via = onward[via].get("via")
        if not inside:
            raise ConfigError(
                f"{path}: the way from {entry} to {leave} has no lane inside the junction",
                fix="build the network without --no-internal-links",
            )
        chain = (lanes[entry], *inside, lanes[leave])
        found.append(_Movement(chain, kind, arm_of[c.attrib["from"]], arm_of[c.attrib["to"]]))
    if not found:
        raise ConfigError(f"{path}: no car may drive through its junction")
    return sorted(found, key=lambda m: (m.arm, m.kind, m.lanes[0].index, m.exit_arm, m.lanes[-1].index))


def _sample(lanes: Sequence[_Lane], origin: tuple[float, float]) -> Float64[np.ndarray, "samples 3"]:
    """Centre line at equal distances as SUMO counts them, and at the very end: x, y, heading."""
    vertices, distances, begin = [], [], 0.0
    for lane in lanes:
        steps = np.hypot(*np.diff(lane.line, axis=0).T)
        along = np.concatenate(([0.0], np.cumsum(steps)))
        distances.append(begin + along * (lane.length / along[-1]))
        vertices.append(lane.line - origin)
        begin += lane.length
    at = np.arange(int(np.ceil(begin / _SPACING)) + 1) * _SPACING
    at[-1] = begin
    line, mile = np.concatenate(vertices), np.concatenate(distances)
    x, y = np.interp(at, mile, line[:, 0]), np.interp(at, mile, line[:, 1])
    # Central differences: at a vertex the heading lies between those of its two sides.
    heading = np.arctan2(np.gradient(y, at), np.gradient(x, at))
    return np.stack([x, y, heading], axis=1)


def load_roads(network: Path) -> Roads:
    """Read every route of a network with one junction.

    Arms go clockwise from north; routes are sorted by arm, then right, straight, left, then lane.
    `points` are 0.5 m apart, except that the last real one is the very end of the route.

    Args:
        network: a .net.xml or .net.xml.gz, see `find_network`.

    Raises:
        ConfigError: it is not a network, or not one with a single junction in the middle.
    """
    root = _parse(network)
    lanes = _lanes(root, network)
    middle = _middle(root, network)
    origin = (_number(middle, "x", network), _number(middle, "y", network))
    arms, arm_of = _arms(root, middle, network)
    movements = _movements(root, lanes, arm_of, network)
    lines = [_sample(m.lanes, origin) for m in movements]
    samples = np.array([len(line) for line in lines], np.int64)
    points = np.stack(
        [np.concatenate([line, np.repeat(line[-1:], samples.max() - len(line), axis=0)]) for line in lines]
    )
    heading = [_entry_heading(lanes, edge) for edge in arms]
    stop_line = np.array([m.lanes[0].length for m in movements])
    inside = np.array([sum(lane.length for lane in m.lanes[1:-1]) for m in movements])
    return Roads(
        network=str(network),
        arms=arms,
        arm_heading=np.array(heading),
        arm=np.array([m.arm for m in movements], np.int64),
        exit_arm=np.array([m.exit_arm for m in movements], np.int64),
        lane=np.array([m.lanes[0].index for m in movements], np.int64),
        movement=np.array([m.kind for m in movements], np.int64),
        entry_edge=tuple(m.lanes[0].edge for m in movements),
        exit_edge=tuple(m.lanes[-1].edge for m in movements),
        length=stop_line + inside + np.array([m.lanes[-1].length for m in movements]),
        stop_line=stop_line,
        junction_exit=stop_line + inside,
        limit_entry=np.array([m.lanes[0].speed for m in movements]),
        limit_inside=np.array([min(lane.speed for lane in m.lanes[1:-1]) for m in movements]),
        limit_exit=np.array([m.lanes[-1].speed for m in movements]),
        spacing=_SPACING,
        points=points,
        samples=samples,
        origin=origin,
    )


def _entry_heading(lanes: dict[str, _Lane], edge: str) -> float:
    """Driving direction at the beginning of an edge. [rad]"""
    line = next(lane.line for lane in lanes.values() if lane.edge == edge)
    dx, dy = line[1] - line[0]
    return float(np.arctan2(dy, dx))
