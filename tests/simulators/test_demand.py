"""Schedules: counts and times as the settings promise, drawn from the seed alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.roads import Movement
from opencda_marl.core.state import Driver, Schedule
from opencda_marl.settings.traffic import DemandSettings, PeakSettings
from opencda_marl.simulators.demand import build_schedule, draw_rate, ramped, route_shares, spread_place
from opencda_marl.simulators.network import find_network, load_roads

ROADS = load_roads(find_network("intersection"))


def _draw(demand: DemandSettings, seed: int = 0, horizon: float = 3600.0, episode: int = 0) -> Schedule:
    return build_schedule(demand, ROADS, episode=episode, horizon=horizon, rng=np.random.default_rng(seed))


def _per_route(schedule: Schedule) -> np.ndarray:
    return np.bincount(schedule.routes, minlength=ROADS.routes)


def test_form() -> None:
    schedule = _draw(DemandSettings(rate_vph=300.0), horizon=120.0, episode=7)
    assert (np.diff(schedule.times) >= 0).all()
    assert schedule.times[0] >= 0.0
    assert schedule.times[-1] < 120.0
    assert schedule.ids.tolist() == [7_000_000 + i for i in range(len(schedule.ids))]
    kinds = [schedule.ids.dtype, schedule.times.dtype, schedule.routes.dtype, schedule.drivers.dtype]
    assert kinds == [np.int64, np.float64, np.int16, np.int8]
    assert schedule.rate_vph == 300.0


def test_poisson_counts_have_the_mean_and_variance_of_their_rate() -> None:
    counts = np.array([_per_route(_draw(DemandSettings(rate_vph=200.0), seed, 180.0)) for seed in range(400)])
    # 10 expected a lane; 4,800 draws: the mean is within 4 standard errors, 0.18; the variance within 0.9
    assert counts.mean() == pytest.approx(10.0, abs=0.18)
    assert counts.var() == pytest.approx(10.0, abs=0.9)
    assert counts.mean(axis=0) == pytest.approx(10.0, abs=0.7)


def test_poisson_headways_are_exponential() -> None:
    times = _draw(DemandSettings(rate_vph=3000.0), 1, 36_000.0)
    headways = np.diff(times.times[times.routes == 4])
    assert headways.mean() == pytest.approx(1.2, rel=0.03)
    assert headways.std() == pytest.approx(1.2, rel=0.03)
    assert np.quantile(headways, 0.5) == pytest.approx(1.2 * np.log(2), rel=0.03)


@pytest.mark.parametrize("seed", range(20))
def test_exact_arrivals_have_equal_headways_and_the_expected_number(seed: int) -> None:
    schedule = _draw(DemandSettings(rate_vph=250.0, arrivals="exact"), seed, 100.0)  # 6.94 a lane
    assert set(_per_route(schedule).tolist()) <= {6, 7}
    for route in range(ROADS.routes):
        times = schedule.times[schedule.routes == route]
        assert np.diff(times) == pytest.approx(14.4)
        assert times[0] < 14.4
    firsts = [schedule.times[schedule.routes == route][0] for route in range(ROADS.routes)]
    assert len(set(firsts)) == ROADS.routes, "the lanes must not beat in time"


def test_exact_numbers_are_right_on_average() -> None:
    counts = [_per_route(_draw(DemandSettings(rate_vph=250.0, arrivals="exact"), s, 100.0)) for s in range(200)]
    assert np.mean(counts) == pytest.approx(6.944, abs=0.02)


def test_rates_from_a_list() -> None:
    choice = DemandSettings(rate_vph=[100.0, 200.0, 300.0])
    drawn = [_draw(choice, seed, 60.0).rate_vph for seed in range(300)]
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [100.0, 200.0, 300.0]
    assert (counts > 70).all()
    spread = [_draw(replace(choice, rate_draw="range"), seed, 60.0).rate_vph for seed in range(300)]
    assert 100.0 <= min(spread) < 110.0
    assert 290.0 < max(spread) <= 300.0
    assert np.mean(spread) == pytest.approx(200.0, abs=14.0)
    with pytest.raises(ConfigError, match="empty"):
        _draw(DemandSettings(rate_vph=[]))


@pytest.mark.parametrize("turns", [3, 6, 12, 50])
@pytest.mark.parametrize("begin", [0.0, 0.3, 0.999])
def test_any_few_turns_in_a_row_cover_the_range(begin: float, turns: int) -> None:
    """The three-distance theorem: gaps of few lengths, none much wider than the others; drawn ones have wider ones."""
    for first in (0, 1, 17, 100_000):
        places = np.sort([spread_place(begin, turn) for turn in range(first, first + turns)])
        assert places.min() >= 0.0
        assert places.max() < 1.0
        gaps = np.diff([*places, places[0] + 1.0])
        assert gaps.max() < 2.0 / turns
        assert gaps.min() > 0.3 / turns


def test_a_place_is_a_rate_between_the_ends() -> None:
    demand = DemandSettings(rate_vph=[100.0, 600.0], rate_draw="spread")
    assert [draw_rate(demand, np.random.default_rng(0), place) for place in (0.0, 0.5)] == [100.0, 350.0]
    held_out = {_draw(demand, seed, 1.0).rate_vph for seed in range(50)}  # no turns there: each seed's own
    assert len(held_out) == 50
    assert 100.0 <= min(held_out) < 150.0 < 550.0 < max(held_out) <= 600.0


@pytest.mark.parametrize("drawn", ["range", "spread"])
def test_dense_traffic_comes_in_slowly(drawn: Literal["range", "spread"]) -> None:
    demand = DemandSettings(rate_vph=[100.0, 600.0], rate_draw=drawn, ramp_episodes=200, ramp_from=400.0)
    ends = {k: ramped(demand, k).rate_vph for k in (1, 101, 200, 201, 10_000)}
    assert ends == {1: [100, 400], 101: [100, 500], 200: [100, 599], 201: [100, 600], 10_000: [100, 600]}
    rates = [_draw(ramped(demand, k), k, 1.0).rate_vph for k in range(1, 101)]
    assert 300.0 < max(rates) < 500.0
    # nothing to ramp: one rate, rates to choose from, no ramp, an end below where it begins
    for other in (
        replace(demand, rate_vph=300.0),
        replace(demand, rate_draw="choice"),
        replace(demand, ramp_episodes=0),
        replace(demand, ramp_from=700.0),
        replace(demand, rate_vph=[100.0, 300.0]),
    ):
        assert ramped(other, 1) == ramped(other, 0) == other


def test_the_drawn_rate_is_the_rate_that_drives() -> None:
    for seed in range(10):
        schedule = _draw(DemandSettings(rate_vph=[100.0, 400.0], rate_draw="range", arrivals="exact"), seed)
        assert len(schedule.ids) == pytest.approx(12 * schedule.rate_vph, abs=12)


def test_turning_shares_divide_the_total_of_an_arm() -> None:
    demand = DemandSettings(rate_vph=200.0, arrivals="exact", turning_shares=[0.2, 0.5, 0.3])
    counts = _per_route(_draw(demand))
    for arm in range(4):
        here = counts[ROADS.arm == arm]
        assert here.sum() == pytest.approx(600, abs=3)
        for movement, share in zip(Movement, (0.2, 0.5, 0.3), strict=True):
            assert here[ROADS.movement[ROADS.arm == arm] == movement] == pytest.approx(600 * share, abs=1)


@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.2, 0.2, 0.2], [1.0, 0.5, -0.5, 0.0]])
def test_turning_shares_that_mean_nothing(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="turning_shares"):
        _draw(DemandSettings(turning_shares=shares))


def test_a_movement_that_an_arm_lacks_goes_to_its_others() -> None:
    """No left turn anywhere: right and straight share the arm's total as 1 to 3."""
    keep = np.flatnonzero(ROADS.movement != Movement.LEFT)
    few = replace(
        ROADS,
        arm=ROADS.arm[keep],
        lane=ROADS.lane[keep],
        movement=ROADS.movement[keep],
        entry_edge=tuple(ROADS.entry_edge[i] for i in keep),
    )
    shares = route_shares(DemandSettings(turning_shares=[0.1, 0.3, 0.6]), few)
    assert shares.reshape(4, 2) == pytest.approx(np.tile([0.5, 1.5], (4, 1)))  # two lanes' worth


