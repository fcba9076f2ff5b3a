"""Tabular Q-learning: states, acting, what is stored, saving, and that it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_world import LEVELS, SPEC, SPEED, STEP_LENGTH, World

from opencda_marl.config import load_profile, to_yaml
from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.errors import CheckpointError, ConfigError, NotFiniteError
from opencda_marl.core.run_folder import read_episodes, read_metrics, read_run
from opencda_marl.core.spec import Closed, Feature, LearnerState, Observation, ObservationSpec, Step
from opencda_marl.learners import LEARNERS
from opencda_marl.learners.bins import Bins
from opencda_marl.learners.qlearning import Qlearning
from opencda_marl.settings.qlearning import QlearningSettings
from opencda_marl.settings.run import RunSettings

TOY = {"ego0": [-1.0, 0.0, 1.0], "ego1": [0.0]}
_EGO = ("speed", "stop_line", "leader", "leader_gap")
_ROW = ("conflict", "gap_if_second", "gap_if_first", "extra")
PLAIN = ObservationSpec(  # every scale is 1
    "plain",
    1,
    tuple(Feature(name, "", 1.0, "") for name in _EGO),
    tuple(Feature(name, "", 1.0, "") for name in _ROW),
    3,
)


def settings(seed: int = 3, **own: Any) -> RunSettings:
    block = QlearningSettings(**{"ego": TOY, "critical": {}, **own})
    return RunSettings(algorithm="qlearning", action="levels", seed=seed, learner=block)


def build(seed: int = 3, **own: Any) -> Qlearning:
    return Qlearning(settings(seed, **own), SPEC, LEVELS)


def drive(learner: Qlearning, world: World, episodes: int, *, done: float = 0.0) -> list[dict[str, float]]:
    """Whole episodes, as `train.run_loop` drives them; what each update returned."""
    found = []
    for _ in range(episodes):
        step = world.reset()
        while not step.done:
            observation = step.observation
            action = learner.act(observation, explore=True)
            step = world.step(action)
            learner.store(observation, action, step)
            if learner.ready(step):
                learner.progress(done)
                found.append(learner.update(step))
    return found


def bits(state: LearnerState) -> tuple[dict[str, bytes], str]:
    return {name: array.tobytes() for name, array in state.tensors.items()}, json.dumps(state.values, sort_keys=True)


def seen(
    ego: list[list[float]], rows: list[list[list[float]]] | None = None, ids: list[int] | None = None
) -> Observation:
    """Vehicles of `PLAIN`."""
    count, rows = len(ego), rows or [[] for _ in ego]
    neighbours = np.zeros((count, 3, len(_ROW)), np.float32)
    for i, mine in enumerate(rows):
        for k, row in enumerate(mine):
            neighbours[i, k] = row
    counts = np.array([len(mine) for mine in rows], np.int32)
    return Observation(
        np.array(ids if ids is not None else range(count), np.int64), np.arange(count), np.array(ego, np.float32),
        neighbours, counts, np.zeros(2 * len(_EGO), np.float32),
    )  # fmt: skip


def nobody() -> Observation:
    """An observation of the toy world without vehicles."""
    cars = World(0).reset().observation
    return Observation(cars.ids[:0], cars.slots[:0], cars.ego[:0], cars.neighbours[:0], cars.counts[:0], cars.scene)


def test_edges_belong_to_the_bin_above_and_an_absent_leader_has_its_own() -> None:
    own = QlearningSettings(ego={"stop_line": [0.1, 25.0], "leader_gap": [5.0], "speed": []}, critical={})
    bins = Bins(own, PLAIN)
    assert bins.states == 3 * 3
    cars = [[0, 0.0, 1, 4.0], [0, 0.1, 1, 5.0], [0, 24.9, 1, 9.0], [0, 25.0, 0, 0.0], [0, -9.0, 0, 9.0]]
    assert bins(seen(cars)).tolist() == [0, 3 + 1, 3 + 1, 6 + 2, 0 + 2]


def test_the_critical_neighbour_and_those_that_are_none() -> None:
    """Rows without a conflict and rows beyond the count are nobody, whatever is in them."""
    blocks = {"gap_if_second": [-1.0, 0.0], "gap_if_first": [0.0]}
    bins = Bins(QlearningSettings(ego={}, critical=blocks, nearest={"extra": [5.0]}, conflicts=[2.0]), PLAIN)
    assert bins.states == 1 + 2 * 3 * 2 * 2
    far, close, other = [1, -9.0, 4.0, 9.0], [1, -1.0, -3.0, 7.0], [0, -8.0, -8.0, 0.0]  # larger gap: 4; -1; nobody
    cars = seen([[0.0] * 4] * 5, [[], [other], [far, close, other], [far], [[1, -1.5, -2.0, 4.9], far]])
    cars.neighbours[0, 0], cars.neighbours[3, 1] = close, [1, -9.0, -9.0, 0.0]  # beyond the counts
    expected = [0, 0]
    for number, second, first, extra in ((1, 1, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0)):
        expected.append(1 + ((number * 3 + second) * 2 + first) * 2 + extra)
    assert bins(cars).tolist() == expected


def test_the_smallest_value_of_a_column_that_may_be_absent() -> None:
    rows = (*PLAIN.neighbour[:-1], Feature("acted", "", 1.0, ""), Feature("last_action", "", 1.0, ""))
    spec = replace(PLAIN, neighbour=rows)
    bins = Bins(QlearningSettings(ego={}, critical={}, nearest={"last_action": [0.5]}), spec)
    cars = seen([[0.0] * 4] * 3)
    cars.counts[:] = 2
    cars.neighbours = np.zeros((3, 3, len(rows)), np.float32)
    cars.neighbours[:, :2, 0] = 1.0
    cars.neighbours[0, 0, -2:], cars.neighbours[0, 1, -2:] = (1.0, 0.9), (0.0, -1.0)  # the other never acted
    cars.neighbours[1, :2, -2:] = [(1.0, 0.9), (1.0, 0.1)]
    assert bins(cars).tolist() == [1 + 1, 1 + 0, 1 + 2]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"ego": {"sped": [1.0]}}, "learner.ego.sped: the observation has no such feature"),
        ({"ego": {"speed": [1.0, 1.0]}}, "learner.ego.speed: edges must ascend"),
        ({"ego": {}, "conflicts": [3.0, 2.0]}, "learner.conflicts: edges must ascend"),
    ],
)
def test_bins_that_cannot_be(own: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Bins(QlearningSettings(**{"critical": {}, **own}), PLAIN)
    with pytest.raises(ConfigError, match="toy has no neighbours with conflict, gap_if_second"):
        Bins(QlearningSettings(ego={}, critical={"row0": [0.0]}), SPEC)


def test_what_a_table_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="cannot hold the action 'target_speed'"):
        Qlearning(settings(), SPEC, SPEED)
    many = {"ego0": list(range(200)), "ego1": list(range(200))}
    with pytest.raises(ConfigError, match="40401 states x 5 levels, more than 100000"):
        build(ego=many)


def test_it_describes_itself() -> None:
    assert LEARNERS.load("qlearning") is Qlearning
    found = build().describe()
    assert (found["algorithm"], found["states"], found["levels"], found["parameters"]) == ("qlearning", 8, 5, 40)
    assert found["bins"] == {"ego": TOY, "critical": {}, "nearest": {}, "conflicts": []}
    for name in ("device", "acting_device", "threads", "torch", "encoder", "update_mode"):
        assert found[name]
    assert build().describe()["bins"] == json.loads(json.dumps(found["bins"]))


def test_greedy_takes_the_best_that_was_tried_and_ties_go_to_the_faster() -> None:
    learner = build(epsilon=0.0)
    state = learner.state()
    state.tensors["table"][:] = [-5.0, -1.0, -2.0, -2.0, 0.0]
    state.tensors["visits"][:] = [3, 2, 1, 0, 0]
    learner.load(state)
    cars = World(0).reset().observation
    assert (learner.act(cars, explore=False).values == 1.0).all()
    assert (learner.act(cars, explore=True).values == 4.0).all()  # what was not tried looks best
    state.tensors["visits"][:] = 0
    state.tensors["table"][:] = [-5.0, -1.0, -2.0, -1.0, -4.0]
    learner.load(state)
    assert (learner.act(cars, explore=False).values == 3.0).all()
    assert learner.act(nobody(), explore=True).values.shape == (0, 1)
    assert learner.counters.acting_steps == 1


def test_exploring_follows_the_schedule() -> None:
    learner = build(epsilon=1.0, epsilon_end=0.2, exploration_fraction=0.5)
    cars = World(0, births=0.9).reset().observation
    shares = []
    for done, epsilon in ((0.0, 1.0), (0.25, 0.6), (0.5, 0.2), (1.0, 0.2)):
        learner.progress(done)
        assert learner.epsilon == pytest.approx(epsilon)
        levels = np.concatenate([learner.act(cars, explore=True).values[:, 0] for _ in range(1500)])
        shares.append(float((levels == 4.0).mean()))  # greedy is level 4: nothing was tried
    np.testing.assert_allclose(shares, [0.2, 0.4 + 0.12, 0.84, 0.84], atol=0.06)
    assert (learner.act(cars, explore=False).values == 4.0).all()


def test_a_whole_story_enters_the_table_by_hand() -> None:
    """Every decision of every vehicle is one visit; targets come from the table as it was."""
    learner, world = build(epsilon=1.0), World(5, births=0.5, deaths=0.1)
    bins, values, visits = learner._bins, np.full((8, 5), -1.0), np.zeros((8, 5), np.int64)
    step = world.reset()
    endings = {"terminated": 0, "truncated": 0, "going": 0}
    where: dict[int, tuple[int, int]] = {}
    for _ in range(200):
        if step.done:
            step = world.reset()
        observation = step.observation
        action = learner.act(observation, explore=True)
        states = bins(observation)
        where |= {i: (int(s), int(a)) for i, s, a in zip(observation.ids, states, action.values[:, 0], strict=True)}
        step = world.step(action)
        learner.store(observation, action, step)
        assert learner.ready(step) == (len(step.closed) > 0)
        learner.update(step)
        met: dict[tuple[int, int], list[float]] = {}
        finals, going = iter(bins(step.final)), dict(zip(step.observation.ids, bins(step.observation), strict=True))
        closed = step.closed
        for k, identity in enumerate(closed.ids):
            target = float(closed.rewards[k].astype(np.float64).sum())
            if closed.truncated[k] or not closed.terminated[k]:
                after = next(finals) if closed.truncated[k] else going[identity]
                target += 0.98 ** float(closed.elapsed[k]) * values[after].max()
            endings["truncated" if closed.truncated[k] else "terminated" if closed.terminated[k] else "going"] += 1
            met.setdefault(where.pop(identity), []).append(target)
        for entry, targets in met.items():
            n, m = visits[entry], len(targets)
            rate = max(m / (n + m), 1.0 - 0.95**m)
            values[entry] += rate * (np.mean(targets) - values[entry])
            visits[entry] += m
        assert learner.counters.buffer_size == len(where)
    assert min(endings.values()) > 5
    state = learner.state()
    np.testing.assert_allclose(state.tensors["table"], values, rtol=1e-9)
    assert (state.tensors["visits"] == visits).all()
    assert learner.counters.training_step == visits.sum() == sum(endings.values())


def _step(ids: list[int], observation: Observation, *, terminated: bool = False, reward: float = 1.0) -> Step:
    n = len(ids)
    closed = Closed(
        np.array(ids, np.int64), np.zeros(n, np.int64), np.full((n, 3), reward, np.float32), np.zeros(n, np.float32),
        np.full(n, STEP_LENGTH, np.float32), np.full(n, terminated), np.zeros(n, np.bool_),
    )  # fmt: skip
    return Step(observation, closed, nobody(), True, False, 1)


def test_vehicles_that_do_not_add_up() -> None:
    learner, cars = build(), World(0, births=0.9).reset().observation
    action, first = learner.act(cars, explore=True), int(cars.ids[0])
    with pytest.raises(ValueError, match="closed that had not been opened"):
        learner.store(nobody(), action, _step([first], nobody(), terminated=True))
    learner.store(cars, action, _step([], nobody()))
    with pytest.raises(ValueError, match="decided again"):
        learner.store(cars, action, _step([], nobody()))
    with pytest.raises(ValueError, match="nobody sees it"):
        learner.store(nobody(), action, _step([first], nobody()))


def test_what_is_not_finite_is_refused_with_its_batch() -> None:
    learner, cars = build(), World(0).reset().observation
    action = learner.act(cars, explore=True)
    step = _step([int(i) for i in cars.ids], nobody(), terminated=True, reward=np.nan)
    learner.store(cars, action, step)
    before = learner.state().tensors["table"]
    with pytest.raises(NotFiniteError, match="the reward of a decision") as caught:
        learner.update(step)
    assert caught.value.batch["id"].tolist() == cars.ids.tolist()
    assert (learner.state().tensors["table"] == before).all()
    cars.ego[0, 1] = np.inf
    with pytest.raises(NotFiniteError, match="an observation") as caught:
        learner.act(cars, explore=False)
    assert not np.isfinite(caught.value.batch["ego"]).all()


def test_resumed_is_uninterrupted() -> None:
    """Also in the middle of an episode and of a report: the same bits ever after."""
    learner, world = build(epsilon=0.5), World(10)
    drive(learner, world, 7, done=0.3)
    assert learner.counters.updates_performed % 100
    saved = learner.state()
    before = bits(saved)
    kept = LearnerState({k: v.copy() for k, v in saved.tensors.items()}, json.loads(json.dumps(saved.values)))
    uninterrupted = drive(learner, world, 20, done=0.4)
    assert bits(saved) == before  # a state is a copy
    assert any(uninterrupted)

    again, twin = build(77, epsilon=0.5), World(10)
    drive(build(epsilon=0.5), twin, 7, done=0.3)
    drive(again, World(11), 2)  # it had a life of its own
    again.load(kept)
    assert bits(again.state()) == before
    assert drive(again, twin, 20, done=0.4) == uninterrupted
    assert bits(again.state()) == bits(learner.state())


def test_open_and_unlearned_decisions_are_part_of_the_state() -> None:
    learner, world = build(), World(3, births=0.6)
    step, learned = world.reset(), False
    while not (len(learner._open["id"]) and learner.ready(step)):
        observation = step.observation
        action = learner.act(observation, explore=True)
        step = world.step(action)
        learner.store(observation, action, step)
        learned = learned or learner.ready(step)
        if not len(learner._open["id"]):
            learner.update(step)
    assert learned
    other = build(8)
    other.load(learner.state())
    assert bits(other.state()) == bits(learner.state())
    learner.update(step)
    other.update(step)
    assert bits(other.state()) == bits(learner.state())


def test_weights_only_takes_the_table_and_leaves_the_rest_fresh() -> None:
    learner, other = build(), build(5)
    drive(learner, World(13), 6)
    drive(other, World(14), 1)
    other.load(learner.state(), weights_only=True)
    for name in ("table", "visits"):
        assert (other.state().tensors[name] == learner.state().tensors[name]).all()
    assert (other.counters.training_step, other.counters.updates_performed, other.counters.buffer_size) == (0, 0, 0)
    assert other.epsilon == 1.0
    cars = World(13).reset().observation
    assert (other.act(cars, explore=False).values == learner.act(cars, explore=False).values).all()


def test_another_learners_state_is_refused() -> None:
    state = build().state()
    with pytest.raises(CheckpointError, match="bins"):
        build(ego={"ego0": [-1.0, 0.0, 1.0], "ego1": [0.5]}).load(state)
    with pytest.raises(CheckpointError, match="action"):
        Qlearning(settings(), SPEC, replace(LEVELS, levels=(0.0, 0.2, 0.5, 0.75, 1.0))).load(state)
    with pytest.raises(CheckpointError, match="ego features"):
        Qlearning(settings(), replace(SPEC, ego=(*SPEC.ego[:3], Feature("new", "", 1.0, ""))), LEVELS).load(state)
    state.tensors["table"][0, 0] = np.nan
    with pytest.raises(CheckpointError, match="'table' holds NaN"):
        build().load(state)
    state = build().state()
    del state.tensors["visits"]
    with pytest.raises(CheckpointError, match="no tensor 'visits'"):
        build().load(state)


def pick(ego: np.ndarray, index: float) -> np.ndarray:
    """Level 0 where the first feature is negative, else level 4."""
    return np.array([-abs(index - (4.0 if ego[0] > 0 else 0.0)) / 4.0, 0.0, 0.0])


def test_it_learns_and_reports() -> None:
    learner = build()
    world = World(0, births=0.8, horizon=100, reward=pick)
    metrics = []
    for k in range(40):
        metrics += drive(learner, world, 1, done=k / 40)
    many = Observation(
        np.arange(400), np.arange(400), np.random.default_rng(1).normal(size=(400, 4)).astype(np.float32),
        np.zeros((400, 3, 5), np.float32), np.zeros(400, np.int32), np.zeros(8, np.float32),
    )  # fmt: skip
    best = np.where(many.ego[:, 0] > 0, 4.0, 0.0)
    assert (build().act(many, explore=False).values[:, 0] == best).mean() < 0.6
    assert (learner.act(many, explore=False).values[:, 0] == best).mean() == 1.0
    reports = [one for one in metrics if one]
    assert len(reports) == len(metrics) // 100 > 0
    assert [k for k, one in enumerate(metrics) if one] == list(range(99, len(metrics), 100))
    assert reports[-1]["absolute_td_error"] < reports[0]["absolute_td_error"] / 2
    assert reports[-1]["epsilon"] == pytest.approx(0.02)
    assert 0.0 < reports[-1]["visited_share"] <= 1.0
    assert all(np.isfinite(list(one.values())).all() for one in reports)


_SCRIPT = """
import sys
from pathlib import Path
from opencda_marl.config import from_yaml
from opencda_marl.train import train
train(from_yaml(Path(sys.argv[1]).read_text()), out=Path(sys.argv[2]))
"""


def test_it_trains_on_sumo(tmp_path: Path) -> None:
    quick = ("max_steps=400", "max_episodes=4", "evaluation.final=false", "demand.rate_vph=400")
    chosen = load_profile("sumo-marl/intersection/route_speed_only_qlearning", overrides=quick).settings
    (tmp_path / "config.yaml").write_text(to_yaml(chosen))
    run = tmp_path / "run"
    child = subprocess.run(  # libsumo allows one simulation in a process
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "config.yaml"), str(run)],
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    last = read_episodes(run)[-1]
    assert last["env_steps"] == 1600
    assert last["acting_steps"] > 50
    assert last["updates_performed"] > 50
    assert last["buffer_size"] == 0  # every decision is closed when an episode ends
    decisions = sum(line["decisions"] for line in read_episodes(run))
    assert last["training_step"] == decisions > 200  # and each is learned from, once
    state = Checkpoints(run / "checkpoints").load().state
    assert state.tensors["visits"].sum() == decisions
    assert (state.tensors["table"] < 0).any()
    assert read_run(run)["init"]["states"] == len(state.tensors["table"])
    assert [line for line in read_metrics(run) if "td_error" in line]


def test_a_profile_that_misspells_a_bin_is_told_so() -> None:
    name = "sumo-marl/intersection/route_speed_only_qlearning"
    with pytest.raises(ConfigError, match=r"learner.ego.speed is a list of numbers, not 0.3"):
        load_profile(name, overrides=["learner.ego.speed=0.3"])
    found = load_profile(name, overrides=["learner.ego.speed=[]", "learner.ego.age=[0.5]"]).settings.learner
    assert found.ego == {**QlearningSettings().ego, "speed": [], "age": [0.5]}
