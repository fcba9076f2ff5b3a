"""Functions that moved together are another process's doing; what moved alone is a change."""

from __future__ import annotations

import cProfile
from pathlib import Path

import numpy as np
import pytest

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.tools.drift import Cost, _family, compare, read_costs


def _profile() -> dict[str, Cost]:
    """Forty functions of eight files, and two families of built-ins."""
    costs = {f"file{k % 8}.py:f{k}": Cost(1000, 0.01 * (k + 1)) for k in range(40)}
    costs["<method 'append' of 'list' objects>"] = Cost(9000, 0.05)
    costs["<built-in method numpy.array>"] = Cost(900, 0.05)
    return costs


def _slower(costs: dict[str, Cost], factor: float, spread: float, seed: int = 0) -> dict[str, Cost]:
    rng = np.random.default_rng(seed)
    return {
        name: Cost(cost.calls, cost.seconds * factor * float(np.exp(rng.normal(0, spread))))
        for name, cost in costs.items()
    }


def test_the_same_machine_moves_nothing() -> None:
    found = compare(_profile(), _slower(_profile(), 1.03, 0.05))
    assert found["moved_together"] is False
    assert found["functions"] == []
    assert found["changed"] == []
    assert found["factor"] == pytest.approx(1.03, abs=0.06)


@pytest.mark.parametrize("factor", [1.6, 2.0, 1 / 1.8])
def test_a_uniform_inflation_is_named(factor: float) -> None:
    found = compare(_profile(), _slower(_profile(), factor, 0.05))
    assert found["moved_together"] is True
    assert found["factor"] == pytest.approx(factor, rel=0.06)
    assert found["families"] == 10
    assert "file7.py:f39" in found["functions"]
    assert found["changed"] == []


def test_what_really_changed_shows_through_the_inflation() -> None:
    now = _slower(_profile(), 1.8, 0.03)
    now["file7.py:f39"] = Cost(1000, 0.40 * 1.8 * 0.5)  # made twice as fast, on a slower machine
    found = compare(_profile(), now)
    assert found["moved_together"] is True
    assert [row["function"] for row in found["changed"]] == ["file7.py:f39"]
    assert found["changed"][0]["factor"] == pytest.approx(0.5, rel=0.1)


def test_one_file_that_slowed_down_is_a_change_not_a_disturbance() -> None:
    now = {
        name: Cost(cost.calls, cost.seconds * (2.0 if name.startswith("file3") else 1.0))
        for name, cost in _profile().items()
    }
    found = compare(_profile(), now)
    assert found["moved_together"] is False
    assert {row["function"].split(":")[0] for row in found["changed"]} == {"file3.py"}
    assert all(row["factor"] == 2.0 for row in found["changed"])


def test_a_scattered_slowdown_is_not_a_common_factor() -> None:
    found = compare(_profile(), _slower(_profile(), 1.6, 0.8))
    assert found["moved_together"] is False


def test_more_calls_at_the_same_cost_each_are_no_inflation() -> None:
    now = {name: Cost(cost.calls * 3, cost.seconds * 3) for name, cost in _profile().items()}
    assert compare(_profile(), now)["factor"] == 1.0


def test_one_family_says_nothing_about_the_machine() -> None:
    one = {f"a.py:f{k}": Cost(1000, 0.1) for k in range(40)}
    assert compare(one, _slower(one, 2.0, 0.0))["moved_together"] is False


def test_profiles_without_a_common_function_compare_to_nothing() -> None:
    found = compare({"a.py:f": Cost(100, 1.0)}, {"b.py:g": Cost(100, 1.0)})
    assert (found["moved_together"], found["families"], found["factor"]) == (False, 0, 1.0)


@pytest.mark.parametrize(
    "name",
    [
        "<built-in method builtins.getattr>",
        "<frozen importlib._bootstrap>:_find_spec",
        "python3.12/inspect.py:cleandoc",
        "numba/core/event.py:notify",
        "<built-in method marshal.loads>",
    ],
)
def test_what_a_start_costs_is_no_change(name: str) -> None:
    old, new = {**_profile(), name: Cost(100, 0.1)}, {**_profile(), name: Cost(100, 0.3)}
    assert compare(old, new)["changed"] == []
    other = "opencda_marl/env/inspector.py:look"
    old, new = {**_profile(), other: Cost(100, 0.1)}, {**_profile(), other: Cost(100, 0.3)}
    assert [row["function"] for row in compare(old, new)["changed"]] == [other]


def test_a_function_that_the_loop_hardly_calls_is_no_change() -> None:
    now = {**_profile(), "file7.py:f39": Cost(1000, 0.9, in_loop=0.2)}
    assert compare(_profile(), now)["changed"] == []
    assert compare(_profile(), {**now, "file7.py:f39": Cost(1000, 0.9)})["changed"] != []


def test_episodes_of_unlike_lengths_do_not_compare() -> None:
    step = "opencda_marl/simulators/sumo.py:step"
    short, long = {**_profile(), step: Cost(300, 0.1)}, {**_profile(), step: Cost(2400, 0.8)}
    found = compare(short, long)
    assert (found["comparable"], found["steps"]) == (False, [300, 2400])
    assert compare(short, {**short, step: Cost(304, 0.1)})["comparable"] is True


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("opencda_marl/env/driving.py:step", "opencda_marl/env/driving.py"),
        ("<method 'append' of 'list' objects>", "list"),
        ("<built-in method numpy.core.array>", "numpy.core"),
        ("<built-in method builtins.len>", "builtins"),
        ("<built-in method torch._C._nn.linear>", "torch._C._nn"),
    ],
)
def test_families(name: str, family: str) -> None:
    assert _family(name) == family


def test_a_profile_is_read_by_name(tmp_path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(30):
        median_of_nothing()
    profiler.disable()
    profiler.dump_stats(tmp_path / "a.pstats")
    costs = read_costs(tmp_path / "a.pstats")
    assert costs["tools/test_drift.py:median_of_nothing"].calls == 30
    assert costs["tools/test_drift.py:median_of_nothing"].each > 0


def test_time_before_the_loop_is_told_from_time_in_it(tmp_path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(30):
        median_of_nothing()
    run_loop()
    profiler.disable()
    profiler.dump_stats(tmp_path / "a.pstats")
    costs = read_costs(tmp_path / "a.pstats")
    assert costs["tools/test_drift.py:run_loop"].in_loop == 1.0
    assert costs["tools/test_drift.py:work"].in_loop == 1.0
    assert costs["tools/test_drift.py:median_of_nothing"].in_loop == 0.0


def run_loop() -> None:
    for _ in range(30):
        work()


def work() -> int:
    return sum(range(100))


def median_of_nothing() -> int:
    return sum(range(100))


def test_what_is_no_profile_is_told(tmp_path: Path) -> None:
    with pytest.raises(OpenCDAError, match="cannot be read"):
        read_costs(tmp_path / "missing.pstats")
    (tmp_path / "text").write_text("no profile")
    with pytest.raises(OpenCDAError, match="cannot be read"):
        read_costs(tmp_path / "text")
