"""Proportions of an episode, worked by hand."""

from __future__ import annotations

import pytest

from opencda_marl.core.spans import SPANS
from opencda_marl.tools.child_runs import differing_fields
from opencda_marl.tools.profile import proportions


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
