"""Vehicles that move: a kinematic bicycle each, all of them at once.

CARLA's frame: x east, y south, yaw in degrees clockwise seen from above, so that forward is (cos yaw, sin yaw) and a
positive steer turns right. The place of a vehicle is its centre, halfway between the axles.

Steering is without slip (Kong et al. 2015, "Kinematic and dynamic vehicle models for autonomous driving control
design", with the rear axle as reference): the front wheels stand at steer * max_steer, the rear axle runs on a circle
of radius wheelbase / tan(steer * max_steer), and within one tick it runs on that circle exactly.

Along the road, per unit of mass [m/s^2], at the speed v of the rear axle:

    drive   throttle * min(TRACTION, POWER / |v|)                       against it in reverse
    resist  brake * BRAKE + hand_brake * HAND_BRAKE + ROLLING + drag * v^2 + (1 - throttle) * ENGINE_BRAKING * |v|

Resistance stops a vehicle and never pushes it back. The numbers are those of a middling car; none is taken from
PhysX, and nothing of tyres, gears, suspension or gravity is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

__all__ = ["BRAKE", "ENGINE_BRAKING", "HAND_BRAKE", "POWER", "ROLLING", "TRACTION", "VEHICLE", "Vehicles"]

TRACTION = 4.0  # [m/s^2] at full throttle, from standing
POWER = 55.0  # [W/kg] at full throttle
BRAKE = 8.0  # [m/s^2] at full brake
HAND_BRAKE = 4.0  # [m/s^2]
ROLLING = 0.15  # [m/s^2]
ENGINE_BRAKING = 0.05  # [1/s] without throttle
_AIR = 0.5 * 1.2 * 2.2  # [kg/m] half the density of air, times the frontal area; times the drag coefficient: a force

VEHICLE = np.dtype(
    [
        ("id", "i8"),
        ("place", "f8", 3),  # [m] centre, at the height of the ground
        ("pitch", "f8"),  # [deg]
        ("roll", "f8"),  # [deg]
        ("yaw", "f8"),  # [rad]
        ("speed", "f8"),  # [m/s] of the rear axle, negative backwards
        ("velocity", "f8", 3),  # [m/s] of the centre
        ("acceleration", "f8", 3),  # [m/s^2] of the centre
        ("yaw_rate", "f8"),  # [rad/s]
        ("control", "f8", 7),  # throttle, steer, brake, hand brake, reverse, manual gear shift, gear
        ("physics", "?"),
        ("collides", "?"),
        ("constant", "?"),  # keeps `constant_velocity`
        ("constant_velocity", "f8", 3),  # [m/s] ahead, to the right, up
        ("spin", "f8"),  # [rad/s] for one tick; NaN: as the wheels stand
        ("extent", "f8", 3),  # [m] half sizes of the box
        ("box", "f8", 3),  # [m] the box's middle, from the vehicle's place
        ("wheelbase", "f8"),  # [m]
        ("max_steer", "f8"),  # [rad]
        ("mass", "f8"),  # [kg]
        ("drag", "f8"),  # coefficient
    ]
)
"""One vehicle's state and constants."""

_THROTTLE, _STEER, _BRAKE, _HAND_BRAKE, _REVERSE = range(5)


