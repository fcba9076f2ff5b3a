"""`bench act`: one acting step of each encoder against the plain module that one would write for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.spec import Observation
from opencda_marl.settings.learning import ContextSettings
from opencda_marl.settings.networks import NetworkSettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.measure import HEADLINE, Block, Load, Worker, against_floor, interleave
from opencda_marl.tools.plain import PlainNets, Rows, Sizes, plain_act
from opencda_marl.tools.synthetic import Scene, specs

__all__ = ["bench_act", "plain_rows", "sizes_of"]

_REPEATS = 7
_ACTS = 150  # per block
_SCENES = 16  # observations taken in turn
_PAGE: dict[str, ContextSettings] = {
    "deepsets": ContextSettings(encoder="deepsets"),
    "attention": ContextSettings(encoder="attention"),
    "lstm": ContextSettings(encoder="lstm", hidden=256),
}
"""The bundled encoders, measured with heads of 256-256 as in the published layout."""


def bench_act(settings: RunSettings, *, vehicles: int, threads: int) -> dict[str, Any]:
    """Measure acting with given rows: the profile's own networks, and each bundled encoder at the page's widths.

    Args:
        settings: of the profile.
        vehicles: that act at once, with 10 to 13 neighbour rows each.
        threads: of torch.

    Raises:
        ConfigError: the profile's learner has no networks.
    """
    _networks(settings)
    with Worker(_measurement, settings, vehicles, threads) as worker:
        found: dict[str, Any] = worker()
    return found


def _networks(settings: RunSettings) -> NetworkSettings:
    own = settings.learner
    if not isinstance(own, NetworkSettings):
        raise ConfigError(
            f"{settings.algorithm} has no networks: there is nothing to hold its acting against",
            fix="measure a whole run of it: opencda-marl bench run",
        )
    return own


def _measurement(settings: RunSettings, vehicles: int, threads: int) -> Callable[[], dict[str, Any]]:
    from opencda_marl.assemble import quiet_process

    def measure() -> dict[str, Any]:
        with quiet_process(threads):
            return _measure(settings, vehicles, threads)

    return measure


def _measure(settings: RunSettings, vehicles: int, threads: int) -> dict[str, Any]:
    variants = {"profile": settings}
    wide = replace(_networks(settings), hidden=[256, 256], ego_hidden=[], train_context_encoder=None)
    for name, context in _PAGE.items():
        variants[name] = replace(settings, context=context, learner=wide)
    sources: dict[str, Callable[[], Block]] = {}
    for name, variant in variants.items():
        sources[name] = _ours(variant, vehicles)
        sources[f"plain {name}"] = _plain(variant, vehicles)
    for source in sources.values():
        source()
    with Load() as load:
        blocks = interleave(sources, _REPEATS)
    rows = [
        against_floor(_name(label, variant.context), blocks[label], blocks[f"plain {label}"])
        for label, variant in variants.items()
    ]
    return {
        "what": "act",
        **{key: rows[0][key] for key in HEADLINE},
        "threads": threads,
        "rows": rows,
        **load.report(),
    }


def _name(label: str, context: ContextSettings) -> str:
    encoder = f"{context.encoder} {context.hidden}"
    return f"profile's own ({encoder})" if label == "profile" else f"{encoder}, heads 256-256"


def _ours(settings: RunSettings, vehicles: int) -> Callable[[], Block]:
    """The learner's own `act`, as the loop calls it."""
    from opencda_marl.assemble import make_learner

    spec, action = specs(settings)
    learner = make_learner(settings, spec, action)
    scene = Scene(spec, vehicles)
    observations = [scene.observation() for _ in range(_SCENES)]

    def act(observation: Observation) -> None:
        learner.act(observation, explore=True)

    return _timed(act, observations)


def _plain(settings: RunSettings, vehicles: int) -> Callable[[], Block]:
    """A torch module under no_grad: arrays in, arrays out."""
    spec, _ = specs(settings)
    torch.manual_seed(0)
    nets = PlainNets(sizes_of(settings), settings.context, _networks(settings), frozen=False)
    preference = torch.full((vehicles, sizes_of(settings).preference), 1.0 / 3.0)
    scene = Scene(spec, vehicles)
    observations = [scene.observation() for _ in range(_SCENES)]

    def act(observation: Observation) -> None:
        plain_act(nets, plain_rows(observation, preference)).numpy()

    return _timed(act, observations)


def _timed(act: Callable[[Observation], None], observations: list[Observation]) -> Callable[[], Block]:
    rows = float(np.mean([observation.counts.mean() for observation in observations]))

    def measure() -> Block:
        begin = time.perf_counter()
        for index in range(_ACTS):
            act(observations[index % _SCENES])
        return Block(time.perf_counter() - begin, _ACTS, float(len(observations[0])), rows)

    return measure


def sizes_of(settings: RunSettings) -> Sizes:
    """What the plain networks need to know of a profile."""
    spec, _ = specs(settings)
    preference = len(OBJECTIVES) if settings.algorithm.startswith("pc") else 0
    return Sizes(len(spec.ego), spec.scene_size, len(spec.neighbour), preference)


def plain_rows(observation: Observation, preference: torch.Tensor) -> Rows:
    """Tensors that share the observation's memory; what only an update needs stays empty."""
    rows = len(observation)
    empty = torch.zeros(rows, 0)
    return Rows(
        ego=torch.from_numpy(observation.ego),
        neighbours=torch.from_numpy(observation.neighbours),
        mask=torch.from_numpy(observation.mask),
        context=empty,
        scene=torch.from_numpy(observation.scene).expand(rows, -1),
        preference=preference,
        action=empty,
        log_prob=empty[:, :0].sum(1),
        advantage=empty[:, :0].sum(1),
        target=empty,
    )
