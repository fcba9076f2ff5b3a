"""Tabular Q-learning (Watkins and Dayan 1992): one table that all vehicles share, over bins of what they see.

state    bins of ego features, and of the neighbours whose path conflicts (`Bins`); an action is a level.
target   y = r + g max_a Q(s', a), g = discount_per_second ** elapsed: an interval is discounted by its length.
         Nothing follows a terminated decision; a truncated one goes on from its last view.
update   when an interval closes, with all that closed at that moment:  Q(s, a) += rate (y - Q(s, a)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from opencda_marl.core.errors import ConfigError, NotFiniteError
from opencda_marl.core.objectives import OBJECTIVES, scalarise
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import (
    Action,
    ActionSpec,
    Counters,
    Feature,
    LearnerState,
    Observation,
    ObservationSpec,
    Step,
)
from opencda_marl.learners.identity import check_complete, check_identity, identity_of, take
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.qlearning import QlearningSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["MOST_ENTRIES", "Bins", "Qlearning", "learn"]

MOST_ENTRIES = 100_000
"""Larger tables are refused: nobody reads them, and most of their entries are never visited."""

_REPORTED = 100  # updates between two lines of metrics
_SUMS = ("rows", "td_error", "absolute_td_error", "value", "rate")
_MASKS = {
    "leader_gap": "leader",
    "leader_closing": "leader",
    "follower_gap": "follower",
    "last_action": "acted",
    "time_to_collision": "will_touch",
}  # feature -> the flag without which it means nothing
_GAPS = ("gap_if_second", "gap_if_first")
_Table = Mapping[str, np.ndarray]
_Pending = dict[str, np.ndarray]


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
    of the critical one (the smaller its larger gap, the sooner neither going first nor going second is safe), of the
    smallest value over all, and of their number.

    Args:
        settings: edges.
        observation: names the columns.

    Raises:
        ConfigError: a feature that is not there, or edges that do not ascend.
    """

    def __init__(self, settings: QlearningSettings, observation: ObservationSpec) -> None:
        def axes(block: Mapping[str, list[float]], features: tuple[Feature, ...], where: str) -> list[_Axis]:
            return [_Axis(name, edges, features, where) for name, edges in block.items() if edges]

        rows = observation.neighbour
        self._ego = axes(settings.ego, observation.ego, "ego")
        self._critical = axes(settings.critical, rows, "critical")
        self._nearest = axes(settings.nearest, rows, "nearest")
        self._number = _ascending(settings.conflicts, "learner.conflicts")
        used = bool(self._critical or self._nearest or settings.conflicts)
        names = [feature.name for feature in rows]
        needed = {"conflict", *(_GAPS if self._critical else ())} if used else set()
        if not needed <= set(names):
            raise ConfigError(
                f"observation {observation.name} has no neighbours with {', '.join(sorted(needed - set(names)))}",
                fix="leave learner.critical, learner.nearest and learner.conflicts empty, or use observation=full",
            )
        self._conflict = names.index("conflict") if used else None
        self._gaps = [names.index(name) for name in _GAPS] if self._critical else []
        self._sizes = [axis.size for axis in (*self._critical, *self._nearest)]
        self._inner = 1 + int(np.prod([*self._sizes, len(self._number) + 1])) if used else 1
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
        return np.asarray(found * self._inner + self._around(neighbours, real))

    def _around(
        self, neighbours: Float32[np.ndarray, "rows neighbours features"], real: Bool[np.ndarray, "rows neighbours"]
    ) -> Int64[np.ndarray, " rows"]:
        """0 without a conflict, else 1 + the bins."""
        found = np.zeros(len(real), np.int64)
        some = real.any(1)
        rows, real = neighbours[some], real[some]  # [some, neighbours, features]
        if not len(rows):
            return found
        inner = np.searchsorted(self._number, real.sum(1).astype(np.float32), side="right")
        if self._critical:
            larger = np.where(real, rows[:, :, self._gaps].max(2), np.inf)
            critical = rows[np.arange(len(rows)), larger.argmin(1)]  # [some, features]
            for axis in self._critical:
                inner = inner * axis.size + axis.of_rows(critical)
        for axis in self._nearest:
            inner = inner * axis.size + axis.of_smallest(rows, real)
        found[some] = 1 + inner
        return found


