"""Timers: time belongs to the innermost one; nothing is counted twice."""

from __future__ import annotations

import time
import timeit

import pytest

from opencda_marl.core.spans import SPANS, Spans


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_time_belongs_to_the_innermost(clock: _Clock) -> None:
    spans = Spans()
    with spans("act"):
        clock.now += 1.0
        with spans("read"):
            clock.now += 10.0
            with spans("tick"):
                clock.now += 100.0
            clock.now += 20.0
        clock.now += 2.0
    clock.now += 5.0  # nobody's
    with spans("act"):
        clock.now += 4.0
    assert spans.take() == {"tick": 100.0, "read": 30.0, "act": 7.0}
    assert spans.take() == {}


def test_an_error_ends_the_span(clock: _Clock) -> None:
    spans = Spans()
    with pytest.raises(KeyError), spans("update"):
        clock.now += 3.0
        raise KeyError
    clock.now += 1.0
    with spans("act"):
        clock.now += 1.0
    assert spans.take() == {"update": 3.0, "act": 1.0}


def test_the_same_name_inside_itself(clock: _Clock) -> None:
    spans = Spans()
    with spans("read"):
        clock.now += 1.0
        with spans("read"):
            clock.now += 1.0
        clock.now += 1.0
    assert spans.take() == {"read": 3.0}


def test_off_is_free() -> None:
    spans = Spans(enabled=False)

    def one() -> None:
        with spans("act"):
            pass

    assert min(timeit.repeat(one, number=1000, repeat=5)) / 1000 < 5e-6  # [s]
    assert spans.take() == {}


def test_the_loop_names_them_in_the_order_of_a_step() -> None:
    assert SPANS == ("tick", "read", "observe", "act", "reward", "store", "update", "wait", "metrics")
