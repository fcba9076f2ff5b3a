"""What a worker other than the first keeps of its episodes: enough to hand to worker 0, which writes it down."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from opencda_marl.core.metrics import EpisodeRecord
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Learner
from opencda_marl.crew import Crew, Part
from opencda_marl.journal import check_acting, episode_line, objective_weights, wants_trajectory
from opencda_marl.settings.run import RunSettings

__all__ = ["Member"]


class Member:
    """See `journal.Recorder`.

    Args:
        settings: of the run.
        learner: of this worker.
        spans: timers of the loop.
        crew: of the run; this worker is not its first.
        episodes: that the run has done.
    """

    def __init__(self, settings: RunSettings, learner: Learner, spans: Spans, crew: Crew, episodes: int) -> None:
        self._settings, self._learner, self._spans, self._crew = settings, learner, spans, crew
        self._episodes = episodes
        self._weights = objective_weights(settings)
        self._acted = learner.counters.acting_steps

    @property
    def episode(self) -> int:
        """See `Recorder`."""
        return self._episodes + 1 + self._crew.rank

    @property
    def over(self) -> bool:
        """See `Recorder`; worker 0 decides."""
        return self._crew.over

    @property
    def counted(self) -> float:
        """See `Recorder`; worker 0 counts."""
        return 0.0

    @property
    def ending(self) -> bool:
        """See `Recorder`; worker 0 decides."""
        return False

    def begin_episode(self) -> bool:
        """See `Recorder`."""
        self._acted = self._learner.counters.acting_steps
        return wants_trajectory(self._settings, self.episode)

    def advance(self, steps: int) -> None:
        """See `Recorder`; the record of the episode has its steps."""

    def updating(self) -> None:
        """See `Recorder`; worker 0 says so."""

    def updated(self, losses: Mapping[str, float]) -> None:
        """See `Recorder`; they are the same everywhere, and worker 0 writes them down."""

    def end_episode(self, record: EpisodeRecord, trajectory: Mapping[str, np.ndarray]) -> None:
        """Hand over the episode's line, its tracks and the state of this worker's learner.

        Raises:
            OpenCDAError: vehicles had to act and the learner did not.
        """
        check_acting(self._settings, self.episode, record, self._learner.counters.acting_steps - self._acted)
        line = episode_line(record, self._learner, self._weights, self._spans.take())
        kept = trajectory if self._settings.recording.trajectories_every or record.accounting.collided else {}
        self._crew.collect(Part(line, kept, self._learner.state()))
        self._episodes += self._crew.size
