"""What nvidia-smi knows of the GPUs. Its numbers are those of PCI order, which CUDA uses if told to."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

__all__ = ["Gpu", "find_gpus"]

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
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [gpu for gpu in map(_read, done.stdout.splitlines()) if gpu is not None]


def _read(line: str) -> Gpu | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(_FIELDS) or not words[0].isdigit():
        return None
    index, uuid, name, total, free = words
    return Gpu(int(index), uuid, name, _mib(total), _mib(free))


def _mib(word: str) -> int | None:
    return int(word) if word.isdigit() else None  # "[N/A]" on cards that share the machine's memory
