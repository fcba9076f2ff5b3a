"""From what a person typed to a matrix: which folder, which cells, which options; nothing is written here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.core.files import typed
from opencda_marl.core.speech import counted
from opencda_marl.core.tables import Table
from opencda_marl.launch.cells import Cell, Request, expand, fingerprint, read_request, seeds
from opencda_marl.launch.folder import Matrix, MatrixFolder, read_json, with_budgets
from opencda_marl.launch.gpus import Gpu
from opencda_marl.launch.plan import Options, Slot, make_slot, options_from
from opencda_marl.settings.run import RunSettings

__all__ = ["Asked", "Plan", "gpu_notes", "prepare", "slot_table"]

_DEFAULT = Path("runs/matrix")


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line."""

    target: Path | None = None  # a matrix folder, or a matrix file
    out: Path | None = None
    profiles: tuple[str, ...] = ()
    seeds: str | None = None
    sets: tuple[str, ...] = ()
    config_root: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # those that were given


@dataclass(frozen=True, slots=True)
class Plan:
    """A matrix, and where it goes."""

    folder: Path
    matrix: Matrix
    settings: Sequence[tuple[Cell, RunSettings]]  # of cells that were multiplied out now
    notes: tuple[str, ...] = ()


def prepare(asked: Asked, tables: Mapping[str, Table] | None = None) -> Plan:
    """What is to be done.

    Raises:
        ConfigError: something is wrong with it; nothing was started.
        CheckpointError: a folder is named that holds no matrix, and no cells are; or one that is a run.
    """
    request = _request(asked)
    folder = _folder(asked, request)
    if (folder / "run.json").is_file():
        raise CheckpointError(
            f"{typed(folder)} is a run, not a matrix",
            fix=f"name another folder; or go on with the run: opencda-marl run --resume {typed(folder)}",
        )
    there = MatrixFolder(folder)
    # one that cannot be read at all is made again, as its error says
    readable = there.exists and bool(read_json(there.path / "matrix.json"))
    before = there.read() if readable or request is None else None
    given = dict(asked.options)
    if request is not None:
        given["retries"] = {**request.retries, **(given.get("retries") or {})} or None
        given["deadlines"] = {**request.deadlines, **(given.get("deadlines") or {})} or None
    options = options_from({} if before is None else before.options.record(), given)
    if request is None:
        assert before is not None
        return Plan(folder, _again(before, options, asked), ())
    mark = fingerprint(request, graph=options.cuda_graph_update)
    if before is not None and mark is not None and before.request == mark:
        return Plan(folder, replace(before, options=options), ())
    cells = expand(request, graph=options.cuda_graph_update, tables=tables)
    created = time.time() if before is None else before.created
    matrix = Matrix(request.name, tuple(cell for cell, _ in cells), options, mark, created)
    return Plan(folder, matrix, cells, _dropped(before, matrix))


def _request(asked: Asked) -> Request | None:
    """What is to be multiplied out; None: the matrix that is there."""
    if asked.target is not None and asked.target.name == "matrix.json" and asked.target.is_file():
        raise ConfigError(
            f"{typed(asked.target)} is what a matrix folder keeps, not a matrix file",
            fix=f"name the folder: opencda-marl matrix run {typed(asked.target.parent)}",
        )
    if asked.target is not None and (asked.target.is_file() or asked.target.suffix in (".yaml", ".yml")):
        if asked.profiles or asked.seeds is not None:
            raise ConfigError(
                f"{asked.target} says which cells there are, and so do --profiles and --seeds",
                fix="change the file, or name a folder instead of it",
            )
        request = read_request(asked.target)
        root = str(asked.config_root.resolve()) if asked.config_root is not None else request.config_root
        return replace(request, fixed=(*request.fixed, *asked.sets), config_root=root)
    if asked.out is not None:
        raise ConfigError("--out goes with a matrix file", fix="name the folder itself: opencda-marl matrix run FOLDER")
    if asked.profiles:
        folder = asked.target or _DEFAULT
        root = None if asked.config_root is None else str(asked.config_root.resolve())
        axes = {} if asked.seeds is None else {"seed": list(seeds(asked.seeds))}
        return Request(folder.absolute().name, asked.profiles, root, asked.sets, axes)
    if asked.seeds is not None or asked.config_root is not None:
        raise ConfigError("seeds of which profiles?", fix="--profiles sumo-marl/intersection/quickstart")
    return None


def _folder(asked: Asked, request: Request | None) -> Path:
    if request is not None and asked.target is not None and asked.target.is_file():
        return asked.out or Path("runs") / request.name
    return asked.target or _DEFAULT


def _again(before: Matrix, options: Options, asked: Asked) -> Matrix:
    """The matrix that is there, perhaps with other budgets."""
    if options.cuda_graph_update != before.options.cuda_graph_update:
        raise ConfigError(
            "--cuda-graph-update makes other cells: it changes what they compute",
            fix="give --profiles and --seeds too, and best another folder",
        )
    if not asked.sets:
        return replace(before, options=options)
    # these cells no longer follow from the request that they were made from
    return replace(before, options=options, cells=with_budgets(before.cells, asked.sets), request=None)


def _dropped(before: Matrix | None, matrix: Matrix) -> tuple[str, ...]:
    now = {cell.id for cell in matrix.cells}
    gone = [cell for cell in (() if before is None else before.cells) if cell.id not in now]
    if not gone:
        return ()
    return (f"{counted(len(gone), 'cell')} of an earlier request no longer belong here; what they have trained stays",)


def slot_table(matrix: Matrix, count: int, gpus: Sequence[Gpu] | None) -> list[dict[str, Any]]:
    """The slots, with the UUIDs of their GPUs where they are known.

    Raises:
        ConfigError: a port is too high.
    """
    carla = any(cell.family == "carla" for cell in matrix.cells)
    threads = max((cell.threads for cell in matrix.cells), default=1)
    slots = [make_slot(matrix.options, index, carla=carla, threads=threads) for index in range(count)]
    return [{**slot.describe(), "uuid": _uuid(slot, gpus)} for slot in slots]


def _uuid(slot: Slot, gpus: Sequence[Gpu] | None) -> str | None:
    if slot.cuda is None or not slot.cuda.isdigit():
        return slot.cuda  # it is one
    return next((gpu.uuid for gpu in gpus or () if gpu.index == int(slot.cuda)), None)


def gpu_notes(options: Options, gpus: Sequence[Gpu] | None) -> list[str]:
    """What looks wrong about the GPUs that were named."""
    if gpus is None:
        return ["nvidia-smi does not answer here: GPUs are not checked"] if options.cuda_visible_devices else []
    known = {str(gpu.index) for gpu in gpus}
    missing = [name for name in options.cuda_visible_devices if name.isdigit() and name not in known]
    return [f"there is no GPU {', '.join(missing)} here; nvidia-smi shows {', '.join(sorted(known)) or 'none'}"] * bool(
        missing
    )
