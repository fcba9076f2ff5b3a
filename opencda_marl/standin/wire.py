"""What goes over the wire of CARLA 0.9.16: sizes, encodings, numbers of things. Little endian throughout.

A wrong byte in a stream aborts the client's process, so the sizes are asserted when this is imported. Requests and
answers are msgpack; a struct is an array of its fields in a fixed order, `std::vector<uint8>` is msgpack's bin.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np

__all__ = [
    "ACTOR_STATE",
    "DONE",
    "NO_TOKEN",
    "TRAFFIC_LIGHT_UNKNOWN",
    "WORLD_STREAM",
    "ActorState",
    "AttributeType",
    "Command",
    "Sensor",
    "Settings",
    "default_settings",
    "default_weather",
    "done_error",
    "episode_header",
    "failed",
    "framed",
    "header",
    "ok",
    "token",
]

WORLD_STREAM = 1  # id of the world observer's stream
NO_TOKEN = b""  # of an actor without a stream

_HEADER = struct.Struct("<QQd6f")  # sensor type, frame, simulated seconds; x y z pitch yaw roll
_EPISODE = struct.Struct("<Qdf3iI")  # episode, platform's time, delta seconds, map origin, flags
_TOKEN = struct.Struct("<IHBB16x")  # stream, port, protocol (1 tcp), address type (0: the host of the client)
_SIZE = struct.Struct("<I")

ACTOR_STATE = np.dtype(
    [
        ("id", "<u4"),
        ("state", "u1"),
        ("pose", "<f4", 6),  # x y z [m], pitch yaw roll [deg]
        ("velocity", "<f4", 3),  # [m/s]
        ("angular_velocity", "<f4", 3),  # [deg/s]
        ("acceleration", "<f4", 3),  # [m/s^2]
        ("pedals", "<f4", 3),  # throttle, steer, brake; from here on only of vehicles
        ("switches", "u1", 3),  # hand brake, reverse, manual gear shift
        ("gear", "<i4"),
        ("speed_limit", "<f4"),  # [km/h]
        ("light_state", "u1"),
        ("has_light", "u1"),
        ("light_id", "<u4"),
        ("failure", "u1"),
        ("unused", "V24"),
    ]
)
"""One actor in a world frame, as it is sent."""

assert _HEADER.size == 48
assert _EPISODE.size == 36
assert _TOKEN.size == 24
assert ACTOR_STATE.fields is not None
assert ACTOR_STATE.fields["pedals"][1] == 65
assert ACTOR_STATE.itemsize == 119

TRAFFIC_LIGHT_UNKNOWN = 3  # light state: none governs the vehicle
_MAP_CHANGE = 1  # bit of the episode header's flags


class Sensor(IntEnum):
    """Type of a stream's messages: an index into the client's registry. A wrong one is a segmentation fault there."""

    COLLISION = 0
    WORLD_OBSERVER = 17


class ActorState(IntEnum):
    """Of an actor in a world frame."""

    ACTIVE = 1


class AttributeType(IntEnum):
    """Of a blueprint's attribute; its value is text whatever the type."""

    BOOL = 1
    INT = 2
    FLOAT = 3
    STRING = 4
    COLOUR = 5


class Command(IntEnum):
    """Of a batch: the index in the variant, which is tied to 0.9.16."""

    SPAWN_ACTOR = 0
    DESTROY_ACTOR = 1
    APPLY_VEHICLE_CONTROL = 2
    APPLY_VEHICLE_ACKERMANN_CONTROL = 3
    APPLY_WALKER_CONTROL = 4
    APPLY_VEHICLE_PHYSICS_CONTROL = 5
    APPLY_TRANSFORM = 6
    APPLY_WALKER_STATE = 7
    APPLY_TARGET_VELOCITY = 8
    APPLY_TARGET_ANGULAR_VELOCITY = 9
    APPLY_IMPULSE = 10
    APPLY_FORCE = 11
    APPLY_ANGULAR_IMPULSE = 12
    APPLY_TORQUE = 13
    SET_SIMULATE_PHYSICS = 14
    SET_ENABLE_GRAVITY = 15
    SET_AUTOPILOT = 16
    SHOW_DEBUG_TELEMETRY = 17
    SET_VEHICLE_LIGHT_STATE = 18
    APPLY_LOCATION = 19
    CONSOLE_COMMAND = 20
    SET_TRAFFIC_LIGHT_STATE = 21


class Settings(IntEnum):
    """Fields of EpisodeSettings that the server acts on: their places in the array."""

    SYNCHRONOUS_MODE = 0
    FIXED_DELTA_SECONDS = 2  # optional: [false], or [true, seconds]


DONE: list[Any] = [[False]]
"""Response<void>: no error."""


def default_settings() -> list[Any]:
    """EpisodeSettings of a new server."""
    return [False, False, [False], True, 0.01, 10, 0.0, True, 3000.0, 2000.0, True]


def default_weather() -> list[float]:
    """WeatherParameters: clear, the sun at 45 degrees."""
    return [0.0, 0.0, 0.0, 0.0, 0.0, 45.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.03, 0.0331, 0.0]


def done_error(text: str) -> list[Any]:
    """Response<void> with an error."""
    return [[True, [text]]]


def ok(value: Any) -> list[Any]:
    """Response<T> with a value."""
    return [[1, value]]


def failed(text: str) -> list[Any]:
    """Response<T> with an error."""
    return [[0, [text]]]


def token(stream: int, port: int) -> bytes:
    """Where a stream is to be had: on this port of the host that the client knows. 24 bytes."""
    return _TOKEN.pack(stream, port, 1, 0)


def header(sensor: Sensor, frame: int, seconds: float, pose: tuple[float, ...] = (0.0,) * 6) -> bytes:
    """Beginning of every message of a stream. 48 bytes.

    Args:
        sensor: type of the message.
        frame: number of the frame.
        seconds: simulated time since the episode began.
        pose: the sensor's x, y, z [m], pitch, yaw, roll [deg].
    """
    return _HEADER.pack(sensor, frame, seconds, *pose)


def episode_header(episode: int, platform_time: float, delta_seconds: float, *, map_change: bool) -> bytes:
    """What follows the header in a world frame; then one ACTOR_STATE for each actor. 36 bytes.

    Args:
        episode: id of the episode.
        platform_time: [s] clock of the machine.
        delta_seconds: [s] simulated since the last frame.
        map_change: the first frame of an episode says so.
    """
    return _EPISODE.pack(episode, platform_time, delta_seconds, 0, 0, 0, _MAP_CHANGE if map_change else 0)


def framed(payload: bytes) -> bytes:
    """A message of a stream: its size, then itself."""
    return _SIZE.pack(len(payload)) + payload
