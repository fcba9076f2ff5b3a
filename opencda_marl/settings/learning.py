"""Learners, encoders, preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between
from opencda_marl.settings.networks import LearnerSettings, NetworkSettings, Schedule
from opencda_marl.settings.offpolicy import DqnSettings, MasacSettings, Matd3Settings
from opencda_marl.settings.qlearning import QlearningSettings

__all__ = ["ALGORITHMS", "ContextSettings", "MappoSettings", "PreferenceSettings"]


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """The encoder of neighbour rows, `[rows, neighbours, features] -> [rows, size]`."""

    encoder: str = "deepsets"  # see `opencda-marl list encoders`
    size: Annotated[int, Between(1, 1024)] = 64  # length of the context
    hidden: Annotated[int, Between(1, 2048)] = 64  # width inside; the documented lstm: 256
    heads: Annotated[int, Between(1, 16)] = 4  # attention only


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """Where a vehicle's weights of the objectives come from (PC learners)."""

    source: Literal["fixed", "sampled", "grid"] = "sampled"  # sampled: drawn when a vehicle enters
    fixed: Annotated[list[float], Between(0, 1)] = field(
        default_factory=lambda: [0.6, 0.3, 0.1]
    )  # safety, efficiency, comfort: what `fixed` uses, and evaluation unless it says otherwise; sums to 1
    concentration: Annotated[float | list[float], Between(0.01, 1000)] = (
        1.0  # of the Dirichlet that `sampled` draws from; a list: one number per objective
    )
    divisions: Annotated[int, Between(1, 20)] = 4  # `grid`: points of the simplex with steps of 1/divisions
    team_weight: Annotated[float, Between(0, 100)] = 1.0  # of the team's advantage
    # `lambda` is a word of the language: the YAML key is `lambda`, the field `individual_weight`.
    individual_weight: Annotated[float, Between(0, 100)] = 1.0  # of the preference-weighted one
    scaling: Literal["shared", "component"] = "shared"  # component: each advantage over its own spread, then mixed


@dataclass(frozen=True, slots=True)
class MappoSettings(NetworkSettings):
    """MAPPO and PCMAPPO."""

    n_steps: Annotated[int, Between(1, 100_000_000)] = 4800  # environment steps between updates
    epochs: Annotated[int, Between(1, 100)] = 4  # passes over the stored rows in an update
    minibatch_size: Annotated[int, Between(1, 1_000_000)] = 512  # rows of a gradient step
    learning_rate: Annotated[float, Between(0, 1, open_low=True)] = 1e-3  # at the beginning
    learning_rate_end: Annotated[float, Between(0, 1)] = 1e-4  # when the budget is used
    learning_rate_schedule: Schedule = "linear"  # between them; exponential: by the same factor in equal times
    gae_lambda: Annotated[float, Between(0, 1)] = 0.95  # of generalised advantage estimation
    clip: Annotated[float, Between(0, 1, open_low=True)] = 0.2  # of the probability ratio
    entropy: Annotated[float, Between(0, 1)] = 0.003  # weight of the entropy bonus, at the beginning
    entropy_end: Annotated[float, Between(0, 1)] = 0.003  # linear in the budget used
    value_weight: Annotated[float, Between(0, 100)] = 0.5  # of the critic's loss
    max_grad_norm: Annotated[float, Between(0, 1e6, open_low=True)] = 0.5  # of all weights together
    target_kl: Annotated[float | None, Between(0, 10, open_low=True)] = 0.03  # null: never stop an update early
    average_decay: Annotated[float, Between(0, 0.9999)] = (
        0.95  # greedy driving and advantages use averaged weights; share of them that an update keeps; 0: the last
    )
    critic: Literal["central", "local"] = "central"  # central: sees the scene (mean and max over everybody)
    initial_fraction: Annotated[float, Between(0.01, 0.99)] = 0.8  # first policy's mean, as a share of the envelope
    initial_log_std: Annotated[float, Between(-5, 2)] = -0.5  # of the first policy, before tanh
    greedy_quantile: Annotated[float, Between(0.01, 0.99)] = 0.5  # of its speeds, that greedy driving takes


ALGORITHMS: dict[str, type[LearnerSettings]] = {
    "mappo": MappoSettings,
    "pcmappo": MappoSettings,
    "masac": MasacSettings,
    "pcmasac": MasacSettings,
    "matd3": Matd3Settings,
    "pcmatd3": Matd3Settings,
    "dqn": DqnSettings,
    "qlearning": QlearningSettings,
}
"""Settings of each bundled algorithm."""
