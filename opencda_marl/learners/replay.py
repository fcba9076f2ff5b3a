"""What happened, in a ring of fixed size: the newest decisions of all vehicles, to be drawn from at random.

A row is one decision of one vehicle: what it saw, what it did, and, once its interval is over, what came of it. The
view that follows a decision is not stored beside it: it is the row of the vehicle's next decision, or, where an
episode was cut, a row of its own that holds nothing but the last view. So a row costs one view, not two.
Rows are numbered for life; number n lies at place n modulo the capacity. A vehicle's next row is younger than the one
before, so a row that can still be drawn never points to one that was overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from opencda_marl.core.errors import CheckpointError, ConfigError, NotFiniteError, OutOfMemoryError
from opencda_marl.core.machine import available_memory
from opencda_marl.core.segments import Segment
from opencda_marl.core.spec import Closed

__all__ = ["Replay"]

_Table = dict[str, np.ndarray]
_Columns = Mapping[str, tuple[tuple[int, ...], Any]]

_BASE: dict[str, tuple[tuple[int, ...], Any]] = {
    "id": ((), np.int64),  # vehicle; it also names the episode (core.state.vehicle_id)
    "opened": ((), np.int64),  # env steps seen by the learner when the decision was made
    "discount": ((), np.float32),  # of what follows, over the interval; 0 where nothing does
    "next": ((), np.int64),  # number of the row with the following view; -1: there is none
    "usable": ((), np.bool_),  # complete, so that it can be learned from
}
_SHOWN = (25_000, 100_000, 1_000_000)
_SHARE = 0.8  # of the free memory that a ring may take


class Replay:
    """The ring. Its memory is taken when the first row comes; a learner that only acts needs none.

    Args:
        view: columns that describe what a vehicle saw: name -> (shape of a row, dtype).
        decision: columns that describe what it did.
        components: of the reward.
        capacity: rows.
    """

    def __init__(self, view: _Columns, decision: _Columns, *, components: int, capacity: int) -> None:
        self._columns = {**_BASE, "rewards": ((components,), np.float32), **view, **decision}
        self._view, self._decision = tuple(view), tuple(decision)
        self.capacity = capacity
        self.bytes_per_row = sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize for shape, kind in self._columns.values()
        )
        self._ring: _Table = {}
        self._buffers: _Table = {}  # of the last batch
        self.total = 0  # rows added so far
        self.decisions = 0  # those of them that are no last views
        self.usable = 0  # rows that can be drawn
        self._open = np.zeros(0, np.int64)  # numbers of rows whose interval is not over
        self._waiting = np.zeros(0, np.int64)  # numbers of rows whose vehicle goes on and has not decided again
        self._sealed = 0  # rows below this number are in a segment
        self._changed: list[np.ndarray] = []  # numbers of such rows that changed since
        self._segments: list[Segment] = []

    def _blank(self) -> _Table:
        """Columns of a ring without rows; the system gives the memory as they are written.

        Raises:
            OutOfMemoryError: it would not fit into the memory that is free.
        """
        size, free = self.capacity * self.bytes_per_row, available_memory()
        if free is not None and size > _SHARE * free:
            fitting = int(_SHARE * free / self.bytes_per_row) // 1000 * 1000
            raise OutOfMemoryError(
                f"learner.buffer_size {self.capacity}: a replay of that size takes {_size(size)}, "
                f"but {_size(free)} of memory are free ({self.describe()})",
                fix=f"learner.buffer_size={max(1000, fitting)}",
            )
        return {name: np.zeros((self.capacity, *shape), kind) for name, (shape, kind) in self._columns.items()}

    def describe(self) -> str:
        """Rows and bytes, of this ring and of some usual sizes."""
        usual = ", ".join(f"{_count(rows)}: {_size(rows * self.bytes_per_row)}" for rows in _SHOWN)
        return f"{_count(self.capacity)} decisions, {_size(self.capacity * self.bytes_per_row)} ({usual})"

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    @property
    def open_rows(self) -> int:
        """Decisions whose interval is not over."""
        return len(self._open)

    def open(self, ids: Int64[np.ndarray, " rows"], columns: Mapping[str, np.ndarray], opened: int) -> None:
        """Append a row for each vehicle that decided now.

        Args:
            ids: of the vehicles.
            columns: view and decision columns.
            opened: env steps so far.

        Raises:
            ValueError: a vehicle has an open decision already.
            NotFiniteError: something that was seen or done is no number.
            ConfigError: the ring is too small for the decisions that are open at once.
            OutOfMemoryError: it is the first row, and the ring does not fit into the memory that is free.
        """
        if not len(ids):
            return
        _, twice = _match(ids, self._ids(self._open))
        if twice.any():
            raise ValueError(f"vehicle {ids[twice][0]} decided again before its last decision was closed")
        fresh = self._append({"id": ids, "opened": opened, "rewards": 0.0, **columns}, len(ids))
        self.decisions += len(ids)
        before, known = _match(ids, self._ids(self._waiting))
        self._complete(self._waiting[before[known]], fresh[known])
        self._waiting = np.delete(self._waiting, before[known])
        self._open = np.concatenate([self._open, fresh])

    def close(
        self,
        closed: Closed,
        rewards: Float[np.ndarray, "closed components"],
        discounts: Float[np.ndarray, " closed"],
        finals: Mapping[str, np.ndarray],
        opened: int,
    ) -> None:
        """Complete the rows of decisions that ended.

        Args:
            closed: what came of them.
            rewards: of their intervals, by component.
            discounts: of what follows them; what terminated has no future whatever stands here.
            finals: view columns of the truncated ones, in their order.
            opened: env steps so far.

        Raises:
            ValueError: a vehicle has no open decision.
            NotFiniteError: a reward or a last view is no number.
            ConfigError: the ring is too small for the decisions that are open at once.
        """
        if not len(closed):
            return
        at, known = _match(closed.ids, self._ids(self._open))
        if not known.all():
            raise ValueError(f"vehicle {closed.ids[~known][0]}: a decision was closed that had not been opened")
        _check_finite({"rewards": rewards}, closed.ids)
        rows = self._open[at]
        cut, after = rows[closed.truncated], np.zeros(0, np.int64)
        if len(cut):  # as long as all of these are open, so that none is overwritten unnoticed
            blank = {name: np.zeros((len(cut), *self._columns[name][0])) for name in self._decision}
            values = {"id": closed.ids[closed.truncated], "opened": opened, "rewards": 0.0, **blank, **finals}
            after = self._append(values, len(cut))
        self._open = np.delete(self._open, at)
        place = rows % self.capacity
        self._ring["rewards"][place] = rewards
        self._ring["discount"][place] = np.where(closed.terminated, 0.0, discounts)
        self._touch(rows)
        self._complete(rows[closed.terminated], None)
        self._complete(cut, after)
        self._waiting = np.concatenate([self._waiting, rows[~(closed.terminated | closed.truncated)]])

    def _append(self, values: Mapping[str, Any], rows: int) -> Int64[np.ndarray, " rows"]:
        """Numbers of new rows with these values."""
        _check_finite({name: values[name] for name in (*self._view, *self._decision)}, values["id"])
        if not self._ring:
            self._ring = self._blank()
        fresh = np.arange(self.total, self.total + rows)
        place = fresh % self.capacity
        oldest = self.total + rows - self.capacity
        if rows > self.capacity or (len(self._open) and self._open[0] < oldest):
            raise ConfigError(
                f"learner.buffer_size {self.capacity} is too small: decisions are overwritten before they are over",
                fix=f"learner.buffer_size={4 * self.capacity}",
            )
        self.usable -= int(self._ring["usable"][place].sum())
        self._waiting = self._waiting[self._waiting >= oldest]
        blank = {"discount": 0.0, "next": -1, "usable": False}
        for name, column in self._ring.items():
            column[place] = blank[name] if name in blank else values[name]
        self.total += rows
        return fresh

    def _complete(self, rows: Int64[np.ndarray, " rows"], following: Int64[np.ndarray, " rows"] | None) -> None:
        """These rows can be learned from; `following` are the numbers of the views after them."""
        place = rows % self.capacity
        if following is not None:
            self._ring["next"][place] = following
        self._ring["usable"][place] = True
        self.usable += len(rows)
        self._touch(rows)

    def _touch(self, rows: Int64[np.ndarray, " rows"]) -> None:
        old = rows[rows < self._sealed]
        if len(old):
            self._changed.append(old)

    def _ids(self, rows: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
        return self._ring["id"][rows % self.capacity] if len(rows) else np.zeros(0, np.int64)

    def sample(self, rng: np.random.Generator, size: int) -> Int64[np.ndarray, " size"]:
        """Places of rows that can be learned from, uniformly and with replacement.

        Raises:
            ValueError: there is none.
        """
        if not self.usable:
            raise ValueError("nothing can be drawn from a replay without a complete decision")
        first, usable = max(0, self.total - self.capacity), self._ring["usable"]
        found = np.zeros(0, np.int64)
        while len(found) < size:  # rows that hold a last view, or are not over, are few
            drawn = rng.integers(first, self.total, 2 * size) % self.capacity
            found = np.concatenate([found, drawn[usable[drawn]]])
        return found[:size]

    def batch(self, places: Int64[np.ndarray, " rows"]) -> _Table:
        """Rows by place: view and decision columns, `rewards`, `discount`, and the following view as `next_...`.

        The arrays are used again by the next call. Where nothing follows, `discount` is 0 and the view the row's own.
        """
        following = self._ring["next"][places]
        after = np.where(following < 0, places, following % self.capacity)
        found = {name: self._take(name, name, places) for name in (*self._view, *self._decision, "rewards", "discount")}
        return found | {f"next_{name}": self._take(f"next_{name}", name, after) for name in self._view}

    def _take(self, buffer: str, name: str, places: Int64[np.ndarray, " rows"]) -> np.ndarray:
        column = self._ring[name]
        kept = self._buffers.get(buffer)
        if kept is None or len(kept) != len(places):
            kept = self._buffers[buffer] = np.empty((len(places), *column.shape[1:]), column.dtype)
        return np.take(column, places, axis=0, out=kept, mode="clip")  # "clip" writes into `out` without a copy

    def state(self) -> tuple[_Table, dict[str, Any], list[Segment]]:
        """Tensors, values and rows, for a checkpoint."""
        self._seal()
        return (
            {"replay.open": self._open.copy(), "replay.waiting": self._waiting.copy()},
            {"total": self.total, "decisions": self.decisions, "bytes_per_row": self.bytes_per_row},
            list(self._segments),
        )

    def _seal(self) -> None:
        """Put what was added or changed since the last call into a segment; forget segments that are overwritten."""
        oldest = self.total - self.capacity
        changed = np.unique(np.concatenate([np.zeros(0, np.int64), *self._changed]))
        number = np.concatenate([changed, np.arange(self._sealed, self.total)])
        number = number[number >= oldest]
        if len(number):
            arrays = {"number": number} | {name: column[number % self.capacity] for name, column in self._ring.items()}
            self._segments.append(Segment(self._sealed, self.total, arrays))
        self._segments = [segment for segment in self._segments if segment.last > oldest]
        self._sealed, self._changed = self.total, []

    def load(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any], segments: list[Segment]) -> None:
        """Become what `state` returned.

        Raises:
            CheckpointError: rows are missing, of another form, or in files that cannot be read; nothing was changed.
            OutOfMemoryError: the ring does not fit into the memory that is free.
        """
        total, size = int(values["total"]), int(values["bytes_per_row"])
        if size != self.bytes_per_row:
            raise CheckpointError(f"rows of the checkpoint's replay take {size} bytes, here {self.bytes_per_row}")
        ring = self._blank()
        found = np.zeros(self.capacity, np.bool_)
        for segment in segments:
            rows = segment.read()
            if rows.keys() != {"number", *ring}:
                raise CheckpointError(f"a part of the replay has the columns {sorted(rows)}")
            alive = rows["number"] >= total - self.capacity
            place = rows["number"][alive] % self.capacity
            found[place] = True
            for name, column in ring.items():
                column[place] = rows[name][alive]
        if found.sum() != min(total, self.capacity):
            raise CheckpointError(f"the checkpoint's replay has {found.sum()} of {min(total, self.capacity)} rows")
        self._ring = ring if total else {}
        self.total, self.decisions = total, int(values["decisions"])
        self.usable = int(ring["usable"].sum())
        self._open, self._waiting = tensors["replay.open"].copy(), tensors["replay.waiting"].copy()
        self._segments, self._sealed, self._changed = list(segments), total, []


def _match(ids: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, Bool[np.ndarray, " ids"]]:
    """Where each of `ids` stands in `among` (each at most once there), and whether it does."""
    if not len(ids) or not len(among):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
    same = ids[:, None] == among
    return same.argmax(1), same.any(1)


def _check_finite(columns: Mapping[str, Any], ids: Int64[np.ndarray, " rows"]) -> None:
    """Raise unless every number is one.

    Raises:
        NotFiniteError: with the rows in question.
    """
    for name, array in columns.items():
        if not np.isfinite(array).all():
            bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))
            raise NotFiniteError(
                f"{name} of {len(bad)} of {len(array)} decisions is NaN or infinite",
                fix="the batch holds those rows: look for the feature or reward part that is not finite",
                batch={"id": ids[bad]} | {key: np.asarray(value)[bad] for key, value in columns.items()},
            )


def _count(rows: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if rows >= size and rows % size == 0:
            return f"{rows // size}{letter}"
    return str(rows)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