class Vehicles:
    """All vehicles of an episode, in the order of their spawning.

    Attributes:
        rows: VEHICLE, one for each.
    """

    def __init__(self) -> None:
        self.rows = np.zeros(0, VEHICLE)
        self._index: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, actor: int) -> bool:
        return actor in self._index

    def index(self, actor: int) -> int:
        """Row of an actor. Raises: KeyError."""
        return self._index[actor]

    def add(self, row: np.ndarray) -> None:
        """One more, of dtype VEHICLE and shape [1]."""
        self._index[int(row["id"][0])] = len(self.rows)
        self.rows = np.concatenate([self.rows, row])

    def remove(self, actors: Sequence[int]) -> None:
        """Those of them that are vehicles."""
        gone = [self._index[actor] for actor in actors if actor in self._index]
        if gone:
            self.rows = np.delete(self.rows, gone)
            self._index = {actor: index for index, actor in enumerate(self.rows["id"].tolist())}

    def set_velocity(self, actor: int, velocity: Sequence[float]) -> None:
        """Give it this velocity once; the part along its heading is kept, tyres take the rest. [m/s]"""
        row = self.rows[self._index[actor]]
        ahead = np.array([np.cos(row["yaw"]), np.sin(row["yaw"])])
        row["speed"] = float(ahead @ np.asarray(velocity[:2], float))
        row["velocity"] = (*(row["speed"] * ahead), 0.0)

    def push(self, actor: int, impulse: Sequence[float]) -> None:
        """Change its velocity by an impulse. [N s]"""
        row = self.rows[self._index[actor]]
        self.set_velocity(actor, row["velocity"] + np.asarray(impulse, float) / row["mass"])

    def put(self, actor: int, place: Sequence[float], rotation: Sequence[float] | None) -> None:
        """Elsewhere, and turned if a rotation (pitch, yaw, roll) [deg] is given. It keeps its velocity."""
        row = self.rows[self._index[actor]]
        row["place"] = place
        if rotation is not None:
            row["pitch"], row["roll"] = rotation[0], rotation[2]
            row["yaw"] = np.radians(rotation[1])
        if row["physics"]:
            self.set_velocity(actor, row["velocity"])

    def step(self, seconds: float) -> None:
        """One tick of all vehicles.

        Args:
            seconds: [s] its length.
        """
        rows = self.rows
        if not len(rows):
            return
        control = rows["control"]
        moved = rows["physics"]
        constant = rows["constant"] & moved
        before = rows["speed"]
        after, way = _along(before, control, rows["drag"] / rows["mass"], seconds)
        if constant.any():
            ahead = rows["constant_velocity"][:, 0]
            after, way = np.where(constant, ahead, after), np.where(constant, ahead * seconds, way)
        after, way = np.where(moved, after, 0.0), np.where(moved, way, 0.0)

        curvature = np.tan(control[:, _STEER] * rows["max_steer"]) / rows["wheelbase"]  # [1/m] of the rear axle's path
        turn, yaw_rate = way * curvature, after * curvature
        spinning = ~np.isnan(rows["spin"])
        if spinning.any():
            yaw_rate = np.where(spinning & moved, rows["spin"], yaw_rate)
            turn = np.where(spinning & moved, rows["spin"] * seconds, turn)
            rows["spin"] = np.nan
        yaw, half = rows["yaw"], rows["wheelbase"] / 2
        new_yaw, middle = yaw + turn, yaw + turn / 2
        chord = way * np.sinc(turn / (2 * np.pi))
        cos, sin = np.cos(new_yaw), np.sin(new_yaw)
        place = rows["place"]
        place[:, 0] += chord * np.cos(middle) + half * (cos - np.cos(yaw))
        place[:, 1] += chord * np.sin(middle) + half * (sin - np.sin(yaw))

        sideways = yaw_rate * half
        velocity = np.zeros((len(rows), 3))  # [vehicles, x y z]
        if constant.any():
            across = np.where(constant, rows["constant_velocity"][:, 1], 0.0)
            velocity[:, 2] = np.where(constant, rows["constant_velocity"][:, 2], 0.0)
            place[:, 0] -= across * seconds * np.sin(middle)
            place[:, 1] += across * seconds * np.cos(middle)
            place[:, 2] += velocity[:, 2] * seconds
            sideways = sideways + across
        velocity[:, 0] = after * cos - sideways * sin
        velocity[:, 1] = after * sin + sideways * cos
        rows["acceleration"] = (velocity - rows["velocity"]) / seconds
        rows["velocity"] = velocity
        rows["speed"], rows["yaw_rate"] = after, yaw_rate
        rows["yaw"] = np.pi - np.mod(np.pi - new_yaw, 2 * np.pi)  # (-pi, pi]

    def bounce(self, pairs: Int64[np.ndarray, "contacts 2"], impulse: Float64[np.ndarray, "contacts 2"]) -> None:
        """Take the closing speed out of vehicles that touch.

        Args:
            pairs: rows that touch.
            impulse: [N s] on the first of each pair; the second gets the opposite.
        """
        for (one, other), change in zip(pairs.tolist(), impulse, strict=True):
            for index, sign in ((one, 1.0), (other, -1.0)):
                row = self.rows[index]
                if row["physics"] and not row["constant"]:
                    self.push(int(row["id"]), (*(sign * change), 0.0))


def _along(
    speed: Float64[np.ndarray, " vehicles"],
    control: Float64[np.ndarray, "vehicles 7"],
    drag: Float64[np.ndarray, " vehicles"],
    seconds: float,
) -> tuple[Float64[np.ndarray, " vehicles"], Float64[np.ndarray, " vehicles"]]:
    """Speed after a tick [m/s], and the way driven in it [m]."""
    throttle = control[:, _THROTTLE]
    size = np.abs(speed)
    drive = throttle * np.minimum(TRACTION, POWER / np.maximum(size, 1e-3)) * (1.0 - 2.0 * control[:, _REVERSE])
    resist = control[:, _BRAKE] * BRAKE + control[:, _HAND_BRAKE] * HAND_BRAKE + ROLLING
    resist = resist + _AIR * drag * size * size + (1.0 - throttle) * ENGINE_BRAKING * size
    standing = speed == 0.0
    net = drive - np.where(standing, np.sign(drive), np.sign(speed)) * resist
    after = speed + net * seconds
    stopped = np.where(standing, np.abs(drive) <= resist, after * speed < 0.0)
    way = np.where(stopped, speed * size / np.maximum(2.0 * np.abs(net), 1e-9), (speed + after) / 2 * seconds)
    return np.where(stopped, 0.0, after), way
