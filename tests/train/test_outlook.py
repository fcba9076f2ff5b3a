"""What a run says that it is going to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from opencda_marl import outlook
from opencda_marl.config import load_profile
from opencda_marl.core.speech import about, seconds
from opencda_marl.outlook import densities, plan, table_episodes, used_up
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import DemandSettings

QUICKSTART = "sumo-marl/intersection/quickstart"


def test_the_plan_of_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "cores", lambda: 2)
    settings = load_profile(QUICKSTART).settings
    assert table_episodes(settings) == 3 * (5 * 10 + 2 * 4)
    assert plan(settings, table=True) == (
        "300 episodes of 120 s or 4.9 minutes of training, whichever comes first; 100 to 400 vehicles per hour "
        "and lane, drawn anew for each episode; then a table of held-out traffic (about 2 minutes)"
    )
    assert "table" not in plan(settings, table=False)


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({"max_episodes": 1}, "1 episode of 120 s; "),
        ({"max_env_steps": 5000}, "5000 steps, in episodes of 120 s; "),
        ({"max_minutes": 2.0}, "2 minutes of training, in episodes of 120 s; "),
        ({"max_env_steps": 9, "max_minutes": 0.5}, "9 steps or 0.5 minutes of training, whichever comes first, in epi"),
    ],
)
def test_each_budget_has_its_words(budgets: dict[str, float], said: str) -> None:
    assert plan(RunSettings(**budgets), table=False).startswith(said)


def test_a_resumed_run_says_what_was_done() -> None:
    assert plan(RunSettings(max_episodes=9), done=4, table=False).startswith(
        "9 episodes of 120 s; 4 episodes of it done"
    )


def test_nobody_promises_the_pace_of_a_server() -> None:
    settings = load_profile("momarl/intersection/mappo").settings
    assert "minute" not in plan(settings, table=True).partition("then a table")[2]


def test_how_a_density_comes_about() -> None:
    """A list means different things by `rate_draw`, which a profile may inherit: so it is said."""
    two = DemandSettings(rate_vph=[100.0, 400.0])
    assert densities(DemandSettings(rate_vph=250.0)) == "250 vehicles per hour and lane"
    assert densities(replace(two, rate_vph=[250.0])) == "250 vehicles per hour and lane"
    assert densities(two) == "100 or 400 vehicles per hour and lane, one of these drawn for each episode"
    assert densities(replace(two, rate_vph=[1.0, 2.0, 3.0])).startswith("1, 2 or 3 vehicles")
    drawn = "100 to 400 vehicles per hour and lane, drawn anew for each episode"
    assert densities(replace(two, rate_draw="range")) == drawn
    assert (
        densities(replace(two, rate_draw="range", ramp_episodes=5, ramp_from=200.0)) == f"{drawn}, at first up to 200"
    )
    assert densities(replace(two, rate_draw="spread")) == (
        "100 to 400 vehicles per hour and lane, evenly spread over the episodes"
    )


def test_how_long_in_words() -> None:
    said = [about(value) for value in (3, 50, 125, 3600, 9000)]
    assert said == ["less than a minute", "about a minute", "about 2 minutes", "about 60 minutes", "about 2 hours"]
    assert [about(value) for value in (1e6, math.inf)] == ["about 12 days", "more than 30 years"]
    spoken = [seconds(value) for value in (None, math.nan, 65.4, 7265.0, 1e300, math.inf)]
    assert spoken == ["-", "-", "1:05", "2:01:05", "more than 30 years", "more than 30 years"]


def test_numbers_are_those_of_a_person() -> None:
    endless = RunSettings(max_episodes=10**30, max_env_steps=2_500_000, max_minutes=1e300)
    said = "more than 1000 billion episodes of 120 s or 2.5 million steps or more than 1000 billion minutes of training"
    assert plan(endless, table=False).startswith(f"{said}, ")
    assert plan(RunSettings(max_minutes=1e-9), table=False).startswith("less than a second of training, in")
    assert plan(RunSettings(max_minutes=1.0), table=False).startswith("1 minute of training, in")


def test_what_trains_longer() -> None:
    settings = RunSettings(max_episodes=300, max_minutes=5.0)
    said = used_up(settings, Path("my run"), 108, 0, 301.0, by_clock=True, nothing=False)
    assert said == (
        "stopped by max_minutes=5 after 108 of 300 episodes; "
        "to train longer: opencda-marl run --resume 'my run' max_minutes=15"
    )
    said = used_up(settings, Path("r"), 300, 0, 100.0, by_clock=False, nothing=True)
    assert said.endswith("used up: 300 episodes; to train longer: opencda-marl run --resume r max_episodes=900")


@pytest.mark.parametrize(
    ("budgets", "done", "said", "more"),
    [
        ({"max_episodes": 100, "max_env_steps": 120}, (2, 240, 9.0), "240 steps", "max_env_steps=480"),
        ({"max_episodes": 2, "max_env_steps": 9}, (3, 30, 9.0), "3 episodes and 30 steps", "max_episodes=6 max_env_steps=60"),  # noqa: E501
        ({"max_episodes": 9, "max_env_steps": 900}, (9, 24, 9.0), "9 episodes", "max_episodes=27"),
        ({"max_env_steps": 1000}, (9, 123_456, 9.0), "123456 steps", "max_env_steps=250000"),
        ({"max_minutes": 1.0}, (9, 24, 294.0), "4.9 minutes of training", "max_minutes=10"),
        ({"max_minutes": 1e-9}, (1, 24, 0.5), "less than a second of training", "max_minutes=1"),
    ],
)  # fmt: skip
def test_the_limit_that_was_reached_is_raised_above_what_is_done(
    budgets: dict[str, float], done: tuple[int, int, float], said: str, more: str
) -> None:
    """Any other limit, or a lower one, would change nothing."""
    line = used_up(RunSettings(**budgets), Path("r"), *done, by_clock=False, nothing=True)
    told = f"nothing was trained, the budget is used up: {said}; to train longer: opencda-marl run --resume r {more}"
    assert line == told


def test_the_clock_is_told_more_than_it_has_run() -> None:
    settings = RunSettings(max_episodes=100, max_env_steps=1000, max_minutes=1.0)
    line = used_up(settings, Path("r"), 20, 800, 294.0, by_clock=True, nothing=True)
    assert "stopped by max_minutes=1 after 800 of 1000 steps; " in line, "the nearest of the counts"
    assert line.endswith(" r max_minutes=10")
