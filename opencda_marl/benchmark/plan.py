"""What the benchmark consists of: who trains, for how long, who drives beside, on which traffic."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from opencda_marl.config import computed, load_profile
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.tables import Table
from opencda_marl.env.controllers import SUMO_DRIVES
from opencda_marl.launch.cells import Cell, Request, expand
from opencda_marl.settings.run import RunSettings

__all__ = [
    "CHOICE",
    "CONTROLLERS",
    "DENSITIES",
    "FIRST_SEED",
    "LEARNERS",
    "SEEDS_WANTED",
    "Entrant",
    "Wanted",
    "entrant_of",
    "make_cells",
]

LEARNERS: Mapping[str, float] = {
    "mappo": 10.0,
    "pcmappo": 10.0,
    "masac": 30.0,
    "pcmasac": 30.0,
    "matd3": 30.0,
    "pcmatd3": 30.0,
    "dqn": 30.0,
    "qlearning": 10.0,
}
"""Learner -> minutes of training on one core; those with a replay get thirty."""

CONTROLLERS = ("random", "full_speed", "priority", "all_way_stop", "signals", "rule_based")
DENSITIES = (100.0, 200.0, 300.0, 400.0, 500.0, 600.0)
"""[vehicles/h/lane]; training sees those of its profile."""

FIRST_SEED = 20_000
"""Of the traffic that judges; 8000 and on choose checkpoints, 9000 and on belong to single runs."""

SEEDS_WANTED = 3  # training seeds of which a spread says something
_PROFILE = "sumo-marl/intersection/route_speed_only_{}"
_VEHICLES = 5_000  # a figure
_LEAST = 60  # episodes: where the crossing is full fewer vehicles end than are scheduled
_SHARE = 0.85  # of the scheduled vehicles that end within an episode, cautiously
_LANES = 12
_CHECKS = {"mappo": 10, "pcmappo": 10, "qlearning": 10}  # episodes between two held-out evaluations; others: 5
_SELECTION = "evaluation.selection_seeds=[8000, 8008]"  # beside training
CHOICE = (8000, 8040)
"""Traffic by which `best` or `latest` is taken for judgement, half-open."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One policy to be measured."""

    name: str  # of its file of results
    policy: str  # learner, with -wN behind it where N workers learn together, or controller
    kind: str  # learner, controller
    settings: RunSettings
    cell: Cell | None = None  # of a learner

    @property
    def identity(self) -> str:
        """What its figures depend on; equal: they need not be measured again."""
        return self.cell.id if self.cell is not None else _driven_in(self.settings)

    @property
    def depends_on(self) -> dict[str, Any]:
        """`learner.epochs` -> its value, of every setting that is part of the identity."""
        every = computed(self.settings)
        if self.cell is not None:
            return every
        return {key: value for key, value in every.items() if key in _DRIVING or key.startswith(_DRIVING_BLOCKS)} | {
            key: value for key, value in every.items() if key.startswith("demand.") and not key.startswith(_NOT_DRIVING)
        }


def entrant_of(settings: RunSettings) -> str:
    """The learner, as an entrant: `mappo`, and `mappo-w2` where two workers learn together.

    Raises:
        ConfigError: how many they are depends on the machine.
    """
    if settings.workers == "auto":
        raise ConfigError("an entrant with workers=auto is another one on each machine", fix="e.g. --set workers=2")
    return settings.algorithm if settings.workers == 1 else f"{settings.algorithm}-w{settings.workers}"


_DRIVING = ("decision_interval", "max_steps", "action")
_DRIVING_BLOCKS = ("scenario.", "simulator.", "envelope.", "reward.near_miss.")
_NOT_DRIVING = ("demand.rate_", "demand.ramp_")


