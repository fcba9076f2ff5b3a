"""What a run says, as plain lines: for a pipe, and for log.txt. Figures in words, for whoever shows them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opencda_marl.core.events import EpisodeDone, Evaluated, Finished, Note, Started, TrainEvent
from opencda_marl.core.spans import SPANS

__all__ = [
    "Speech",
    "about",
    "amount",
    "averages",
    "counted",
    "number",
    "percent",
    "plain",
    "seconds",
    "spans_in_words",
]

_EVERY = 10.0  # [s] between two lines of episodes
_FOREVER = 1e9  # [s], some 30 years: more than that is not told apart
_LONG = "more than 30 years"
_DEAREST = 3  # spans in a line of episodes; all of them are in episodes.jsonl

_INIT = (
    "algorithm",
    "device",
    "acting_device",
    "workers",
    "threads",
    "torch",
    "encoder",
    "update_mode",
    "update_passes",
    "gradient_sums",
    "updates_per_step",
    "parameters",
    "replay",
    "backend",
)


def number(value: float | None, digits: int = 1) -> str:
    """A number, `-` for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share of 1 in percent, `-` for none."""
    return "-" if value is None else f"{100.0 * value:.1f}"


def seconds(value: float | None) -> str:
    """A duration [s] as 1:05 or 2:01:05, `-` for none; infinity and the like are `more than 30 years`."""
    if value is None or math.isnan(value):
        return "-"
    if value > _FOREVER:
        return _LONG
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def about(value: float) -> str:
    """A duration [s] that is only roughly known: `about 2 minutes`."""
    if value < 45.0:
        return "less than a minute"
    if value > _FOREVER:
        return _LONG
    minutes = round(value / 60.0)
    if minutes < 100:
        return "about a minute" if minutes == 1 else f"about {minutes} minutes"
    hours = round(minutes / 60.0)
    return f"about {hours} hours" if hours < 100 else f"about {counted(round(hours / 24.0), 'day')}"


def plain(text: str) -> str:
    """A text on one line of a terminal: line breaks, ESC and the like as they are written in Python."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def amount(value: float) -> str:
    """A number from 0 as a person says it: `4.9`, `5000`, `2.5 million`, `more than 1000 billion`."""
    if value < 1_000_000:
        return str(value) if isinstance(value, int) else f"{value:.6g}" if value < 999_999 else "1 million"
    if value < 1_000_000_000:
        return f"{value / 1e6:.4g} million"
    return f"{value / 1e9:.4g} billion" if value <= 1_000_000_000_000 else "more than 1000 billion"


def counted(count: int, what: str) -> str:
    """`1 episode`, `2 episodes`, `2.5 million episodes`."""
    return f"{amount(count)} {what}" if count == 1 else f"{amount(count)} {what}s"


class Speech:
    """Events of training -> lines; episodes are averaged over ten seconds.

    Args:
        clock: [s]; for tests.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unsaid: list[dict[str, Any]] = []  # episodes since the last line
        self._said_at = -_EVERY
        self._progress = 0.0
        self._eta: float | None = None

    def __call__(self, event: TrainEvent) -> list[str]:
        """What there is to say now; often nothing."""
        match event:
            case EpisodeDone(line, progress, eta):
                self._unsaid.append(line)
                self._progress, self._eta = progress, eta
                return self.rest() if self._clock() - self._said_at >= _EVERY else []
            case Started(run_dir, init, episode, plan):
                chosen = "  ".join(f"{key}={init[key]}" for key in _INIT if key in init)
                begun = [f"{'resumed' if episode else 'run'}: {run_dir}", f"init: {chosen}"]
                return [*begun, f"plan: {plan}"] if plan else begun
            case Evaluated(episode, rows):
                found = ", ".join(f"{percent(r['success_rate'])} % at {number(r['rate_vph'], 0)} vph" for r in rows)
                return [f"held-out traffic, policy of episode {episode}: success {found}"]
            case Note(text):
                return [f"note: {text}"]
            case Finished(summary):
                done = f"{counted(summary['episodes'], 'episode')}, {counted(summary['env_steps'], 'step')}"
                return [*self.rest(), f"trained: {done} in {seconds(summary['training_s'])}"]
        return []

    def rest(self) -> list[str]:
        """Episodes that were not yet spoken of, as one line."""
        if not self._unsaid:
            return []
        mean, last = averages(self._unsaid), self._unsaid[-1]
        self._unsaid = []
        self._said_at = self._clock()
        return [
            f"episode {last['episode']}  {number(mean['rate'], 0)} vph  return {number(mean['return'], 2)}  "
            f"success {percent(mean['success'])} %  collisions {percent(mean['collisions'])} %  "
            f"delay {number(mean['delay'])} s  {number(mean['ms'], 2)} ms/step "
            f"({spans_in_words(mean['spans'], ', ', most=_DEAREST)})  "
            f"{percent(self._progress)} % done{'' if self._eta is None else f', {seconds(self._eta)} left'}"
        ]


def spans_in_words(spans: Mapping[str, float], between: str, *, most: int | None = None) -> str:
    """Milliseconds by span, without those that are next to nothing; of `most` the dearest alone, the dearest first."""
    shown = {name: value for name, value in spans.items() if value >= 0.005}
    if most is not None:
        shown = dict(sorted(shown.items(), key=lambda item: -item[1])[:most])
    return between.join(f"{name} {value:.2f}" for name, value in shown.items())


def averages(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of several episodes: rates pooled over vehicles, times over steps."""
    ended = sum(line["arrived"] + line["collided"] + line["removed"] for line in lines)
    steps = sum(line["steps"] for line in lines)
    named = {name for line in lines for name in line["spans"]}
    order = [*(name for name in SPANS if name in named), *sorted(named - {*SPANS})]
    return {
        "rate": _mean([line["rate_vph"] for line in lines]),
        "return": _mean([line["return"] for line in lines]),
        "delay": _mean([line["mean_delay_s"] for line in lines]),
        "success": sum(line["arrived"] for line in lines) / ended if ended else None,
        "collisions": sum(line["collided"] for line in lines) / ended if ended else None,
        "ms": 1000.0 * sum(line["wall_s"] for line in lines) / max(1, steps),
        "spans": {name: 1000.0 * sum(line["spans"].get(name, 0.0) for line in lines) / max(1, steps) for name in order},
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
