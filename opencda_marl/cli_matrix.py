"""`opencda-marl matrix`: many training runs at once. Nothing is computed here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from opencda_marl.cli_answers import emit, quiet_stdout
from opencda_marl.cli_launch import launch, missing, run_runner
from opencda_marl.core.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from opencda_marl.launch.folder import MatrixFolder
    from opencda_marl.launch.launcher import Result
    from opencda_marl.launch.request import Plan

__all__ = ["matrix_app"]

matrix_app = typer.Typer(help="Many training runs at once: run, watch, stop, report.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The matrix folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout's last line, the rest on stderr.")]
Many = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of all cells; repeat.")]
_WAIT = 200.0  # [s] for a launcher to end
_NOBODY = "no launcher is at work here"


@matrix_app.command("run")
def matrix_run(
    target: Annotated[Path | None, typer.Argument(help="A matrix folder, or a matrix file (.yaml).")] = None,
    profiles: Annotated[str | None, typer.Option(help="Profiles, with commas.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="A:B", help="Seeds, half-open; or with commas.")] = None,
    settings: Many = None,
    out: Annotated[Path | None, typer.Option(help="Folder of a matrix file; default runs/NAME.")] = None,
    config_root: Annotated[Path | None, typer.Option(help="Folder of profiles instead of the bundled one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show cells and slots; start nothing.")] = False,
    parallel: Annotated[str | None, typer.Option(metavar="N|auto", help="Cells at once; default 1.")] = None,
    cuda_visible_devices: Annotated[str | None, typer.Option(help="GPUs of the learners, slot by slot: 0,1.")] = None,
    carla_gpus: Annotated[str | None, typer.Option(help="GPUs of the CARLA servers, likewise.")] = None,
    carla_rpc_port: Annotated[int | None, typer.Option(help="Slot k: this + 10 k; default 2000.")] = None,
    carla_restart_mode: Annotated[Literal["process", "docker"] | None, typer.Option(help="Who runs CARLA.")] = None,
    carla_bin: Annotated[str | None, typer.Option(envvar="CARLA_BIN", help="CarlaUE4.sh.")] = None,
    keep_carla: Annotated[bool | None, typer.Option(help="Leave the servers up at the end.")] = None,
    cuda_graph_update: Annotated[bool | None, typer.Option(help="Updates as a CUDA graph.")] = None,
    mps: Annotated[bool | None, typer.Option(help="Share GPUs by NVIDIA's MPS.")] = None,
    fail_fast: Annotated[bool | None, typer.Option(help="Stop everything when a cell fails.")] = None,
    retries: Annotated[list[str] | None, typer.Option(metavar="CLASS=N", help="Failures forgiven; repeat.")] = None,
    deadline: Annotated[list[str] | None, typer.Option(metavar="PHASE=S", help="Seconds of silence; repeat.")] = None,
    engine: Annotated[
        Literal["local", "ray", "slurm"] | None,
        typer.Option(help="Who places runners; default: local."),
    ] = None,
    runners: Annotated[int | None, typer.Option(metavar="N", help="Runners at once, for --engine.")] = None,
    engine_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="What --engine is told; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train all cells of a matrix; typed again it does what is left."""
    from opencda_marl.cli_tables import name_tables
    from opencda_marl.launch.checks import check
    from opencda_marl.launch.plan import cards, numbered, parse_counts, parse_values
    from opencda_marl.launch.request import Asked, prepare

    given = {
        "parallel": None if parallel is None else _parallel(parallel),
        "cuda_visible_devices": None
        if cuda_visible_devices is None
        else cards(cuda_visible_devices, "--cuda-visible-devices"),
        "carla_gpus": None if carla_gpus is None else numbered(carla_gpus, "--carla-gpus"),
        "carla_rpc_port": carla_rpc_port,
        "carla_restart_mode": carla_restart_mode,
        "carla_bin": carla_bin,
        "keep_carla": keep_carla,
        "cuda_graph_update": cuda_graph_update,
        "mps": mps,
        "fail_fast": fail_fast,
        "engine": engine,
        "runners": runners,
        "engine_set": parse_values(engine_set, "--engine-set") if engine_set else None,
        "retries": parse_counts(retries, "--retries") if retries else None,
        "deadlines": parse_counts(deadline, "--deadline") if deadline else None,
    }
    named = tuple(_words(profiles)) if profiles is not None else ()
    asked = Asked(target, out, named, seeds, tuple(settings or ()), config_root, given)
    plan = prepare(asked, name_tables())
    plan = replace(plan, notes=(*plan.notes, *check(plan, given, missing(plan.matrix))))
    if dry_run:
        _show_plan(plan, as_json)
        return
    with quiet_stdout(as_json):
        result = launch(plan, _console(as_json))
    _answer(plan, result, as_json)