def test_routes_of_one_lane_share_its_rate() -> None:
    shared = replace(ROADS, lane=np.minimum(ROADS.lane, 1))  # straight and left on one lane
    assert route_shares(DemandSettings(), shared).reshape(4, 3) == pytest.approx(np.tile([1.0, 0.5, 0.5], (4, 1)))


@pytest.mark.parametrize("arrivals", ["poisson", "exact"])
def test_a_peak_is_busier(arrivals: str) -> None:
    peak = PeakSettings(begin=1000.0, end=2000.0, factor=3.0)
    demand = DemandSettings(rate_vph=600.0, peak=peak, arrivals=arrivals)  # type: ignore[arg-type]
    times = _draw(demand, 2).times
    per_second = 12 * 600 / 3600
    within = ((times >= 1000) & (times < 2000)).sum()
    before, after = (times < 1000).sum(), (times >= 2000).sum()
    slack = 4.0 if arrivals == "poisson" else 0.2  # standard deviations
    for found, expected in ((before, 1000), (within, 3000), (after, 1600)):
        assert found == pytest.approx(expected * per_second, abs=slack * np.sqrt(expected * per_second) + 12)


def test_peaks_at_the_edges() -> None:
    base = DemandSettings(rate_vph=600.0, arrivals="exact")
    plain = _draw(base, 3, 600.0)
    for nothing in (PeakSettings(400.0, 400.0, 5.0), PeakSettings(500.0, 100.0, 5.0), PeakSettings(900.0, 950.0, 5.0)):
        assert np.allclose(_draw(replace(base, peak=nothing), 3, 600.0).times, plain.times)
    beyond = _draw(replace(base, peak=PeakSettings(300.0, 9000.0, 2.0)), 3, 600.0)
    assert len(beyond.ids) == pytest.approx(1.5 * 1200, abs=12)
    assert beyond.times.max() < 600.0
    quiet = _draw(replace(base, peak=PeakSettings(200.0, 400.0, 0.0)), 3, 600.0).times
    assert not ((quiet > 200.0) & (quiet < 400.0)).any()
    assert len(quiet) == pytest.approx(800, abs=12)


