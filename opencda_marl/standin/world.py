"""The simulated world: episodes, actors, ticks. It knows nothing of connections.

An episode begins with a map and a spectator, and its actors' numbers begin anew; frames go on. What a tick makes is a
`Frame`: the message of the world's stream, and those of the collision sensors'.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgpack
import numpy as np

from opencda_marl.standin import wire
from opencda_marl.standin.blueprints import COLLISION_SENSOR, VEHICLE_TYPES
from opencda_marl.standin.collisions import contacts, impulses
from opencda_marl.standin.roads import BUILT_IN, SpawnPoint, spawn_points
from opencda_marl.standin.vehicles import VEHICLE, Vehicles

__all__ = ["MAP", "OPENDRIVE_MAP", "Actor", "Frame", "RefusedError", "World"]

MAP = "StandIn"
OPENDRIVE_MAP = "OpenDriveMap"
DEFAULT_STEP = 0.05  # [s] of a tick when the client has set none
_SPEED_LIMIT = 30.0  # [km/h] as the real server says where no sign does
_CAR = b"\x0e"  # semantic tag
_DEFAULT_GEAR = 1.0


class RefusedError(Exception):
    """The client asked for what cannot be; the text is its answer."""


@dataclass(slots=True)
class Actor:
    """One actor of an episode.

    Attributes:
        offset: of what is attached: place [m] and rotation (pitch, yaw, roll) [deg] from its parent's.
        pose: x, y, z [m], pitch, yaw, roll [deg] of what is neither a vehicle nor attached.
    """

    number: int
    description: list[Any]  # ActorDescription
    box: list[Any]  # BoundingBox
    tags: bytes = b""
    parent: int = 0
    offset: tuple[float, ...] = (0.0,) * 6
    pose: tuple[float, ...] = (0.0,) * 6
    stream: int = 0

    @property
    def kind(self) -> str:
        """Id of its blueprint."""
        return str(self.description[1])


@dataclass(frozen=True, slots=True)
class Frame:
    """What the streams send after a tick: payloads, by stream."""

    number: int
    payloads: list[tuple[int, bytes]]


@dataclass(slots=True)
class _Episode:
    number: int
    map_name: str
    xodr: str
    points: list[SpawnPoint]
    actors: dict[int, Actor] = field(default_factory=dict)
    vehicles: Vehicles = field(default_factory=Vehicles)
    numbers: Any = field(default_factory=lambda: count(1))
    seconds: float = 0.0
    spectator: int = 0
    weather: list[float] = field(default_factory=wire.default_weather)
    lights: dict[int, int] = field(default_factory=dict)
    physics_controls: dict[int, list[Any]] = field(default_factory=dict)


class World:
    """What is simulated, from the start of the process to its end.

    Args:
        streaming_port: where tokens send the client.
        first_stream: id of the first sensor's stream. Differs from process to process: a stale client of an earlier
            server then finds no stream of its own, instead of another's.
        xodr: OpenDRIVE text of the first world; None: the one that is built in.
    """

    def __init__(self, streaming_port: int, first_stream: int, xodr: str | None = None) -> None:
        self.frame = 0
        self.settings = wire.default_settings()
        self.uploaded: str | None = None
        self._streaming_port = streaming_port
        self._streams = count(first_stream)
        self._first = BUILT_IN if xodr is None else xodr
        self._episodes = count(1)
        self._table: np.ndarray | None = None  # of ACTOR_STATE; None: other actors than at the last tick
        self._children = self._parents = np.zeros(0, np.int64)  # rows of the table: what is attached, and to what
        self._offsets = np.zeros((0, 6))
        self._change = True
        self.episode = self._begin(MAP, self._first)

    # --- episodes

    def load(self, name: str, reset_settings: bool) -> None:
        """Begin an episode in a map; "": in this one again.

        Raises:
            RefusedError: there is no such map.
        """
        wanted = name.rpartition("/")[2]
        if not wanted:
            map_name, xodr = self.episode.map_name, self.episode.xodr
        elif wanted == MAP:
            map_name, xodr = MAP, self._first
        elif wanted == OPENDRIVE_MAP and self.uploaded is not None:
            map_name, xodr = OPENDRIVE_MAP, self.uploaded
        else:
            raise RefusedError(f"Map '{name}' not found")
        self.episode = self._begin(map_name, xodr)
        if reset_settings:
            self.settings = wire.default_settings()

    def _begin(self, map_name: str, xodr: str) -> _Episode:
        points = spawn_points(xodr)
        episode = _Episode(next(self._episodes), map_name, xodr, points)
        self._table, self._change = None, True
        spectator = Actor(next(episode.numbers), [0, "spectator", []], _box((0.0,) * 3, (0.0,) * 3, 0))
        episode.actors[spectator.number] = spectator
        episode.spectator = spectator.number
        return episode

    @property
    def synchronous(self) -> bool:
        """Does it wait for ticks?"""
        return bool(self.settings[wire.Settings.SYNCHRONOUS_MODE])

    @property
    def step_seconds(self) -> float:
        """[s] that a tick simulates."""
        fixed = self.settings[wire.Settings.FIXED_DELTA_SECONDS]
        return float(fixed[1]) if fixed[0] and fixed[1] > 0.0 else DEFAULT_STEP

    # --- actors

    def actor(self, number: int) -> Actor:
        """Raises: RefusedError."""
        try:
            return self.episode.actors[number]
        except KeyError:
            raise RefusedError(f"Actor could not be found in the registry.  Actor Id: {number}") from None

    def vehicle(self, number: int) -> np.void:
        """A vehicle's VEHICLE record, to be written to. Raises: RefusedError."""
        actor, vehicles = self.actor(number), self.episode.vehicles
        if number not in vehicles:
            raise RefusedError(f"actor {number} is a {actor.kind}, not a vehicle")
        record: np.void = vehicles.rows[vehicles.index(number)]
        return record

    def spawn(self, description: list[Any], transform: list[Any], parent: int = 0) -> Actor:
        """A new actor; it is in the next frame.

        Args:
            description: ActorDescription.
            transform: where; of what is attached, from its parent's.
            parent: number of the actor that it is attached to; 0: none.

        Raises:
            RefusedError: unknown blueprint, no such parent, or the place is taken.
        """
        kind = str(description[1])
        place, rotation = transform
        pose = (*map(float, place), *map(float, rotation))
        _check(pose)
        if parent:
            self.actor(parent)
        episode = self.episode
        if kind in VEHICLE_TYPES:
            if parent:
                raise RefusedError(f"{kind} cannot be attached to an actor")
            actor = self._spawn_vehicle(description, pose)
        elif kind == COLLISION_SENSOR:
            actor = Actor(next(episode.numbers), description, _box((0.0,) * 3, (0.0,) * 3, 0), parent=parent)
            actor.offset, actor.pose, actor.stream = pose, pose, next(self._streams)
        else:
            raise RefusedError(f"the stand-in has no blueprint {kind!r} to spawn")
        episode.actors[actor.number] = actor
        self._table = None
        return actor

    def _spawn_vehicle(self, description: list[Any], pose: tuple[float, ...]) -> Actor:
        episode, made = self.episode, VEHICLE_TYPES[str(description[1])]
        row = np.zeros(1, VEHICLE)
        row["place"], row["pitch"], row["roll"] = pose[:3], pose[3], pose[5]
        row["yaw"] = np.radians(pose[4])
        row["physics"] = row["collides"] = True
        row["control"][0, 6] = _DEFAULT_GEAR
        row["spin"] = np.nan
        row["extent"], row["box"] = made.extent, (0.0, 0.0, made.extent[2])
        row["wheelbase"], row["max_steer"] = made.wheelbase, np.radians(made.max_steer)
        row["mass"], row["drag"] = made.mass, made.drag
        there = np.concatenate([episode.vehicles.rows, row])
        if len(contacts(there, only=len(there) - 1)[0]):
            raise RefusedError("Spawn failed because of collision at spawn position")
        number = next(episode.numbers)
        row["id"] = number
        episode.vehicles.add(row)
        return Actor(number, description, _box((0.0, 0.0, made.extent[2]), made.extent, number), _CAR)

    def destroy(self, numbers: Sequence[int]) -> list[Actor]:
        """Those of them that are there, with what is attached to them. Returns: the actors that are gone."""
        actors, gone, wanted = self.episode.actors, list[Actor](), set(numbers)
        while wanted:
            for number in wanted:
                if number in actors and number != self.episode.spectator:
                    gone.append(actors.pop(number))
            last = wanted
            wanted = {actor.number for actor in actors.values() if actor.parent in last}
        self.episode.vehicles.remove([actor.number for actor in gone])
        for actor in gone:
            self.episode.lights.pop(actor.number, None)
            self.episode.physics_controls.pop(actor.number, None)
        self._table = None
        return gone

    def put(self, number: int, place: Sequence[float], rotation: Sequence[float] | None = None) -> None:
        """Move an actor. Raises: RefusedError."""
        _check((*place, *(rotation or ())))
        actor = self.actor(number)
        if number in self.episode.vehicles:
            self.episode.vehicles.put(number, place, rotation)
            return
        turned = actor.pose[3:] if rotation is None else tuple(map(float, rotation))
        actor.pose = (*map(float, place), *turned)
        self._table = None

    # --- ticks

    def tick(self, seconds: float | None = None) -> Frame:
        """Simulate one step.

        Args:
            seconds: [s] its length; None: as the settings say.
        """
        seconds = self.step_seconds if seconds is None else seconds
        episode = self.episode
        self.frame += 1
        episode.seconds += seconds
        vehicles = episode.vehicles
        vehicles.step(seconds)
        pairs, normal = contacts(vehicles.rows)
        payloads: list[tuple[int, bytes]] = []
        if len(pairs):
            impulse = impulses(vehicles.rows, pairs, normal)
            vehicles.bounce(pairs, impulse)
            payloads = self._collisions(pairs, impulse)
        payloads.insert(0, (wire.WORLD_STREAM, self._snapshot(seconds)))
        return Frame(self.frame, payloads)

    def _snapshot(self, seconds: float) -> bytes:
        episode, rows = self.episode, self.episode.vehicles.rows
        if self._table is None:
            self._table = self._make_table()
        table = self._table
        moving = table[: len(rows)]
        pose = moving["pose"]
        pose[:, :3] = rows["place"]
        pose[:, 3], pose[:, 4], pose[:, 5] = rows["pitch"], np.degrees(rows["yaw"]), rows["roll"]
        moving["velocity"] = rows["velocity"]
        moving["acceleration"] = rows["acceleration"]
        moving["angular_velocity"][:, 2] = np.degrees(rows["yaw_rate"])
        control = rows["control"]
        moving["pedals"], moving["switches"], moving["gear"] = control[:, :3], control[:, 3:6], control[:, 6]
        if len(self._children):
            self._place_attached(table)
        change, self._change = self._change, False
        return b"".join(
            (
                wire.header(wire.Sensor.WORLD_OBSERVER, self.frame, episode.seconds),
                wire.episode_header(episode.number, time.time(), seconds, map_change=change),
                table.tobytes(),
            )
        )

    def _make_table(self) -> np.ndarray:
        """All actors: vehicles first, in their order, then the others."""
        episode = self.episode
        order = episode.vehicles.rows["id"].tolist()
        order += [number for number in episode.actors if number not in episode.vehicles]
        table = np.zeros(len(order), wire.ACTOR_STATE)
        table["id"], table["state"] = order, wire.ActorState.ACTIVE
        moving = table[: len(episode.vehicles)]
        moving["speed_limit"], moving["light_state"] = _SPEED_LIMIT, wire.TRAFFIC_LIGHT_UNKNOWN
        place = {number: index for index, number in enumerate(order)}
        attached = []
        for number in order[len(episode.vehicles) :]:
            actor = episode.actors[number]
            table["pose"][place[number]] = actor.pose
            if actor.parent in place:
                attached.append((place[number], place[actor.parent], actor.offset))
        self._children = np.array([child for child, _, _ in attached], np.int64)
        self._parents = np.array([parent for _, parent, _ in attached], np.int64)
        self._offsets = np.array([offset for _, _, offset in attached]).reshape(-1, 6)
        return table

    def _place_attached(self, table: np.ndarray) -> None:
        """Attached actors follow their parents: turned about the vertical, as vehicles are."""
        parents, offset = table["pose"][self._parents].astype(float), self._offsets
        yaw = np.radians(parents[:, 4])
        cos, sin = np.cos(yaw), np.sin(yaw)
        found = parents + offset
        found[:, 0] = parents[:, 0] + cos * offset[:, 0] - sin * offset[:, 1]
        found[:, 1] = parents[:, 1] + sin * offset[:, 0] + cos * offset[:, 1]
        table["pose"][self._children] = found
        table["velocity"][self._children] = table["velocity"][self._parents]

    def _collisions(self, pairs: np.ndarray, impulse: np.ndarray) -> list[tuple[int, bytes]]:
        """Messages of the collision sensors whose vehicles touch something."""
        episode = self.episode
        sensors: dict[int, list[Actor]] = {}
        for actor in episode.actors.values():
            if actor.kind == COLLISION_SENSOR:
                sensors.setdefault(actor.parent, []).append(actor)
        numbers = episode.vehicles.rows["id"]
        found = []
        for (first, second), push in zip(pairs.tolist(), impulse.tolist(), strict=True):
            for own, other, sign in ((first, second, 1.0), (second, first, -1.0)):
                mine, theirs = int(numbers[own]), int(numbers[other])
                for sensor in sensors.get(mine, ()):
                    event = [
                        self.encode(episode.actors[mine]),
                        self.encode(episode.actors[theirs]),
                        [sign * push[0], sign * push[1], 0.0],
                    ]
                    head = wire.header(wire.Sensor.COLLISION, self.frame, episode.seconds, self._pose(own))
                    found.append((sensor.stream, head + msgpack.packb(event, use_bin_type=True)))
        return found

    def _pose(self, index: int) -> tuple[float, ...]:
        row = self.episode.vehicles.rows[index]
        return (*row["place"].tolist(), float(row["pitch"]), float(np.degrees(row["yaw"])), float(row["roll"]))

    def encode(self, actor: Actor) -> list[Any]:
        """Actor, as it is sent."""
        stream = wire.token(actor.stream, self._streaming_port) if actor.stream else wire.NO_TOKEN
        return [actor.number, actor.parent, actor.description, actor.box, actor.tags, stream]


def _check(pose: Sequence[float]) -> None:
    """Raises: RefusedError, for a pose with NaN or infinity in it."""
    if not all(map(math.isfinite, pose)):
        raise RefusedError(f"{list(pose)} are not finite numbers")


def _box(middle: Sequence[float], extent: Sequence[float], number: int) -> list[Any]:
    return [list(middle), list(extent), [0.0, 0.0, 0.0], number]
