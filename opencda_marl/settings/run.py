"""The whole tree of settings: one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from opencda_marl.settings.bounds import Between
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.driving import EnvelopeSettings, NeighbourSettings, RewardSettings, ShieldSettings
from opencda_marl.settings.learning import ContextSettings, MappoSettings, PreferenceSettings
from opencda_marl.settings.networks import LearnerSettings
from opencda_marl.settings.traffic import DemandSettings, ScenarioSettings, SimulatorSettings

__all__ = ["EvaluationSettings", "RecordingSettings", "RunSettings"]


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Measuring: each step's metrics while training, held-out traffic beside it, the table at the end."""

    enabled: bool = True  # false skips the per-step metrics assembly (near-misses, delays) while training
    seeds: list[int] = field(default_factory=lambda: [9000, 9010])  # half-open range of held-out traffic
    selection_seeds: list[int] = field(default_factory=lambda: [8000, 8004])  # another one, to choose a checkpoint by
    rates_vph: Annotated[list[float], Between(0, 3000, open_low=True)] = field(
        default_factory=lambda: [200.0, 300.0, 400.0]
    )  # [vehicles/h/lane] each
    controllers: list[str] = field(
        default_factory=lambda: ["random", "full_speed", "priority", "rule_based"]
    )  # beside the policy
    final: bool = False  # at the end of a run: the table and the plots


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """What a run writes besides its episode lines."""

    trajectories_every: Annotated[int, Between(0, None)] = 0  # every N-th episode's trajectories; 0: none
    crashes: bool = False  # the trajectories of each episode with a crash
    tensorboard: bool = True  # scalars in tb/
    spans: bool = True  # where the time of a step goes


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run. `learner` is the active algorithm's block; the algorithm's own name is an alias for it."""

    algorithm: str = "mappo"  # see `opencda-marl list learners`
    seed: Annotated[int, Between(0, 2**32 - 1)] = 1  # of everything random
    max_episodes: Annotated[int | None, Between(1, None)] = None  # budgets: the first one reached ends the run
    max_env_steps: Annotated[int | None, Between(1, None)] = None  # likewise, simulator steps
    max_minutes: Annotated[float | None, Between(0, None, open_low=True)] = None  # likewise, of training
    max_steps: Annotated[int, Between(1, 10_000_000)] = 2400  # steps of an episode
    decision_interval: Annotated[int, Between(1, 1000)] = 10  # steps between two decisions
    discount_per_second: Annotated[float, Between(0, 1)] = 0.98  # of rewards; 0.98 is 0.99 per 0.5 s
    workers: Annotated[int | Literal["auto"], Between(1, 1024)] = 1  # processes that learn together; auto: by cores
    worker_timeout: Annotated[float, Between(1, 86400)] = 300.0  # [s] that one waits for another, then all end
    threads: Annotated[int, Between(1, 1024)] = 1  # torch's intra-op threads, of each worker
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    eval_every: Annotated[int, Between(0, None)] = 0  # [episodes] held-out evaluation in a child process; 0: never
    checkpoint_every: Annotated[int, Between(1, None)] = 10  # [episodes]
    keep: Annotated[int, Between(0, None)] = 2  # numbered checkpoints kept beside latest and best
    observation: Literal["ego9", "ego43", "full", "plain"] = "full"  # see `opencda-marl list observations`
    action: Literal["target_speed", "acceleration", "levels"] = "target_speed"  # levels: `envelope.levels`
    simulator: SimulatorSettings = field(default_factory=SimulatorSettings)
    carla: CarlaSettings = field(default_factory=CarlaSettings)
    scenario: ScenarioSettings = field(default_factory=ScenarioSettings)
    demand: DemandSettings = field(default_factory=DemandSettings)
    neighbours: NeighbourSettings = field(default_factory=NeighbourSettings)
    envelope: EnvelopeSettings = field(default_factory=EnvelopeSettings)
    shield: ShieldSettings = field(default_factory=ShieldSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    context: ContextSettings = field(default_factory=ContextSettings)
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
    learner: LearnerSettings = field(default_factory=MappoSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    recording: RecordingSettings = field(default_factory=RecordingSettings)
