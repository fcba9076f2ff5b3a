"""The CARLA server, and how vehicles are driven in it; nothing here matters to SUMO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between

__all__ = ["CarlaSettings", "SpeedControlSettings", "SteeringSettings"]


@dataclass(frozen=True, slots=True)
class SpeedControlSettings:
    """A PID controller with feed-forward: reference speed -> throttle or brake."""

    kp: Annotated[float, Between(0, 20)] = 5.0  # [1/s] acceleration per error of the speed
    ki: Annotated[float, Between(0, 20)] = 6.0  # [1/s^2] per error summed over time
    kd: Annotated[float, Between(0, 1)] = 0.0  # acceleration per rate of change of the error
    windup: Annotated[float, Between(0, 10)] = 3.0  # [m/s^2] the integral part never asks for more
    full_throttle: Annotated[float, Between(0.5, 20)] = 4.0  # [m/s^2] what full throttle is taken to give
    full_brake: Annotated[float, Between(0.5, 20)] = 8.0  # [m/s^2] likewise full brake
    coast: Annotated[float, Between(0, 2)] = 0.0  # [m/s^2] between this much braking and none, no pedal is touched
    lag: Annotated[float, Between(0.1, 10)] = 1.5  # [m/s] the reference runs away from the real speed by no more


@dataclass(frozen=True, slots=True)
class SteeringSettings:
    """Stanley's controller, with the middle of the front bumper as the point that keeps to the line."""

    gain: Annotated[float, Between(0, 20)] = 4.0  # [1/s] of the distance from the line
    softening: Annotated[float, Between(0, 10)] = 1.0  # [m/s] added to the speed: calm when slow
    preview: Annotated[float, Between(0, 2)] = 0.025  # [s] the line's direction is taken so far ahead
    limit: Annotated[float, Between(5, 80)] = 60.0  # [deg] between the vehicle and the way of its bumper, at most


@dataclass(frozen=True, slots=True)
class CarlaSettings:
    """Where the server is, how long it may take, what it is asked to do."""

    host: str = "127.0.0.1"  # of the server
    port: Annotated[int, Between(1, 65533)] = 2000  # its RPC port
    connect_timeout: Annotated[float, Between(0.1, 3600)] = 20.0  # [s] for an answer when connecting
    load_timeout: Annotated[float, Between(0.1, 3600)] = 120.0  # [s] for a world
    tick_timeout: Annotated[float, Between(0.1, 3600)] = 10.0  # [s] for an answer in a step
    world_reload_every: Annotated[int, Between(0, None)] = 0  # [episodes] load the world anew; 0: once, at the start
    server_memory_gib: Annotated[float | None, Between(0.1, None)] = None  # a server with more asks for a fresh start
    rendering: bool = False  # let the server draw
    blueprint: str = "vehicle.lincoln.mkz_2020"  # of every vehicle
    collisions: Literal["geometric", "sensor"] = "geometric"  # boxes that overlap, or CARLA's collision sensors
    spawn_height: Annotated[float, Between(0, 5)] = 0.3  # [m] above the road
    spawn_lift: Annotated[float, Between(0, 5)] = 0.2  # [m] higher at each further try
    spawn_tries: Annotated[int, Between(1, 20)] = 3  # in one step; then it backs off
    off_route: Annotated[float, Between(0.5, 50)] = 4.0  # [m] from its line: a vehicle that strays further is taken out
    speed_control: SpeedControlSettings = field(default_factory=SpeedControlSettings)
    steering: SteeringSettings = field(default_factory=SteeringSettings)
