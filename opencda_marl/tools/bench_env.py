"""`bench env`: the environment's step against the bare simulator loop, both at the same number of vehicles."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.roads import Roads
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Action, Step
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import PeakSettings
from opencda_marl.tools.floor import BAND, Crossing, bare_loop, driving_speed
from opencda_marl.tools.measure import HEADLINE, Block, Load, Worker, against_floor, interleave, median

__all__ = ["bench_env", "crossing_of", "env_steps", "holding_rate", "with_rate"]

_SPANS = ("tick", "read", "observe", "reward", "metrics")
_REPEATS = 7
_STEPS = 600  # measured per block
_EPISODE = 4000  # [steps]
_PATIENCE = 20  # steps outside the band per step inside before giving up
_SETTLED = 1200  # [steps] after which the population of an episode is steady
_HIGHEST = 3000.0  # [vehicles/h/lane] the settings' own bound


def bench_env(settings: RunSettings, *, vehicles: int) -> dict[str, Any]:
    """Measure the env step, with a decision at every step and with the profile's interval.

    Args:
        settings: of the profile; demand is replaced by what holds `vehicles`.
        vehicles: wanted on the crossing; steps count while their number is within 20 %.

    Raises:
        SimulatorError: so many vehicles cannot be held.
    """
    from opencda_marl.assemble import make_roads

    crossing = crossing_of(make_roads(settings), settings)
    intervals = sorted({1, settings.decision_interval})
    with Worker(_calibration, settings, vehicles) as calibration:
        rate = float(calibration())
    names = {f"env step, decision every {k}": k for k in intervals}
    workers = {"bare loop": Worker(bare_loop, crossing, vehicles, _STEPS)}
    for name, interval in names.items():
        workers[name] = Worker(env_steps, replace(settings, decision_interval=interval), vehicles, rate, _STEPS)
    try:
        for worker in workers.values():
            worker()  # loads, compiles and fills the crossing
        with Load() as load:
            blocks: dict[str, list[Block]] = interleave(workers, _REPEATS)
    finally:
        for worker in workers.values():
            worker.close()
    rows = [against_floor(name, blocks[name], blocks["bare loop"]) for name in names]
    return {
        "what": "env",
        **{key: rows[0][key] for key in HEADLINE},  # with a decision at every step everything is done every step
        "rate_vph": round(rate, 1),
        "span_ms": {
            span: round(rows[0]["ms_median"] * median([block.spans[span] for block in blocks[next(iter(names))]]), 4)
            for span in _SPANS
        },
        "rows": rows,
        **load.report(),
    }


def crossing_of(roads: Roads, settings: RunSettings) -> Crossing:
    """What the bare loop needs of the roads."""
    lanes = tuple(int(lane) for lane in roads.lane)
    return Crossing(roads.network, roads.entry_edge, roads.exit_edge, lanes, settings)


def with_rate(settings: RunSettings, rate: float, vehicles: int) -> RunSettings:
    """The settings with steady traffic of connected vehicles only, at `rate` [vehicles/h/lane].

    So many `vehicles` enter as fast as in the bare loop.
    """
    demand = replace(
        settings.demand, rate_vph=rate, arrivals="exact", turning_shares=None, cav_share=1.0, peak=PeakSettings()
    )
    vehicle = replace(settings.scenario.vehicle, departure_speed=driving_speed(vehicles))
    scenario = replace(settings.scenario, vehicle=vehicle)
    return replace(settings, demand=demand, scenario=scenario, max_steps=_EPISODE, action="target_speed")


def env_steps(settings: RunSettings, vehicles: int, rate: float, steps: int) -> Callable[[], Block]:
    """Make the environment in this process; the measurement drives everybody at one share of the envelope.

    Args:
        settings: of the profile.
        vehicles: steps count while their number is within 20 % of this.
        rate: [vehicles/h/lane] that holds them.
        steps: simulator steps of one block.
    """
    drive = _Drive(with_rate(settings, rate, vehicles), vehicles)

    def measure() -> Block:
        seconds, counted, present, rows, acting = 0.0, 0, 0.0, 0.0, 0
        for _ in range(steps * _PATIENCE):
            elapsed, step = drive.step()
            inside = int(np.count_nonzero(drive.env.state.alive))
            if abs(inside - vehicles) > BAND * vehicles:
                continue
            seconds, counted, present = seconds + elapsed, counted + step.steps, present + inside * step.steps
            rows, acting = rows + float(step.observation.counts.sum()), acting + len(step.observation)
            if counted >= steps:
                return Block(seconds, counted, present / counted, rows / max(1, acting), drive.shares())
        raise SimulatorError(
            f"the environment cannot hold {vehicles} vehicles at {rate:.0f} vehicles/h/lane",
            fix="measure with fewer: --vehicles N",
        )

    return measure


class _Drive:
    """An environment in which everybody drives at one share of what is allowed, episode after episode."""

    def __init__(self, settings: RunSettings, vehicles: int) -> None:
        from opencda_marl.assemble import make_env

        self._spans = Spans()  # on, as in the training loop
        self._driven = 0.0  # [s] inside the environment since the shares were asked for
        self.env = make_env(settings, spans=self._spans)
        # Crowds are slow, as in the bare loop: half the envelope for up to 50 vehicles, a quarter for 100.
        share = min(0.5, 25.0 / vehicles)
        self._value = np.float32(2.0 * share - 1.0)
        self._episode = 0
        self._now: Step | None = None

    def step(self) -> tuple[float, Step]:
        """One timed step. [s], what came of it"""
        if self._now is None or self._now.done:
            kept = self._spans.take()  # what a beginning costs is no step's
            self._episode += 1
            self._now = self.env.reset(self._episode)
            self._spans.seconds = kept
        action = Action(np.full((len(self._now.observation), 1), self._value, np.float32))
        begin = time.perf_counter()
        self._now = self.env.step(action)
        elapsed = time.perf_counter() - begin
        self._driven += elapsed
        return elapsed, self._now

    def shares(self) -> dict[str, float]:
        """By span, of the time spent in steps since the last call."""
        seconds, driven = self._spans.take(), self._driven
        self._driven = 0.0
        return {span: seconds.get(span, 0.0) / driven for span in _SPANS}


def holding_rate(settings: RunSettings, vehicles: int) -> float:
    """The demand that keeps about so many vehicles on the crossing. [vehicles/h/lane]

    Found by trying: the population is measured at one rate, and the rate scaled.

    Raises:
        SimulatorError: even the highest demand does not bring so many in.
    """
    rate = min(_HIGHEST, 12.0 * vehicles)
    best, nearest, reached = 0.0, float("inf"), 0.0
    for _ in range(5):
        drive = _Drive(with_rate(settings, rate, vehicles), vehicles)
        present = _population(drive)
        drive.env.close()
        if abs(present - vehicles) < nearest:
            best, nearest, reached = rate, abs(present - vehicles), present
        if nearest < 0.05 * vehicles:
            return best
        rate = min(_HIGHEST, rate * vehicles / max(1.0, present))
    if nearest > BAND * vehicles:
        raise SimulatorError(
            f"{vehicles} vehicles cannot be on this crossing at once: at {best:.0f} vehicles/h/lane there are "
            f"{reached:.0f}, the nearest that was reached",
            fix=f"measure with fewer: --vehicles {max(1, int(reached))}",
        )
    return best


def _population(drive: _Drive) -> float:
    """Mean number of vehicles once an episode is steady."""
    passed, present, measured = 0, 0.0, 0
    while passed < _SETTLED * 3:
        _, step = drive.step()
        passed += step.steps
        if passed > _SETTLED:
            present += float(np.count_nonzero(drive.env.state.alive)) * step.steps
            measured += step.steps
    return present / measured


def _calibration(settings: RunSettings, vehicles: int) -> Callable[[], float]:
    return lambda: holding_rate(settings, vehicles)
