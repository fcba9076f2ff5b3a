"""The driving environment: observe, command, tick, earn; one vehicle's story is told exactly once.

    env = DrivingEnv(simulator, settings, traffic)
    step = env.reset(episode)
    while not step.done:
        action = policy(step.observation)
        step = env.step(action)
    record = env.record()

At steps that are multiples of `decision_interval` every vehicle of the policy decides; one that enters in between
decides at once, and again with the others. Between decisions the action holds, and only the envelope, the command
and the reward are computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int64

from opencda_marl.core.conflicts import Conflicts, conflict_zones
from opencda_marl.core.errors import NotFiniteError, OpenCDAError
from opencda_marl.core.metrics import EpisodeRecord
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.roads import Roads
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Action, ActionSpec, Closed, Observation, ObservationSpec, Step
from opencda_marl.core.state import Driver, Ending, Events, Schedule, TrafficState
from opencda_marl.env import OBSERVATIONS
from opencda_marl.env.book import Book
from opencda_marl.env.command import Commander
from opencda_marl.env.ledger import Ledger, join_closed
from opencda_marl.env.near_miss import Proximity
from opencda_marl.env.neighbours import road_tables
from opencda_marl.env.observe import Observer
from opencda_marl.env.reservation import Reservation
from opencda_marl.env.reward import RewardParts
from opencda_marl.env.shield import Shield
from opencda_marl.env.trajectory import Trajectory
from opencda_marl.settings.run import RunSettings

__all__ = ["DrivingEnv", "Traffic"]

Traffic = Callable[[int], tuple[Schedule, int, int]]
"""episode -> (schedule, the simulator's seed, the traffic's seed for the record)"""

_NO_SLOTS = np.zeros(0, np.int64)
_NO_FLAGS = np.zeros(0, np.bool_)


class DrivingEnv:
    """Vehicles on a crossing, driven by whoever calls `step`.

    Args:
        simulator: who moves them.
        settings: of the run.
        traffic: who comes, in each episode.
        spans: gets "act" (what turns an action into commands), "observe", "reward" and "metrics".
        synchronous: whenever a vehicle must act, all act (for interfaces where every agent acts in every step);
            intervals are cut short by vehicles that enter.

    Raises:
        ConfigError: a reward part or an observation that does not exist.
    """

    def __init__(
        self,
        simulator: Simulator,
        settings: RunSettings,
        traffic: Traffic,
        *,
        spans: Spans | None = None,
        synchronous: bool = False,
    ) -> None:
        self.roads: Roads = simulator.roads
        self.conflicts: Conflicts = conflict_zones(self.roads)
        self.objectives = OBJECTIVES
        slots, self._dt = simulator.info.slots, simulator.info.step_length
        self.state = TrafficState.empty(slots)
        self._simulator, self._settings, self._traffic = simulator, settings, traffic
        self._spans = spans or Spans(enabled=False)
        self._synchronous = synchronous
        self._interval, self._horizon = settings.decision_interval, settings.max_steps
        self._tables = road_tables(self.roads, self.conflicts)
        make_observer = OBSERVATIONS.load(settings.observation)
        self._observer: Observer = make_observer(settings, self.roads, self.conflicts)
        self._commander = Commander(settings, self._tables.route, slots)
        self._shield = Shield(settings, self._tables, slots) if settings.shield.enabled else None
        self._rules = Reservation(settings, self.roads, self.conflicts, slots)
        discount = settings.discount_per_second**self._dt  # of one step
        self._parts = RewardParts(settings.reward.weights, self._tables.route, self._dt, discount)
        self._ledger = Ledger(slots, self._parts)
        self._proximity = Proximity.of(settings, self._tables, slots)
        self._looks = self._parts.needs_pairs or settings.evaluation.enabled
        vehicle = settings.scenario.vehicle
        self._free_flow = [
            self.roads.free_flow_time(
                route, vehicle.departure_speed, vehicle.acceleration, settings.envelope.comfort_braking
            )
            for route in range(self.roads.routes)
        ]
        self._before = np.zeros_like(self.state.values)
        self._ending_of = np.zeros(slots, np.int64)  # Ending of those that ended in this step
        self._due = _NO_SLOTS  # who must act now
        self._cavs = _NO_SLOTS  # whom the policy drives
        self._ruled = False  # are there vehicles that our rules drive?
        self._book: Book | None = None
        self._trajectory: Trajectory | None = None
        self._recording = False
        self._comfort = False
        self._done = True

    @property
    def observation_spec(self) -> ObservationSpec:
        """What a vehicle sees."""
        return self._observer.spec

    @property
    def world(self) -> int:
        """How often the simulator has loaded its world anew."""
        return self.state.world

    @property
    def action_spec(self) -> ActionSpec:
        """What a policy answers with."""
        return self._commander.spec

    # ---------------------------------------------------------------- an episode

    def reset(self, episode: int) -> Step:
        """Begin an episode and run until the first vehicle must act (or, without any, until the end).

        Raises:
            SimulatorError: it could not be started, or died.
        """
        schedule, seed, traffic_seed = self._traffic(episode)
        self.state = self._simulator.reset(schedule, seed)
        self._book = Book(
            self._settings,
            self._free_flow,
            schedule,
            traffic_seed,
            self._parts,
            measured=self._looks,
            comfort=self._comfort,
        )
        self._trajectory = Trajectory() if self._recording else None
        self._ruled = bool((schedule.drivers == Driver.RULE).any())
        self._ledger.clear()
        self._rules.clear()
        if self._shield is not None:
            self._shield.clear()
        self._cavs = _NO_SLOTS
        self._due, self._done = _NO_SLOTS, False
        return self._run()

    def step(self, action: Action) -> Step:
        """Act, and run until somebody must act again or the episode ends.

        Args:
            action: one row for each row of the last observation.

        Raises:
            NotFiniteError: an action, an observation or a reward is NaN or infinite.
            ValueError: the action does not fit.
            SimulatorError: the simulator died.
        """
        if self._done:
            raise OpenCDAError("the episode is over: call reset before step")
        with self._spans("act"):
            self._commander.take(action.values, self._due)
            self._ledger.open(self._due)
        return self._run()

    def record(self) -> EpisodeRecord:
        """The figures of the finished episode.

        Raises:
            AccountingError: vehicles are missing, or counted twice.
        """
        if self._book is None or not self._done:
            raise OpenCDAError("there is no finished episode: run one to its end before asking for its record")
        record = self._book.record
        record.accounting.check(record.episode)
        return record

    def record_trajectory(self, wanted: bool) -> None:
        """Keep the tracks of the episodes that begin from now on, or stop doing so."""
        self._recording = wanted

    def measure_comfort(self, wanted: bool) -> None:
        """Measure stops and jerk in the episodes that begin from now on, or stop doing so."""
        self._comfort = wanted

    def trajectory(self) -> dict[str, np.ndarray]:
        """The tracks of this episode so far, see `Trajectory.arrays`; empty if they were not wanted."""
        return {} if self._trajectory is None else self._trajectory.arrays()

    def close(self) -> None:
        """Free the simulator."""
        self._done = True
        self._simulator.close()

    # ---------------------------------------------------------------- the loop

    def _run(self) -> Step:
        """Advance until somebody is due or the episode ends."""
        begin = self.state.step
        closed: list[Closed] = []
        final: list[Observation] = []
        while self.state.step < self._horizon:
            entered = self._advance(closed, final)
            if self.state.step >= self._horizon:
                break
            everyone = self.state.step % self._interval == 0 or (self._synchronous and len(entered) > 0)
            due = self._cavs if everyone else entered
            if len(due):
                return self._pause(due, closed, final, everyone=everyone, steps=self.state.step - begin)
        return self._finish(closed, final, steps=self.state.step - begin)

    def _advance(self, closed: list[Closed], final: list[Observation]) -> Int64[np.ndarray, " entered"]:
        """One step of the simulator; returns the slots of vehicles that the policy must drive from now on."""
        assert self._book is not None
        with self._spans("act"):
            command = self._commander.command(self.state)
            if self._shield is not None:
                self._shield.guard(command, self.state)
            if self._ruled:
                self._rules.add(command, self.state)
            np.copyto(self._before, self.state.values)
        self.state, events = self._simulator.step(command)
        ended = len(events.slots) > 0
        with self._spans("reward"):
            if self._looks:
                self._look(events)
            self._earn(events, ended=ended)
        with self._spans("metrics"):
            self._book.count(self.state, events, self._proximity)
            if self._trajectory is not None:
                self._trajectory.add(self.state, events)
            if ended:
                self._close_ended(events, closed, final)
            entered = self._admit(events.departed) if len(events.departed) else _NO_SLOTS
            if ended or len(entered):
                self._cavs = self.state.rows(Driver.CAV)
        return entered

    def _look(self, events: Events) -> None:
        """Pairs of vehicles, the last moment of those that ended included."""
        present = self.state.alive
        if len(events.slots):
            present = present.copy()
            present[events.slots] = True
        self._proximity.look(present, self.state.values, self.state.routes)

    def _earn(self, events: Events, *, ended: bool) -> None:
        rows = self._ledger.rows
        if not len(rows):
            return
        if ended:
            self._ending_of[events.slots] = events.endings
        state, near = self.state, self._proximity
        team = self._team(events) if ended else 0.0
        finite = self._ledger.earn(
            self._before, state.values, state.routes, self._ending_of, near.rate, near.predicted, team
        )
        if not finite:
            raise NotFiniteError(
                f"step {state.step}: a reward part is not finite ({', '.join(self._parts.names)})",
                batch={"ids": state.ids[rows], "before": self._before[rows], "now": state.values[rows]},
            )
        if ended:
            self._ending_of[events.slots] = 0

    def _team(self, events: Events) -> float:
        """The team's reward of a step: what happened to anybody, per vehicle that was there."""
        team = self._settings.reward.team
        arrived = int((events.endings == Ending.ARRIVED).sum())
        collided = int((events.endings == Ending.COLLIDED).sum())
        present = int(self.state.alive.sum()) + len(events.slots)
        return (team.arrival * arrived + team.collision * collided) / present

    # ---------------------------------------------------------------- beginnings and ends

    def _admit(self, departed: Int64[np.ndarray, " departed"]) -> Int64[np.ndarray, " entered"]:
        """Vehicles that entered: forget who was in their slots. Returns those that the policy drives."""
        self._ledger.enter(departed)
        self._commander.forget(departed)
        entered = departed[self.state.alive[departed] & (self.state.drivers[departed] == Driver.CAV)]
        return np.sort(entered)

    def _close_ended(self, events: Events, closed: list[Closed], final: list[Observation]) -> None:
        assert self._book is not None
        mine = self._ledger.is_open(events.slots)
        if not mine.any():
            return
        slots, endings = events.slots[mine], events.endings[mine]
        removed = endings == Ending.REMOVED
        self._close(closed, slots, ~removed, removed)
        self._book.add_lives(self._ledger.life[slots])
        if removed.any():
            final.append(self._observe(slots[removed]))

    def _close(
        self,
        closed: list[Closed],
        slots: Int64[np.ndarray, " closed"],
        terminated: Bool[np.ndarray, " closed"],
        truncated: Bool[np.ndarray, " closed"],
    ) -> None:
        """Their decisions end here."""
        found = self._ledger.close(slots, self.state.ids, terminated, truncated)
        closed.append(found)
        if self._trajectory is not None:
            self._trajectory.earn(self.state.step, found)

    def _observe(self, rows: Int64[np.ndarray, " rows"]) -> Observation:
        with self._spans("observe"):
            return self._observer.observe(self.state, self._commander.held, self._commander.acted, rows)

    def _pause(
        self,
        due: Int64[np.ndarray, " due"],
        closed: list[Closed],
        final: list[Observation],
        *,
        everyone: bool,
        steps: int,
    ) -> Step:
        """Somebody must act."""
        assert self._book is not None
        self._due = due
        with self._spans("reward"):
            if everyone and len(self._ledger.rows):
                rows = self._ledger.rows
                on = np.zeros(len(rows), np.bool_)
                self._close(closed, rows, on, on)
            observation = self._observe(due)
            self._book.count_rows(observation)
            return Step(
                observation=observation,
                closed=join_closed(closed, len(self.objectives)),
                final=self._join(final),
                everyone=everyone,
                done=False,
                steps=steps,
            )

    def _finish(self, closed: list[Closed], final: list[Observation], *, steps: int) -> Step:
        """The episode is over: whoever is still driving is cut off, not ended."""
        assert self._book is not None
        rows = self._ledger.rows
        if len(rows):
            cut = np.ones(len(rows), np.bool_)
            self._close(closed, rows, ~cut, cut)
            self._book.add_lives(self._ledger.life[rows])
            final.append(self._observe(rows))
        self._due, self._done = _NO_SLOTS, True
        self._book.finish(self.state)
        return Step(
            observation=self._observe(_NO_SLOTS),
            closed=join_closed(closed, len(self.objectives)),
            final=self._join(final),
            everyone=True,
            done=True,
            steps=steps,
        )

    def _join(self, pieces: list[Observation]) -> Observation:
        """Final views in the order of the truncated rows; the scene is that of the last of them."""
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return self._nothing()
        return Observation(
            ids=np.concatenate([piece.ids for piece in pieces]),
            slots=np.concatenate([piece.slots for piece in pieces]),
            ego=np.concatenate([piece.ego for piece in pieces]),
            neighbours=np.concatenate([piece.neighbours for piece in pieces]),
            counts=np.concatenate([piece.counts for piece in pieces]),
            scene=pieces[-1].scene,
        )

    def _nothing(self) -> Observation:
        spec = self.observation_spec
        return Observation(
            ids=_NO_SLOTS,
            slots=_NO_SLOTS,
            ego=np.zeros((0, len(spec.ego)), np.float32),
            neighbours=np.zeros((0, spec.max_neighbours, len(spec.neighbour)), np.float32),
            counts=np.zeros(0, np.int32),
            scene=np.zeros(spec.scene_size, np.float32),
        )
