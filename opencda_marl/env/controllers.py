"""Drivers without learning: each has `act` and no `update`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.conflicts import Conflicts
from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.roads import Roads
from opencda_marl.core.spec import Action, Observation
from opencda_marl.core.state import Driver, Field, TrafficState
from opencda_marl.env import CONTROLLERS
from opencda_marl.env.command import action_spec, envelopes
from opencda_marl.env.neighbours import road_tables
from opencda_marl.env.reservation import HOLD, Reservation
from opencda_marl.settings.run import RunSettings

__all__ = ["SUMO_DRIVES", "Controller", "FullSpeed", "Priority", "Random", "RuleBased", "make_controller"]


SUMO_DRIVES: dict[str, str | None] = {
    "priority": None,
    "all_way_stop": "intersection_all_way_stop",
    "signals": "intersection_signals",
}
"""Controllers under which all vehicles are SUMO's, and the form of the crossing that they need; None: as it is."""


class Controller(Protocol):
    """Decides for the rows of an observation."""

    def act(self, observation: Observation, state: TrafficState) -> Action:
        """One action for each row.

        Args:
            observation: who must act.
            state: all vehicles, as the simulator knows them.
        """


class Random:
    """Uniformly random, drawn anew at each decision.

    Args:
        settings: kind of action.
        roads: not looked at.
        conflicts: not looked at.
        rng: of the controller.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts, rng: np.random.Generator) -> None:
        del roads, conflicts
        self._levels = len(action_spec(settings).levels)
        self._rng = rng

    def act(self, observation: Observation, state: TrafficState) -> Action:  # noqa: ARG002 - blind
        """See `Controller.act`."""
        shape = (len(observation), 1)
        if self._levels:
            return Action(self._rng.integers(self._levels, size=shape).astype(np.float32))
        return Action(self._rng.uniform(-1.0, 1.0, shape).astype(np.float32))


class FullSpeed:
    """As fast as the envelope, whoever is in the way.

    Args:
        settings: kind of action.
        roads: not looked at.
        conflicts: not looked at.
        rng: not used.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts, rng: np.random.Generator) -> None:
        del roads, conflicts, rng
        levels = action_spec(settings).levels
        self._action = float(np.argmax(levels)) if levels else 1.0

    def act(self, observation: Observation, state: TrafficState) -> Action:  # noqa: ARG002 - blind
        """See `Controller.act`."""
        return Action(np.full((len(observation), 1), self._action, np.float32))


class Priority:
    """The simulator's own drivers: the traffic is made with `Driver.HUMAN` for all, so nobody asks this one.

    Which rule they keep, right of way, stop signs or lights, is the network's (`SUMO_DRIVES`).

    Args:
        settings, roads, conflicts, rng: not used.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts, rng: np.random.Generator) -> None:
        del settings, roads, conflicts, rng

    def act(self, observation: Observation, state: TrafficState) -> Action:  # noqa: ARG002 - drives nobody
        """An empty action.

        Raises:
            OpenCDAError: there are vehicles to drive.
        """
        if len(observation):
            raise OpenCDAError(
                f"a controller whose vehicles are all SUMO's was asked to drive {len(observation)} vehicles",
                fix="make the traffic with human drivers only (demand.cav_share=0, demand.others=human)",
            )
        return Action(np.zeros((0, 1), np.float32))


class RuleBased:
    """First come, first served, see `env.reservation`.

    Args:
        settings: kind of action, vehicle, envelope.
        roads: the crossing.
        conflicts: its zones.
        rng: not used.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts, rng: np.random.Generator) -> None:
        del rng
        self._settings, self._conflicts, self._roads = settings, conflicts, roads
        self._tables = road_tables(roads, conflicts)
        self._levels = np.array(action_spec(settings).levels)
        self._reservation: Reservation | None = None
        self._slots = 0

    def act(self, observation: Observation, state: TrafficState) -> Action:
        """See `Controller.act`."""
        if self._reservation is None or self._slots != len(state.alive):
            self._slots = len(state.alive)
            self._reservation = Reservation(self._settings, self._roads, self._conflicts, self._slots)
        ours = state.alive & (state.drivers == Driver.CAV)
        asked = None if len(observation) == ours.sum() else observation.slots
        wanted = self._reservation.speeds(state, ours, asked)[observation.slots]
        values, routes = state.values[observation.slots], state.routes[observation.slots]
        return Action(np.asarray(self._actions(wanted, values, routes), np.float32)[:, None])

    def _actions(
        self, wanted: Float64[np.ndarray, " rows"], values: Float64[np.ndarray, "rows fields"], routes: np.ndarray
    ) -> np.ndarray:
        """The action that brings each vehicle to its wanted speed."""
        if self._settings.action == "acceleration":
            change = (wanted - values[:, Field.SPEED]) / HOLD
            vehicle = self._settings.scenario.vehicle
            action = np.where(change >= 0.0, change / vehicle.acceleration, change / vehicle.braking)
            return np.asarray(np.clip(action, -1.0, 1.0))
        progress = np.ascontiguousarray(values[:, Field.PROGRESS])
        bounds = envelopes(progress, routes, self._tables.route, self._settings.envelope.comfort_braking)
        share = np.clip(wanted / bounds, 0.0, 1.0)
        if len(self._levels):
            # At full acceleration the engine is the limit: the next level up does no harm, and the one below would
            # never let a standing vehicle start. Otherwise the fastest level that is not too fast.
            rising = wanted >= values[:, Field.SPEED] + 0.9 * HOLD * self._settings.scenario.vehicle.acceleration
            apart = self._levels[None, :] - share[:, None]  # [rows, levels]
            above = np.where(apart >= -1e-9, apart, 1.0 - apart).argmin(axis=1)  # none above: the highest
            below = np.where(apart <= 1e-9, -apart, 1.0 + apart).argmin(axis=1)  # none below: the lowest
            return np.asarray(np.where(rising, above, below))
        return np.asarray(2.0 * share - 1.0)


def make_controller(
    name: str, settings: RunSettings, roads: Roads, conflicts: Conflicts, rng: np.random.Generator
) -> Controller:
    """A controller by name.

    Args:
        name: see `opencda-marl list controllers`.
        settings: of the run.
        roads: the crossing.
        conflicts: its zones.
        rng: for those that draw.

    Raises:
        ConfigError: there is no such controller.
    """
    made: Controller = CONTROLLERS.load(name)(settings, roads, conflicts, rng)
    return made
