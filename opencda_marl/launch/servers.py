"""CARLA servers of slots, as processes of this machine.

A server is *owned* if the slot's server.json tells of it by number and start time: this launcher or an earlier one has
started it. One that answers and is not owned is used and never touched. Anything else on its ports is an error.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opencda_marl.core.errors import BackendMissingError, ConfigError, OpenCDAError, SimulatorError, StorageError
from opencda_marl.core.files import write_whole, writing
from opencda_marl.core.probe import Answer, Probe
from opencda_marl.launch.docker import DockerServer
from opencda_marl.launch.gpus import cards_of
from opencda_marl.launch.keeper import GRACE, Kept, find, keep
from opencda_marl.launch.plan import Slot
from opencda_marl.launch.ports import PER_SERVER, holder, is_free, listeners, taken
from opencda_marl.launch.processes import command_line, descendants
from opencda_marl.settings.traffic import CARLA_VERSION

__all__ = ["ProcessServer", "ServerOptions", "make_server", "server_argv"]

_FIRST_LOOK = 5.0  # [s] for what was there before us; it may be busy loading a town
_FREEING = 30.0  # [s] after a server's end, until its ports are free
_LAST_LINES = 6  # of its log, in an error

_SIGNS = (  # what the log says, and what to do about it
    ("Refusing to run with the root privileges", "run the launcher as another user: Unreal refuses to run as root"),
    ("bind: Address already in use", "another program took the port; choose another --carla-rpc-port"),
    ("error while loading shared libraries", "install what the line above names (ldd shows all that is missing)"),
    ("Vulkan", "look at vulkaninfo: the NVIDIA driver's Vulkan part is needed, without a display too"),
)
_SILENT_DEATH = "a server that says nothing more has no Vulkan driver (vulkaninfo), or SDL_VIDEODRIVER in its wrapper"

_Phase = Literal["idle", "leaving", "looking", "starting", "ready"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What is the same for all servers of a matrix."""

    carla_bin: Path  # CarlaUE4.sh
    keep: bool = False  # leave those that were started running at the end
    grace: float = GRACE  # [s] from TERM to KILL


def make_server(
    mode: Literal["process", "docker"], slot: Slot, options: ServerOptions, folder: Path
) -> ProcessServer | DockerServer:
    """The server of a slot, not begun.

    Args:
        mode: --carla-restart-mode.
        slot: with a port.
        options: of all of them.
        folder: of the slot; server.json and server.log go there.

    Raises:
        ConfigError: `--carla-gpus` with docker.
    """
    if slot.rpc_port is None:
        raise ValueError("a server needs a port")
    if mode == "process":
        return ProcessServer(slot.rpc_port, slot.adapter, options, folder)
    if slot.adapter is not None:
        raise ConfigError(
            "--carla-gpus and --carla-restart-mode docker exclude each other: a container has its card from its start",
            fix="leave --carla-gpus out; the card is chosen by: opencda-marl docker-carla start --gpu K",
        )
    return DockerServer(slot.rpc_port, folder)


def server_argv(binary: Path, port: int, adapter: int | None) -> list[str]:
    """CarlaUE4.sh's command line; `-carla-rpc-port=PORT` is what a server is recognised by."""
    card = [] if adapter is None else [f"-graphicsadapter={adapter}"]
    return [str(binary.absolute()), _marker(port), "-RenderOffScreen", "-quality-level=Low", *card]


def _marker(port: int) -> str:
    return f"-carla-rpc-port={port}"


def _processes(kept: Kept) -> set[int]:
    """The wrapper, and all below it."""
    return {kept.child_pid, *(process.pid for process in descendants(kept.pid))}


