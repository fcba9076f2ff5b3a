"""What is done per vehicle around CARLA, compiled: where it is on its line, which pedals and how much steer.

All in our frame (see `core.frames`): metres, radians, left is positive. The tables come from `Roads` and are made
once per world. A vehicle is taken for a bicycle whose rear axle does not slip (Kong et al. 2015); the point that
keeps to the line is the middle of its front bumper, as in SUMO, and `speed` is the speed of that point.

    steering   Hoffmann et al. 2007 (Stanley), about the front bumper instead of the front axle:
               phi = theta(s + v * preview) - psi - atan(gain * e / (softening + v))
               delta = atan(wheelbase / d * tan(phi)),  d from the rear axle to the bumper
    speed      the reference moves towards the target within the limits of acceleration and braking; the rear axle
               must have r = reference * cos(phi) of it, and gets the acceleration
               a = (r - r_before) / dt + kp e + ki sum(e) dt + kd (e - e_before) / dt,  e = r_before - v_rear

The integral stands still while a pedal is at its end and the error would push it further (anti-windup).
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.simulators.kernels import kernel

__all__ = ["GAINS", "MEMORY", "READING", "decide", "follow", "gains"]

READING = ("x", "y", "heading", "ahead", "across")
"""Columns of what was read of a vehicle: place of its centre [m], heading [rad], velocity in its own axes [m/s]."""

MEMORY = ("reference", "rear", "integral", "error", "line", "path_error", "steer")
"""Columns of what the controllers remember: reference speed of the bumper and of the rear axle [m/s], the integral
part [m/s^2], the last error [m/s], heading of the line [rad], distance left of it [m], the last phi [rad]."""

_X, _Y, _HEADING, _AHEAD, _ACROSS = range(len(READING))
_REFERENCE, _REAR, _INTEGRAL, _ERROR, _LINE, _PATH_ERROR, _PHI = range(len(MEMORY))
_THROTTLE, _STEER, _BRAKE = range(3)
_BACK, _AHEAD_OF_TIME = 1.5, 3.0  # [m] how far behind and ahead of the last place on the line the next is sought
_STANDING = 0.2  # [m/s] slower than this, and told to stand: the brake is held

GAINS = (
    "kp",
    "ki",
    "kd",
    "windup",
    "full_throttle",
    "full_brake",
    "coast",
    "lag",
    "steer_gain",
    "softening",
    "limit",
    "wheelbase",
    "max_steer",
    "rear_to_bumper",
    "dt",
)
"""Entries of what `gains` makes. SI; angles in radians."""


def gains(
    settings: CarlaSettings, *, wheelbase: float, max_steer: float, length: float, dt: float
) -> Float64[np.ndarray, " gains"]:
    """The controllers' constants, in the order of GAINS.

    Args:
        settings: gains.
        wheelbase: [m] of the vehicle that the server has; its axles are taken to be as far from its middle.
        max_steer: [rad] of the front wheels at steer 1.
        length: [m] from bumper to bumper.
        dt: [s] a step.
    """
    speed, steering = settings.speed_control, settings.steering
    return np.array(
        [
            speed.kp,
            speed.ki,
            speed.kd,
            speed.windup,
            speed.full_throttle,
            speed.full_brake,
            speed.coast,
            speed.lag,
            steering.gain,
            steering.softening,
            math.radians(steering.limit),
            wheelbase,
            max_steer,
            (wheelbase + length) / 2,
            dt,
        ]
    )


@kernel
def _wrap(angle: float) -> float:
    return math.pi - (math.pi - angle) % (2.0 * math.pi)


@kernel
def _line_heading(points: Float64[np.ndarray, "samples 3"], count: int, spacing: float, at: float) -> float:
    """Heading of a line at a distance along it; straight beyond its ends. [rad]"""
    place = min(max(at / spacing, 0.0), float(count - 1))
    k = min(int(place), count - 2)
    turn = _wrap(points[k + 1, 2] - points[k, 2])
    return float(points[k, 2] + (place - k) * turn)


@kernel
def follow(
    rows: Int64[np.ndarray, " rows"],
    reading: Float64[np.ndarray, "slots 5"],
    memory: Float64[np.ndarray, "slots 7"],
    progress: Float64[np.ndarray, " slots"],
    routes: Int16[np.ndarray, " slots"],
    points: Float64[np.ndarray, "routes samples 3"],
    samples: Int64[np.ndarray, " routes"],
    lengths: Float64[np.ndarray, " routes"],
    spacing: float,
    length: float,
    preview: float,
) -> None:
    """Find each vehicle's front bumper on the line of its route.

    Writes `progress` [m] (beyond the end of the line it goes on), and of `memory` the heading of the line where the
    bumper will be in `preview` seconds, and the distance from the line, positive when the bumper is left of it.

    Args:
        rows: slots of vehicles.
        reading: see READING.
        memory: see MEMORY.
        progress: [m] of the last step; the next is sought near it.
        routes: of each slot.
        points, samples, lengths, spacing: of `Roads`.
        length: [m] of a vehicle.
        preview: [s]
    """
    for slot in rows:
        route = routes[slot]
        line, count = points[route], samples[route]
        heading = reading[slot, _HEADING]
        x = reading[slot, _X] + length / 2 * math.cos(heading)
        y = reading[slot, _Y] + length / 2 * math.sin(heading)
        first = max(0, int((progress[slot] - _BACK) / spacing))
        last = min(count - 2, int((progress[slot] + _AHEAD_OF_TIME) / spacing))
        first = min(first, last)
        best, found, error = np.inf, progress[slot], 0.0
        for k in range(first, last + 1):
            begin = k * spacing
            end = lengths[route] if k == count - 2 else begin + spacing
            dx, dy = line[k + 1, 0] - line[k, 0], line[k + 1, 1] - line[k, 1]
            squared = dx * dx + dy * dy
            if squared == 0.0:
                continue
            away_x, away_y = x - line[k, 0], y - line[k, 1]
            share = (away_x * dx + away_y * dy) / squared
            if share < 0.0 and k > 0:
                share = 0.0
            if share > 1.0 and k < count - 2:
                share = 1.0
            off_x, off_y = away_x - share * dx, away_y - share * dy
            gap = off_x * off_x + off_y * off_y
            if gap < best:
                best = gap
                found = begin + share * (end - begin)
                error = math.copysign(math.sqrt(gap), dx * off_y - dy * off_x)
        progress[slot] = found
        speed = max(0.0, reading[slot, _AHEAD])
        memory[slot, _LINE] = _line_heading(line, count, spacing, found + speed * preview)
        memory[slot, _PATH_ERROR] = error


@kernel
def decide(
    rows: Int64[np.ndarray, " rows"],
    reading: Float64[np.ndarray, "slots 5"],
    memory: Float64[np.ndarray, "slots 7"],
    target: Float64[np.ndarray, " slots"],
    ours: Bool[np.ndarray, " slots"],
    limits: Float64[np.ndarray, " 3"],
    gains: Float64[np.ndarray, " gains"],
    pedals: Float64[np.ndarray, "rows 3"],
) -> None:
    """Throttle, steer and brake of each vehicle for the coming step; see the module.

    Args:
        rows: slots of vehicles.
        reading, memory: see READING and MEMORY; `memory` is brought up to date.
        target: [m/s] of the front bumper.
        ours: who keeps our limit of braking; the others may brake harder.
        limits: [m/s^2] acceleration, braking, braking of those that are not ours.
        gains: see GAINS.
        pedals: written: throttle in [0, 1], steer in [-1, 1] (CARLA's: right is positive), brake in [0, 1].
    """
    kp, ki, kd, windup, full_throttle, full_brake, coast, lag = gains[:8]
    steer_gain, softening, limit, wheelbase, max_steer, lever, dt = gains[8:]
    for i in range(len(rows)):
        slot = rows[i]
        speed = reading[slot, _AHEAD]
        bumper = math.hypot(speed, reading[slot, _ACROSS])  # the caller adds the turning to `across`
        aim = memory[slot, _LINE] - reading[slot, _HEADING]
        aim -= math.atan(steer_gain * memory[slot, _PATH_ERROR] / (softening + max(0.0, speed)))
        phi = min(max(_wrap(aim), -limit), limit)
        steer = math.atan(wheelbase / lever * math.tan(phi)) / max_steer
        if steer > 1.0 or steer < -1.0:
            steer = math.copysign(1.0, steer)
            phi = math.atan(lever / wheelbase * math.tan(math.copysign(max_steer, steer)))
        pedals[i, _STEER] = -steer

        braking = limits[1] if ours[slot] else limits[2]
        before = min(max(memory[slot, _REFERENCE], bumper - lag), bumper + lag)
        reference = min(max(target[slot], before - braking * dt, 0.0), before + limits[0] * dt)
        rear_before = memory[slot, _REAR]
        if before != memory[slot, _REFERENCE]:
            rear_before = before * math.cos(memory[slot, _PHI])
        rear = reference * math.cos(phi)
        error = rear_before - speed
        wanted = (
            (rear - rear_before) / dt
            + kp * error
            + ki * memory[slot, _INTEGRAL]
            + kd * (error - memory[slot, _ERROR]) / dt
        )
        stuck_up, stuck_down = wanted >= full_throttle, wanted <= -full_brake
        if not ((stuck_up and error > 0.0) or (stuck_down and error < 0.0)):
            bound = windup / ki if ki > 0.0 else 0.0
            memory[slot, _INTEGRAL] = min(max(memory[slot, _INTEGRAL] + error * dt, -bound), bound)
        pedals[i, _THROTTLE] = min(1.0, wanted / full_throttle) if wanted > 0.0 else 0.0
        pedals[i, _BRAKE] = min(1.0, -wanted / full_brake) if wanted < -coast else 0.0
        if reference == 0.0 and speed < _STANDING:
            pedals[i, _THROTTLE], pedals[i, _BRAKE] = 0.0, 1.0
            memory[slot, _INTEGRAL], error = 0.0, 0.0
        memory[slot, _REFERENCE], memory[slot, _REAR] = reference, rear
        memory[slot, _ERROR], memory[slot, _PHI] = error, phi
