"""What a vehicle sees -> the number of a state: edges of named features, and of the neighbours that conflict."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float32, Int64

from opencda_marl.core.errors import ConfigError, NotFiniteError
from opencda_marl.core.spec import Feature, Observation, ObservationSpec
from opencda_marl.settings.qlearning import QlearningSettings

__all__ = ["Bins"]

_MASKS = {
    "leader_gap": "leader",
    "leader_closing": "leader",
    "follower_gap": "follower",
    "last_action": "acted",
    "time_to_collision": "will_touch",
}  # feature -> the flag without which it means nothing
_GAPS = ("gap_if_second", "gap_if_first")


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
    of the critical one (whose larger gap is the smallest: where it is negative, the two meet at their present speeds
    whoever is meant to go first), of the smallest value over all, and of their number.

    Args:
        settings: edges.
        observation: names the columns.

    Raises:
        ConfigError: a feature that is not there, or edges that do not ascend.
    """

    def __init__(self, settings: QlearningSettings, observation: ObservationSpec) -> None:
        def axes(block: Mapping[str, list[float]], features: tuple[Feature, ...], where: str) -> list[_Axis]:
            return [_Axis(name, edges, features, where) for name, edges in block.items() if edges]

        self._ego = axes(settings.ego, observation.ego, "ego")
        self._critical = axes(settings.critical, observation.neighbour, "critical")
        self._nearest = axes(settings.nearest, observation.neighbour, "nearest")
        self._number = _ascending(settings.conflicts, "learner.conflicts")
        self._inner = 1
        self._conflict: int | None = None
        if self._critical or self._nearest or settings.conflicts:
            sizes = [axis.size for axis in (*self._critical, *self._nearest)]
            self._inner += int(np.prod([*sizes, len(self._number) + 1]))
            self._conflict, *self._gaps = _columns(observation, ("conflict", *(_GAPS if self._critical else ())))
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
        if self._conflict is None:
            return found
        real = observation.mask & (neighbours[:, :, self._conflict] > 0.5)  # [rows, neighbours]
        some = real.any(1)
        found *= self._inner  # bin 0 inside: no conflict
        if some.any():
            found[some] += 1 + self._around(neighbours[some], real[some])
        return found

    def _around(
        self,
        rows: Float32[np.ndarray, "rows neighbours features"],
        real: Bool[np.ndarray, "rows neighbours"],
    ) -> Int64[np.ndarray, " rows"]:
        """The bins of rows with a conflict."""
        found = np.searchsorted(self._number, real.sum(1).astype(np.float32), side="right")
        if self._critical:
            larger = np.where(real, rows[:, :, self._gaps].max(2), np.float32(np.inf))
            critical = rows[np.arange(len(rows)), larger.argmin(1)]  # [rows, features]
            for axis in self._critical:
                found = found * axis.size + axis.of_rows(critical)
        for axis in self._nearest:
            found = found * axis.size + axis.of_smallest(rows, real)
        return np.asarray(found)


def _columns(observation: ObservationSpec, names: tuple[str, ...]) -> list[int]:
    known = [feature.name for feature in observation.neighbour]
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"observation {observation.name} has no neighbours with {', '.join(missing)}",
            fix="use observation=full, or empty all of learner.critical, learner.nearest and learner.conflicts",
        )
    return [known.index(name) for name in names]
