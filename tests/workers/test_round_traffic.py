"""Workers of a round wait for each other, so they drive equally dense traffic; whose it is stays each episode's own."""

from __future__ import annotations

import numpy as np
import pytest

from opencda_marl.assemble import make_roads, training_traffic
from opencda_marl.config import load_profile
from opencda_marl.core.state import Schedule

RANGE = ("demand.rate_vph=[100, 600]", "demand.rate_draw=range", "demand.ramp_episodes=8", "demand.ramp_from=300")
CHOICE = ("demand.rate_vph=[100, 200, 300, 400]", "demand.rate_draw=choice")


def schedules(workers: int, *overrides: str) -> list[Schedule]:
    settings = load_profile(
        "sumo-marl/intersection/quickstart", overrides=[*overrides, f"workers={workers}", "seed=5"]
    ).settings
    traffic = training_traffic(settings, make_roads(settings))
    return [traffic(episode)[0] for episode in range(1, 13)]


@pytest.mark.parametrize("overrides", [RANGE, CHOICE])
@pytest.mark.parametrize("workers", [2, 3])
def test_the_episodes_of_a_round_are_equally_dense(workers: int, overrides: tuple[str, ...]) -> None:
    alone, together = schedules(1, *overrides), schedules(workers, *overrides)
    rates = [each.rate_vph for each in together]
    assert rates == [alone[i - i % workers].rate_vph for i in range(12)]
    assert len(set(rates)) > 1
    for i, (one, other) in enumerate(zip(alone, together, strict=True)):
        if i % workers == 0:
            np.testing.assert_array_equal(one.times, other.times)
    assert not np.array_equal(together[0].times[:5], together[1].times[:5])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rates_that_are_spread_cover_the_range_within_an_update(workers: int) -> None:
    spread = ("demand.rate_vph=[100, 600]", "demand.rate_draw=spread", "demand.ramp_episodes=0")
    rates = [each.rate_vph for each in schedules(workers, *spread)]
    assert rates == [rates[i - i % workers] for i in range(12)]
    rounds = np.array(rates[::workers])
    for first in range(len(rounds) - 2):
        some = np.sort(rounds[first : first + 3])
        assert some[0] < 350.0 < some[-1]
        assert (np.diff(some) > 50.0).all()
    assert [each.rate_vph for each in schedules(workers, *spread)] == rates, "from the seed alone: resume needs it"


def test_a_fixed_rate_leaves_every_episode_as_it_is_with_one_worker() -> None:
    for one, other in zip(schedules(1, "demand.rate_vph=200"), schedules(2, "demand.rate_vph=200"), strict=True):
        np.testing.assert_array_equal(one.times, other.times)
        np.testing.assert_array_equal(one.routes, other.routes)