def learn(
    values: Float64[np.ndarray, "states levels"],
    visits: Int64[np.ndarray, "states levels"],
    rows: _Table,
    learning_rate: float,
    schedule: str,
) -> dict[str, Float64[np.ndarray, " rows"]]:
    """One step of the table for all `rows`, in place.

    All targets are of the table before the step. An entry that is met m times, after n visits, moves by the mean of
    its m errors times m / (n + m) (`visits`; in any order, it is then the average of its targets), or times
    1 - (1 - learning_rate) ** m (`constant`, and `visits` where that is more): as if one had come after the other.

    Args:
        values: Q.
        visits: of each entry.
        rows: state, action, reward, discount (0: nothing follows), after (the state that follows; any, if none does).
        learning_rate: see `QlearningSettings`.
        schedule: likewise.

    Returns:
        td_error, value (of the table before) and rate of each row.
    """
    flat, seen = values.reshape(-1), visits.reshape(-1)
    target = rows["reward"] + rows["discount"] * values[rows["after"]].max(1)
    entry = rows["state"] * values.shape[1] + rows["action"]
    before = flat[entry]
    error = target - before

    entries, place = np.unique(entry, return_inverse=True)
    times = np.bincount(place)
    sums = np.zeros(len(entries))
    np.add.at(sums, place, error)
    rate = 1.0 - (1.0 - learning_rate) ** times
    if schedule == "visits":
        rate = np.maximum(rate, times / (seen[entries] + times))
    flat[entries] += rate * sums / times
    seen[entries] += times
    return {"td_error": error, "value": before, "rate": rate[place]}


