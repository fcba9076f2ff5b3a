"""Proportions of an episode, worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opencda_marl.core.spans import SPANS
from opencda_marl.tools.child_runs import differing_fields
from opencda_marl.tools.drift import compare, read_costs, shares_of_the_loop
from opencda_marl.tools.profile import profile, proportions


def test_shares_and_what_is_unaccounted_sum_to_one() -> None:
    found = proportions({"steps": 1000, "wall_s": 2.0, "spans": {"tick": 0.5, "update": 1.0, "checkpoint": 0.3}})
    assert found["ms_per_step"] == 2.0
    assert found["spans"]["tick"] == 0.25
    assert found["spans"]["update"] == 0.5
    assert found["spans"]["checkpoint"] == 0.15
    assert found["span_ms"]["update"] == 1.0
    assert found["unaccounted_share"] == 0.1
    assert list(found["spans"])[: len(SPANS)] == list(SPANS)
    assert sum(found["spans"].values()) + found["unaccounted_share"] == pytest.approx(1.0)


def test_an_episode_line_is_compared_without_its_timing() -> None:
    line = {"episode": 1, "return": 0.1 + 0.2, "wall_s": 3.0, "spans": {"tick": 1.0}, "ms_per_step": 2.0}
    assert differing_fields([line], [{**line, "wall_s": 4.0, "spans": {}, "ms_per_step": 9.0}]) == []
    assert differing_fields([line], [{**line, "return": 0.3}]) == [
        "episode 1: return is 0.30000000000000004 and 0.3",
    ]
    assert differing_fields([line], [{**line, "near_missed": None}]) == ["episode 1: only one has near_missed"]


def test_time_is_counted_as_far_as_the_loop_asked_for_it() -> None:
    # main -> load -> shared (3 s); main -> run_loop -> step -> shared (1 s); shared -> leaf, four seconds in all
    names = ["main", "load", "run_loop", "step", "shared", "leaf"]
    main, load, loop, step, shared, leaf = (("a.py", line, name) for line, name in enumerate(names))
    entries = {
        main: (1, 1, 0.0, 9.0, {}),
        load: (1, 1, 0.0, 3.0, {main: (1, 1, 0.0, 3.0)}),
        loop: (1, 1, 0.5, 2.0, {main: (1, 1, 0.5, 2.0)}),
        step: (5, 5, 0.5, 1.5, {loop: (5, 5, 0.5, 1.5)}),
        shared: (8, 8, 0.0, 4.0, {load: (3, 3, 0.0, 3.0), step: (5, 5, 0.0, 1.0)}),
        leaf: (8, 8, 4.0, 4.0, {shared: (8, 8, 4.0, 4.0)}),
    }
    shares = shares_of_the_loop(entries)
    assert [shares[key] for key in (main, load, loop, step)] == [0.0, 0.0, 1.0, 1.0]
    assert shares[shared] == shares[leaf] == 0.25


def test_a_warm_up_takes_no_share_by_the_length_of_its_first_call() -> None:
    # run_loop -> step 99 times (1 s in all); warm_up -> step once (9 s: it compiles); step -> tick
    where = "/x/opencda_marl/train.py"
    main, loop, warm, step, tick = (
        (where, k, name) for k, name in enumerate(["main", "run_loop", "warm_up", "s", "t"])
    )
    entries = {
        main: (1, 1, 0.0, 10.0, {}),
        loop: (1, 1, 0.0, 1.0, {main: (1, 1, 0.0, 1.0)}),
        warm: (1, 1, 0.0, 9.0, {main: (1, 1, 0.0, 9.0)}),
        step: (100, 100, 0.0, 10.0, {loop: (99, 99, 0.0, 1.0), warm: (1, 1, 0.0, 9.0)}),
        tick: (100, 100, 10.0, 10.0, {step: (100, 100, 10.0, 10.0)}),
    }
    shares = shares_of_the_loop(entries)
    assert shares[step] == shares[tick] == pytest.approx(0.99)
    assert shares[warm] == 0.0


def test_an_episode_is_profiled_with_its_share_of_learning(tmp_path: Path) -> None:
    overrides = ["max_steps=300", "demand.rate_vph=400", "demand.rate_draw=choice", "threads=1"]
    found = profile("sumo-marl/intersection/route_speed_only_pcmappo", folder=tmp_path, overrides=overrides)
    assert found["identical_summary"] is True
    assert found["differences"] == []
    assert found["steps"] == 300
    for span in ("tick", "read", "act", "update"):
        assert 0 < found["spans"][span] < 1
    assert sum(found["spans"].values()) + found["unaccounted_share"] == pytest.approx(1.0, abs=0.01)
    assert found["unprofiled"]["ms_per_step"] > 0  # which of the two is slower is the machine's business
    assert any("simulation_step" in row["function"] for row in found["functions"])
    # the same code against itself: whatever the machine did, no change is named that is not there
    assert found["against"] is None
    before = read_costs(Path(found["pstats"]))
    same = compare(before, before)
    assert same["changed"] == []
    assert same["comparable"] is True
    assert same["steps"] == [300, 300]
    assert before["opencda_marl/simulators/sumo.py:step"].in_loop > 0.8
    # what was made on the way is gone, what was found and said stays
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "plain.log",
        "profile.json",
        "profile.pstats",
        "profiled.log",
    ]
    assert json.loads((tmp_path / "profile.json").read_text()) == found
