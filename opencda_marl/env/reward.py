"""What a step is worth: named parts, each with a unit and an objective.

A part says how much of something there was in one step (metres, seconds, events); the settings weigh it
(`reward.weights`, negative for what is unwanted). A weight of 0, or none, switches a part off, and then
it costs nothing. The bundled parts are compiled together (`amount`: one formula a part). Parts of one's own
are functions of a `Moment` and come in through the entry-point group `opencda_marl.rewards`, as
"module:attribute" of a `Part`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float64, Int16, Int64

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.state import Ending, Field
from opencda_marl.env import REWARDS
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import EXIT, EXIT_LIMIT, INSIDE_LIMIT, LENGTH, LIMIT, STOP_LINE

__all__ = ["Moment", "Part", "RewardParts", "amount", "chosen_parts"]

COMFORTABLE = 3.0
"""[m/s^2] braking that counts fully as yielding; harder counts no more."""

STANDING = 0.1
"""[m/s] slower than this a vehicle stands."""

_SPEED, _ACCEL, _PROGRESS = int(Field.SPEED), int(Field.ACCEL), int(Field.PROGRESS)
_ARRIVED, _COLLIDED = int(Ending.ARRIVED), int(Ending.COLLIDED)
# the bundled parts, as `amount` numbers them
(
    _DELAY,
    _TIME,
    _DRIVEN,
    _POTENTIAL,
    _ARRIVAL,
    _COLLISION,
    _NEAR_MISS,
    _YIELDING,
    _ACCELERATION,
    _JERK,
    _STOP,
) = range(11)


@dataclass(slots=True)
class Moment:
    """One step of the vehicles that earn, one row each; ended ones show their last values."""

    step_length: float  # [s]
    discount: float  # of one step
    before: Float64[np.ndarray, "rows fields"]  # columns: core.state.Field
    now: Float64[np.ndarray, "rows fields"]  # the simulator may not show where an arrived vehicle got to
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
    pairs: bool = False  # needs `near_miss` or `predicted`
    number: int = -1  # of a bundled part: it is compiled, see `amount`


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
def amount(
    part: int,
    before: Float64[np.ndarray, " fields"],
    now: Float64[np.ndarray, " fields"],
    road: Float64[np.ndarray, " columns"],
    ending: int,
    near_miss: float,
    predicted: bool,
    step_length: float,
    discount: float,
) -> float:
    """One bundled part of one vehicle's step. An arrived vehicle has come to the end of its route."""
    begin = before[_PROGRESS]
    end = road[LENGTH] if ending == _ARRIVED else now[_PROGRESS]
    if part == _DELAY:
        return float(step_length - (_free_time(end, road) - _free_time(begin, road)))
    if part == _TIME:
        return step_length
    if part == _DRIVEN:
        return float(end - begin)
    if part == _POTENTIAL:
        return float(discount * (0.0 if ending == _COLLIDED else end) - begin)
    if part == _ARRIVAL:
        return 1.0 if ending == _ARRIVED else 0.0
    if part == _COLLISION:
        return 1.0 if ending == _COLLIDED else 0.0
    if part == _NEAR_MISS:
        return near_miss * step_length
    if part == _YIELDING:
        return float(min(max(-now[_ACCEL] / COMFORTABLE, 0.0), 1.0) * step_length) if predicted else 0.0
    if part == _ACCELERATION:
        return float(now[_ACCEL] * now[_ACCEL] * step_length)
    if part == _JERK:
        return float(abs(now[_ACCEL] - before[_ACCEL]))
    return step_length if now[_SPEED] < STANDING else 0.0


@kernel
def _amounts(
    part: int,
    before: Float64[np.ndarray, "rows fields"],
    now: Float64[np.ndarray, "rows fields"],
    routes: Int16[np.ndarray, " rows"],
    road: Float64[np.ndarray, "routes columns"],
    endings: Int64[np.ndarray, " rows"],
    near_miss: Float64[np.ndarray, " rows"],
    predicted: Bool[np.ndarray, " rows"],
    step_length: float,
    discount: float,
) -> Float64[np.ndarray, " rows"]:
    out = np.empty(len(routes))
    for r in range(len(routes)):
        out[r] = amount(
            part,
            before[r],
            now[r],
            road[routes[r]],
            endings[r],
            near_miss[r],
            predicted[r],
            step_length,
            discount,
        )
    return out


