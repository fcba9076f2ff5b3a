"""The crossing as arrays: routes, centre lines, limits. Every simulator and the environment share it.

A route is one way through: entry lane, lane inside the junction, exit lane. All distances run along
its centre line from the route's beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Float64, Int64

__all__ = ["Movement", "Roads"]


class Movement(IntEnum):
    """What a route does at the junction."""

    RIGHT = 0
    STRAIGHT = 1
    LEFT = 2


@dataclass(frozen=True, slots=True)
class Roads:
    """Geometry of every route; `points` samples centre lines at equal distances `spacing`."""

    network: str  # path of the file it was read from
    arms: tuple[str, ...]  # names of the entry edges, in the order of `arm`
    arm_heading: Float64[np.ndarray, " arms"]  # [rad] driving direction at the entry
    arm: Int64[np.ndarray, " routes"]
    exit_arm: Int64[np.ndarray, " routes"]
    lane: Int64[np.ndarray, " routes"]  # index from the right, kept through the junction
    movement: Int64[np.ndarray, " routes"]  # Movement
    entry_edge: tuple[str, ...]  # simulator's names, one per route
    exit_edge: tuple[str, ...]
    length: Float64[np.ndarray, " routes"]  # [m] whole route
    stop_line: Float64[np.ndarray, " routes"]  # [m] end of the entry lane
    junction_exit: Float64[np.ndarray, " routes"]  # [m] beginning of the exit lane
    limit_entry: Float64[np.ndarray, " routes"]  # [m/s] on the arm
    limit_inside: Float64[np.ndarray, " routes"]  # [m/s] through the junction
    limit_exit: Float64[np.ndarray, " routes"]  # [m/s] behind it
    spacing: float  # [m] between samples
    points: Float64[np.ndarray, "routes samples 3"]  # x [m], y [m], heading [rad]; the last is repeated past the end
    samples: Int64[np.ndarray, " routes"]  # how many samples of `points` are real; the last of them is the very end
    origin: tuple[float, float] = (0.0, 0.0)  # [m] the junction's centre in the file's own coordinates

    @property
    def routes(self) -> int:
        """How many routes there are."""
        return len(self.entry_edge)

    def free_flow_time(
        self, route: int, departure_speed: float, acceleration: float, braking: float, *, departure: float = 5.0
    ) -> float:
        """Travel time of a lone vehicle that drives as fast as limits and comfort allow. [s]

        Args:
            route: index of the route.
            departure_speed: [m/s].
            acceleration: [m/s^2] upper bound.
            braking: [m/s^2] comfortable braking before a lower limit.
            departure: [m] where the front bumper is when time begins: simulators place a vehicle one length in.
        """
        step = 0.05  # [s]
        position, speed, time = departure, departure_speed, 0.0
        length, stop, leave = float(self.length[route]), float(self.stop_line[route]), float(self.junction_exit[route])
        entry, inside, after = (
            float(self.limit_entry[route]),
            float(self.limit_inside[route]),
            float(self.limit_exit[route]),
        )
        while position < length:
            if position < stop:
                bound = min(entry, float(np.sqrt(inside**2 + 2 * braking * (stop - position))))
            else:
                bound = inside if position < leave else after
            speed = min(bound, speed + acceleration * step)
            position += speed * step
            time += step
        return time
