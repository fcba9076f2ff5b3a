"""Traffic without a simulator: vehicles come and go at random, with the timing that `core.spec.Step` promises.

Every vehicle's story is also written down one by one (`stories`), in the plainest form, for brute force.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from opencda_marl.core.spec import Action, ActionSpec, Closed, Feature, Observation, ObservationSpec, Step

EGO, ROW, MOST = 4, 5, 3
STEP_LENGTH = 0.05  # [s]
SPEC = ObservationSpec(
    "toy",
    1,
    tuple(Feature(f"ego{i}", "1", 1.0, "") for i in range(EGO)),
    tuple(Feature(f"row{i}", "1", 1.0, "") for i in range(ROW)),
    MOST,
)
BARE = ObservationSpec("bare", 1, SPEC.ego, (), 0)
SPEED = ActionSpec("target_speed")
LEVELS = ActionSpec("levels", levels=(0.0, 0.25, 0.5, 0.75, 1.0))


@dataclass
class Decision:
    """One row of a story."""

    ego: np.ndarray
    at: int
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(3))
    team: float = 0.0
    elapsed: float | None = None  # None: not over
    terminated: bool = False
    truncated: bool = False
    final_ego: np.ndarray | None = None
    action: float = 0.0


Reward = Callable[[np.ndarray, float], np.ndarray]


class World:
    """Vehicles at random.

    Args:
        seed: of everything.
        interval: steps between two common decisions.
        horizon: steps of an episode.
        births: chance of a new vehicle per step.
        deaths: chance per vehicle and step to end; one in four of them is taken out (truncated).
        reward: (ego, action) -> rewards of the interval; None: random ones.
        first_episode: number of the first episode; ids are its millions.
        spec: layout.
        slots: capacity.
    """

    def __init__(
        self,
        seed: int,
        *,
        interval: int = 5,
        horizon: int = 60,
        births: float = 0.3,
        deaths: float = 0.05,
        reward: Reward | None = None,
        first_episode: int = 0,
        spec: ObservationSpec = SPEC,
        slots: int = 8,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.interval, self.horizon, self.births, self.deaths = interval, horizon, births, deaths
        self.reward, self.spec, self.slots = reward, spec, slots
        self.episode = first_episode - 1
        self.stories: dict[int, list[Decision]] = {}
        self.gained = 0.0

    def reset(self) -> Step:
        self.episode += 1
        self.time = 0
        self.born = 0
        self.present: dict[int, int] = {}  # id -> slot
        self.ego: dict[int, np.ndarray] = {}
        while not self.present:
            self.time = 0 if self.time + 2 >= self.horizon else self.time  # an episode without anybody is no test
            self._advance([])
        self.acting = sorted(self.present)
        return Step(self._observe(self.acting), _closed([]), self._observe([]), True, False, self.time)

    def step(self, action: Action) -> Step:
        for identity, value in zip(self.acting, action.values[:, 0], strict=True):
            story = self.stories.setdefault(identity, [])
            story.append(Decision(self.ego[identity].copy(), self.time, action=float(value)))
        began, closed = self.time, []
        while True:
            fresh = self._advance(closed)
            done = self.time >= self.horizon
            everyone = self.time % self.interval == 0 and bool(self.present)
            if done or everyone or fresh:
                break
        if done:
            closed += [self._close(identity, truncated=True) for identity in sorted(self.present)]
            self.present.clear()
        elif everyone:
            closed += [self._close(identity) for identity in sorted(self.present) if identity not in fresh]
        self.acting = [] if done else sorted(self.present) if everyone else sorted(fresh)
        final = [c for c in closed if c[1].truncated]
        return Step(
            self._observe(self.acting),
            _closed(closed),
            self._observe([c[0] for c in final]),
            everyone and not done,
            done,
            self.time - began,
        )

    def _advance(self, closed: list[tuple[int, Decision, int]]) -> list[int]:
        """One step of everybody; who ended is added to `closed`, who is new is returned."""
        self.time += 1
        for identity in sorted(self.present):
            self.ego[identity] = self.rng.normal(size=EGO).astype(np.float32)
            if self.rng.random() < self.deaths:
                out = self.rng.random() < 0.25
                closed.append(self._close(identity, terminated=not out, truncated=out))
                del self.present[identity]
        fresh = []
        free = sorted(set(range(self.slots)) - set(self.present.values()))
        if free and self.rng.random() < self.births and self.time < self.horizon:
            identity = self.episode * 1_000_000 + self.born
            self.born += 1
            self.present[identity] = int(self.rng.choice(free))  # slots are used again, ids never
            self.ego[identity] = self.rng.normal(size=EGO).astype(np.float32)
            fresh.append(identity)
        return fresh

    def _close(self, identity: int, *, terminated: bool = False, truncated: bool = False) -> tuple[int, Decision, int]:
        row = self.stories[identity][-1]
        row.rewards = self.rng.normal(size=3) if self.reward is None else self.reward(row.ego, row.action)
        row.rewards = row.rewards.astype(np.float32)
        row.team = float(np.float32(self.rng.normal())) if self.reward is None else 0.0
        row.elapsed = float(np.float32((self.time - row.at) * STEP_LENGTH))
        row.terminated, row.truncated = terminated, truncated
        row.final_ego = self.ego[identity].copy() if truncated else None
        self.gained += float(row.rewards.sum())
        return identity, row, self.present[identity]

    def _observe(self, ids: list[int]) -> Observation:
        rows = len(ids)
        most, width = self.spec.max_neighbours, len(self.spec.neighbour)
        ego = np.stack([self.ego[i] for i in ids]) if ids else np.zeros((0, EGO), np.float32)
        counts = np.zeros(rows, np.int32)
        neighbours = np.zeros((rows, most, width), np.float32)
        for i, values in enumerate(ego):  # as a function of ego: what a vehicle sees is the same when looked at twice
            counts[i] = int(abs(values[1]) * 3) % (most + 1)
            wave = np.sin(values[0] * np.arange(1, counts[i] * width + 1))
            neighbours[i, : counts[i]] = wave.reshape(counts[i], width)
        scene = np.concatenate([ego.mean(0), ego.max(0)]) if rows else np.zeros(2 * EGO, np.float32)
        slots = np.array([self.present.get(i, -1) for i in ids], np.int64)
        return Observation(np.array(ids, np.int64), slots, ego, neighbours, counts, scene.astype(np.float32))


def _closed(rows: list[tuple[int, Decision, int]]) -> Closed:
    return Closed(
        np.array([i for i, _, _ in rows], np.int64),
        np.array([slot for _, _, slot in rows], np.int64),
        np.array([r.rewards for _, r, _ in rows], np.float32).reshape(-1, 3),
        np.array([r.team for _, r, _ in rows], np.float32),
        np.array([r.elapsed for _, r, _ in rows], np.float32),
        np.array([r.terminated for _, r, _ in rows], np.bool_),
        np.array([r.truncated for _, r, _ in rows], np.bool_),
    )
