"""The ring against stories of vehicles that were written down one by one."""

from __future__ import annotations

import numpy as np
import pytest
from toy_world import EGO, MOST, ROW, Decision, World

from opencda_marl.core.errors import CheckpointError, ConfigError, NotFiniteError, OutOfMemoryError
from opencda_marl.core.spec import Action, Closed, Observation, Step
from opencda_marl.learners import replay as module
from opencda_marl.learners.replay import Replay

VIEW = {
    "ego": ((EGO,), np.float32),
    "neighbours": ((MOST, ROW), np.float32),
    "counts": ((), np.int32),
}
DECISION = {"action": ((1,), np.float32)}
COMPONENTS = 4  # the team's, and three objectives


def ring(capacity: int) -> Replay:
    return Replay(VIEW, DECISION, components=COMPONENTS, capacity=capacity)


def view(observation: Observation) -> dict[str, np.ndarray]:
    return {"ego": observation.ego, "neighbours": observation.neighbours, "counts": observation.counts}


def store(replay: Replay, observation: Observation, action: Action, step: Step, clock: int) -> None:
    replay.open(observation.ids, {**view(observation), "action": action.values}, clock)
    rewards = np.concatenate([step.closed.team[:, None], step.closed.rewards], 1)
    finals = view(step.final) if len(step.final) else {}
    discounts = 0.5 ** step.closed.elapsed.astype(np.float64)
    replay.close(step.closed, rewards, discounts, finals, clock + step.steps)


def fill(replay: Replay, world: World, episodes: int, *, seed: int = 0) -> None:
    """Random actions, so that every row can be told from every other."""
    rng, clock = np.random.default_rng(seed), 0
    for _ in range(episodes):
        step = world.reset()
        while not step.done:
            seen = step.observation
            action = Action(rng.uniform(-1, 1, (len(seen), 1)).astype(np.float32))
            step = world.step(action)
            store(replay, seen, action, step, clock)
            clock += step.steps


def told(world: World) -> dict[bytes, tuple[Decision, np.ndarray | None]]:
    """First view of a decision -> the decision, and the view that follows (None: it ended there)."""
    found = {}
    for story in world.stories.values():
        for i, row in enumerate(story):
            after = story[i + 1].ego if i + 1 < len(story) else row.final_ego
            found[row.ego.tobytes()] = (row, after)
    return found


_LOOKING = World(0)


def seen_by(ego: np.ndarray) -> Observation:
    """What a vehicle sees follows from its ego features in the toy world."""
    _LOOKING.ego, _LOOKING.present = {0: ego}, {0: 0}
    return _LOOKING._observe([0])


def check(replay: Replay, world: World, places: np.ndarray) -> tuple[int, int, int]:
    """Rows of a batch against the stories; how many went on, terminated and were truncated."""
    stories, kinds = told(world), [0, 0, 0]
    batch = replay.batch(places)
    assert all(len(column) == len(places) for column in batch.values())
    for i in range(len(places)):
        row, after = stories[batch["ego"][i].tobytes()]
        assert row.elapsed is not None, "a decision that is not over can be drawn"
        here = seen_by(row.ego)
        assert batch["neighbours"][i].tobytes() == here.neighbours[0].tobytes()
        assert batch["counts"][i] == here.counts[0]
        assert batch["action"][i, 0] == np.float32(row.action)
        np.testing.assert_array_equal(batch["rewards"][i], [np.float32(row.team), *row.rewards])
        kinds[1 if row.terminated else 2 if row.truncated else 0] += 1
        if row.terminated:
            assert batch["discount"][i] == 0.0
            assert batch["next_ego"][i].tobytes() == row.ego.tobytes()
            continue
        assert after is not None
        assert batch["discount"][i] == np.float32(0.5 ** np.float64(np.float32(row.elapsed)))
        there = seen_by(after)
        assert batch["next_ego"][i].tobytes() == after.tobytes()
        assert batch["next_neighbours"][i].tobytes() == there.neighbours[0].tobytes()
        assert batch["next_counts"][i] == there.counts[0]
    return kinds[0], kinds[1], kinds[2]


def usable(replay: Replay) -> np.ndarray:
    return np.flatnonzero(replay._ring["usable"])


