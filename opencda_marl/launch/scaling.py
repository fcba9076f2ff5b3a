"""`--parallel auto`: how many cells run at once, from what was measured. Pure functions; clocks are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from opencda_marl.core.machine import cores
from opencda_marl.launch.cells import Family
from opencda_marl.launch.folder import Matrix
from opencda_marl.launch.gpus import Gpu

__all__ = ["GAIN", "Machine", "Scale", "Switch", "Tuner", "most_cells", "next_scale", "room", "steady"]

GAIN = 0.05  # of the aggregate steps per second, for which one more cell is worth it

_CORES = {"sumo": 1.0, "carla": 3.0}  # that a cell keeps busy: its trainer, and its server
_MEMORY = {"sumo": 1.0, "carla": 4.0}  # [GiB] likewise
_LEARNER_VRAM = 1.0  # [GiB]
_SERVER_VRAM = 2.4  # [GiB] of a server with the intersection loaded


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share."""

    cores: float
    memory_gib: float  # that is free
    cards_gib: tuple[float, ...] = ()  # free memory of each card that cells are put on; empty: none is used


def most_cells(machine: Machine, family: Family, *, cells: int, workers: int = 1) -> int:
    """How many cells the machine has room for, at least one.

    Args:
        machine: what is there.
        family: of the cells; the dearest one where both run.
        cells: how many there are to run.
        workers: of a cell, the most; each has a simulation and a core.
    """
    vram = _LEARNER_VRAM + (_SERVER_VRAM if family == "carla" else 0.0)
    # slots go around the cards, so the fullest card decides
    cards = [len(machine.cards_gib) * int(min(machine.cards_gib) / vram)] if machine.cards_gib else []
    shares = (machine.cores / (_CORES[family] * workers), machine.memory_gib / (_MEMORY[family] * workers))
    found = (*map(int, shares), cells, *cards)
    return max(1, min(found))


def room(matrix: Matrix, gpus: Sequence[Gpu] | None) -> int:
    """How many cells of a matrix this machine has room for now."""
    named = {int(name) for name in matrix.options.cuda_visible_devices if name.isdigit()}
    used = [gpu for gpu in gpus or () if gpu.index in named and gpu.free_mib is not None]
    machine = Machine(
        cores=cores(),
        memory_gib=psutil.virtual_memory().available / 2**30,
        cards_gib=tuple((gpu.free_mib or 0) / 1024 for gpu in used),
    )
    family: Family = "carla" if any(cell.family == "carla" for cell in matrix.cells) else "sumo"
    workers = max((cell.workers for cell in matrix.cells), default=1)
    return most_cells(machine, family, cells=len(matrix.cells), workers=workers)


@dataclass(frozen=True, slots=True)
class Scale:
    """How many cells are wanted, and what was measured on the way there."""

    cells: int = 1
    rates: tuple[float, ...] = ()  # aggregate steps/s with 1, 2, ... cells
    settled: bool = False  # no further cell is tried


def next_scale(scale: Scale, rate: float, *, limit: int) -> Scale:
    """What to do after `rate` was measured with `scale.cells` at work.

    One more as long as the last one brought more than 5 %; one less where it did not. Once settled, one less whenever
    the rate has fallen by as much: something else wants the machine.

    Args:
        scale: as it stands.
        rate: aggregate steps per second.
        limit: the most that there is room for.
    """
    if scale.cells > limit:
        return Scale(limit, scale.rates[:limit], settled=True)
    before = scale.rates[: scale.cells - 1]
    if scale.settled:
        known = scale.rates[scale.cells - 1] if len(scale.rates) >= scale.cells else None
        if known is not None and rate < known / (1.0 + GAIN) and scale.cells > 1:
            # what fewer cells came to before was another machine, so to speak
            return Scale(scale.cells - 1, scale.rates[: scale.cells - 2], settled=True)
        best = rate if known is None else max(rate, known)
        return replace(scale, rates=(*before, best))
    if before and rate <= (1.0 + GAIN) * before[-1]:
        return Scale(scale.cells - 1, before, settled=True)
    grown = min(scale.cells + 1, limit)
    return Scale(grown, (*before, rate), settled=grown == scale.cells)


class Switch:
    """Something that may be on or off: measured off, then on, and left on if that brings more than 5 %."""

    def __init__(self) -> None:
        self.on = self.decided = False
        self._off = 0.0  # aggregate steps per second without it

    def measured(self, rate: float) -> bool:
        """Go on with what was measured as things stand. Returns: was it switched?"""
        if not self.on:
            self._off, self.on = rate, True
            return True
        self.decided = True
        self.on = rate > (1.0 + GAIN) * self._off
        return not self.on


class Tuner:
    """Measures, and lets `next_scale` decide.

    Args:
        most: cells that there is room for.
        window: [s] of undisturbed work that a measurement takes.
        switch: tried when the number of cells has settled, if that is more than one.
    """

    def __init__(self, most: int, *, window: float = 20.0, switch: Switch | None = None) -> None:
        self.scale, self.switch = Scale(), switch
        self._most, self._window = most, window
        self._since = 0.0  # [s] when the present number of cells began

    def consider(
        self, now: float, samples: Sequence[Sequence[tuple[float, float]]], waiting: int
    ) -> dict[str, Any] | None:
        """What is known now.

        Args:
            now: [s].
            samples: for each cell at work its (time, steps) so far.
            waiting: cells that could be started.

        Returns:
            What changed, for people; None: nothing.
        """
        if len(samples) != self.scale.cells:
            self._since = now
            return None
        rates = [steady([one for one in own if one[0] >= self._since], self._window) for own in samples]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return None
        before, self._since = self.scale, now
        if self.switch is not None and before.settled and before.cells > 1 and not self.switch.decided:
            changed = self.switch.measured(sum(known))
            told = {"cells": before.cells, "before": before.cells, "steps_per_s": round(sum(known), 1)}
            return {**told, "mps": self.switch.on} if changed else None
        self.scale = next_scale(before, sum(known), limit=min(self._most, len(samples) + waiting))
        if self.scale.cells == before.cells:
            return None
        return {"cells": self.scale.cells, "before": before.cells, "steps_per_s": round(sum(known), 1)}


def steady(samples: Sequence[tuple[float, float]], window: float) -> float | None:
    """Steps per second over the last `window` seconds of (time, steps); None: not that long yet."""
    if not samples or samples[-1][0] - samples[0][0] < window:
        return None
    return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])