@matrix_app.command("runner", hidden=True)
def matrix_runner(folder: Folder, name: Annotated[str, typer.Argument(help="Its name below runners/.")]) -> None:
    """What an engine places: works on the cells of a matrix that nobody else is at work on."""
    result = run_runner(folder, name, _console(False))
    if result.failed:
        raise typer.Exit(1)
    if result.stopped:
        raise typer.Exit(Interrupted.exit_code)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _parallel(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise ConfigError(f"--parallel {text!r} is not understood", fix="write a number from 1 to 1000, or auto")
    return int(text)


def _console(as_json: bool) -> Console:
    from opencda_marl.display import make_console

    return make_console(stderr=as_json)


def _show_plan(plan: Plan, as_json: bool) -> None:
    from opencda_marl.display_matrix import show_plan
    from opencda_marl.launch.checks import engine_note
    from opencda_marl.launch.folder import MatrixFolder
    from opencda_marl.launch.gpus import find_gpus
    from opencda_marl.launch.request import gpu_notes, slot_table
    from opencda_marl.launch.scaling import room
    from opencda_marl.launch.status import row

    gpus, matrix = find_gpus(), plan.matrix
    most = room(matrix, gpus) if matrix.options.parallel == "auto" else matrix.options.parallel
    folder = MatrixFolder(plan.folder)
    cells = [
        {
            "id": cell.id,
            "name": cell.name,
            "profile": cell.profile,
            "seed": cell.seed,
            "varies": cell.varies,
            "budget": cell.budget,
            "family": cell.family,
            "state": row(folder, cell)["state"],
        }
        for cell in matrix.cells
    ]
    notes = [*plan.notes, *gpu_notes(matrix.options, gpus), *(str(error) for error in missing(matrix).values())]
    if matrix.options.engine != "local":
        notes.insert(0, engine_note(matrix.options))
    answer = {
        "name": matrix.name,
        "folder": str(plan.folder.absolute()),
        "cells": cells,
        "slots": slot_table(matrix, min(most, max(1, len(cells))), gpus),
        "notes": notes,
        "options": matrix.options.record(),
    }
    if as_json:
        emit(answer)
    else:
        show_plan(_console(False), answer)


def _answer(plan: Plan, result: Result, as_json: bool) -> None:
    """What the launch came to; its exit code."""
    from opencda_marl.core.run_folder import typed

    where = typed(plan.folder)
    if as_json:
        emit({**_outcome(plan.folder, result)})
    else:
        typer.echo(f"{result.finished} of {result.total} cells are finished, {len(result.failed)} failed")
        if result.failed:
            console = _console(False)
            console.print(f"once its cause is gone: opencda-marl matrix retry {where}", markup=False, soft_wrap=True)
    if result.failed:
        raise typer.Exit(1)
    if result.stopped and result.finished < result.total:
        if as_json:
            raise typer.Exit(Interrupted.exit_code)
        raise Interrupted(
            "stopped before everything was done; every finished episode up to the last boundary is saved",
            fix=f"continue with: opencda-marl matrix run {where}",
        )


def _outcome(folder: Path, result: Result) -> dict[str, Any]:
    return {
        "folder": str(folder.absolute()),
        "total": result.total,
        "finished": result.finished,
        "failed": list(result.failed),
        "stopped": result.stopped,
    }


@matrix_app.command("status")
def matrix_status(folder: Folder, as_json: AsJson = False) -> None:
    """How each cell stands, and the whole."""
    from opencda_marl.display_matrix import show_matrix
    from opencda_marl.launch.folder import MatrixFolder
    from opencda_marl.launch.status import overview

    answer = overview(MatrixFolder(folder))
    if as_json:
        emit(answer)
    else:
        show_matrix(_console(False), answer)


@matrix_app.command("report")
def matrix_report(folder: Folder, as_json: AsJson = False) -> None:
    """What the cells came to, over their seeds."""
    from opencda_marl.display_matrix import show_report
    from opencda_marl.launch.folder import MatrixFolder
    from opencda_marl.launch.status import report

    answer = report(MatrixFolder(folder))
    if as_json:
        emit(answer)
    else:
        show_report(_console(False), answer)


@matrix_app.command("logs")
def matrix_logs(
    folder: Folder,
    cell: Annotated[
        str | None, typer.Argument(help="A cell's id, its beginning, or its name; else what happened.")
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines come.")] = False,
    lines: Annotated[int, typer.Option("-n", min=1, max=100_000, help="Lines to begin with.")] = 40,
    as_json: AsJson = False,
) -> None:
    """What happened, or what a cell's trainer printed."""
    from opencda_marl.launch.folder import MatrixFolder
    from opencda_marl.launch.status import find_cell

    if follow and as_json:
        raise ConfigError("-f never ends, and --json is one object", fix="leave one of the two out")
    there = MatrixFolder(folder)
    matrix = there.read()
    file, shown = there.path / "launcher.jsonl", _event
    if cell is not None:
        file, shown = there.launch(find_cell(matrix, cell).id) / "console.log", _as_it_is
    found = _last_lines(file, lines)
    if as_json:
        told: Sequence[Any] = [_facts(line) for line in found] if cell is None else found
        emit({"file": str(file), "lines": told})
        return
    for line in found:
        typer.echo(shown(line))
    if follow:
        _follow(file, shown)


def _as_it_is(line: str) -> str:
    return line.rstrip()


def _facts(line: str) -> dict[str, Any] | str:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return line.rstrip()  # cut off, by a full disk


def _event(line: str) -> str:
    from opencda_marl.display_matrix import event_line

    facts = _facts(line)
    if isinstance(facts, str):
        return facts
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.pop("time")))
    return f"{stamp}  {event_line(facts.pop('event'), facts)}"


