"""An action in [-1, 1] (or an index) -> a target speed in m/s. The only place where bounds of it live.

The upper bound is the *envelope*: the fastest speed from which comfortable braking still meets every limit
ahead. Without SUMO's own safe-speed check nothing else would slow a vehicle down for a turn:

    v_max(s) = min over limits ahead of sqrt(v_limit^2 + 2 b d),   d = distance to where the limit begins

While an action is held the envelope moves on with the vehicle, each step.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int8, Int16, Int64

from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.spec import ActionSpec
from opencda_marl.core.state import Command, Driver, Field, TrafficState
from opencda_marl.env.compiled import kernel
from opencda_marl.env.neighbours import EXIT, EXIT_LIMIT, INSIDE_LIMIT, LIMIT, STOP_LINE
from opencda_marl.settings.run import RunSettings

__all__ = ["Commander", "action_spec", "envelope", "envelopes"]

_SPEED, _PROGRESS = int(Field.SPEED), int(Field.PROGRESS)
_CAV = int(Driver.CAV)


@kernel
def envelope(progress: float, route: Float64[np.ndarray, " columns"], braking: float) -> float:
    """The fastest speed that respects the limits here and ahead. [m/s]

    Args:
        progress: [m] front bumper along the route.
        route: row of `RoadTables.route`.
        braking: [m/s^2] comfortable.
    """
    bound = route[EXIT_LIMIT]
    if progress < route[EXIT]:
        bound = min(route[INSIDE_LIMIT], np.sqrt(bound * bound + 2.0 * braking * (route[EXIT] - progress)))
    if progress < route[STOP_LINE]:
        bound = min(route[LIMIT], np.sqrt(bound * bound + 2.0 * braking * (route[STOP_LINE] - progress)))
    return float(bound)


@kernel
def envelopes(
    progress: Float64[np.ndarray, " rows"],
    routes: Int16[np.ndarray, " rows"],
    route: Float64[np.ndarray, "routes 6"],
    braking: float,
) -> Float64[np.ndarray, " rows"]:
    """The envelope of many vehicles, see `envelope`. [m/s]"""
    out = np.empty(len(routes))
    for r in range(len(routes)):
        out[r] = envelope(progress[r], route[routes[r]], braking)
    return out


@kernel
def _target_speeds(
    values: Float64[np.ndarray, "slots fields"],
    alive: Bool[np.ndarray, " slots"],
    drivers: Int8[np.ndarray, " slots"],
    routes: Int16[np.ndarray, " slots"],
    actions: Float64[np.ndarray, " slots"],
    route: Float64[np.ndarray, "routes 6"],
    braking: float,
    accelerations: Float64[np.ndarray, " 3"],
    target: Float64[np.ndarray, " slots"],
    controlled: Bool[np.ndarray, " slots"],
) -> None:
    """Write target speed and mask of every slot; `accelerations`: step length (0: actions are speeds), up, down."""
    step, up, down = accelerations
    for s in range(len(alive)):
        controlled[s] = alive[s] and drivers[s] == _CAV
        target[s] = 0.0
        if not controlled[s]:
            continue
        bound = envelope(values[s, _PROGRESS], route[routes[s]], braking)
        a = actions[s]
        if step > 0.0:
            wish = values[s, _SPEED] + step * (a * up if a >= 0.0 else a * down)
            target[s] = min(max(wish, 0.0), bound)
        else:
            target[s] = 0.5 * (a + 1.0) * bound


@kernel
def _take(
    actions: Float32[np.ndarray, "rows actions"],
    slots: Int64[np.ndarray, " rows"],
    levels: Float64[np.ndarray, " levels"],
    held: Float64[np.ndarray, " slots"],
    acted: Bool[np.ndarray, " slots"],
) -> int:
    """Hold each row's action in [-1, 1] at its slot. Returns the first bad row, or -1."""
    for r in range(len(slots)):
        a = float(actions[r, 0])
        if len(levels) > 0:
            index = int(a) if a >= 0.0 and a < len(levels) else -1
            if index < 0 or float(index) != a:
                return r
            a = 2.0 * levels[index] - 1.0
        elif not (a >= -1.0 and a <= 1.0):
            return r
        held[slots[r]] = a
        acted[slots[r]] = True
    return -1


def action_spec(settings: RunSettings) -> ActionSpec:
    """What a policy must answer with."""
    levels = tuple(settings.envelope.levels) if settings.action == "levels" else ()
    return ActionSpec(settings.action, size=1, levels=levels)


class Commander:
    """Holds each vehicle's last action and turns it into a command, step after step.

    Args:
        settings: kind of action, envelope, vehicle, step length.
        route: `RoadTables.route`.
        slots: of the simulator.
    """

    def __init__(self, settings: RunSettings, route: Float64[np.ndarray, "routes 6"], slots: int) -> None:
        self.spec = action_spec(settings)
        self.held = np.zeros(slots)  # [slots] last action in [-1, 1]; levels: as the fraction that they stand for
        self.acted = np.zeros(slots, np.bool_)  # [slots] False: `held` has no meaning yet
        self._route = route
        self._braking = settings.envelope.comfort_braking
        self._levels = np.array(self.spec.levels, np.float64)
        vehicle = settings.scenario.vehicle
        step = settings.simulator.step_length if settings.action == "acceleration" else 0.0
        self._accelerations = np.array([step, vehicle.acceleration, vehicle.braking])
        self._command = Command(np.zeros(slots), np.zeros(slots, np.bool_))

    def forget(self, slots: Int64[np.ndarray, " rows"]) -> None:
        """New vehicles are in these slots: they have not acted."""
        self.held[slots] = 0.0
        self.acted[slots] = False

    def take(self, actions: Float32[np.ndarray, "rows actions"], slots: Int64[np.ndarray, " rows"]) -> None:
        """Hold what a policy decided.

        Args:
            actions: in [-1, 1], or an index into the levels.
            slots: whose they are.

        Raises:
            NotFiniteError: an action is NaN or infinite.
            ValueError: wrong shape, out of [-1, 1], or no such level.
        """
        if actions.shape != (len(slots), 1):
            raise ValueError(f"actions have shape {actions.shape}; {len(slots)} vehicles wait for ({len(slots)}, 1)")
        bad = _take(np.ascontiguousarray(actions, np.float32), slots, self._levels, self.held, self.acted)
        if bad >= 0:
            value = float(actions[bad, 0])
            if not np.isfinite(value):
                raise NotFiniteError(f"the action of row {bad} is {value}", batch={"actions": actions, "slots": slots})
            known = f"an index below {len(self._levels)}" if len(self._levels) else "a number in [-1, 1]"
            raise ValueError(f"the action of row {bad} is {value}, not {known}")

    def command(self, state: TrafficState) -> Command:
        """This step's target speeds; the same object each time.

        Vehicles that the simulator or a rule drives are not controlled here.
        """
        command = self._command
        _target_speeds(
            state.values,
            state.alive,
            state.drivers,
            state.routes,
            self.held,
            self._route,
            self._braking,
            self._accelerations,
            command.target_speed,
            command.controlled,
        )
        return command
