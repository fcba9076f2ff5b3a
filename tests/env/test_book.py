"""Stops and jerk, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import CONFLICTS, ROADS

from opencda_marl.core.metrics import pool
from opencda_marl.core.state import Events, Field, Schedule, TrafficState
from opencda_marl.env.book import Book
from opencda_marl.env.near_miss import Proximity
from opencda_marl.env.neighbours import road_tables
from opencda_marl.env.reward import RewardParts
from opencda_marl.settings.run import RunSettings

_SLOTS, _DT = 3, 0.05


def _book(*, comfort: bool) -> tuple[Book, Proximity]:
    settings = RunSettings()
    tables = road_tables(ROADS, CONFLICTS)
    nobody = np.zeros(0)
    schedule = Schedule(
        1, 300.0, nobody.astype(np.int64), nobody, nobody.astype(np.int16), nobody, nobody.astype(np.int8)
    )
    parts = RewardParts(settings.reward.weights, tables.route, _DT, 0.999)
    free = [10.0] * ROADS.routes
    book = Book(settings, free, schedule, 1, parts, measured=False, comfort=comfort)
    return book, Proximity.of(settings, tables, _SLOTS)


def _drive(
    book: Book, proximity: Proximity, speeds: dict[int, list[float | None]], accels: dict[int, list[float]]
) -> None:
    """Slot -> its speed at each step, None: not there; and likewise its acceleration."""
    state = TrafficState.empty(_SLOTS)
    for step in range(max(map(len, speeds.values()))):
        before = state.alive.copy()
        for slot, course in speeds.items():
            state.alive[slot] = course[step] is not None
            state.values[slot, Field.SPEED] = course[step] or 0.0
            state.values[slot, Field.ACCEL] = accels.get(slot, [0.0] * 99)[step]
        state.step, state.time = step + 1, (step + 1) * _DT
        book.count(state, Events(departed=np.flatnonzero(state.alive & ~before)), proximity)


def test_stops_are_counted_once_and_again_after_moving() -> None:
    book, proximity = _book(comfort=True)
    creeping: list[float | None] = [5.0, 0.0, 0.5, 0.05, 2.0, 0.0, None]  # creeping in between is one stop
    never: list[float | None] = [9.0, 9.0, 0.11, 9.0, 9.0, 9.0, 9.0]
    _drive(book, proximity, {0: creeping, 1: never}, {})
    assert book.record.stops == 2
    assert pool([book.record])["stops_per_vehicle"] == 1.0


def test_jerk_is_the_change_of_acceleration_of_those_who_stay() -> None:
    book, proximity = _book(comfort=True)
    _drive(
        book,
        proximity,
        {0: [9.0, 9.0, 9.0, None, 9.0], 1: [9.0] * 5},
        {0: [0.0, 1.0, 1.0, 0.0, -4.0], 1: [0.0, 0.0, 0.0, 0.0, 0.5]},  # slot 0 has another vehicle at the end
    )
    # 1 in one step of slot 0, 0.5 in one of slot 1, over 2 + 4 vehicle-steps
    assert pool([book.record])["mean_jerk"] == pytest.approx(1.5 / _DT / 6)


def test_what_is_not_measured_is_absent() -> None:
    book, proximity = _book(comfort=False)
    _drive(book, proximity, {0: [9.0, 0.0]}, {0: [0.0, 1.0]})
    figures = pool([book.record])
    assert (figures["stops_per_vehicle"], figures["mean_jerk"]) == (None, None)
