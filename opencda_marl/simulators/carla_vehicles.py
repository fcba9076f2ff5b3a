"""Actors of our vehicles: spawned, told, read, destroyed. What they are like is asked once.

Commands are kept per slot and changed in place: making them anew costs six times as much.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from opencda_marl.core.errors import OpenCDAError, RecycleError, SimulatorError
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.simulators.carla_reading import RAW
from opencda_marl.simulators.carla_session import ROLE, Session
from opencda_marl.simulators.server_memory import server_memory

__all__ = ["Arrival", "Fleet", "Place", "Sensors"]

_HIGH = 20.0  # [m] above the road: where one vehicle is looked at before any drives
_LONGEST_PAUSE = 20  # steps between two tries to spawn a vehicle, at most
_GIB = 2.0**30


@dataclass(slots=True)
class Arrival:
    """A vehicle that may enter."""

    index: int  # in the schedule
    failures: int = 0  # steps in which all tries were refused
    pause: int = 0  # steps until the next try


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how a vehicle enters, in CARLA's frame."""

    name: str
    x: float  # [m] of its middle
    y: float  # [m]
    z: float  # [m] of the road
    yaw: float  # [deg]
    speed: float  # [m/s]


class Fleet:
    """Who is in which slot, and how they are spoken to.

    Args:
        session: of the server.
        settings: blueprint, and how to spawn.
        slots: of the simulator.
        at: above which a vehicle is measured.

    Raises:
        SimulatorError: not even one vehicle can be spawned.
    """

    def __init__(self, session: Session, settings: CarlaSettings, slots: int, at: Place) -> None:
        self._session, self._settings = session, settings
        self._carla = session.carla
        self._command = session.carla.command
        self._blueprint = session.blueprints.find(settings.blueprint)
        self._actors = [0] * slots  # actor of each slot, 0: none
        self._slot_of: dict[int, int] = {}
        orders = [self._command.ApplyVehicleControl(0, self._carla.VehicleControl()) for _ in range(slots)]
        self._orders: list[Any] = orders
        self._pedals: list[Any] = [order.control for order in orders]
        self.box = (0.0, 0.0)  # [m] its middle, ahead and to the right of the actor's place
        self._measure(at)

    def _measure(self, at: Place) -> None:
        """Box, wheelbase and steering angle of the blueprint: one vehicle is spawned for that."""
        (answer,) = self._session.batch([self.spawning(at, _HIGH)])
        if answer.error:
            raise SimulatorError(
                f"CARLA cannot spawn a {self._settings.blueprint}: {answer.error}",
                fix="choose another carla.blueprint; if none can be spawned, restart the server",
            )
        self._session.tick()
        actor = self._session.ask("measuring a vehicle", lambda world: world.get_actor(answer.actor_id))
        box = self._session.ask("measuring a vehicle", lambda _: actor.bounding_box)
        wheels = self._session.ask("measuring a vehicle", lambda _: actor.get_physics_control()).wheels
        self._session.batch([self._command.DestroyActor(answer.actor_id)])
        self._session.tick()
        self.length, self.width = 2 * box.extent.x, 2 * box.extent.y
        self.box = (float(box.location.x), float(box.location.y))
        places = np.array([[w.position.x, w.position.y] for w in wheels[:4]]) / 100.0  # [m]; CARLA says cm
        axles = float(np.linalg.norm(places[:2].mean(axis=0) - places[2:].mean(axis=0))) if len(places) == 4 else 0.0
        self.wheelbase = axles if 0.4 < axles / self.length < 0.8 else 0.58 * self.length
        angle = max((float(wheel.max_steer_angle) for wheel in wheels), default=0.0)
        self.max_steer = math.radians(angle if 10.0 < angle < 90.0 else 70.0)

    # ---------------------------------------------------------------- in each step

    def controls(self, slots: list[int], pedals: list[list[float]]) -> list[Any]:
        """Commands for these slots: throttle, steer, brake of each."""
        for slot, (throttle, steer, brake) in zip(slots, pedals, strict=True):
            told = self._pedals[slot]
            told.throttle, told.steer, told.brake = throttle, steer, brake
        return [self._orders[slot] for slot in slots]

    def read(
        self, slots: list[int], snapshot: Any
    ) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, "rows 6"], list[int]]:
        """Slots that are in the snapshot, what it says of them (`carla_reading.RAW`), and slots that are not in it."""
        find, actors = snapshot.find, self._actors
        found: list[float] = []
        rows, lost = slots, []
        for slot in slots:
            actor = find(actors[slot])
            if actor is None:
                lost.append(slot)
                continue
            transform, velocity = actor.get_transform(), actor.get_velocity()
            place = transform.location
            found += (place.x, place.y, place.z, transform.rotation.yaw, velocity.x, velocity.y)
        if lost:
            rows = [slot for slot in slots if slot not in lost]
        return np.array(rows, np.int64), np.array(found, np.float64).reshape(-1, len(RAW)), lost

    # ---------------------------------------------------------------- coming and going

    def mirroring(self, slot: int, place: Place) -> Any:
        """The command that puts the vehicle of a slot there, on the road."""
        return self._command.ApplyTransform(self._actors[slot], self._transform(place, 0.0))

    def pushing(self, slot: int, place: Place) -> Any:
        """The command that gives the vehicle of a slot the speed of a place."""
        return self._command.ApplyTargetVelocity(self._actors[slot], self._velocity(place))

    def aboard(self, slot: int) -> bool:
        """Has this slot an actor?"""
        return self._actors[slot] != 0

    def board(self, slot: int, actor: int) -> None:
        """An actor has this slot now."""
        self._actors[slot] = actor
        self._slot_of[actor] = slot
        order = self._command.ApplyVehicleControl(actor, self._carla.VehicleControl())
        self._orders[slot], self._pedals[slot] = order, order.control

    def exchange(
        self, gone: list[int], arrivals: list[Arrival], places: list[Place], sensors: Sensors | None
    ) -> tuple[list[tuple[Arrival, int]], int]:
        """Destroy the vehicles of some slots, and spawn others: try, try higher, then back off.

        Args:
            gone: slots.
            arrivals: who waits; those whose pause is over are tried.
            places: of each of them.
            sensors: that go and come with the vehicles.

        Returns:
            who is on the road now with its actor, and how many tries were refused.
        """
        leaving = [self._command.DestroyActor(actor) for actor in self.dismiss(gone, sensors)]
        waiting: list[tuple[Arrival, Place]] = []
        for arrival, place in zip(arrivals, places, strict=True):
            arrival.pause -= 1
            if arrival.pause < 0:
                waiting.append((arrival, place))
        spawned: list[tuple[Arrival, int]] = []
        refused = 0
        for attempt in range(self._settings.spawn_tries):
            lift = self._settings.spawn_height + attempt * self._settings.spawn_lift
            commands = leaving + [self.spawning(place, lift) for _, place in waiting]
            if not commands:
                break
            answers = self._session.batch(commands)[len(leaving) :]
            leaving = []
            answered = list(zip(waiting, answers, strict=True))
            spawned += [(arrival, answer.actor_id) for (arrival, _), answer in answered if not answer.error]
            waiting = [pair for pair, answer in answered if answer.error]
            refused += len(waiting)
            if not waiting:
                break
        for arrival, _ in waiting:
            arrival.pause = min(2**arrival.failures, _LONGEST_PAUSE) - 1
            arrival.failures += 1
        if sensors is not None and spawned:
            sensors.attach([actor for _, actor in spawned])
        return spawned, refused

    def spawning(self, place: Place, lift: float) -> Any:
        """The command that puts a vehicle there, so much above the road [m], at its speed."""
        self._blueprint.set_attribute("role_name", ROLE + place.name)
        command = self._command.SpawnActor(self._blueprint, self._transform(place, lift))
        return command.then(self._command.ApplyTargetVelocity(self._command.FutureActor, self._velocity(place)))

    def _velocity(self, place: Place) -> Any:
        yaw = math.radians(place.yaw)
        return self._carla.Vector3D(place.speed * math.cos(yaw), place.speed * math.sin(yaw), 0.0)

    def _transform(self, place: Place, lift: float) -> Any:
        carla, yaw = self._carla, math.radians(place.yaw)
        cos, sin = math.cos(yaw), math.sin(yaw)
        ahead, right = self.box
        x, y = place.x - ahead * cos + right * sin, place.y - ahead * sin - right * cos
        return carla.Transform(carla.Location(x, y, place.z + lift), carla.Rotation(yaw=place.yaw))

    def dismiss(self, slots: list[int], sensors: Sensors | None) -> list[int]:
        """Actors that go with these slots, sensors first."""
        actors = [self._actors[slot] for slot in slots]
        for slot, actor in zip(slots, actors, strict=True):
            del self._slot_of[actor]
            self._actors[slot] = 0
        return ([] if sensors is None else sensors.detach(actors)) + actors

    def clear(self, sensors: Sensors | None) -> None:
        """Nobody is on the road any more."""
        actors = self.dismiss(sorted(self._slot_of.values()), sensors)
        if actors:
            self._session.batch([self._command.DestroyActor(actor) for actor in actors])
            self._session.tick()  # a real server takes them off the road in the next step

    def leave(self, sensors: Sensors | None) -> None:
        """As `clear`, when the end is near: it does not matter if the server is gone."""
        if self._session.lost:
            self.forget()
            return
        try:
            self.clear(sensors)
        except OpenCDAError:
            self.forget()

    def forget(self) -> None:
        """The world is gone, and everybody with it."""
        self._slot_of.clear()
        self._actors = [0] * len(self._actors)

    def slots_of(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Slots of pairs of actors; -1 where the other is none of ours."""
        return [(self._slot_of[a], self._slot_of.get(b, -1)) for a, b in pairs if a in self._slot_of]

    def weigh(self) -> None:
        """Ask for a fresh start when the server has grown too large.

        Raises:
            RecycleError: it has.
        """
        limit = self._settings.server_memory_gib
        if limit is None:
            return
        found = server_memory(self._settings.host, self._settings.port)
        if found is not None and found > limit * _GIB:
            raise RecycleError(
                f"the CARLA server has grown to {found / _GIB:.1f} GiB, beyond carla.server_memory_gib ({limit:g})",
                fix="restart the server",
            )


class Sensors:
    """CARLA's collision sensors, one a vehicle; what they say is kept by the frame it belongs to.

    Events have no order to the world's frames: one of this step may come in the next.

    Args:
        session: of the server.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._blueprint = session.blueprints.find("sensor.other.collision")
        self._blueprint.set_attribute("role_name", ROLE + "sensor")
        self._of: dict[int, Any] = {}  # vehicle's actor -> sensor
        self._heard: deque[tuple[int, int, int]] = deque()  # frame, actor, other actor

    def attach(self, actors: list[int]) -> None:
        """Give each of these vehicles a sensor."""
        carla, command = self._session.carla, self._session.carla.command
        spawning = [command.SpawnActor(self._blueprint, carla.Transform(), actor) for actor in actors]
        answers = self._session.batch(spawning)
        found = [answer.actor_id for answer in answers if not answer.error]
        if len(found) != len(actors):
            raise SimulatorError(
                f"CARLA cannot spawn a collision sensor: {next(a.error for a in answers if a.error)}",
                fix="set carla.collisions to geometric",
            )
        for actor, sensor in zip(actors, found, strict=True):
            made = self._session.ask("attaching a sensor", lambda world, sensor=sensor: world.get_actor(sensor))
            made.listen(self._hear)
            self._of[actor] = made

    def _hear(self, event: Any) -> None:
        self._heard.append((event.frame, event.actor.id, event.other_actor.id))

    def collect(self, frame: int) -> list[tuple[int, int]]:
        """Pairs that touched up to a frame, and were not collected before; the lower actor first, in their order."""
        pairs = set()
        for _ in range(len(self._heard)):
            event = self._heard.popleft()
            if event[0] > frame:
                self._heard.append(event)
            else:
                pairs.add((event[1], event[2]))
        return sorted(pairs)

    def detach(self, actors: list[int]) -> list[int]:
        """Stop listening to the sensors of these vehicles; returns the sensors' own actors."""
        gone = [self._of.pop(actor) for actor in actors if actor in self._of]
        for sensor in gone:
            sensor.stop()
        return [sensor.id for sensor in gone]
