"""Tabular Q-learning: the bins that make a state of what a vehicle sees, and how the table learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between
from opencda_marl.settings.networks import LearnerSettings

__all__ = ["QlearningSettings"]


@dataclass(frozen=True, slots=True)
class QlearningSettings(LearnerSettings):
    """Q-learning. Edges are in the units of the observation, divided by its scale (`opencda-marl describe`)."""

    learning_rate: Annotated[float, Between(0, 1, open_low=True)] = 0.05  # share of the error that an entry takes over
    schedule: Literal["visits", "constant"] = "visits"  # visits: 1/n for an entry's n-th, until that is learning_rate
    epsilon: Annotated[float, Between(0, 1)] = 1.0  # share of random actions at the beginning
    epsilon_end: Annotated[float, Between(0, 1)] = 0.02  # and after `exploration_fraction`
    exploration_fraction: Annotated[float, Between(0, 1, open_low=True)] = 0.5  # of the budget, linear
    initial_value: Annotated[float, Between(-1e6, 1e6)] = -1.0  # of every entry; above what is found: try everything
    ego: Annotated[dict[str, list[float]], Between(-1000, 1000)] = field(
        default_factory=lambda: {
            "stop_line": [0.0, 0.15, 0.35],
            "speed": [0.15, 0.35, 0.6],
            "leader_gap": [0.15],
        }
    )  # ego feature -> edges of its bins; []: not used
    critical: Annotated[dict[str, list[float]], Between(-1000, 1000)] = field(
        default_factory=lambda: {
            "gap_if_first": [-0.33, 0.0, 0.23],
            "gap_if_second": [-0.33, 0.0, 0.23],
            "entry_difference": [0.0],
        }
    )  # feature of the conflicting neighbour with the smallest time gap -> edges; []: not used
    nearest: Annotated[dict[str, list[float]], Between(-1000, 1000)] = field(
        default_factory=dict
    )  # feature -> edges, for its smallest value over all conflicting neighbours
    conflicts: Annotated[list[float], Between(0, 1000)] = field(
        default_factory=list
    )  # [vehicles] edges for the number of conflicting neighbours; none is a bin of its own
