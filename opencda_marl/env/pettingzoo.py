"""The PettingZoo view: a `ParallelEnv` whose agents are vehicles. Needs the extra `marl`.

An agent is a vehicle, never a slot: its name ("e0.v12") appears when it enters and is never used again.
`possible_agents` are the vehicles of the episode's schedule that the policy drives. Every agent acts in every
step; steps of the simulator in which nobody has to act are skipped, so `infos[agent]["elapsed"]` says how many
seconds a reward covers (`decision_interval` steps, or fewer where somebody entered).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.objectives import OBJECTIVES, scalarise
from opencda_marl.core.simulator import Simulator
from opencda_marl.core.spec import Action, Closed, Observation, Step
from opencda_marl.core.state import Driver, Schedule, vehicle_name
from opencda_marl.env.driving import DrivingEnv, Traffic
from opencda_marl.settings.run import RunSettings

__all__ = ["ParallelDriving"]

_BOUND = 2.0  # every feature is clipped to it, see env.layouts

Seen = np.ndarray | dict[str, np.ndarray]
"""One agent's view: a vector (`ego9`, `ego43`), or "ego", "neighbours" and "mask" (`full`)."""


class ParallelDriving(ParallelEnv[str, Seen, Any]):  # type: ignore[misc] # PettingZoo shows no types
    """Vehicles on a crossing, as PettingZoo wants them.

    libsumo allows one simulation in a process: for more than one of these at once, make the simulators in child
    processes (`simulators.remote.RemoteSimulator`).

    Args:
        simulator: makes the simulator.
        settings: of the run.
        traffic: seed -> who comes, in each episode; `reset(seed=…)` begins again at episode 0 of that seed.
        weights: of the objectives in the reward; None: ones.
    """

    metadata: dict[str, Any] = {"name": "opencda_marl_crossing", "render_modes": []}  # noqa: RUF012 - PettingZoo's own

    def __init__(
        self,
        simulator: Callable[[], Simulator],
        settings: RunSettings,
        traffic: Callable[[int], Traffic],
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._traffic, self._seed, self._episode = traffic, settings.seed, -1
        self._arrivals = traffic(settings.seed)
        self._env = DrivingEnv(simulator(), settings, self._next_traffic, synchronous=True)
        self._weights = np.array([1.0] * len(OBJECTIVES) if weights is None else list(weights))
        self._observation_space = _observation_space(self._env)
        self._action_space = _action_space(self._env)
        self._step: Step | None = None
        self._views: dict[str, Seen] = {}  # last view of each living agent
        self.render_mode = None
        self.possible_agents: list[str] = []
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002 - alike for all
        """The same for every agent."""
        return self._observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """The same for every agent."""
        return self._action_space

    @property
    def state_space(self) -> spaces.Space[Any]:
        """Of `state`."""
        size = self._env.observation_spec.scene_size
        return spaces.Box(-_BOUND, _BOUND, (size,), np.float32)

    def state(self) -> np.ndarray:
        """Mean and max of the ego features over all agents."""
        if self._step is None:
            raise OpenCDAError("there is no state before reset")
        return self._step.observation.scene

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002 - there are none
    ) -> tuple[dict[str, Seen], dict[str, dict[str, Any]]]:
        """Begin the next episode, or episode 0 of another seed."""
        if seed is not None:
            self._seed, self._episode = seed, -1
            self._arrivals = self._traffic(seed)
        self._episode += 1
        self._step = self._env.reset(self._episode)
        self._views = self._seen(self._step.observation)
        self.agents = list(self._views)
        return dict(self._views), {name: {} for name in self.agents}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Seen], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Everybody acts; what comes back concerns them and those who have entered meanwhile.

        Raises:
            OpenCDAError: before reset, after the end, or without an action for each agent.
        """
        if self._step is None or self._step.done:
            raise OpenCDAError("there is no episode to step in; call reset first")
        if set(actions) != set(self.agents):
            missing = sorted(set(self.agents) ^ set(actions))
            raise OpenCDAError(f"one action for each living agent is needed; too many or too few: {', '.join(missing)}")
        chosen = [np.asarray(actions[name], np.float32).reshape(-1) for name in self.agents]
        self._step = self._env.step(Action(np.stack(chosen)))
        return self._answer(self._step)

    def render(self) -> None:
        """Nothing is drawn; `simulator.gui` shows SUMO's own window."""

    def close(self) -> None:
        """End the simulator."""
        self._env.close()

    def _answer(
        self, step: Step
    ) -> tuple[dict[str, Seen], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        closed, now = step.closed, self._seen(step.observation)
        # Who arrived or crashed sees what it saw last; who was cut off sees the end.
        told = [vehicle_name(identity) for identity in closed.ids.tolist()]
        views = {name: self._views[name] for name in told} | self._seen(step.final) | now
        rewards = dict.fromkeys(views, 0.0)
        terminations, truncations = dict.fromkeys(views, False), dict.fromkeys(views, False)
        infos: dict[str, dict[str, Any]] = {name: {} for name in views}
        gained = scalarise(closed.rewards, self._weights)
        for k, name in enumerate(told):
            rewards[name] = float(gained[k])
            terminations[name], truncations[name] = bool(closed.terminated[k]), bool(closed.truncated[k])
            infos[name] = _info(closed, k)
        self._views, self.agents = now, list(now)
        return views, rewards, terminations, truncations, infos

    def _next_traffic(self, episode: int) -> tuple[Schedule, int, int]:
        schedule, seed, record_seed = self._arrivals(episode)
        ours = schedule.ids[schedule.drivers == Driver.CAV].tolist()
        self.possible_agents = [vehicle_name(identity) for identity in ours]
        return schedule, seed, record_seed

    def _seen(self, observation: Observation) -> dict[str, Seen]:
        names = [vehicle_name(identity) for identity in observation.ids.tolist()]
        if not self._env.observation_spec.max_neighbours:
            return dict(zip(names, observation.ego, strict=True))
        mask = observation.mask.astype(np.int8)
        return {
            name: {"ego": observation.ego[k], "neighbours": observation.neighbours[k], "mask": mask[k]}
            for k, name in enumerate(names)
        }


def _info(closed: Closed, k: int) -> dict[str, Any]:
    return {
        "rewards": dict(zip(OBJECTIVES, closed.rewards[k].tolist(), strict=True)),
        "team": float(closed.team[k]),
        "elapsed": float(closed.elapsed[k]),
    }


def _observation_space(env: DrivingEnv) -> spaces.Space[Any]:
    spec = env.observation_spec
    ego = spaces.Box(-_BOUND, _BOUND, (len(spec.ego),), np.float32)
    if not spec.max_neighbours:
        return ego
    rows = (spec.max_neighbours, len(spec.neighbour))
    return spaces.Dict(
        {
            "ego": ego,
            "neighbours": spaces.Box(-_BOUND, _BOUND, rows, np.float32),
            "mask": spaces.MultiBinary(spec.max_neighbours),
        }
    )


def _action_space(env: DrivingEnv) -> spaces.Space[Any]:
    spec = env.action_spec
    if spec.levels:
        return spaces.Discrete(len(spec.levels))
    return spaces.Box(-1.0, 1.0, (spec.size,), np.float32)
