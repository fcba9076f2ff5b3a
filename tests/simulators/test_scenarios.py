"""The bundled networks are what their sources and the recorded command make, and what the description says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from opencda_marl.core.roads import Movement, Roads
from opencda_marl.scenarios.build import NETWORKS, build
from opencda_marl.simulators.network import bundled_networks, find_network, load_roads
from opencda_marl.simulators.wheels import program

NAMES = sorted(NETWORKS)


def _recorded(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((find_network(name).parent / "BUILD.json").read_text())
    return found


def test_every_bundled_network_is_built_here() -> None:
    assert bundled_networks() == tuple(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_hashes_are_those_of_the_files(name: str) -> None:
    record = _recorded(name)
    folder = find_network(name).parent
    for part, where in (("sources", folder.parent / str(record["directory"])), ("results", folder)):
        hashes = record[part]
        assert isinstance(hashes, dict)
        for file, digest in hashes.items():
            assert hashlib.sha256((where / file).read_bytes()).hexdigest() == digest, file


@pytest.mark.parametrize("name", NAMES)
def test_rebuilding_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    said = subprocess.run([program("netconvert"), "--version"], capture_output=True, text=True, check=True).stdout
    recorded = _recorded(name)
    assert f"netconvert {recorded['version']}" in said, (
        f"the bundled networks were made by netconvert {recorded['version']}; another one is installed. Rebuild and "
        "commit them (python -m opencda_marl.scenarios.build), or install the version in constraints.txt"
    )
    assert build(name, tmp_path) == recorded
    for file in find_network(name).parent.glob("*.*"):
        if (tmp_path / file.name).exists():
            assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert {f.name for f in tmp_path.iterdir()} == {"BUILD.json", f"{name}.net.xml", f"{name}.xodr"}


def test_nothing_of_the_builder_is_in_the_files() -> None:
    for name in NAMES:
        for file in (find_network(name), find_network(name).with_name(f"{name}.xodr")):
            text = file.read_text()
            assert "generated on" not in text
            assert " date=" not in text


@pytest.fixture(params=NAMES)
def roads(request: pytest.FixtureRequest) -> Roads:
    return load_roads(find_network(request.param))


def test_dimensions(roads: Roads) -> None:
    assert roads.arms == ("N_in", "E_in", "S_in", "W_in")
    assert roads.routes == 12
    assert roads.stop_line == pytest.approx(85.5)
    assert (roads.length - roads.junction_exit) == pytest.approx(85.5)
    straight = roads.movement == Movement.STRAIGHT
    assert (roads.junction_exit - roads.stop_line)[straight] == pytest.approx(29.0)
    assert roads.length[straight] == pytest.approx(200.0)
    assert roads.limit_entry == pytest.approx(17.88)
    assert roads.limit_exit == pytest.approx(17.88)
    for movement, limit in ((Movement.RIGHT, 7.34), (Movement.STRAIGHT, 17.88), (Movement.LEFT, 11.18)):
        assert roads.limit_inside[roads.movement == movement] == pytest.approx(limit)


def test_lanes_and_arms(roads: Roads) -> None:
    assert roads.arm.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert roads.movement.tolist() == [0, 1, 2] * 4
    assert roads.lane.tolist() == [0, 1, 2] * 4
    # driving on the right: from the north a right turn leads west, a left turn east
    assert roads.exit_arm.tolist() == [3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0]
    assert roads.arm_heading == pytest.approx([-np.pi / 2, np.pi, np.pi / 2, 0.0])


def test_routes_are_congruent(roads: Roads) -> None:
    """A quarter turn carries each arm's routes onto the next arm's: nobody is nearer than another."""
    for movement in range(3):
        first = roads.points[movement, :, :2]
        for arm in range(1, 4):
            turn = -arm * np.pi / 2  # clockwise
            matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
            assert np.abs(roads.points[3 * arm + movement, :, :2] - first @ matrix.T).max() < 0.005


# -------------------------------------------------------------------- the OpenDRIVE file is the same crossing


def _reference(geometry: ET.Element, along: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and headings of an OpenDRIVE geometry at shares of its length in [0, 1]."""
    x, y, heading, length = (float(geometry.attrib[key]) for key in ("x", "y", "hdg", "length"))
    curve = geometry.find("paramPoly3")
    if curve is None:
        u, v, du, dv = along * length, np.zeros_like(along), np.ones_like(along), np.zeros_like(along)
    else:
        (a, b, c, d), (e, f, g, h) = ([float(curve.attrib[k + axis]) for k in "abcd"] for axis in "UV")
        u, v = a + along * (b + along * (c + along * d)), e + along * (f + along * (g + along * h))
        du, dv = b + along * (2 * c + 3 * d * along), f + along * (2 * g + 3 * h * along)
    cos, sin = np.cos(heading), np.sin(heading)
    points = np.stack([x + cos * u - sin * v, y + sin * u + cos * v], axis=1)
    return points, heading + np.arctan2(dv, du)


