"""`TrafficState` -> what each vehicle sees. One compiled call for all rows, ego and neighbours together."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int64

from opencda_marl.core.conflicts import Conflicts
from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.roads import Roads
from opencda_marl.core.spec import Observation, ObservationSpec
from opencda_marl.core.state import TrafficState
from opencda_marl.env.flat_layout import observe_flat
from opencda_marl.env.full_layout import observe_full
from opencda_marl.env.layouts import FULL_NEIGHBOUR, PLAIN_NEIGHBOUR, flat_spec, full_spec, plain_spec
from opencda_marl.env.neighbours import road_tables
from opencda_marl.env.view import BRAKING, CONFLICT, HARDEST, INTENT, LANES, PARAMETERS, PULL, RADIUS, VEHICLE
from opencda_marl.settings.run import RunSettings

__all__ = ["FlatObserver", "FullObserver", "Observer", "PlainObserver", "drop_rows", "ego9", "ego43", "full", "plain"]


class Observer(Protocol):
    """A layout at work."""

    spec: ObservationSpec

    def observe(
        self,
        state: TrafficState,
        held: Float64[np.ndarray, " slots"],
        acted: Bool[np.ndarray, " slots"],
        rows: Int64[np.ndarray, " rows"],
    ) -> Observation:
        """What the vehicles in slots `rows` see now; the arrays are the caller's to keep.

        A row may be a vehicle that has just ended (its slot holds its last values); others see living ones only.

        Args:
            state: all vehicles.
            held: last action of each slot, in [-1, 1].
            acted: False where `held` has no meaning.
            rows: slots of those who look.

        Raises:
            NotFiniteError: the simulator reported NaN or infinity.
        """


def _parameters(settings: RunSettings, roads: Roads) -> Float64[np.ndarray, " parameters"]:
    parameters = np.zeros(PARAMETERS)
    parameters[RADIUS] = settings.neighbours.radius
    parameters[VEHICLE] = settings.scenario.vehicle.length
    parameters[BRAKING] = settings.envelope.comfort_braking
    parameters[INTENT] = settings.neighbours.intent == "shared"
    parameters[CONFLICT] = settings.neighbours.selection == "conflict"
    parameters[HARDEST] = settings.scenario.vehicle.braking
    parameters[PULL] = settings.scenario.vehicle.acceleration
    parameters[LANES] = max(int(roads.lane.max()), 1)
    return parameters


def _check(finite: bool, state: TrafficState) -> None:
    if not finite:
        used = state.alive | (state.ids >= 0)
        raise NotFiniteError(
            f"step {state.step}: the simulator reported a value that is not finite",
            batch={"ids": state.ids[used], "values": state.values[used]},
        )


class FullObserver:
    """Layout `full`: ego features and neighbour rows.

    Args:
        settings: selection, radius, number of rows, intent.
        roads: the crossing.
        conflicts: its zones.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts) -> None:
        self.spec = full_spec(settings.neighbours.max)
        self._tables = road_tables(roads, conflicts, intent=settings.neighbours.intent == "shared")
        self._parameters = _parameters(settings, roads)
        self._dropout, self._seed = settings.neighbours.dropout, settings.seed

    def observe(
        self,
        state: TrafficState,
        held: Float64[np.ndarray, " slots"],
        acted: Bool[np.ndarray, " slots"],
        rows: Int64[np.ndarray, " rows"],
    ) -> Observation:
        """See `Observer.observe`."""
        spec, count = self.spec, len(rows)
        seen = Observation(
            ids=state.ids[rows],
            slots=rows,
            ego=np.empty((count, len(spec.ego)), np.float32),
            neighbours=np.empty((count, spec.max_neighbours, len(spec.neighbour)), np.float32),
            counts=np.empty(count, np.int32),
            scene=np.empty(spec.scene_size, np.float32),
        )
        finite = observe_full(
            state.time,
            state.values,
            state.alive,
            state.drivers,
            state.routes,
            held,
            acted,
            rows,
            self._tables,
            self._parameters,
            seen.ego,
            seen.neighbours,
            seen.counts,
            seen.scene,
        )
        _check(finite, state)
        if self._dropout > 0.0 and count:
            drop_rows(seen, self._dropout, state.step, self._seed)
        return seen


