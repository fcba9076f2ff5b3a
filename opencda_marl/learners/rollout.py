"""Trajectories of many vehicles, interleaved as they happen, and their advantages.

A row is one decision of one vehicle. It is appended when the decision is made and completed when its interval
ends. Rows are joined into chains by the vehicle's id, so it does not matter which simulation a call of `open` or
`close` comes from, nor in which order vehicles come and go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.spec import Closed

__all__ = ["Chains", "Rollout", "advantages_of", "chain_advantages", "minibatches", "spread"]

_FIRST_CAPACITY = 1024
_Table = dict[str, np.ndarray]

_BASE: dict[str, tuple[tuple[int, ...], Any]] = {
    "id": ((), np.int64),  # vehicle; it also names the episode (core.state.vehicle_id)
    "opened": ((), np.int64),  # env steps seen by the learner when the decision was made
    "elapsed": ((), np.float32),  # [s]
    "scene": ((), np.int64),  # index into the scenes
    "closed": ((), np.bool_),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
    "successor": ((), np.int64),  # the vehicle's next row; -1: none so far
    "final": ((), np.int64),  # index into the final views; -1: not truncated
}


class _Growing:
    """Columns of equal length that grow by doubling."""

    def __init__(self, columns: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        self._columns = dict(columns)
        self._arrays: _Table = {name: np.empty((0, *shape), kind) for name, (shape, kind) in columns.items()}
        self.count = 0

    def append(self, rows: int, values: Mapping[str, Any]) -> slice:
        """Add rows; a value is an array [rows, ...] or one number for all. Returns where they lie."""
        place = slice(self.count, self.count + rows)
        capacity = len(next(iter(self._arrays.values())))
        if place.stop > capacity:
            self._grow(max(place.stop, 2 * capacity, _FIRST_CAPACITY))
        for name, array in self._arrays.items():
            array[place] = values[name]
        self.count = place.stop
        return place

    def _grow(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            bigger = np.empty((capacity, *array.shape[1:]), array.dtype)
            bigger[: self.count] = array[: self.count]
            self._arrays[name] = bigger

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name][: self.count]

    def table(self) -> _Table:
        """Views of all columns."""
        return {name: self[name] for name in self._columns}

    def keep(self, chosen: np.ndarray) -> None:
        """Drop all other rows."""
        kept = {name: self[name][chosen] for name in self._columns}
        self.count = 0
        if len(chosen):
            self.append(len(chosen), kept)

    def load(self, table: Mapping[str, np.ndarray]) -> None:
        """Become a copy of `table`."""
        self.count = 0
        first = next(iter(self._columns))
        self.append(len(table[first]), table)


def _match(ids: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `ids` stands in `among` (each at most once there), and whether it does."""
    if not len(ids) or not len(among):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
    same = ids[:, None] == among
    return same.argmax(1), same.any(1)


@dataclass(frozen=True, slots=True)
class Chains:
    """Rows that can be learned from now, vehicle after vehicle, each in the order of time."""

    rows: Int64[np.ndarray, " chained"]  # index into the rollout
    continues: Bool[np.ndarray, " chained"]  # the next one here is its successor
    final: Int64[np.ndarray, " chained"]  # index into the final views that it bootstraps from, or -1
    going: Int64[np.ndarray, " chained"]  # index into the observation that goes on, that it bootstraps from, or -1
    successor: Int64[np.ndarray, " chained"]  # a row that is not learned from yet, that it bootstraps from, or -1


