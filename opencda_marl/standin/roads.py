"""OpenDRIVE: where vehicles can be spawned. Reference lines, lane widths and heights; the rest is the client's own.

OpenDRIVE is right-handed, y north, headings counter-clockwise; what is returned is in CARLA's frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree import ElementTree

__all__ = ["BUILT_IN", "NotARoadError", "SpawnPoint", "spawn_points"]

_LIFT = 0.5  # [m] spawn points are above the road, as vehicles would otherwise begin inside it
_MARGIN = 5.0  # [m] from a road's ends
_SPIRAL_STEPS = 64


class NotARoadError(ValueError):
    """The text is not an OpenDRIVE map with a lane to drive on."""


@dataclass(frozen=True, slots=True)
class SpawnPoint:
    """Middle of a driving lane, in CARLA's frame: y south, yaw clockwise seen from above."""

    x: float  # [m]
    y: float  # [m]
    z: float  # [m]
    yaw: float  # [deg], in (-180, 180]
    road: str
    lane: int  # negative: right of the reference line, driven along it
    s: float  # [m] along the reference line


def spawn_points(xodr: str, spacing: float = 20.0) -> list[SpawnPoint]:
    """Points on every driving lane outside of junctions, in the order of the file.

    Args:
        xodr: the OpenDRIVE text.
        spacing: [m] between two of a lane. The first is 5 m from where driving on the lane begins.

    Raises:
        NotARoadError: not XML, not OpenDRIVE, or nothing to drive on.
    """
    try:
        root = ElementTree.fromstring(xodr)
    except ElementTree.ParseError as error:
        raise NotARoadError(f"the OpenDRIVE text is not XML: {error}") from error
    if root.tag != "OpenDRIVE":
        raise NotARoadError(f"the root element is <{root.tag}>, and <OpenDRIVE> is needed")
    found = []
    try:
        for road in root.iterfind("road"):
            if road.get("junction", "-1") == "-1":
                found.extend(_of_road(road, spacing))
    except (KeyError, ValueError) as error:
        raise NotARoadError(f"an OpenDRIVE road cannot be read: {error!r}") from error
    if not found:
        raise NotARoadError("the OpenDRIVE map has no driving lane outside of junctions")
    return found


def _of_road(road: ElementTree.Element, spacing: float) -> list[SpawnPoint]:
    length = float(road.attrib["length"])
    sections = list(road.iterfind("lanes/laneSection"))
    starts = [float(section.attrib["s"]) for section in sections]
    found = []
    for section, start, end in zip(sections, starts, [*starts[1:], length], strict=True):
        for lane in section.iterfind("*/lane"):
            number = int(lane.attrib["id"])
            if lane.get("type") != "driving" or number == 0:
                continue
            for index in range(int(max(end - start - 2 * _MARGIN, -1.0) / spacing + 1)):
                way = _MARGIN + index * spacing
                found.append(_point(road, section, start, number, start + way if number < 0 else end - way))
    return found


def _point(road: ElementTree.Element, section: ElementTree.Element, start: float, number: int, s: float) -> SpawnPoint:
    side = -1.0 if number < 0 else 1.0
    widths = {
        int(lane.attrib["id"]): _cubic(list(lane.iterfind("width")), "sOffset", s - start)
        for lane in section.iterfind("*/lane")
        if int(lane.attrib["id"]) * side > 0
    }
    inner = sum(width for lane, width in widths.items() if abs(lane) < abs(number))
    offset = _cubic(list(road.iterfind("lanes/laneOffset")), "s", s) + side * (inner + widths[number] / 2)
    x, y, heading = _reference(list(road.iterfind("planView/geometry")), s)
    x, y = x - offset * math.sin(heading), y + offset * math.cos(heading)
    z = _cubic(list(road.iterfind("elevationProfile/elevation")), "s", s)
    yaw = -math.degrees(heading) + (0.0 if number < 0 else 180.0)
    yaw = 180.0 - (180.0 - yaw) % 360.0
    return SpawnPoint(x, -y, z + _LIFT, yaw, road.attrib["id"], number, s)


def _cubic(pieces: list[ElementTree.Element], begins: str, s: float) -> float:
    """Value at s of a piecewise cubic; 0 where there is none."""
    here = [piece for piece in pieces if float(piece.attrib[begins]) <= s + 1e-9]
    if not here:
        return 0.0
    along = s - float(here[-1].attrib[begins])
    a, b, c, d = (float(here[-1].attrib[name]) for name in "abcd")
    return a + along * (b + along * (c + along * d))


