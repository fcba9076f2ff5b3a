"""The methods of a CARLA server: names, arguments and answers are those of the protocol of 0.9.16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from opencda_marl.standin import wire
from opencda_marl.standin.batches import Batches
from opencda_marl.standin.blueprints import definitions
from opencda_marl.standin.roads import NotARoadError, spawn_points
from opencda_marl.standin.rpc import bare, value, void
from opencda_marl.standin.streams import Streams
from opencda_marl.standin.world import MAP, OPENDRIVE_MAP, RefusedError, World

__all__ = ["Calls"]

_MAPS = "Carla/Maps/"


class Calls:
    """World, episode, map, actors.

    Args:
        world: that they are about.
        streams: of its sensors.
        streaming_port: for tokens.
        version: that the server says it has.
        tick: makes a tick due; returns the frame that it will make.
        publish: sends a frame at once.
    """

    def __init__(
        self,
        world: World,
        streams: Streams,
        streaming_port: int,
        version: str,
        tick: Callable[[], int],
        publish: Callable[[], None],
    ) -> None:
        self._world, self._streams = world, streams
        self._port, self._version = streaming_port, version
        self._tick, self._publish = tick, publish
        self._batches = Batches(world, streams)

    # --- server, episode

    @value
    def version(self) -> str:
        """Of the server."""
        return self._version

    @value
    def get_available_maps(self) -> list[str]:
        """Names for load_new_episode."""
        names = [MAP] if self._world.uploaded is None else [MAP, OPENDRIVE_MAP]
        return [f"/Game/{_MAPS}{name}" for name in names]

    @value
    def get_episode_info(self) -> list[Any]:
        """EpisodeInfo: id, and the token of the world's stream."""
        return [self._world.episode.number, [wire.token(wire.WORLD_STREAM, self._port)]]

    @value
    def get_sensor_token(self, stream: int) -> list[bytes]:
        """Where a stream is to be had; it need not exist."""
        return [wire.token(stream, self._port)]

    @value
    def get_episode_settings(self) -> list[Any]:
        """EpisodeSettings."""
        return self._world.settings

    @value
    def set_episode_settings(self, settings: list[Any]) -> int:
        """They hold from the next frame on. Returns: the frame now."""
        if len(settings) != len(self._world.settings):
            raise ValueError(f"EpisodeSettings has {len(self._world.settings)} fields, not {len(settings)}")
        self._world.settings = settings
        return self._world.frame

    @value
    def tick_cue(self) -> int:
        """Simulate a step. Returns: the frame that it makes."""
        return self._tick()

    @void
    def load_new_episode(self, name: str, reset_settings: bool, layers: int) -> None:
        """Begin anew in a map; "": in the same one."""
        del layers
        before = self._world.episode
        self._world.load(name, reset_settings)
        for actor in before.actors.values():
            if actor.stream:
                self._streams.close(actor.stream)
        self._publish()

    @void
    def copy_opendrive_to_file(self, xodr: str, parameters: list[Any]) -> None:
        """Keep an OpenDRIVE map, to be loaded as OpenDriveMap. What it says of meshes means nothing here."""
        del parameters
        try:
            spawn_points(xodr)
        except NotARoadError as error:
            raise RefusedError(f"opendrive could not be correctly parsed: {error}") from error
        self._world.uploaded = xodr

    # --- map

    @value
    def get_map_info(self) -> list[Any]:
        """MapInfo: name, and where vehicles can begin."""
        points = [[[p.x, p.y, p.z], [0.0, p.yaw, 0.0]] for p in self._world.episode.points]
        return [f"{_MAPS}{self._world.episode.map_name}", points]

    @value
    def get_map_data(self) -> str:
        """OpenDRIVE text."""
        return self._world.episode.xodr

    @value
    def get_required_files(self, folder: str) -> list[str]:
        """None: there is no navigation mesh."""
        del folder
        return []

    @value
    def query_lights_state(self, endpoint: str) -> list[Any]:
        """None: there are no street lamps."""
        del endpoint
        return []

    @value
    def get_weather_parameters(self) -> list[float]:
        """WeatherParameters."""
        return self._world.episode.weather

    @void
    def set_weather_parameters(self, weather: list[float]) -> None:
        """It is told again when asked; nothing else comes of it."""
        self._world.episode.weather = weather

    @void
    def draw_debug_shape(self, shape: list[Any]) -> None:
        """There is nobody to see it."""
        del shape

    # --- actors

    @value
    def get_actor_definitions(self) -> list[Any]:
        """Blueprints."""
        return definitions()

    @value
    def get_spectator(self) -> list[Any]:
        """The spectator, which is an actor."""
        return self._world.encode(self._world.actor(self._world.episode.spectator))

    @value
    def get_actors_by_id(self, numbers: list[int]) -> list[Any]:
        """Those of them that are there."""
        actors = self._world.episode.actors
        return [self._world.encode(actors[number]) for number in numbers if number in actors]

    @value
    def get_actor_bounding_box(self, number: int) -> list[Any]:
        """BoundingBox."""
        return self._world.actor(number).box

    @value
    def spawn_actor(self, description: list[Any], transform: list[Any]) -> list[Any]:
        """A new actor."""
        return self._world.encode(self._batches.spawn(description, transform))

    @value
    def spawn_actor_with_parent(
        self, description: list[Any], transform: list[Any], parent: int, attachment: int, socket: str
    ) -> list[Any]:
        """A new actor that follows another, rigidly whatever the attachment."""
        del attachment, socket
        return self._world.encode(self._batches.spawn(description, transform, parent))

    @value
    def destroy_actor(self, number: int) -> bool:
        """Away with it, and with what is attached to it."""
        self._batches.destroy(number)
        return True

    @bare
    def apply_batch(self, commands: list[Any], do_tick: bool) -> list[Any]:
        """Commands in their order. Returns: Response<u32> for each."""
        answers = [self._batches.answer(command) for command in commands]
        if do_tick:
            self._tick()
        return answers

    # --- vehicles

    @void
    def apply_control_to_vehicle(self, number: int, control: list[Any]) -> None:
        """VehicleControl."""
        self._batches.control(number, control)

    @void
    def set_actor_target_velocity(self, number: int, velocity: list[float]) -> None:
        """Once; then pedals and resistance act."""
        self._batches.target_velocity(number, velocity)

    @void
    def set_actor_target_angular_velocity(self, number: int, velocity: list[float]) -> None:
        """[deg/s] for one tick; then the wheels steer again."""
        self._batches.target_angular_velocity(number, velocity)

    @void
    def add_actor_impulse(self, number: int, impulse: list[float]) -> None:
        """[N s]."""
        self._batches.impulse(number, impulse)

    @void
    def enable_actor_constant_velocity(self, number: int, velocity: list[float]) -> None:
        """Keep this velocity, in the vehicle's own frame, whatever the pedals say."""
        row = self._world.vehicle(number)
        row["constant"], row["constant_velocity"] = True, velocity

    @void
    def disable_actor_constant_velocity(self, number: int) -> None:
        """Pedals act again."""
        self._world.vehicle(number)["constant"] = False

    @void
    def set_actor_transform(self, number: int, transform: list[Any]) -> None:
        """Elsewhere, with the velocity it has."""
        self._world.put(number, *transform)

    @void
    def set_actor_location(self, number: int, location: list[float]) -> None:
        """Likewise; it is not turned."""
        self._world.put(number, location)

    @void
    def set_actor_simulate_physics(self, number: int, wanted: bool) -> None:
        """Without it, a vehicle stands where it is put."""
        self._batches.simulate_physics(number, wanted)

    @void
    def set_actor_enable_gravity(self, number: int, wanted: bool) -> None:
        """There is none."""
        del wanted
        self._world.actor(number)

    @void
    def set_actor_collisions(self, number: int, wanted: bool) -> None:
        """Without them, others pass through it."""
        self._world.vehicle(number)["collides"] = wanted

    @value
    def get_wheel_steer_angle(self, number: int, wheel: int) -> float:
        """[deg] of a front wheel (0, 1); a rear one stands straight."""
        row = self._world.vehicle(number)
        return float(np.degrees(row["control"][1] * row["max_steer"])) if wheel < 2 else 0.0

    @value
    def get_physics_control(self, number: int) -> list[Any]:
        """VehiclePhysicsControl: mass, drag and steering as they are; the rest is CARLA's usual and has no effect."""
        return self._batches.physics_control(number)

    @void
    def apply_physics_control(self, number: int, control: list[Any]) -> None:
        """Takes mass, drag and the front wheels' greatest angle; the rest is told again when asked."""
        self._batches.apply_physics_control(number, control)
