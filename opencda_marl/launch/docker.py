"""CARLA servers in Docker containers: starting, stopping and asking for them, and using one in a slot.

A container is named by its RPC port. The launcher only restarts containers that exist; it never makes or removes one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import BackendMissingError, DeadlineError, OpenCDAError, SimulatorError
from opencda_marl.core.files import writing
from opencda_marl.core.probe import Answer, Probe, look
from opencda_marl.launch.keeper import Kept, keep
from opencda_marl.settings.traffic import CARLA_VERSION

__all__ = [
    "IMAGE",
    "Container",
    "DockerServer",
    "container_facts",
    "container_name",
    "inspect",
    "start",
    "start_command",
    "status",
    "stop",
]

IMAGE = f"carlasim/carla:{CARLA_VERSION}"

_TIMEOUT = 60.0  # [s] for an answer of docker
_PULL = 7200.0  # [s] for a start: the image may have to be fetched

_NO_ACCESS = (
    "the account running docker must be in the host's docker group, and this one is not: permission denied on docker's "
    "socket. No flag here can work around it"
)
_NO_ACCESS_FIX = (
    "use the host-binary path (--carla-restart-mode process --carla-bin /path/to/CarlaUE4.sh) until an administrator "
    "adds the account"
)


@dataclass(frozen=True, slots=True)
class Container:
    """What docker says about a container that exists."""

    name: str
    status: str  # created, running, restarting, paused, exited, dead, …
    started: str  # when, as docker writes it: another text after each start
    restarts: int  # by docker itself
    image: str
    exit_code: int

    @property
    def running(self) -> bool:
        """Is its process there?"""
        return self.status == "running"


def container_name(port: int) -> str:
    """The name that the launcher restarts."""
    return f"opencda-carla-{port}"


def start_command(port: int, *, streaming_port: int | None = None, gpu: str | None = None, image: str = IMAGE) -> str:
    """What a person types to start the container of a port."""
    words = ["opencda-marl docker-carla start", f"--rpc-port {port}"]
    words += [] if streaming_port is None else [f"--streaming-port {streaming_port}"]
    words += [] if image == IMAGE else [f"--image {image}"]
    return " ".join([*words, f"--gpu {'K' if gpu is None else gpu}"])


def start(port: int, *, streaming_port: int | None = None, gpu: str | None = None, image: str = IMAGE) -> str:
    """Start a container for a port, or say that there is one.

    Args:
        port: RPC port, on the host.
        streaming_port: 0: a free one; None: the next one after `port`.
        gpu: number or UUID of the card; None: all.
        image: of CARLA.

    Returns:
        What was done, or found.

    Raises:
        SimulatorError: docker refused, or the port has been given to something else.
    """
    name = container_name(port)
    there = inspect(port)
    if there is not None and there.status in ("running", "restarting"):
        return f"{name} is {there.status} already (since {there.started}); nothing was done"
    if there is not None:
        _docker("start", name)
        return (
            f"{name} existed ({there.status}, exit code {there.exit_code}) and was started again, as it was made; "
            f"to make it anew: opencda-marl docker-carla stop --remove --rpc-port {port}"
        )
    answer = look(port)
    if answer.kind != "closed":
        raise SimulatorError(
            f"port {port} is taken on this host: a container with the host's network could not have it",
            fix="stop what is there, or choose another --rpc-port",
        )
    _docker(*_run_arguments(port, streaming_port, gpu, image), timeout=_PULL)
    return f"{name} started; it answers on port {port} in half a minute or so"


def _run_arguments(port: int, streaming_port: int | None, gpu: str | None, image: str) -> list[str]:
    """`docker run`'s: never privileged, and no -graphicsadapter: inside there is one card, adapter 0."""
    streaming = [] if streaming_port is None else [f"-carla-streaming-port={streaming_port}"]
    return [
        *("run", "--detach", "--name", container_name(port), "--network", "host"),
        *("--gpus", "all" if gpu is None else f"device={gpu}"),
        *("--env", "NVIDIA_DRIVER_CAPABILITIES=all"),  # Vulkan belongs to "graphics", which is not given by default
        *("--restart", "unless-stopped", image),
        *("bash", "CarlaUE4.sh", f"-carla-rpc-port={port}", *streaming),
        *("-RenderOffScreen", "-quality-level=Low", "-nosound"),
    ]


