"""The driving loop against a story told one vehicle at a time, on random arrivals, departures and ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from reference_drive import OBJECTIVE, PARTS, Recorder, ReferenceDrive, Shown
from reference_view import ReferenceView
from scripted import CONFLICTS, ROADS, ScriptedSimulator, schedule_of

from opencda_marl.core.errors import AccountingError, ConfigError, NotFiniteError, OpenCDAError
from opencda_marl.core.metrics import EARLY_MARGIN
from opencda_marl.core.spec import Action, Observation, Step
from opencda_marl.core.state import Driver, Ending, Events, Field, Schedule
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.env.observe import full
from opencda_marl.settings.run import RunSettings

CHANCES = np.array([0.012, 0.008, 0.004])  # of ARRIVED, COLLIDED, REMOVED in each step of a life


def _settings(**changes: object) -> RunSettings:
    settings = RunSettings(max_steps=120, decision_interval=10, discount_per_second=0.5)
    settings = replace(settings, reward=replace(settings.reward, weights=PARTS))
    return replace(settings, **changes)


def _random_end(seed: int) -> object:
    """Ends anybody at random, now and then in the very step in which it enters."""

    def script(identity: int, age: int) -> Ending | None:
        drawn = np.random.default_rng([seed, identity, age]).random() * (1.0 if age else 0.2)
        for ending, chance in zip(Ending, np.cumsum(CHANCES), strict=True):
            if drawn < chance:
                return ending
        return None

    return script


def _traffic(seed: int, settings: RunSettings, mixed: bool) -> Schedule:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 25))
    seconds = settings.max_steps * settings.simulator.step_length
    kinds = [Driver.CAV, Driver.CAV, Driver.HUMAN] if mixed else [Driver.CAV]
    return schedule_of(
        rng.uniform(0, seconds, count), rng.integers(0, 12, count), rng.choice(kinds, count), episode=seed
    )


def _play(
    settings: RunSettings, seed: int, *, synchronous: bool = False, slots: int = 7
) -> tuple[DrivingEnv, Recorder, list[tuple[Observation, Action, Step]], Step]:
    """An episode with random actions; slots are so few that they are used again and vehicles wait."""
    simulator = Recorder(ScriptedSimulator(settings, _random_end(seed), slots=slots, noise=2.0))
    schedule = _traffic(seed, settings, mixed=seed % 2 == 1)
    env = DrivingEnv(simulator, settings, lambda _: (schedule, seed + 1, seed), synchronous=synchronous)
    rng = np.random.default_rng(seed)
    first = step = env.reset(seed)
    turns = []
    while not step.done:
        action = Action(rng.uniform(-1, 1, (len(step.observation), 1)).astype(np.float32))
        before = step.observation
        step = env.step(action)
        turns.append((before, action, step))
    return env, simulator, turns, first


CASES = [(interval, seed, synchronous) for interval in (1, 3, 10) for seed in range(4) for synchronous in (False, True)]


@pytest.mark.parametrize(("interval", "seed", "synchronous"), CASES)
def test_every_decision_is_told_exactly_once_and_exactly(interval: int, seed: int, synchronous: bool) -> None:
    settings = _settings(decision_interval=interval)
    _, simulator, turns, first = _play(settings, seed, synchronous=synchronous)
    log = simulator.log
    reference = ReferenceDrive(settings, ROADS, CONFLICTS, log, synchronous)
    told = defaultdict(list)
    now = first.steps
    assert len(first.closed) == 0
    for _, _, step in turns:
        since, now = now, now + step.steps
        closed = step.closed
        for k in range(len(closed)):
            told[int(closed.ids[k])].append((closed, k, since, now))
        cut = closed.ids[closed.truncated].tolist()
        assert step.final.ids.tolist() == cut
        assert not (closed.terminated & closed.truncated).any()
        assert len(set(closed.ids.tolist())) == len(closed)
    assert now == settings.max_steps == len(log) - 1
    for life in reference.lives.values():
        expected = reference.intervals(life)
        assert len(told[life.identity]) == len(expected), life
        for (closed, k, since, until), want in zip(told[life.identity], expected, strict=True):
            np.testing.assert_allclose(closed.rewards[k], want["rewards"], rtol=1e-5, atol=1e-6)
            assert closed.team[k] == pytest.approx(want["team"], rel=1e-5, abs=1e-7)
            assert closed.elapsed[k] == pytest.approx(want["elapsed"], rel=1e-6)
            assert closed.terminated[k] == want["terminated"]
            assert closed.truncated[k] == want["truncated"]
            assert closed.slots[k] == life.slot
            assert since < want["until"] <= until  # in the call in which it happened
    assert set(told) <= set(reference.lives)


@pytest.mark.parametrize(("interval", "seed", "synchronous"), CASES[::5])
def test_who_acts_when(interval: int, seed: int, synchronous: bool) -> None:
    settings = _settings(decision_interval=interval)
    _, simulator, turns, first = _play(settings, seed, synchronous=synchronous)
    reference = ReferenceDrive(settings, ROADS, CONFLICTS, simulator.log, synchronous)
    decisions = defaultdict(set)
    for life in reference.lives.values():
        for t in life.decisions:
            decisions[t].add(life.identity)
    now, seen = 0, {}
    for step in [first, *(step for _, _, step in turns)]:
        now += step.steps
        if step.done:
            assert len(step.observation) == 0
            assert step.everyone
            continue
        seen[now] = set(step.observation.ids.tolist())
        state = simulator.log[now].state
        assert (state.ids[step.observation.slots] == step.observation.ids).all()
        everybody = {int(i) for i in state.ids[state.alive & (state.drivers == Driver.CAV)]}
        if now % interval == 0:
            assert step.everyone
        if step.everyone:
            assert seen[now] == everybody
    assert seen == dict(decisions)


@pytest.mark.parametrize("kind", ["target_speed", "acceleration"])
@pytest.mark.parametrize("seed", [0, 3])
def test_actions_hold_and_the_envelope_moves_on(kind: str, seed: int) -> None:
    settings = _settings(action=kind)
    _, simulator, turns, first = _play(settings, seed)
    log, latest, now = simulator.log, {}, first.steps
    for observation, action, step in turns:
        latest |= dict(zip(observation.ids.tolist(), action.values[:, 0].tolist(), strict=True))
        for t in range(now + 1, now + step.steps + 1):
            _check_command(settings, log[t - 1], log[t], latest, kind)
        now += step.steps


def _check_command(settings: RunSettings, before: Shown, after: Shown, latest: dict[int, float], kind: str) -> None:
    view = ReferenceView(settings, ROADS, CONFLICTS, before.state)
    for slot in range(len(before.state.ids)):
        ours = bool(before.state.alive[slot]) and before.state.drivers[slot] == Driver.CAV
        assert after.command.controlled[slot] == ours
        if not ours:
            continue
        action, bound = latest[int(before.state.ids[slot])], view.envelope(slot)
        if kind == "target_speed":
            expected = (action + 1) / 2 * bound
        else:
            expected = np.clip(view.v(slot, Field.SPEED) + 0.05 * action * (2.6 if action >= 0 else 4.5), 0, bound)
        assert after.command.target_speed[slot] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_final_views_are_those_of_the_end(seed: int) -> None:
    settings = _settings()
    env, simulator, turns, _ = _play(settings, seed)
    horizon = len(simulator.log) - 1
    latest: dict[int, float] = {}
    checked = 0
    for observation, action, step in turns:
        latest |= dict(zip(observation.ids.tolist(), action.values[:, 0].tolist(), strict=True))
        for k, identity in enumerate(step.final.ids.tolist()):
            ends = [t for t, shown in enumerate(simulator.log) if identity in shown.events.ids.tolist()]
            state = simulator.log[ends[0] if ends else horizon].state
            held, acted = np.zeros(len(state.ids)), np.zeros(len(state.ids), np.bool_)
            for slot in np.flatnonzero((state.ids >= 0) & (state.drivers == Driver.CAV)):
                if int(state.ids[slot]) in latest:
                    held[slot], acted[slot] = latest[int(state.ids[slot])], True
            slot = int(np.flatnonzero(state.ids == identity)[0])
            expected = full(settings, ROADS, CONFLICTS).observe(state, held, acted, np.array([slot]))
            np.testing.assert_array_equal(step.final.ego[k], expected.ego[0])
            np.testing.assert_array_equal(step.final.neighbours[k], expected.neighbours[0])
            checked += 1
    assert checked or seed == 0
    assert env.record().accounting.running >= turns[-1][2].final.ids.size - 1


@pytest.mark.parametrize("seed", range(8))
def test_record_counts_everything_once(seed: int) -> None:
    settings = _settings(max_steps=800 if seed == 0 else 120)
    env, simulator, turns, first = _play(settings, seed)
    record, log = env.record(), simulator.log
    reference = ReferenceDrive(settings, ROADS, CONFLICTS, log, False)
    endings = [int(e) for shown in log for e in shown.events.endings]
    account = record.accounting
    assert [account.arrived, account.collided, account.removed] == [endings.count(e) for e in Ending]
    assert account.scheduled == len(_traffic(seed, settings, seed % 2 == 1).ids)
    assert account.running == log[-1].state.alive.sum()
    assert account.waiting == log[-1].events.waiting
    assert record.departed == sum(len(shown.events.departed) for shown in log)
    assert (record.steps, record.seconds) == (settings.max_steps, pytest.approx(settings.max_steps * 0.05))
    assert record.commanded == sum(shown.events.commanded for shown in log)
    # delays
    delay = inside = travel = 0.0
    early, arrived_early = 0, 0
    for t, shown in enumerate(log):
        for slot in shown.events.departed:
            early += shown.state.values[slot, Field.DEPARTED_AT] < record.seconds - EARLY_MARGIN
        for slot, ending in zip(shown.events.slots, shown.events.endings, strict=True):
            if ending == Ending.ARRIVED:
                scheduled, departed = shown.state.values[slot, [Field.SCHEDULED_AT, Field.DEPARTED_AT]]
                free = ROADS.free_flow_time(int(shown.state.routes[slot]), 13.0, 2.6, 3.0)
                delay, inside, travel = (
                    delay + t * 0.05 - scheduled - free,
                    inside + t * 0.05 - departed - free,
                    travel + t * 0.05 - departed,
                )
                arrived_early += departed < record.seconds - EARLY_MARGIN
    assert record.delay_sum == pytest.approx(delay)
    assert record.delay_inside_sum == pytest.approx(inside)
    assert record.travel_time_sum == pytest.approx(travel)
    assert (record.departed_early, record.arrived_early) == (early, arrived_early)
    _check_returns(record, reference)
    missed = {int(log[t].state.ids[slot]) for t in range(1, len(log)) for slot in reference.pairs(t)[2]}
    assert record.near_missed == len(missed)
    acting = [first.observation, *(step.observation for _, _, step in turns)]
    assert record.acting_rows == sum(len(o) for o in acting)
    assert record.neighbour_rows == sum(int(o.counts.sum()) for o in acting)


def _check_returns(record: object, reference: ReferenceDrive) -> None:
    parts = dict.fromkeys(PARTS, 0.0)
    for life in reference.lives.values():
        end = len(reference.log) - 1 if life.ended is None else life.ended
        for t in range(life.entered + 1, end + 1):
            for name, value in reference.parts(life, t).items():
                parts[name] += PARTS[name] * value
    assert record.parts == pytest.approx(parts, rel=1e-6, abs=1e-6)
    returns = [sum(parts[name] for name in parts if OBJECTIVE[name] == k) for k in range(3)]
    assert record.returns == pytest.approx(returns, rel=1e-6, abs=1e-6)
    assert record.returned == sum(bool(life.decisions) for life in reference.lives.values())


def test_an_episode_without_vehicles_runs_to_its_end() -> None:
    settings = _settings()
    env = DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule_of(np.zeros(0), np.zeros(0)), 1, 1))
    step = env.reset(0)
    assert step.done
    assert step.steps == 120
    assert len(step.observation) == len(step.closed) == len(step.final) == 0
    assert env.record().accounting.scheduled == 0


def test_human_drivers_need_no_action() -> None:
    settings = _settings()
    drivers = np.array([Driver.HUMAN, Driver.HUMAN])
    schedule = schedule_of(np.array([0.0, 1.0]), np.array([1, 4]), drivers)
    env = DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule, 1, 1))
    assert env.reset(0).done
    assert env.record().departed == 2


def test_the_potential_telescopes() -> None:
    """Discounted over a life, the shaping is g^T P(end) - P(begin), whatever happened in between."""
    settings = _settings(decision_interval=1)
    settings = replace(settings, reward=replace(settings.reward, weights={"progress_potential": 1.0}))
    for ending in (Ending.COLLIDED, None):
        schedule = schedule_of(np.array([0.0]), np.array([2]))
        script = lambda _identity, age, ending=ending: ending if age == 60 else None  # noqa: E731
        env = DrivingEnv(ScriptedSimulator(settings, script), settings, lambda _, s=schedule: (s, 1, 1))
        step, gained, steps = env.reset(0), 0.0, 0
        begin = float(env.state.values[step.observation.slots[0], Field.PROGRESS])
        while not step.done and not (len(step.closed) and step.closed.terminated[0]):
            slot = int(step.observation.slots[0])
            step = env.step(Action(np.full((1, 1), 0.3, np.float32)))
            gained += 0.5 ** (steps * 0.05) * float(step.closed.rewards[0, 1])
            steps += 1
        end = 0.0 if ending else float(env.state.values[slot, Field.PROGRESS])
        assert gained == pytest.approx(0.5 ** (steps * 0.05) * end - begin, abs=1e-3)


def test_no_metrics_no_near_misses() -> None:
    settings = _settings()
    settings = replace(
        settings,
        evaluation=replace(settings.evaluation, enabled=False),
        reward=replace(settings.reward, weights={"delay": -0.1}),
    )
    env, _, _, _ = _play(settings, 1)
    assert env.record().near_missed is None
    settings = replace(settings, reward=replace(settings.reward, weights={"near_miss": -0.1}))
    env, _, _, _ = _play(settings, 1)
    assert env.record().near_missed is not None


def test_unknown_reward_part_names_the_nearest() -> None:
    settings = _settings()
    settings = replace(settings, reward=replace(settings.reward, weights={"colision": -1.0}))
    with pytest.raises(ConfigError, match="collision"):
        DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule_of(np.zeros(0), np.zeros(0)), 1, 1))


def test_actions_that_do_not_fit() -> None:
    schedule = schedule_of(np.array([0.0, 0.0]), np.array([1, 4]))
    settings = _settings()

    def begun(settings: RunSettings) -> DrivingEnv:
        env = DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule, 1, 1))
        env.reset(0)
        return env

    def act(env: DrivingEnv, values: object) -> None:
        env.step(Action(np.array(values, np.float32)))

    with pytest.raises(ValueError, match=r"\(1, 1\)"):
        act(begun(settings), [[0.0]])
    with pytest.raises(ValueError, match=r"1\.5"):
        act(begun(settings), [[0.0], [1.5]])
    with pytest.raises(NotFiniteError, match="row 1"):
        act(begun(settings), [[0.0], [np.nan]])
    with pytest.raises(NotFiniteError, match="row 0"):
        act(begun(settings), [[np.inf], [0.0]])
    levels = replace(settings, action="levels")
    act(begun(levels), [[0.0], [8.0]])
    for bad in (9.0, 2.5, -1.0):
        with pytest.raises(ValueError, match="index"):
            act(begun(levels), [[0.0], [bad]])
    done = DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule_of(np.zeros(0), np.zeros(0)), 1, 1))
    with pytest.raises(OpenCDAError, match="reset"):
        act(done, np.zeros((0, 1)))
    with pytest.raises(OpenCDAError, match="no finished episode"):
        done.record()


def test_levels_are_fractions_of_the_envelope() -> None:
    settings = _settings(action="levels")
    simulator = ScriptedSimulator(settings)
    env = DrivingEnv(simulator, settings, lambda _: (schedule_of(np.array([0.0]), np.array([1])), 1, 1))
    step = env.reset(0)
    env.step(Action(np.array([[3.0]], np.float32)))
    target, controlled = simulator.commands[-1]
    slot = step.observation.slots[0]
    assert controlled[slot]
    assert target[slot] == pytest.approx(0.375 * 17.88)  # straight on, far from any lower limit


def test_a_reward_that_is_not_finite_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings()

    class Broken(ScriptedSimulator):
        def step(self, command: object) -> tuple[object, Events]:
            state, events = super().step(command)
            if state.step == 15:
                state.values[state.rows(), Field.ACCEL] = np.nan
            return state, events

    env = DrivingEnv(Broken(settings), settings, lambda _: (schedule_of(np.array([0.0]), np.array([1])), 1, 1))
    step = env.reset(0)
    with pytest.raises(NotFiniteError, match="step 15: a reward part") as caught:
        while not step.done:
            step = env.step(Action(np.zeros((1, 1), np.float32)))
    assert set(caught.value.batch) >= {"ids", "now"}


@pytest.mark.parametrize("wrong", ["waiting", "twice"])
def test_vehicles_that_do_not_add_up_stop_the_run(wrong: str) -> None:
    settings = _settings()

    class Careless(ScriptedSimulator):
        def step(self, command: object) -> tuple[object, Events]:
            state, events = super().step(command)
            if wrong == "waiting":
                events.waiting += 1
            elif len(events.slots):
                events.slots, events.endings = np.tile(events.slots, 2), np.tile(events.endings, 2)
            return state, events

    schedule = schedule_of(np.array([0.0]), np.array([1]), np.array([Driver.HUMAN]))
    env = DrivingEnv(
        Careless(settings, lambda _, age: Ending.REMOVED if age == 9 else None), settings, lambda _: (schedule, 1, 1)
    )
    assert env.reset(0).done
    with pytest.raises(AccountingError, match="1 vehicles scheduled, but 2 found"):
        env.record()


def test_trajectories_show_every_vehicle_in_every_step() -> None:
    settings = _settings()
    simulator = Recorder(ScriptedSimulator(settings, _random_end(3), slots=7))
    schedule = _traffic(3, settings, mixed=True)
    env = DrivingEnv(simulator, settings, lambda _: (schedule, 1, 1))
    assert env.trajectory() == {}
    env.record_trajectory(True)
    step = env.reset(3)
    closed = []
    while not step.done:
        step = env.step(Action(np.zeros((len(step.observation), 1), np.float32)))
        closed.append(step.closed)
    tracks = env.trajectory()
    assert tracks["reward_id"].tolist() == [int(i) for one in closed for i in one.ids]
    assert np.array_equal(tracks["reward"], np.concatenate([one.rewards for one in closed]))
    ended = dict(zip(tracks["end_id"].tolist(), tracks["end_step"].tolist(), strict=True))
    last = dict(zip(tracks["reward_id"].tolist(), tracks["reward_step"].tolist(), strict=True))
    assert all(step == last[vehicle] for vehicle, step in ended.items() if vehicle in last)
    rows = [(t, int(s)) for t, shown in enumerate(simulator.log) for s in [*shown.state.rows(), *shown.events.slots]]
    assert tracks["step"].tolist() == [t for t, _ in rows]
    expected = np.array([simulator.log[t].state.values[s] for t, s in rows])
    np.testing.assert_allclose(tracks["values"], expected, rtol=1e-6)
    assert tracks["id"].tolist() == [int(simulator.log[t].state.ids[s]) for t, s in rows]
    ends = [(t, int(i)) for t, shown in enumerate(simulator.log) for i in shown.events.ids]
    assert list(zip(tracks["end_step"].tolist(), tracks["end_id"].tolist(), strict=True)) == ends


def test_the_same_actions_give_the_same_story() -> None:
    settings = _settings()
    stories = []
    for _ in range(2):
        _, _, turns, _ = _play(settings, 4)
        stories.append(
            [
                (s.observation.ego.tobytes(), s.closed.rewards.tobytes(), s.observation.ids.tobytes())
                for _, _, s in turns
            ]
        )
    assert stories[0] == stories[1]
