"""`opencda-marl benchmark` and `opencda-marl report`. Nothing is computed here."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opencda_marl.cli_answers import emit, quiet_stdout
from opencda_marl.core.errors import CheckpointError, ConfigError, Interrupted, OpenCDAError

if TYPE_CHECKING:
    from rich.console import Console

    from opencda_marl.benchmark.plan import Wanted
    from opencda_marl.launch.cells import Cell
    from opencda_marl.launch.launcher import Result
    from opencda_marl.settings.run import RunSettings

__all__ = ["benchmark", "report"]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout's last line, the rest on stderr.")]
_RESULTS = Path("benchmarks/results")


def benchmark(
    only: Annotated[str | None, typer.Option(help="Learners and controllers, with commas; default all.")] = None,
    seeds: Annotated[str, typer.Option(metavar="A:B", help="Training seeds, half-open; or with commas.")] = "1",
    budget_minutes: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]N", help="Of training; default 10, with a replay 30. Repeat.")
    ] = None,
    densities: Annotated[str | None, typer.Option(help="Vehicles/h a lane, with commas; default 100 to 600.")] = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, max=100_000, help="A density; default: as many as 5,000 vehicles need, 60 at least."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of all learners; repeat.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="Trainers, then evaluations, at once.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the training runs.")] = Path("runs/benchmark"),
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = _RESULTS,
    config_root: Annotated[Path | None, typer.Option(help="Folder of profiles instead of the bundled one.")] = None,
    generalisation: Annotated[
        str | None, typer.Option(metavar="POLICY", help="Instead: this policy elsewhere than it was trained.")
    ] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Only make the tables again from the results.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Page whose generated part is made again, docs/benchmark.md.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is left; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train each learner, drive everybody on the same held-out traffic; typed again it does what is left."""
    from opencda_marl.benchmark.measure import Measurement
    from opencda_marl.benchmark.plan import make_cells
    from opencda_marl.benchmark.standing import estimate, left
    from opencda_marl.cli_tables import name_tables
    from opencda_marl.core.files import could_be_written, require_writable
    from opencda_marl.launch.folder import MatrixFolder

    wanted = _wanted(only, seeds, budget_minutes, densities, episodes, settings)
    command = "opencda-marl " + " ".join(shlex.quote(word) for word in sys.argv[1:] if word != "--json")
    console = _console(as_json)
    if page is not None:
        _page(page, dry=dry_run)
    if collect or generalisation is not None:
        with quiet_stdout(as_json):
            if generalisation is not None:
                require_writable(out)
                _generalise(console, generalisation, wanted, results, out, parallel, command)
            if collect and not results.exists():
                raise ConfigError(
                    f"there are no results in {results}: there is no such folder", fix="--results FOLDER, of the files"
                )
            answer = _collected(results, wanted, page, console)
        _say(answer, as_json)
        return
    cells, entrants = make_cells(wanted, name_tables(), config_root=config_root)
    matrix = MatrixFolder(out)
    for folder in (results, out):  # a dry run refuses what the real one does
        could_be_written(folder)
    stands = left(wanted, entrants, matrix, results)
    if dry_run:
        _show_left(stands, estimate(stands, wanted, entrants, matrix, parallel), out, as_json)
        return
    for folder in (results, out):  # hours before the first file is written
        require_writable(folder)
    due = {row["name"] for row in stands if row["state"] != "done"}
    mine = {entrant.cell.id for entrant in entrants if entrant.cell is not None and entrant.name in due}
    with quiet_stdout(as_json):
        trained = _train([pair for pair in cells if pair[0].id in mine], out, parallel, console)
        if trained is not None and trained.stopped:
            raise Interrupted(
                "stopped; every finished episode up to the last boundary is saved", fix=f"for the rest: {command}"
            )
        with _following(console) as tell:
            Measurement(wanted, matrix, results, command=command, workers=parallel, tell=tell).run(entrants)
        answer = _collected(results, wanted, page, console)
    failed = list(trained.failed) if trained is not None else []
    _say({**answer, "left": left(wanted, entrants, matrix, results), "failed": failed}, as_json)
    if failed:
        raise typer.Exit(1)


