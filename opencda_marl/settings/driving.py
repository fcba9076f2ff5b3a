"""What a vehicle sees, does and is rewarded for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between

__all__ = [
    "EnvelopeSettings",
    "NearMissSettings",
    "NeighbourSettings",
    "RewardSettings",
    "ShieldSettings",
    "TeamSettings",
]


@dataclass(frozen=True, slots=True)
class NeighbourSettings:
    """Which other vehicles an ego vehicle sees."""

    selection: Literal["conflict", "nearest"] = "conflict"  # those whose paths cross ours, or the nearest
    max: Annotated[int, Between(1, 64)] = 12  # rows
    radius: Annotated[float, Between(1, 1000)] = 150.0  # [m] V2X range
    intent: Literal["shared", "none"] = "shared"  # is the others' movement known?
    dropout: Annotated[float, Between(0, 1)] = 0.0  # share of rows that get lost on the way, drawn at each look


@dataclass(frozen=True, slots=True)
class EnvelopeSettings:
    """Upper bound of the commanded speed: the limits ahead, reached with comfortable braking."""

    comfort_braking: Annotated[float, Between(0.5, 4.5)] = 3.0  # [m/s^2]
    levels: Annotated[list[float], Between(0, 1)] = field(
        default_factory=lambda: [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]
    )  # discrete actions: fractions of the envelope


@dataclass(frozen=True, slots=True)
class ShieldSettings:
    """A guard behind the policy that lets no vehicle into a zone that another will be in; it needs V2X."""

    enabled: bool = False  # true: hold back who cannot be let in, and drive whoever cannot stop any more
    margin: Annotated[float, Between(0, 5)] = 0.2  # [s] between two vehicles in a zone


@dataclass(frozen=True, slots=True)
class NearMissSettings:
    """When two vehicles came too close without touching."""

    time_to_collision: Annotated[float, Between(0.1, 10)] = 2.0  # [s] same lane
    time_gap: Annotated[float, Between(0.1, 10)] = 1.0  # [s] between the two at a shared point
    horizon: Annotated[float, Between(0.1, 20)] = 3.0  # [s] one of the two is at most so far from the shared point


@dataclass(frozen=True, slots=True)
class TeamSettings:
    """The team's reward: what happens to everybody, per vehicle present."""

    arrival: Annotated[float, Between(-1e6, 1e6)] = 1.0  # each arrival
    collision: Annotated[float, Between(-1e6, 1e6)] = -5.0  # each collided vehicle


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Weights of the named parts; 0 switches a part off and it costs nothing. See docs/observation-and-reward.md."""

    weights: Annotated[dict[str, float], Between(-1e6, 1e6)] = field(
        default_factory=lambda: {"delay": -0.1, "collision": -20.0, "near_miss": -0.6}
    )  # part -> weight; names: `opencda-marl list rewards`
    near_miss: NearMissSettings = field(default_factory=NearMissSettings)
    team: TeamSettings = field(default_factory=TeamSettings)
