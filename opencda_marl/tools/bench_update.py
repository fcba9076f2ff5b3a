"""`bench update`: the learner's update, eager and compiled, against the same as one would write it.

PPO is measured here; learners with a replay in `bench_sac.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from opencda_marl.core.errors import CompilerError, ConfigError
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import OffPolicySettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.bench_act import plain_rows, sizes_of
from opencda_marl.tools.bench_sac import bench_off_policy
from opencda_marl.tools.measure import HEADLINE, Block, Load, Worker, against_floor, interleave
from opencda_marl.tools.plain import PlainNets, Rows, plain_update
from opencda_marl.tools.synthetic import Scene, specs

__all__ = ["bench_update"]

_REPEATS = 5
_ROWS = 10_000  # of one update, about what the recipe's profiles gather
_MODES: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")


def bench_update(
    settings: RunSettings, *, vehicles: int, threads: int, against: Sequence[str] | None = None
) -> dict[str, Any]:
    """Measure whole updates; figures are milliseconds per gradient step, with everything that an update does.

    Args:
        settings: of the profile: networks, minibatches, epochs. No update ends early.
        vehicles: that decide together; PPO gathers about 10,000 rows of them.
        threads: of torch.
        against: see `bench_sac`; PPO has but `straightforward`.

    Raises:
        ConfigError: the algorithm has no networks, or `against` names what does not have it.
    """
    if isinstance(settings.learner, OffPolicySettings):
        return bench_off_policy(settings, vehicles=vehicles, threads=threads, against=against)
    if not isinstance(settings.learner, MappoSettings):
        raise ConfigError(f"{settings.algorithm} has no gradient steps to measure", fix="name another profile with -t")
    if set(against or ()) - {"straightforward"}:
        raise ConfigError(
            f"--against {','.join(against or ())}: {settings.algorithm} is measured against straightforward only",
            fix="-t sumo-marl/intersection/page_layout_pcmasac",
        )
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
    whole = replace(
        own_settings(settings.learner, MappoSettings), target_kl=None, n_steps=decisions * settings.decision_interval
    )
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
    chosen = next((row for row in rows if row["name"] == whole.update_mode), rows[0])
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
    own = own_settings(settings.learner, MappoSettings)
    return own.epochs * -(-rows // own.minibatch_size)


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
    own = own_settings(settings.learner, MappoSettings)
    trained = own.train_context_encoder
    frozen = settings.context.encoder == "lstm" if trained is None else not trained
    torch.manual_seed(0)
    nets = PlainNets(sizes, settings.context, own, frozen=frozen)
    optimiser = torch.optim.Adam(nets.trained(), lr=own.learning_rate, eps=1e-5)
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
        count = plain_update(nets, optimiser, rows, own)
        return Block(time.perf_counter() - begin, count, vehicles, seen)

    return measure
