"""From a plan to a launcher at work: here, on other machines, or as one of those that an engine has placed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from opencda_marl.launch.engines import Engine
    from opencda_marl.launch.folder import Matrix, MatrixFolder, Writer
    from opencda_marl.launch.gpus import Gpu
    from opencda_marl.launch.launcher import Launcher, Result
    from opencda_marl.launch.place import Listener, Server
    from opencda_marl.launch.plan import Options, Slot
    from opencda_marl.launch.request import Plan

__all__ = ["launch", "missing", "run_runner"]


def missing(matrix: Matrix) -> dict[Any, Any]:
    """What a family of cells lacks here."""
    from opencda_marl.core.errors import BackendMissingError
    from opencda_marl.simulators.carla_session import check_client

    if not any(cell.family == "carla" for cell in matrix.cells):
        return {}
    try:
        check_client()
    except BackendMissingError as error:
        return {"carla": error}
    return {}


def launch(plan: Plan, console: Console) -> Result:
    """Run a matrix.

    Raises:
        OpenCDAError: it cannot be run, or not to its end.
    """
    from opencda_marl.core.errors import StorageError
    from opencda_marl.core.files import typed

    options, engine = plan.matrix.options, None
    if options.engine != "local":  # what it refuses leaves nothing behind
        from opencda_marl.launch.engines import make_engine
        from opencda_marl.launch.folder import MatrixFolder

        engine = make_engine(options.engine, MatrixFolder(plan.folder), plan.matrix, options.engine_set)
    try:
        return _launched(plan, console, engine)
    except StorageError as error:
        again = f"type the command again, or: opencda-marl matrix run {typed(plan.folder)}"
        fix = (error.fix or again).replace("continue with --resume", again)
        raise StorageError(error.message, fix=fix) from error
    finally:
        if engine is not None:
            engine.close()


def _launched(plan: Plan, console: Console, engine: Engine | None) -> Result:
    from opencda_marl.display_matrix import MatrixDisplay, show_slots
    from opencda_marl.launch.folder import Writer
    from opencda_marl.launch.request import gpu_notes, slot_table

    matrix, local = plan.matrix, engine is None
    gpus, most = _machine(matrix)
    with Writer(plan.folder) as folder:
        folder.write_settings(plan.settings)
        folder.write(matrix)
        for note in (*plan.notes, *(gpu_notes(matrix.options, gpus) if local else ())):
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        if engine is not None:
            return _dispatch(folder, matrix, engine, console)
        show_slots(console, slot_table(matrix, min(most, max(1, len(matrix.cells))), gpus))
        with MatrixDisplay(console) as display:
            return _launcher(folder, matrix, display, most).run()


def run_runner(folder: Path, name: str, console: Console) -> Result:
    """Work on a matrix as one of several.

    Raises:
        OpenCDAError: it cannot be run, or not to its end.
    """
    import os
    from dataclasses import replace

    from opencda_marl.display_matrix import MatrixDisplay
    from opencda_marl.launch.folder import MatrixFolder, Writer
    from opencda_marl.launch.runners import within

    found = MatrixFolder(folder).read()
    matrix = replace(found, options=within(found.options, os.environ))
    with Writer(folder, name) as own, MatrixDisplay(console) as display:
        return _launcher(own, matrix, display, _machine(matrix)[1], shared=True).run()


def _dispatch(folder: Writer, matrix: Matrix, engine: Engine, console: Console) -> Result:
    from opencda_marl.display_matrix import MatrixDisplay
    from opencda_marl.launch.dispatch import Dispatch

    count = matrix.options.runners or max(1, engine.runners())
    with MatrixDisplay(console) as display:
        return Dispatch(folder, matrix, engine, listener=display, count=count).run()


def _machine(matrix: Matrix) -> tuple[list[Gpu] | None, int]:
    """The GPUs of this machine, as far as they matter, and the most cells at once."""
    from opencda_marl.launch.gpus import find_gpus
    from opencda_marl.launch.scaling import room

    parallel = matrix.options.parallel
    gpus = find_gpus() if matrix.options.cuda_visible_devices else None
    return gpus, room(matrix, gpus) if parallel == "auto" else parallel


def _launcher(folder: Writer, matrix: Matrix, listener: Listener, most: int, *, shared: bool = False) -> Launcher:
    from opencda_marl.launch.gpus import find_gpus
    from opencda_marl.launch.launcher import Launcher
    from opencda_marl.launch.mps import Mps

    named = matrix.options.cuda_visible_devices
    return Launcher(
        folder,
        matrix,
        listener=listener,
        served=lambda cell: cell.family == "carla",
        server_for=lambda slot: _server(matrix.options, folder, slot, shared),
        missing=missing(matrix),
        limit=most,
        cwd=Path.cwd(),
        shared=shared,
        mps=Mps(folder.own, named, find_gpus()) if matrix.options.mps else None,
    )


def _server(options: Options, folder: MatrixFolder, slot: Slot, shared: bool) -> Server:
    import socket

    from opencda_marl.launch.servers import ServerOptions, make_server

    wanted = ServerOptions(Path(options.carla_bin), keep=options.keep_carla)
    # numbers of slots mean something to one launcher; another runner on this machine has to find what one has left
    place = (
        folder.path / "slots" / f"{socket.gethostname()}_port_{slot.rpc_port}" if shared else folder.slot(slot.index)
    )
    return make_server(options.carla_restart_mode, slot, wanted, place)