def _lane_centres(road: ET.Element) -> dict[int, np.ndarray]:
    """Centre lines of the lanes right of the reference line, by their OpenDRIVE number -1, -2, …"""
    geometries = road.findall("planView/geometry")
    assert len(geometries) == 1
    along = np.linspace(0.0, 1.0, 2 if geometries[0].find("line") is not None else 201)
    points, heading = _reference(geometries[0], along)
    rightwards = np.stack([np.sin(heading), -np.cos(heading)], axis=1)
    centres, edge = {}, 0.0
    for lane in road.findall("lanes/laneSection/right/lane"):
        width = lane.find("width")
        assert width is not None
        wide = float(width.attrib["a"])
        centres[int(lane.attrib["id"])] = points + (edge + wide / 2) * rightwards
        edge += wide
    return centres


def _off(points: np.ndarray, line: np.ndarray) -> float:
    """Largest distance of the points from a polyline. [m]"""
    begin, step = line[:-1], np.diff(line, axis=0)
    share = np.einsum("pqk,qk->pq", points[:, None] - begin[None], step) / np.einsum("qk,qk->q", step, step)
    nearest = begin[None] + np.clip(share, 0, 1)[..., None] * step[None]
    return float(np.linalg.norm(points[:, None] - nearest, axis=2).min(axis=1).max())


@pytest.mark.parametrize("name", NAMES)
def test_carla_gets_the_same_roads(name: str) -> None:
    """Arms and straight ways to the millimetre; a turn's OpenDRIVE lane is offset from its inner edge's curve, where
    SUMO's is a curve of its own: they agree at both ends, and within 12 cm between."""
    tree = ET.parse(find_network(name).with_name(f"{name}.xodr")).getroot()
    roads = load_roads(find_network(name))
    arms = [_lane_centres(road) for road in tree.findall("road") if road.attrib["junction"] == "-1"]
    inside = [_lane_centres(road)[-1] for road in tree.findall("road") if road.attrib["junction"] != "-1"]
    assert (len(arms), len(inside)) == (8, 12)
    at = np.arange(roads.points.shape[1]) * roads.spacing
    for route in range(roads.routes):
        line = roads.points[route, : roads.samples[route], :2]
        mile = at[: roads.samples[route]]
        entry = line[mile < roads.stop_line[route]][::10]
        leave = line[mile > roads.junction_exit[route]][::-10]
        turn = line[(mile >= roads.stop_line[route]) & (mile <= roads.junction_exit[route])]
        for part in (entry, leave):
            assert min(_off(part, lane) for arm in arms for lane in arm.values()) < 1e-3
        straight = roads.movement[route] == Movement.STRAIGHT
        assert min(_off(turn, lane) for lane in inside) < (1e-3 if straight else 0.12)
        ends = turn[[0, -1]]
        assert min(_off(ends, lane) for lane in inside) < 0.02
