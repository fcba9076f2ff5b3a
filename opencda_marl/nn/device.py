"""Where tensors live, and how many threads work on them."""

from __future__ import annotations

import os
from typing import Literal

import torch

from opencda_marl.core.errors import DeviceError

__all__ = ["resolve_acting_threads", "resolve_device", "set_threads", "torch_build"]


def torch_build() -> str:
    """Version and kind of the installed torch, e.g. '2.13.0+cpu (CPU build)'."""
    kind = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return f"{torch.__version__} ({kind})"


def resolve_device(name: str) -> torch.device:
    """The device that a setting means: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceError: it is not there, or the name means nothing.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise DeviceError(f"device: {name!r} is no device", fix="use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device: {name} was asked for, but torch {torch_build()} sees no CUDA device",
            fix="install a CUDA build of torch and check the driver with nvidia-smi, or use device=auto",
        )
    if int(index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device: {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(kind, int(index or 0))


def set_threads(count: int) -> None:
    """Threads that torch uses inside one operation; for the whole process, once, before the first operation."""
    torch.set_num_threads(count)


def resolve_acting_threads(asked: int | Literal["auto"]) -> int:
    """Threads for acting on a replica: never more than the cores; `auto` is at most 8 (more is slower)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8 if asked == "auto" else asked, cores)
