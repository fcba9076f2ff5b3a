"""The honest guard: who is beaten, who is not, and what cannot be told."""

from __future__ import annotations

from typing import Any

import pytest

from opencda_marl.core.verdict import compare, in_words, judge


def _answer(policy: str, collided: int, running: int, rate: float = 300.0, episodes: int = 20) -> dict[str, Any]:
    """The same figures in each episode, of 100 scheduled vehicles, with a little spread."""
    rows = []
    for seed in range(episodes):
        crash = collided + (seed % 2 if collided else 0)
        rows.append({"seed": seed, "scheduled": 100, "collided": crash, "removed": 0})
        rows[-1]["arrived"] = 100 - crash - running
    ended = sum(row["arrived"] + row["collided"] for row in rows)
    return {
        "policy": policy,
        "rate_vph": rate,
        "per_episode": rows,
        "vehicles": ended,
        "collision_rate": sum(row["collided"] for row in rows) / ended,
        "mean_delay_s": 1.25,
    }


def test_verdicts() -> None:
    ours = _answer("mine", 2, 5)
    assert compare(ours, _answer("random", 20, 5))["verdict"] == "beats"
    assert compare(ours, _answer("full_speed", 0, 0))["verdict"] == "worse"
    never = compare(ours, _answer("priority", 0, 40))
    assert (never["verdict"], never["safer"], never["more_through"]) == ("mixed", -1, 1)
    assert compare(ours, {**ours, "policy": "random"})["verdict"] == "equal"
    # as safe, and more get through
    assert compare(_answer("mine", 0, 5), _answer("priority", 0, 40))["verdict"] == "beats"


def test_a_few_episodes_tell_nothing() -> None:
    few, many = (compare(_answer("mine", 1, 5, episodes=n), _answer("random", 9, 5, episodes=n)) for n in (5, 6))
    assert (few["verdict"], many["verdict"]) == ("unknown", "beats")
    assert "is not told apart from random driving" in in_words([few])[0]
    assert "only 5 episodes" in " ".join(in_words([few]))


def test_a_single_crash_is_not_told_from_none() -> None:
    once = _answer("mine", 0, 5)
    once["per_episode"][3] |= {"collided": 2, "arrived": 93}
    assert compare(once, _answer("priority", 0, 5))["verdict"] == "equal"


def test_crashes_in_five_of_ten_episodes_are_not_told_from_none() -> None:
    """12 crashed vehicles against 0: in five episodes chance alone does that once in 16, in six once in 32."""
    for episodes, verdict in ((5, "equal"), (6, "worse")):
        ours, theirs = _answer("mine", 0, 5, episodes=10), _answer("priority", 0, 5, episodes=10)
        for row in ours["per_episode"][:episodes]:
            row |= {"collided": 2, "arrived": 93}
        first = 14 - 2 * episodes
        ours["per_episode"][0] |= {"collided": first, "arrived": 95 - first}
        one = compare(ours, theirs)
        assert (one["verdict"], one["safer"]) == (verdict, 0 if verdict == "equal" else -1)
        assert one["p_crash"] == 2 / 2**episodes
        assert one["crashed"] == [[12, 950], [0, 950]]
    said = in_words([compare(ours, theirs)])[0]
    assert said.startswith("does NOT beat SUMO's priority rule at 300 vph: MORE crash (12 of 950 against 0 of 950: ")


def test_what_gets_more_through_and_perhaps_crashes_more_is_not_said_to_beat() -> None:
    ours, theirs = _answer("mine", 0, 5), _answer("priority", 0, 40)
    assert in_words([compare(ours, theirs)])[0].startswith(
        "beats SUMO's priority rule at 300 vph: nobody crashes (0 of 1"
    )
    ours["per_episode"][0] |= {"collided": 2, "arrived": 93}
    assert in_words([compare(ours, theirs)])[0].startswith(
        "gets more through than SUMO's priority rule at 300 vph: perhaps more crash (2 of 1,900 against 0 of 1,200: "
    )
    theirs["per_episode"][1] |= {"collided": 6, "arrived": 54}
    assert in_words([compare(ours, theirs)])[0].startswith(
        "beats SUMO's priority rule at 300 vph: no sure difference in who crashes (2 of 1,900 against 6 of 1,200: "
    )


def test_a_driver_that_stands_still_is_not_safer() -> None:
    ours, still = _answer("mine", 1, 5, episodes=10), _answer("full_speed", 0, 99, episodes=10)
    one = compare(ours, still)
    assert (one["verdict"], one["safer"], one["more_through"], one["p_crash"]) == ("beats", 0, 1, 1.0)


def test_other_traffic_is_refused() -> None:
    with pytest.raises(ValueError, match="did not drive the same traffic"):
        compare(_answer("mine", 0, 0), _answer("random", 0, 0, rate=200.0))
    with pytest.raises(ValueError, match="did not drive the same traffic"):
        compare(_answer("mine", 0, 0), _answer("random", 0, 0, episodes=19))


def test_sentences() -> None:
    rows = [_answer("mine", 2, 5), _answer("random", 20, 5), _answer("priority", 0, 40), _answer("rule_based", 0, 0)]
    lines = in_words(judge(rows, "mine"))
    assert lines == [
        "beats random driving at 300 vph: fewer crash (2.6 against 21.6 %), more get through (92.5 against 74.5 %), "
        "delay 1.2 against 1.2 s",
        "does NOT beat SUMO's priority rule at 300 vph: MORE crash (2.6 against 0.0 %), "
        "more get through (92.5 against 60.0 %), delay 1.2 against 1.2 s",
        "not compared with full speed",
    ]
    nobody = [{**one, "vehicles": 0} for one in judge(rows, "mine")]
    assert in_words(nobody, rivals=[]) == [
        "nothing to compare where nobody arrived or crashed: episodes are too short for that (max_steps)"
    ]
    assert in_words([]) == ["not compared with random driving, full speed, SUMO's priority rule"]
    few = [_answer("mine", 0, 5, episodes=2), _answer("random", 0, 5, episodes=2)]
    said = in_words(judge(few, "mine"), rivals=["random"])
    assert said[0].startswith(
        "is not told apart from random driving at 300 vph on 190 vehicles: nobody crashes "
        "(0 of 190 against 0 of 190: 0.0"
    )
    assert said[1] == "(only 190 vehicles: rates are known to some 7 points at the worst)"
    assert said[2].startswith("(only 2 episodes: chance alone could make any of these differences")
