"""A matrix, for people: a live table in a terminal, plain lines elsewhere; its cells, slots and figures as tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from opencda_marl.core.run_folder import ACTIVE_PHASES
from opencda_marl.core.speech import counted, number, percent, plain, seconds
from opencda_marl.display import show_table, unheard

__all__ = ["MatrixDisplay", "event_line", "show_matrix", "show_plan", "show_report", "show_slots"]

_HEADINGS = ("cell", "state", "episode", "success %", "ms/step", "left", "last error")
_TEXTS = (0, 1, 6)  # columns that are no figures
_IDLE = ("waiting", "finished")
_IDLE_ROWS = 5  # of these, in a terminal
_EVERY = 30.0  # [s] between two lines about the whole, in a pipe
_ERROR = 60  # characters of an error in a table
_ROWS = 200  # rows that a pipe gets


class MatrixDisplay:
    """A listener of the launcher.

    Args:
        console: to write to.
        clock: [s]; for tests.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None
        self._facts: dict[str, Any] = {"rows": []}
        self._said_at = clock()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._picture, transient=True)
            with unheard(self._console):
                self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            with unheard(self._console):
                live.stop()

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        """Show what happened."""
        if kind != "beat":
            self._say(event_line(kind, facts))
            return
        self._facts = facts
        if self._live is not None:
            with unheard(self._console):
                self._live.refresh()
        elif self._clock() - self._said_at >= _EVERY:
            self._said_at = self._clock()
            self._say(_whole(facts["rows"], facts.get("steps_per_s")))

    def _say(self, line: str) -> None:
        line = "\n".join(map(plain, line.split("\n")))  # errors quote what others have printed
        with unheard(self._console):
            self._console.print(line, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        """Plain lines, padded here: a table of rich costs more than everything else that the launcher does."""
        rows = sorted(self._facts["rows"], key=lambda row: _order(row["state"]))
        shown = rows[: max(3, self._console.size.height - 4)]
        idle = [row for row in shown if row["state"] in _IDLE]
        shown = shown[: len(shown) - len(idle)] + idle[:_IDLE_ROWS]
        cells = [list(_HEADINGS), *(_cells(row) for row in shown)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADINGS))]
        lines = ["  ".join(map(_padded, range(len(_HEADINGS)), row, widths)).rstrip() for row in cells]
        if len(rows) > len(shown):
            lines.append(f"and {counted(len(rows) - len(shown), 'more cell')}")
        lines.append(_whole(rows, self._facts.get("steps_per_s")))
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _padded(column: int, text: str, width: int) -> str:
    return text.ljust(width) if column in _TEXTS else text.rjust(width)


def _order(state: str) -> int:
    """What is at work first, what is over last."""
    first = (
        "running",
        *ACTIVE_PHASES[::-1],
        "server",
        "ending",
        "retrying",
        "failed",
        "died",
        "stopped",
        "waiting",
        "finished",
    )
    return first.index(state) if state in first else len(first)


def _cells(row: Mapping[str, Any]) -> list[str]:
    beyond = row["episodes"] is None or (row["episode"] or 0) > row["episodes"]  # its budget was lowered since
    of = "" if beyond else f"/{row['episodes']}"
    slot = "" if row["slot"] is None else f" in {row['slot']}"
    return [
        plain(row["name"]),
        f"{row['state']}{slot}",
        "-" if row["episode"] is None else f"{row['episode']}{of}",
        percent(row["success"]),
        number(row["ms_per_step"], 2),
        seconds(row["eta_s"]),
        _short(row),
    ]


def _short(row: Mapping[str, Any]) -> str:
    if not row["error"]:
        return ""
    text = plain(f"{row['failure']}: {row['error']}".replace("\n", " "))
    return text if len(text) <= _ERROR else f"{text[: _ERROR - 1]}…"


def _whole(rows: Sequence[Mapping[str, Any]], rate: float | None) -> str:
    states: dict[str, int] = {}
    for row in rows:
        state = "running" if row["state"] in (*ACTIVE_PHASES, "server", "ending") else row["state"]
        states[state] = states.get(state, 0) + 1
    told = ", ".join(f"{states[state]} {state}" for state in sorted(states, key=_order))
    return f"{counted(len(rows), 'cell')}: {told}; {number(rate, 0)} steps/s"


