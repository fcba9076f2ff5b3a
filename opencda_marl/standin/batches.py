"""What is done to actors, by calls and by the commands of a batch alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from opencda_marl.standin import wire
from opencda_marl.standin.streams import Streams
from opencda_marl.standin.wire import Command
from opencda_marl.standin.world import Actor, RefusedError, World

__all__ = ["Batches"]

_MASS, _DRAG, _WHEELS = 11, 12, 15  # places in VehiclePhysicsControl
_MAX_STEER = 2  # place in WheelPhysicsControl


class Batches:
    """Actions on a world, each as a method; `answer` takes them as commands."""

    def __init__(self, world: World, streams: Streams) -> None:
        self._world, self._streams = world, streams
        self._commands: dict[int, Callable[..., None]] = {
            Command.DESTROY_ACTOR: self.destroy,
            Command.APPLY_VEHICLE_CONTROL: self.control,
            Command.APPLY_VEHICLE_PHYSICS_CONTROL: self.apply_physics_control,
            Command.APPLY_TRANSFORM: lambda number, transform: world.put(number, *transform),
            Command.APPLY_TARGET_VELOCITY: self.target_velocity,
            Command.APPLY_TARGET_ANGULAR_VELOCITY: self.target_angular_velocity,
            Command.APPLY_IMPULSE: self.impulse,
            Command.SET_SIMULATE_PHYSICS: self.simulate_physics,
            Command.SET_ENABLE_GRAVITY: self._nothing,
            Command.SET_AUTOPILOT: self._nothing,
            Command.SHOW_DEBUG_TELEMETRY: self._nothing,
            Command.SET_VEHICLE_LIGHT_STATE: self._lights,
            Command.APPLY_LOCATION: world.put,
        }

    def answer(self, command: list[Any]) -> list[Any]:
        """Do one command. Returns: Response<u32>, the actor's number."""
        index, payload = command[0]
        try:
            if index == Command.SPAWN_ACTOR:
                return wire.ok(self._spawn(payload))
            if index not in self._commands:
                name = Command(index).name.lower() if index in set(Command) else f"number {index}"
                raise RefusedError(f"the stand-in does not have the command {name}")
            self._commands[index](*payload)
        except RefusedError as error:
            return wire.failed(str(error))
        return wire.ok(int(payload[0]))

    def _spawn(self, payload: list[Any]) -> int:
        description, transform, parent, _attachment, _socket, do_after = payload
        number = self.spawn(description, transform, int(parent[1]) if parent[0] else 0).number
        for index, rest in (command[0] for command in do_after):
            after = [[index, [number, *rest[1:]]]]  # the actor of what is done after is not known to the client yet
            self.answer(after)
        return number

    # --- actors

    def spawn(self, description: list[Any], transform: list[Any], parent: int = 0) -> Actor:
        """Raises: RefusedError."""
        actor = self._world.spawn(description, transform, parent)
        if actor.stream:
            self._streams.open(actor.stream)
        return actor

    def destroy(self, number: int) -> None:
        """Raises: RefusedError."""
        gone = self._world.destroy([number])
        if not gone:
            raise RefusedError("unable to destroy actor: not found")
        for actor in gone:
            if actor.stream:
                self._streams.close(actor.stream)

    # --- vehicles; all raise RefusedError for what is none

    def control(self, number: int, control: list[Any]) -> None:
        """VehicleControl. Out of range is cut to the range, as PhysX does."""
        throttle, steer, brake, *rest = _finite(control)
        row = self._world.vehicle(number)
        row["control"] = (
            min(max(throttle, 0.0), 1.0),
            min(max(steer, -1.0), 1.0),
            min(max(brake, 0.0), 1.0),
            *rest,
        )

    def target_velocity(self, number: int, velocity: list[float]) -> None:
        """[m/s] in the world's frame."""
        self._world.vehicle(number)
        self._world.episode.vehicles.set_velocity(number, _finite(velocity))

    def target_angular_velocity(self, number: int, velocity: list[float]) -> None:
        """[deg/s]; only the turn about the vertical means something."""
        self._world.vehicle(number)["spin"] = np.radians(_finite(velocity)[2])

    def impulse(self, number: int, impulse: list[float]) -> None:
        """[N s]."""
        self._world.vehicle(number)
        self._world.episode.vehicles.push(number, _finite(impulse))

    def simulate_physics(self, number: int, wanted: bool) -> None:
        """Without it, it stands where it is put."""
        row = self._world.vehicle(number)
        row["physics"] = wanted
        if not wanted:
            row["speed"], row["velocity"] = 0.0, 0.0

    def physics_control(self, number: int) -> list[Any]:
        """VehiclePhysicsControl. Wheels: front left and right, rear left and right; places in cm of the world."""
        row = self._world.vehicle(number)
        kept = self._world.episode.physics_controls.get(number)
        if kept is not None:
            return kept
        cos, sin = float(np.cos(row["yaw"])), float(np.sin(row["yaw"]))
        half, side = float(row["wheelbase"]) / 2, 0.8 * float(row["extent"][1])
        steer = float(np.degrees(row["max_steer"]))
        wheels = []
        for ahead, right in ((half, -side), (half, side), (-half, -side), (-half, side)):
            x, y = row["place"][0] + ahead * cos - right * sin, row["place"][1] + ahead * sin + right * cos
            place = [100.0 * float(x), 100.0 * float(y), 100.0 * float(row["place"][2]) + 35.0]
            wheels.append([3.5, 0.25, steer if ahead > 0 else 0.0, 35.0, 1500.0, 3000.0, 3.0, 20.0, 3000.0, place])
        gears = [[4.0, 0.5, 0.65], [2.0, 0.5, 0.65], [1.5, 0.5, 0.65], [1.1, 0.5, 0.65], [0.8, 0.5, 0.65]]
        return [
            [[0.0, 400.0], [1890.0, 500.0], [5729.0, 400.0]],
            6000.0, 1.0, 0.15, 2.0, 0.35, True, 0.5, 10.0, 4.0,
            gears,
            float(row["mass"]),
            float(row["drag"]),
            [0.0, 0.0, -0.3],
            [[0.0, 1.0], [120.0, 1.0]],
            wheels,
            False,
        ]  # fmt: skip

    def apply_physics_control(self, number: int, control: list[Any]) -> None:
        """Mass, drag and the front wheels' greatest angle count."""
        row = self._world.vehicle(number)
        row["mass"], row["drag"] = control[_MASS], control[_DRAG]
        row["max_steer"] = np.radians(max(wheel[_MAX_STEER] for wheel in control[_WHEELS]))
        self._world.episode.physics_controls[number] = control

    def _lights(self, number: int, state: list[int] | int) -> None:
        self._world.vehicle(number)
        self._world.episode.lights[number] = int(state[0] if isinstance(state, list) else state)

    def _nothing(self, number: int, wanted: bool) -> None:
        """Has no effect here beyond asking for an actor that is there."""
        del wanted
        self._world.actor(number)


def _finite(numbers: list[Any]) -> list[Any]:
    """As they are. Raises: RefusedError, for what would spoil a vehicle for good."""
    if not all(map(math.isfinite, numbers)):
        raise RefusedError(f"{numbers} are not finite numbers")
    return numbers
