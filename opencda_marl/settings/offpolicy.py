"""Learners that keep what happened in a replay: SAC, TD3, DQN; and the table of Q-learning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between
from opencda_marl.settings.networks import Activation, NetworkSettings, Schedule

__all__ = ["DqnSettings", "MasacSettings", "Matd3Settings", "OffPolicySettings"]


@dataclass(frozen=True, slots=True)
class OffPolicySettings(NetworkSettings):
    """What learners with a replay share."""

    hidden: Annotated[list[int], Between(1, 4096)] = field(default_factory=lambda: [256, 256])  # actor and critics
    ego_hidden: Annotated[list[int], Between(1, 4096)] = field(default_factory=list)  # []: ego raw
    activation: Activation = "relu"  # after each hidden layer
    buffer_size: Annotated[int, Between(1_000, 100_000_000)] = 100_000  # decisions kept; the oldest give way
    batch_size: Annotated[int, Between(1, 1_000_000)] = 256  # decisions of a gradient step
    learning_starts: Annotated[int, Between(0, 100_000_000)] = 5_000  # decisions before it; actions are random so long
    updates_per_step: Annotated[float, Between(0, 100, open_low=True)] = (
        1.0  # gradient steps per env step; 0.1: every 10
    )
    learning_rate: Annotated[float, Between(0, 1, open_low=True)] = 3e-4  # at the beginning
    learning_rate_end: Annotated[float, Between(0, 1)] = 3e-4  # when the budget is used
    learning_rate_schedule: Schedule = "linear"  # between them; exponential: by the same factor in equal times
    tau: Annotated[float, Between(0, 1, open_low=True)] = 0.005  # share of the weights that enters the target's
    max_grad_norm: Annotated[float | None, Between(0, 1e6, open_low=True)] = None  # of all weights together; null: none


@dataclass(frozen=True, slots=True)
class MasacSettings(OffPolicySettings):
    """MASAC and PCMASAC."""

    alpha: Annotated[float | Literal["auto"], Between(0, 100)] = "auto"  # entropy's weight; auto: by target_entropy
    initial_alpha: Annotated[float, Between(0, 100, open_low=True)] = 0.1  # what auto starts from
    target_entropy: Annotated[float, Between(-100, 100)] = -1.0  # [nats] per action, as executed
    relabel: Annotated[float, Between(0, 1)] = 0.0  # PC: share of a batch whose preferences are drawn anew


@dataclass(frozen=True, slots=True)
class Matd3Settings(OffPolicySettings):
    """MATD3 and PCMATD3; noise in units of the action, which spans -1 to 1."""

    exploration_noise: Annotated[float, Between(0, 2)] = 0.2  # standard deviation when acting
    smoothing_noise: Annotated[float, Between(0, 2)] = 0.2  # standard deviation on the target's action
    smoothing_clip: Annotated[float, Between(0, 2)] = 0.5  # its largest size
    policy_delay: Annotated[int, Between(1, 100)] = 2  # critic steps per step of the actor
    saturation_penalty: Annotated[float, Between(0, 100)] = 0.0  # of the square by which tanh's input is beyond +-2.65
    relabel: Annotated[float, Between(0, 1)] = 0.0  # PC: share of a batch whose preferences are drawn anew


@dataclass(frozen=True, slots=True)
class DqnSettings(OffPolicySettings):
    """DQN with double Q-learning."""

    epsilon: Annotated[float, Between(0, 1)] = 1.0  # share of random actions at the beginning
    epsilon_end: Annotated[float, Between(0, 1)] = 0.05  # and after `exploration_fraction`
    exploration_fraction: Annotated[float, Between(0, 1, open_low=True)] = 0.3  # of the budget, linear
