"""`bench update`: the learner's update, eager and compiled, against PPO as one would write it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from opencda_marl.core.errors import CompilerError
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.bench_act import plain_rows, sizes_of
from opencda_marl.tools.measure import HEADLINE, Block, Load, Worker, against_floor, interleave
from opencda_marl.tools.plain import PlainNets, Rows, plain_update
from opencda_marl.tools.synthetic import Scene, specs

__all__ = ["bench_update"]

_REPEATS = 5
_ROWS = 10_000  # of one update, about what the recipe's profiles gather
_MODES: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")


def bench_update(settings: RunSettings, *, vehicles: int, threads: int) -> dict[str, Any]:
    """Measure whole updates; all figures are milliseconds per minibatch, with everything that an update does.

    Args:
        settings: of the profile: networks, minibatches, epochs. No update ends early.
        vehicles: that decide together; about 10,000 rows are gathered of them.
        threads: of torch.
    """
    with Worker(_measurement, settings, vehicles, threads) as worker:
        found: dict[str, Any] = worker()
    return found


def _measurement(settings: RunSettings, vehicles: int, threads: int) -> Callable[[], dict[str, Any]]:
    from opencda_marl.assemble import quiet_process

    def measure() -> dict[str, Any]:
        with quiet_process(threads):
            return _measure(settings, vehicles, threads)

    return measure


def _measure(settings: RunSettings, vehicles: int, threads: int) -> dict[str, Any]:
    decisions = max(1, _ROWS // vehicles)
    whole = replace(settings.learner, target_kl=None, n_steps=decisions * settings.decision_interval)
    settings = replace(settings, learner=whole)
    sources = {"plain": _plain(settings, vehicles, decisions)}
    notes, compile_s = [], None
    for mode in _MODES:
        ours = _ours(replace(settings, learner=replace(whole, update_mode=mode)), vehicles, decisions)
        begin = time.perf_counter()
        try:
            ours()
        except CompilerError as error:
            notes.append(f"{mode}: {error.message}")
            continue
        compile_s = round(time.perf_counter() - begin, 1) if mode == "compiled" else compile_s
        sources[mode] = ours
    sources["plain"]()
    with Load() as load:
        blocks = interleave(sources, _REPEATS)
    rows = [against_floor(mode, blocks[mode], blocks["plain"]) for mode in sources if mode != "plain"]
    chosen = next((row for row in rows if row["name"] == settings.learner.update_mode), rows[0])
    return {
        "what": "update",
        **{key: chosen[key] for key in HEADLINE},
        "threads": threads,
        "update_rows": vehicles * decisions,
        "minibatch_size": whole.minibatch_size,
        "epochs": whole.epochs,
        "first_compiled_s": compile_s,
        "notes": notes,
        "rows": rows,
        **load.report(),
    }


def _minibatches(settings: RunSettings, rows: int) -> int:
    return settings.learner.epochs * -(-rows // settings.learner.minibatch_size)


def _ours(settings: RunSettings, vehicles: int, decisions: int) -> Callable[[], Block]:
    """Fill the rollout as the loop does, then time the update."""
    from opencda_marl.assemble import make_learner

    spec, action_spec = specs(settings)
    learner = make_learner(settings, spec, action_spec)
    scene = Scene(spec, vehicles)
    count = _minibatches(settings, vehicles * decisions)
    seen = float(scene.observation().counts.mean())

    def measure() -> Block:
        step = scene.step(settings.decision_interval, settings.simulator.step_length)
        for _ in range(decisions):
            observation = step.observation
            action = learner.act(observation, explore=True)
            step = scene.step(settings.decision_interval, settings.simulator.step_length)
            learner.store(observation, action, step)
        learner.progress(0.5)
        begin = time.perf_counter()
        learner.update(step)
        return Block(time.perf_counter() - begin, count, vehicles, seen)

    return measure


def _plain(settings: RunSettings, vehicles: int, decisions: int) -> Callable[[], Block]:
    sizes, spec = sizes_of(settings), specs(settings)[0]
    trained = settings.learner.train_context_encoder
    frozen = settings.context.encoder == "lstm" if trained is None else not trained
    torch.manual_seed(0)
    nets = PlainNets(sizes, settings.context, settings.learner, frozen=frozen)
    optimiser = torch.optim.Adam(nets.trained(), lr=settings.learner.learning_rate, eps=1e-5)
    scene = Scene(spec, vehicles)
    preference = torch.full((vehicles, sizes.preference), 1.0 / 3.0)
    parts = [plain_rows(scene.observation(), preference) for _ in range(decisions)]
    total = vehicles * decisions
    rows = Rows(
        ego=torch.cat([part.ego for part in parts]),
        neighbours=torch.cat([part.neighbours for part in parts]),
        mask=torch.cat([part.mask for part in parts]),
        context=torch.randn(total, settings.context.size),
        scene=torch.cat([part.scene for part in parts]),
        preference=torch.cat([part.preference for part in parts]),
        action=torch.randn(total, 1) * 0.5,
        log_prob=torch.randn(total) * 0.1 - 1.0,
        advantage=torch.randn(total),
        target=torch.randn(total, sizes.values),
    )
    seen = float(rows.mask.sum(1).float().mean())

    def measure() -> Block:
        begin = time.perf_counter()
        count = plain_update(nets, optimiser, rows, settings.learner)
        return Block(time.perf_counter() - begin, count, vehicles, seen)

    return measure
