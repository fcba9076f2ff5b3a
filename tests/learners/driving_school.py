"""Learners on the toy world: the loop of the trainer without its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toy_world import SPEC, SPEED, World

from opencda_marl.core.spec import ActionSpec, Learner, ObservationSpec, Step
from opencda_marl.learners import LEARNERS
from opencda_marl.settings.learning import ALGORITHMS, ContextSettings, MappoSettings, PreferenceSettings
from opencda_marl.settings.run import RunSettings

Change = Callable[[Step], Step]

_ROLLOUT = {"n_steps": 100, "epochs": 2, "minibatch_size": 32, "hidden": [16], "ego_hidden": [8], "target_kl": None}
_REPLAY = {"buffer_size": 1000, "batch_size": 16, "learning_starts": 40, "updates_per_step": 0.2, "hidden": [16]}


def small(algorithm: str = "mappo", encoder: str = "deepsets", **own: Any) -> RunSettings:
    """Settings of a learner that is quick to build and to update."""
    preference = own.pop("preference", PreferenceSettings())
    kind: Any = ALGORITHMS[algorithm]
    size = _ROLLOUT if kind is MappoSettings else _REPLAY
    return RunSettings(
        algorithm=algorithm,
        seed=own.pop("seed", 3),
        context=ContextSettings(encoder=encoder, size=6, hidden=8, heads=2),
        preference=preference,
        learner=kind(**{**size, **own}),
    )


def build(settings: RunSettings, *, spec: ObservationSpec = SPEC, action: ActionSpec = SPEED) -> Any:
    """The learner of the settings, whatever its kind."""
    return LEARNERS.load(settings.algorithm)(settings, spec, action)


def drive(learner: Learner, world: World, episodes: int, *, change: Change | None = None) -> list[dict[str, float]]:
    """Whole episodes, as `train.run_loop` drives them; what each update returned."""
    metrics = []
    for _ in range(episodes):
        step = world.reset()
        while not step.done:
            observation = step.observation
            action = learner.act(observation, explore=True)
            step = world.step(action)
            if change is not None:
                step = change(step)
            learner.store(observation, action, step)
            if learner.ready(step):
                metrics.append(learner.update(step))
    return metrics


def with_rewards(step: Step, index: int | None) -> Step:
    """The same step where the only reward is one objective's, or the team's (None)."""
    closed = step.closed
    rewards = closed.rewards * 0.0
    rewards[:, 0] = closed.team if index is None else closed.rewards[:, index]
    return replace(step, closed=replace(closed, rewards=rewards))
