"""Answers of the commands, for people: one function each, from the plain values that `--json` prints."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from opencda_marl.config import from_run_folder
from opencda_marl.core.errors import Interrupted
from opencda_marl.core.run_folder import RunFolder
from opencda_marl.core.speech import about, counted, number, percent, seconds
from opencda_marl.core.stopping import StopRequest
from opencda_marl.core.verdict import in_words
from opencda_marl.display import show_facts, show_table, unheard
from opencda_marl.outlook import table_episodes, table_seconds
from opencda_marl.policies.catalogue import BUNDLED

if TYPE_CHECKING:
    from opencda_marl.report import Report

__all__ = [
    "following",
    "report_on",
    "show_bench",
    "show_checks",
    "show_description",
    "show_evaluation",
    "show_profile",
    "show_report",
    "show_runs",
    "show_verification",
]

_LISTED = 12  # lines of a long list
_EVERY = 15.0  # [s] between two lines of progress in a pipe
_SILENT = 60.0  # [s] after which a line is said again though nothing came to it


@contextmanager
def following(
    console: Console, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """A function that hears (what is done, episodes done, in all): a live line, in a pipe one every 15 seconds.

    Args:
        console: to write to.
        clock: [s]; for tests.
    """
    began: dict[str, tuple[float, int]] = {}  # when it got going, and how much was done then
    said_at, said = 0.0, ""
    with console.status("starting") if console.is_terminal else nullcontext() as status:

        def tell(what: str, done: int, total: int) -> None:
            nonlocal said_at, said
            now = clock()
            new = what not in began
            since, before = began.setdefault(what, (now, done))
            if before == 0 and done:  # the first one had to wait for imports, kernels and the simulator
                began[what] = since, before = now, done
            words = f"{what} …" if not total else f"{what}: {done} of {counted(total, 'episode')}"
            if total and done > before:  # a pace needs something that was done while we listened
                words += f", {seconds((now - since) * (total - done) / (done - before))} left"
            if status is not None:
                status.update(words)
            elif new or now - said_at >= (_SILENT if words == said else _EVERY):
                said_at, said = now, words
                console.print(words, markup=False, soft_wrap=True)

        yield tell


def report_on(console: Console, folder: RunFolder, stop: StopRequest) -> None:
    """The end of a run: its final table and plots are made and shown, and kept in its log.

    A table that is there already, of the same training, is shown again. Ctrl-C leaves the table out, and the run is
    finished all the same.

    Raises:
        Interrupted: something else than Ctrl-C asked to stop.
    """
    from opencda_marl.report import final_report, kept_report, next_line

    report = kept_report(folder.path)
    if report is None:
        _say(console, folder, _announced(folder.path))
        with following(console) as tell:

            def progress(what: str, done: int, total: int) -> None:
                with unheard(console):
                    tell(what, done, total)
                folder.beat("evaluating", evaluating=what, episodes_done=done, episodes_in_all=total)

            try:
                report = final_report(folder.path, progress=progress, stop=stop)
            except Interrupted as left_out:
                if stop.by != signal.SIGINT:  # whoever ends processes by SIGTERM wants to go on later
                    raise
                _say(console, folder, f"{left_out.message}; {left_out.fix}")
                _say(console, folder, next_line(folder.path))
                return
    with unheard(console):
        show_report(console, report)
    text = io.StringIO()
    show_report(Console(file=text, width=200, highlight=False), report)
    folder.log(text.getvalue().strip())


def _announced(run: Path) -> str:
    """What comes after training, how long it takes, and how to do without."""
    settings = from_run_folder(run)
    takes = table_seconds(settings)
    how_long = "" if takes is None else f", {about(takes)}"
    episodes = counted(table_episodes(settings), "episode")
    return f"now the table: at most {episodes} of held-out traffic{how_long}; Ctrl-C leaves it out"


def _say(console: Console, folder: RunFolder, line: str) -> None:
    with unheard(console):
        console.print(line, markup=False, soft_wrap=True)
    folder.log(line)


def show_report(console: Console, report: Report) -> None:
    """The table at the end of a run, the plots, and what to type next."""
    from opencda_marl.report import COLUMNS, cell

    rows = [[cell(name, row.get(name)) for name in COLUMNS] for row in report.rows]
    console.print()
    title = "Held-out traffic, the same for everybody"
    if report.kept:
        title += " (made before; nothing was trained since)"
    show_table(console, list(COLUMNS.values()), rows, title=title)
    console.print()
    for line in report.verdict:
        console.print(line, markup=False, soft_wrap=True)
    if report.verdict:
        console.print()
    for said in (*([report.table] if report.table else []), *report.plots, *report.notes):
        console.print(str(said), markup=False, soft_wrap=True)
    console.print(report.next, markup=False, soft_wrap=True)


def _density(rate: float | list[float]) -> str:
    return " to ".join(f"{one:g}" for one in rate) if isinstance(rate, list) else f"{rate:g}"


def show_evaluation(console: Console, answer: Mapping[str, Any]) -> None:
    """The figures of one policy."""
    figures = {
        "policy": answer["policy"]
        if answer["policy"].startswith(BUNDLED)
        else answer["checkpoint"] or answer["policy"],
        "profile": answer["profile"] or "-",
        "episodes": f"{answer['episodes']} (seeds {answer['seeds'][0]}:{answer['seeds'][1]})",
        "density": f"{_density(answer['rate_vph'])} vehicles/h a lane",
        "vehicles": str(answer["vehicles"]),
        "success": f"{percent(answer['success_rate'])} % (of those that departed: "
        f"{percent(answer['success_rate_departed'])} %)",
        "collisions": f"{percent(answer['collision_rate'])} %",
        "near-misses": f"{percent(answer['near_miss_rate'])} %",
        "delay": f"{number(answer['mean_delay_s'])} s (inside {number(answer['mean_delay_inside_s'])} s)",
        "travel time": f"{number(answer['mean_travel_time_s'])} s",
        "stops": f"{number(answer['stops_per_vehicle'], 2)} a vehicle",
        "jerk": f"{number(answer['mean_jerk'], 2)} m/s^3",
        "throughput": f"{number(answer['throughput_vph'], 0)} vehicles/h",
        "at the end": f"{number(answer['running_at_end'])} inside, {number(answer['waiting_at_end'])} waiting; "
        f"longest wait {number(answer['longest_wait_s'])} s{', congested' if answer['congested'] else ''}",
        "overridden": "-"
        if answer["overridden_share"] is None
        else f"{percent(answer['overridden_share'])} % of commands",
        **({"preference": _preference(answer["preference"])} if answer["preference"] is not None else {}),
        "return": number(answer["return"], 3),
    }
    show_facts(console, figures)
    for line in in_words(answer["comparison"]) if "comparison" in answer else ():
        console.print(line, markup=False, soft_wrap=True)


def show_parity(console: Console, answer: Mapping[str, Any]) -> None:
    """CARLA beside SUMO."""
    names = {
        "place_m": "place at the same progress, m",
        "heading_deg": "heading at the same progress, degrees",
        "speed_ms": "speed at the same progress, m/s",
        "time_s": "time since departure at the same progress, s",
        "place_at_time_m": "place at the same time, m",
        "departure_s": "departure, s",
        "reward": "reward of the same decision",
    }
    rows = [
        (text, *(number(answer[key][what], 3 if key == "reward" else 2) for what in ("median", "p95", "max")))
        for key, text in names.items()
    ]
    title = f"{answer['compared']} vehicles in both, seed {answer['seed']}: differences"
    show_table(console, ("of", "median", "95 %", "largest"), rows, title=title)
    sumo, carla = answer["figures"]["sumo"], answer["figures"]["carla"]
    cells = [(key, number(sumo[key], 3), number(carla[key], 3)) for key in sumo]
    cells += [(key, *(str(answer["ends"][name][key]) for name in ("sumo", "carla"))) for key in answer["ends"]["sumo"]]
    show_table(console, ("figure", "SUMO", "CARLA"), cells)
    said = (
        "the frames agree"
        if answer["frames_agree"]
        else "the frames do NOT agree: a sign, an offset or an angle is wrong"
    )
    console.print(f"{said}. Plot: {answer['plot']}", markup=False, soft_wrap=True)


def _preference(value: str | Sequence[float]) -> str:
    return value if isinstance(value, str) else " ".join(f"{weight:g}" for weight in value)


def show_description(console: Console, answer: Mapping[str, Any]) -> None:
    """Observation, action and reward."""
    seen = answer["observation"]
    console.print(f"observation {seen['name']}, version {seen['version']}", style="bold")
    for part in ("ego", "neighbour"):
        features = seen[part]
        if features:
            title = part if part == "ego" else f"each of at most {seen['max_neighbours']} neighbours"
            cells = [[f["name"], f["unit"], f"{f['scale']:g}", f["about"]] for f in features]
            console.print()
            show_table(console, ("feature", "unit", "divided by", "meaning"), cells, title=title, text=4)
    console.print("\naction", style="bold")
    show_facts(console, {name: str(value) for name, value in answer["action"].items() if value != []})
    console.print("\nreward", style="bold")
    cells = [[r["name"], r["objective"], r["unit"], f"{r['weight']:g}", r["about"]] for r in answer["rewards"]]
    show_table(console, ("part", "objective", "unit", "weight", "meaning"), cells, text=5)
    team = "  ".join(f"{name} {value:g}" for name, value in answer["team"].items())
    show_facts(console, {"team, per vehicle": team, "discount": f"{answer['discount_per_second']:g} per second"})


def show_runs(console: Console, rows: Sequence[Mapping[str, Any]], root: Path) -> None:
    """Run folders."""
    if not rows:
        console.print(f"no runs in {root}" if not root.is_dir() else f"none in {root}", markup=False, soft_wrap=True)
        return
    cells = [
        [
            row["run"],
            row["profile"] or "-",
            row["phase"] or "-",
            row["checkpoint"] or "none",
            str(row["episodes"]),
            percent(row["success_rate"]),
            f"{row['bytes'] / 2**20:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row["updated"])),
        ]
        for row in rows
    ]
    headings = ("run", "profile", "phase", "checkpoint", "episodes", "success %", "MiB", "written")
    show_table(console, headings, cells, text=4)
    for row in rows:
        if row["error"]:
            console.print(f"{row['run']}: {row['error']}", markup=False, soft_wrap=True)


def show_profile(console: Console, answer: Mapping[str, Any]) -> None:
    """Proportions of an episode, the dearest functions, and the two checks."""
    plain = answer["unprofiled"]
    cells = [
        [span, f"{answer['span_ms'][span]:.3f}", percent(share), f"{plain['span_ms'].get(span, 0.0):.3f}"]
        for span, share in answer["spans"].items()
    ]
    cells.append(["(no span)", "", percent(answer["unaccounted_share"]), ""])
    cells.append(["all", f"{answer['ms_per_step']:.3f}", "100.0", f"{plain['ms_per_step']:.3f}"])
    show_table(console, ("span", "ms/step", "%", "ms/step unprofiled"), cells, title="Where an episode's time goes")
    console.print()
    listed = [
        [f["function"], str(f["calls"]), f"{f['own_s']:.3f}", f"{f['cumulative_s']:.3f}"]
        for f in answer["functions"][:_LISTED]
    ]
    show_table(console, ("function", "calls", "own s", "with callees s"), listed)
    same = "yes" if answer["identical_summary"] else "NO: " + ", ".join(map(str, answer["differences"][:_LISTED]))
    facts = {"summary equals the unprofiled run's": same, "other processes kept busy": f"{answer['others']:.2f} CPUs"}
    moved = answer["against"]
    if moved is not None:
        facts["moved together"] = (
            f"yes, by a factor of {moved['factor']:g}: another process's doing, not the change under test"
            if moved["moved_together"]
            else "no"
        )
        facts["changed beyond that"] = (
            ", ".join(f"{c['function']} x{c['factor']:g}" for c in moved["changed"][:_LISTED]) or "nothing"
        )
        if not moved.get("comparable", True):
            ours, theirs = moved["steps"]
            facts["WARNING"] = f"the profiles hold {ours} and {theirs} simulator steps: they are not comparable"
    facts["pstats"] = answer["pstats"]
    console.print()
    show_facts(console, facts)


def show_bench(console: Console, answer: Mapping[str, Any]) -> None:
    """What was measured, beside its floor; all columns that the rows have."""
    rows = answer["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row if not isinstance(row[name], dict | list)))
    cells = [["-" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    show_table(console, names, cells, title=f"bench {answer['what']}")
    console.print()
    facts = {k: str(v) for k, v in answer.items() if k not in ("rows", "what") and not isinstance(v, dict) and v != []}
    if answer.get("span_ms"):
        facts["ms by span"] = "  ".join(f"{span} {value:.3f}" for span, value in answer["span_ms"].items())
    show_facts(console, facts)


def show_verification(console: Console, answer: Mapping[str, Any]) -> None:
    """Was the resumed run the uninterrupted one?"""
    exact = "yes: everything compared is equal bit for bit" if answer["exact"] else "NO"
    facts = {
        "exact": exact,
        "compared": ", ".join(f"{count} {what}" for what, count in answer["compared"].items()),
        "killed": f"in episode {answer['killed_in_episode']}, {answer['killed_after_s']:.2f} s into it",
        "runs": ", ".join(answer["runs"]) or f"removed; logs and verify-resume.json in {answer['folder']}",
    }
    show_facts(console, facts)
    for difference in answer["differences"]:
        console.print(f"  {difference}", markup=False, soft_wrap=True)


def show_checks(console: Console, checks: Sequence[Mapping[str, Any]]) -> None:
    """Findings; what is not well comes with its fix."""
    marks = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "FAIL": ("FAIL", "bold red"), "absent": ("-", "dim")}
    width = max((len(check["name"]) for check in checks), default=0)
    for check in checks:
        mark, style = marks[check["outcome"]]
        console.print(f"{mark:<5}", style=style, end="")
        console.print(f"{check['name']:<{width}}  {check['found']}", markup=False, soft_wrap=True)
        if check["ok"] is not True and check["fix"]:
            console.print(f"     {'':<{width}}  fix: {check['fix']}", markup=False, soft_wrap=True)
