"""The crossing in CARLA's frame: its OpenDRIVE text, where vehicles enter, and whether the server has the same roads.

SUMO's network and the OpenDRIVE file come from the same sources, so SUMO's coordinates are OpenDRIVE's, and CARLA's
are those with y turned round (`core.frames`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.errors import ConfigError, SimulatorError
from opencda_marl.core.frames import carla_location, carla_yaw, centre_of_front, heading_of_carla_yaw, wrap
from opencda_marl.core.roads import Roads
from opencda_marl.settings.traffic import ScenarioSettings

__all__ = ["Entries", "check_roads", "entries", "read_map"]

_OFF = 0.3  # [m] between a route's beginning and the server's lane
_TURNED = 0.1  # [rad] likewise
_NEAR_BEGIN = 8  # samples from either end, where the lanes are compared


@dataclass(frozen=True, slots=True)
class Entries:
    """Where vehicles of each route begin, our frame: one length along the arm."""

    x: Float64[np.ndarray, " routes"]  # [m] centre
    y: Float64[np.ndarray, " routes"]  # [m]
    heading: Float64[np.ndarray, " routes"]  # [rad]
    location: Float64[np.ndarray, "routes 2"]  # [m] CARLA's x, y of the centre
    yaw: Float64[np.ndarray, " routes"]  # [deg] CARLA's


def read_map(scenario: ScenarioSettings, network: str) -> str:
    """The OpenDRIVE text of a scenario.

    Args:
        scenario: `scenario.map`, or None for the file beside the network.
        network: path of the .net.xml.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if scenario.map is not None:
        path = Path(scenario.map)
    else:
        found = Path(network)
        path = found.with_name(found.name.removesuffix(".gz").removesuffix(".net.xml") + ".xodr")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the OpenDRIVE file {path} cannot be read, and CARLA needs one: {error}",
            fix="netconvert --opendrive-output writes it from the network's sources; scenario.map names it",
        ) from error
    if "<OpenDRIVE" not in text:
        raise ConfigError(f"{path} is not an OpenDRIVE file", fix="scenario.map is to name an .xodr")
    return text


def entries(roads: Roads, length: float) -> Entries:
    """Where vehicles of a length [m] begin: the front bumper one length along, as SUMO places them."""
    routes = np.arange(roads.routes)
    at = length / roads.spacing
    k = int(at)
    before, after = roads.points[routes, k], roads.points[routes, k + 1]
    front = before[:, :2] + (at - k) * (after[:, :2] - before[:, :2])
    heading = np.arctan2(*(after[:, :2] - before[:, :2]).T[::-1])
    centre = centre_of_front(front, heading, length)
    return Entries(
        x=centre[:, 0],
        y=centre[:, 1],
        heading=heading,
        location=carla_location(centre + np.array(roads.origin)),
        yaw=carla_yaw(heading),
    )


def check_roads(carla: Any, town: Any, roads: Roads) -> Float64[np.ndarray, " routes"]:
    """Compare every route's beginning and end with the lanes that the server has.

    Args:
        carla: the module.
        town: its `Map`.
        roads: ours.

    Returns:
        the height of the road where each route begins. [m]

    Raises:
        SimulatorError: they are elsewhere: another map, or a sign or an offset is wrong.
    """
    heights = np.zeros(roads.routes)
    routes = np.arange(roads.routes)
    for sample in (np.full(roads.routes, _NEAR_BEGIN), roads.samples - 1 - _NEAR_BEGIN):
        points = roads.points[routes, sample]
        places = carla_location(points[:, :2] + np.array(roads.origin))
        for route, (x, y) in enumerate(places.tolist()):
            lane = town.get_waypoint(carla.Location(x, y, 0.0), project_to_road=True)
            there = lane.transform.location
            gap = float(np.hypot(there.x - x, there.y - y))
            turned = abs(float(wrap(heading_of_carla_yaw(np.array(lane.transform.rotation.yaw)) - points[route, 2])))
            if gap > _OFF or turned > _TURNED:
                raise SimulatorError(
                    f"the server's map is not the scenario's: a lane that should be at ({x:.1f}, {y:.1f}) is "
                    f"{gap:.2f} m and {np.degrees(turned):.0f} degrees away",
                    fix="scenario.map must be made from the sources of scenario.network, by one run of netconvert",
                )
            if sample[route] == _NEAR_BEGIN:
                heights[route] = there.z
    return heights