def _wanted(
    only: str | None,
    seeds: str,
    budgets: Sequence[str] | None,
    densities: str | None,
    episodes: int | None,
    sets: Sequence[str] | None,
) -> Wanted:
    from opencda_marl.benchmark.plan import DENSITIES, Wanted
    from opencda_marl.launch.cells import seeds as parse_seeds

    minutes: dict[str, float] = {}
    for text in budgets or ():
        name, named, value = text.rpartition("=")
        if named and not name.strip():
            raise ConfigError(
                f"--budget-minutes {text!r} names nobody before the =",
                fix=f"for all learners: --budget-minutes {value}; for one: --budget-minutes mappo={value}",
            )
        if name.strip() in minutes:
            whose = f"for {name.strip()}" if named else "for all learners"
            raise ConfigError(f"--budget-minutes is given twice {whose}", fix="once for all, once for each name")
        minutes[name.strip()] = _number(value, "--budget-minutes", 100_000.0)
    names = _words(only)
    if only is not None and not names:
        raise ConfigError(f"--only {only!r} names nobody", fix="e.g. --only mappo,random; for everybody leave it out")
    return Wanted(
        only=tuple(names),
        seeds=tuple(parse_seeds(seeds)),
        budget_minutes=minutes,
        densities=DENSITIES
        if densities is None
        else tuple(sorted({_number(word, "--densities", 3000.0, 1.0) for word in _words(densities)})),
        episodes=episodes,
        sets=tuple(sets or ()),
    )


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _number(text: str, flag: str, most: float, least: float = 0.01) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise ConfigError(f"{flag} {text!r} is not a number from {least:g} to {most:g}", fix=f"e.g. {flag} 10")
    return float(f"{value:g}")  # as it is written in names and files


