"""Words to faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from opencda_marl.core.errors import ConfigError
from opencda_marl.standin import FAULTS
from opencda_marl.standin.faults import next_of, parse


def test_all_forms() -> None:
    words = ["die:2.5", "hang:get_map_data", "late:version:0.5", "late:3", "drop@tick:7", "die@frame:12", "leak@tick:4"]
    found = parse([*words, "malformed:tick_cue", "version:0.9.15", "deaf", "leak:100"])
    assert found.alone == {"die": "2.5", "late": "3", "version": "0.9.15", "deaf": "", "leak": "100"}
    assert found.methods == {"get_map_data": "hang", "tick_cue": "malformed"}
    assert found.late == {"version": 0.5}
    assert (found.frames, found.ticks, found.leak_per_frame) == ({12: "die"}, {7: "drop"}, 4.0)
    assert found.number("late", 0.0) == 3.0
    assert found.number("hang", 9.0) == 9.0
    assert parse(["die"]).number("die", 9.0) == 0.0


@pytest.mark.parametrize(
    "word",
    ["", "explode", "hang:1.5", "late", "late:version:soon", "drop", "malformed", "die@frame:x", "die@never:1", "leak",
     "version", "deaf:1", "squat:x", "late@tick:3", "die@tick:1.5", "HANG"],
)  # fmt: skip
def test_what_is_none(word: str) -> None:
    with pytest.raises(ConfigError, match="there is no fault"):
        parse([word])


def test_every_fault_can_be_asked_for() -> None:
    needs = {"late": ":1", "drop": ":version", "leak": ":1", "version": ":1", "malformed": ":version"}
    parse([name + needs.get(name, "") for name in FAULTS])


def test_a_line_for_each_start(tmp_path: Path) -> None:
    listed = tmp_path / "faults"
    listed.write_text("die:2, hang\n\nalways deaf\n")
    assert [next_of(str(listed)) for _ in range(4)] == [["die:2", "hang"], [], ["deaf"], ["deaf"]]
    assert next_of(str(tmp_path / "none")) == []