class ProcessServer:
    """A server on a port: begun, restarted and ended here, or found and only used.

    Nothing waits but `stop`: whatever takes time goes on with the next call of `ready`.

    Args:
        port: the RPC port; the two above it are the server's, too.
        adapter: -graphicsadapter; None: not given.
        options: of all servers.
        folder: of the slot.
    """

    def __init__(self, port: int, adapter: int | None, options: ServerOptions, folder: Path) -> None:
        self.port = port
        self._options = options
        self._folder = folder
        self._argv = server_argv(options.carla_bin, port, adapter)
        self._phase: _Phase = "idle"
        self._kept: Kept | None = None
        self._probe: Probe | None = None
        self._version: str | None = None
        self._adapter = adapter
        self._note: str | None = None
        self._freed_by: float | None = None  # [s] on the monotonic clock: when the ports must be free

    @property
    def owned(self) -> bool:
        """Was it started by this matrix?"""
        return self._kept is not None

    def begin(self) -> None:
        """Take over what an earlier launcher left, or start; returns at once.

        Raises:
            SimulatorError: it cannot be started.
        """
        if self._phase != "idle":
            return
        if self._kept is None:
            self._kept = find(self._record)
        kept = self._kept
        if kept is None:
            self._look(_FIRST_LOOK)
            self._phase = "looking"
        elif kept.facts["argv"] == self._argv and kept.facts["survive"] and self._marked(kept):
            self._look()
            self._phase = "starting"
        else:  # of an earlier launcher, which took it along; or not as it is wanted now
            self._leave(kept)

    def ready(self) -> bool:
        """Does it answer? Goes on with whatever is to be done for that; asked after a failure, it begins anew.

        Raises:
            SimulatorError: it died, or cannot be started; something else has a port of it; another version.
        """
        try:
            if self._phase == "idle":
                self.begin()
            if self._phase == "leaving":
                self._wait_for_the_end()
            if self._phase == "looking":
                self._see_what_is_there()
            if self._phase == "starting":
                self._see_whether_it_answers()
        except OpenCDAError:
            self._fail()
            raise
        if self._phase == "ready" and not self.alive():
            kept, self._phase = self._kept, "idle"
            if kept is not None:
                raise self._death(kept)
            raise SimulatorError(
                f"the CARLA server on port {self.port}, which was not started by this matrix, is gone",
                fix="start it again; or do not, and the launcher will start its own",
            )
        return self._phase == "ready"

    def restart(self) -> None:
        """End it and start it again; returns at once.

        Raises:
            SimulatorError: it is not ours to restart.
        """
        kept = self._kept
        if kept is not None:
            self._leave(kept)
            return
        foreign, self._phase = self._phase == "ready" and self.alive(), "idle"
        if foreign:
            raise SimulatorError(
                f"the CARLA server on port {self.port} was not started by this matrix, so it is not restarted either",
                fix="restart it yourself; or stop it, and the launcher will start its own",
            )
        self.begin()

    def terminate(self) -> None:
        """Ask it to end, as `stop` does, without waiting: several may end at the same time."""
        if self._kept is not None and not self._options.keep:
            self._kept.terminate()

    def stop(self) -> None:
        """End it if it is ours and not to be kept, and wait until its port is free.

        Raises:
            SimulatorError: it lives on, or its port is still taken.
        """
        kept = self._kept
        self._forget_probe()
        self._phase = "idle"
        if kept is None:
            return
        self._kept = None
        if self._options.keep:
            kept.release()
            return
        try:
            kept.stop(self._options.grace)
        except OpenCDAError as error:
            raise SimulatorError(error.message, fix=error.fix) from error
        deadline = time.monotonic() + _FREEING
        while not is_free(self.port):
            if time.monotonic() >= deadline:
                raise self._still_taken(self.port)
            time.sleep(0.05)

    def alive(self) -> bool:
        """Is it there? Of one that is not ours: does anybody listen?"""
        if self._kept is not None:
            return self._kept.alive
        return self._phase == "ready" and not is_free(self.port)

    def describe(self) -> dict[str, Any]:
        """JSON values for launcher.json."""
        return {
            "mode": "process",
            "port": self.port,
            "phase": self._phase,
            "owned": self.owned,
            "pid": None if self._kept is None else self._kept.child_pid,
            "version": self._version,
            "log": str(self._log),
            "note": self._note,
        }

    # --- steps of `ready`

    def _wait_for_the_end(self) -> None:
        """Of one that was ours, and then for its ports."""
        if self._kept is not None:
            if self._kept.alive:
                return
            self._kept = None
        if self._freed_by is None:
            self._freed_by = time.monotonic() + _FREEING
        still = taken(self.port)
        if not still:
            self._start()
        elif time.monotonic() >= self._freed_by:
            raise self._still_taken(still[0])

    def _see_what_is_there(self) -> None:
        answer = None if self._probe is None else self._probe.poll()
        if answer is None:
            return
        if answer.kind == "carla":
            self._accept(answer)
            with writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._record, json.dumps({"port": self.port, "owned": False}).encode(), durable=False)
            return
        still = taken(self.port)
        if still:
            raise SimulatorError(
                f"port {still[0]} is taken by {holder(still[0])}, and no CARLA server answers on port {self.port}",
                fix=f"stop it, or choose another --carla-rpc-port: a server needs {PER_SERVER} ports in a row",
            )
        self._start()

    def _see_whether_it_answers(self) -> None:
        kept = self._kept
        assert kept is not None
        if not kept.alive:
            raise self._death(kept)
        answer = None if self._probe is None else self._probe.poll()
        if answer is None:
            return
        listening = listeners(self.port)
        # still loading; or it died while it was asked, which the keeper tells in a moment
        if answer.kind in ("closed", "silent") or (answer.kind == "other" and not listening):
            self._look()
            return
        ours = _processes(kept)
        if listening and not listeners(self.port, ours):
            raise SimulatorError(
                f"port {self.port} is answered by {holder(self.port)}, not by the server that was started for it",
                fix="stop that process, or choose another --carla-rpc-port",
            )
        if answer.kind == "other":
            raise SimulatorError(
                f"what {self._options.carla_bin} started does not answer on port {self.port} as a CARLA server",
                fix="--carla-bin is to be CARLA's CarlaUE4.sh",
            )
        self._accept(answer)
        self._compare_cards(ours)

    def _compare_cards(self, ours: set[int]) -> None:
        """-graphicsadapter counts as Vulkan does, and on some machines it does nothing: what came of it is noted."""
        cards = None if self._adapter is None else cards_of(ours)
        if cards and self._adapter not in cards:
            self._note = (
                f"the CARLA server on port {self.port} was to use adapter {self._adapter}, and nvidia-smi sees it on "
                f"GPU {', '.join(map(str, sorted(cards)))}: Vulkan may count the cards in another order"
            )

    def _accept(self, answer: Answer) -> None:
        if answer.version != CARLA_VERSION:
            raise SimulatorError(
                f"the server on port {self.port} is CARLA {answer.version}, and CARLA {CARLA_VERSION} is needed",
                fix=f"install CARLA {CARLA_VERSION} and name it: --carla-bin /path/to/CarlaUE4.sh",
            )
        self._version = answer.version
        self._phase = "ready"

    # --- what they are made of

    @property
    def _record(self) -> Path:
        return self._folder / "server.json"

    @property
    def _log(self) -> Path:
        return self._folder / "server.log"

    def _start(self) -> None:
        binary = self._options.carla_bin
        fix = "name CarlaUE4.sh with --carla-bin or CARLA_BIN, or use --carla-restart-mode docker"
        if not binary.is_file():
            raise BackendMissingError(f"there is no CARLA server {binary}", fix=fix)
        if not os.access(binary, os.X_OK):
            raise BackendMissingError(f"the CARLA server {binary} may not be executed", fix=f"chmod +x it; or {fix}")
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        # UE4's own SDL2 exits at once under this one, which is set for pygame
        env = {name: value for name, value in os.environ.items() if name != "SDL_VIDEODRIVER"}
        try:
            self._kept = keep(
                self._argv,
                env=env,
                cwd=self._folder,
                log=self._log,
                record=self._record,
                survive=self._options.keep,
                grace=self._options.grace,
                facts={"port": self.port, "owned": True},
            )
        except StorageError:
            raise
        except OpenCDAError as error:
            raise SimulatorError(error.message, fix=error.fix) from error
        self._look()
        self._phase = "starting"

    def _leave(self, kept: Kept) -> None:
        self._forget_probe()
        self._phase, self._freed_by = "leaving", None
        kept.terminate()

    def _fail(self) -> None:
        """Whatever of ours runs is ended; the next `ready` begins anew."""
        self._forget_probe()
        if self._kept is None:
            self._phase = "idle"
        else:
            self._leave(self._kept)

    def _look(self, timeout: float | None = None) -> None:
        self._forget_probe()
        self._probe = Probe(self.port) if timeout is None else Probe(self.port, timeout=timeout)

    def _forget_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _marked(self, kept: Kept) -> bool:
        """Does a process of it carry our port in its command line?"""
        return any(_marker(self.port) in command_line(pid) for pid in _processes(kept))

    def _still_taken(self, port: int) -> SimulatorError:
        return SimulatorError(
            f"port {port} is still taken by {holder(port)}, after the server that had it has ended",
            fix="stop that process, or choose another --carla-rpc-port",
        )

    def _death(self, kept: Kept) -> SimulatorError:
        code = kept.poll()
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        except OSError:
            lines = []
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        said = "".join(f"\n    {line}" for line in lines)
        fixes = [fix for sign, fix in _SIGNS if any(sign in line for line in lines)]
        return SimulatorError(
            f"the CARLA server on port {self.port} died ({how}); the last that it said:{said or ' nothing'}",
            fix=fixes[0] if fixes else f"read {self._log}; {_SILENT_DEATH}",
        )
