"""Held-out evaluation beside a training: a child drives a checkpoint, and what it finds says which one is `best`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from opencda_marl.core.children import OneAtATime
from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.events import Evaluated, Listener, Note
from opencda_marl.core.run_folder import RunFolder, read_metrics, typed
from opencda_marl.settings.run import RunSettings

__all__ = ["CRASH", "HeldOut", "held_out_score"]

CRASH = 200.0
"""[s] of delay that a crash is worth where checkpoints are compared: the default reward weighs them so (20 / 0.1)."""

_GIVEN_UP = 0.25  # [s] a step of its episodes likewise, of any: ten minutes for 2,400
_PATIENCE = 30.0  # [s] without a sign from an evaluation that stands behind others, once training is over


def held_out_score(rows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Of held-out evaluation at several rates, larger is better.

    First that traffic is let in (who waits outside at the end, by steps of 5 % of all: a policy that stands still
    crashes nobody), then little delay, where whoever crashes or is removed counts as `CRASH` seconds: the evaluations
    that are compared are short, and one crash more or less in them is no reason to drive a second slower for ever.
    """

    def mean(name: str) -> float:
        return sum(row[name] or 0.0 for row in rows) / len(rows)

    outside = sum(_waiting(row) for row in rows) / len(rows)
    return -math.floor(20.0 * outside), -(mean("mean_delay_s") + CRASH * (1.0 - mean("success_rate")))


class HeldOut:
    """Evaluations of a run, one at a time. Whatever goes wrong with one is a note, and no end of the training.

    What ran or waited when a run ended was never written down: where the run goes on, the newest of those is asked for
    again, and `best` is what the others say.

    Args:
        folder: of the run.
        settings: of the run.
        listener: hears what was found, and notes.
        done: episodes that are finished.
        size: workers, whose episodes end together.
    """

    def __init__(self, folder: RunFolder, settings: RunSettings, listener: Listener, *, done: int, size: int) -> None:
        self._folder = folder
        self._evaluation = settings.evaluation
        self._listener = listener
        self._place = folder.path / "evaluations"
        # Workers run in step: time that one of them loses is lost to all of them.
        self._jobs = OneAtATime("opencda_marl.evaluate", folder=self._place, behind=size > 1)
        self._given_up = _GIVEN_UP * max(2400, settings.max_steps)  # [s]
        self._sign, self._since = "", time.monotonic()  # the last one of a child, and when
        scores = _scores(folder, len(self._evaluation.rates_vph))
        self._best = max(scores.values(), default=None)  # score of `best`; None: no evaluation has come in
        if scores:
            folder.checkpoints.point_best(f"episode_{max(scores, key=lambda episode: (scores[episode], episode))}")
        every = settings.eval_every
        if 0 < every <= done:
            last = -(-(done // every * every) // size) * size  # the end of the round that the last one fell into
            if last not in scores and last in folder.checkpoints.numbered():
                self.ask(last)

    @property
    def decides(self) -> bool:
        """Does it say which checkpoint is `best`? From its first result on nothing else does."""
        return self._best is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Checkpoints that are or will be evaluated."""
        return self._jobs.names

    def ask(self, episode: int) -> None:
        """Have the checkpoint of an episode evaluated; one that waits for its turn is replaced."""
        name, chosen = f"episode_{episode}", self._evaluation
        request = {
            "jobs": [{"policy": str(self._folder.path / "checkpoints" / name), "rates_vph": list(chosen.rates_vph)}],
            "config": str(self._folder.path),
            "seeds": list(chosen.selection_seeds),
        }
        try:
            replaced = self._jobs.ask(name, request)
        except (OpenCDAError, OSError) as error:
            self._tell(error)
            return
        if replaced is not None:
            text = f"held-out evaluation is slower than training: {replaced} was skipped"
            self._listener(Note(f"{text}; a larger eval_every avoids that"))

    def collect(self, *, wait: bool = False) -> None:
        """Write down what was found since; with `wait` a second is waited for it."""
        try:
            found = self._jobs.poll(wait=wait)
        except (OpenCDAError, OSError) as error:
            self._tell(error)
            return
        if found is None:
            return
        name, rows = found
        episode = int(name.rpartition("_")[2])
        for row in rows:
            self._folder.metrics({"kind": "evaluation", "episode": episode, **row})
        score = held_out_score(rows)
        if self._best is None or score >= self._best:
            self._best = score
            self._folder.checkpoints.point_best(name)
        self._listener(Evaluated(episode, rows))

    def finish(self) -> None:
        """Training is over: `collect`, waiting; one that gets nowhere behind others begins anew, beside them."""
        sign = f"{self.names}"
        with suppress(OSError, IndexError):
            sign += (self._place / f"{self.names[0]}.progress").read_text()
        if sign != self._sign:
            self._sign, self._since = sign, time.monotonic()
        elif time.monotonic() - self._since > self._given_up:
            told = f"not one episode in {self._given_up / 60.0:.0f} minutes; its words are in {typed(self._place)}"
            self._listener(Note(f"held-out evaluation of {' and '.join(self.names)} is given up: {told}"))
            self._jobs.close()
        elif time.monotonic() - self._since > _PATIENCE:
            try:
                self._jobs.hurry()
            except (OpenCDAError, OSError) as error:
                self._tell(error)
        self.collect(wait=True)

    def close(self) -> None:
        """End the child; may be called twice."""
        self._jobs.close()

    def _tell(self, error: Exception) -> None:
        self._listener(Note(f"held-out evaluation failed; training goes on. {error}"))


def _waiting(row: Mapping[str, Any]) -> float:
    """The share of an evaluation's vehicles that never got in."""
    waiting = float(row["waiting_at_end"])
    everybody = row["vehicles"] / row["episodes"] + row["running_at_end"] + waiting
    return waiting / everybody if everybody else 0.0


def _scores(folder: RunFolder, rates: int) -> dict[int, tuple[float, ...]]:
    """Episode -> score of its evaluation, of those that the run has written down whole: at all rates.

    Of an evaluation that a full disk or a kill cut short the first rates may be there, which are the easy ones.
    """
    rows: dict[int, list[dict[str, Any]]] = {}
    for line in read_metrics(folder.path):
        if line["kind"] == "evaluation":
            rows.setdefault(line["episode"], []).append(line)
    return {episode: held_out_score(found[-rates:]) for episode, found in rows.items() if len(found) >= rates}
