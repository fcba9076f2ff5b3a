"""Runners as actors of a Ray cluster. Ray places them and tells of their deaths; nothing else of it is used."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import ConfigError
from opencda_marl.launch.engines import MARGIN, Job, processors
from opencda_marl.launch.folder import Matrix, MatrixFolder
from opencda_marl.launch.runners import Seat

__all__ = ["RayEngine", "check_ray"]

_NUMBERS = ("num_cpus", "num_gpus", "memory_gb")
_KNOWN = ("address", "num_cpus", "num_gpus", "memory_gb", "resource")


class RayEngine:
    """A Ray cluster: a running one, or with `address=local` one of this machine alone, for as long as we live.

    Args:
        folder: of the matrix.
        matrix: as it stands there.
        given: `address`, and what each runner needs: `num_cpus`, `num_gpus`, `memory_gb`, `resource` (the name of a
            custom resource, of which it takes one).

    Raises:
        ConfigError: an unknown option; ray is not installed; there is no cluster.
    """

    def __init__(self, folder: MatrixFolder, matrix: Matrix, given: Mapping[str, Any]) -> None:
        check_ray(given)
        self._seat = Seat(folder.path, matrix.options.deadline("stopping") + MARGIN, Path.cwd())
        self._ray = _connected(str(given.get("address", "auto")))
        resource = given.get("resource")
        self._needs = {
            "num_cpus": given.get("num_cpus", processors(matrix)),
            "num_gpus": given.get("num_gpus", 0),
            "memory": None if "memory_gb" not in given else int(given["memory_gb"] * 2**30),
            "resources": None if resource is None else {str(resource): 1},
        }

    def runners(self) -> int:
        """One on every node."""
        return sum(bool(node["Alive"] and node["Resources"].get("CPU")) for node in self._ray.nodes())

    def place(self, name: str) -> Job:
        """An actor; it waits until a node has room for it."""
        actor = self._ray.remote(_Actor).options(
            **self._needs, max_restarts=0, scheduling_strategy="SPREAD", name=f"opencda-marl-{os.getpid()}-{name}"
        )
        return _RayJob(self._ray, actor.remote(self._seat, name))

    def adopt(self) -> dict[str, Job]:
        """None: actors end with whoever placed them."""
        return {}

    def close(self) -> None:
        """Actors end with it."""
        self._ray.shutdown()


def check_ray(given: Mapping[str, Any]) -> None:
    """Is Ray installed, and are these its options?

    Raises:
        ConfigError: no.
    """
    for name, value in given.items():
        if name not in _KNOWN:
            raise ConfigError(f"--engine-set {name}: ray has no such option here", fix=f"one of {', '.join(_KNOWN)}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if name in _NUMBERS and not number:
            raise ConfigError(f"--engine-set {name}={value}: {name} is a number from 0", fix=f"e.g. {name}=1")
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--engine ray: the package ray is not installed", fix="pip install 'opencda-marl[ray]'"
        ) from error


class _Actor:
    """On the node: has the runner as its child, which ends with it."""

    def __init__(self, seat: Seat, name: str) -> None:
        self._kept = seat.take(name)

    def poll(self) -> int | None:
        return self._kept.poll()

    def stop(self) -> None:
        self._kept.terminate()


class _RayJob:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._asked: Any = None
        self._how: str | None = None
        self._answered = self._cancelled = False

    def ended(self) -> str | None:
        if self._how is not None:
            return self._how
        if self._asked is None:
            self._asked = self._actor.poll.remote()
        ready, _ = self._ray.wait([self._asked], timeout=0)
        if not ready:
            if self._cancelled and not self._answered:  # it waits for a node, and is not wanted there any more
                self._ray.kill(self._actor)
                self._how = "cancelled"
            return self._how
        asked, self._asked = self._asked, None
        try:
            code = self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            self._how = f"ray: {str(error).strip().splitlines()[0]}"
        else:
            self._answered = True
            self._how = None if code is None else f"exit code {code}"
        return self._how

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._actor.stop.remote()


def _connected(address: str) -> Any:
    # without these Ray hides GPUs from actors that ask for none (and warns of it), and tells others that it is used
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except ConnectionError as error:
        raise ConfigError(
            f"--engine ray: there is no Ray cluster at {address!r}: {error}",
            fix="start one: ray start --head; or use this machine alone: --engine-set address=local",
        ) from error
    return ray
