"""Tabular Q-learning (Watkins and Dayan 1992): one table that all vehicles share, over bins of what they see.

state    bins of ego features, and of the neighbours whose path conflicts (`bins.py`); an action is a level.
target   y = r + g max_a Q(s', a), g = discount_per_second ** elapsed: an interval is discounted by its length.
         Nothing follows a terminated decision; a truncated one goes on from its last view.
update   when an interval closes, with all that closed at that moment:  Q(s, a) += rate (y - Q(s, a)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from opencda_marl.core.errors import ConfigError, NotFiniteError
from opencda_marl.core.objectives import OBJECTIVES, scalarise
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import (
    Action,
    ActionSpec,
    Counters,
    LearnerState,
    Observation,
    ObservationSpec,
    Step,
)
from opencda_marl.learners.bins import Bins
from opencda_marl.learners.identity import check_complete, check_identity, identity_of, take
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.qlearning import QlearningSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["MOST_ENTRIES", "Qlearning", "learn"]

MOST_ENTRIES = 100_000
"""Larger tables are refused: nobody reads them, and most of their entries are never visited."""

_REPORTED = 100  # updates between two lines of metrics
_SUMS = ("rows", "td_error", "absolute_td_error", "value", "rate")
_Table = Mapping[str, np.ndarray]
_Pending = dict[str, np.ndarray]


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