def stop(port: int, *, remove: bool = False) -> str:
    """Stop the container of a port.

    Args:
        port: RPC port.
        remove: it, too; the next start makes a new one, with another card for instance.

    Returns:
        What was done.

    Raises:
        SimulatorError: docker refused.
    """
    name = container_name(port)
    if inspect(port) is None:
        return f"there is no container {name}; nothing was done"
    _docker("stop", name)
    if not remove:
        return f"{name} stopped"
    _docker("rm", name)
    return f"{name} stopped and removed"


def status(port: int) -> str:
    """How the container of a port is, in words.

    Raises:
        SimulatorError: docker refused.
    """
    there = inspect(port)
    if there is None:
        return f"there is no container {container_name(port)}; start it: {start_command(port)}"
    answer = look(port)
    what = {
        "closed": f"nobody listens on port {port} (yet)",
        "silent": f"port {port} is open and does not answer",
        "other": f"port {port} is answered by something else than CARLA",
        "carla": f"CARLA {answer.version} answers on port {port}",
    }[answer.kind]
    again = f", restarted {there.restarts} times by docker" if there.restarts else ""
    return f"{there.name} ({there.image}) is {there.status} since {there.started}{again}; {what}"


def container_facts(port: int) -> dict[str, Any]:
    """JSON values about the container of a port and what answers there."""
    there = inspect(port)
    answer = look(port)
    known = {"exists": False} if there is None else {"exists": True, **asdict(there)}
    return {"name": container_name(port), "port": port, **known, "answer": answer.kind, "version": answer.version}


