"""Figures of driving, each defined once. Rates are pooled over the vehicles of all episodes.

success_rate          arrived / (arrived + collided + removed)
success_rate_departed arrived / departed, over vehicles that departed more than 30 s before the end
collision_rate        collided / (arrived + collided + removed)
near_miss_rate        vehicles with a near-miss / vehicles that departed
delay                 of an arrived vehicle: exit time - scheduled time - free-flow time of its movement
delay_inside          the same from its departure
stops_per_vehicle     times that somebody came to a stand (below 0.1 m/s, after above 1 m/s) / vehicles that departed
mean_jerk             |change of acceleration| / time, mean over all vehicles and steps
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from opencda_marl.core.state import Accounting

__all__ = ["EARLY_MARGIN", "EpisodeRecord", "pool"]

EARLY_MARGIN = 30.0
"""[s] before the end: vehicles that departed later are not in `success_rate_departed`."""


@dataclass(slots=True)
class EpisodeRecord:
    """Counts and sums of one episode: what pooling needs, nothing averaged yet."""

    episode: int
    seed: int  # of the traffic
    rate_vph: float
    steps: int = 0
    seconds: float = 0.0  # [s] simulated
    accounting: Accounting = field(default_factory=Accounting)
    departed: int = 0
    departed_early: int = 0
    arrived_early: int = 0  # of those
    near_missed: int | None = 0  # vehicles; None: not measured
    delay_sum: float = 0.0  # [s] over arrived vehicles
    delay_inside_sum: float = 0.0  # [s]
    travel_time_sum: float = 0.0  # [s] from departure to arrival
    longest_wait: float = 0.0  # [s] outside
    stops: int | None = None  # vehicles coming to a stand; None: not measured
    jerk_sum: float = 0.0  # [m/s^3] |jerk| over vehicle-steps
    jerk_steps: int = 0  # vehicle-steps in it
    commanded: int = 0  # vehicle-steps with a target speed
    overridden: int = 0
    refused: int = 0  # tries to put a vehicle on the road that the simulator refused
    returns: list[float] = field(default_factory=list)  # [objectives] sums over vehicles, undiscounted
    returned: int = 0  # vehicles in `returns`
    parts: dict[str, float] = field(default_factory=dict)  # reward part -> weighted sum over vehicles
    neighbour_rows: float = 0.0  # sum of real neighbour rows over acting rows
    acting_rows: int = 0

    @property
    def ended(self) -> int:
        """Vehicles that arrived, collided or were removed."""
        return self.accounting.arrived + self.accounting.collided + self.accounting.removed

    @property
    def congested(self) -> bool:
        """True when vehicles waited outside for longer than 30 s, or more than a tenth never got in."""
        stuck = self.accounting.waiting > max(3, 0.1 * self.accounting.scheduled)
        return self.longest_wait > 30.0 or stuck

    def as_json(self) -> dict[str, Any]:
        """Plain values, for files."""
        return asdict(self)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def pool(records: Iterable[EpisodeRecord], *, weights: list[float] | None = None) -> dict[str, Any]:
    """The figures of many episodes; None where nothing was there to count.

    Args:
        records: at least one episode.
        weights: of the objectives, for `return`; None: ones.
    """
    rows = list(records)
    arrived = sum(r.accounting.arrived for r in rows)
    ended = sum(r.ended for r in rows)
    departed = sum(r.departed for r in rows)
    seconds = sum(r.seconds for r in rows)
    measured = all(r.near_missed is not None for r in rows)
    comfort = all(r.stops is not None for r in rows)
    gained = 0.0
    for r in rows:
        gained += sum(w * v for w, v in zip(weights or [1.0] * len(r.returns), r.returns, strict=True))
    return {
        "episodes": len(rows),
        "vehicles": ended,
        "success_rate": _share(arrived, ended),
        "success_rate_departed": _share(sum(r.arrived_early for r in rows), sum(r.departed_early for r in rows)),
        "collision_rate": _share(sum(r.accounting.collided for r in rows), ended),
        "near_miss_rate": _share(sum(r.near_missed or 0 for r in rows), departed) if measured else None,
        "mean_delay_s": _share(sum(r.delay_sum for r in rows), arrived),
        "mean_delay_inside_s": _share(sum(r.delay_inside_sum for r in rows), arrived),
        "mean_travel_time_s": _share(sum(r.travel_time_sum for r in rows), arrived),
        "throughput_vph": _share(arrived * 3600.0, seconds),
        "running_at_end": _share(sum(r.accounting.running for r in rows), len(rows)),
        "waiting_at_end": _share(sum(r.accounting.waiting for r in rows), len(rows)),
        "stops_per_vehicle": _share(sum(r.stops or 0 for r in rows), departed) if comfort else None,
        "mean_jerk": _share(sum(r.jerk_sum for r in rows), sum(r.jerk_steps for r in rows)),
        "longest_wait_s": max((r.longest_wait for r in rows), default=0.0),
        "congested": any(r.congested for r in rows),
        "overridden_share": _share(sum(r.overridden for r in rows), sum(r.commanded for r in rows)),
        "return": _share(gained, sum(r.returned for r in rows)),
    }
