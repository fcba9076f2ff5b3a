"""What a short run must override so that its learner learns in it, for each kind of settings.

Learners of a kind that has no function of its own here are left as they are: nothing is overridden, nothing is said.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.networks import NetworkSettings
from opencda_marl.settings.offpolicy import OffPolicySettings

__all__ = ["learn_across", "learn_within", "steps_between_updates", "update_facts"]

_PRESENT = 4  # vehicles that decide together, at least; in half of the run they fill a batch
_RING = 1000  # decisions: the smallest replay there may be, so that it comes round within a few episodes


@singledispatch
def learn_within(
    learner: object,  # noqa: ARG001 - chooses the function
    steps: int,  # noqa: ARG001 - of the interface
    interval: int,  # noqa: ARG001 - of the interface
) -> tuple[str, ...]:
    """Overrides with which updates happen in so many steps; what an update costs stays, if the run is not too short.

    Args:
        learner: settings of the learner.
        steps: environment steps of the run.
        interval: steps between two decisions.
    """
    return ()


@learn_within.register
def _(learner: MappoSettings, steps: int, interval: int) -> tuple[str, ...]:  # noqa: ARG001 - of the interface
    return (f"learner.n_steps={max(1, min(learner.n_steps, steps))}",)


@learn_within.register
def _(learner: OffPolicySettings, steps: int, interval: int) -> tuple[str, ...]:
    return _begin_with(learner, min(learner.batch_size, _PRESENT * steps // (2 * interval)))


def _begin_with(learner: OffPolicySettings, batch: int) -> tuple[str, ...]:
    batch = max(1, batch)
    return (f"learner.batch_size={batch}", f"learner.learning_starts={min(learner.learning_starts, batch)}")


@singledispatch
def learn_across(
    learner: object,  # noqa: ARG001 - chooses the function
    steps: int,  # noqa: ARG001 - of the interface
    interval: int,  # noqa: ARG001 - of the interface
) -> tuple[str, ...]:
    """Overrides with which updates happen in episodes of so many steps, and rows wait across every boundary.

    Args:
        learner: settings of the learner.
        steps: of an episode.
        interval: steps between two decisions.
    """
    return ()


@learn_across.register
def _(learner: MappoSettings, steps: int, interval: int) -> tuple[str, ...]:  # noqa: ARG001 - of the interface
    return (f"learner.n_steps={max(interval, steps * 3 // 4 // interval * interval)}",)


@learn_across.register
def _(learner: OffPolicySettings, steps: int, interval: int) -> tuple[str, ...]:
    batch = min(learner.batch_size, steps // interval, _RING)
    return (*_begin_with(learner, batch), f"learner.buffer_size={_RING}")


@singledispatch
def steps_between_updates(learner: object) -> int:  # noqa: ARG001 - chooses the function
    """Environment steps from one update to the next, once learning has begun; 1 where it goes on all the time."""
    return 1


@steps_between_updates.register
def _(learner: MappoSettings) -> int:
    return learner.n_steps


@singledispatch
def update_facts(learner: object) -> dict[str, Any]:  # noqa: ARG001 - chooses the function
    """What beside the networks decides how dear learning is."""
    return {}


@update_facts.register
def _(learner: NetworkSettings) -> dict[str, Any]:
    return {"update_mode": learner.update_mode}


@update_facts.register
def _(learner: MappoSettings) -> dict[str, Any]:
    return {"epochs": learner.epochs, "update_mode": learner.update_mode}


@update_facts.register
def _(learner: OffPolicySettings) -> dict[str, Any]:
    facts = {"updates_per_step": learner.updates_per_step, "batch_size": learner.batch_size}
    return {**facts, "update_mode": learner.update_mode}
