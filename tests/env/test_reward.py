"""Each reward part by hand, the table of parts, and a part that somebody else brings along."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scripted import CONFLICTS, ROADS

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.state import FIELDS, Ending, Field
from opencda_marl.core.tables import Table
from opencda_marl.env import CONTROLLERS, OBSERVATIONS, REWARDS, reward
from opencda_marl.env.ledger import Ledger
from opencda_marl.env.neighbours import road_tables
from opencda_marl.env.reward import Moment, Part, RewardParts, chosen_parts
from opencda_marl.settings.driving import RewardSettings


def _moment(**changes: object) -> Moment:
    """A vehicle on a left turn that drives at 10 m/s on its arm, then at 10.1 m/s."""
    before, now = np.zeros((1, FIELDS)), np.zeros((1, FIELDS))
    before[0, [Field.PROGRESS, Field.SPEED, Field.ACCEL]] = 40.0, 10.0, 0.5
    now[0, [Field.PROGRESS, Field.SPEED, Field.ACCEL]] = 40.505, 10.1, 2.0
    moment = Moment(
        step_length=0.05,
        discount=0.999,
        before=before,
        now=now,
        routes=np.array([2], np.int16),
        road=road_tables(ROADS, CONFLICTS).route,
        endings=np.zeros(1, np.int64),
        near_miss=np.zeros(1),
        predicted=np.zeros(1, np.bool_),
    )
    return dataclasses.replace(moment, **changes)


def _value(name: str, moment: Moment) -> float:
    return float(REWARDS.load(name).value(moment)[0])


def _with(moment: Moment, field: Field, before: float, now: float) -> Moment:
    moment.before[0, field], moment.now[0, field] = before, now
    return moment


def test_parts_by_hand() -> None:
    assert _value("progress", _moment()) == pytest.approx(0.505)
    assert _value("time", _moment()) == 0.05
    # on the arm, at 17.88 m/s, 0.505 m take 28.2 ms
    assert _value("delay", _moment()) == pytest.approx(0.05 - 0.505 / 17.88)
    assert _value("acceleration", _moment()) == pytest.approx(4.0 * 0.05)
    assert _value("jerk", _moment()) == pytest.approx(1.5)
    assert _value("stop", _moment()) == 0.0
    assert _value("stop", _with(_moment(), Field.SPEED, 0.2, 0.05)) == 0.05
    assert _value("near_miss", _moment(near_miss=np.array([0.4]))) == pytest.approx(0.02)
    assert _value("progress_potential", _moment()) == pytest.approx(0.999 * 40.505 - 40.0)


def test_delay_knows_the_limits_of_the_place() -> None:
    # 0.5 m before the stop line at 85.5 m, at 17.88 m/s; 0.5 m behind it, at 11.18 m/s
    crossing = _with(_moment(), Field.PROGRESS, 85.0, 86.0)
    assert _value("delay", crossing) == pytest.approx(0.05 - 0.5 / 17.88 - 0.5 / 11.18)
    inside = _with(_moment(), Field.PROGRESS, 95.0, 95.559)
    assert _value("delay", inside) == pytest.approx(0.0)  # at the limit of the turn nothing is lost
    leaving = _with(_moment(), Field.PROGRESS, ROADS.junction_exit[2] - 0.2, ROADS.junction_exit[2] + 0.3)
    assert _value("delay", leaving) == pytest.approx(0.05 - 0.2 / 11.18 - 0.3 / 17.88)


def test_yielding_is_braking_while_a_conflict_is_predicted() -> None:
    braking = _with(_moment(), Field.ACCEL, 0.0, -1.5)
    assert _value("yielding", braking) == 0.0
    braking.predicted[:] = True
    assert _value("yielding", braking) == pytest.approx(0.025)  # half of 3 m/s^2, for 50 ms
    # comfortable braking is enough for all of it (no need of 27 m/s^2), and harder is not better
    for hard in (-3.0, -4.5):
        assert _value("yielding", dataclasses.replace(_with(braking, Field.ACCEL, 0.0, hard))) == pytest.approx(0.05)


def test_endings() -> None:
    for ending, arrival, collision in ((Ending.ARRIVED, 1, 0), (Ending.COLLIDED, 0, 1), (Ending.REMOVED, 0, 0)):
        moment = _moment(endings=np.array([int(ending)]))
        assert _value("arrival", moment) == arrival
        assert _value("collision", moment) == collision
    crash = _moment(endings=np.array([int(Ending.COLLIDED)]))
    assert _value("progress_potential", crash) == pytest.approx(-40.0)  # all of it is taken back


def _parts(weights: dict[str, float]) -> RewardParts:
    return RewardParts(weights, road_tables(ROADS, CONFLICTS).route, 0.05, 0.999)


def _amounts(parts: RewardParts, m: Moment) -> np.ndarray:
    """One step of an open interval, as the ledger counts it."""
    ledger, rows = Ledger(len(m.routes), parts), np.arange(len(m.routes))
    ledger.open(rows)
    assert ledger.earn(m.before, m.now, m.routes, m.endings, m.near_miss, m.predicted, 0.0)
    return ledger.life.T


def test_only_what_is_weighed_is_asked() -> None:
    parts = _parts({"delay": -0.1, "collision": -20.0, "jerk": 0.0})
    assert parts.names == ("delay", "collision")
    assert not parts.needs_pairs
    assert _parts({"near_miss": -0.3}).needs_pairs
    values = _amounts(parts, _moment(endings=np.array([int(Ending.COLLIDED)])))
    expected = [[0.05 - 0.505 / 17.88], [1.0]]
    np.testing.assert_allclose(values, expected)
    assert _amounts(parts, _moment())[1, 0] == 0.0
    # safety, efficiency, comfort
    np.testing.assert_allclose(values.T @ parts.matrix, [[-20.0, -0.1 * expected[0][0], 0.0]])
    assert _parts({}).matrix.shape == (0, 3)
    assert _amounts(_parts({}), _moment()).shape == (0, 1)


def test_an_arrived_vehicle_has_come_to_the_end_of_its_route() -> None:
    moment = _with(_moment(endings=np.array([int(Ending.ARRIVED)])), Field.PROGRESS, 197.0, 197.0)
    assert _value("progress", moment) == pytest.approx(ROADS.length[2] - 197.0)
    assert _value("delay", moment) == pytest.approx(0.05 - (ROADS.length[2] - 197.0) / 17.88)


def test_defaults_are_known_parts() -> None:
    assert set(chosen_parts(RewardSettings().weights)) == {"delay", "collision", "near_miss"}


@pytest.mark.parametrize("name", sorted(REWARDS.targets()))
def test_the_table_is_complete(name: str) -> None:
    part = REWARDS.load(name)
    assert isinstance(part, Part)
    assert part.objective in OBJECTIVES
    assert part.unit
    assert part.about
    assert not REWARDS.about(name).startswith("plug-in")


@pytest.mark.parametrize("table", [CONTROLLERS, OBSERVATIONS])
def test_other_tables_are_complete(table: Table) -> None:
    for name in table.targets():
        assert callable(table.load(name))
        assert not table.about(name).startswith("plug-in")


def test_a_misspelt_part_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'delay'") as caught:
        _parts({"dealy": -0.1})
    assert "reward.weights" in str(caught.value)


def test_a_part_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gentle = Part("m/s", "comfort", "speed, for the sake of it", lambda m: m.now[:, Field.SPEED])
    monkeypatch.setattr(reward, "GENTLE", gentle, raising=False)
    targets = {**REWARDS.targets(), "gentle": "opencda_marl.env.reward:GENTLE"}
    monkeypatch.setattr(Table, "targets", lambda self: targets)
    parts = _parts({"gentle": 0.5, "delay": -0.1})
    np.testing.assert_allclose(_amounts(parts, _moment()), [[10.1], [0.05 - 0.505 / 17.88]])
    assert parts.matrix[0].tolist() == [0.0, 0.0, 0.5]
    monkeypatch.setattr(reward, "GENTLE", dataclasses.replace(gentle, objective="fun"))
    with pytest.raises(ConfigError, match="gentle"):
        _parts({"gentle": 0.5})
