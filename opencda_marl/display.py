"""What a person sees: training as it goes, tables, findings. Rich in a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Finished, TrainEvent
from opencda_marl.core.run_folder import typed
from opencda_marl.core.speech import Speech, averages, number, percent, seconds, spans_in_words
from opencda_marl.core.streams import into_nothing

__all__ = ["TrainingDisplay", "as_typed", "make_console", "program", "show_facts", "show_table", "unheard"]

_PLAIN_WIDTH = 200  # columns of a pipe: wide enough that no cell is folded
_ENDLESS = 10_000  # columns that a table may have there
_RECENT = 8  # episodes shown
_AVERAGED = 20  # episodes in the last row
_COMMAND = re.compile(
    r"(?<![\w./-])opencda-marl"
    r"(?= (?:bench|config|describe|docker-carla|doctor|evaluate|list|matrix|profile|runs?|verify-resume)\b)"
)


@cache
def program() -> str:
    """What starts this installation if it is typed here: `opencda-marl` where the shell finds it, else its path."""
    python = Path(sys.executable)
    beside = (Path(sys.argv[0]), python.with_name("opencda-marl"))
    scripts = [path.absolute() for path in beside if path.name == "opencda-marl" and path.is_file()]
    found = shutil.which("opencda-marl")
    if found is not None and any(path.parent.resolve() == Path(found).parent.resolve() for path in scripts):
        return "opencda-marl"
    if scripts:
        return typed(scripts[0])
    found = shutil.which("python")
    known = found is not None and Path(found).parent.resolve() == python.parent.resolve()
    return f"{'python' if known else typed(python)} -m opencda_marl.cli"


def as_typed(text: str) -> str:
    """A text whose commands run as they stand: those of `opencda-marl` begin with `program()`."""
    return _COMMAND.sub(lambda _: program(), text)


class _Console(Console):
    """Everything that people read goes through here, so here is where commands get the program's path."""

    def print(self, *objects: Any, **options: Any) -> None:
        if any(isinstance(thing, str) and _COMMAND.search(thing) for thing in objects):
            name = program() if options.get("markup") is False else escape(program())
            objects = tuple(_COMMAND.sub(lambda _: name, x) if isinstance(x, str) else x for x in objects)
        super().print(*objects, **options)


def make_console(*, stderr: bool) -> Console:
    """A console on stdout, or on stderr where stdout is for a program."""
    console = _Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else _Console(stderr=stderr, highlight=False, width=_PLAIN_WIDTH)


@contextmanager
def unheard(console: Console) -> Iterator[None]:
    """Only printing goes in here: a stream that is gone or full silences the console, and nothing else happens."""
    try:
        yield
    except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
        console.quiet = True
        into_nothing(console.file)


def show_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", text: int = 1
) -> None:
    """A table; the first `text` columns are left-aligned, the rest are figures."""
    table = _table(headings, rows, text=text, plain=not console.is_terminal)
    if title:  # rich would fold it to the table's width
        console.print(title, style="italic", markup=False, soft_wrap=True)
    if console.is_terminal:
        console.print(table)
        return
    endless = Console(file=io.StringIO(), width=_ENDLESS, color_system=None)  # nothing is cut off in a pipe
    with endless.capture() as captured:
        endless.print(table)
    for line in captured.get().splitlines():  # nobody pads a line for a pipe
        console.print(line.rstrip(), markup=False, soft_wrap=True)


def show_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Lines of `name  value`."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        console.print(f"[bold]{escape(name.ljust(width))}[/bold]  {escape(value)}", soft_wrap=True)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1, plain: bool) -> RichTable:
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
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
        self._speech = Speech(clock=clock)
        self._lines: list[dict[str, Any]] = []  # of the last episodes
        self._progress = 0.0
        self._eta: float | None = None
        self._status: dict[str, Any] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # drawn when something happens, once a second at least: a thread of its own would take time from the loop
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._picture)
            with unheard(self._console):
                self._live.start()
            if self._console.quiet:  # it did not get as far as that
                self._live = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with unheard(self._console):
            if self._live is None:
                self._say(self._speech.rest())
        self._end()

    def __call__(self, event: TrainEvent) -> None:
        """Show what happened."""
        said = self._speech(event)
        match event:
            case Beat(status):
                self._status = {**self._status, **status}
                self._progress = status.get("progress", self._progress)
            case EpisodeDone(line, progress, eta):
                self._lines = [*self._lines, line][-_AVERAGED:]
                self._progress, self._eta = progress, eta
            case Checkpointed(_, episode, best):
                if best:
                    self._status = {**self._status, "best": f"episode {episode}"}
            case Finished():
                self._progress, self._eta, self._status = 1.0, 0.0, {**self._status, "phase": "done"}
        with unheard(self._console):
            self._show(event, said)
        if isinstance(event, Finished):  # what comes now has a picture of its own
            self._end()

    def _show(self, event: TrainEvent, said: Sequence[str]) -> None:
        if self._live is None:
            self._say(said)
            return
        if not isinstance(event, EpisodeDone):  # episodes are in the picture
            self._say(said[-1:] if isinstance(event, Finished) else said)
        self._live.refresh()

    def _end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with unheard(self._console):
                live.stop()

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(line, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        done = RichTable.grid(padding=(0, 2, 0, 0))
        done.add_row(
            ProgressBar(total=1.0, completed=self._progress, width=40),
            f"{100 * self._progress:.0f} %",
            "" if self._eta is None else f"{seconds(self._eta)} left",
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
        return Text("ms per step: " + spans_in_words(averages(self._lines)["spans"], "  "), style="dim")


def _row(name: str, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    mean = averages(lines)
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
