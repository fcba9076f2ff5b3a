"""The whole loop beside the layout that the published timings describe, rebuilt: SUMO, PCMASAC, 25 vehicles.

    python benchmarks/documented_layout.py                     the table, as Markdown (some minutes on two cores)
    python benchmarks/documented_layout.py --threads 2         with two threads of torch on both sides
    python benchmarks/documented_layout.py --only lstm         one of ours only
    python benchmarks/documented_layout.py --json FILE         the figures behind it too

The documented layout keeps raw neighbour sequences, encodes those of a batch with a packed LSTM of 256 twice per update
(before and after the action, without gradients: the encoder is frozen), acts through the same LSTM, and updates in
plain eager torch, once per env step, with a decision at every env step and the nearest 30 rows within 50 m. Its replay
is a preallocated ring and its update wastes nothing that a straightforward one need not waste (`tools/plain_sac.py`).

Both sides run the package's environment on SUMO in the same traffic, to the vehicle: what the policies answer is
computed and stored, but everybody drives at half of what is allowed, so neither side gets the easier crossing.
Each has a process of its own and they are measured in turns; a step counts while the number of vehicles is within a
fifth of the wanted one. Its time is acting, the environment's step, storing and the update.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from opencda_marl.config import load_profile
from opencda_marl.core.errors import SimulatorError
from opencda_marl.core.machine import describe_machine, versions
from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Action, ActionSpec, Observation, ObservationSpec, Step
from opencda_marl.learners.preference import Preferences
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.bench_env import holding_rate, with_rate
from opencda_marl.tools.floor import BAND
from opencda_marl.tools.measure import Block, Load, Worker, against_floor, interleave, median
from opencda_marl.tools.plain import PackedLstm
from opencda_marl.tools.plain_sac import PlainSac, SacRows

__all__ = ["Documented", "main", "measure"]

PROFILE = "sumo-marl/intersection/page_layout_pcmasac"
_SETS = ["context.encoder=deepsets", "context.hidden=64"]
OURS = {
    "lstm": [],
    "deepsets": [*_SETS, "learner.train_context_encoder=false"],
    "deepsets-trained": [*_SETS, "learner.train_context_encoder=true"],
}
"""Ours: the profile's frozen LSTM, and a set encoder in its place, frozen and trained end to end."""

_CAPACITY = 20_000  # decisions in the documented layout's replay
_PATIENCE = 20  # steps outside the band per step inside before giving up
_DEADLINE = 1800.0  # [s] of one answer, compiling included


class Side(Protocol):
    """Who acts and learns."""

    def act(self, observation: Observation) -> Action:
        """What the policy would do."""

    def learn(self, observation: Observation, action: Action, step: Step) -> bool:
        """Store what came of it and update once; was there an update?"""


class Ours:
    """The package's learner, called as the training loop calls it."""

    def __init__(self, settings: RunSettings, observation: ObservationSpec, action: ActionSpec, spans: Spans) -> None:
        from opencda_marl.assemble import make_learner

        self._learner = make_learner(settings, observation, action, spans=spans)
        self._spans = spans

    def act(self, observation: Observation) -> Action:
        """See `Side`."""
        with self._spans("act"):
            return self._learner.act(observation, explore=True)

    def learn(self, observation: Observation, action: Action, step: Step) -> bool:
        """See `Side`."""
        with self._spans("store"):
            self._learner.store(observation, action, step)
        if not self._learner.ready(step):
            return False
        self._learner.progress(0.0)
        with self._spans("update"):
            self._learner.update(step)
        return True


