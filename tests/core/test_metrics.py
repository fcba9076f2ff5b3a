"""Each figure of driving, worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from opencda_marl.core.errors import AccountingError
from opencda_marl.core.metrics import EpisodeRecord, pool
from opencda_marl.core.state import Accounting


def _record(**changes: Any) -> EpisodeRecord:
    record = EpisodeRecord(
        episode=1,
        seed=5,
        rate_vph=300.0,
        steps=2400,
        seconds=120.0,
        accounting=Accounting(scheduled=20, waiting=1, running=3, arrived=12, collided=3, removed=1),
        departed=19,
        departed_early=16,
        arrived_early=12,
        near_missed=2,
        delay_sum=24.0,
        delay_inside_sum=18.0,
        travel_time_sum=180.0,
        longest_wait=4.0,
        commanded=1000,
        overridden=25,
        returns=[-8.0, -4.0, -2.0],
        returned=19,
    )
    return replace(record, **changes)


def test_one_episode() -> None:
    found = pool([_record()])
    assert found == {
        "episodes": 1,
        "vehicles": 16,  # ended: 12 + 3 + 1
        "success_rate": 12 / 16,
        "success_rate_departed": 12 / 16,
        "collision_rate": 3 / 16,
        "near_miss_rate": 2 / 19,
        "mean_delay_s": 2.0,
        "mean_delay_inside_s": 1.5,
        "mean_travel_time_s": 15.0,
        "throughput_vph": 12 * 3600 / 120,
        "running_at_end": 3.0,
        "waiting_at_end": 1.0,
        "longest_wait_s": 4.0,
        "congested": False,
        "overridden_share": 0.025,
        "return": -14.0 / 19,
        "stops_per_vehicle": None,  # not counted in this record
        "mean_jerk": None,
    }


def test_rates_are_pooled_over_vehicles_not_averaged_over_episodes() -> None:
    """10 of 10 and 0 of 30: a mean of rates would say 50 %, pooling says 25 %."""
    good = _record(accounting=Accounting(10, 0, 0, 10, 0, 0))
    bad = _record(accounting=Accounting(30, 0, 0, 0, 30, 0), near_missed=19)
    found = pool([good, bad])
    assert found["success_rate"] == 0.25
    assert found["collision_rate"] == 0.75
    assert found["near_miss_rate"] == 21 / 38
    assert found["running_at_end"] == 0.0


def test_preferences_weigh_the_return() -> None:
    assert pool([_record()], weights=[0.5, 0.25, 0.0])["return"] == pytest.approx(-5.0 / 19)
    with pytest.raises(ValueError, match="zip"):
        pool([_record()], weights=[0.5])


def test_what_was_not_there_is_absent() -> None:
    empty = EpisodeRecord(episode=1, seed=1, rate_vph=0.0)
    found = pool([empty])
    for name in ("success_rate", "collision_rate", "mean_delay_s", "throughput_vph", "overridden_share", "return"):
        assert found[name] is None
    assert found["vehicles"] == 0
    assert pool([_record(), _record(near_missed=None)])["near_miss_rate"] is None


@pytest.mark.parametrize(
    ("waiting", "longest", "congested"), [(1, 29.0, False), (1, 31.0, True), (3, 0.0, False), (4, 0.0, True)]
)
def test_congestion(waiting: int, longest: float, congested: bool) -> None:
    accounting = Accounting(scheduled=20, waiting=waiting, running=0, arrived=20 - waiting)
    assert _record(accounting=accounting, longest_wait=longest).congested is congested


def test_a_record_is_json() -> None:
    assert json.loads(json.dumps(_record().as_json()))["accounting"]["arrived"] == 12


@pytest.mark.parametrize("name", ["scheduled", "waiting", "running", "arrived", "collided", "removed"])
def test_the_accounting_must_close(name: str) -> None:
    good = _record().accounting
    good.check(7)
    bad = replace(good, **{name: getattr(good, name) + 1})
    with pytest.raises(AccountingError, match=r"episode 7: .* scheduled") as caught:
        bad.check(7)
    assert caught.value.exit_code == 13
