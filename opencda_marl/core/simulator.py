"""The seam to every simulator. `tests/contract/simulator_contract.py` is its proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from opencda_marl.core.roads import Roads
from opencda_marl.core.state import Command, Events, Schedule, TrafficState

__all__ = ["Simulator", "SimulatorInfo"]


@dataclass(frozen=True, slots=True)
class SimulatorInfo:
    """What a simulator says about itself, for the init line and run.json."""

    backend: str  # "libsumo", "traci", "carla", …
    versions: dict[str, str] = field(default_factory=dict)
    step_length: float = 0.05  # [s]
    slots: int = 0  # capacity of the state's arrays
    notes: tuple[str, ...] = ()


class Simulator(Protocol):
    """Traffic on the crossing.

    `reset` and `step` return the same `TrafficState` object each time, with its arrays changed in
    place. A vehicle that waits outside because there is no room is counted in `Events.waiting`.
    """

    info: SimulatorInfo
    roads: Roads

    def reset(self, schedule: Schedule, seed: int) -> TrafficState:
        """Begin an episode; no vehicle is in yet, step 0, time 0.

        Args:
            schedule: who enters where and when.
            seed: the simulator's own seed, 1 <= seed < 2**31.

        Raises:
            SimulatorError: it could not be started.
        """

    def step(self, command: Command) -> tuple[TrafficState, Events]:
        """Write the command, advance one step, read everything.

        Raises:
            SimulatorError: it died or said something impossible.
            DeadlineError: it did not answer in time.
        """

    def close(self) -> None:
        """Free everything; may be called twice."""
