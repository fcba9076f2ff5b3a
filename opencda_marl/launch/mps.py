"""NVIDIA's multi-process service: learners on one GPU that share its contexts instead of taking turns.

One control daemon for each GPU, in the foreground under a keeper of ours, with a pipe folder of its own: it ends with
the launcher, and other daemons of the machine are not met. All cells of its GPU hang on it: they fail together.

https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from opencda_marl.core.errors import ConfigError, DeviceError
from opencda_marl.core.files import writing
from opencda_marl.launch.gpus import Gpu
from opencda_marl.launch.keeper import Kept, keep
from opencda_marl.launch.place import Place
from opencda_marl.launch.scaling import Switch

__all__ = ["CONTROL", "Mps", "Sharing"]

CONTROL = "nvidia-cuda-mps-control"
_LIMIT = 30.0  # [s] until a daemon has made its pipe


class Mps:
    """The services of a launcher, one a GPU, started when they are first needed.

    Args:
        folder: of the matrix or runner; what the daemons log goes to `mps/`.
        named: GPUs of the slots, by number or UUID.
        gpus: what nvidia-smi says of them.

    Raises:
        ConfigError: there is no such program; a GPU is not known.
    """

    def __init__(self, folder: Path, named: Sequence[str], gpus: Sequence[Gpu] | None) -> None:
        program = shutil.which(CONTROL)
        if program is None:
            raise ConfigError(
                f"--mps: the program {CONTROL} is not there", fix="it comes with NVIDIA's driver; or leave --mps out"
            )
        if not named:
            raise ConfigError("--mps: which GPUs?", fix="name those of the learners: --cuda-visible-devices 0,1")
        self._program = program
        self._folder = folder / "mps"
        # numbers mean something else inside of a service: NVIDIA's manual asks for UUIDs
        known = {str(gpu.index): gpu.uuid for gpu in gpus or ()} | {gpu.uuid: gpu.uuid for gpu in gpus or ()}
        unknown = [name for name in named if name not in known]
        if unknown:
            raise ConfigError(
                f"--mps: nvidia-smi knows of no GPU {', '.join(unknown)}", fix="see nvidia-smi -L; or leave --mps out"
            )
        self._uuids = {name: known[name] for name in named}
        self._kept: dict[str, Kept] = {}
        self._begun: dict[str, float] = {}
        # not in the matrix folder: the name of a socket is 108 bytes at most
        self._pipes = Path(tempfile.mkdtemp(prefix="opencda-marl-mps-"))

    def ready(self, gpu: str) -> bool:
        """Does its service run? It is started if it does not.

        Args:
            gpu: as the slot names it.

        Raises:
            DeviceError: it ends at once, or makes no pipe.
            StorageError: its log cannot be written.
        """
        uuid = self._uuids[gpu]
        kept = self._kept.get(uuid)
        if kept is None:
            self._kept[uuid] = self._start(uuid)
            self._begun[uuid] = time.monotonic()
            return False
        if (self._pipe(uuid) / "control").exists() and kept.alive:
            return True
        waited = time.monotonic() - self._begun[uuid]
        if kept.alive and waited < _LIMIT:
            return False
        kept.kill()
        del self._kept[uuid]
        raise DeviceError(
            f"the multi-process service of GPU {gpu} does not come up",
            fix=f"read {self._log(uuid)}; or leave --mps out",
        )

    def died(self, gpu: str) -> bool:
        """Has the service of a GPU ended by itself? The next `ready` starts another one."""
        uuid = self._uuids[gpu]
        kept = self._kept.get(uuid)
        if kept is None or kept.alive:
            return kept is None
        del self._kept[uuid]
        shutil.rmtree(self._pipe(uuid), ignore_errors=True)
        return True

    def environment(self, gpu: str) -> dict[str, str]:
        """What a trainer is told."""
        return self._variables(self._uuids[gpu])

    def close(self) -> None:
        """End them all, at the same time; may be called twice."""
        for kept in self._kept.values():
            kept.terminate()
        for kept in self._kept.values():
            kept.stop()
        self._kept = {}
        shutil.rmtree(self._pipes, ignore_errors=True)

    def _start(self, uuid: str) -> Kept:
        shutil.rmtree(self._pipe(uuid), ignore_errors=True)
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._pipe(uuid).mkdir(parents=True)
        return keep(
            [self._program, "-f"],
            env={**os.environ, **self._variables(uuid)},
            cwd=self._folder,
            log=self._log(uuid),
            record=self._folder / f"{uuid}.json",
        )

    def _variables(self, uuid: str) -> dict[str, str]:
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipe(uuid)),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder),
        }

    def _pipe(self, uuid: str) -> Path:
        return self._pipes / uuid

    def _log(self, uuid: str) -> Path:
        return self._folder / f"{uuid}.log"


class Sharing:
    """Which trainers of a launcher hang on the service of their GPU.

    Args:
        mps: the services; None: none is used.
        switch: whether they are on now; None: they are.
    """

    def __init__(self, mps: Mps | None, switch: Switch | None) -> None:
        self._mps, self._switch = mps, switch

    def wanted(self, place: Place) -> bool:
        """Is the next trainer there to use one?"""
        on = self._mps is not None and (self._switch is None or self._switch.on)
        return on and place.slot.cuda is not None and place.cell is not None and place.cell.device != "cpu"

    def ready(self, place: Place) -> bool:
        """Could it start? See `Mps.ready`."""
        return self._mps is None or place.slot.cuda is None or self._mps.ready(place.slot.cuda)

    def told(self, place: Place) -> dict[str, str]:
        """Variables of its trainer."""
        if self._mps is None or not place.mps or place.slot.cuda is None:
            return {}
        return self._mps.environment(place.slot.cuda)

    def died(self, place: Place) -> bool:
        """Is the service of its trainer gone?"""
        if self._mps is None or not place.mps or place.slot.cuda is None:
            return False
        return self._mps.died(place.slot.cuda)

    def close(self) -> None:
        """End the services; may be called twice."""
        if self._mps is not None:
            self._mps.close()
