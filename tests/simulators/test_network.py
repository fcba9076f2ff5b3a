"""Reading networks: the bundled one by numbers, people's own through netconvert, and what is refused."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.roads import Movement
from opencda_marl.simulators.network import find_network, load_roads
from opencda_marl.simulators.wheels import program


def _build(folder: Path, nodes: str, edges: str, connections: str | None = None, *options: str) -> Path:
    (folder / "own.nod.xml").write_text(f"<nodes>{nodes}</nodes>")
    (folder / "own.edg.xml").write_text(f"<edges>{edges}</edges>")
    files = ["--node-files", "own.nod.xml", "--edge-files", "own.edg.xml"]
    if connections is not None:
        (folder / "own.con.xml").write_text(f"<connections>{connections}</connections>")
        files += ["--connection-files", "own.con.xml"]
    command = [program("netconvert"), *files, "--output-file", "own.net.xml", *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "own.net.xml"


def _arm(name: str, x: float, y: float, lanes: int = 1) -> tuple[str, str]:
    """Node and edges of an arm that ends there."""
    edges = f'<edge id="{name}i" from="{name}" to="C" numLanes="{lanes}" speed="14"/>'
    edges += f'<edge id="{name}o" from="C" to="{name}" numLanes="{lanes}" speed="14"/>'
    return f'<node id="{name}" x="{x}" y="{y}"/>', edges


def test_centre_lines_are_smooth_and_evenly_sampled() -> None:
    roads = load_roads(find_network("intersection"))
    for route in range(roads.routes):
        line = roads.points[route, : roads.samples[route]]
        steps = np.hypot(*np.diff(line[:, :2], axis=0).T)
        assert steps[:-1] == pytest.approx(roads.spacing, abs=0.012)  # chords of a turn are a little short
        assert steps[-1] <= roads.spacing + 1e-9
        turn = np.angle(np.exp(1j * np.diff(line[:, 2])))
        assert np.abs(turn).max() < 0.17  # half a metre of the tightest bend
        total = {Movement.RIGHT: -np.pi / 2, Movement.STRAIGHT: 0.0, Movement.LEFT: np.pi / 2}
        assert turn.sum() == pytest.approx(total[Movement(roads.movement[route])], abs=1e-6)
        # behind the end the last point is repeated
        assert (roads.points[route, roads.samples[route] :] == line[-1]).all()


def test_ends_of_centre_lines() -> None:
    roads = load_roads(find_network("intersection"))
    west_left = roads.points[11]
    assert west_left[0] == pytest.approx([-100.0, -1.75, 0.0])
    assert west_left[int(roads.samples[11]) - 1] == pytest.approx([1.75, 100.0, np.pi / 2])
    north_right = roads.points[0]
    assert north_right[0] == pytest.approx([-8.75, 100.0, -np.pi / 2])
    assert np.abs(north_right[int(roads.samples[0]) - 1] - [-100.0, 8.75, np.pi]).max() < 1e-9


def test_a_crossing_that_stands_elsewhere_and_askew(tmp_path: Path) -> None:
    """Five kilometres away and turned by 10 degrees: the same arms in the same order, the centre at 0, 0."""
    turn = np.radians(10.0)
    nodes, edges = '<node id="C" x="5000" y="-3000" type="priority"/>', ""
    for name, bearing in (("a", 90.0), ("b", 0.0), ("c", -90.0), ("d", 180.0)):
        x, y = 100 * np.cos(np.radians(bearing) + turn), 100 * np.sin(np.radians(bearing) + turn)
        node, pair = _arm(name, 5000 + x, -3000 + y, lanes=2)
        nodes, edges = nodes + node, edges + pair
    network = _build(tmp_path, nodes, edges, None, "--no-turnarounds", "true", "--offset.disable-normalization", "true")
    roads = load_roads(network)
    assert roads.arms == ("ai", "bi", "ci", "di")
    assert roads.origin == pytest.approx((5000.0, -3000.0))
    assert np.abs(roads.points[:, 0, :2]).max() < 110.0
    expected = np.array([-np.pi / 2, np.pi, np.pi / 2, 0.0]) + turn
    assert np.abs(np.angle(np.exp(1j * (roads.arm_heading - expected)))).max() < 0.01
    assert sorted(set(roads.movement.tolist())) == [0, 1, 2]
    order = list(zip(roads.arm.tolist(), roads.movement.tolist(), roads.lane.tolist(), strict=True))
    assert order == sorted(order)


def test_three_arms_and_turnarounds(tmp_path: Path) -> None:
    nodes, edges = '<node id="C" x="0" y="0" type="priority"/>', ""
    for name, x, y in (("w", -100, 0), ("e", 100, 0), ("s", 0, -100)):
        node, pair = _arm(name, x, y)
        nodes, edges = nodes + node, edges + pair
    roads = load_roads(_build(tmp_path, nodes, edges, None, "--offset.disable-normalization", "true"))
    assert roads.arms == ("ei", "si", "wi")
    found = list(zip(roads.arm.tolist(), roads.movement.tolist(), roads.exit_arm.tolist(), strict=True))
    assert found == [(0, 1, 2), (0, 2, 1), (1, 0, 0), (1, 2, 2), (2, 0, 1), (2, 1, 0)]
    assert (roads.exit_arm != roads.arm).all(), "turnarounds are left out"


def test_an_exit_only_arm_has_a_place_in_the_order(tmp_path: Path) -> None:
    node_w, pair_w = _arm("w", -100, 0)
    nodes = '<node id="C" x="0" y="0" type="priority"/><node id="e" x="100" y="0"/>' + node_w
    edges = pair_w + '<edge id="eo" from="C" to="e" numLanes="1" speed="14"/>'
    roads = load_roads(_build(tmp_path, nodes, edges, None, "--no-turnarounds", "true"))
    assert roads.arms == ("eo", "wi")
    assert (roads.arm.tolist(), roads.exit_arm.tolist()) == ([1], [0])


def test_pavements_are_not_for_cars(tmp_path: Path) -> None:
    nodes, edges = '<node id="C" x="0" y="0" type="priority"/>', ""
    for name, x, y in (("w", -100, 0), ("e", 100, 0), ("s", 0, -100)):
        node, pair = _arm(name, x, y)
        nodes, edges = nodes + node, edges + pair.replace("/>", ' sidewalkWidth="2"/>')
    network = _build(tmp_path, nodes, edges, None, "--no-turnarounds", "true", "--crossings.guess", "true")
    roads = load_roads(network)
    assert roads.routes == 6
    assert set(roads.lane.tolist()) == {1}


def test_compressed_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = find_network("intersection")
    (tmp_path / "nets").mkdir()
    with gzip.open(tmp_path / "nets" / "own.net.xml.gz", "wb") as packed:
        packed.write(bundled.read_bytes())
    shutil.copy(bundled, tmp_path / "own.net.xml")
    found = find_network("nets/own.net.xml.gz", tmp_path)
    assert found == (tmp_path / "nets" / "own.net.xml.gz").resolve()
    assert np.array_equal(load_roads(found).points, load_roads(bundled).points)
    monkeypatch.chdir(tmp_path)
    assert find_network("own.net.xml") == (tmp_path / "own.net.xml").resolve()
    assert find_network(str(tmp_path / "own.net.xml")) == (tmp_path / "own.net.xml").resolve()


def test_misspelt_names_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'intersection'"):
        find_network("intersecton", tmp_path)
    shutil.copy(find_network("intersection"), tmp_path / "crossing.net.xml")
    with pytest.raises(ConfigError, match=r"did you mean 'crossing\.net\.xml'"):
        find_network("crosing.net.xml", tmp_path)
    with pytest.raises(ConfigError, match="bundled networks: intersection"):
        find_network("zzz", tmp_path)


def test_files_that_are_no_networks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"must end in \.net\.xml"):
        find_network("a.txt", tmp_path)
    for name, text, complaint in (
        ("broken.net.xml", "<net><edge>", "cannot be read"),
        ("other.net.xml", "<routes/>", "first element is <routes>"),
        ("empty.net.xml", "<net/>", "found 0: none"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            load_roads(tmp_path / name)
    (tmp_path / "not.net.xml.gz").write_text("<net/>")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_roads(tmp_path / "not.net.xml.gz")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_roads(tmp_path / "missing.net.xml")


def test_two_junctions_are_too_many(tmp_path: Path) -> None:
    nodes = '<node id="C" x="0" y="0"/><node id="D" x="200" y="0"/>'
    edges = (
        '<edge id="cd" from="C" to="D" numLanes="1" speed="14"/><edge id="dc" from="D" to="C" numLanes="1" speed="14"/>'
    )
    for name, x, y in (("w", -100, 0), ("s", 0, -100)):
        node, pair = _arm(name, x, y)
        nodes, edges = nodes + node, edges + pair
    for name, x, y in (("e", 300, 0), ("n", 200, 100)):
        node, pair = _arm(name, x, y)
        nodes, edges = nodes + node, edges + pair.replace('"C"', '"D"')
    with pytest.raises(ConfigError, match="found 2: C, D"):
        load_roads(_build(tmp_path, nodes, edges, None, "--no-turnarounds", "true"))


def test_a_network_without_lanes_inside(tmp_path: Path) -> None:
    nodes, edges = '<node id="C" x="0" y="0" type="priority"/>', ""
    for name, x, y in (("w", -100, 0), ("e", 100, 0), ("s", 0, -100)):
        node, pair = _arm(name, x, y)
        nodes, edges = nodes + node, edges + pair
    with pytest.raises(ConfigError, match="no-internal-links"):
        load_roads(_build(tmp_path, nodes, edges, None, "--no-internal-links", "true"))