def _page(page: Path, *, dry: bool = False) -> str:
    """The page that tables go to: there, text, with a place for them, and writable; asked before anything is measured.

    Args:
        page: its file.
        dry: nothing may be written, not even to see whether it can be.

    Raises:
        ConfigError: it is not.
    """
    from opencda_marl.benchmark.page import updated_page
    from opencda_marl.core.files import could_be_written, read_regular, require_writable, typed

    fix = "--page FILE, a page with lines for the tables: docs/benchmark.md"
    try:
        text = read_regular(page).decode()
    except OSError as error:
        why = "is a folder" if page.is_dir() else f"cannot be read: {error.strerror}"
        raise ConfigError(
            f"the page {typed(page)} {'does not exist' if not page.exists() else why}", fix=fix
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the page {typed(page)} is no text (UTF-8): {error}", fix=fix) from error
    updated_page(text, "", typed(page))
    (could_be_written if dry else require_writable)(page.parent)
    return text


def _console(as_json: bool) -> Console:
    from opencda_marl.display import make_console

    return make_console(stderr=as_json)


def _following(console: Console) -> Any:
    from opencda_marl.display_results import following

    return following(console)


def _train(cells: Sequence[tuple[Cell, RunSettings]], out: Path, parallel: int, console: Console) -> Result | None:
    """The cells through the launcher of matrices; None: there is nothing to train."""
    from opencda_marl.display_matrix import MatrixDisplay
    from opencda_marl.launch.folder import Matrix, Writer
    from opencda_marl.launch.launcher import Launcher
    from opencda_marl.launch.place import Server
    from opencda_marl.launch.plan import Slot, options_from

    def none(_slot: Slot) -> Server:
        raise ConfigError("no cell of the benchmark has a server")

    if not cells:
        return None
    matrix = Matrix(
        "benchmark", tuple(cell for cell, _ in cells), options_from({}, {"parallel": parallel}), None, time.time()
    )
    with Writer(out) as folder:
        folder.write_settings(cells)
        folder.write(matrix)
        with MatrixDisplay(console) as display:
            return Launcher(
                folder,
                matrix,
                listener=display,
                served=lambda _cell: False,
                server_for=none,
                missing={},
                limit=parallel,
                cwd=Path.cwd(),
            ).run()


def _generalise(
    console: Console, policy: str, wanted: Wanted, results: Path, out: Path, workers: int, command: str
) -> None:
    from opencda_marl.benchmark.generalise import generalise

    last = Path(policy.removeprefix("bundled:")).absolute().name
    plain = "".join(letter if letter.isalnum() else "-" for letter in last).strip("-")
    with _following(console) as tell:
        generalise(
            policy,
            name=f"generalisation-{plain}",
            wanted=wanted,
            results=results,
            work=out / "evaluations",
            workers=workers,
            command=command,
            tell=tell,
        )


def _collected(results: Path, wanted: Wanted, page: Path | None, console: Console) -> dict[str, Any]:
    from opencda_marl.benchmark.page import page_text, updated_page
    from opencda_marl.benchmark.results import find_results
    from opencda_marl.benchmark.tables import aggregates, missing, rows_of, verdicts
    from opencda_marl.core.files import write_whole

    if results.exists() and not results.is_dir():
        raise ConfigError(f"{results} is a file", fix="--results FOLDER, the folder that the files of results are in")
    files = find_results([results] if results.is_dir() else [])
    if files.broken:  # tables without it would look whole
        raise CheckpointError("\n".join(error.message for error in files.broken), fix=files.broken[0].fix)
    found = files.results
    if page is not None and not any(result.get("densities") for result in found):
        raise ConfigError(f"there are no results in {results}, so {page} stays as it is", fix="--results FOLDER")
    asked = wanted.only if page is None else ()  # the page is about everybody
    text = page_text(found, wanted.densities, asked=asked)
    if page is not None:
        write_whole(page, updated_page(_page(page), text, str(page)).encode())
    console.print(text, markup=False, soft_wrap=True)
    for note in files.notes:
        console.print(note, markup=False, soft_wrap=True)
    driven = [result for result in found if result.get("densities")]
    return {
        "results": str(results),
        "rows": rows_of(driven, wanted.densities),
        "aggregates": aggregates(driven, wanted.densities),
        "verdicts": verdicts(driven, wanted.densities),
        "missing": missing(driven, wanted.densities, wanted.only) if wanted.only else missing(driven, wanted.densities),
        "notes": files.notes,
    }


def _say(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(answer)


def _show_left(stands: Sequence[dict[str, Any]], told: dict[str, Any], out: Path, as_json: bool) -> None:
    from opencda_marl.core.speech import counted, seconds
    from opencda_marl.display import show_table

    if as_json:
        emit({"folder": str(out), "left": list(stands), "estimate": told})
        return
    cells = [
        [
            row["name"],
            row["kind"],
            row["state"] + (" (its file is of other settings)" if row["again"] else ""),
            ", ".join(f"{rate:g}" for rate in row["missing"]) or "-",
        ]
        for row in stands
    ]
    console = _console(False)
    show_table(console, ("name", "kind", "what is left", "densities"), cells, text=4)
    for row in stands:
        for line in row["differs"]:
            console.print(f"{row['name']}: {line}", markup=False, soft_wrap=True)
    whole, training, driving = (seconds(60.0 * told[f"{name}minutes"]) for name in ("", "training_", "driving_"))
    console.print(
        f"estimate: {whole} in all; {training} of training (what is left of the budgets), {driving} for "
        f"{counted(told['episodes'], 'episode')} of held-out traffic (about 1 s each at 300 vph on an idle core)",
        markup=False,
        soft_wrap=True,
    )


def report(
    sources: Annotated[list[Path], typer.Argument(metavar="RUNS…", help="Run folders; files or folders of results.")],
    out: Annotated[Path | None, typer.Option(help="Folder for tables and plots; default: a new one in runs/.")] = None,
    animate: Annotated[
        Path | None,
        typer.Option(help="Also the first run's last recorded traffic in motion: .gif, or a strip as .png."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tables (Markdown, CSV, JSON) and plots of runs and results, and whom they beat."""
    from opencda_marl.benchmark.page import densities_in, page_text, write_report
    from opencda_marl.core.files import require_writable

    console = _console(as_json)
    results, notes, broken = _reportable(sources)
    if not results:
        raise CheckpointError(
            "nothing of this can be reported: " + "; ".join(broken),
            fix="name run folders (run.json, and plots/comparison.json, which a run makes at its end), "
            "files of results, or folders of them (*.json)",
        )
    folder = out or Path("runs") / f"report-{time.strftime('%Y%m%d-%H%M%S')}"
    require_writable(folder)
    files = write_report(results, densities_in(results), folder)
    if animate is not None:
        files.append(_animated(sources[0], animate))
    notes = [*notes, *(f"left out: {line}" for line in broken)]
    if as_json:
        emit({"folder": str(folder), "files": [str(file) for file in files], "notes": notes})
    else:
        console.print(page_text(results, densities_in(results), whole=False), markup=False, soft_wrap=True)
        for line in (*notes, *(str(file) for file in files)):
            console.print(line, markup=False, soft_wrap=True)
    if broken:
        raise typer.Exit(1)


def _reportable(sources: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Results of runs and files; notes on what counts once; what cannot be reported, and why."""
    from opencda_marl.benchmark.results import find_results, results_of_run
    from opencda_marl.core.run_folder import typed

    found: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    broken: list[str] = []
    for source in sources:
        ours: list[dict[str, Any]] = []
        if (source / "run.json").is_file():
            try:
                ours = results_of_run(source)
            except OpenCDAError as error:
                broken.append(_why(error))
        elif not source.exists():
            broken.append(f"there is no {typed(source)}; runs are listed by: opencda-marl runs list")
        else:
            files = find_results([source])
            ours, notes = files.results, [*notes, *files.notes]
            broken += [_why(error) for error in files.broken]
            if not ours and not files.broken:
                broken.append(_empty(source))
        for result in ours:
            twin = next((one["name"] for one in found.values() if _copies(one, result)), None)
            if twin is not None:
                if result["kind"] == "learner":
                    notes.append(
                        f"left out: {result['name']} in {typed(source)} says the same as {twin}, and counts once"
                    )
                continue
            name, number = str(result["name"]), 1
            while name in found:
                number += 1
                name = f"{result['name']} ({source.absolute().name}{'' if number == 2 else f' {number}'})"
            found[name] = {**result, "name": name}
    return list(found.values()), notes, broken


def _copies(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """The same measurement twice: a copied file or run, or a controller that drove beside several runs."""
    same = all(one.get(name) == other.get(name) for name in ("kind", "policy", "seed", "decision_interval"))
    return same and all(one.get(name) == other.get(name) for name in ("densities", "cases"))


def _why(error: OpenCDAError) -> str:
    return error.message if error.fix is None else f"{error.message}; {error.fix}"


def _empty(source: Path) -> str:
    """Why nothing was found in a folder, with the runs that lie below it."""
    from opencda_marl.core.run_folder import typed

    runs = sorted(file.parent for file in source.glob("*/run.json"))
    below = f"; there are runs below it: {' '.join(typed(run) for run in runs[:5])}" if runs else ""
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return f"{typed(source)} is no run folder (it has no run.json), and no *.json lies in it{below}{more}"


def _animated(run: Path, out: Path) -> Path:
    from opencda_marl.report import animate_run

    return animate_run(run, out)