class PlainObserver:
    """Layout `plain`: that of `full` with fewer columns.

    Args:
        settings: as of `full`.
        roads: the crossing.
        conflicts: its zones; they still say who is shown.
    """

    def __init__(self, settings: RunSettings, roads: Roads, conflicts: Conflicts) -> None:
        self.spec = plain_spec(settings.neighbours.max)
        self._full = FullObserver(settings, roads, conflicts)
        self._columns = np.array([FULL_NEIGHBOUR.index(feature) for feature in PLAIN_NEIGHBOUR])

    def observe(
        self,
        state: TrafficState,
        held: Float64[np.ndarray, " slots"],
        acted: Bool[np.ndarray, " slots"],
        rows: Int64[np.ndarray, " rows"],
    ) -> Observation:
        """See `Observer.observe`."""
        seen = self._full.observe(state, held, acted, rows)
        return replace(seen, neighbours=np.ascontiguousarray(seen.neighbours[:, :, self._columns]))


def drop_rows(seen: Observation, share: float, step: int, seed: int) -> None:
    """Take a share of the neighbour rows out, as if they had got lost on the way; the others move up.

    Which ones follows from vehicle, step, row and seed alone: a resumed run loses the same ones. What a vehicle's own
    sensors say of its leader and follower stays, and so does the scene, which is the critic's.

    Args:
        seen: changed in place.
        share: that is lost.
        step: of the episode.
        seed: of the run.
    """
    room = seen.neighbours.shape[1]
    mixed = seen.ids.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    mixed = mixed + np.arange(room, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = mixed + np.uint64((step * 0xBF58476D1CE4E5B9 + seed * 0x94D049BB133111EB) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # Steele et al. 2014, SplitMix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    drawn = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53  # [rows, room]
    kept = (np.arange(room) < seen.counts[:, None]) & (drawn >= share)
    order = np.argsort(~kept, axis=1, kind="stable")
    seen.neighbours[:] = np.where(kept[:, :, None], seen.neighbours, 0.0)
    seen.neighbours[:] = np.take_along_axis(seen.neighbours, order[:, :, None], axis=1)
    seen.counts[:] = kept.sum(axis=1)


class FlatObserver:
    """Layouts `ego9` and `ego43`: one vector.

    Args:
        name: of the layout.
        settings: radius of sight.
        roads: the crossing.
        conflicts: its zones.
    """

    def __init__(self, name: str, settings: RunSettings, roads: Roads, conflicts: Conflicts) -> None:
        self.spec: ObservationSpec = flat_spec(name)
        self._tables = road_tables(roads, conflicts)
        self._lanes = np.ascontiguousarray(roads.lane, np.int64)
        self._parameters = _parameters(settings, roads)

    def observe(
        self,
        state: TrafficState,
        held: Float64[np.ndarray, " slots"],  # noqa: ARG002 - these layouts do not show actions
        acted: Bool[np.ndarray, " slots"],  # noqa: ARG002
        rows: Int64[np.ndarray, " rows"],
    ) -> Observation:
        """See `Observer.observe`."""
        count = len(rows)
        seen = Observation(
            ids=state.ids[rows],
            slots=rows,
            ego=np.empty((count, len(self.spec.ego)), np.float32),
            neighbours=np.empty((count, 0, 0), np.float32),
            counts=np.zeros(count, np.int32),
            scene=np.empty(self.spec.scene_size, np.float32),
        )
        finite = observe_flat(
            state.values,
            state.alive,
            state.drivers,
            state.routes,
            rows,
            self._tables,
            self._lanes,
            self._parameters,
            seen.ego,
            seen.scene,
        )
        _check(finite, state)
        return seen


def full(settings: RunSettings, roads: Roads, conflicts: Conflicts) -> Observer:
    """The default layout."""
    return FullObserver(settings, roads, conflicts)


def plain(settings: RunSettings, roads: Roads, conflicts: Conflicts) -> Observer:
    """The default layout without what conflicts tell."""
    return PlainObserver(settings, roads, conflicts)


def ego9(settings: RunSettings, roads: Roads, conflicts: Conflicts) -> Observer:
    """Nine numbers on the vehicle itself."""
    return FlatObserver("ego9", settings, roads, conflicts)


def ego43(settings: RunSettings, roads: Roads, conflicts: Conflicts) -> Observer:
    """Eight numbers on the vehicle itself and seven on each of the five nearest."""
    return FlatObserver("ego43", settings, roads, conflicts)
