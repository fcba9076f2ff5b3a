"""What a person sees: training as it goes, tables, findings. Rich in a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Evaluated, Finished, Note, Started, TrainEvent
from opencda_marl.core.spans import SPANS

__all__ = ["TrainingDisplay", "make_console", "number", "percent", "seconds", "show_facts", "show_table"]

_PLAIN_WIDTH = 200  # columns of a pipe: wide enough that no cell is folded
_RECENT = 8  # episodes shown
_EVERY = 10.0  # [s] between two plain lines
_AVERAGED = 20  # episodes in the last row

_INIT = ("algorithm", "device", "acting_device", "threads", "torch", "encoder", "update_mode", "parameters", "backend")


def make_console(*, stderr: bool) -> Console:
    """A console on stdout, or on stderr where stdout is for a program."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


def number(value: float | None, digits: int = 1) -> str:
    """A number, `-` for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share of 1 in percent, `-` for none."""
    return "-" if value is None else f"{100.0 * value:.1f}"


def seconds(value: float | None) -> str:
    """A duration [s] as 1:05 or 2:01:05, `-` for none."""
    if value is None:
        return "-"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def show_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", text: int = 1
) -> None:
    """A table; the first `text` columns are left-aligned, the rest are figures."""
    console.print(_table(headings, rows, title=title, text=text, plain=not console.is_terminal))


def show_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Lines of `name  value`."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        console.print(f"[bold]{escape(name.ljust(width))}[/bold]  {escape(value)}", soft_wrap=True)


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", text: int = 1, plain: bool
) -> RichTable:
    table = RichTable(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(
            heading, justify="left" if index < text else "right", no_wrap=plain, header_style="" if plain else "bold"
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


class TrainingDisplay:
    """A listener of training. In a terminal one picture that is redrawn, in a pipe a line every ten seconds.

    Args:
        console: to write to.
        clock: [s]; for tests.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._lines: list[dict[str, Any]] = []  # of the last episodes
        self._unsaid: list[dict[str, Any]] = []  # since the last plain line
        self._said_at = -_EVERY
        self._progress = 0.0
        self._eta: float | None = None
        self._status: dict[str, Any] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # drawn when something happens, once a second at least: a thread of its own would take time from the loop
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._picture)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._unsaid:
            self._say()

    def __call__(self, event: TrainEvent) -> None:
        """Show what happened."""
        match event:
            case Started(run_dir, init, episode):
                self._print(f"{'resumed' if episode else 'run'}: {run_dir}")
                self._print("init: " + "  ".join(f"{key}={init[key]}" for key in _INIT if key in init))
            case Beat(status):
                self._status = {**self._status, **status}
                self._progress = status.get("progress", self._progress)
            case EpisodeDone(line, progress, eta):
                self._lines = [*self._lines, line][-_AVERAGED:]
                self._unsaid.append(line)
                self._progress, self._eta = progress, eta
                if self._live is None and self._clock() - self._said_at >= _EVERY:
                    self._say()
            case Evaluated(episode, rows):
                found = ", ".join(f"{percent(r['success_rate'])} % at {number(r['rate_vph'], 0)} vph" for r in rows)
                self._print(f"held-out traffic, policy of episode {episode}: success {found}")
            case Checkpointed(_, episode, best):
                if best and self._live is not None:
                    self._status = {**self._status, "best": f"episode {episode}"}
            case Note(text):
                self._print(f"note: {text}")
            case Finished(summary):
                self._progress, self._eta, self._status = 1.0, 0.0, {**self._status, "phase": "done"}
                self._print(
                    f"trained: {summary['episodes']} episodes, {summary['env_steps']} steps in "
                    f"{seconds(summary['training_s'])}"
                )
        if self._live is not None:
            self._live.refresh()

    def _print(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def _say(self) -> None:
        """One plain line: the episodes since the last one, averaged."""
        mean = _averages(self._unsaid)
        last = self._unsaid[-1]
        spans = _spans_in_words(mean["spans"], " ")
        self._print(
            f"episode {last['episode']}  return {number(mean['return'], 2)}  success {percent(mean['success'])} %  "
            f"collisions {percent(mean['collisions'])} %  {number(mean['ms'], 2)} ms/step ({spans})  "
            f"{percent(self._progress)} % done, {seconds(self._eta)} left"
        )
        self._unsaid = []
        self._said_at = self._clock()

    def _picture(self) -> RenderableType:
        done = RichTable.grid(padding=(0, 2, 0, 0))
        done.add_row(
            ProgressBar(total=1.0, completed=self._progress, width=40),
            f"{100 * self._progress:.0f} %",
            f"{seconds(self._eta)} left",
            str(self._status.get("phase", "starting")),
            f"best: {self._status['best']}" if "best" in self._status else "",
        )
        if not self._lines:
            return Group(done, Text("the first episode is under way", style="dim"))
        headings = ("episode", "vph", "vehicles", "return", "success %", "collisions %", "delay s", "ms/step")
        rows = [_row(str(line["episode"]), [line]) for line in self._lines[-_RECENT:]]
        rows.append(_row(f"last {len(self._lines)}", self._lines))
        return Group(Text(), _table(headings, rows, plain=False), Text(), self._spans(), Text(), done)

    def _spans(self) -> RenderableType:
        return Text("ms per step: " + _spans_in_words(_averages(self._lines)["spans"], "  "), style="dim")


def _spans_in_words(spans: Mapping[str, float], between: str) -> str:
    return between.join(f"{name} {value:.2f}" for name, value in spans.items() if value >= 0.005)


def _row(name: str, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    mean = _averages(lines)
    return [
        name,
        number(mean["rate"], 0),
        str(sum(line["scheduled"] for line in lines)),
        number(mean["return"], 2),
        percent(mean["success"]),
        percent(mean["collisions"]),
        number(mean["delay"]),
        number(mean["ms"], 2),
    ]


def _averages(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
