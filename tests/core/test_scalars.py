"""Scalars that TensorBoard itself reads back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opencda_marl.core.errors import StorageError
from opencda_marl.core.scalars import ScalarWriter


def _read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_reads_them(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path / "tb")
    writer.write(0, {"charts/return": -1.5, "losses/ü": 1e-7})
    writer.write(300_000, {"charts/return": 2.0})
    writer.write(2**40, {"charts/return": math.pi, "x" * 300: 1.0})
    writer.close()
    writer.close()
    found = _read(tmp_path / "tb")
    assert found["charts/return"] == [(0, -1.5), (300_000, 2.0), (2**40, pytest.approx(math.pi, rel=1e-6))]
    assert found["losses/ü"] == [(0, pytest.approx(1e-7))]
    assert found["x" * 300] == [(2**40, 1.0)]


def test_a_resumed_run_voids_what_lies_beyond(tmp_path: Path) -> None:
    first = ScalarWriter(tmp_path / "tb")
    for step in (10, 20, 30, 40):
        first.write(step, {"a": float(step)})
    first.close()
    second = ScalarWriter(tmp_path / "tb", start=21)
    second.write(30, {"a": -30.0})
    second.close()
    assert _read(tmp_path / "tb")["a"] == [(10, 10.0), (20, 20.0), (30, -30.0)]


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        ScalarWriter(tmp_path / "file" / "tb")