def test_nobody_comes() -> None:
    for arrivals in ("poisson", "exact"):
        schedule = _draw(DemandSettings(rate_vph=0.0, arrivals=arrivals))  # type: ignore[arg-type]
        assert len(schedule.ids) == len(schedule.times) == len(schedule.routes) == len(schedule.drivers) == 0


def test_shares_of_drivers() -> None:
    mixed = _draw(DemandSettings(rate_vph=300.0, cav_share=0.3))
    assert (mixed.drivers == Driver.CAV).mean() == pytest.approx(0.3, abs=0.04)
    assert set(mixed.drivers.tolist()) == {Driver.CAV, Driver.HUMAN}
    ruled = _draw(DemandSettings(rate_vph=300.0, cav_share=0.3, others="rule_based"))
    assert set(ruled.drivers.tolist()) == {Driver.CAV, Driver.RULE}
    assert (_draw(DemandSettings(cav_share=1.0)).drivers == Driver.CAV).all()
    assert (_draw(DemandSettings(cav_share=0.0)).drivers == Driver.HUMAN).all()


def test_speed_factors_are_those_of_humans() -> None:
    mixed = _draw(DemandSettings(rate_vph=300.0, cav_share=0.5, speed_deviation=0.1))
    human = mixed.drivers == Driver.HUMAN
    assert (mixed.speed_factors[~human] == 1.0).all()
    factors = mixed.speed_factors[human]
    assert factors.mean() == pytest.approx(1.0, abs=0.01)
    assert factors.std() == pytest.approx(0.096, abs=0.006)  # 0.1, cut off at two deviations
    assert (factors.min(), factors.max()) == (pytest.approx(0.8), pytest.approx(1.2))
    assert (_draw(DemandSettings(cav_share=0.0, speed_deviation=0.0)).speed_factors == 1.0).all()
    assert _draw(DemandSettings(cav_share=0.0, speed_deviation=0.5)).speed_factors.min() >= 0.2


def test_the_seed_decides_and_the_share_of_cavs_moves_nobody() -> None:
    demand = DemandSettings(rate_vph=[200.0, 300.0], cav_share=0.5)
    one, same, other = _draw(demand, 4), _draw(demand, 4), _draw(demand, 5)
    assert np.array_equal(one.times, same.times)
    assert np.array_equal(one.drivers, same.drivers)
    assert not np.array_equal(one.times[:10], other.times[:10])
    all_human = _draw(replace(demand, cav_share=0.0), 4)
    assert np.array_equal(one.times, all_human.times)
    assert np.array_equal(one.routes, all_human.routes)