def inspect(port: int) -> Container | None:
    """The container of a port; None: there is none.

    Raises:
        SimulatorError: docker refused.
    """
    name = container_name(port)
    done = _ask("container", "inspect", name)
    if done.returncode != 0:
        if "no such container" in done.stderr.lower():
            return None
        raise _refusal(done.stderr)
    try:
        facts = json.loads(done.stdout)[0]
        state = facts["State"]
        return Container(
            name=name,
            status=state["Status"],
            started=state["StartedAt"],
            restarts=int(facts["RestartCount"]),
            image=facts["Config"]["Image"],
            exit_code=int(state["ExitCode"]),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise SimulatorError(f"docker's answer about {name} is not understood: {error!r}") from error


class DockerServer:
    """The container of a slot: used if it answers, restarted if it does not, never made.

    Args:
        port: RPC port; it names the container.
        folder: of the slot; what `docker restart` says goes there.
    """

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self._folder = folder
        self._probe: Probe | None = None
        self._restarting: Kept | None = None
        self._seen: Container | None = None  # as it was when it last answered
        self._ready = False
        self._version: str | None = None

    def begin(self) -> None:
        """See that the container is there; one that does not run is restarted. Returns at once.

        Raises:
            SimulatorError: there is none, or docker refused.
        """
        self._ready = False
        there = self._there()
        if there.status in ("running", "restarting"):  # after a crash docker starts it again by itself
            self._look()
        else:
            self._bounce()

    def ready(self) -> bool:
        """Does it answer?

        Raises:
            SimulatorError: docker refused to restart it; something else, or another version, is on its port.
        """
        if self._restarting is not None:
            self._see_restart(self._restarting)
            return False
        if self._ready and self.alive():
            return True
        if self._probe is None:
            self.begin()
        answer = None if self._probe is None else self._probe.poll()
        if answer is not None:
            self._ready = self._heard(answer)
        return self._ready

    def restart(self) -> None:
        """`docker restart`, unless docker has done that itself since the server last answered. Returns at once.

        Raises:
            SimulatorError: there is no such container, or docker refused.
        """
        there = self._there()
        before, self._seen, self._ready = self._seen, None, False
        crashed = before is not None and (there.started, there.restarts) != (before.started, before.restarts)
        if there.status == "restarting" or crashed:
            self._look()
        elif self._restarting is None:
            self._bounce()

    def terminate(self) -> None:
        """Nothing: containers survive the launcher."""

    def stop(self) -> None:
        """Let go of it; the container stays as it is."""
        self._forget_probe()
        self._ready = False
        if self._restarting is not None:
            self._restarting.wait(_TIMEOUT)
            self._restarting = None

    def alive(self) -> bool:
        """Does it run, in the life in which it answered?"""
        there = inspect(self.port)
        if there is None or not there.running:
            return False
        return self._seen is None or there.started == self._seen.started

    def describe(self) -> dict[str, Any]:
        """JSON values for launcher.json."""
        phase = "restarting" if self._restarting is not None else "ready" if self._ready else "starting"
        return {
            "mode": "docker",
            "port": self.port,
            "container": container_name(self.port),
            "phase": phase,
            "owned": False,
            "version": self._version,
        }

    def _there(self) -> Container:
        there = inspect(self.port)
        if there is None:
            raise SimulatorError(
                f"there is no container {container_name(self.port)}, and the launcher makes none",
                fix=f"start it: {start_command(self.port)}",
            )
        return there

    def _bounce(self) -> None:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._forget_probe()
        self._restarting = keep(
            [_program(), "restart", container_name(self.port)],
            env=dict(os.environ),
            cwd=self._folder,
            log=self._folder / "docker.log",
            record=self._folder / "docker.json",
        )

    def _see_restart(self, restarting: Kept) -> None:
        code = restarting.poll()
        if code is None:
            return
        self._restarting = None
        if code != 0:
            said = (self._folder / "docker.log").read_text(errors="replace").strip().splitlines()[-1:]
            raise _refusal("".join(said) or f"docker restart ended with {code}")
        self._look()

    def _heard(self, answer: Answer) -> bool:
        if answer.kind in ("closed", "silent"):  # still loading; docker may be at it
            self._there()
            self._look()
            return False
        if answer.version != CARLA_VERSION:
            self._forget_probe()
            what = "not a CARLA server" if answer.version is None else f"CARLA {answer.version}"
            removal = f"opencda-marl docker-carla stop --remove --rpc-port {self.port}"
            raise SimulatorError(
                f"what answers on port {self.port} is {what}, and CARLA {CARLA_VERSION} is needed",
                fix=f"make the container anew from {IMAGE}: {removal}; {start_command(self.port)}",
            )
        self._forget_probe()
        self._version, self._seen = answer.version, self._there()
        return True

    def _look(self) -> None:
        self._forget_probe()
        self._probe = Probe(self.port)

    def _forget_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def _program() -> str:
    program = shutil.which("docker")
    if program is None:
        raise BackendMissingError(
            "the program docker is not installed",
            fix="install Docker and the NVIDIA container toolkit, or use --carla-restart-mode process",
        )
    return program


def _docker(*arguments: str, timeout: float = _TIMEOUT) -> str:
    done = _ask(*arguments, timeout=timeout)
    if done.returncode != 0:
        raise _refusal(done.stderr)
    return done.stdout


def _ask(*arguments: str, timeout: float = _TIMEOUT) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([_program(), *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"docker {arguments[0]} did not answer within {timeout:g} s", fix="see whether `docker ps` answers"
        ) from error


def _refusal(said: str) -> OpenCDAError:
    """What docker's own words mean."""
    lower = said.lower()
    if "permission denied" in lower and "docker" in lower:
        return SimulatorError(_NO_ACCESS, fix=_NO_ACCESS_FIX)
    if "cannot connect to the docker daemon" in lower or "is the docker daemon running" in lower:
        return SimulatorError("the docker daemon does not run", fix="start it: sudo systemctl start docker")
    if "could not select device driver" in lower or "nvidia-container-cli" in lower:
        return SimulatorError(
            f"docker cannot hand out the GPU: {said.strip()}",
            fix="install the NVIDIA container toolkit, and see what nvidia-smi says",
        )
    return SimulatorError(f"docker refused: {said.strip()}", fix="see what `docker ps -a` and `docker logs` say")
