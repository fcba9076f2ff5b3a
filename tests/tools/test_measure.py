"""Medians, pairing, alternation, the machine's load, and the child that measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from opencda_marl.core.errors import DeadlineError, OpenCDAError, SimulatorError
from opencda_marl.tools.measure import Block, Load, Worker, against_floor, interleave, median, paired_ratio


def test_a_block_is_milliseconds_per_step() -> None:
    assert Block(seconds=0.5, steps=200).ms == 2.5


def test_the_median_of_nothing_is_an_error() -> None:
    assert median([3.0, 1.0, 100.0]) == 3.0
    with pytest.raises(ValueError, match="nothing"):
        median([])


def test_pairing_cancels_what_both_suffered() -> None:
    # the machine is three times slower in the second half: the ratio is 2 in every pair
    floors = [1.0, 1.0, 3.0, 3.0]
    values = [2.0, 2.0, 6.0, 6.0]
    assert paired_ratio(values, floors) == 2.0
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])


def test_sources_are_measured_forwards_and_backwards_in_turn() -> None:
    order: list[str] = []

    def source(name: str) -> Callable[[], int]:
        def measure() -> int:
            order.append(name)
            return len(order)

        return measure

    results = interleave({"a": source("a"), "b": source("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_row_by_hand() -> None:
    ours = [Block(0.1, 100, 20.0, 10.0), Block(0.3, 100, 30.0, 12.0), Block(0.2, 100, 25.0, 11.0)]
    floors = [Block(0.05, 100, 24.0), Block(0.1, 100, 25.0), Block(0.05, 100, 26.0)]
    assert against_floor("it", ours, floors) == {
        "name": "it",
        "ms_median": 2.0,
        "floor_ms_median": 0.5,
        "ratio": 3.0,  # the pairs: 2, 3, 4
        "speedup": 0.333,
        "ms_low": 1.0,
        "ms_high": 3.0,
        "vehicles": 25.0,
        "floor_vehicles": 25.0,
        "mean_rows": 11.0,
        "steps": 300,
    }


def _spin(seconds: float) -> Callable[[], float]:
    def measure() -> float:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return seconds

    return measure


def test_our_own_work_and_our_childrens_is_not_others_load() -> None:
    with Load() as load, Worker(_spin, 0.4) as child:
        assert child() == 0.4
        _spin(0.4)()
    report = load.report()
    assert set(report) == {"load", "others", "stolen"}
    busy = report["others"]
    assert 0.0 <= busy <= (os.cpu_count() or 1)


def test_others_are_what_is_left_of_the_busy_time() -> None:
    load = Load()
    load._begin = (100.0, 50.0, 1.0, 20.0)
    load._end = (110.0, 62.0, 1.5, 25.0)  # 10 s: 12 CPU seconds busy, 5 of them ours
    assert load.report() == {"load": 0.0, "others": 0.7, "stolen": 0.05}


def _pid() -> Callable[[], int]:
    return os.getpid


def _dies() -> Callable[[], None]:
    os._exit(7)


def _raises() -> Callable[[], None]:
    raise SimulatorError("it is broken", fix="mend it")


def test_a_worker_lives_in_one_process_of_its_own() -> None:
    with Worker(_pid) as child:
        first = child()
        assert first != os.getpid()
        assert child() == first


def test_what_happens_to_a_worker_is_told() -> None:
    with Worker(_raises) as child, pytest.raises(SimulatorError, match="it is broken") as caught:
        child()
    assert caught.value.fix == "mend it"
    with Worker(_dies) as child, pytest.raises(OpenCDAError, match="exit code 7"):
        child()
    with Worker(_spin, 60.0, deadline=0.2) as child, pytest.raises(DeadlineError, match=r"0\.2 s"):
        child()