def _reference(pieces: list[ElementTree.Element], s: float) -> tuple[float, float, float]:
    """The reference line at s: x, y [m] and heading [rad], in OpenDRIVE's frame."""
    here = [piece for piece in pieces if float(piece.attrib["s"]) <= s + 1e-9]
    if not here:
        raise ValueError(f"no geometry at s = {s:g}")
    piece = here[-1]
    along = s - float(piece.attrib["s"])
    u, v, turn = _shape(piece, along)
    heading = float(piece.attrib["hdg"])
    x = float(piece.attrib["x"]) + u * math.cos(heading) - v * math.sin(heading)
    y = float(piece.attrib["y"]) + u * math.sin(heading) + v * math.cos(heading)
    return x, y, heading + turn


def _shape(piece: ElementTree.Element, along: float) -> tuple[float, float, float]:
    """Way ahead [m], to the left [m] and turn [rad] since the piece began."""
    kind = next(iter(piece))
    value = {name: float(text) for name, text in kind.attrib.items() if name != "pRange"}
    if kind.tag == "line":
        return along, 0.0, 0.0
    if kind.tag == "arc":
        turn = value["curvature"] * along
        return math.sin(turn) / value["curvature"], (1.0 - math.cos(turn)) / value["curvature"], turn
    if kind.tag == "spiral":
        return _spiral(value["curvStart"], value["curvEnd"], float(piece.attrib["length"]), along)
    if kind.tag == "poly3":
        a, b, c, d = (value[name] for name in "abcd")
        return along, a + along * (b + along * (c + along * d)), math.atan(b + along * (2 * c + along * 3 * d))
    if kind.tag == "paramPoly3":
        normalized = kind.get("pRange", "normalized") == "normalized"
        p = along / float(piece.attrib["length"]) if normalized else along
        u, v = (sum(value[f"{name}{axis}"] * p**power for power, name in enumerate("abcd")) for axis in "UV")
        du, dv = (value[f"b{axis}"] + p * (2 * value[f"c{axis}"] + p * 3 * value[f"d{axis}"]) for axis in "UV")
        return u, v, math.atan2(dv, du)
    raise ValueError(f"<{kind.tag}> is no geometry of OpenDRIVE 1.4")


def _spiral(first: float, last: float, length: float, along: float) -> tuple[float, float, float]:
    """A clothoid, by the midpoint rule: within 1 mm for the lengths of roads."""
    step = along / _SPIRAL_STEPS
    rate = (last - first) / length
    x = y = 0.0
    for index in range(_SPIRAL_STEPS):
        way = (index + 0.5) * step
        turn = first * way + rate * way * way / 2
        x += step * math.cos(turn)
        y += step * math.sin(turn)
    return x, y, first * along + rate * along * along / 2


def _straight(length: float, lanes: int) -> str:
    lane = (
        '<lane id="{}" type="driving" level="false"><link/><width sOffset="0" a="3.5" b="0" c="0" d="0"/>'
        '<roadMark sOffset="0" type="broken" weight="standard" color="standard" width="0.13"/>'
        '<speed sOffset="0" max="13.89"/></lane>'
    )
    left = "".join(lane.format(number) for number in range(lanes, 0, -1))
    right = "".join(lane.format(-number) for number in range(1, lanes + 1))
    half = length / 2
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<OpenDRIVE>'
        f'<header revMajor="1" revMinor="4" name="StandIn" version="1.00" north="10" south="-10" east="{half}" '
        f'west="-{half}"><geoReference>+proj=tmerc +lat_0=0 +lon_0=0</geoReference></header>'
        f'<road name="" length="{length}" id="1" junction="-1"><link/><type s="0" type="town"/><planView>'
        f'<geometry s="0" x="-{half}" y="0" hdg="0" length="{length}"><line/></geometry></planView>'
        '<elevationProfile><elevation s="0" a="0" b="0" c="0" d="0"/></elevationProfile><lateralProfile/>'
        f'<lanes><laneSection s="0"><left>{left}</left><center><lane id="0" type="none" level="false"><link/>'
        '<roadMark sOffset="0" type="solid" weight="standard" color="standard" width="0.13"/></lane></center>'
        f"<right>{right}</right></laneSection></lanes><objects/><signals/></road></OpenDRIVE>\n"
    )


BUILT_IN = _straight(400.0, 2)
"""The world of a new server: 400 m of straight road along the x axis, two lanes each way."""
