"""Which SUMO is installed: its wheels, their data and programs; nothing is taken from the environment.

A `SUMO_HOME` of another version is a common cause of odd failures, so the one that belongs to the
installed wheel replaces it, inside this process only.
"""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from opencda_marl.core.errors import BackendMissingError, ConfigError
from opencda_marl.settings.traffic import SimulatorSettings

__all__ = ["choose_backend", "import_backend", "inspect_sumo", "program", "set_sumo_home", "wheel_version"]


def wheel_version(distribution: str) -> str | None:
    """Version of an installed wheel, e.g. "libsumo"; None when it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _folder(package: str) -> Path | None:
    """Folder of a package without importing it (SUMO's packages change the environment when imported)."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def set_sumo_home() -> Path | None:
    """Point `SUMO_HOME` of this process at the installed wheel's data: eclipse-sumo, else sumo-data.

    Returns:
        the folder, or None where neither wheel is installed (then the environment's value stays).
    """
    for package in ("sumo", "sumo_data"):
        folder = _folder(package)
        if folder is not None and (folder / "data").is_dir():
            os.environ["SUMO_HOME"] = str(folder)
            return folder
    return None


def program(name: str) -> Path:
    """Path of one of SUMO's programs: the eclipse-sumo wheel's, else one on PATH.

    Args:
        name: "sumo", "sumo-gui" or "netconvert".

    Raises:
        BackendMissingError: it is not installed.
    """
    folder = _folder("sumo")
    if folder is not None:
        for candidate in (folder / "bin" / name, folder / "bin" / f"{name}.exe"):
            if candidate.is_file():
                return candidate
    found = shutil.which(name)
    if found is None:
        raise BackendMissingError(
            f"the program {name!r} is not installed; it comes with the wheel eclipse-sumo",
            fix="pip install 'opencda-marl[sumo]'",
        )
    return Path(found)


def import_backend(name: str) -> ModuleType:
    """Import libsumo or traci, with `SUMO_HOME` set before.

    Raises:
        BackendMissingError: it is not installed, or cannot be loaded.
    """
    set_sumo_home()
    try:
        return import_module(name)
    except ImportError as error:
        raise BackendMissingError(
            f"the Python package {name!r} cannot be imported: {error}", fix=f"pip install {name}"
        ) from error


def choose_backend(settings: SimulatorSettings) -> str:
    """ "libsumo" or "traci".

    Raises:
        BackendMissingError: what was asked for is not installed; for `auto`, neither is.
        ConfigError: a window was asked for from libsumo, which has none.
    """
    if settings.gui and settings.backend == "libsumo":
        raise ConfigError("simulator.gui needs simulator.backend traci (or auto): libsumo has no window")
    if not settings.gui and settings.backend != "traci":
        try:
            import_backend("libsumo")
            return "libsumo"
        except BackendMissingError as error:
            if settings.backend == "libsumo" or wheel_version("traci") is None:
                raise error
    import_backend("traci")
    program("sumo-gui" if settings.gui else "sumo")
    return "traci"


def inspect_sumo() -> dict[str, str | None]:
    """Versions of libsumo, traci and the sumo program, and `SUMO_HOME`; None where something is missing."""
    home = set_sumo_home()
    try:
        where: str | None = str(program("sumo"))
    except BackendMissingError:
        where = None
    return {
        "libsumo": wheel_version("libsumo"),
        "traci": wheel_version("traci"),
        "sumo": wheel_version("eclipse-sumo"),
        "sumo_program": where,
        "SUMO_HOME": None if home is None else str(home),
    }
