"""Is this machine fit for training? Each check says what it found and, where something is wrong, what to do.

A check has an outcome: True (fine), False (wrong; `fix` says what to do) or None (optional and absent).
SUMO training needs what `blocks`, well or not; the rest costs speed or a feature.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opencda_marl.core.files import unsuited
from opencda_marl.core.programs import run_program, telling_line
from opencda_marl.core.scratch import scratch_folder
from opencda_marl.core.speech import plain
from opencda_marl.settings.traffic import CARLA_VERSION

__all__ = ["Check", "exit_code", "inspect", "summary"]

_GIB = 2**30
_LOW_DISK = 2.0  # [GiB] a run with trajectories writes some hundred MiB
_NO_DISK = 0.1  # [GiB] not even a checkpoint
_COMPILER_SECONDS = 120.0
_LOW_MEMORY = 1.5  # [GiB] the main process stays under 0.9, its evaluation child needs about as much

_WHEEL_OF = {"sumo": "eclipse-sumo"}
"""The wheel that brings a program."""

_START = """
import sys
import libsumo
libsumo.start(["sumo", "-n", sys.argv[1], "--no-step-log", "true", "--no-warnings", "true"])
libsumo.simulationStep()
libsumo.close()
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    ok: bool | None  # None: optional and not there
    found: str
    fix: str | None = None
    blocks: bool = False  # SUMO training needs it

    @property
    def outcome(self) -> str:
        """ok, absent (optional), warn (it can be lived with) or FAIL (SUMO training cannot start)."""
        if self.ok is None:
            return "absent"
        return "ok" if self.ok else "FAIL" if self.blocks else "warn"


def inspect(folder: Path | None = None) -> list[dict[str, Any]]:
    """Look at everything; takes some seconds, because it loads torch, starts SUMO and compiles a line of C++.

    Args:
        folder: where runs will be written; None: the current folder.

    Returns:
        checks as plain values: {name, ok, outcome, found, fix, blocks}; `outcome` is ok, warn, FAIL or absent.
    """
    where = (folder or Path.cwd()).absolute()
    found: list[Check] = [_python()]
    for look in (_sumo, _numpy, _torch, _threads, _compiler, _numba_cache):
        found.extend(look())
    found.extend((_temporary(), _disk(where), _memory(), _carla()))
    return [{**asdict(check), "outcome": check.outcome} for check in found]


def exit_code(checks: Iterable[dict[str, Any]]) -> int:
    """0, or 1 when something blocks SUMO training."""
    return int(any(check["ok"] is False and check["blocks"] for check in checks))


def summary(checks: Iterable[Mapping[str, Any]]) -> str:
    """One line: is the machine fit, and what is to be mended?"""
    named: dict[str, list[str]] = {"FAIL": [], "warn": []}
    for check in checks:
        if check["outcome"] in named:
            named[check["outcome"]].append(check["name"])
    if named["FAIL"]:
        return f"SUMO training cannot start yet; mend first: {', '.join(named['FAIL'])}"
    if named["warn"]:
        return f"ready for SUMO training; it would be faster or more complete with: {', '.join(named['warn'])}"
    return "ready for SUMO training"


def _python() -> Check:
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("python", fits, here, None if fits else "use Python 3.11, 3.12 or 3.13", blocks=True)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _sumo() -> list[Check]:
    """Wheels, their agreement, the programs, SUMO_HOME, and whether it starts."""
    library, client, programs = (_installed(name) for name in ("libsumo", "traci", "eclipse-sumo"))
    checks = [
        Check("libsumo", True, library, blocks=True)
        if library
        else Check("libsumo", False, "not installed", "pip install libsumo", blocks=client is None or programs is None),
        Check("traci", True, client)
        if client
        else Check("traci", False, "not installed (only the slow fallback needs it)", "pip install traci"),
        (ran := _sumo_program()),
        _agreement({"libsumo": library, "traci": client, "eclipse-sumo": programs, "sumo": _number(ran)}),
        _sumo_home(os.environ.get("SUMO_HOME")),
    ]
    if library:
        checks.append(_sumo_starts())
    return checks


def _sumo_program() -> Check:
    from opencda_marl.core.errors import BackendMissingError
    from opencda_marl.simulators.wheels import program

    try:
        path = program("sumo")
    except BackendMissingError as error:
        return Check("sumo program", None, "not installed (TraCI, sumo-gui and network building need it)", error.fix)
    answer = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60, check=False)
    lines = answer.stdout.strip().splitlines()
    if answer.returncode != 0 or not lines:
        return Check("sumo program", False, f"{path} does not run: {answer.stderr.strip()[:200]}", f"reinstall {path}")
    return Check("sumo program", True, f"{lines[0].strip()} at {path}")


def _number(program: Check) -> str | None:
    """The version that a program told: "Eclipse SUMO sumo 1.28.0 at …" -> "1.28.0"."""
    match = re.search(r"\d+\.\d+\.\d+", program.found) if program.ok else None
    return match[0] if match else None


