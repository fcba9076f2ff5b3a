"""What a simulator says and hears: traffic, events, commands, and the schedule of an episode.

Vehicles live in slots. A slot is for computing; an id is for identity and is never reused in a run
(`vehicle_id`). A slot is given to a vehicle when it enters and freed one step after its end, so that in
the step that reports the end the slot still holds the vehicle's last values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int16, Int64

from opencda_marl.core.errors import AccountingError

__all__ = [
    "FIELDS",
    "Accounting",
    "Command",
    "Driver",
    "Ending",
    "Events",
    "Field",
    "Schedule",
    "TrafficState",
    "vehicle_id",
    "vehicle_name",
]

_IDS_PER_EPISODE = 1_000_000


class Field(IntEnum):
    """Columns of `TrafficState.values`."""

    X = 0  # [m] vehicle centre, world frame: origin at the junction's centre, x east, y north
    Y = 1  # [m]
    HEADING = 2  # [rad] counter-clockwise from +x
    SPEED = 3  # [m/s]
    ACCEL = 4  # [m/s^2]
    PROGRESS = 5  # [m] front bumper along its route, from the route's beginning
    SCHEDULED_AT = 6  # [s] when the schedule wanted it to enter
    DEPARTED_AT = 7  # [s] when it entered


FIELDS = len(Field)


class Driver(IntEnum):
    """Who drives a vehicle."""

    NONE = 0
    CAV = 1  # the policy: a target speed each step
    HUMAN = 2  # the simulator's own driver model
    RULE = 3  # a rule-based controller of ours


class Ending(IntEnum):
    """How a vehicle left the episode."""

    ARRIVED = 1
    COLLIDED = 2
    REMOVED = 3  # taken out by the simulator; the reason is in `Events.reasons`


def vehicle_id(episode: int, index: int) -> int:
    """The id of the `index`-th scheduled vehicle of an episode; unique in a run."""
    if not 0 <= index < _IDS_PER_EPISODE:
        raise ValueError(f"vehicle index {index} is not in [0, {_IDS_PER_EPISODE})")
    return episode * _IDS_PER_EPISODE + index


def vehicle_name(identity: int) -> str:
    """The name that simulators show, e.g. 'e12.v34'."""
    episode, index = divmod(identity, _IDS_PER_EPISODE)
    return f"e{episode}.v{index}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The vehicles of one episode, sorted by time; the same in every simulator."""

    episode: int
    rate_vph: float  # vehicles per hour and lane, as drawn for this episode
    ids: Int64[np.ndarray, " vehicles"]
    times: Float64[np.ndarray, " vehicles"]  # [s]
    routes: Int16[np.ndarray, " vehicles"]  # index into Roads
    speed_factors: Float64[np.ndarray, " vehicles"]  # human drivers: times the limit
    drivers: Int8[np.ndarray, " vehicles"]  # Driver


@dataclass(slots=True)
class TrafficState:
    """All vehicles at one moment. Arrays are reused from step to step: copy what must last."""

    step: int
    time: float  # [s]
    ids: Int64[np.ndarray, " slots"]  # -1: free
    alive: Bool[np.ndarray, " slots"]
    drivers: Int8[np.ndarray, " slots"]  # Driver
    routes: Int16[np.ndarray, " slots"]
    values: Float64[np.ndarray, "slots fields"]  # columns: Field
    world: int = 0  # how often the simulator has loaded its world anew

    @classmethod
    def empty(cls, slots: int) -> TrafficState:
        """A state without vehicles."""
        return cls(
            step=0,
            time=0.0,
            ids=np.full(slots, -1, np.int64),
            alive=np.zeros(slots, np.bool_),
            drivers=np.zeros(slots, np.int8),
            routes=np.zeros(slots, np.int16),
            values=np.zeros((slots, FIELDS), np.float64),
        )

    def rows(self, driver: Driver | None = None) -> Int64[np.ndarray, " rows"]:
        """Slots of living vehicles (of one kind of driver), ascending."""
        chosen = self.alive if driver is None else self.alive & (self.drivers == driver)
        return np.flatnonzero(chosen)

    def copy(self) -> TrafficState:
        """A state that the next step does not change."""
        return TrafficState(
            self.step,
            self.time,
            self.ids.copy(),
            self.alive.copy(),
            self.drivers.copy(),
            self.routes.copy(),
            self.values.copy(),
            self.world,
        )


def _no_ints() -> Int64[np.ndarray, " none"]:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Events:
    """What happened in one step. Each vehicle's end appears exactly once in its life."""

    ids: Int64[np.ndarray, " ended"] = field(default_factory=_no_ints)
    slots: Int64[np.ndarray, " ended"] = field(default_factory=_no_ints)  # alive is False there now
    endings: Int64[np.ndarray, " ended"] = field(default_factory=_no_ints)  # Ending
    partners: Int64[np.ndarray, " ended"] = field(default_factory=_no_ints)  # other party of a crash, else -1
    reasons: tuple[str, ...] = ()  # one per ended vehicle
    departed: Int64[np.ndarray, " departed"] = field(default_factory=_no_ints)  # slots of those that entered
    waiting: int = 0  # due but not yet in
    longest_wait: float = 0.0  # [s] of those waiting now
    commanded: int = 0  # vehicles that had a target speed in this step
    overridden: int = 0  # of those: achieved speed differs from what limits of acceleration allow
    refused: int = 0  # tries to put a vehicle on the road that the simulator refused; it waits and tries again


@dataclass(slots=True)
class Command:
    """Target speeds for one step; where `controlled` is False the simulator's driver decides."""

    target_speed: Float64[np.ndarray, " slots"]  # [m/s]
    controlled: Bool[np.ndarray, " slots"]


@dataclass(slots=True)
class Accounting:
    """Where the scheduled vehicles of an episode are. It must close."""

    scheduled: int = 0
    waiting: int = 0
    running: int = 0
    arrived: int = 0
    collided: int = 0
    removed: int = 0

    def check(self, episode: int) -> None:
        """Raise unless every scheduled vehicle is in exactly one place.

        Raises:
            AccountingError: with the numbers.
        """
        found = self.waiting + self.running + self.arrived + self.collided + self.removed
        if found != self.scheduled:
            raise AccountingError(
                f"episode {episode}: {self.scheduled} vehicles scheduled, but {found} found "
                f"(waiting {self.waiting}, running {self.running}, arrived {self.arrived}, "
                f"collided {self.collided}, removed {self.removed}); the episode is invalid",
                fix="this is a defect of the simulator backend: please report it with the run's seed and profile",
            )
