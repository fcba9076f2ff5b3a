"""Where the traffic runs and who drives into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between

__all__ = [
    "CARLA_VERSION",
    "WITH_SERVER",
    "DemandSettings",
    "PeakSettings",
    "ScenarioSettings",
    "SimulatorSettings",
    "VehicleSettings",
]

CARLA_VERSION = "0.9.16"
"""Of server and client: the only one that is used."""

WITH_SERVER = ("carla", "cosim")
"""Backends that need a CARLA server."""


@dataclass(frozen=True, slots=True)
class VehicleSettings:
    """The one type of vehicle."""

    length: Annotated[float, Between(0.5, 20)] = 5.0  # [m]
    width: Annotated[float, Between(0.3, 4)] = 1.8  # [m]
    acceleration: Annotated[float, Between(0.1, 10)] = 2.6  # [m/s^2]
    braking: Annotated[float, Between(0.1, 12)] = 4.5  # [m/s^2]
    departure_speed: Annotated[float, Between(0, 40)] = 13.0  # [m/s]
    min_gap: Annotated[float, Between(0, 10)] = 2.5  # [m] human drivers, and for letting vehicles in
    sigma: Annotated[float, Between(0, 1)] = 0.5  # Krauss imperfection of human drivers


@dataclass(frozen=True, slots=True)
class ScenarioSettings:
    """The crossing."""

    network: str = "intersection"  # a bundled scenario's name, or a path to a .net.xml (relative: to the profile)
    map: str | None = None  # OpenDRIVE file for CARLA; null: the one beside the network
    vehicle: VehicleSettings = field(default_factory=VehicleSettings)


@dataclass(frozen=True, slots=True)
class SimulatorSettings:
    """The backend that moves the vehicles."""

    backend: Literal["auto", "libsumo", "traci", "carla", "cosim"] = "auto"  # auto: libsumo, else the slower traci
    step_length: Annotated[float, Between(0.01, 1.0)] = 0.05  # [s]
    gui: bool = False  # sumo-gui, through TraCI
    deadline: Annotated[float, Between(0.1, 1e6)] = 30.0  # [s] for an answer of a SUMO process; none with a gui


@dataclass(frozen=True, slots=True)
class PeakSettings:
    """A busier spell inside an episode."""

    begin: Annotated[float, Between(0, None)] = 0.0  # [s]
    end: Annotated[float, Between(0, None)] = 0.0  # [s] not after begin: no peak
    factor: Annotated[float, Between(0, 20)] = 1.0  # times the rate


@dataclass(frozen=True, slots=True)
class DemandSettings:
    """Flows of vehicles."""

    rate_vph: Annotated[float | list[float], Between(0, 3000)] = 300.0  # [vehicles/h/lane]; a list: see rate_draw
    rate_draw: Literal["choice", "range", "spread"] = "choice"  # of a list: one, or between its ends (spread: evenly)
    ramp_episodes: Annotated[int, Between(0, None)] = 0  # of training: so long the range's upper end grows; 0: never
    ramp_from: Annotated[float, Between(0, 3000)] = 400.0  # [vehicles/h/lane] where it begins, at most its end
    arrivals: Literal["poisson", "exact"] = "poisson"  # random gaps, or equal ones
    turning_shares: Annotated[list[float] | None, Between(0, 1)] = None  # right, straight, left; null: equal lanes
    cav_share: Annotated[float, Between(0, 1)] = 1.0  # share driven by the policy
    others: Literal["human", "rule_based"] = "human"  # who drives the rest
    car_following: Literal["Krauss", "IDM"] = "Krauss"  # of human drivers
    speed_deviation: Annotated[float, Between(0, 0.5)] = 0.1  # spread of human drivers' speed factors
    peak: PeakSettings = field(default_factory=PeakSettings)

    @property
    def ramp(self) -> int:
        """Episodes over which the range grows; 0: there is no range, or it begins at its end."""
        rates = self.rate_vph
        grows = isinstance(rates, list) and self.rate_draw != "choice" and self.ramp_from < rates[-1]
        return self.ramp_episodes if grows else 0
