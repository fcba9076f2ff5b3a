"""What the training loop writes down: lines, checkpoints, scalars, events. It watches the loop and never steers it.

Longer than other modules, because what is kept at an episode's end must be one state, so who writes it stands together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from opencda_marl import __version__
from opencda_marl.core.budget import Budget, Pace
from opencda_marl.core.errors import CheckpointError, OpenCDAError
from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Listener, Note
from opencda_marl.core.forms import with_forms
from opencda_marl.core.metrics import EpisodeRecord, pool
from opencda_marl.core.run_folder import RunFolder, read_config, read_run
from opencda_marl.core.scalars import ScalarWriter
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Learner, LearnerState, ObservationSpec
from opencda_marl.crew import Alone, Crew, Part, joined
from opencda_marl.held_out import HeldOut
from opencda_marl.settings.run import RunSettings

__all__ = [
    "TIMING_FIELDS",
    "Done",
    "Journal",
    "Recorder",
    "check_acting",
    "episode_line",
    "objective_weights",
    "recorded",
    "wants_trajectory",
]

TIMING_FIELDS = ("wall_s", "ms_per_step", "spans")
"""What a clock decides in a line or a checkpoint; all other fields are equal in two runs of one seed."""

_WINDOW = 20  # episodes that `best` looks back
_SLOW = 0.2  # [s] an update that lasts longer is told of


@dataclass(slots=True)
class Done:
    """What a run has done at an episode boundary; part of its checkpoints."""

    episodes: int = 0
    env_steps: int = 0
    wall_s: float = 0.0  # [s] of training, over all resumes
    window: list[list[int]] = field(default_factory=list)  # of the last episodes: arrived, ended
    best: list[float] = field(default_factory=list)  # was the window full, its success rate, episode


def objective_weights(settings: RunSettings) -> list[float] | None:
    """Weights of the objectives in `return`: the fixed preference where there is one, else None (ones)."""
    return list(settings.preference.fixed) if settings.algorithm.startswith("pc") else None


def recorded(path: Path, *names: str) -> dict[str, Any]:
    """run.json, with these fields in it.

    Raises:
        CheckpointError: one is missing.
    """
    facts = read_run(path)
    missing = [name for name in names if name not in facts]
    if missing:
        raise CheckpointError(
            f"{path / 'run.json'} is broken: it has no {', '.join(missing)}",
            fix="put the file back from a copy, or begin a new run",
        )
    return facts


class Recorder(Protocol):
    """What the loop tells of itself: to a `Journal`, or to a `Member` where it is not worker 0's."""

    @property
    def episode(self) -> int:
        """The one under way, from 1."""

    @property
    def over(self) -> bool:
        """Is the budget used up?"""

    @property
    def counted(self) -> float:
        """The share of the budget that is done, for schedules."""

    @property
    def ending(self) -> bool:
        """Is the budget used up with the episodes that are under way?"""

    def begin_episode(self) -> bool:
        """Start counting; True if the episode's trajectories are wanted."""

    def advance(self, steps: int) -> None:
        """Count steps."""

    def updating(self) -> None:
        """An update begins."""

    def updated(self, losses: Mapping[str, float]) -> None:
        """An update has ended."""

    def end_episode(self, record: EpisodeRecord, trajectory: Mapping[str, np.ndarray]) -> None:
        """Write it down."""


