"""What the training loop writes down: lines, checkpoints, scalars, events. It watches the loop and never steers it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from opencda_marl import __version__
from opencda_marl.core.budget import Budget
from opencda_marl.core.children import OneAtATime
from opencda_marl.core.errors import CheckpointError, OpenCDAError
from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Evaluated, Listener, Note
from opencda_marl.core.metrics import EpisodeRecord, pool
from opencda_marl.core.run_folder import RunFolder, read_config, read_metrics, read_run
from opencda_marl.core.scalars import ScalarWriter
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Learner, LearnerState, ObservationSpec
from opencda_marl.settings.run import RunSettings

__all__ = ["TIMING_FIELDS", "Done", "Journal", "held_out_score", "objective_weights", "recorded"]

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


def held_out_score(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Of held-out evaluation at several rates, larger is better: success, then few collisions, then little delay."""

    def mean(name: str) -> float:
        return sum(row[name] or 0.0 for row in rows) / len(rows)

    return mean("success_rate"), -mean("collision_rate"), -mean("mean_delay_s")


def _best_held_out(folder: RunFolder) -> tuple[float, float, float] | None:
    """The highest score among the evaluations that the run has written down; None: there are none."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for line in read_metrics(folder.path):
        if line["kind"] == "evaluation":
            rows.setdefault(line["episode"], []).append(line)
    return max(map(held_out_score, rows.values()), default=None)


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
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.done = done
        self.boundary: LearnerState | None = None  # None: it is on the disk
        self.steps = 0  # of the episode under way
        self.evaluation = OneAtATime("opencda_marl.evaluate", folder=folder.path / "evaluations")
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
        self._from = self._budget.used(done.episodes, done.env_steps, done.wall_s)
        self._next_beat = 0.0
        self._slow_updates = False
        self._update_began = 0.0
        self._due = False  # is the boundary one at which a checkpoint is due?
        self._line: dict[str, Any] = {}
        self._mode = learner.describe().get("update_mode")
        self.compiling = self._mode in ("compiled", "cuda_graph", "auto")  # does the next update begin with that?
        self._profile = recorded(folder.path, "profile")["profile"]
        self._held_out = _best_held_out(folder)  # score of `best`; None: no held-out evaluation has come in

    @property
    def episode(self) -> int:
        """The one under way, from 1."""
        return self.done.episodes + 1

    @property
    def over(self) -> bool:
        """Is the budget used up?"""
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
        episodes = self.done.episodes + min(1.0, self.steps / self.settings.max_steps)
        seconds = self.done.wall_s + time.perf_counter() - self._since
        return self._budget.counted(episodes, self.done.env_steps + self.steps, seconds)

    def begin(self) -> None:
        """The clock starts: what was set up before is no part of an episode."""
        self._spans.take()
        self._since = self._started = time.perf_counter()

    def begin_episode(self) -> bool:
        """Start counting; True if the episode's trajectories are wanted."""
        self.steps = 0
        self._metrics = []
        self._acted = self._learner.counters.acting_steps
        every = self.settings.recording.trajectories_every
        return self.settings.recording.crashes or (every > 0 and self.episode % every == 0)

    def advance(self, steps: int) -> None:
        """Count steps; now and then a heartbeat."""
        self.steps += steps
        now = time.perf_counter()
        if now >= self._next_beat:
            self._next_beat = now + 0.5
            with self._spans("log"):
                self.beat("training")

    def beat(self, phase: str) -> None:
        """status.json, once a second at most, and at each change of phase."""
        env_steps = self.done.env_steps + self.steps
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
            line = {"kind": "update", "episode": self.episode, "env_steps": self.done.env_steps + self.steps}
            self._metrics.append({**line, **asdict(self._learner.counters), **losses})
        self._slow_updates = time.perf_counter() - self._update_began > _SLOW
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
        self._check_acting(record)
        before = replace(self.done)
        try:
            with self._spans("log"):
                line = self._finish_line(record)
                for metrics in self._metrics:
                    self.folder.metrics(metrics)
                self.folder.episode(line)
                self._save_trajectory(record, trajectory)
                self._write_scalars(line)
            with self._spans("checkpoint"):
                self.boundary = self._learner.state()
        except BaseException:
            self.done = before  # the boundary in memory is still the one before
            raise
        with self._spans("checkpoint"):
            due = self.done.episodes % self.settings.checkpoint_every == 0
            evaluate = self.settings.eval_every > 0 and self.done.episodes % self.settings.eval_every == 0
            self._due = due or evaluate or self.over
            if self._due:
                self.save()
            if evaluate:
                self._ask_evaluation()
            self.collect_evaluations()
        self._line = line
        progress = self._budget.used(self.done.episodes, self.done.env_steps, self.done.wall_s)
        pace = (progress - self._from) / (self._since - self._started)
        with self._spans("log"):
            self._listener(EpisodeDone(line, progress, (1.0 - progress) / pace if pace > 0 else None))

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
                self.done.episodes, self.boundary, extra, self._texts, best=better, pinned=self.evaluation.names
            )
        except BaseException:
            self.done.best = before
            raise
        self.boundary = None
        self._listener(Checkpointed(path, self.done.episodes, better))

    def collect_evaluations(self, *, wait: bool = False) -> None:
        """Write down what held-out evaluation has found since; its failure is a note, not the run's end."""
        try:
            found = self.evaluation.poll(wait=wait)
        except OpenCDAError as error:
            self._listener(Note(f"held-out evaluation failed; training goes on. {error}"))
            return
        if found is None:
            return
        name, rows = found
        episode = int(name.rpartition("_")[2])
        for row in rows:
            self.folder.metrics({"kind": "evaluation", "episode": episode, **row})
        score = held_out_score(rows)
        if self._held_out is None or score >= self._held_out:
            self._held_out = score
            self.folder.checkpoints.point_best(name)
        self._listener(Evaluated(episode, rows))

    def close(self) -> None:
        """End children and files; may be called twice."""
        self.evaluation.close()
        if self._scalars is not None:
            self._scalars.close()

    def _settle(self) -> None:
        """What `auto` was found to mean goes to run.json, where a resumed run finds it."""
        found = self._learner.describe()
        self._mode = found["update_mode"]
        note = str(found.pop("note", f"update_mode: {self._mode}"))
        facts = read_run(self.folder.path)
        self.folder.write_run({**facts, "init": {**facts["init"], **found}})
        self._listener(Note(note))

    def _check_acting(self, record: EpisodeRecord) -> None:
        must = record.acting_rows or (record.departed if self.settings.demand.cav_share == 1.0 else 0)
        if must and self._learner.counters.acting_steps == self._acted:
            raise OpenCDAError(
                f"episode {self.episode}: {record.departed} vehicles drove in and {record.acting_rows} decisions were "
                f"due, but the learner's acting_steps stayed at {self._acted}: it never acted",
                fix="this is a defect of the learner or the environment: please report it with the profile",
            )

    def _finish_line(self, record: EpisodeRecord) -> dict[str, Any]:
        now = time.perf_counter()
        wall, self._since = now - self._since, now
        spans = self._spans.take()
        self.done.episodes += 1
        self.done.env_steps += record.steps
        self.done.wall_s += wall
        self.done.window = [*self.done.window, [record.accounting.arrived, record.ended]][-_WINDOW:]
        self.steps = 0
        return _line(record, self.done, self._learner, self._weights, wall, spans)

    def _judge(self) -> bool:
        """Is this the highest success over the last 20 episodes? A full window beats any shorter one.

        Where held-out evaluation says what is best, nothing else does.
        """
        if self._held_out is not None:
            return False
        ended = sum(row[1] for row in self.done.window)
        score = sum(row[0] for row in self.done.window) / ended if ended else 0.0
        found = [float(len(self.done.window) == _WINDOW), score]
        better = not self.done.best or found >= self.done.best[:2]
        if better:
            self.done.best = [*found, float(self.done.episodes)]
        return better

    def _ask_evaluation(self) -> None:
        name = f"episode_{self.done.episodes}"
        chosen = self.settings.evaluation
        request = {
            "jobs": [{"policy": str(self.folder.path / "checkpoints" / name), "rates_vph": list(chosen.rates_vph)}],
            "config": str(self.folder.path),
            "seeds": list(chosen.selection_seeds),
        }
        replaced = self.evaluation.ask(name, request)
        if replaced is not None:
            text = f"held-out evaluation is slower than training: {replaced} was skipped"
            self._listener(Note(f"{text}; a larger eval_every avoids that"))

    def _save_trajectory(self, record: EpisodeRecord, trajectory: Mapping[str, np.ndarray]) -> None:
        every = self.settings.recording.trajectories_every
        due = every > 0 and self.done.episodes % every == 0
        if due or (self.settings.recording.crashes and record.accounting.collided):
            self.folder.arrays(f"traffic/episode_{self.done.episodes}", trajectory)

    def _write_scalars(self, line: Mapping[str, Any]) -> None:
        if self._scalars is None:
            return
        for metrics in self._metrics:
            losses = {f"losses/{key}": metrics[key] for key in metrics if key not in _NO_LOSSES}
            self._scalars.write(metrics["env_steps"], {key: float(value) for key, value in losses.items()})
        named = {f"{group}/{key}": line[key] for group, keys in _CURVES.items() for key in keys}
        named |= {f"charts/reward_{name}": value for name, value in line["parts"].items()}
        named |= {f"time/{name}_ms": 1e3 * value / max(1, line["steps"]) for name, value in line["spans"].items()}
        self._scalars.write(line["env_steps"], {key: float(value) for key, value in named.items() if value is not None})