def _last_lines(file: Path, count: int) -> list[str]:
    """Whole lines from the end of a file; none where there is no file."""
    if not file.is_file():
        return []
    return file.read_text(errors="replace").splitlines()[-count:]


def _follow(file: Path, shown: Callable[[str], str]) -> None:
    at, rest = file.stat().st_size if file.exists() else 0, b""
    while True:
        time.sleep(0.3)
        if not file.exists():
            continue
        with file.open("rb") as stream:
            stream.seek(at)
            data = stream.read()
        at += len(data)
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            typer.echo(shown(line.decode(errors="replace")))
        sys.stdout.flush()


@matrix_app.command("stop")
def matrix_stop(
    folder: Folder,
    kill: Annotated[bool, typer.Option("--kill", help="At once, without saving the last boundary.")] = False,
    wait: Annotated[bool, typer.Option(help="Until the launcher has ended.")] = True,
    as_json: AsJson = False,
) -> None:
    """Stop the launcher: every cell saves its last episode boundary. Like Ctrl-C."""
    from opencda_marl.core.errors import DeadlineError
    from opencda_marl.launch.runners import live_runners

    there, owner, runners = _at_work(folder)
    _ask(there, owner, runners, "kill" if kill else "stop")
    deadline = time.monotonic() + _WAIT
    while wait and (there.owner() is not None if owner is not None else live_runners(there)):
        if time.monotonic() > deadline:
            fix = f"kill -CONT {owner}; or kill -9 {owner}" if owner else "end them with the engine's own commands"
            raise DeadlineError(f"{_who(owner, runners)} does not end", fix=fix)
        time.sleep(0.1)
    done = "has ended" if wait else "was asked to stop"
    _said(as_json, _asked(owner, runners), f"{_who(owner, runners)} {done}" if owner or runners else _NOBODY)


def _ask(there: MatrixFolder, owner: int | None, runners: Sequence[str], wish: str) -> None:
    """The launcher passes it on; runners that have outlived theirs are asked themselves."""
    if owner is not None:
        there.ask(wish)
    for name in runners:
        there.ask(wish, name)


def _asked(owner: int | None, runners: Sequence[str]) -> dict[str, Any]:
    return {"launcher": owner, "runners": list(runners), "asked": owner is not None or bool(runners)}


def _who(owner: int | None, runners: Sequence[str]) -> str:
    return f"the launcher (process {owner})" if owner is not None else f"each runner ({', '.join(runners)})"


@matrix_app.command("drain")
def matrix_drain(folder: Folder, as_json: AsJson = False) -> None:
    """Start no more cells; those that run are trained to their end."""
    there, owner, runners = _at_work(folder)
    _ask(there, owner, runners, "drain")
    said = "no more cells are started; those that run go on" if owner is not None or runners else _NOBODY
    _said(as_json, _asked(owner, runners), said)


@matrix_app.command("retry")
def matrix_retry(
    folder: Folder,
    cells: Annotated[list[str] | None, typer.Argument(help="Failed cells; all of them when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Give failed cells a fresh budget of retries."""
    from opencda_marl.core.run_folder import typed
    from opencda_marl.core.speech import counted
    from opencda_marl.launch.folder import Writer
    from opencda_marl.launch.status import find_cell

    there, owner, runners = _at_work(folder)
    matrix = there.read()
    chosen = [find_cell(matrix, named) for named in cells or ()] or list(matrix.cells)
    failed = [cell for cell in chosen if there.read_launch(cell.id).state == "failed"]
    if owner is not None:
        for cell in failed:
            there.ask(f"retry-{cell.id}")
    else:
        with Writer(folder) as writer:
            for cell in failed:
                writer.forgive(cell.id)
                _ask(there, None, runners, f"retry-{cell.id}")
    said = f"{counted(len(failed), 'failed cell')} {'begins' if len(failed) == 1 else 'begin'} anew"
    if owner is None and failed:
        said += f"; next: opencda-marl matrix run {typed(folder)}"
    _said(as_json, {"launcher": owner, "cells": [cell.id for cell in failed]}, said)


def _at_work(folder: Path) -> tuple[MatrixFolder, int | None, list[str]]:
    """The matrix; its launcher; where that is gone, runners that have outlived it."""
    from opencda_marl.launch.folder import MatrixFolder
    from opencda_marl.launch.runners import live_runners

    there = MatrixFolder(folder)
    there.read()
    owner = there.owner()
    return there, owner, [] if owner is not None else sorted(live_runners(there))


def _said(as_json: bool, answer: dict[str, Any], line: str) -> None:
    if as_json:
        emit(answer)
    else:
        _console(False).print(line, markup=False, soft_wrap=True)
