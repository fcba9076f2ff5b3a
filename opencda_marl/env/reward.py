"""What a step is worth: named parts, each a function of a `Moment`, a unit and an objective.

A part says how much of something there was in one step (metres, seconds, events); the settings weigh it
(`reward.weights`, negative for what is unwanted). A weight of 0, or none, switches a part off, and then
it costs nothing. Parts of one's own come in through the entry-point group `opencda_marl.rewards`, as
"module:attribute" of a `Part`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.state import Ending, Field
from opencda_marl.env import REWARDS
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import EXIT, EXIT_LIMIT, INSIDE_LIMIT, LIMIT, STOP_LINE

__all__ = ["Moment", "Part", "RewardParts", "chosen_parts"]

COMFORTABLE = 3.0
"""[m/s^2] braking that counts fully as yielding; harder counts no more."""

STANDING = 0.1
"""[m/s] slower than this a vehicle stands."""


@dataclass(slots=True)
class Moment:
    """One step of the vehicles that earn, one row each; ended ones show their last values."""

    step_length: float  # [s]
    discount: float  # of one step
    before: Float64[np.ndarray, "rows fields"]  # columns: core.state.Field
    now: Float64[np.ndarray, "rows fields"]  # an arrived vehicle's progress is its route's length
    routes: Int16[np.ndarray, " rows"]
    road: Float64[np.ndarray, "routes columns"]  # `RoadTables.route`
    endings: Int64[np.ndarray, " rows"]  # core.state.Ending; 0: it goes on
    near_miss: Float64[np.ndarray, " rows"]  # [1/s] see env.near_miss; filled for parts with `pairs`
    predicted: Bool[np.ndarray, " rows"]


@dataclass(frozen=True, slots=True)
class Part:
    """A named quantity of a step."""

    unit: str  # of its sum over an episode
    objective: str  # one of core.objectives.OBJECTIVES
    about: str
    value: Callable[[Moment], Float64[np.ndarray, " rows"]]
    only_endings: bool = False  # asked only in steps in which a vehicle ended
    pairs: bool = False  # needs `near_miss` or `predicted`


@kernel
def _free_time(progress: float, road: Float64[np.ndarray, " columns"]) -> float:
    """Time that the limits allow from the route's beginning to `progress`. [s]"""
    time = min(progress, road[STOP_LINE]) / road[LIMIT]
    if progress > road[STOP_LINE]:
        time += (min(progress, road[EXIT]) - road[STOP_LINE]) / road[INSIDE_LIMIT]
    if progress > road[EXIT]:
        time += (progress - road[EXIT]) / road[EXIT_LIMIT]
    return float(time)


@kernel
def _lost_time(
    before: Float64[np.ndarray, "rows fields"],
    now: Float64[np.ndarray, "rows fields"],
    routes: Int16[np.ndarray, " rows"],
    road: Float64[np.ndarray, "routes columns"],
    step_length: float,
) -> Float64[np.ndarray, " rows"]:
    out = np.empty(len(routes))
    for r in range(len(routes)):
        row = road[routes[r]]
        out[r] = step_length - _free_time(now[r, _PROGRESS], row) + _free_time(before[r, _PROGRESS], row)
    return out


_SPEED, _ACCEL, _PROGRESS = int(Field.SPEED), int(Field.ACCEL), int(Field.PROGRESS)


def _where(endings: Int64[np.ndarray, " rows"], ending: Ending) -> Float64[np.ndarray, " rows"]:
    return np.asarray(np.equal(endings, int(ending)), np.float64)


def _delay(m: Moment) -> Float64[np.ndarray, " rows"]:
    return _lost_time(m.before, m.now, m.routes, m.road, m.step_length)


def _time(m: Moment) -> Float64[np.ndarray, " rows"]:
    return np.full(len(m.routes), m.step_length)


def _progress(m: Moment) -> Float64[np.ndarray, " rows"]:
    return np.asarray(m.now[:, _PROGRESS] - m.before[:, _PROGRESS])


def _progress_potential(m: Moment) -> Float64[np.ndarray, " rows"]:
    kept = np.where(m.endings == Ending.COLLIDED, 0.0, m.now[:, _PROGRESS])
    return np.asarray(m.discount * kept - m.before[:, _PROGRESS])


def _arrival(m: Moment) -> Float64[np.ndarray, " rows"]:
    return _where(m.endings, Ending.ARRIVED)


