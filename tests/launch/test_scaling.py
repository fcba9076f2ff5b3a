"""`--parallel auto` on rates that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opencda_marl.launch.scaling import Machine, Scale, Tuner, most_cells, next_scale, steady


def _settle(rate: Callable[[int], float], limit: int, windows: int = 40) -> tuple[Scale, list[int]]:
    scale, tried = Scale(), []
    for _ in range(windows):
        tried.append(scale.cells)
        scale = next_scale(scale, rate(scale.cells), limit=limit)
    return scale, tried


def test_it_grows_while_one_more_brings_more_than_five_percent() -> None:
    # 4 cores: linear up to there, then nothing
    scale, tried = _settle(lambda cells: 100.0 * min(cells, 4), limit=16)
    assert tried[:7] == [1, 2, 3, 4, 5, 4, 4]
    assert (scale.cells, scale.settled) == (4, True)
    assert set(tried[6:]) == {4}


def test_exactly_five_percent_is_not_enough_and_a_little_more_is() -> None:
    assert next_scale(Scale(2, (100.0,)), 105.0, limit=9) == Scale(1, (100.0,), settled=True)
    assert next_scale(Scale(2, (100.0,)), 105.1, limit=9) == Scale(3, (100.0, 105.1))


def test_it_stops_at_the_limit_and_at_one() -> None:
    scale, tried = _settle(lambda cells: 100.0 * cells, limit=3)
    assert (scale.cells, scale.settled, max(tried)) == (3, True, 3)
    assert _settle(lambda cells: 100.0, limit=1)[0].cells == 1
    assert _settle(lambda cells: 100.0 / cells, limit=8)[0].cells == 1


def test_it_steps_back_when_the_rate_falls() -> None:
    scale = Scale(4, (100.0, 200.0, 300.0, 400.0), settled=True)
    assert next_scale(scale, 390.0, limit=8).cells == 4  # noise
    fallen = next_scale(scale, 300.0, limit=8)
    assert (fallen.cells, fallen.settled) == (3, True)
    # what three came to before counts no more: the next measurement is what it is compared with
    again = next_scale(fallen, 280.0, limit=8)
    assert again.cells == 3
    assert next_scale(again, 275.0, limit=8).cells == 3
    assert next_scale(again, 200.0, limit=8).cells == 2
    assert next_scale(Scale(1, (100.0,), settled=True), 10.0, limit=8).cells == 1


def test_less_room_is_less() -> None:
    assert next_scale(Scale(5, (1.0, 2.0, 3.0, 4.0), settled=False), 5.0, limit=2).cells == 2


@pytest.mark.parametrize(
    ("machine", "family", "cells", "most"),
    [
        (Machine(16, 64), "sumo", 100, 16),
        (Machine(16, 64), "carla", 100, 5),
        (Machine(64, 10), "sumo", 100, 10),
        (Machine(64, 10), "carla", 100, 2),
        (Machine(2, 64), "carla", 100, 1),
        (Machine(64, 999, (24.0, 8.0)), "sumo", 100, 16),
        (Machine(64, 999, (24.0, 24.0)), "carla", 100, 14),
        (Machine(64, 999), "sumo", 3, 3),
    ],
)
def test_room(machine: Machine, family: str, cells: int, most: int) -> None:
    assert most_cells(machine, family, cells=cells) == most  # type: ignore[arg-type]


def test_a_worker_is_a_core() -> None:
    assert most_cells(Machine(16, 64), "sumo", cells=100, workers=4) == 4
    assert most_cells(Machine(64, 10), "sumo", cells=100, workers=3) == 3
    assert most_cells(Machine(2, 64), "sumo", cells=100, workers=8) == 1


def test_a_rate_needs_a_whole_window() -> None:
    assert steady([], 3.0) is None
    assert steady([(0.0, 0.0), (2.9, 100.0)], 3.0) is None
    assert steady([(10.0, 50.0), (11.0, 60.0), (14.0, 250.0)], 3.0) == 50.0


def test_a_tuner_measures_undisturbed_windows_only() -> None:
    tuner = Tuner(8, window=20.0)

    def after(begin: float, end: float, cells: int, rate: float) -> dict[str, object] | None:
        own = [(begin + k, rate * k / cells) for k in range(int(end - begin) + 1)]
        return tuner.consider(end, [own] * cells, waiting=9)

    assert after(0.0, 19.0, 1, 100.0) is None
    assert after(0.0, 20.0, 1, 100.0) == {"cells": 2, "before": 1, "steps_per_s": 100.0}
    assert after(0.0, 30.0, 1, 100.0) is None  # the second is not there yet
    assert after(25.0, 45.0, 2, 190.0) is None  # what was measured before it came does not count
    assert after(25.0, 51.0, 2, 190.0) == {"cells": 3, "before": 2, "steps_per_s": 190.0}
    assert after(52.0, 80.0, 3, 191.0) == {"cells": 2, "before": 3, "steps_per_s": 191.0}
    assert tuner.scale.settled
