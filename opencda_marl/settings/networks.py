"""What the settings of all learners, and of all learners with networks, have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from opencda_marl.settings.bounds import Between

__all__ = ["Activation", "LearnerSettings", "NetworkSettings", "Schedule", "UpdateMode", "own_settings"]

Activation = Literal["tanh", "relu"]
UpdateMode = Literal["eager", "compiled", "cuda_graph", "auto"]
Schedule = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """A learner's block; what is in it is the algorithm's own."""


@dataclass(frozen=True, slots=True)
class NetworkSettings(LearnerSettings):
    """What every learner with networks has."""

    hidden: Annotated[list[int], Between(1, 4096)] = field(default_factory=lambda: [128, 128])  # actor and critic
    ego_hidden: Annotated[list[int], Between(1, 4096)] = field(default_factory=lambda: [64, 64])  # []: ego raw
    activation: Activation = "tanh"  # after each hidden layer
    train_context_encoder: bool | None = None  # null: false for lstm, true for the set encoders
    update_mode: UpdateMode = "eager"  # auto: measured once, recorded, kept
    cuda_graph_update: bool = False  # true: update_mode cuda_graph where there is CUDA, else eager, said in one line
    acting_device: Literal["auto", "train", "cpu"] = "auto"  # auto: a CPU replica beside CUDA training
    acting_threads: Annotated[int | Literal["auto"], Between(1, 1024)] = "auto"  # of a replica; auto: at most 8


_Own = TypeVar("_Own", bound=LearnerSettings)


def own_settings(settings: LearnerSettings, kind: type[_Own]) -> _Own:
    """The block of a run as the learner's own kind.

    Raises:
        TypeError: it is another algorithm's; a profile cannot cause that.
    """
    if not isinstance(settings, kind):
        raise TypeError(f"{kind.__name__} are needed, not {type(settings).__name__}")
    return settings
