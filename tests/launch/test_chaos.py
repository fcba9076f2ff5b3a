"""Whatever is killed, stopped or refused, whenever: the same command finishes, and nothing was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.drill import Drill, Fakes, OnCarla, Real, same, strangers
from tests.launch.real import free_ports, until

SEEDS = [1, 2]


def _drilled(tmp_path: Path, kind: Real, seed: int, *, seconds: float, pause: tuple[float, float]) -> Drill:
    for name in ("calm", 'a wild "place"\n\''):
        (tmp_path / name).mkdir()
    calm = Drill(tmp_path / "calm/m", kind, free_ports(13), seed)
    assert calm.finish(400.0) == 1
    undisturbed = calm.learned()
    wild = Drill(tmp_path / 'a wild "place"\n\'' / "m", kind, free_ports(13), seed)
    with strangers(wild.port) as untouched:
        wild.disturb(seconds, pause)
        wild.finish(400.0)
        assert untouched()
    assert same(undisturbed, wild.learned()), wild.said
    until(lambda: not wild.processes(), f"{wild.processes()} are left")
    return wild


@pytest.mark.timeout(900)
def test_thirty_seconds_of_chaos(tmp_path: Path) -> None:
    """Trainers of a few lines: much happens in that time."""
    wild = _drilled(tmp_path, Fakes(6, 8), 1, seconds=12.0, pause=(0.2, 0.8))
    assert len(wild.said) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_cells_in_chaos(tmp_path: Path) -> None:
    _drilled(tmp_path, Real(2, 3), 3, seconds=10.0, pause=(1.0, 4.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_six_real_cells_in_chaos(tmp_path: Path, seed: int) -> None:
    _drilled(tmp_path, Real(6, 4), seed, seconds=75.0, pause=(0.5, 6.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_cells_on_carla_in_chaos(tmp_path: Path) -> None:
    """Servers that the cells need, which die, stand still and lose their ports."""
    pytest.importorskip("carla")
    wild = _drilled(tmp_path, OnCarla(4, 4), 5, seconds=75.0, pause=(0.5, 6.0))
    assert any("to server" in said and not said.startswith("no ") for said in wild.said), wild.said