def _agreement(versions: dict[str, str | None]) -> Check:
    """All of SUMO's wheels must have one version: mixed ones fail in odd ways."""
    there = {name: found for name, found in versions.items() if found}
    told = ", ".join(f"{name} {found}" for name, found in there.items()) or "none installed"
    if len(set(there.values())) <= 1:
        return Check("sumo versions agree", True, told)
    newest = max(there.values(), key=lambda text: [int(part) for part in text.split(".") if part.isdigit()])
    wanted = " ".join(f"'{name}=={newest}'" for name in dict.fromkeys(_WHEEL_OF.get(name, name) for name in there))
    return Check("sumo versions agree", False, told, f"pip install {wanted}")


def _sumo_home(named: str | None) -> Check:
    """What the shell says is ignored, since the wheel's own data is used; another version is still worth a word."""
    if not named:
        return Check("SUMO_HOME", True, "not set; the installed wheel's own data is used")
    marker = Path(named) / "data"
    told = f"{named} (ignored: the installed wheel's own data is used)"
    if not marker.is_dir():
        return Check("SUMO_HOME", False, f"{named} holds no SUMO data", "unset SUMO_HOME")
    return Check("SUMO_HOME", True, told)


def _sumo_starts() -> Check:
    """Start libsumo with the bundled crossing in a child process, so that its crash is a finding."""
    from opencda_marl.simulators.network import find_network

    answer = subprocess.run(
        [sys.executable, "-c", _START, str(find_network("intersection"))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if answer.returncode == 0:
        return Check("sumo starts", True, "one step of the bundled crossing in libsumo", blocks=True)
    last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    return Check("sumo starts", False, last, "pip install --force-reinstall libsumo", blocks=True)


def _numpy() -> list[Check]:
    found = _installed("numpy")
    if found is None:
        return [Check("numpy", False, "not installed", "pip install numpy", blocks=True)]
    return [Check("numpy", True, found, blocks=True)]


def _torch() -> list[Check]:
    """Build and device. A CPU build beside an NVIDIA card is the classic day lost."""
    if find_spec("torch") is None:
        return [Check("torch", False, "not installed", "pip install 'torch==2.13.*'", blocks=True)]
    import torch

    from opencda_marl.nn.device import torch_build

    return [
        Check("torch", True, torch_build(), blocks=True),
        _device(
            built=torch.version.cuda is not None,
            usable=torch.cuda.is_available(),
            names=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            card=shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists(),
        ),
    ]


def _device(*, built: bool, usable: bool, names: list[str], card: bool) -> Check:
    if usable:
        return Check("device", True, ", ".join(names))
    if card and not built:
        fix = "install the CUDA build: pip install 'torch==2.13.*' --index-url https://download.pytorch.org/whl/cu130"
        return Check("device", False, "an NVIDIA driver is here, but torch is a CPU build: it trains on the CPU", fix)
    if card:
        fix = "compare the driver (nvidia-smi) with torch's CUDA version; update the driver"
        return Check("device", False, "an NVIDIA driver is here, but torch cannot use it", fix)
    return Check("device", True, "cpu (no GPU found)")


def _threads() -> list[Check]:
    """Cores that this process may really use, and the pools of threads in it."""
    import numpy  # noqa: F401 - loads its BLAS, so that the pool shows
    from threadpoolctl import threadpool_info

    cores, quota = _usable_cores(), _cpu_quota()
    told = f"{cores} of {os.cpu_count()} cores" + (f", limited to {quota:g} by the container" if quota else "")
    limit = min(float(cores), quota or float(cores))
    pools = [f"{p['user_api']} ({p['internal_api']}) {p['num_threads']}" for p in threadpool_info()]
    # torch's OpenMP pool and NumPy's BLAS pool used in turn cost 20 times the work itself
    pools.append("a run keeps BLAS at 1")
    widest = max((int(p["num_threads"]) for p in threadpool_info()), default=1)
    checks = [Check("cores", True, told)]
    if widest > max(1.0, limit):
        fix = f"export OMP_NUM_THREADS={max(1, int(limit))}"
        checks.append(Check("thread pools", False, f"{', '.join(pools)}: more than {limit:g} cores", fix))
    else:
        checks.append(Check("thread pools", True, ", ".join(pools)))
    if (policy := os.environ.get("OMP_WAIT_POLICY", "").lower()) == "passive":
        checks.append(Check("OMP_WAIT_POLICY", False, f"{policy}: halves a lone process", "unset OMP_WAIT_POLICY"))
    return checks


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """CPUs that a container may use (cgroup v2); None: no limit."""
    if not file.is_file():
        return None
    quota, _, period = file.read_text().strip().partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _compiler() -> list[Check]:
    """A C++ compiler with Python's headers: compiled updates and acting in C++ need it; else both do without."""
    from opencda_marl.nn.native import find_compiler

    command, why = find_compiler()
    if command is None:
        fix = "apt install g++ (or conda install gxx); training works without it, only slower"
        return [Check("compiler", False, why, fix)]
    checks = [_compiles(command, Path(sysconfig.get_paths()["include"])), _fast_acting()]
    return [*checks, *_paths()]


def _paths() -> list[Check]:
    """Paths that torch.compile cannot put into a compiler's command line."""
    places = (
        ("Python is installed in", sys.prefix, "make .venv in a folder whose path has no such sign"),
        ("temporary files go to", tempfile.gettempdir(), "export TMPDIR=/tmp (or another folder without one)"),
    )
    found = [(what, place, sign, fix) for what, place, fix in places if (sign := unsuited(place)) is not None]
    if not found:
        return []
    told = " and ".join(f"{what} '{plain(place)}', a path with {sign}" for what, place, sign, _ in found)
    fixes = "; ".join(fix for *_, fix in found)
    does = "training works, but torch.compile does not: update_mode compiled falls back to eager"
    return [Check("paths", False, f"{told}: {does}", f"only if you want update_mode compiled: {fixes}")]


def _fast_acting() -> Check:
    """The kernels for acting; built here if it is not yet in its cache."""
    from opencda_marl.nn.native import cache_root, find_library, why_not_kept

    library, why = find_library()
    if library is not None and (unkept := why_not_kept()) is not None:
        told, _, fix = unkept.partition("; ")
        return Check("fast acting", False, told, fix)
    if library is not None:
        return Check("fast acting", True, f"in {cache_root()}")
    return Check(
        "fast acting", False, f"{why}; acting uses torch's", "make the compiler work, or OPENCDA_MARL_CACHE=DIR"
    )


def _compiles(compiler: Sequence[str], include: Path) -> Check:
    told = shlex.join(compiler)
    with scratch_folder("build") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <Python.h>\n#include <vector>\nint probe() { return std::vector<int>{1}[0]; }\n")
        output = Path(folder) / "compiler.log"
        options = ["-shared", "-fPIC", "-O1", f"-I{include}", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            code = run_program([*compiler, *options], output=output, limit=_COMPILER_SECONDS)
            said = telling_line(output.read_text(errors="replace")) or f"exit code {code}"
        except (TimeoutError, OSError) as error:
            code, said = -1, str(error)
    if code == 0:
        return Check("compiler", True, f"{told} builds an extension")
    fix = f"make {told} work; training works without it"
    if "Python.h" in said:
        fix = "apt install python3-dev (compiled updates need it; training works without it)"
    return Check("compiler", False, said, fix)


def _numba_cache() -> list[Check]:
    """Compiled kernels are kept on disk; without a place they are compiled anew at each start."""
    from opencda_marl.env.compiled import cache_folder

    folder = cache_folder()
    if folder is not None:
        return [Check("numba cache", True, str(folder))]
    fix = "export NUMBA_CACHE_DIR=DIR (a folder that you may write to)"
    return [Check("numba cache", False, "no folder is writable: each start compiles for about 20 s", fix)]


def _temporary() -> Check:
    """SUMO's input goes through a temporary folder."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        fix = "export TMPDIR=DIR (a folder that you may write to)"
        return Check("temporary folder", False, "none is writable", fix, blocks=True)
    return Check("temporary folder", True, folder, blocks=True)


def _nearest(folder: Path) -> Path:
    """The folder itself, or its nearest ancestor that exists."""
    return next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))


def _writable(folder: Path) -> bool:
    nearest = _nearest(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _disk(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    nearest = _nearest(folder)
    free = usage(nearest).free / _GIB
    told = f"{free:.1f} GiB free at {folder}"
    if not _writable(folder):
        return Check("disk", False, f"{folder} is not writable", "choose another folder with --out DIR", blocks=True)
    if free < _LOW_DISK:
        fix = "make room (opencda-marl runs clean), or choose another folder with --out DIR"
        return Check("disk", False, told, fix, blocks=free < _NO_DISK)
    return Check("disk", True, told, blocks=True)


def _memory() -> Check:
    import psutil

    free, limit = psutil.virtual_memory().available / _GIB, _memory_limit()
    free = free if limit is None else min(free, limit)
    told = f"{free:.1f} GiB available" + (f" (container limit {limit:.1f} GiB)" if limit is not None else "")
    enough = free >= _LOW_MEMORY
    return Check("memory", enough, told, None if enough else "free some memory: training needs about 1 GiB")


def _memory_limit(file: Path = Path("/sys/fs/cgroup/memory.max")) -> float | None:
    """[GiB] that a container may use (cgroup v2); None: no limit."""
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return None if text == "max" else int(text) / _GIB


def _carla() -> Check:
    found = _installed("carla")
    if found is None and find_spec("carla") is None:
        return Check("carla client", None, "not installed (only the CARLA backend needs it)", None)
    if found == CARLA_VERSION:
        return Check("carla client", True, found)
    told = f"{found or 'of unknown version'}; client and server must both be {CARLA_VERSION}"
    return Check("carla client", False, told, f"pip install 'carla=={CARLA_VERSION}'")