class Documented:
    """Raw sequences in the replay, a packed LSTM before everything, an eager update."""

    def __init__(self, settings: RunSettings, observation: ObservationSpec, action: ActionSpec, spans: Spans) -> None:
        own = own_settings(settings.learner, MasacSettings)
        torch.manual_seed(settings.seed)
        self._encoder = PackedLstm(len(observation.neighbour), settings.context).requires_grad_(False)
        width = len(observation.ego) + settings.context.size + len(OBJECTIVES)
        self.sac = PlainSac(width, own, actions=action.size, values=1 + len(OBJECTIVES))
        self._preferences = Preferences(settings.preference, settings.seed)
        self._mix, self._discount = settings.preference, settings.discount_per_second
        self._batch, self._starts = own.batch_size, max(own.batch_size, own.learning_starts)
        self._rng, self._spans = np.random.default_rng(settings.seed), spans
        one: dict[str, tuple[tuple[int, ...], Any]] = {
            "ego": ((len(observation.ego),), np.float32),
            "neighbours": ((observation.max_neighbours, len(observation.neighbour)), np.float32),
            "counts": ((), np.int32),
            "preference": ((len(OBJECTIVES),), np.float32),
        }
        both = {prefix + name: column for prefix in ("", "next_") for name, column in one.items()}
        both |= {"action": ((action.size,), np.float32), "discount": ((), np.float32)}
        both["rewards"] = ((1 + len(OBJECTIVES),), np.float32)
        self._view = tuple(one)
        self.ring = {name: np.zeros((_CAPACITY, *shape), kind) for name, (shape, kind) in both.items()}
        self.stored = 0

    @torch.no_grad()
    def _features(self, rows: dict[str, np.ndarray], prefix: str = "") -> Tensor:
        """Encode the sequences of these rows: [rows, features]."""
        view = {name: torch.from_numpy(rows[prefix + name]) for name in self._view}
        mask = torch.arange(view["neighbours"].shape[1])[None, :] < view["counts"][:, None]
        context = self._encoder(view["neighbours"], mask)
        return torch.cat([view["ego"], context, view["preference"]], -1)

    def _seen(self, observation: Observation) -> dict[str, np.ndarray]:
        preference = self._preferences.of(observation.ids, explore=True)
        neighbours, counts = observation.neighbours, observation.counts
        return {"ego": observation.ego, "neighbours": neighbours, "counts": counts, "preference": preference}

    @torch.no_grad()
    def act(self, observation: Observation) -> Action:
        """See `Side`."""
        with self._spans("act"):
            if not len(observation):
                return Action(np.zeros((0, 1), np.float32))
            values, _ = self.sac.actor(self._features(self._seen(observation)))
            return Action(values.numpy())

    def learn(self, observation: Observation, action: Action, step: Step) -> bool:
        """See `Side`."""
        with self._spans("store"):
            self._store(observation, action, step)
        if self.stored < self._starts:
            return False
        with self._spans("update"):
            self._update()
        return True

    def _store(self, observation: Observation, action: Action, step: Step) -> None:
        """A row per decision that ended; with a decision at every step all of them were made at the last one."""
        closed = step.closed
        if not len(closed):
            return
        where = (self.stored + np.arange(len(closed))) % _CAPACITY
        before = _places(observation.ids, closed.ids)
        for name, column in self._seen(observation).items():
            self.ring[name][where] = column[before]
        self.ring["action"][where] = action.values[before]
        self.ring["rewards"][where] = np.concatenate([closed.team[:, None], closed.rewards], 1)
        self.ring["discount"][where] = np.where(closed.terminated, 0.0, self._discount**closed.elapsed)
        goes_on = ~(closed.terminated | closed.truncated)
        after = _places(step.observation.ids, closed.ids[goes_on])
        for name, column in self._seen(step.observation).items():
            self.ring["next_" + name][where[goes_on]] = column[after]
        for name, column in self._seen(step.final).items():
            self.ring["next_" + name][where[closed.truncated]] = column
        self._preferences.forget(closed.ids[~goes_on])
        self.stored += len(closed)

    def _update(self) -> None:
        drawn = self._rng.integers(0, min(self.stored, _CAPACITY), self._batch)
        rows = {name: column[drawn] for name, column in self.ring.items()}
        each = self._mix.individual_weight * torch.from_numpy(rows["preference"])
        weights = torch.cat([torch.full((self._batch, 1), self._mix.team_weight), each], 1)
        given = {name: torch.from_numpy(rows[name]) for name in ("action", "rewards", "discount")}
        self.sac.update(
            SacRows(features=self._features(rows), following=self._features(rows, "next_"), weights=weights, **given)
        )