class Rollout:
    """Rows of decisions.

    Args:
        view: columns that describe what a vehicle saw: name -> (shape of a row, dtype).
        decision: columns that describe what it did.
        objectives: components of the reward, without the team's.
        scene: length of a scene.
    """

    def __init__(
        self,
        view: Mapping[str, tuple[tuple[int, ...], Any]],
        decision: Mapping[str, tuple[tuple[int, ...], Any]],
        *,
        objectives: int,
        scene: int,
    ) -> None:
        rewards = {"rewards": ((objectives,), np.float32), "team": ((), np.float32)}
        self._view = tuple(view)
        self._rows = _Growing({**_BASE, **rewards, **view, **decision})
        self._finals = _Growing({**view, "scene": ((), np.int64)})
        self._scenes = _Growing({"scene": ((scene,), np.float32)})
        self._open = np.zeros(0, np.int64)  # rows whose interval is not over
        self._waiting = np.zeros(0, np.int64)  # rows whose vehicle goes on and has not decided again

    def __len__(self) -> int:
        return self._rows.count

    @property
    def open_rows(self) -> int:
        """Decisions whose interval is not over."""
        return len(self._open)

    def column(self, name: str) -> np.ndarray:
        """A view of one column over all rows, open ones included."""
        return self._rows[name]

    def views(self) -> tuple[_Table, _Table, Float32[np.ndarray, "scenes scene"]]:
        """What was seen: by the rows, by the final views, and the scenes that both point into."""
        names = (*self._view, "scene")
        return {n: self._rows[n] for n in names}, {n: self._finals[n] for n in names}, self._scenes["scene"]

    def open(
        self,
        ids: Int64[np.ndarray, " rows"],
        scene: Float32[np.ndarray, " scene"],
        columns: Mapping[str, np.ndarray],
        opened: int,
    ) -> None:
        """Append a row for each vehicle that decided now.

        Raises:
            ValueError: a vehicle has an open decision already.
        """
        rows = len(ids)
        if not rows:
            return
        _, twice = _match(ids, self._rows["id"][self._open])
        if twice.any():
            raise ValueError(f"vehicle {ids[twice][0]} decided again before its last decision was closed")
        at = self._scenes.append(1, {"scene": scene}).start
        blank = {"elapsed": 0.0, "closed": False, "terminated": False, "truncated": False}
        links = {"id": ids, "opened": opened, "scene": at, "successor": -1, "final": -1, "rewards": 0.0, "team": 0.0}
        place = self._rows.append(rows, {**blank, **links, **columns})
        fresh = np.arange(place.start, place.stop)
        before, known = _match(ids, self._rows["id"][self._waiting])
        self._rows["successor"][self._waiting[before[known]]] = fresh[known]
        self._waiting = np.delete(self._waiting, before[known])
        self._open = np.concatenate([self._open, fresh])

    def close(
        self,
        closed: Closed,
        scene: Float32[np.ndarray, " scene"],
        finals: Mapping[str, np.ndarray],
    ) -> None:
        """Complete the rows of decisions that ended.

        Args:
            closed: what came of them.
            scene: of the final views.
            finals: view columns of the truncated ones, in their order.

        Raises:
            ValueError: a vehicle has no open decision.
        """
        if not len(closed):
            return
        at, known = _match(closed.ids, self._rows["id"][self._open])
        if not known.all():
            raise ValueError(f"vehicle {closed.ids[~known][0]}: a decision was closed that had not been opened")
        rows = self._open[at]
        self._open = np.delete(self._open, at)
        for name in ("rewards", "team", "elapsed", "terminated", "truncated"):
            self._rows[name][rows] = getattr(closed, name)
        self._rows["closed"][rows] = True
        cut = rows[closed.truncated]
        if len(cut):
            index = self._scenes.append(1, {"scene": scene}).start
            place = self._finals.append(len(cut), {**finals, "scene": index})
            self._rows["final"][cut] = np.arange(place.start, place.stop)
        goes_on = ~(closed.terminated | closed.truncated)
        self._waiting = np.concatenate([self._waiting, rows[goes_on]])

    def chains(self, going: Int64[np.ndarray, " going"]) -> Chains:
        """The rows whose future is known: closed, and ended, or followed by another view of the same vehicle.

        Args:
            going: ids of the observation that would be acted on next; they bootstrap what goes on.
        """
        column = self._rows
        ended = column["terminated"] | column["truncated"]
        successor = column["successor"].copy()
        cut = np.full(self._rows.count, -1, np.int64)
        at, known = _match(column["id"][self._waiting], going)
        cut[self._waiting[known]] = at[known]
        usable = column["closed"] & (ended | (successor >= 0) | (cut >= 0))
        rows = np.flatnonzero(usable)
        rows = rows[np.argsort(column["id"][rows], kind="stable")]  # rows of a vehicle are in time's order already
        after = successor[rows]
        continues = np.zeros(len(rows), np.bool_)
        continues[:-1] = after[:-1] == rows[1:]
        return Chains(
            rows=rows,
            continues=continues,
            final=column["final"][rows],
            going=cut[rows],
            successor=np.where(continues, -1, after),
        )

    def discard(self, rows: Int64[np.ndarray, " rows"]) -> None:
        """Drop rows that were learned from, and what only they pointed to. The others wait for the next update."""
        gone = np.zeros(self._rows.count, np.bool_)
        gone[rows] = True
        if gone.all():
            self._rows.count = self._finals.count = self._scenes.count = 0
            self._open = self._waiting = np.zeros(0, np.int64)
            return
        moved = np.cumsum(~gone) - 1
        self._rows.keep(np.flatnonzero(~gone))
        after = self._rows["successor"]
        self._rows["successor"][:] = np.where((after >= 0) & ~gone[after], moved[after], -1)
        self._open = moved[self._open]
        self._waiting = moved[self._waiting[~gone[self._waiting]]]
        self._finals.count = 0  # a truncated row is always learned from at once
        used, self._rows["scene"][:] = np.unique(self._rows["scene"], return_inverse=True)
        self._scenes.keep(used)

    def check_finite(self, extra: Mapping[str, np.ndarray]) -> None:
        """Raise unless everything that was seen and given is a number.

        Args:
            extra: further columns over all rows, checked along.

        Raises:
            NotFiniteError: with the rows in question.
        """
        table = {name: self._rows[name] for name in (*self._view, "rewards", "team")} | dict(extra)
        for name, array in table.items():
            if not np.isfinite(array).all():
                bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))
                raise NotFiniteError(
                    f"{name} of {len(bad)} of {len(array)} stored decisions is NaN or infinite",
                    fix="the batch holds those rows: look for the feature or reward part that is not finite",
                    batch={key: value[bad] for key, value in {**table, "id": self._rows["id"]}.items()},
                )

    def state(self) -> _Table:
        """A copy of everything."""
        found = {f"rows.{name}": array.copy() for name, array in self._rows.table().items()}
        found |= {f"finals.{name}": array.copy() for name, array in self._finals.table().items()}
        return {**found, "scenes": self._scenes["scene"].copy(), "open": self._open.copy(), "waiting": self._waiting}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Become what `state` returned."""
        self._rows.load({name[5:]: array for name, array in state.items() if name.startswith("rows.")})
        self._finals.load({name[7:]: array for name, array in state.items() if name.startswith("finals.")})
        self._scenes.load({"scene": state["scenes"]})
        self._open, self._waiting = state["open"].copy(), state["waiting"].copy()


def chain_advantages(
    chains: Chains,
    rewards: Float[np.ndarray, "rows components"],
    values: Float[np.ndarray, "rows components"],
    finals: Float[np.ndarray, "finals components"],
    going: Float[np.ndarray, "going components"],
    discounts: Float[np.ndarray, " rows"],
    gae_lambda: float,
) -> Float[np.ndarray, "chained components"]:
    """Advantages of the rows of `chains`, in their order.

    Args:
        chains: what follows what.
        rewards: of all rows of the rollout.
        values: of all rows of the rollout.
        finals: values of the final views of truncated rows.
        going: values of the observation that goes on.
        discounts: of all rows.
        gae_lambda: see `advantages_of`.
    """
    rows = chains.rows
    after = np.zeros((len(rows), rewards.shape[1]))
    for index, source in ((chains.final, finals), (chains.going, going), (chains.successor, values)):
        known = index >= 0
        after[known] = source[index[known]]
    return advantages_of(rewards[rows], values[rows], after, chains.continues, discounts[rows], gae_lambda)


def advantages_of(
    rewards: Float[np.ndarray, "chained components"],
    values: Float[np.ndarray, "chained components"],
    after: Float[np.ndarray, "chained components"],
    continues: Bool[np.ndarray, " chained"],
    discounts: Float[np.ndarray, " chained"],
    gae_lambda: float,
) -> Float[np.ndarray, "chained components"]:
    """Generalised advantages (Schulman et al. 2016) of all chains at once, each row with its own discount.

    Args:
        rewards: discounted sums inside each interval.
        values: of each row.
        after: value of what follows a row that does not continue here; zero where nothing does.
        continues: the next row is the same vehicle's next decision.
        discounts: over each row's interval, e.g. discount_per_second ** elapsed.
        gae_lambda: weight of a longer look ahead, per decision.
    """
    following = after.copy()
    following[:-1][continues[:-1]] = values[1:][continues[:-1]]
    advantages = rewards + discounts[:, None] * following - values
    # how many rows of its chain come after each: row i depends on i + 1 alone, so rows of equal rank go together
    index = np.arange(len(continues))
    ends = np.flatnonzero(~continues)
    rank = ends[np.searchsorted(ends, index)] - index
    by_rank = np.argsort(rank, kind="stable")
    bounds = np.cumsum(np.bincount(rank)) if len(rank) else np.zeros(0, np.int64)
    for first, last in pairwise(bounds):
        rows = by_rank[first:last]
        advantages[rows] += (gae_lambda * discounts[rows])[:, None] * advantages[rows + 1]
    return np.asarray(advantages)


def spread(
    values: Float[np.ndarray, "chosen *columns"], rows: Int64[np.ndarray, " chosen"], count: int
) -> Float32[np.ndarray, "count *columns"]:
    """Values of some rows, at their places among `count` rows; zero elsewhere."""
    found = np.zeros((count, *values.shape[1:]), np.float32)
    found[rows] = values
    return found


def minibatches(
    rows: Int64[np.ndarray, " rows"], size: int, rng: np.random.Generator
) -> tuple[Int64[np.ndarray, "batches size"], Float32[np.ndarray, "batches size"]]:
    """The rows in random order, cut into minibatches of one size; the last is filled up with rows of weight 0."""
    batches = -(-len(rows) // size)
    order = np.full(batches * size, rows[0])
    order[: len(rows)] = rng.permutation(rows)
    weight = np.zeros(batches * size, np.float32)
    weight[: len(rows)] = 1.0
    return order.reshape(batches, size), weight.reshape(batches, size)
