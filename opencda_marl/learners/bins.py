"""What a vehicle sees -> the number of a state: edges of named features, and of the neighbours that conflict."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float32, Int64

from opencda_marl.core.errors import ConfigError, NotFiniteError
from opencda_marl.core.spec import Feature, Observation, ObservationSpec
from opencda_marl.settings.qlearning import QlearningSettings

__all__ = ["Bins", "Going"]

_MASKS = {
    "leader_gap": "leader",
    "leader_closing": "leader",
    "follower_gap": "follower",
    "last_action": "acted",
    "time_to_collision": "will_touch",
}  # feature -> the flag without which it means nothing
_GOING = (
    Feature("going_second", "s", 1.0, "my time to the zone minus its time to leave it, if I go now"),
    Feature("going_first", "s", 1.0, "its time to the zone minus my time to leave it, if I go now"),
)
"""Columns that are worked out here. The layout's own gaps are at the present speed: a vehicle that stands never
arrives, so a table of those cannot tell a good moment to set off from a bad one."""

_NEEDED = ("conflict", "speed", "stop_line", "my_entry", "my_exit", "its_entry", "its_exit")
_NEEDED_OF_EGO = ("speed", "stop_line", "limit_ahead")
_SLOWEST = 1.0  # [m/s] the other is taken to drive at least so fast
_FAR = 50.0  # [m] where distances to and through the zone are cut
_ZONE = 9.0  # [m] length of a zone and a vehicle, for those that are cut
_LONGEST = 10.0  # [s] gaps are cut there


class _Axis:
    """Bins of one feature: x is in bin k where k edges are at or below x; an absent one has a bin of its own."""

    def __init__(self, name: str, edges: list[float], features: tuple[Feature, ...], where: str) -> None:
        names = [feature.name for feature in features]
        if name not in names:
            raise ConfigError(
                f"learner.{where}.{name}: the observation has no such feature",
                fix=f"choose of {', '.join(names) or 'none'}; or leave it out with learner.{where}.{name}=[]",
            )
        self.column = names.index(name)
        self.edges = _ascending(edges, f"learner.{where}.{name}")
        mask = _MASKS.get(name)
        self.mask = names.index(mask) if mask in names else None
        self.size = len(edges) + 1 + (self.mask is not None)

    def of_rows(self, rows: Float32[np.ndarray, "rows features"]) -> Int64[np.ndarray, " rows"]:
        """The bin of each row."""
        present = None if self.mask is None else rows[:, self.mask] > 0.5
        return self._bins(rows[:, self.column], present)

    def of_smallest(
        self, rows: Float32[np.ndarray, "rows neighbours features"], real: Bool[np.ndarray, "rows neighbours"]
    ) -> Int64[np.ndarray, " rows"]:
        """The bin of the smallest value over the real neighbours; each row has one at least."""
        present = real if self.mask is None else real & (rows[:, :, self.mask] > 0.5)
        smallest = np.where(present, rows[:, :, self.column], np.float32(np.inf)).min(1)
        return self._bins(smallest, np.asarray(present.any(1)))

    def _bins(
        self, values: Float32[np.ndarray, " rows"], present: Bool[np.ndarray, " rows"] | None
    ) -> Int64[np.ndarray, " rows"]:
        found = np.searchsorted(self.edges, values, side="right")
        return found if present is None else np.where(present, found, self.size - 1)


def _ascending(edges: list[float], where: str) -> Float32[np.ndarray, " edges"]:
    found = np.array(edges, np.float32)  # as the features are: an edge is met exactly
    if (np.diff(found) <= 0.0).any():
        raise ConfigError(f"{where}: edges must ascend, not {edges}")
    return found


class Bins:
    """Which state a vehicle is in.

    A state is the bins of the ego features, and either "no conflict" or the bins of the conflicting neighbours: those
    of the critical one (where the larger of `going_first` and `going_second` is smallest: where it is negative, to go
    is to meet), of the smallest value over all, and of their number.

    Args:
        settings: edges.
        observation: names the columns.
        acceleration: [m/s^2] of a vehicle that goes.

    Raises:
        ConfigError: a feature that is not there, or edges that do not ascend.
    """

    def __init__(self, settings: QlearningSettings, observation: ObservationSpec, acceleration: float) -> None:
        def axes(block: Mapping[str, list[float]], features: tuple[Feature, ...], where: str) -> list[_Axis]:
            return [_Axis(name, edges, features, where) for name, edges in block.items() if edges]

        self._ego = axes(settings.ego, observation.ego, "ego")
        self._number = _ascending(settings.conflicts, "learner.conflicts")
        rows = (*observation.neighbour, *_GOING)
        self._critical = axes(settings.critical, rows, "critical")
        self._nearest = axes(settings.nearest, rows, "nearest")
        self._going: Going | None = None
        self._inner = 1
        if self._critical or self._nearest or settings.conflicts:
            self._going = Going(observation, acceleration)
            sizes = [axis.size for axis in (*self._critical, *self._nearest)]
            self._inner += int(np.prod([*sizes, len(self._number) + 1]))
        self.states = int(np.prod([axis.size for axis in self._ego])) * self._inner

    def __call__(self, observation: Observation) -> Int64[np.ndarray, " rows"]:
        """The state of each row.

        Raises:
            NotFiniteError: a NaN would be in the last bin.
        """
        ego, neighbours = observation.ego, observation.neighbours
        if not (np.isfinite(ego).all() and np.isfinite(neighbours).all()):
            batch = {"ids": observation.ids, "ego": ego, "neighbours": neighbours}
            raise NotFiniteError("an observation is NaN or infinite", fix="look for the feature", batch=batch)
        found = np.zeros(len(ego), np.int64)
        for axis in self._ego:
            found = found * axis.size + axis.of_rows(ego)
        if self._going is None:
            return found
        real = observation.mask & (neighbours[:, :, self._going.conflict] > 0.5)  # [rows, neighbours]
        some = real.any(1)
        found *= self._inner  # bin 0 inside: no conflict
        if some.any():
            gaps = self._going(ego[some], neighbours[some])
            found[some] += 1 + self._around(np.concatenate([neighbours[some], gaps], 2), real[some], gaps.max(2))
        return found

    def _around(
        self,
        rows: Float32[np.ndarray, "rows neighbours columns"],
        real: Bool[np.ndarray, "rows neighbours"],
        larger: Float32[np.ndarray, "rows neighbours"],
    ) -> Int64[np.ndarray, " rows"]:
        """The bins of rows with a conflict; `larger`: of the two gaps."""
        found = np.searchsorted(self._number, real.sum(1).astype(np.float32), side="right")
        place = np.where(real, larger, np.float32(np.inf)).argmin(1)
        critical = rows[np.arange(len(rows)), place]  # [rows, columns]
        for axis in self._critical:
            found = found * axis.size + axis.of_rows(critical)
        for axis in self._nearest:
            found = found * axis.size + axis.of_smallest(rows, real)
        return np.asarray(found)


class Going:
    """The columns `_GOING`: gaps to each neighbour if this vehicle goes from now on, and the other keeps its speed.

    Args:
        observation: names the columns and says their scales.
        acceleration: [m/s^2] up to the next limit.

    Raises:
        ConfigError: a column that is needed is not there.
    """

    def __init__(self, observation: ObservationSpec, acceleration: float) -> None:
        self._acceleration = acceleration
        self._columns: dict[str, tuple[int, np.float32]] = {}  # name -> (column, scale)
        for names, features in ((_NEEDED, observation.neighbour), (_NEEDED_OF_EGO, observation.ego)):
            known = {feature.name: (i, np.float32(feature.scale)) for i, feature in enumerate(features)}
            missing = [name for name in names if name not in known]
            if missing:
                raise ConfigError(
                    f"observation {observation.name} has no {', '.join(missing)}, which say what conflicts",
                    fix="use observation=full, or empty all of learner.critical, learner.nearest and learner.conflicts",
                )
            where = "ego " if features is observation.ego else ""
            self._columns |= {where + name: known[name] for name in names}
        self.conflict = self._columns["conflict"][0]

    def __call__(
        self,
        ego: Float32[np.ndarray, "rows features"],
        neighbours: Float32[np.ndarray, "rows neighbours columns"],
    ) -> Float32[np.ndarray, "rows neighbours 2"]:
        """`_GOING` in seconds; means nothing where there is no conflict."""

        def of(name: str) -> np.ndarray:
            column, scale = self._columns[name]
            source = ego[:, None, :] if name.startswith("ego ") else neighbours
            return np.asarray(source[:, :, column] * scale)  # [rows, neighbours], or [rows, 1]

        def far(name: str, stop_line: str, beyond: float) -> np.ndarray:
            """A distance that is cut, from the one to the stop line, which goes on."""
            distance = of(name)
            return np.where(distance < _FAR, distance, np.maximum(distance, of(stop_line) + beyond))

        my_entry, my_exit = far("my_entry", "ego stop_line", 0.0), far("my_exit", "ego stop_line", _ZONE)
        its_entry, its_exit = far("its_entry", "stop_line", 0.0), far("its_exit", "stop_line", _ZONE)
        speed, limit = of("ego speed"), np.maximum(of("ego limit_ahead"), _SLOWEST)
        its_speed = np.maximum(of("speed"), _SLOWEST)
        second = self._time(my_entry, speed, limit) - np.maximum(its_exit, 0.0) / its_speed
        first = np.maximum(its_entry, 0.0) / its_speed - self._time(my_exit, speed, limit)
        return np.asarray(np.clip(np.stack([second, first], 2), -_LONGEST, _LONGEST))

    def _time(self, distance: np.ndarray, speed: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Time to drive a distance: accelerating to the limit, then at the limit. [s]"""
        a, distance, speed = self._acceleration, np.maximum(distance, 0.0), np.minimum(speed, limit)
        ramp = (limit * limit - speed * speed) / (2.0 * a)  # [m]
        on_ramp = (np.sqrt(speed * speed + 2.0 * a * np.minimum(distance, ramp)) - speed) / a
        return np.asarray(on_ramp + np.maximum(distance - ramp, 0.0) / limit)