class Qlearning:
    """The learner; see `core.spec.Learner`.

    Args:
        settings: of the run.
        observation: layout of what vehicles see.
        action: must be levels.
        spans: timers of the loop.

    Raises:
        ConfigError: settings that do not fit together, or a table that is too large.
    """

    def __init__(
        self, settings: RunSettings, observation: ObservationSpec, action: ActionSpec, *, spans: Spans | None = None
    ) -> None:
        self.counters = Counters()
        self._settings, self._own = settings, own_settings(settings.learner, QlearningSettings)
        self._spans = spans or Spans(enabled=False)
        if not action.levels:
            raise ConfigError(f"a table cannot hold the action {action.kind!r}", fix="set action=levels")
        self._bins = Bins(self._own, observation)
        self._shape = (self._bins.states, len(action.levels))
        if self._bins.states * len(action.levels) > MOST_ENTRIES:
            raise ConfigError(
                f"the table would have {self._shape[0]} states x {self._shape[1]} levels, more than {MOST_ENTRIES}",
                fix="fewer edges in learner.ego, learner.critical and learner.nearest, or fewer envelope.levels",
            )
        self._identity = identity_of(settings.algorithm, observation, action, "none", {})
        blocks = {name: getattr(self._own, name) for name in ("ego", "critical", "nearest")}
        bins = {name: {key: edges for key, edges in block.items() if edges} for name, block in blocks.items()}
        self._identity |= {"bins": {**bins, "conflicts": self._own.conflicts}}
        self._begin()

    def _begin(self) -> None:
        """A table that has seen nothing."""
        self._values = np.full(self._shape, self._own.initial_value)
        self._visits = np.zeros(self._shape, np.int64)
        self._forget_rows()
        self._exploration = generator(self._settings.seed, Branch.EXPLORATION)
        self._progress = 0.0

    def _forget_rows(self) -> None:
        whole = np.zeros(0, np.int64)
        self._open: _Pending = {"id": whole, "state": whole, "action": whole}
        self._closed = {**self._open, "after": whole, "reward": np.zeros(0), "discount": np.zeros(0)}
        self._sums = dict.fromkeys(_SUMS, 0.0)

    @property
    def epsilon(self) -> float:
        """Share of random actions now."""
        own = self._own
        return own.epsilon + (own.epsilon_end - own.epsilon) * min(1.0, self._progress / own.exploration_fraction)

    def describe(self) -> dict[str, Any]:
        """See `core.spec.Learner`."""
        return {
            "algorithm": self._settings.algorithm,
            "device": "cpu",
            "acting_device": "cpu",
            "threads": self._settings.threads,
            "torch": "none",
            "encoder": "none",
            "update_mode": "eager",
            "parameters": self._values.size,
            "states": self._shape[0],
            "levels": self._shape[1],
            "bins": self._identity["bins"],
        }

    def act(self, observation: Observation, *, explore: bool) -> Action:
        """See `core.spec.Learner`. Ties go to the faster level; greedy prefers what was tried to what was not."""
        with self._spans("act"):
            rows = len(observation)
            if not rows:
                return Action(np.zeros((0, 1), np.float32))
            self.counters.acting_steps += 1
            state = self._bins(observation)
            values = self._values[state]  # [rows, levels]
            if not explore:
                tried = self._visits[state] > 0
                values = np.where(tried | ~tried.any(1, keepdims=True), values, -np.inf)
            chosen = values.shape[1] - 1 - values[:, ::-1].argmax(1)
            if explore:
                anyhow = self._exploration.random(rows) < self.epsilon
                chosen = np.where(anyhow, self._exploration.integers(values.shape[1], size=rows), chosen)
            return Action(chosen[:, None].astype(np.float32), {"state": state, "level": chosen})

    def store(self, observation: Observation, action: Action, step: Step) -> None:
        """See `core.spec.Learner`.

        Raises:
            ValueError: a vehicle decided twice, or closed a decision that it had not made or that nothing follows.
        """
        with self._spans("store"):
            if len(observation):
                _, twice = _find(observation.ids, self._open["id"])
                if twice.any():
                    raise ValueError(f"vehicle {observation.ids[twice][0]} decided again before its last was closed")
                fresh = {"id": observation.ids, "state": action.extras["state"], "action": action.extras["level"]}
                self._open = _joined(self._open, fresh)
            if len(step.closed):
                self._close(step)
            self.counters.buffer_size = len(self._open["id"])

    def _close(self, step: Step) -> None:
        """Open rows become rows to learn from."""
        closed = step.closed
        at, known = _find(closed.ids, self._open["id"])
        if not known.all():
            raise ValueError(f"vehicle {closed.ids[~known][0]}: a decision was closed that had not been opened")
        after = np.zeros(len(closed), np.int64)
        after[closed.truncated] = self._bins(step.final)
        goes_on = ~(closed.terminated | closed.truncated)
        place, seen = _find(closed.ids[goes_on], step.observation.ids)
        if not seen.all():
            raise ValueError(f"vehicle {closed.ids[goes_on][~seen][0]} goes on, but nobody sees it")
        if len(place):
            after[goes_on] = self._bins(step.observation)[place]
        reward = scalarise(closed.rewards.astype(np.float64), np.ones(len(OBJECTIVES)))
        discount = self._settings.discount_per_second ** closed.elapsed.astype(np.float64)
        rows = {name: array[at] for name, array in self._open.items()}
        rows |= {"after": after, "reward": reward, "discount": np.where(closed.terminated, 0.0, discount)}
        self._closed = _joined(self._closed, rows)
        self._open = {name: np.delete(array, at) for name, array in self._open.items()}

    def ready(self, step: Step) -> bool:  # noqa: ARG002 - whatever the step
        """See `core.spec.Learner`: when a decision ended."""
        return len(self._closed["id"]) > 0

    def progress(self, done: float) -> None:
        """See `core.spec.Learner`."""
        self._progress = done

    def update(self, step: Step) -> dict[str, float]:  # noqa: ARG002 - what follows a decision is stored
        """See `core.spec.Learner`. Most calls return nothing, each hundredth the means since the last."""
        with self._spans("update"):
            rows = self._closed
            if not len(rows["id"]):
                return {}
            for name in ("reward", "discount"):
                if not np.isfinite(rows[name]).all():
                    raise NotFiniteError(f"the {name} of a decision is NaN or infinite", batch=rows)
            found = learn(self._values, self._visits, rows, self._own.learning_rate, self._own.schedule)
            if not np.isfinite(found["td_error"]).all():
                raise NotFiniteError("a target of the table is NaN or infinite", batch={**rows, **found})
            self._closed = {name: array[:0] for name, array in rows.items()}
            self.counters.training_step += len(rows["id"])
            self.counters.updates_performed += 1
            found |= {"rows": np.ones(len(rows["id"])), "absolute_td_error": np.abs(found["td_error"])}
            for name in _SUMS:
                self._sums[name] += float(found[name].sum())
            return {} if self.counters.updates_performed % _REPORTED else self._report()

    def _report(self) -> dict[str, float]:
        """Means over the decisions since the last report."""
        sums, self._sums = self._sums, dict.fromkeys(_SUMS, 0.0)
        means = {name: total / sums["rows"] for name, total in sums.items() if name != "rows"}
        visited = float((self._visits > 0).mean())
        return {**means, "rows": sums["rows"], "epsilon": self.epsilon, "visited_share": visited}

    def state(self) -> LearnerState:
        """See `core.spec.Learner`."""
        tensors = {"table": self._values.copy(), "visits": self._visits.copy()}
        tensors |= {f"open.{name}": array.copy() for name, array in self._open.items()}
        tensors |= {f"closed.{name}": array.copy() for name, array in self._closed.items()}
        values = {
            "identity": self._identity,
            "counters": asdict(self.counters),
            "progress": self._progress,
            "sums": dict(self._sums),
            "exploration": generator_state(self._exploration),
        }
        return LearnerState(tensors, values)

    def load(self, state: LearnerState, *, weights_only: bool = False) -> None:
        """See `core.spec.Learner`. The visits belong to the table: they say which entries mean something.

        Raises:
            CheckpointError: it is another learner's, or something is missing.
        """
        tensors, values = state.tensors, state.values
        check_identity(self._identity, values.get("identity", {}), {})
        table, visits = (take(tensors, name, self._shape).copy() for name in ("table", "visits"))
        if not weights_only:
            check_complete(self.state(), state)
        self._begin()
        self._values, self._visits = table, visits
        self.counters = Counters()
        if not weights_only:
            self._open = {name: tensors[f"open.{name}"].copy() for name in self._open}
            self._closed = {name: tensors[f"closed.{name}"].copy() for name in self._closed}
            self.counters, self._progress = Counters(**values["counters"]), values["progress"]
            self._sums = dict(values["sums"])
            self._exploration = generator_from_state(values["exploration"])

    def invalidate(self) -> None:
        """See `core.spec.Learner`; nothing is captured."""

    def close(self) -> None:
        """See `core.spec.Learner`; nothing is held."""


def _find(
    ids: Int64[np.ndarray, " ids"], among: Int64[np.ndarray, " others"]
) -> tuple[Int64[np.ndarray, " ids"], Bool[np.ndarray, " ids"]]:
    """Where each of `ids` stands in `among`, and whether it does."""
    if not len(ids) or not len(among):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
    same = ids[:, None] == among
    return same.argmax(1), same.any(1)


def _joined(rows: _Table, more: _Table) -> _Pending:
    return {name: np.concatenate([array, more[name]]) for name, array in rows.items()}
