"""What nvidia-smi knows of the GPUs. Its numbers are those of PCI order, which CUDA uses if told to."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Gpu", "cards_of", "find_gpus"]

_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free")
_TIMEOUT = 15.0  # [s]; a driver that is just loaded takes some


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    index: int  # in PCI order: CUDA_DEVICE_ORDER=PCI_BUS_ID
    uuid: str
    name: str
    total_mib: int | None
    free_mib: int | None


def find_gpus() -> list[Gpu] | None:
    """The machine's GPUs; None: nvidia-smi is not there, or does not answer."""
    said = _nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    return None if said is None else [gpu for gpu in map(_read, said.splitlines()) if gpu is not None]


def cards_of(pids: Iterable[int]) -> set[int] | None:
    """Numbers of the cards that processes use, for graphics or for computing; None: it cannot be told."""
    said = _nvidia_smi("pmon", "-c", "1")
    if said is None:
        return None
    wanted = {str(pid) for pid in pids}
    rows = (line.split() for line in said.splitlines() if not line.startswith("#"))
    return {int(row[0]) for row in rows if len(row) > 1 and row[1] in wanted and row[0].isdigit()}


def _nvidia_smi(*arguments: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read(line: str) -> Gpu | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(_FIELDS) or not words[0].isdigit():
        return None
    index, uuid, name, total, free = words
    return Gpu(int(index), uuid, name, _mib(total), _mib(free))


def _mib(word: str) -> int | None:
    return int(word) if word.isdigit() else None  # "[N/A]" on cards that share the machine's memory