def event_line(kind: str, facts: Mapping[str, Any]) -> str:
    """An event of the launcher as a line."""
    cell = f"{plain(str(facts.get('name', '')))} ({facts.get('cell')})"
    match kind:
        case "launched":
            slots = counted(len(facts["slots"]), "slot")
            if facts.get("runners"):
                slots = counted(facts["runners"], "runner")
                slots += f", of which {facts['adopted']} at work already" if facts["adopted"] else ""
            return f"matrix {plain(facts['name'])}: {counted(facts['cells'], 'cell')}, {facts['left']} to do, {slots}"
        case "started":
            again = f", attempt {facts['attempt']}" if (facts.get("attempt") or 1) > 1 else ""
            where = f" of {facts['runner']}" if facts.get("runner") else ""
            return f"{cell}: started in slot {facts['slot']}{where}{again}"
        case "finished":
            return f"{cell}: finished"
        case "stopped":
            return f"{cell}: stopped; {counted(facts['saved'], 'episode')} saved"
        case "recycle":
            return f"{cell}: asks for a fresh start after {counted(facts['saved'], 'episode')}; that is no failure"
        case "retrying":
            note = f"; {facts['note']}" if facts.get("note") else ""
            tries = f"failure {facts['count']} of {facts['allowed']} that are forgiven"
            return f"{cell}: {facts['failure']}: {facts['error']}; again in {facts['delay']:.0f} s ({tries}){note}"
        case "failed":
            fix = f"\n  fix: {facts['fix']}" if facts.get("fix") else ""
            log = f"\n  log: {facts['log']}" if facts.get("log") else ""
            return f"{cell}: FAILED: {facts['failure']}: {facts['error']}{fix}{log}"
        case "scaled" if "mps" in facts:
            now = "with" if facts["mps"] else "without"
            return f"{facts['steps_per_s']:.0f} steps/s with {counted(facts['cells'], 'cell')}: now {now} MPS"
        case "scaled":
            return f"{facts['steps_per_s']:.0f} steps/s with {facts['before']}: now {counted(facts['cells'], 'cell')}"
        case "runner_placed":
            return f"runner {facts['runner']}: handed to the engine"
        case "runner_ended":
            return f"runner {facts['runner']}: ended ({facts['how']})"
        case "leased":
            whose = f"{counted(facts['count'], 'cell')} belong to launchers of another machine that may be gone"
            return f"{whose}: taken over after {facts['seconds']:g} s without a sign of life"
        case "lost":
            return f"{cell}: another launcher has taken it over, as this one gave no sign of life"
        case "server_starting":
            return f"slot {facts['slot']}: its server is starting on port {facts['port']}"
        case "server_ready":
            note = f"\n  note: {facts['note']}" if facts.get("note") else ""
            if facts.get("foreign"):
                who = f"a server that is not ours answers on port {facts['port']}: used, never restarted"
                return f"slot {facts['slot']}: {who}{note}"
            return f"slot {facts['slot']}: its server answers after {facts['seconds']:.0f} s{note}"
        case "server_failed":
            return f"slot {facts['slot']}: its server: {facts['error']}"
        case "slot_set_aside":
            fix = f"\n  fix: {facts['fix']}" if facts.get("fix") else ""
            again = f"set aside, tried again in {facts['delay']:.0f} s (failure {facts['failures']})"
            return f"slot {facts['slot']}: {again}: {facts['error']}{fix}"
        case _:
            told = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
            return f"{kind.replace('_', ' ')}{': ' if told else ''}{told}"


def show_plan(console: Console, answer: Mapping[str, Any]) -> None:
    """Cells and slots of a dry run."""
    rows = [
        [cell["id"], plain(cell["profile"]), str(cell["seed"]), plain(cell["varies"]), cell["budget"], cell["state"]]
        for cell in answer["cells"]
    ]
    title = f"{plain(answer['name'])}: {counted(len(rows), 'cell')}, in {plain(answer['folder'])}"
    show_table(console, ("cell", "profile", "seed", "varies", "budget", "state"), rows, title=title, text=6)
    console.print("")
    show_slots(console, answer["slots"])
    for note in answer["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def show_slots(console: Console, slots: Sequence[Mapping[str, Any]]) -> None:
    """The slot table."""
    rows = [
        [
            str(slot["index"]),
            _or_dash(slot["cuda"]),
            _or_dash(slot.get("uuid")),
            _or_dash(slot["adapter"]),
            " ".join(str(port) for port in slot["ports"]) or "-",
            str(slot["threads"]),
        ]
        for slot in slots
    ]
    show_table(console, ("slot", "GPU", "UUID", "CARLA adapter", "ports", "threads"), rows, text=6)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def show_matrix(console: Console, answer: Mapping[str, Any]) -> None:
    """`matrix status`."""
    rows = sorted(answer["cells"], key=lambda row: _order(row["state"]))
    shown = [[row["cell"], *_cells(row)] for row in rows[:_ROWS]]
    who = f"launcher {answer['launcher']} is {answer['launcher_phase']}" if answer["launcher"] else "no launcher"
    show_table(console, ("id", *_HEADINGS), shown, title=f"{plain(answer['name'])}: {who}", text=3)
    if len(rows) > _ROWS:
        console.print(f"and {counted(len(rows) - _ROWS, 'more cell')}; all of them with --json", markup=False)
    for slot in answer["slots"]:
        if slot.get("trouble"):
            where = f"slot {slot['index']}" + (f" of {slot['runner']}" if slot.get("runner") else "")
            console.print(f"{where}: set aside, its server: {plain(slot['trouble'])}", markup=False, soft_wrap=True)
    console.print(_whole(rows, answer["steps_per_s"]), markup=False, soft_wrap=True)


def show_report(console: Console, answer: Mapping[str, Any]) -> None:
    """`matrix report`."""
    headings = ("cells", "seeds", "finished", "success %", "collisions %", "delay s", "return")
    rows = [
        [
            plain(group["group"]),
            str(group["seeds"]),
            str(group["finished"]),
            _with_error(group, "success_rate", percent),
            _with_error(group, "collision_rate", percent),
            _with_error(group, "mean_delay_s", number),
            _with_error(group, "return", lambda value: number(value, 2)),
        ]
        for group in answer["groups"]
    ]
    last = f"the last {answer['over_episodes']} episodes of each cell, mean ± standard error over seeds"
    title = f"{plain(answer['name'])}: {last}"
    show_table(console, headings, rows, title=title)


def _with_error(group: Mapping[str, Any], key: str, shown: Callable[[float | None], str]) -> str:
    error = group[f"{key}_error"]
    return shown(group[key]) if error is None else f"{shown(group[key])} ± {shown(error)}"