def _driven_in(settings: RunSettings) -> str:
    """Settings that a driver without learning depends on; what is learned and rewarded is not among them."""
    demand = asdict(replace(settings.demand, rate_vph=0.0, rate_draw="choice"))
    demand = {name: value for name, value in demand.items() if not name.startswith("ramp_")}  # of training
    driving = [asdict(settings.scenario), asdict(settings.simulator), demand, asdict(settings.envelope)]
    told = json.dumps([driving, asdict(settings.reward.near_miss), settings.max_steps, settings.action])
    return f"k={settings.decision_interval} {hashlib.sha256(told.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A command line."""

    only: tuple[str, ...] = ()  # learners and controllers; empty: all
    seeds: tuple[int, ...] = (1,)
    budget_minutes: Mapping[str, float] = field(default_factory=dict)  # by learner; "" for all of them
    densities: tuple[float, ...] = DENSITIES
    episodes: int | None = None  # a density; None: as many as 5,000 vehicles need
    sets: tuple[str, ...] = ()  # settings of all learners

    def __post_init__(self) -> None:
        known = (*LEARNERS, *CONTROLLERS)
        for name in (*self.only, *filter(None, self.budget_minutes)):
            if name not in known:
                raise ConfigError(f"the benchmark has no {name!r}", fix=f"there are: {', '.join(known)}")
        for name in filter(None, self.budget_minutes):
            if name not in LEARNERS:
                raise ConfigError(
                    f"--budget-minutes: {name} is a driver without training", fix=f"learners: {', '.join(LEARNERS)}"
                )
        if not self.densities or min(self.densities) <= 0.0:
            raise ConfigError("--densities are vehicles per hour and lane, above 0", fix="e.g. --densities 200,300")

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Those of the names that were asked for."""
        return [name for name in names if not self.only or name in self.only]

    def minutes(self, learner: str) -> float:
        """Budget of training."""
        return self.budget_minutes.get(learner, self.budget_minutes.get("", LEARNERS[learner]))

    def traffic(self, density: float, max_steps: int, step_length: float) -> range:
        """Seeds of a density, one episode each: the same for everybody."""
        if self.episodes is not None:
            return range(FIRST_SEED, FIRST_SEED + self.episodes)
        scheduled = density * _LANES * max_steps * step_length / 3600.0
        return range(FIRST_SEED, FIRST_SEED + max(_LEAST, math.ceil(_VEHICLES / (_SHARE * scheduled))))


def make_cells(
    wanted: Wanted, tables: Mapping[str, Table] | None = None, *, config_root: Path | None = None
) -> tuple[list[tuple[Cell, RunSettings]], list[Entrant]]:
    """Cells to train, and everybody to be measured: learners by seed, then controllers.

    Raises:
        ConfigError: a setting is wrong; nothing was started.
    """
    cells: list[tuple[Cell, RunSettings]] = []
    entrants: list[Entrant] = []
    root = None if config_root is None else str(config_root.resolve())
    for learner in wanted.chosen(LEARNERS):
        profile = _PROFILE.format(learner)
        own = load_profile(profile, config_root=config_root).settings
        checks = own.eval_every or _CHECKS.get(learner, 5)
        fixed = (
            "max_episodes=null",
            "max_env_steps=null",
            f"max_minutes={wanted.minutes(learner):g}",
            "evaluation.final=false",
            f"eval_every={checks}",
            _SELECTION,
            *wanted.sets,
        )
        request = Request("benchmark", (profile,), root, fixed, {"seed": list(wanted.seeds)})
        for found, settings in expand(request, tables=tables):
            # the clock steers the learning rate over the budget: another budget is another run
            cell = replace(found, id=f"{found.id}-{wanted.minutes(learner):g}min")
            cells.append((cell, settings))
            policy = entrant_of(settings)
            entrants.append(Entrant(f"{policy}-s{cell.seed}", policy, "learner", settings, cell))
    return cells, [*entrants, *_controllers(wanted, [settings for _, settings in cells], config_root)]


def _controllers(wanted: Wanted, learners: Sequence[RunSettings], config_root: Path | None) -> list[Entrant]:
    """Each controller with every decision interval that a learner has; SUMO's own drivers have none."""
    base = load_profile(_PROFILE.format("mappo"), config_root=config_root).settings
    intervals = sorted({base.decision_interval, *(settings.decision_interval for settings in learners)})
    found = []
    for name in wanted.chosen(CONTROLLERS):
        for interval in intervals[:1] if name in SUMO_DRIVES else intervals:
            # a shield and levels belong to a policy
            overrides = [f"decision_interval={interval}", "shield.enabled=false", "action=target_speed"]
            loaded = load_profile(_PROFILE.format("mappo"), config_root=config_root, overrides=overrides)
            full = name if name in SUMO_DRIVES or interval == base.decision_interval else f"{name}-k{interval}"
            found.append(Entrant(full, name, "controller", loaded.settings))
    return found
