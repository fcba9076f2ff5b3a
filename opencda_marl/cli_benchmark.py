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
from opencda_marl.core.errors import CheckpointError, ConfigError, Interrupted

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
        int | None, typer.Option(min=1, help="A density; default: as many as 5,000 vehicles need, 60 at least.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of all learners; repeat.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Trainers, then evaluations, at once.")] = 1,
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
    from opencda_marl.benchmark.measure import Measurement, left
    from opencda_marl.benchmark.plan import make_cells
    from opencda_marl.cli_tables import name_tables
    from opencda_marl.launch.folder import MatrixFolder

    wanted = _wanted(only, seeds, budget_minutes, densities, episodes, settings)
    command = "opencda-marl " + " ".join(shlex.quote(word) for word in sys.argv[1:] if word != "--json")
    console = _console(as_json)
    if collect or generalisation is not None:
        with quiet_stdout(as_json):
            if generalisation is not None:
                _generalise(console, generalisation, wanted, results, out, parallel, command)
            answer = _collected(results, wanted, page, console)
        _say(answer, as_json)
        return
    cells, entrants = make_cells(wanted, name_tables(), config_root=config_root)
    matrix = MatrixFolder(out)
    stands = left(wanted, entrants, matrix, results)
    if dry_run:
        _show_left(stands, out, as_json)
        return
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
        name, _, value = text.rpartition("=")
        minutes[name] = _number(value, "--budget-minutes")
    return Wanted(
        only=tuple(_words(only)),
        seeds=tuple(parse_seeds(seeds)),
        budget_minutes=minutes,
        densities=DENSITIES
        if densities is None
        else tuple(sorted({_number(word, "--densities") for word in _words(densities)})),
        episodes=episodes,
        sets=tuple(sets or ()),
    )


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _number(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e6:
        raise ConfigError(f"{flag} {text!r} is not a number above 0", fix=f"e.g. {flag} 10")
    return value


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
    from opencda_marl.benchmark.results import read_results
    from opencda_marl.benchmark.tables import aggregates, missing, rows_of, verdicts
    from opencda_marl.core.files import write_whole

    found = read_results([results]) if results.is_dir() else []
    if page is not None and not any(result.get("densities") for result in found):
        raise ConfigError(f"there are no results in {results}, so {page} stays as it is", fix="--results FOLDER")
    text = page_text(found, wanted.densities)
    if page is not None:
        write_whole(page, updated_page(page.read_text(encoding="utf-8"), text).encode())
    console.print(text, markup=False, soft_wrap=True)
    driven = [result for result in found if result.get("densities")]
    return {
        "results": str(results),
        "rows": rows_of(driven, wanted.densities),
        "aggregates": aggregates(driven, wanted.densities),
        "verdicts": verdicts(driven, wanted.densities),
        "missing": missing(driven, wanted.densities),
    }


def _say(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit(answer)


def _show_left(stands: Sequence[dict[str, Any]], out: Path, as_json: bool) -> None:
    from opencda_marl.display import show_table

    if as_json:
        emit({"folder": str(out), "left": list(stands)})
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
    show_table(_console(False), ("name", "kind", "what is left", "densities"), cells, text=4)


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
    from opencda_marl.benchmark.results import read_results, results_of_run
    from opencda_marl.core.run_folder import typed

    console = _console(as_json)
    found: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for source in sources:
        if not source.exists():
            raise CheckpointError(
                f"there is no {typed(source)}",
                fix="name run folders (opencda-marl runs list), or files or folders of results",
            )
        try:
            ours = results_of_run(source) if (source / "run.json").is_file() else read_results([source])
        except CheckpointError as error:
            notes.append(f"left out: {error.message}; {error.fix}")
            continue
        for result in ours:
            name = result["name"]
            if name in found and found[name]["densities"] != result["densities"]:
                result = {**result, "name": f"{name} ({source.name})"}
            found.setdefault(result["name"], result)
    if not found:
        raise CheckpointError(
            "nothing of this can be reported: " + "; ".join(notes), fix="train with evaluation.final=true"
        )
    results = list(found.values())
    folder = out or Path("runs") / f"report-{time.strftime('%Y%m%d-%H%M%S')}"
    files = write_report(results, densities_in(results), folder)
    if animate is not None:
        files.append(_animated(sources[0], animate))
    if as_json:
        emit({"folder": str(folder), "files": [str(file) for file in files], "notes": notes})
        return
    console.print(page_text(results, densities_in(results), whole=False), markup=False, soft_wrap=True)
    for line in (*notes, *(str(file) for file in files)):
        console.print(line, markup=False, soft_wrap=True)


def _animated(run: Path, out: Path) -> Path:
    from opencda_marl.report import animate_run

    return animate_run(run, out)
