"""Who has decided and not yet been told what came of it: one open interval per vehicle, in arrays over slots."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int16, Int64

from opencda_marl.core.spec import Closed
from opencda_marl.env.compiled import kernel
from opencda_marl.env.reward import RewardParts, amount

__all__ = ["Ledger", "join_closed", "no_closed"]


@kernel
def _settle(
    rows: Int64[np.ndarray, " rows"],
    numbers: Int64[np.ndarray, " parts"],
    others: Float64[np.ndarray, "parts values"],
    before: Float64[np.ndarray, "slots fields"],
    now: Float64[np.ndarray, "slots fields"],
    routes: Int16[np.ndarray, " slots"],
    road: Float64[np.ndarray, "routes columns"],
    endings: Int64[np.ndarray, " slots"],
    near_miss: Float64[np.ndarray, " slots"],
    predicted: Bool[np.ndarray, " slots"],
    step_length: float,
    discount: float,
    team: float,
    parts: Float64[np.ndarray, "slots parts"],
    life: Float64[np.ndarray, "slots parts"],
    teams: Float64[np.ndarray, " slots"],
    factor: Float64[np.ndarray, " slots"],
    steps: Int64[np.ndarray, " slots"],
) -> bool:
    """Add one step to the open interval of each row; False if a value is not finite.

    Where a number is below 0 the part is not bundled, and its values stand in `others`.
    """
    finite = np.isfinite(team)
    for r in range(len(rows)):
        s = rows[r]
        for p in range(len(numbers)):
            if numbers[p] < 0:
                value = others[p, r]
            else:
                value = amount(
                    numbers[p],
                    before[s],
                    now[s],
                    road[routes[s]],
                    endings[s],
                    near_miss[s],
                    predicted[s],
                    step_length,
                    discount,
                )
            finite = finite and np.isfinite(value)
            parts[s, p] += factor[s] * value
            life[s, p] += value
        teams[s] += factor[s] * team
        factor[s] *= discount
        steps[s] += 1
    return bool(finite)


@kernel
def _open(
    rows: Int64[np.ndarray, " rows"],
    is_open: Bool[np.ndarray, " slots"],
    parts: Float64[np.ndarray, "slots parts"],
    teams: Float64[np.ndarray, " slots"],
    factor: Float64[np.ndarray, " slots"],
    steps: Int64[np.ndarray, " slots"],
) -> Int64[np.ndarray, " open"]:
    """Begin an interval for each row; returns the slots of all open ones, ascending."""
    for s in rows:
        is_open[s] = True
        parts[s] = 0.0
        teams[s], factor[s], steps[s] = 0.0, 1.0, 0
    return np.flatnonzero(is_open)


@kernel
def _close(
    rows: Int64[np.ndarray, " rows"],
    is_open: Bool[np.ndarray, " slots"],
    parts: Float64[np.ndarray, "slots parts"],
    teams: Float64[np.ndarray, " slots"],
    steps: Int64[np.ndarray, " slots"],
    matrix: Float64[np.ndarray, "parts objectives"],
    step_length: float,
    rewards: Float32[np.ndarray, "rows objectives"],
    team: Float32[np.ndarray, " rows"],
    elapsed: Float32[np.ndarray, " rows"],
) -> Int64[np.ndarray, " open"]:
    """Weigh what each row earned and end its interval; returns the slots of those that stay open, ascending."""
    for r in range(len(rows)):
        s = rows[r]
        is_open[s] = False
        for k in range(matrix.shape[1]):
            total = 0.0
            for p in range(matrix.shape[0]):
                total += parts[s, p] * matrix[p, k]
            rewards[r, k] = total
        team[r] = teams[s]
        elapsed[r] = steps[s] * step_length
    return np.flatnonzero(is_open)


def no_closed(objectives: int) -> Closed:
    """Nothing ended."""
    none = np.zeros(0, np.int64)
    return Closed(
        ids=none,
        slots=none,
        rewards=np.zeros((0, objectives), np.float32),
        team=np.zeros(0, np.float32),
        elapsed=np.zeros(0, np.float32),
        terminated=np.zeros(0, np.bool_),
        truncated=np.zeros(0, np.bool_),
    )


def join_closed(pieces: list[Closed], objectives: int) -> Closed:
    """One record of several, in their order."""
    if not pieces:
        return no_closed(objectives)
    if len(pieces) == 1:
        return pieces[0]
    return Closed(
        ids=np.concatenate([piece.ids for piece in pieces]),
        slots=np.concatenate([piece.slots for piece in pieces]),
        rewards=np.concatenate([piece.rewards for piece in pieces]),
        team=np.concatenate([piece.team for piece in pieces]),
        elapsed=np.concatenate([piece.elapsed for piece in pieces]),
        terminated=np.concatenate([piece.terminated for piece in pieces]),
        truncated=np.concatenate([piece.truncated for piece in pieces]),
    )


class Ledger:
    """Open intervals. The reward of the first step after a decision counts fully, the next one discounted, …

    Args:
        slots: of the simulator.
        parts: of the reward.
    """

    def __init__(self, slots: int, parts: RewardParts) -> None:
        count = len(parts.names)
        self.rows = np.zeros(0, np.int64)  # slots with an open interval, ascending
        self.life = np.zeros((slots, count))  # [slots, parts] undiscounted, since the first decision
        self._reward = parts
        self._open = np.zeros(slots, np.bool_)
        self._parts = np.zeros((slots, count))  # discounted, of the interval
        self._team = np.zeros(slots)
        self._factor = np.zeros(slots)
        self._steps = np.zeros(slots, np.int64)

    def clear(self) -> None:
        """A new episode."""
        self._open[:] = False
        self.rows = np.zeros(0, np.int64)

    def enter(self, slots: Int64[np.ndarray, " rows"]) -> None:
        """New vehicles are in these slots."""
        self.life[slots] = 0.0

    def open(self, slots: Int64[np.ndarray, " rows"]) -> None:
        """These vehicles have just decided."""
        self.rows = _open(slots, self._open, self._parts, self._team, self._factor, self._steps)

    def is_open(self, slots: Int64[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        """Which of these vehicles have decided and wait for what comes of it."""
        flags: Bool[np.ndarray, " rows"] = self._open[slots]
        return flags

    def earn(
        self,
        before: Float64[np.ndarray, "slots fields"],
        now: Float64[np.ndarray, "slots fields"],
        routes: Int16[np.ndarray, " slots"],
        endings: Int64[np.ndarray, " slots"],
        near_miss: Float64[np.ndarray, " slots"],
        predicted: Bool[np.ndarray, " slots"],
        team: float,
    ) -> bool:
        """Add one step to `rows`; False if a value is not finite.

        Args:
            before, now: columns `core.state.Field`, before and after the step.
            routes: of each slot.
            endings: `core.state.Ending` of those that ended in it, else 0.
            near_miss, predicted: see `env.near_miss`.
            team: the team's reward.
        """
        reward = self._reward
        return _settle(
            self.rows,
            reward.numbers,
            reward.others(self.rows, before, now, routes, endings, near_miss, predicted),
            before,
            now,
            routes,
            reward.road,
            endings,
            near_miss,
            predicted,
            reward.step_length,
            reward.discount,
            team,
            self._parts,
            self.life,
            self._team,
            self._factor,
            self._steps,
        )

    def close(
        self,
        slots: Int64[np.ndarray, " closed"],
        ids: Int64[np.ndarray, " slots"],
        terminated: Bool[np.ndarray, " closed"],
        truncated: Bool[np.ndarray, " closed"],
    ) -> Closed:
        """What came of the decisions of these vehicles, which must be open."""
        matrix, count = self._reward.matrix, len(slots)
        rewards = np.empty((count, matrix.shape[1]), np.float32)
        team, elapsed = np.empty(count, np.float32), np.empty(count, np.float32)
        self.rows = _close(
            slots,
            self._open,
            self._parts,
            self._team,
            self._steps,
            matrix,
            self._reward.step_length,
            rewards,
            team,
            elapsed,
        )
        return Closed(ids[slots], slots, rewards, team, elapsed, terminated, truncated)
