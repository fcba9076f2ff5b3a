"""Flows of vehicles -> the schedule of an episode: who, when, from which lane to where, driven by whom.

All simulators get the same schedule. The draws come in a fixed order (rate, arrival times, drivers, speed
factors), so the share of CAVs changes nobody's arrival.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.roads import Movement, Roads
from opencda_marl.core.state import Driver, Schedule, vehicle_id
from opencda_marl.settings.traffic import DemandSettings, PeakSettings

__all__ = ["build_schedule", "draw_rate", "ramped", "route_shares", "spread_place"]

_HOUR = 3600.0  # [s]
_DEVIATIONS = 2.0  # speed factors are held within so many standard deviations of 1
_SLOWEST = 0.2  # whatever the deviation: everybody gets there
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def route_shares(demand: DemandSettings, roads: Roads) -> Float64[np.ndarray, " routes"]:
    """How many times the rate per lane each route gets.

    Without turning shares every entry lane gets the rate once, divided among its routes. With them, an
    arm's total (rate times its lanes) is divided among its movements, and a movement's part among its routes.

    Raises:
        ConfigError: turning shares that are not three numbers with the sum 1.
    """
    lanes = list(zip(roads.arm.tolist(), roads.lane.tolist(), strict=True))
    if demand.turning_shares is None:
        return np.array([1.0 / lanes.count(lane) for lane in lanes])
    wanted = demand.turning_shares
    if len(wanted) != len(Movement) or abs(sum(wanted) - 1.0) > 1e-6:
        raise ConfigError(
            f"demand.turning_shares must be three numbers (right, straight, left) with the sum 1, not {wanted}"
        )
    shares = np.zeros(roads.routes)
    for arm in np.unique(roads.arm):
        here = roads.arm == arm
        total = len({lane for lane in lanes if lane[0] == arm})
        possible = sum(wanted[m] for m in np.unique(roads.movement[here]))
        for movement in np.unique(roads.movement[here]) if possible > 0 else []:
            same = here & (roads.movement == movement)
            shares[same] = total * wanted[movement] / possible / same.sum()
    return shares


def ramped(demand: DemandSettings, episode: int) -> DemandSettings:
    """Demand of a training's episode (from 1): the upper end of its range grows with `ramp_episodes`.

    Dense traffic from the start can teach vehicles to wait for each other, and they are slow to unlearn it.
    """
    rates = demand.rate_vph
    if not isinstance(rates, list) or not 0 < episode <= demand.ramp:
        return demand
    low, high = rates
    begin = min(max(demand.ramp_from, low), high)
    top = begin + (high - begin) * (episode - 1) / demand.ramp_episodes
    return replace(demand, rate_vph=[low, top])


def spread_place(begin: float, turn: int) -> float:
    """Place of a turn in 0 to 1, such that any few turns in a row cover all of it about evenly.

    Steps of the golden section (an additive recurrence: each new place falls into one of the widest gaps). Drawn at
    random, the six densities of an update may all be thin, or all dense.

    Args:
        begin: of turn 0, in 0 to 1.
        turn: which one.
    """
    return (begin + turn * _GOLDEN) % 1.0


def draw_rate(demand: DemandSettings, rng: np.random.Generator, place: float | None = None) -> float:
    """The rate of an episode: the first draw of its generator, where there is a choice. [vehicles/h/lane]

    Args:
        demand: with one rate, or several.
        rng: of the episode's demand.
        place: between the ends, 0 to 1 (`spread_place`); None: drawn.

    Raises:
        ConfigError: an empty list.
    """
    rate = demand.rate_vph
    if not isinstance(rate, list):
        return float(rate)
    if not rate:
        raise ConfigError("demand.rate_vph is an empty list", fix="give a number, or a list of rates to draw from")
    if demand.rate_draw == "choice":
        return float(rate[rng.integers(len(rate))])
    low, high = min(rate), max(rate)
    return float(rng.uniform(low, high)) if place is None else low + (high - low) * place


def _busy_seconds(peak: PeakSettings, horizon: float) -> tuple[list[float], list[float]]:
    """Time [s], and seconds at the plain rate that bring as many vehicles; straight lines between the points."""
    begin = min(max(peak.begin, 0.0), horizon)
    end = max(begin, min(peak.end, horizon))
    grown = begin + (end - begin) * peak.factor
    return [0.0, begin, end, horizon], [0.0, begin, grown, grown + horizon - end]


def _arrivals(
    demand: DemandSettings, rate: float, horizon: float, rng: np.random.Generator
) -> Float64[np.ndarray, " vehicles"]:
    """Arrival times of one route. [s]

    poisson: independent of each other. exact: equal headways from a random first one, so the number differs from
    the expected one by less than 1.
    """
    times, busy = _busy_seconds(demand.peak, horizon)
    expected = rate / _HOUR * busy[-1]
    if demand.arrivals == "poisson":
        places = rng.uniform(0.0, expected, rng.poisson(expected))
    else:
        places = np.arange(rng.uniform(), expected, 1.0)
    if expected == 0.0:
        return np.zeros(0)
    # Inverse of the expected number of arrivals; a peak of factor 0 is a flat piece, which nobody falls into.
    return np.interp(places * (busy[-1] / expected), busy, times)


def build_schedule(
    demand: DemandSettings,
    roads: Roads,
    *,
    episode: int,
    horizon: float,
    rng: np.random.Generator,
    rate: float | None = None,
) -> Schedule:
    """Draw the vehicles of an episode.

    Args:
        demand: flows; `rate_vph` counts vehicles per hour and entry lane.
        roads: where to.
        episode: goes into the vehicles' ids.
        horizon: all arrive before it. [s]
        rng: of this episode's demand and nothing else.
        rate: instead of a rate that is drawn; None: it is. [vehicles/h/lane]

    Raises:
        ConfigError: a rate or turning shares that mean nothing.
    """
    rate = draw_rate(demand, rng) if rate is None else rate
    flows = [_arrivals(demand, rate * share, horizon, rng) for share in route_shares(demand, roads)]
    times = np.concatenate(flows)
    routes = np.repeat(np.arange(roads.routes, dtype=np.int16), [len(flow) for flow in flows])
    order = np.lexsort((routes, times))
    count = len(times)
    ours = rng.uniform(size=count) < demand.cav_share
    others = Driver.HUMAN if demand.others == "human" else Driver.RULE
    drivers = np.where(ours, Driver.CAV, others).astype(np.int8)
    spread = demand.speed_deviation
    low, high = max(_SLOWEST, 1.0 - _DEVIATIONS * spread), 1.0 + _DEVIATIONS * spread
    factors = np.clip(rng.normal(1.0, spread, count), low, high)
    return Schedule(
        episode=episode,
        rate_vph=rate,
        ids=np.array([vehicle_id(episode, index) for index in range(count)], np.int64),
        times=times[order],
        routes=routes[order],
        speed_factors=np.where(drivers == Driver.HUMAN, factors, 1.0),
        drivers=drivers,
    )
