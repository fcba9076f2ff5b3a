"""How long a run goes on, how much of that is done, and how long the rest takes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget", "Pace"]


@dataclass(frozen=True, slots=True)
class Budget:
    """The first limit reached ends the run, at the end of that episode.

    Schedules (learning rate, entropy) follow what is counted. Time only steers them when nothing else is
    limited: then two runs of one seed differ, because clocks do.
    """

    episodes: int | None
    env_steps: int | None
    minutes: float | None  # of training

    @property
    def exact(self) -> bool:
        """Do schedules follow counts only?"""
        return self.episodes is not None or self.env_steps is not None

    def counted(self, episodes: float, env_steps: int, seconds: float) -> float:
        """For schedules: the share that is done, 0 to 1.

        Args:
            episodes: done, with the fraction of the present one.
            env_steps: done.
            seconds: of training.
        """
        if not self.exact:
            return self.used(episodes, env_steps, seconds)
        shares = [episodes / self.episodes] if self.episodes is not None else []
        shares += [env_steps / self.env_steps] if self.env_steps is not None else []
        return min(1.0, max(shares))

    def used(self, episodes: float, env_steps: int, seconds: float) -> float:
        """For people: the share that is done, time included; 1 means that the run is over."""
        shares = [episodes / self.episodes] if self.episodes is not None else []
        shares += [env_steps / self.env_steps] if self.env_steps is not None else []
        shares += [seconds / 60.0 / self.minutes] if self.minutes is not None else []
        return min(1.0, max(shares))


class Pace:
    """How long the rest of a budget takes. Where episodes or steps are counted, that is told from the first update on.

    A learner that updates many times an episode first fills its replay, which is quick and tells nothing of what comes:
    its pace is taken from the episode of its first update on. One that updates once in several episodes is averaged
    over those, too.

    Args:
        budget: of the run.
        episodes: done before this process began.
        env_steps: likewise.
    """

    def __init__(self, budget: Budget, episodes: int, env_steps: int) -> None:
        self._budget = budget
        self._from = self._last = (self._share(episodes, env_steps), 0.0)
        self._updates = 0

    def left(self, episodes: int, env_steps: int, seconds: float, *, elapsed: float, updates: int) -> float | None:
        """At the end of an episode: [s] of training left; None: nothing can be said yet.

        Args:
            episodes: done, over all processes of the run.
            env_steps: likewise.
            seconds: of training, likewise.
            elapsed: [s] in this process, without compiling, which does not come again.
            updates: in this process.
        """
        share = self._share(episodes, env_steps)
        if updates > 1 and not self._updates:
            self._from = self._last
        self._updates, self._last = updates, (share, elapsed)
        if self._budget.used(episodes, env_steps, seconds) >= 1.0:
            return 0.0
        minutes = self._budget.minutes
        clock = None if minutes is None else max(0.0, 60.0 * minutes - seconds)
        if not self._budget.exact:
            return clock
        before, since = self._from
        if not updates or share <= before:
            return None
        counted = (1.0 - share) * (elapsed - since) / (share - before)
        return counted if clock is None else min(counted, clock)

    def _share(self, episodes: int, env_steps: int) -> float:
        return self._budget.counted(episodes, env_steps, 0.0) if self._budget.exact else 0.0
