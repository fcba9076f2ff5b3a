"""How long a run goes on, and how much of that is done."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Budget"]


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
