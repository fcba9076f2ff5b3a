"""The compiled work around a step equals its NumPy form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencda_marl.core.frames import centre_of_front, heading_of_sumo_angle
from opencda_marl.core.state import FIELDS, Field
from opencda_marl.simulators import kernels
from opencda_marl.simulators.kernels import compare_targets, fill_values

SLOTS = 12


def test_columns_are_those_of_the_state() -> None:
    names = ("X", "Y", "HEADING", "SPEED", "ACCEL", "PROGRESS")
    assert [getattr(kernels, f"_{name}") for name in names] == [int(Field[name]) for name in names]


def _told_by_hand(
    rows: np.ndarray, controlled: np.ndarray, target: np.ndarray, told: np.ndarray
) -> tuple[dict[int, float], set[int]]:
    """index into rows -> new target (-1: none); and who began or ended to be controlled."""
    changes: dict[int, float] = {}
    switched: set[int] = set()
    for i, slot in enumerate(rows.tolist()):
        had, has = not np.isnan(told[slot]), bool(controlled[slot])
        if has and (not had or target[slot] != told[slot]):
            changes[i] = float(target[slot])
        elif had and not has:
            changes[i] = -1.0
        if had != has:
            switched.add(i)
    return changes, switched


@given(st.integers(0, 2**32 - 1))
def test_targets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.uniform(size=SLOTS) < 0.6)
    controlled = rng.uniform(size=SLOTS) < 0.6
    target = rng.integers(0, 3, SLOTS).astype(float)
    told = np.where(rng.uniform(size=SLOTS) < 0.3, np.nan, rng.integers(0, 3, SLOTS).astype(float))
    expected, switches = _told_by_hand(rows, controlled, target, told)
    changed, speeds = np.zeros(SLOTS, np.int64), np.zeros(SLOTS)
    before = told.copy()
    count, switched, bad = compare_targets(rows, controlled, target, told, changed, speeds)
    assert bad == -1
    assert dict(zip(changed[:count].tolist(), speeds[:count].tolist(), strict=True)) == expected
    assert set(changed[:switched].tolist()) == switches
    after = np.where(controlled, target, np.nan)
    on_road = np.isin(np.arange(SLOTS), rows)
    assert np.array_equal(told, np.where(on_road, after, before), equal_nan=True)


@pytest.mark.parametrize("wrong", [-0.1, np.nan, np.inf])
def test_a_target_that_is_no_speed(wrong: float) -> None:
    target = np.array([5.0, wrong, 5.0])
    scratch = np.zeros(3, np.int64), np.zeros(3)
    rows, controlled = np.array([0, 1, 2]), np.ones(3, np.bool_)
    assert compare_targets(rows, controlled, target, np.full(3, np.nan), *scratch)[2] == 1
    # it does not matter where nobody is controlled
    controlled[1] = False
    assert compare_targets(rows, controlled, target, np.full(3, np.nan), *scratch)[2] == -1


@given(st.integers(0, 2**32 - 1))
def test_values(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.uniform(size=SLOTS) < 0.7)
    count = len(rows)
    fronts, angles = rng.uniform(-100, 100, (count, 2)), rng.uniform(0, 360, count)
    fresh = rng.uniform(size=SLOTS) < 0.2
    values = rng.uniform(0, 13, (SLOTS, FIELDS))
    told = np.where(rng.uniform(size=SLOTS) < 0.4, np.nan, rng.uniform(0, 17, SLOTS))
    before = values[rows, Field.SPEED].copy()
    with np.errstate(invalid="ignore"):
        possible = np.clip(np.clip(told[rows], before - 4.5 * 0.05, before + 2.6 * 0.05), 0, None)
    # half of them do what they are told, half something else
    obeys = rng.uniform(size=count) < 0.5
    speeds = np.where(obeys & ~np.isnan(possible), possible, before + 1.0)
    expected = values.copy()
    new = fresh[rows]
    heading = heading_of_sumo_angle(angles)
    expected[rows, :2] = centre_of_front(fronts - np.array([3.0, -4.0]), heading, 5.0)
    expected[rows, Field.HEADING] = heading
    expected[rows, Field.SPEED] = speeds
    expected[rows, Field.ACCEL] = np.where(new, 0.0, (speeds - before) / 0.05)
    expected[rows, Field.PROGRESS] = np.where(new, 5.0, values[rows, Field.PROGRESS] + speeds * 0.05)
    asked = ~np.isnan(told[rows]) & ~new
    found = fill_values(rows, fronts.ravel(), angles, speeds, fresh, told, values, (3.0, -4.0), 5.0, 4.5, 2.6, 0.05)
    assert found == (int(asked.sum()), int((asked & (np.abs(speeds - possible) > 1e-6)).sum()))
    exact = [Field.SPEED, Field.ACCEL, Field.PROGRESS, Field.SCHEDULED_AT, Field.DEPARTED_AT]
    assert np.array_equal(values[:, exact], expected[:, exact])
    assert np.abs(values - expected).max() < 1e-12
    assert not fresh[rows].any()