class Journal:
    """Writes down what the loop does: lines, checkpoints, scalars, events."""

    def __init__(
        self,
        folder: RunFolder,
        settings: RunSettings,
        observation: ObservationSpec,
        learner: Learner,
        spans: Spans,
        done: Done,
        listener: Listener,
        crew: Alone | Crew | None = None,
    ) -> None:
        self.folder = folder
        self._crew = crew or Alone()
        self.settings = settings
        self.done = done
        self.boundary: LearnerState | None = None  # None: it is on the disk
        self.steps = 0  # of the episode under way
        self._observation = observation
        self._learner = learner
        self._spans = spans
        self._listener = listener
        self._budget = Budget(settings.max_episodes, settings.max_env_steps, settings.max_minutes)
        self._weights = objective_weights(settings)
        self._texts = {"config.yaml": read_config(folder.path)}
        self._scalars = (
            ScalarWriter(folder.path / "tb", start=done.env_steps + 1 if done.env_steps else 0)
            if settings.recording.tensorboard
            else None
        )
        self._metrics: list[dict[str, Any]] = []  # of the episode under way
        self._acted = learner.counters.acting_steps
        self._since = self._started = time.perf_counter()
        self._pace = Pace(self._budget, done.episodes, done.env_steps)
        self._updates = learner.counters.updates_performed  # before this process began
        self._compiled = 0.0  # [s] that went into compiling
        self._next_beat = 0.0
        self._slow_updates = False
        self._update_began = 0.0
        self._due = False  # is the boundary one at which a checkpoint is due?
        self._line: dict[str, Any] = {}
        self._mode = learner.describe().get("update_mode")
        self.compiling = self._mode in ("compiled", "cuda_graph", "auto")  # does the next update begin with that?
        self._profile = recorded(folder.path, "profile")["profile"]
        self.held_out = HeldOut(folder, settings, listener, done=done.episodes, size=self._crew.size)

    @property
    def episode(self) -> int:
        """The one under way, from 1."""
        return self.done.episodes + 1

    @property
    def over(self) -> bool:
        """Is the budget used up? Several workers agreed on it when they last met: the clock has gone on since."""
        return self._crew.over if self._crew.size > 1 else self.spent

    @property
    def spent(self) -> bool:
        """Is it used up now?"""
        return self._budget.used(self.done.episodes, self.done.env_steps, self.done.wall_s) >= 1.0

    @property
    def exact(self) -> bool:
        """Is there a budget beside the clock?"""
        return self._budget.exact

    @property
    def out_of_time(self) -> bool:
        """Did `max_minutes` end the run before its episodes or steps were done?"""
        counted = self._budget.counted(self.done.episodes, self.done.env_steps, 0.0)
        return self.exact and counted < 1.0 and self.over

    @property
    def counted(self) -> float:
        """For the learner's schedules: the share of the budget that is done."""
        size = self._crew.size
        episodes = self.done.episodes + size * min(1.0, self.steps / self.settings.max_steps)
        seconds = self.done.wall_s + time.perf_counter() - self._since
        return self._budget.counted(episodes, self.done.env_steps + size * self.steps, seconds)

    @property
    def ending(self) -> bool:
        """See `Recorder`."""
        size = self._crew.size
        steps = self.done.env_steps + size * self.settings.max_steps
        seconds = self.done.wall_s + time.perf_counter() - self._since
        return self._budget.used(self.done.episodes + size, steps, seconds) >= 1.0

    def begin(self) -> None:
        """The clock starts: what was set up before is no part of an episode."""
        self._spans.take()
        self._since = self._started = time.perf_counter()

    def begin_episode(self) -> bool:
        """Start counting; True if the episode's trajectories are wanted."""
        self.steps = 0
        self._metrics = []
        self._acted = self._learner.counters.acting_steps
        return wants_trajectory(self.settings, self.episode)

    def advance(self, steps: int) -> None:
        """Count steps; now and then a heartbeat."""
        self.steps += steps
        now = time.perf_counter()
        if now >= self._next_beat:
            self._next_beat = now + 0.5
            self._crew.check()
            with self._spans("log"):
                self.beat("training")

    def beat(self, phase: str) -> None:
        """status.json, once a second at most, and at each change of phase."""
        env_steps = self.done.env_steps + self._crew.size * self.steps
        elapsed = self.done.wall_s + time.perf_counter() - self._since
        status = self.folder.beat(
            phase,
            episode=self.episode,
            step=self.steps,
            env_steps=env_steps,
            training_s=round(elapsed, 2),
            progress=self._budget.used(self.done.episodes, env_steps, elapsed),
            ms_per_step=self._line.get("ms_per_step"),
        )
        if status is not None:
            self._listener(Beat(status))

    def updating(self) -> None:
        """An update begins. It is a phase of its own where it lasts; many a learner updates at every step."""
        if self.compiling or self._slow_updates:
            self.beat("compiling" if self.compiling else "updating")
        self._update_began = time.perf_counter()

    def updated(self, losses: Mapping[str, float]) -> None:
        """An update of the learner; its line, if it reports, is written with the episode."""
        if losses:
            line = {"kind": "update", "episode": self.episode}
            line |= {"env_steps": self.done.env_steps + self._crew.size * self.steps}
            self._metrics.append({**line, **asdict(self._learner.counters), **losses})
        lasted = time.perf_counter() - self._update_began
        self._slow_updates = lasted > _SLOW
        self._compiled += lasted if self.compiling else 0.0
        if self._mode == "auto" or (self.compiling and self._mode == "cuda_graph"):  # both were measured beside eager
            self._settle()
        self.compiling = False

    def end_episode(self, record: EpisodeRecord, trajectory: Mapping[str, np.ndarray]) -> None:
        """Lines, scalars, events, and the boundary's state: on the disk if a checkpoint is due, else in memory.

        Args:
            record: of the episode.
            trajectory: its arrays; empty if `begin_episode` did not want them.

        Raises:
            OpenCDAError: vehicles had to act and the learner did not.
        """
        check_acting(self.settings, self.episode, record, self._learner.counters.acting_steps - self._acted)
        before = replace(self.done)
        try:
            with self._spans("checkpoint"):
                state = self._learner.state()
            with self._spans("log"):
                line = episode_line(record, self._learner, self._weights, self._spans.take())
            parts = self._crew.collect(Part(line, trajectory, state))
            with self._spans("log"):
                self._count([part.line for part in parts])
                for metrics in self._metrics:
                    self.folder.metrics(metrics)
                for part in parts:
                    self.folder.episode(part.line)
                    self._save_trajectory(part)
                self._write_scalars([part.line for part in parts])
            self.boundary = joined([part.state for part in parts])
        except BaseException:
            self.done = before  # the boundary in memory is still the one before
            raise
        with self._spans("checkpoint"):
            due = _passes(before.episodes, self.done.episodes, self.settings.checkpoint_every)
            evaluate = _passes(before.episodes, self.done.episodes, self.settings.eval_every)
            self._due = due or evaluate or self.over
            if self._due:
                self.save()
            if evaluate:
                self.held_out.ask(self.done.episodes)
            self.held_out.collect()
        self._line = parts[-1].line
        progress = self._budget.used(self.done.episodes, self.done.env_steps, self.done.wall_s)
        left = self._pace.left(
            self.done.episodes,
            self.done.env_steps,
            self.done.wall_s,
            elapsed=self._since - self._started - self._compiled,
            updates=self._learner.counters.updates_performed - self._updates,
        )
        with self._spans("log"):
            for part in parts:
                self._listener(EpisodeDone(part.line, progress, left))

    def save(self, *, judged: bool = True) -> None:
        """Bring the boundary's state to the disk, unless it is there.

        Args:
            judged: may it become `best`? False for a boundary at which an uninterrupted run would not have looked.

        Raises:
            StorageError: the disk refused; the earlier checkpoint is as it was.
        """
        if self.boundary is None:
            return
        self.folder.sync()
        before = self.done.best
        better = (judged or self._due) and self._judge()
        spec = self._observation
        extra = {
            **asdict(self.done),
            "algorithm": self.settings.algorithm,
            "profile": self._profile,
            "observation": [spec.name, spec.version],
            "program": __version__,
        }
        try:
            path = self.folder.checkpoints.save(
                self.done.episodes, self.boundary, extra, self._texts, best=better, pinned=self.held_out.names
            )
        except BaseException:
            self.done.best = before
            raise
        self.boundary = None
        self._listener(Checkpointed(path, self.done.episodes, better))

    def close(self) -> None:
        """End children and files; may be called twice."""
        self.held_out.close()
        if self._scalars is not None:
            self._scalars.close()

    def _settle(self) -> None:
        """What `auto` was found to mean goes to run.json, where a resumed run finds it."""
        found = self._learner.describe()
        self._mode = found["update_mode"]
        note = str(found.pop("note", f"update_mode: {self._mode}"))
        facts = read_run(self.folder.path)
        init = {**facts["init"], **found}
        self.folder.write_run(with_forms({**facts, "init": init}, init))
        self._listener(Note(note))

    def _count(self, lines: Sequence[dict[str, Any]]) -> None:
        """The totals that belong into the lines of a round; each has its share of the time that the round took."""
        now = time.perf_counter()
        wall, self._since = (now - self._since) / len(lines), now
        for line in lines:
            self.done.episodes += 1
            self.done.env_steps += line["steps"]
            self.done.wall_s += wall
            self.done.window = [*self.done.window, [line["arrived"], line["vehicles"]]][-_WINDOW:]
            line |= {"env_steps": self.done.env_steps, "wall_s": wall}
            line["ms_per_step"] = 1e3 * wall / max(1, line["steps"])
            line["spans"] = {name: value / len(lines) for name, value in line["spans"].items()}
        self.steps = 0

    def _judge(self) -> bool:
        """Is this the highest success over the last 20 episodes? A full window beats any shorter one.

        And one after the densities' ramp beats those within it, whose traffic was thinner.

        Where held-out evaluation says what is best, nothing else does.
        """
        if self.held_out.decides:
            return False
        ended = sum(row[1] for row in self.done.window)
        score = sum(row[0] for row in self.done.window) / ended if ended else 0.0
        full, ramp = len(self.done.window) == _WINDOW, self.settings.demand.ramp
        found = [float(full) + float(full and 0 < ramp <= self.done.episodes - _WINDOW), score]
        better = not self.done.best or found >= self.done.best[:2]
        if better:
            self.done.best = [*found, float(self.done.episodes)]
        return better

    def _save_trajectory(self, part: Part) -> None:
        every, episode = self.settings.recording.trajectories_every, part.line["episode"]
        due = every > 0 and episode % every == 0
        if due or (self.settings.recording.crashes and part.line["collided"]):
            self.folder.arrays(f"traffic/episode_{episode}", part.trajectory)

    def _write_scalars(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self._scalars is None:
            return
        for metrics in self._metrics:
            losses = {f"losses/{key}": metrics[key] for key in metrics if key not in _NO_LOSSES}
            self._scalars.write(metrics["env_steps"], {key: float(value) for key, value in losses.items()})
        for line in lines:
            named = {f"{group}/{key}": line[key] for group, keys in _CURVES.items() for key in keys}
            named |= {f"charts/reward_{name}": value for name, value in line["parts"].items()}
            named |= {f"time/{name}_ms": 1e3 * value / max(1, line["steps"]) for name, value in line["spans"].items()}
            known = {key: float(value) for key, value in named.items() if value is not None}
            self._scalars.write(line["env_steps"], known)


_NO_LOSSES = ("kind", "episode", "env_steps", "training_step", "updates_performed", "buffer_size", "acting_steps")
_CURVES = {
    "charts": ("return", "success_rate", "collision_rate", "training_step", "updates_performed", "buffer_size"),
    "traffic": (
        *("rate_vph", "near_miss_rate", "mean_delay_s", "throughput_vph", "scheduled", "waiting", "running"),
        *("arrived", "collided", "removed", "overridden_share", "mean_rows"),
    ),
    "time": ("ms_per_step", "wall_s"),
}


def wants_trajectory(settings: RunSettings, episode: int) -> bool:
    """Are the tracks of an episode recorded? They are kept if there was a crash, or if it is one of every so many."""
    every = settings.recording.trajectories_every
    return settings.recording.crashes or (every > 0 and episode % every == 0)


def check_acting(settings: RunSettings, episode: int, record: EpisodeRecord, acted: int) -> None:
    """A learner that never acts must not look like one that does.

    Args:
        settings: of the run.
        episode: for the message.
        record: of the episode.
        acted: calls of `act` in it.

    Raises:
        OpenCDAError: vehicles had to act and the learner did not.
    """
    must = record.acting_rows or (record.departed if settings.demand.cav_share == 1.0 else 0)
    if must and not acted:
        raise OpenCDAError(
            f"episode {episode}: {record.departed} vehicles drove in and {record.acting_rows} decisions were "
            "due, but the learner's acting_steps did not move: it never acted",
            fix="this is a defect of the learner or the environment: please report it with the profile",
        )


def _passes(before: int, now: int, every: int) -> bool:
    """Does one of the episodes after `before`, up to `now`, have a number that `every` divides?"""
    return every > 0 and now // every > before // every


def episode_line(
    record: EpisodeRecord, learner: Learner, weights: list[float] | None, spans: Mapping[str, float]
) -> dict[str, Any]:
    """A line of episodes.jsonl; the totals of the run (`env_steps`) and its time are still to be filled in."""
    figures = pool([record], weights=weights)
    return {
        "episode": record.episode,
        "seed": record.seed,
        "rate_vph": record.rate_vph,
        "steps": record.steps,
        "env_steps": 0,
        **{key: value for key, value in figures.items() if key not in ("episodes", "running_at_end", "waiting_at_end")},
        **asdict(record.accounting),
        "departed": record.departed,
        "refused": record.refused,
        "objectives": record.returns,
        "parts": {name: value / max(1, record.returned) for name, value in record.parts.items()},
        "mean_rows": record.neighbour_rows / max(1, record.acting_rows),
        "decisions": record.acting_rows,
        **asdict(learner.counters),
        "wall_s": 0.0,
        "ms_per_step": 0.0,
        "spans": dict(spans),  # [s]
    }