def _places(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where each of `wanted` stands in `ids`, which hold all of them."""
    order = np.argsort(ids)
    return order[np.searchsorted(ids, wanted, sorter=order)] if len(wanted) else np.zeros(0, np.int64)


class _Drive:
    """One side in the environment, episode after episode."""

    def __init__(self, side: type[Side], settings: RunSettings, vehicles: int, rate: float, threads: int) -> None:
        from opencda_marl.assemble import make_env, quiet_process

        self._threads, self._wanted = threads, vehicles
        self._spans = Spans()
        with quiet_process(threads):
            self._env = make_env(with_rate(settings, rate, vehicles), spans=self._spans)
            self._side = side(settings, self._env.observation_spec, self._env.action_spec, self._spans)
        self._share = 2.0 * min(0.5, 25.0 / vehicles) - 1.0  # slower crowds, as in the env bench
        self._now: Step | None = None
        self._episode = 0

    def _given(self, rows: int) -> Float32[np.ndarray, "rows one"]:
        return np.full((rows, 1), self._share, np.float32)

    def _step(self) -> tuple[float, Step, bool]:
        """Seconds of one step, what came of it, and was there an update?"""
        if self._now is None or self._now.done:
            kept = self._spans.take()
            self._episode += 1
            self._now = self._env.reset(self._episode)
            self._spans.seconds = kept
        seen = self._now.observation
        begin = time.perf_counter()
        action = self._side.act(seen)
        self._now = self._env.step(Action(self._given(len(seen))))
        learned = self._side.learn(seen, action, self._now)
        return time.perf_counter() - begin, self._now, learned

    def measure(self, steps: int) -> Block:
        """So many steps with an update each, at the wanted number of vehicles.

        Raises:
            SimulatorError: that number is not reached.
        """
        from opencda_marl.assemble import quiet_process

        seconds, counted, present, rows, acting, driven = 0.0, 0, 0, 0, 0, 0.0
        self._spans.take()
        with quiet_process(self._threads):
            for _ in range(steps * _PATIENCE):
                elapsed, step, learned = self._step()
                driven += elapsed
                inside = int(np.count_nonzero(self._env.state.alive))
                if not learned or step.steps != 1 or abs(inside - self._wanted) > BAND * self._wanted:
                    continue
                seconds, counted, present = seconds + elapsed, counted + 1, present + inside
                rows, acting = rows + int(step.observation.counts.sum()), acting + len(step.observation)
                if counted == steps:
                    shares = {span: spent / driven for span, spent in self._spans.take().items()}
                    return Block(seconds, counted, present / counted, rows / max(1, acting), shares)
        raise SimulatorError(f"{self._wanted} vehicles cannot be held", fix="measure with fewer: --vehicles N")


def _driving(
    side: type[Side], settings: RunSettings, vehicles: int, rate: float, steps: int, threads: int
) -> Callable[[], Block]:
    drive = _Drive(side, settings, vehicles, rate, threads)
    return lambda: drive.measure(steps)


def _rate(settings: RunSettings, vehicles: int) -> Callable[[], float]:
    return lambda: holding_rate(settings, vehicles)


def measure(
    names: Sequence[str], *, vehicles: int = 25, threads: int = 1, steps: int = 200, repeats: int = 5
) -> dict[str, Any]:
    """Measure ours of these names beside the documented layout.

    Args:
        names: of OURS.
        vehicles: on the crossing.
        threads: of torch, on both sides.
        steps: env steps of a block.
        repeats: blocks of each.
    """
    settings = {name: load_profile(PROFILE, overrides=OURS[name]).settings for name in names}
    base = load_profile(PROFILE).settings
    with Worker(_rate, base, vehicles, deadline=_DEADLINE) as calibration:
        rate = float(calibration())
    with ExitStack() as stack:
        common = (vehicles, rate, steps, threads)
        sources = {"documented": stack.enter_context(Worker(_driving, Documented, base, *common, deadline=_DEADLINE))}
        for name in names:
            sources[name] = stack.enter_context(Worker(_driving, Ours, settings[name], *common, deadline=_DEADLINE))
        for source in sources.values():
            source()  # fills crossing and replay, compiles
        with Load() as load:
            blocks: dict[str, list[Block]] = interleave(sources, repeats)
    rows = [against_floor(name, blocks[name], blocks["documented"]) for name in names]
    for row in rows:
        found = [block.spans for block in blocks[row["name"]]]
        row["share"] = {span: round(median([each.get(span, 0.0) for each in found]), 4) for span in sorted(found[0])}
    return {"what": "documented layout", "threads": threads, "rate_vph": round(rate, 1), "rows": rows, **load.report()}


def _table(found: dict[str, Any]) -> str:
    head = ["ours", "ms per env step", "documented layout", "speed-up", "vehicles", "mean rows"]
    lines = [head, ["---"] * len(head)]
    for row in found["rows"]:
        figures = [f"{row['ms_median']:.2f}", f"{row['floor_ms_median']:.2f}", f"{row['speedup']:.2f}"]
        lines.append([row["name"], *figures, f"{row['vehicles']:.1f}", f"{row['mean_rows']:.1f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Measure, print Markdown, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--vehicles", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200, help="env steps of a block")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    found = measure(
        wanted.only, vehicles=wanted.vehicles, threads=wanted.threads, steps=wanted.steps, repeats=wanted.repeats
    )
    found |= {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "versions": versions()}
    sys.stdout.write(f"{found['date']}, {found['machine']}, threads {found['threads']}\n\n{_table(found)}\n")
    sys.stdout.write(f"\nload before: {found['load']:.2f}; CPUs that others used: {found['others']:.2f}\n")
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
