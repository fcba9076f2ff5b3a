"""What short runs override so that learners learn in them, for each kind of settings, by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from opencda_marl.config import load_profile
from opencda_marl.settings.learning import ALGORITHMS, MappoSettings
from opencda_marl.settings.networks import LearnerSettings, NetworkSettings
from opencda_marl.settings.offpolicy import MasacSettings, OffPolicySettings
from opencda_marl.settings.qlearning import QlearningSettings
from opencda_marl.tools.short_runs import learn_across, learn_within, steps_between_updates, update_facts


def test_an_update_of_mappo_fits_into_the_run() -> None:
    assert learn_within(MappoSettings(n_steps=4800), 2280, 10) == ("learner.n_steps=2280",)
    assert learn_within(MappoSettings(n_steps=1000), 2280, 10) == ("learner.n_steps=1000",)
    # three quarters of an episode, at a common decision: 300 of 400, 7 * 42 = 294 of 400
    assert learn_across(MappoSettings(), 400, 10) == ("learner.n_steps=300",)
    assert learn_across(MappoSettings(), 400, 7) == ("learner.n_steps=294",)
    assert learn_across(MappoSettings(), 5, 10) == ("learner.n_steps=10",)


def test_a_replay_is_filled_early_and_the_batch_stays_where_it_can() -> None:
    own = MasacSettings()
    assert (own.batch_size, own.learning_starts) == (256, 5000)
    # four vehicles in 240 decisions: 480 rows by half of the run
    assert learn_within(own, 2400, 10) == ("learner.batch_size=256", "learner.learning_starts=256")
    assert learn_within(own, 300, 10) == ("learner.batch_size=60", "learner.learning_starts=60")
    assert learn_within(replace(own, learning_starts=20), 2400, 10)[1] == "learner.learning_starts=20"
    assert learn_within(own, 1, 10) == ("learner.batch_size=1", "learner.learning_starts=1")


def test_a_replay_comes_round_in_the_drill() -> None:
    small = ("learner.batch_size=40", "learner.learning_starts=40", "learner.buffer_size=1000")
    assert learn_across(MasacSettings(), 400, 10) == small
    assert learn_across(MasacSettings(batch_size=5000), 3200, 1)[0] == "learner.batch_size=1000"  # not above the ring


def test_a_learner_without_either_is_left_alone() -> None:
    @dataclass(frozen=True)
    class PlugIn:
        size: int = 3

    for own in (LearnerSettings(), QlearningSettings(), NetworkSettings(), PlugIn()):
        assert learn_within(own, 2400, 10) == learn_across(own, 2400, 10) == ()
        assert steps_between_updates(own) == 1
    assert update_facts(QlearningSettings()) == update_facts(PlugIn()) == {}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overrides_are_settings_of_the_algorithm(algorithm: str) -> None:
    """They are accepted, and what they do not name stays."""
    action = ["action=levels"] if algorithm in ("dqn", "qlearning") else []
    for make in (learn_within, learn_across):
        own = ALGORITHMS[algorithm]()
        extra = make(own, 400, 10)
        found = load_profile(
            "sumo-marl/intersection/_recipe", overrides=[f"algorithm={algorithm}", *action, *extra]
        ).settings.learner
        named = {argument.partition("=")[0].removeprefix("learner.") for argument in extra}
        assert replace(own, **{name: getattr(found, name) for name in named}) == found
        assert bool(extra) == isinstance(own, MappoSettings | OffPolicySettings)


def test_what_decides_the_cost_of_an_update() -> None:
    assert update_facts(MappoSettings(epochs=3)) == {"epochs": 3, "update_mode": "eager"}
    assert update_facts(MasacSettings(updates_per_step=0.1, update_mode="compiled")) == {
        "updates_per_step": 0.1,
        "batch_size": 256,
        "update_mode": "compiled",
    }
    assert steps_between_updates(MappoSettings(n_steps=77)) == 77
    assert steps_between_updates(MasacSettings()) == 1
