"""Rows, chains and advantages against brute force, vehicle by vehicle, over random arrivals and departures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_world import EGO, STEP_LENGTH, World

from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.spec import Action, Closed, Observation, Step
from opencda_marl.learners.rollout import Rollout, advantages_of, chain_advantages, minibatches

DISCOUNT, LAMBDA = 0.9, 0.8  # per second; per decision
_VIEW: dict[str, tuple[tuple[int, ...], Any]] = {"ego": ((EGO,), np.float32)}
_DECISION: dict[str, tuple[tuple[int, ...], Any]] = {"action": ((1,), np.float32)}


def empty_rollout() -> Rollout:
    return Rollout(_VIEW, _DECISION, objectives=3, scene=2 * EGO)


def value(ego: np.ndarray) -> np.ndarray:
    """Any fixed function will do: two components per row."""
    return np.stack([np.sin(3.0 * ego[..., 0]) + ego[..., 1], np.cos(ego[..., 2])], -1).astype(np.float64)


def components(rewards: np.ndarray, team: np.ndarray) -> np.ndarray:
    return np.stack([rewards.sum(-1), team], -1).astype(np.float64)


def put(rollout: Rollout, observation: Observation, action: Action, step: Step, clock: int) -> None:
    columns = {"ego": observation.ego, "action": action.values}
    rollout.open(observation.ids, observation.scene, columns, clock)
    rollout.close(step.closed, step.final.scene, {"ego": step.final.ego})


def learn(rollout: Rollout, step: Step) -> dict[tuple[float, ...], np.ndarray]:
    """Advantages of everything that can be learned from now, by what the vehicle saw; those rows are dropped."""
    chains = rollout.chains(step.observation.ids)
    views, finals, _ = rollout.views()
    found = chain_advantages(
        chains,
        components(rollout.column("rewards"), rollout.column("team")),
        value(views["ego"]),
        value(finals["ego"]),
        value(step.observation.ego),
        DISCOUNT ** rollout.column("elapsed").astype(np.float64),
        LAMBDA,
    )
    seen = [tuple(row) for row in views["ego"][chains.rows].tolist()]
    rollout.discard(chains.rows)
    return dict(zip(seen, found, strict=True))


class Ledger:
    """Brute force: every vehicle's story alone, from its end backwards."""

    def __init__(self, worlds: list[World]) -> None:
        self.worlds = worlds
        self.learned: dict[int, int] = {}

    def learn(self, step: Step) -> dict[tuple[float, ...], np.ndarray]:
        going = dict(zip(step.observation.ids.tolist(), step.observation.ego, strict=True))
        found: dict[tuple[float, ...], np.ndarray] = {}
        for world in self.worlds:
            for identity, story in world.stories.items():
                begin = end = self.learned.get(identity, 0)
                while end < len(story) and story[end].elapsed is not None:
                    row = story[end]
                    if not (row.terminated or row.truncated or end + 1 < len(story) or identity in going):
                        break
                    end += 1
                ahead = np.zeros(2)
                for i in range(end - 1, begin - 1, -1):
                    row = story[i]
                    discount = DISCOUNT**row.elapsed
                    if row.terminated:
                        after = np.zeros(2)
                    elif row.truncated:
                        after = value(row.final_ego)
                    elif i + 1 < len(story):
                        after = value(story[i + 1].ego)
                    else:
                        after = value(going[identity])
                    delta = components(row.rewards, np.array(row.team)) + discount * after - value(row.ego)
                    cut = i == end - 1
                    ahead = delta if cut else delta + discount * LAMBDA * ahead
                    found[tuple(row.ego.tolist())] = ahead
                self.learned[identity] = end
        return found


def play(
    worlds: list[World], rng: np.random.Generator, calls: int, cut: float, *, through_state: bool = False
) -> tuple[int, int]:
    """Interleave the worlds; learn at some of the moments when one has no open interval. Rows and vehicles checked."""
    rollout, ledger = empty_rollout(), Ledger(worlds)
    steps = [world.reset() for world in worlds]
    rows, updates = 0, 0
    for clock in range(calls):
        which = int(rng.integers(len(worlds)))
        observation = steps[which].observation
        action = Action(rng.normal(size=(len(observation), 1)).astype(np.float32))
        step = steps[which] = worlds[which].step(action)
        put(rollout, observation, action, step, clock)
        if (step.everyone or step.done) and rng.random() < cut:
            expected, got = ledger.learn(step), learn(rollout, step)
            assert got.keys() == expected.keys()
            for seen, advantage in expected.items():
                np.testing.assert_allclose(got[seen], advantage, rtol=1e-9, atol=1e-9)
            rows, updates = rows + len(got), updates + 1
            if len(worlds) == 1:
                assert len(rollout) == 0  # every interval was over
        if through_state:
            again = empty_rollout()
            again.load(rollout.state())
            rollout = again
        if step.done:
            steps[which] = worlds[which].reset()
    return rows, updates


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    interval=st.integers(1, 9),
    births=st.sampled_from([0.05, 0.4, 1.0]),
    deaths=st.sampled_from([0.0, 0.03, 0.3]),
    cut=st.sampled_from([0.05, 0.3, 1.0]),
    simulations=st.integers(1, 3),
)
def test_advantages_equal_brute_force(
    seed: int, interval: int, births: float, deaths: float, cut: float, simulations: int
) -> None:
    worlds = [
        World(seed + i, interval=interval, births=births, deaths=deaths, first_episode=1000 * i)
        for i in range(simulations)
    ]
    play(worlds, np.random.default_rng(seed), 40, cut)


