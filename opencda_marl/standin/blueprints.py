"""What can be spawned: some of CARLA's vehicles with their sizes, the collision sensor, and the stand-in's mark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opencda_marl.standin.wire import AttributeType

__all__ = ["COLLISION_SENSOR", "MARK", "VEHICLE_TYPES", "VehicleType", "definitions"]

COLLISION_SENSOR = "sensor.other.collision"
MARK = "static.prop.standin"
"""A blueprint that no CARLA has: how a client of CARLA's own library can tell. It cannot be spawned."""


@dataclass(frozen=True, slots=True)
class VehicleType:
    """Constants of a type. The sizes are those of CARLA's catalogue, to the centimetre."""

    length: float  # [m]
    width: float  # [m]
    height: float  # [m]
    wheelbase: float  # [m]
    mass: float  # [kg]
    max_steer: float = 70.0  # [deg] of the front wheels, as most of CARLA's have it
    drag: float = 0.3  # coefficient
    kind: str = "car"

    @property
    def extent(self) -> tuple[float, float, float]:
        """Half sizes. [m]"""
        return (self.length / 2, self.width / 2, self.height / 2)


VEHICLE_TYPES = {
    "vehicle.audi.tt": VehicleType(4.18, 1.99, 1.39, 2.51, 1350.0),
    "vehicle.bmw.grandtourer": VehicleType(4.61, 2.24, 1.67, 2.78, 1700.0),
    "vehicle.carlamotors.firetruck": VehicleType(8.47, 2.89, 3.83, 4.87, 12000.0, 50.0, 0.6, "truck"),
    "vehicle.lincoln.mkz_2020": VehicleType(4.89, 1.84, 1.49, 2.85, 1830.0),
    "vehicle.mini.cooper_s": VehicleType(3.81, 1.97, 1.48, 2.47, 1200.0),
    "vehicle.nissan.micra": VehicleType(3.63, 1.85, 1.50, 2.43, 1000.0),
    "vehicle.tesla.model3": VehicleType(4.79, 2.16, 1.49, 2.88, 1850.0),
}

_Attribute = tuple[str, AttributeType, str, list[str], bool]
_COLOURS = ["17,37,103", "66,62,64", "140,140,140", "180,44,44"]


def _text(name: str, value: str, recommended: tuple[str, ...] = ()) -> _Attribute:
    return (name, AttributeType.STRING, value, list(recommended), True)


def _vehicle(kind: str) -> list[_Attribute]:
    return [
        ("number_of_wheels", AttributeType.INT, "4", [], False),
        ("object_type", AttributeType.STRING, "", [], False),
        ("base_type", AttributeType.STRING, kind, [], False),
        ("special_type", AttributeType.STRING, "", [], False),
        ("generation", AttributeType.INT, "2", [], False),
        ("has_lights", AttributeType.BOOL, "true", [], False),
        ("color", AttributeType.COLOUR, _COLOURS[0], _COLOURS, True),
        ("sticky_control", AttributeType.BOOL, "true", [], True),
        ("terramechanics", AttributeType.BOOL, "false", [], True),
        _text("role_name", "autopilot", ("autopilot", "scenario", "ego_vehicle")),
        _text("ros_name", ""),
    ]


def definitions() -> list[list[Any]]:
    """ActorDefinition of each blueprint."""
    found: list[tuple[str, list[_Attribute]]] = [(name, _vehicle(it.kind)) for name, it in VEHICLE_TYPES.items()]
    found.append((COLLISION_SENSOR, [_text("role_name", "front"), _text("ros_name", "")]))
    found.append((MARK, [_text("role_name", "prop")]))
    return [
        [uid, name, ",".join(name.split(".")), [[*attribute, False] for attribute in attributes]]
        for uid, (name, attributes) in enumerate(found, start=1)
    ]
