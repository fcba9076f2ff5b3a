"""Forms of computing in run.json: kept at each start, and what changed between two of them in words."""

from __future__ import annotations

from typing import Any

from opencda_marl.core.forms import changed_forms, forms_of, with_forms

INIT = {
    "backend": "sumo",
    "device": "cpu",
    "acting_device": "cpu",
    "update_mode": "auto",
    "update_passes": "c++",
    "encoder_form": "none",
    "actor_form": "c++",
    "kernels": "3f",
    "gradient_sums": "shared memory",
}
WITHOUT = {**INIT, "update_passes": "torch (no C++ compiler: g++ not found)", "gradient_sums": "gloo"}


def started(facts: dict[str, Any], init: dict[str, Any], episode: int) -> dict[str, Any]:
    """run.json after one more start."""
    again = [{"episode": episode}] if "init" in facts else []
    return with_forms({**facts, "init": init, "resumed": [*facts["resumed"], *again]}, init)


def test_each_start_keeps_its_own() -> None:
    facts = started({"resumed": []}, INIT, 0)
    assert facts["forms"] == {name: value for name, value in INIT.items() if name != "backend"}
    facts = started(facts, WITHOUT, 4)
    facts = started(facts, INIT, 6)
    assert facts["forms"] == forms_of(INIT)
    assert [entry["forms"] for entry in facts["resumed"]] == [forms_of(WITHOUT), forms_of(INIT)]


def test_what_is_known_later_belongs_to_the_last_start() -> None:
    facts = with_forms(started({"resumed": []}, INIT, 0), {**INIT, "update_mode": "compiled"})
    assert facts["forms"]["update_mode"] == "compiled"
    facts = started(facts, INIT, 4)
    facts = with_forms(facts, {**INIT, "update_mode": "eager"})
    assert facts["forms"]["update_mode"] == "compiled"
    assert facts["resumed"][0]["forms"]["update_mode"] == "eager"


def test_what_changed_in_words() -> None:
    facts = started({"resumed": []}, INIT, 0)
    assert changed_forms(facts, INIT, workers=3) == []
    assert changed_forms(facts, {**INIT, "update_mode": "eager", "encoder_form": "c++"}, workers=3) == [], (
        "as yet unknown"
    )
    assert changed_forms(facts, {**INIT, "kernels": "9a"}, workers=1) == ["kernels was 3f, is 9a"], "another processor"
    assert changed_forms(facts, {**INIT, "kernels": "none"}, workers=1) == [], "the passes tell"
    both = ["update_passes was c++, is torch", "gradient_sums was shared memory, is gloo"]
    assert changed_forms(facts, WITHOUT, workers=3) == both
    assert changed_forms(facts, WITHOUT, workers=2) == both[:1], "a + b is b + a"
    facts = started(facts, WITHOUT, 4)
    other = {**WITHOUT, "update_passes": "torch (another reason)"}
    assert changed_forms(started({"resumed": []}, WITHOUT, 0), other, workers=3) == []
    assert changed_forms(facts, INIT, workers=2) == ["update_passes was torch, is c++"], "the way back is a change, too"


def test_a_beginning_that_was_void_does_not_count() -> None:
    facts = started(started({"resumed": []}, INIT, 0), WITHOUT, 0)  # killed before its first checkpoint
    assert changed_forms(facts, WITHOUT, workers=3) == []


def test_a_run_that_did_not_keep_them_yet() -> None:
    facts = {"init": INIT, "resumed": [{"episode": 4}]}
    assert changed_forms(facts, WITHOUT, workers=2) == ["update_passes was c++, is torch"]