def _collision(m: Moment) -> Float64[np.ndarray, " rows"]:
    return _where(m.endings, Ending.COLLIDED)


def _near_miss(m: Moment) -> Float64[np.ndarray, " rows"]:
    return np.asarray(m.near_miss * m.step_length)


def _yielding(m: Moment) -> Float64[np.ndarray, " rows"]:
    braking = np.clip(-m.now[:, _ACCEL] / COMFORTABLE, 0.0, 1.0)
    return np.where(m.predicted, braking * m.step_length, 0.0)


def _acceleration(m: Moment) -> Float64[np.ndarray, " rows"]:
    return np.asarray(np.square(m.now[:, _ACCEL]) * m.step_length)


def _jerk(m: Moment) -> Float64[np.ndarray, " rows"]:
    return np.asarray(np.abs(m.now[:, _ACCEL] - m.before[:, _ACCEL]))


def _stop(m: Moment) -> Float64[np.ndarray, " rows"]:
    return np.where(m.now[:, _SPEED] < STANDING, m.step_length, 0.0)


DELAY = Part("s", "efficiency", "time lost against driving at the limits, step by step: dt - ds / limit", _delay)
TIME = Part("s", "efficiency", "time spent inside", _time)
PROGRESS = Part("m", "efficiency", "distance driven along the route", _progress)
PROGRESS_POTENTIAL = Part(
    "m",
    "efficiency",
    "g P' - P with the progress P as potential and g the discount of a step (Ng, Harada and Russell 1999): "
    "standing still costs, and a crash, whose potential is 0, takes back what was earned",
    _progress_potential,
)
ARRIVAL = Part("vehicles", "efficiency", "1 in the step of arrival", _arrival, only_endings=True)
COLLISION = Part("vehicles", "safety", "1 in the step of the crash, for each party", _collision, only_endings=True)
NEAR_MISS = Part(
    "s",
    "safety",
    "1 - t / 1.5 s, per second: t to a zone that somebody is in, or to the leader's bumper",
    _near_miss,
    pairs=True,
)
YIELDING = Part(
    "s",
    "safety",
    "time spent braking while a conflict is predicted; 3 m/s^2 or more counts fully",
    _yielding,
    pairs=True,
)
ACCELERATION = Part("m^2/s^3", "comfort", "square of the acceleration, over time", _acceleration)
JERK = Part("m/s^2", "comfort", "change of the acceleration, up or down", _jerk)
STOP = Part("s", "comfort", "time spent standing (below 0.1 m/s)", _stop)


def chosen_parts(weights: Mapping[str, float]) -> dict[str, Part]:
    """The parts that a weight switches on, by name, in the order of the weights.

    Raises:
        ConfigError: there is no such part, or it has an objective that does not exist.
    """
    parts = {}
    for name in weights:
        REWARDS.check(name, where="reward.weights: ")
        if weights[name] == 0.0:
            continue
        part = REWARDS.load(name)
        if not isinstance(part, Part) or part.objective not in OBJECTIVES:
            raise ConfigError(f"reward part {name!r} is not a Part of one of the objectives {', '.join(OBJECTIVES)}")
        parts[name] = part
    return parts


class RewardParts:
    """The parts that are switched on.

    Args:
        weights: of each part, see `RewardSettings.weights`.

    Raises:
        ConfigError: a weight for a part that does not exist.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        parts = chosen_parts(weights)
        self.names = tuple(parts)
        self.weights = np.array([weights[name] for name in parts])  # [parts]
        self.needs_pairs = any(part.pairs for part in parts.values())
        objectives = [OBJECTIVES.index(part.objective) for part in parts.values()]
        self.matrix = np.zeros((len(parts), len(OBJECTIVES)))  # weight of each part in its objective
        self.matrix[np.arange(len(parts)), objectives] = self.weights
        always = [(k, part.value) for k, part in enumerate(parts.values()) if not part.only_endings]
        endings = [(k, part.value) for k, part in enumerate(parts.values()) if part.only_endings]
        self._always, self._endings = always, endings

    def values(self, moment: Moment, *, ended: bool) -> Float64[np.ndarray, "parts rows"]:
        """How much of each part there was, not yet weighed.

        Args:
            moment: the step.
            ended: did any vehicle of it end?
        """
        out = np.zeros((len(self.names), len(moment.routes)))
        for k, value in self._always:
            out[k] = value(moment)
        if ended:
            for k, value in self._endings:
                out[k] = value(moment)
        return out
