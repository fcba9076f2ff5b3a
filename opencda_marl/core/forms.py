"""The forms in which a run was computed, for run.json: equal in what they mean, different in their last bits.

A compiler that is missing, another device, or memory that workers cannot share changes the form, not the run. So the
forms are written down at each start, and whoever compares two runs bit for bit finds out where they may part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["changed_forms", "forms_of", "with_forms", "without_reason"]

_NAMES = (
    "device",
    "acting_device",
    "update_mode",
    "update_passes",
    "encoder_form",
    "actor_form",
    "kernels",
    "gradient_sums",
)
_UNKNOWN = (None, "auto", "none")  # not measured yet, or not there


def forms_of(init: Mapping[str, Any]) -> dict[str, str]:
    """Those among the values of an init line."""
    return {name: str(init[name]) for name in _NAMES if name in init}


def with_forms(facts: Mapping[str, Any], init: Mapping[str, Any]) -> dict[str, Any]:
    """run.json once more is known of the forms of its last start, which `init` describes."""
    found = forms_of(init)
    if not facts["resumed"]:
        return {**facts, "forms": found}
    return {**facts, "resumed": [*facts["resumed"][:-1], {**facts["resumed"][-1], "forms": found}]}


def changed_forms(facts: Mapping[str, Any], init: Mapping[str, Any], *, workers: int) -> list[str]:
    """What is computed in another form than at an earlier start: `update_passes was c++, is torch`.

    Args:
        facts: run.json before this start.
        init: of this start.
        workers: how many. The sum of two is the same in either order, and so to the bit.
    """
    began = facts.get("forms") or forms_of(facts.get("init", {}))
    earlier: list[Mapping[str, str]] = [began]
    for entry in facts["resumed"]:
        forms = entry.get("forms", {})
        earlier = [*earlier, forms] if entry["episode"] else [forms]  # from episode 0 on it was another beginning
    found = []
    for name, text in forms_of(init).items():
        if name == "gradient_sums" and workers < 3:
            continue
        now = without_reason(text)
        known = [without_reason(forms.get(name)) for forms in earlier]
        others = [form for form in known if form not in _UNKNOWN and form != now]
        if others and now not in _UNKNOWN:
            found.append(f"{name} was {others[-1]}, is {now}")
    return found


def without_reason(text: str | None) -> str | None:
    """A form as it is compared: the reason that may stand behind it in brackets is left out."""
    return None if text is None else text.partition(" (")[0]