_NO_LOSSES = ("kind", "episode", "env_steps", "training_step", "updates_performed", "buffer_size", "acting_steps")
_CURVES = {
    "charts": ("return", "success_rate", "collision_rate", "training_step", "updates_performed", "buffer_size"),
    "traffic": (
        *("rate_vph", "near_miss_rate", "mean_delay_s", "throughput_vph", "scheduled", "waiting", "running"),
        *("arrived", "collided", "removed", "overridden_share", "mean_rows"),
    ),
    "time": ("ms_per_step", "wall_s"),
}


def _line(
    record: EpisodeRecord,
    done: Done,
    learner: Learner,
    weights: list[float] | None,
    wall: float,
    spans: Mapping[str, float],
) -> dict[str, Any]:
    figures = pool([record], weights=weights)
    return {
        "episode": record.episode,
        "seed": record.seed,
        "rate_vph": record.rate_vph,
        "steps": record.steps,
        "env_steps": done.env_steps,
        **{key: value for key, value in figures.items() if key not in ("episodes", "running_at_end", "waiting_at_end")},
        **asdict(record.accounting),
        "departed": record.departed,
        "refused": record.refused,
        "objectives": record.returns,
        "parts": {name: value / max(1, record.returned) for name, value in record.parts.items()},
        "mean_rows": record.neighbour_rows / max(1, record.acting_rows),
        "decisions": record.acting_rows,
        **asdict(learner.counters),
        "wall_s": wall,
        "ms_per_step": 1e3 * wall / max(1, record.steps),
        "spans": dict(spans),  # [s]
    }
