"""`bench update` of learners with a replay: MASAC beside what others make of the same work; the rest by form alone.

MASAC is measured at the sizes of the published timings: 9 features of its own, a context of 64 and a preference of 4
numbers go into actor and critics as they are, values are scalars, as the peers' are. Ours is the learner's own `update`
with everything in it: drawing the batch from a full replay, noise, and reading its metrics back at each step. The peers
get their batches ready made (see `tools.peers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch

from opencda_marl.core.errors import CompilerError, ConfigError
from opencda_marl.core.spec import ActionSpec, Feature, ObservationSpec
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import MasacSettings, OffPolicySettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.measure import HEADLINE, Block, Load, Worker, against_floor, interleave, median
from opencda_marl.tools.peers import Peer, make_peer, require_peers
from opencda_marl.tools.plain_sac import SacRows
from opencda_marl.tools.synthetic import Scene, specs

__all__ = ["bench_off_policy"]

_REPEATS = 5
_STEPS = 200  # gradient steps of a block
_BATCHES = 16  # of the peers, in turn
_FILLED = 50_000  # decisions in the replay, or as many as it holds
_FEATURES = 9 + 64 + 4  # own, context, preference
_MODES: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")


def bench_off_policy(
    settings: RunSettings, *, vehicles: int, threads: int, against: Sequence[str] | None = None
) -> dict[str, Any]:
    """Measure gradient steps, each source in a process of its own and all of them in turn.

    Args:
        settings: of the profile: networks, batch, form.
        vehicles: that decide together.
        threads: of torch, in every process.
        against: names of `tools.peers.PEERS`; None: `straightforward` where the algorithm is soft actor-critic, else
            the compiled form is measured against the eager one.

    Raises:
        ConfigError: a peer is not known or not installed, or has no such algorithm.
    """
    soft = settings.algorithm in ("masac", "pcmasac")
    if against and not soft:
        raise ConfigError(
            f"--against {','.join(against)}: there is nothing to measure {settings.algorithm} against",
            fix="measure masac or pcmasac, or leave --against out",
        )
    peers = tuple(dict.fromkeys(against or (("straightforward",) if soft else ())))
    require_peers(peers)
    if soft:
        settings = replace(settings, algorithm="masac")
    makers: dict[str, tuple[Callable[..., Callable[[], Any]], tuple[object, ...]]] = {
        mode: (_ours, (_in_form(settings, mode), vehicles, threads, soft)) for mode in _MODES
    }
    makers |= {name: (_theirs, (name, own_settings(settings.learner, MasacSettings), threads)) for name in peers}
    notes: list[str] = []
    with ExitStack() as stack:
        sources: dict[str, Callable[[], Block]] = {}
        first: dict[str, float] = {}
        for name, (make, arguments) in makers.items():
            worker = stack.enter_context(Worker(make, *arguments))
            try:
                first[name] = float(worker().spans["first_s"])
            except CompilerError as error:
                notes.append(f"{name}: {error.message}")
                continue
            sources[name] = worker
        with Load() as load:
            blocks = interleave(sources, _REPEATS)
    return {
        "what": "update",
        **_answer(settings, blocks, peers),
        "threads": threads,
        "batch_size": own_settings(settings.learner, OffPolicySettings).batch_size,
        "first_compiled_s": round(first["compiled"], 1) if "compiled" in first else None,
        "notes": notes,
        **load.report(),
    }


def _answer(settings: RunSettings, blocks: dict[str, list[Block]], peers: Sequence[str]) -> dict[str, Any]:
    """Rows of each form against each peer; the headline is the peer that comes nearest to the profile's form."""
    forms = [mode for mode in _MODES if mode in blocks]
    floors = peers or ("eager",)
    rows = [
        {"form": form, "peer": peer, **against_floor(f"{form} / {peer}", blocks[form], blocks[peer])}
        for form in forms
        for peer in floors
    ]
    asked = own_settings(settings.learner, OffPolicySettings).update_mode
    if asked not in forms:  # auto, cuda_graph
        asked = min(forms, key=lambda form: median([block.ms for block in blocks[form]]))
    nearest = min((row for row in rows if row["form"] == asked), key=lambda row: row["speedup"])
    medians = {name: round(median([block.ms for block in found]), 4) for name, found in blocks.items()}
    return {**{key: nearest[key] for key in HEADLINE}, "form": asked, "ms": medians, "rows": rows}


def _in_form(settings: RunSettings, mode: Literal["eager", "compiled"]) -> RunSettings:
    """The profile with its first gradient step at once and one gradient step per env step."""
    own = own_settings(settings.learner, OffPolicySettings)
    learner = replace(own, update_mode=mode, cuda_graph_update=False, updates_per_step=1.0, learning_starts=0)
    return replace(settings, learner=learner, device="cpu")


def _page_spec() -> ObservationSpec:
    """The sizes of the published timings as one flat view: no rows of neighbours, nothing to encode."""
    columns = tuple(Feature(f"feature {index}", "1", 1.0, "made up") for index in range(_FEATURES))
    return ObservationSpec("page sizes", 1, columns, (), 0)


def _ours(settings: RunSettings, vehicles: int, threads: int, page: bool) -> Callable[[], Block]:
    """The learner with a full replay; a block is `_STEPS` times its `update`."""
    from opencda_marl.assemble import make_learner, quiet_process

    spec, action_spec = (_page_spec(), ActionSpec("target_speed")) if page else specs(settings)
    own = own_settings(settings.learner, OffPolicySettings)
    interval, length = settings.decision_interval, settings.simulator.step_length
    with quiet_process(threads):
        learner = make_learner(settings, spec, action_spec)
    scene = Scene(spec, vehicles)
    step = scene.step(interval, length)

    def store(due: int) -> None:
        nonlocal step
        observation = step.observation
        action = learner.act(observation, explore=True)
        step = replace(scene.step(interval, length), steps=due)
        learner.store(observation, action, step)

    def update() -> float:
        store(due=1)
        begin = time.perf_counter()
        learner.update(step)
        return time.perf_counter() - begin

    def measure() -> Block:
        with quiet_process(threads):
            while learner.counters.buffer_size < min(_FILLED, own.buffer_size) - vehicles:
                store(due=0)
            first = update()  # compiles at the first call
            before = learner.counters.training_step
            seconds = sum(update() for _ in range(_STEPS))
        return Block(seconds, learner.counters.training_step - before, vehicles, spans={"first_s": first})

    return measure


def _theirs(name: str, settings: MasacSettings, threads: int) -> Callable[[], Block]:
    from opencda_marl.assemble import quiet_process

    with quiet_process(threads):
        peer: Peer = make_peer(name, settings, [_batch(settings.batch_size, seed) for seed in range(_BATCHES)])

    def measure() -> Block:
        with quiet_process(threads):
            begin = time.perf_counter()
            peer.step()
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            for _ in range(_STEPS):
                peer.step()
            return Block(time.perf_counter() - begin, _STEPS, spans={"first_s": first})

    return measure


def _batch(rows: int, seed: int) -> SacRows:
    """Numbers as the learner's scene has them; one decision in fifty ends its vehicle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> torch.Tensor:
        return 0.5 * torch.randn(rows, width, generator=generator)

    ended = torch.rand(rows, generator=generator) < 0.02
    return SacRows(normal(_FEATURES), torch.tanh(normal(1)), normal(1), 0.99 * (~ended).float(), normal(_FEATURES))