@pytest.mark.parametrize("capacity", [40, 97, 256, 100_000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_row_is_its_vehicles_story(capacity: int, seed: int) -> None:
    world = World(seed, births=0.6, deaths=0.06)
    replay = ring(capacity)
    for episode in range(12):
        fill(replay, world, 1, seed=100 * seed + episode)
        places = usable(replay)
        assert replay.usable == len(places)
        assert replay.open_rows == 0
        check(replay, world, places)
    assert len(replay) == min(capacity, replay.total)
    decisions = sum(len(story) for story in world.stories.values())
    finals = sum(story[-1].truncated for story in world.stories.values())
    assert replay.decisions == decisions
    assert replay.total == decisions + finals
    if capacity == 100_000:  # nothing was overwritten: every decision is there, and nothing else
        assert replay.usable == decisions
        kinds = check(replay, world, usable(replay))
        assert kinds[2] == finals
        assert min(kinds) > 10
    else:
        assert replay.total > 3 * capacity


def test_in_the_middle_of_an_episode_what_is_not_over_cannot_be_drawn() -> None:
    world, replay = World(5, births=0.6, interval=7, horizon=500), ring(60)
    step, clock, waited = world.reset(), 0, 0
    rng = np.random.default_rng(0)
    while not step.done:
        seen = step.observation
        action = Action(rng.uniform(-1, 1, (len(seen), 1)).astype(np.float32))
        step = world.step(action)
        store(replay, seen, action, step, clock)
        clock += step.steps
        open_rows = sum(story[-1].elapsed is None for story in world.stories.values())
        assert replay.open_rows == open_rows
        # a decision that was closed because its vehicle decides again is drawn once that decision is stored
        goes_on = step.observation.ids[[world.stories[i][-1].elapsed is not None if i in world.stories else False
                                        for i in step.observation.ids.tolist()]]  # fmt: skip
        waited += len(goes_on)
        assert sorted(replay._ids(replay._waiting)) == sorted(goes_on.tolist())
        check(replay, world, usable(replay))
    assert replay.total > 5 * replay.capacity
    assert waited > 20


def test_rows_that_were_overwritten_are_never_drawn() -> None:
    world, replay = World(6, births=0.7), ring(50)
    fill(replay, world, 30)
    rng = np.random.default_rng(0)
    oldest = replay.total - replay.capacity
    batch_rows = replay.sample(rng, 2000)
    numbers = oldest + (batch_rows - oldest) % replay.capacity
    assert numbers.min() >= oldest
    assert set(batch_rows.tolist()) == set(usable(replay).tolist())
    young = {row.ego.tobytes() for story in world.stories.values() for row in story[-50:]}
    assert all(ego.tobytes() in young for ego in replay.batch(batch_rows)["ego"])
    following = replay._ring["next"][usable(replay)]
    assert ((following == -1) | (following >= oldest)).all()
    check(replay, world, batch_rows)


def test_sampling_is_uniform() -> None:
    """Chi-square over the rows that can be drawn, with holes between them."""
    world, replay = World(7, births=0.7, deaths=0.1), ring(64)
    fill(replay, world, 20)
    places = usable(replay)
    assert len(places) < 64  # last views are holes
    draws = 40_000
    found = replay.sample(np.random.default_rng(1), draws)
    counts = np.bincount(found, minlength=64)
    assert counts.sum() == draws
    assert (np.flatnonzero(counts) == places).all()
    expected = draws / len(places)
    chi_square = float(((counts[places] - expected) ** 2 / expected).sum())
    freedom = len(places) - 1
    assert abs(chi_square - freedom) < 4.0 * np.sqrt(2.0 * freedom)
    assert (replay.sample(np.random.default_rng(1), draws) == found).all()


def test_nothing_to_draw() -> None:
    replay = ring(10)
    with pytest.raises(ValueError, match="without a complete decision"):
        replay.sample(np.random.default_rng(0), 1)


def test_the_next_call_uses_the_arrays_again_and_other_sizes_work() -> None:
    world, replay = World(8), ring(100)
    fill(replay, world, 3)
    places = usable(replay)
    first = replay.batch(places[:5])
    kept = first["ego"].copy()
    again = replay.batch(places[5:10])
    assert again["ego"] is first["ego"]
    assert (first["ego"] != kept).any()
    assert len(replay.batch(places[:3])["ego"]) == 3
    check(replay, world, places)


def observation(ids: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    rng, rows = np.random.default_rng([seed, *ids]), len(ids)
    return {
        "ego": rng.normal(size=(rows, EGO)).astype(np.float32),
        "neighbours": np.zeros((rows, MOST, ROW), np.float32),
        "counts": np.zeros(rows, np.int32),
    }


def decided(ids: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    return observation(ids, seed) | {"action": np.zeros((len(ids), 1), np.float32)}


def ended(ids: list[int], *, terminated: bool = False, truncated: bool = False) -> Closed:
    rows = len(ids)
    return Closed(
        np.array(ids), np.arange(rows), np.zeros((rows, 3), np.float32), np.zeros(rows, np.float32),
        np.full(rows, 0.5, np.float32), np.full(rows, terminated), np.full(rows, truncated),
    )  # fmt: skip


def finish(replay: Replay, closed: Closed, finals: dict[str, np.ndarray] | None = None) -> None:
    rows = len(closed)
    replay.close(closed, np.zeros((rows, COMPONENTS)), np.full(rows, 0.9), finals or {}, 1)


def test_a_vehicle_decides_once_at_a_time() -> None:
    replay = ring(10)
    replay.open(np.array([3, 4]), decided([3, 4]), 0)
    with pytest.raises(ValueError, match="vehicle 4 decided again"):
        replay.open(np.array([5, 4]), decided([5, 4]), 1)
    with pytest.raises(ValueError, match="vehicle 9: a decision was closed that had not been opened"):
        finish(replay, ended([3, 9]))
    finish(replay, ended([3]))
    with pytest.raises(ValueError, match="vehicle 3: a decision was closed"):
        finish(replay, ended([3]))


def test_an_open_decision_is_not_overwritten() -> None:
    replay = ring(10)
    replay.open(np.array([1]), decided([1]), 0)
    for i in range(9):
        replay.open(np.array([100 + i]), decided([100 + i]), 0)
        finish(replay, ended([100 + i], terminated=True))
    with pytest.raises(ConfigError, match="buffer_size 10 is too small") as caught:
        replay.open(np.array([200]), decided([200]), 0)
    assert caught.value.fix == "learner.buffer_size=40"
    with pytest.raises(ConfigError, match="too small"):
        ring(3).open(np.arange(4), decided([0, 1, 2, 3]), 0)


def test_a_last_view_does_not_overwrite_the_decision_that_it_follows() -> None:
    replay = ring(10)
    replay.open(np.arange(10), decided(list(range(10))), 0)
    with pytest.raises(ConfigError, match="too small"):
        finish(replay, ended([0], truncated=True), observation([0], 1))


def test_a_decision_whose_successor_comes_too_late_is_gone() -> None:
    replay = ring(5)
    replay.open(np.array([1]), decided([1]), 0)
    finish(replay, ended([1]))  # goes on
    for i in range(5):
        replay.open(np.array([100 + i]), decided([100 + i]), 0)
        finish(replay, ended([100 + i], terminated=True))
    replay.open(np.array([1]), decided([1]), 0)
    assert replay.usable == 4
    assert (replay._ring["next"] == -1).all()
    assert replay.open_rows == 1


@pytest.mark.parametrize("name", ["ego", "neighbours", "action"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_stored(name: str, value: float) -> None:
    replay = ring(10)
    columns = decided([7, 8, 9])
    columns[name][1] = value
    with pytest.raises(NotFiniteError, match=f"{name} of 1 of 3 decisions") as caught:
        replay.open(np.array([7, 8, 9]), columns, 0)
    assert caught.value.batch["id"].tolist() == [8]
    assert caught.value.batch.keys() == {"id", *VIEW, *DECISION}
    assert not np.isfinite(caught.value.batch[name]).all()
    assert (replay.total, replay.open_rows) == (0, 0)


def test_rewards_and_last_views_are_finite() -> None:
    replay = ring(10)
    replay.open(np.array([7, 8]), decided([7, 8]), 0)
    rewards = np.zeros((2, COMPONENTS))
    rewards[0, 2] = np.nan
    with pytest.raises(NotFiniteError, match="rewards of 1 of 2") as caught:
        replay.close(ended([8, 7], terminated=True), rewards, np.ones(2), {}, 1)
    assert caught.value.batch["id"].tolist() == [8]
    finals = observation([7, 8])
    finals["ego"][0, 0] = np.inf
    with pytest.raises(NotFiniteError, match="ego of 1 of 2") as caught:
        replay.close(ended([8, 7], truncated=True), np.zeros((2, COMPONENTS)), np.ones(2), finals, 1)
    assert caught.value.batch["id"].tolist() == [8]


BYTES = 8 + 8 + 4 + 8 + 1 + 4 * COMPONENTS + 4 * EGO + 4 * MOST * ROW + 4 + 4  # base, rewards, view, action


def test_bytes_are_those_of_the_columns() -> None:
    replay = ring(100)
    assert replay.bytes_per_row == BYTES == 129
    fill(replay, World(0), 1)
    assert sum(column.nbytes for column in replay._ring.values()) == 100 * BYTES


def test_the_sizes_are_told() -> None:
    assert ring(2_000_000).describe() == "2M decisions, 246 MiB (25k: 3 MiB, 100k: 12 MiB, 1M: 123 MiB)"
    assert ring(25_000).describe().startswith("25k decisions, 3 MiB")
    assert ring(1234).describe().startswith("1234 decisions")
    large = Replay({"ego": ((300,), np.float32)}, {}, components=1, capacity=1_000_000)
    assert large.describe() == "1M decisions, 1.1 GiB (25k: 29 MiB, 100k: 118 MiB, 1M: 1.1 GiB)"


@pytest.mark.parametrize(("free", "fits"), [(None, True), (BYTES * 125_000, True), (BYTES * 125_000 - 200, False)])
def test_four_fifths_of_the_free_memory_at_most(monkeypatch: pytest.MonkeyPatch, free: int | None, fits: bool) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: free)
    replay = ring(100_000)  # a policy that only acts needs no ring
    if fits:
        fill(replay, World(0), 1)
        return
    with pytest.raises(OutOfMemoryError, match=r"buffer_size 100000: .* takes 12 MiB, but 15 MiB .* 1M: 123 MiB") as e:
        fill(replay, World(0), 1)
    assert e.value.fix == "learner.buffer_size=99000"
    assert e.value.exit_code == 34
    with pytest.raises(OutOfMemoryError):  # before the first row, as a trainer wants to know it
        replay.load(*ring(100_000).state())


# --- pieces


def rows_of(replay: Replay) -> dict[str, bytes]:
    return {name: column.tobytes() for name, column in replay._ring.items()}


def twin_of(replay: Replay) -> Replay:
    twin = ring(replay.capacity)
    twin.load(*replay.state())
    return twin


@pytest.mark.parametrize("capacity", [60, 300, 5000])
def test_load_gives_what_state_said(capacity: int) -> None:
    world, replay = World(9, births=0.6), ring(capacity)
    assert twin_of(replay).total == 0
    for episode in range(15):
        fill(replay, world, 1, seed=episode)
        twin = twin_of(replay)
        assert rows_of(twin) == rows_of(replay)
        assert (twin.total, twin.decisions, twin.usable) == (replay.total, replay.decisions, replay.usable)
        check(twin, world, usable(twin))
        if episode % 4 == 3:
            replay = twin  # a resumed run
    assert replay.total > 600


def test_in_the_middle_of_an_episode_too() -> None:
    """Rows that were sealed while their interval was open are completed later on, and belong to a later piece."""
    world, replay = World(10, births=0.6, interval=4, horizon=400), ring(90)
    step, clock, rng = world.reset(), 0, np.random.default_rng(0)
    while not step.done:
        seen = step.observation
        action = Action(rng.uniform(-1, 1, (len(seen), 1)).astype(np.float32))
        step = world.step(action)
        store(replay, seen, action, step, clock)
        clock += step.steps
        if rng.random() < 0.3:
            twin = twin_of(replay)
            assert rows_of(twin) == rows_of(replay)
            assert twin.open_rows == replay.open_rows
            replay = twin
    check(replay, world, usable(replay))


def test_a_piece_holds_what_changed_and_old_ones_are_forgotten() -> None:
    world, replay = World(11, births=0.6), ring(200)
    sizes = []
    for episode in range(12):
        fill(replay, world, 1, seed=episode)
        before = replay._sealed
        _, values, segments = replay.state()
        newest = segments[-1]
        assert (newest.first, newest.last) == (before, values["total"])
        assert len(newest.read()["number"]) == min(200, newest.last - newest.first)  # episodes are over: nothing older
        assert all(segment.last > values["total"] - 200 for segment in segments)
        sizes.append(len(segments))
        assert replay.state()[2] == segments  # nothing happened: no piece
    assert max(sizes[5:]) < 8


def test_pieces_are_copies() -> None:
    world, replay = World(12, births=0.6), ring(80)
    fill(replay, world, 1)
    tensors, values, segments = replay.state()
    before = rows_of(replay)
    fill(replay, world, 5)
    twin = ring(80)
    twin.load(tensors, values, segments)
    assert rows_of(twin) == before


def test_a_replay_of_another_form_is_refused_and_changes_nothing() -> None:
    world, replay = World(13), ring(100)
    fill(replay, world, 3)
    tensors, values, segments = replay.state()
    other = Replay(VIEW, {"action": ((2,), np.float32)}, components=COMPONENTS, capacity=100)
    with pytest.raises(CheckpointError, match=f"take {BYTES} bytes, here {BYTES + 4}"):
        other.load(tensors, values, segments)
    renamed = Replay({"eye": VIEW["ego"], **{n: VIEW[n] for n in ("neighbours", "counts")}}, DECISION,
                     components=COMPONENTS, capacity=100)  # fmt: skip
    with pytest.raises(CheckpointError, match="has the columns"):
        renamed.load(tensors, values, segments)
    mine = ring(100)
    fill(mine, World(14), 2)
    before, total = rows_of(mine), mine.total
    with pytest.raises(CheckpointError, match=rf"has 0 of {min(100, values['total'])} rows"):
        mine.load(tensors, values, [])
    assert rows_of(mine) == before
    assert mine.total == total
