"""Several workers learn what one would learn from all of their rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from driving_school import small
from toy_world import SPEC, SPEED, World

from opencda_marl.core.errors import WorkerError
from opencda_marl.core.spec import Action, Observation, Step
from opencda_marl.learners.mappo import METRICS, Mappo
from opencda_marl.nn.process_group import ProcessGroup
from opencda_marl.settings.learning import PreferenceSettings
from opencda_marl.settings.run import RunSettings

Story = list[tuple[Observation, Action, Step]]


def story(seed: int, *, episode: int, births: float = 0.3) -> Story:
    """An episode of somebody who acts at random: what a learner would store, to be given to any."""
    world, rng = World(seed, first_episode=episode, births=births), np.random.default_rng(seed)
    step, found = world.reset(), []
    while not step.done:
        observation = step.observation
        stored = rng.normal(size=(len(observation), 1)).astype(np.float32)
        action = Action(np.tanh(stored), {"stored": stored})
        step = world.step(action)
        found.append((observation, action, step))
    return found


def settings(algorithm: str, **own: Any) -> RunSettings:
    preference = PreferenceSettings(source="fixed", fixed=[0.5, 0.3, 0.2])  # drawn ones would differ by worker
    return small(algorithm, **{"preference": preference, "epochs": 3, "minibatch_size": 30, **own})


def told(learner: Mappo, told_of: Story) -> Step:
    for observation, action, step in told_of:
        learner.store(observation, action, step)
    return told_of[-1][2]


def with_workers(size: int, make: Callable[[ProcessGroup], Any]) -> list[Any]:
    store = dist.HashStore()

    def one(rank: int) -> Any:
        group = ProcessGroup(store, rank, size, timeout=20.0, device=torch.device("cpu"))
        try:
            return make(group)
        except WorkerError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("algorithm", ["mappo", "pcmappo"])
@pytest.mark.parametrize("size", [2, 3])
def test_workers_with_their_rows_are_one_process_with_all_rows(algorithm: str, size: int) -> None:
    """Two updates, minibatches that N does not divide, unequal numbers of rows: weights, moments, scale, metrics."""
    chosen = settings(algorithm)
    stories = [[story(10 * k + w, episode=k * size + w + 1, births=0.2 + 0.2 * w) for w in range(size)] for k in (0, 1)]

    def worker(group: ProcessGroup) -> tuple[Mappo, list[dict[str, float]]]:
        learner = Mappo(chosen, SPEC, SPEED, group=group)
        return learner, [learner.update(told(learner, turn[group.rank])) for turn in stories]

    alone = Mappo(chosen, SPEC, SPEED)
    expected = []
    for turn in stories:
        for one in turn:
            last = told(alone, one)
        expected.append(alone.update(last))
    found = with_workers(size, worker)
    rows = expected[0]["rows"]
    assert rows % 30  # the last minibatch has padding
    for learner, metrics in found:
        assert [one["rows"] for one in metrics] == [one["rows"] for one in expected]
        assert learner.counters.training_step == alone.counters.training_step > 10
        for mine, theirs in zip(metrics, expected, strict=True):
            for name, value in theirs.items():
                assert mine[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
        state, other = learner.state().tensors, alone.state().tensors
        for name in ("theta", "m", "v", "scale"):
            np.testing.assert_allclose(state[name], other[name], rtol=1e-3, atol=2e-5, err_msg=name)
    shared = [learner.state().tensors["theta"].tobytes() for learner, _ in found]
    assert len(set(shared)) == 1  # to the bit


def test_one_gradient_is_the_sum_of_its_parts() -> None:
    """One step on all rows: nothing but the order of a sum differs."""
    chosen = settings("pcmappo", epochs=1, minibatch_size=10_000, max_grad_norm=1e6)
    own = [story(w, episode=w + 1, births=0.2 + 0.4 * w) for w in range(2)]

    def worker(group: ProcessGroup) -> dict[str, float]:
        learner = Mappo(chosen, SPEC, SPEED, group=group)
        return learner.update(told(learner, own[group.rank]))

    alone = Mappo(chosen, SPEC, SPEED)
    for one in own:
        last = told(alone, one)
    expected = alone.update(last)
    for found in with_workers(2, worker):
        for name in METRICS:
            assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name


def test_a_worker_without_rows_learns_along() -> None:
    chosen = settings("mappo")

    def worker(group: ProcessGroup) -> tuple[bytes, dict[str, float]]:
        learner = Mappo(chosen, SPEC, SPEED, group=group)
        last = told(learner, story(1, episode=1)) if group.rank == 0 else World(2).reset()
        found = learner.update(replace(last, observation=last.final, done=True) if group.rank else last)
        return learner.state().tensors["theta"].tobytes(), found

    (left, metrics), (right, others) = with_workers(2, worker)
    assert left == right
    assert metrics == others
    assert metrics["rows"] > 0


def test_policies_stop_together_when_they_moved_too_far() -> None:
    chosen = settings("mappo", epochs=9, learning_rate=0.05, target_kl=0.02)

    def worker(group: ProcessGroup) -> float:
        learner = Mappo(chosen, SPEC, SPEED, group=group)
        return learner.update(told(learner, story(group.rank, episode=group.rank + 1)))["epochs"]

    first, second = with_workers(2, worker)
    assert first == second < 9


def test_workers_explore_on_twigs_of_their_own_and_the_first_as_if_alone() -> None:
    seen = World(1, births=0.9).reset().observation

    def worker(group: ProcessGroup) -> bytes:
        return Mappo(small("pcmappo"), SPEC, SPEED, group=group).act(seen, explore=True).values.tobytes()

    first, second = with_workers(2, worker)
    assert first != second
    assert first == Mappo(small("pcmappo"), SPEC, SPEED).act(seen, explore=True).values.tobytes()


def test_n_steps_are_shared_out() -> None:
    def worker(group: ProcessGroup) -> int:
        learner = Mappo(settings("mappo", n_steps=101), SPEC, SPEED, group=group)
        told(learner, story(1, episode=1))
        return int(learner.state().values["due"])

    assert with_workers(2, worker) == [51, 51]

    given = Mappo(settings("mappo", n_steps=101), SPEC, SPEED).state()

    def begun_with_weights(group: ProcessGroup) -> int:
        learner = Mappo(settings("mappo", n_steps=101), SPEC, SPEED, group=group)
        learner.load(given, weights_only=True)
        return int(learner.state().values["due"])

    assert with_workers(2, begun_with_weights) == [51, 51]


def test_weights_that_came_apart_are_found_out() -> None:
    chosen = settings("mappo")

    def worker(group: ProcessGroup) -> dict[str, float]:
        learner = Mappo(chosen, SPEC, SPEED, group=group)
        last = told(learner, story(1, episode=1 + group.rank))
        if group.rank:
            learner._theta[0] += 1e-6
        return learner.update(last)

    for found in with_workers(2, worker):
        assert isinstance(found, WorkerError)
        assert "came apart" in found.message


@pytest.mark.slow
def test_the_compiled_form_of_a_part_is_the_eager_one() -> None:
    own = [story(w, episode=w + 1) for w in range(2)]

    def run(mode: str) -> np.ndarray:
        def worker(group: ProcessGroup) -> np.ndarray:
            learner = Mappo(settings("mappo", update_mode=mode, epochs=1), SPEC, SPEED, group=group)
            learner.update(told(learner, own[group.rank]))
            return learner.state().tensors["theta"]

        return with_workers(2, worker)[0]

    np.testing.assert_allclose(run("compiled"), run("eager"), atol=2e-5)