def _alone(part: int, m: Moment) -> Float64[np.ndarray, " rows"]:
    """A bundled part by itself."""
    return _amounts(
        part, m.before, m.now, m.routes, m.road, m.endings, m.near_miss, m.predicted, m.step_length, m.discount
    )


def _bundled(number: int, unit: str, objective: str, about: str, *, pairs: bool = False) -> Part:
    return Part(unit, objective, about, partial(_alone, number), pairs, number)


DELAY = _bundled(_DELAY, "s", "efficiency", "time lost against driving at the limits, step by step: dt - ds / limit")
TIME = _bundled(_TIME, "s", "efficiency", "time spent inside")
PROGRESS = _bundled(_DRIVEN, "m", "efficiency", "distance driven along the route")
PROGRESS_POTENTIAL = _bundled(
    _POTENTIAL,
    "m",
    "efficiency",
    "g P' - P with the progress P as potential and g the discount of a step (Ng, Harada and Russell 1999): "
    "standing still costs, and a crash, whose potential is 0, takes back what was earned",
)
ARRIVAL = _bundled(_ARRIVAL, "vehicles", "efficiency", "1 in the step of arrival")
COLLISION = _bundled(_COLLISION, "vehicles", "safety", "1 in the step of the crash, for each party")
NEAR_MISS = _bundled(
    _NEAR_MISS,
    "s",
    "safety",
    "1 - t / 1.5 s, per second: t to a zone that somebody is in, or to the leader's bumper",
    pairs=True,
)
YIELDING = _bundled(
    _YIELDING,
    "s",
    "safety",
    "time spent braking while a conflict is predicted; 3 m/s^2 or more counts fully",
    pairs=True,
)
ACCELERATION = _bundled(_ACCELERATION, "m^2/s^3", "comfort", "square of the acceleration, over time")
JERK = _bundled(_JERK, "m/s^2", "comfort", "change of the acceleration, up or down")
STOP = _bundled(_STOP, "s", "comfort", "time spent standing (below 0.1 m/s)")


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
        road: `RoadTables.route`.
        step_length: [s].
        discount: of one step.

    Raises:
        ConfigError: a weight for a part that does not exist.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        road: Float64[np.ndarray, "routes columns"],
        step_length: float,
        discount: float,
    ) -> None:
        parts = chosen_parts(weights)
        self.names = tuple(parts)
        self.weights = np.array([weights[name] for name in parts])  # [parts]
        self.needs_pairs = any(part.pairs for part in parts.values())
        objectives = [OBJECTIVES.index(part.objective) for part in parts.values()]
        self.matrix = np.zeros((len(parts), len(OBJECTIVES)))  # weight of each part in its objective
        self.matrix[np.arange(len(parts)), objectives] = self.weights
        self.road, self.step_length, self.discount = road, step_length, discount
        self.numbers = np.array([part.number for part in parts.values()], np.int64)  # see `amount`
        self._others = [(k, part.value) for k, part in enumerate(parts.values()) if part.number < 0]
        self._nothing = np.zeros((len(parts), 0))

    def others(
        self,
        rows: Int64[np.ndarray, " rows"],
        before: Float64[np.ndarray, "slots fields"],
        now: Float64[np.ndarray, "slots fields"],
        routes: Int16[np.ndarray, " slots"],
        endings: Int64[np.ndarray, " slots"],
        near_miss: Float64[np.ndarray, " slots"],
        predicted: Bool[np.ndarray, " slots"],
    ) -> Float64[np.ndarray, "parts values"]:
        """Values of the parts that are not bundled (the other rows mean nothing); empty where there are none.

        Args:
            rows: slots of the vehicles that earn.
            before, now: columns `core.state.Field`, before and after the step.
            routes: of each slot.
            endings: `core.state.Ending` of those that ended, else 0.
            near_miss, predicted: see `Moment`.
        """
        if not self._others:
            return self._nothing
        out = np.zeros((len(self.names), len(rows)))
        moment = Moment(
            self.step_length,
            self.discount,
            before[rows],
            now[rows],
            routes[rows],
            self.road,
            endings[rows],
            near_miss[rows],
            predicted[rows],
        )
        for k, value in self._others:
            out[k] = value(moment)
        return out
