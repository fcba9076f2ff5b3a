"""What a launch would refuse, and what of it would do nothing: looked at before anything is written or started."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import ConfigError, StorageError
from opencda_marl.core.files import typed
from opencda_marl.core.machine import cores
from opencda_marl.launch.engines import check_engine
from opencda_marl.launch.plan import Options
from opencda_marl.launch.request import Plan
from opencda_marl.settings.networks import NetworkSettings

__all__ = ["check", "engine_note"]

_FOR_CARLA = {
    "carla_rpc_port": "--carla-rpc-port",
    "carla_restart_mode": "--carla-restart-mode",
    "keep_carla": "--keep-carla",
}


def check(plan: Plan, given: Mapping[str, Any], lacking: Iterable[str] = ()) -> list[str]:
    """The same for a dry run and for a real one.

    Args:
        plan: what is to be done.
        given: the options that were typed; None: not.
        lacking: families of cells that cannot run here at all.

    Returns:
        Notes: what looks wrong, and may be meant.

    Raises:
        ConfigError: an option that does nothing here, a server that is not there, or what an engine refuses.
        StorageError: the folder cannot be written.
    """
    _check_folder(plan.folder)
    options = plan.matrix.options
    if options.engine != "local":
        check_engine(options.engine, plan.folder, plan.matrix, options.engine_set)
    if given.get("cuda_graph_update") and plan.settings:
        _check_graph(plan)
    carla = any(cell.family == "carla" for cell in plan.matrix.cells)
    notes = _carla_notes(options, given, lacking) if carla else _sumo_notes(given)
    return [*notes, *_crowded(plan)]


def engine_note(options: Options) -> str:
    """What an engine is asked for."""
    each = "one runner a node" if options.engine == "ray" else "1 runner"
    count = each if options.runners is None else f"{options.runners} runner{'s' * (options.runners > 1)}"
    told = ", ".join(f"{key}={value}" for key, value in options.engine_set.items()) or "nothing else"
    return f"{options.engine} places {count}, told {told}; each runner has these slots"


def _check_folder(folder: Path) -> None:
    there = folder.absolute()
    while not os.path.exists(there):
        there = there.parent
    if not there.is_dir():
        raise StorageError(f"cannot write {typed(folder)}: {typed(there)} is no folder", fix="choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        fix = "choose another folder, or have its permissions changed"
        raise StorageError(f"cannot write {typed(folder)}: {typed(there)} is read-only for this account", fix=fix)


def _check_graph(plan: Plan) -> None:
    if not any(isinstance(settings.learner, NetworkSettings) for _, settings in plan.settings):
        raise ConfigError(
            "--cuda-graph-update does nothing here: no algorithm of this matrix has networks", fix="leave it out"
        )


def _sumo_notes(given: Mapping[str, Any]) -> list[str]:
    if given.get("carla_gpus"):
        raise ConfigError(
            "--carla-gpus does nothing here: no cell of this matrix drives in CARLA",
            fix="leave it out; GPUs of the learners are --cuda-visible-devices",
        )
    idle = [flag for name, flag in _FOR_CARLA.items() if given.get(name)]
    return [f"no cell of this matrix drives in CARLA: {', '.join(idle)} does nothing"] if idle else []


def _carla_notes(options: Options, given: Mapping[str, Any], lacking: Iterable[str]) -> list[str]:
    if options.carla_restart_mode == "docker":
        if given.get("keep_carla"):
            raise ConfigError(
                "--keep-carla does nothing with --carla-restart-mode docker: containers always stay", fix="leave it out"
            )
        bare = given.get("carla_bin") is not None
        return ["--carla-bin (CARLA_BIN) does nothing with --carla-restart-mode docker"] if bare else []
    binary = Path(options.carla_bin)
    if "carla" in lacking or options.engine != "local" or (binary.is_file() and os.access(binary, os.X_OK)):
        return []
    if given.get("carla_bin") is not None:
        raise ConfigError(
            f"--carla-bin: {typed(binary)} is no program", fix="name CarlaUE4.sh with --carla-bin or CARLA_BIN"
        )
    return [f"there is no CARLA server {typed(binary)}: only servers that answer on the slots' ports can be used"]


def _crowded(plan: Plan) -> list[str]:
    options, cells = plan.matrix.options, plan.matrix.cells
    if options.engine != "local" or options.parallel == "auto":
        return []
    at_once = min(options.parallel, len(cells))
    wanted = at_once * max((cell.threads * cell.workers for cell in cells), default=1)
    if wanted <= cores():
        return []
    return [f"{at_once} cells at once keep {wanted} cores busy, and this machine has {cores()}: they slow each other"]
