"""The bundled networks are what their sources and the recorded command make, and what the description says."""

from __future__ import annotations

import hashlib
import json
import subprocess
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