def test_a_long_play_covers_every_kind_of_ending() -> None:
    world = World(5, interval=4, deaths=0.08)
    rows, updates = play([world], np.random.default_rng(0), 400, 0.2)
    stories = world.stories.values()
    assert rows > 500
    assert updates > 20
    assert any(story[-1].terminated for story in stories)
    assert any(story[-1].truncated and story[-1].elapsed % (4 * STEP_LENGTH) > 1e-6 for story in stories)


def test_saving_and_loading_in_between_changes_nothing() -> None:
    worlds = [World(11), World(12, first_episode=1000)]
    assert play(worlds, np.random.default_rng(1), 60, 0.3, through_state=True)[1] > 3


def closed(ids: list[int], rewards: list[float], elapsed: list[float], *, ended: str = "") -> Closed:
    """`ended` has a letter per vehicle: t(erminated), c(ut off), or a dot."""
    ended = ended or "." * len(ids)
    return Closed(
        np.array(ids),
        np.array(ids),
        np.array([[r, 0.0, 0.0] for r in rewards], np.float32),
        np.zeros(len(ids), np.float32),
        np.array(elapsed, np.float32),
        np.array([c == "t" for c in ended]),
        np.array([c == "c" for c in ended]),
    )


def open_rows(rollout: Rollout, ids: list[int]) -> None:
    ego = np.array([[i, 0, 0, 0] for i in ids], np.float32)
    rollout.open(np.array(ids), np.zeros(2 * EGO, np.float32), {"ego": ego, "action": ego[:, :1]}, 0)


def test_a_vehicle_that_ends_exactly_at_the_cut_is_not_bootstrapped() -> None:
    rollout = empty_rollout()
    open_rows(rollout, [7, 8])
    nothing = np.zeros(2 * EGO, np.float32)
    rollout.close(closed([7, 8], [1.0, 2.0], [0.5, 0.5], ended="t."), nothing, {})
    chains = rollout.chains(np.array([9, 8]))  # 8 goes on, 9 is new, 7 is gone
    assert rollout.column("id")[chains.rows].tolist() == [7, 8]
    assert chains.going.tolist() == [-1, 1]
    got = chain_advantages(
        chains, rollout.column("rewards")[:, :1], np.zeros((2, 1)), np.zeros((0, 1)), np.array([[50.0], [10.0]]),
        np.full(2, 0.9), 0.95,
    )  # fmt: skip
    np.testing.assert_allclose(got[:, 0], [1.0, 2.0 + 0.9 * 10.0])


def test_truncation_bootstraps_from_the_final_view_and_not_from_a_later_namesake_of_the_slot() -> None:
    rollout = empty_rollout()
    open_rows(rollout, [7])
    final = {"ego": np.array([[3.0, 0, 0, 0]], np.float32)}
    rollout.close(closed([7], [1.0], [0.5], ended="c"), np.ones(2 * EGO, np.float32), final)
    open_rows(rollout, [1_000_007])  # the next episode's vehicle in the same slot
    chains = rollout.chains(np.array([1_000_007]))
    _, finals, scenes = rollout.views()
    assert chains.rows.tolist() == [0]
    assert (chains.final.tolist(), chains.going.tolist(), chains.successor.tolist()) == ([0], [-1], [-1])
    assert finals["ego"][0, 0] == 3.0
    assert scenes[finals["scene"][0]].tolist() == [1.0] * 2 * EGO


def test_advantages_by_hand() -> None:
    # two decisions of one vehicle, 0.5 s and then 0.25 s at 0.81 per second: discounts 0.9 and 0.9487; then it arrives
    discounts = 0.81 ** np.array([0.5, 0.25])
    got = advantages_of(
        np.array([[1.0], [2.0]]), np.array([[0.5], [0.4]]), np.zeros((2, 1)), np.array([True, False]), discounts, 0.5
    )
    last = 2.0 - 0.4  # no bootstrap
    first = 1.0 + 0.9 * 0.4 - 0.5 + 0.9 * 0.5 * last
    np.testing.assert_allclose(got[:, 0], [first, last])


def test_a_decision_is_opened_and_closed_once() -> None:
    rollout = empty_rollout()
    nothing = np.zeros(2 * EGO, np.float32)
    open_rows(rollout, [7])
    with pytest.raises(ValueError, match="vehicle 7 decided again"):
        open_rows(rollout, [7])
    with pytest.raises(ValueError, match="vehicle 8: a decision was closed that had not been opened"):
        rollout.close(closed([8], [0.0], [0.5]), nothing, {})
    rollout.close(closed([7], [0.0], [0.5]), nothing, {})
    with pytest.raises(ValueError, match="vehicle 7"):
        rollout.close(closed([7], [0.0], [0.5]), nothing, {})


def test_what_is_not_finite_is_named_and_handed_over() -> None:
    rollout = empty_rollout()
    open_rows(rollout, [7, 8])
    rollout.close(closed([7, 8], [1.0, np.nan], [0.5, 0.5], ended="tt"), np.zeros(2 * EGO, np.float32), {})
    with pytest.raises(NotFiniteError, match="rewards of 1 of 2") as caught:
        rollout.check_finite({})
    assert caught.value.batch["id"].tolist() == [8]


def test_minibatches_take_each_row_once_and_fill_up_with_weight_zero() -> None:
    rows = np.array([3, 5, 6, 7, 9])
    order, weight = minibatches(rows, 2, np.random.default_rng(0))
    assert order.shape == weight.shape == (3, 2)
    assert sorted(order[weight == 1.0].tolist()) == rows.tolist()
    assert weight[-1].tolist() == [1.0, 0.0]
    assert order[-1, 1] in rows
    again, _ = minibatches(rows, 2, np.random.default_rng(1))
    assert again.tolist() != order.tolist()
