"""The connection to a CARLA server: found, checked, set up, spoken to, and left as it was found.

CARLA's client aborts its process where anything else than CARLA answers, so the port is asked with raw bytes first
(`core.probe`), and everything here lives in a child process (`remote.RemoteSimulator`). Whatever fails, this client
is lost: there is no way to go on with it, and nobody tries.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from opencda_marl.core.errors import BackendMissingError, ConfigError, DeadlineError, SimulatorError
from opencda_marl.core.probe import look
from opencda_marl.settings.carla import CarlaSettings
from opencda_marl.settings.traffic import CARLA_VERSION
from opencda_marl.simulators.wheels import wheel_version

__all__ = ["ROLE", "STAND_IN", "STAND_IN_SAID", "Session", "check_client", "import_client"]

ROLE = "opencda-marl."
"""Role names of our actors begin so: what a killed process left behind is found by it."""

STAND_IN = "static.prop.standin"
"""A blueprint that only the stand-in server has."""

STAND_IN_SAID = (
    "the server is the stand-in, a test double: it shows nothing of CARLA's physics, speed or memory (docs/carla.md)"
)

_ALONE_SECONDS = 1.0  # [s] a synchronous server that stands still for so long is nobody's
_CLOSE_SECONDS = 3.0  # [s] for an answer when leaving
_THREADS = 16  # of the client: fewer than sensors can block it for ever
_AGAIN = "start again from the last checkpoint (--resume), with a fresh server"


_INSTALL = f"pip install 'carla=={CARLA_VERSION}' (its wheels are for Linux and Python 3.10 to 3.12)"


def check_client() -> None:
    """Is the right client installed? It is not imported.

    Raises:
        BackendMissingError: it is missing, or of another version.
    """
    installed = wheel_version("carla")
    if installed is None and find_spec("carla") is None:
        raise BackendMissingError("CARLA's client is not installed", fix=_INSTALL)
    if installed != CARLA_VERSION:
        raise BackendMissingError(
            f"CARLA's client is {installed or 'of unknown version'}, and {CARLA_VERSION} is needed", fix=_INSTALL
        )


def import_client() -> ModuleType:
    """CARLA's client library.

    Raises:
        BackendMissingError: it is missing, of another version, or cannot be loaded.
    """
    check_client()
    try:
        return import_module("carla")
    except ImportError as error:
        raise BackendMissingError(f"CARLA's client cannot be loaded: {error}", fix=_INSTALL) from error


def start_command(port: int) -> str:
    """What starts a server there."""
    return (
        f"start one: CarlaUE4.sh -carla-rpc-port={port} -RenderOffScreen -quality-level=Low; "
        f"without CARLA its stand-in: opencda-marl carla-standin --rpc-port {port}"
    )


class Session:
    """One client and its world. In synchronous mode from its making until `close`.

    Attributes:
        lost: has anything failed? Then each further question would wait for its whole time-out.
        notes: what was found when connecting, for people.
        server_version: as the server says.
        stands_in: is the server the stand-in?
        blueprints, town: of the world.

    Args:
        settings: where the server is, and time-outs.
        xodr: the OpenDRIVE text of the world.
        step_length: [s]

    Raises:
        BackendMissingError: see `import_client`.
        SimulatorError: no server, another version, somebody else's.
        DeadlineError: it does not answer in time.
        ConfigError: it has no such blueprint.
    """

    def __init__(self, settings: CarlaSettings, xodr: str, step_length: float) -> None:
        self.carla = import_client()
        self._settings, self._xodr, self._dt = settings, xodr, step_length
        self._where = f"{settings.host}:{settings.port}"
        self._world: Any = None
        self._rendered = True
        self.lost = False
        self._ours = False  # is the server set up for us?
        self.notes: list[str] = []
        self._claim = _claim(self._where)
        try:
            self.server_version = self._find()
            self._connect()
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- beginning

    def _find(self) -> str:
        """The server's version."""
        settings = self._settings
        answer = look(settings.port, host=settings.host, timeout=settings.connect_timeout)
        if answer.kind == "closed":
            _resolve(settings.host)
            raise SimulatorError(f"there is no server on {self._where}", fix=start_command(settings.port))
        if answer.kind == "silent":
            raise DeadlineError(
                f"somebody listens on {self._where}, and did not answer within {settings.connect_timeout:g} s",
                fix="a server that loads needs longer (carla.connect_timeout); one that hangs must be started again; "
                "and carla.port may be that of another service",
            )
        if answer.version is None:
            raise SimulatorError(
                f"what answers on {self._where} is not a CARLA server",
                fix=f"carla.port is to be its RPC port, not the one for streaming; or {start_command(settings.port)}",
            )
        if answer.version != CARLA_VERSION:
            raise SimulatorError(
                f"the server on {self._where} is CARLA {answer.version}, and CARLA {CARLA_VERSION} is needed",
                fix=f"install CARLA {CARLA_VERSION} and start that one",
            )
        return answer.version

    def _connect(self) -> None:
        settings = self._settings
        with self._speaking("connecting", settings.load_timeout):
            self._client = self.carla.Client(settings.host, settings.port, _THREADS)
            self._client.set_timeout(settings.load_timeout)
            self._world = self._client.get_world()
            found = self._world.get_settings()
            self._rendered = not found.no_rendering_mode
            if found.synchronous_mode:
                self._take_over()
            self.blueprints = self._world.get_blueprint_library()
        self.stands_in = len(self.blueprints.filter(STAND_IN)) > 0
        known = [blueprint.id for blueprint in self.blueprints.filter("vehicle.*")]
        if settings.blueprint not in known:
            raise ConfigError(
                f"carla.blueprint: the server has no {settings.blueprint!r}", fix=f"one of {', '.join(sorted(known))}"
            )
        self.load(again=False)

    def _take_over(self) -> None:
        """In synchronous mode somebody ticks the server, or somebody who did was killed."""
        if all(self._moves() for _ in range(2)):  # one tick may be left in the queue of a client that was killed
            raise SimulatorError(
                f"the server on {self._where} is in synchronous mode, and another client ticks it",
                fix="stop that client, or give this run a server of its own (carla.port)",
            )
        self.notes.append("the server was in synchronous mode and nobody ticked it: taken over from a run that died")

    def _moves(self) -> bool:
        before = self._world.get_snapshot().frame
        time.sleep(_ALONE_SECONDS)
        return bool(self._world.get_snapshot().frame != before)

    def load(self, *, again: bool = True) -> None:
        """Load the world, whatever was there goes; and set it up.

        Args:
            again: even if the server has these roads already; else only our own actors are removed from them.
        """
        settings = self._settings
        with self._speaking("loading the world", settings.load_timeout):
            self._ours = True
            self._client.set_timeout(settings.load_timeout)
            if again or self._world.get_map().to_opendrive() != self._xodr:
                flat = self.carla.OpendriveGenerationParameters(wall_height=0.0, enable_pedestrian_navigation=False)
                self._world = self._client.generate_opendrive_world(self._xodr, flat, True)
            wanted = self._world.get_settings()
            wanted.synchronous_mode, wanted.fixed_delta_seconds = True, self._dt
            wanted.no_rendering_mode = not settings.rendering
            wanted.substepping, wanted.max_substep_delta_time = True, 0.01
            wanted.max_substeps = max(10, math.ceil(self._dt / 0.01))
            self._world.apply_settings(wanted)
            self.town = self._world.get_map()
            self._client.set_timeout(settings.tick_timeout)
            self._sweep()

    def _sweep(self) -> None:
        """Remove actors of ours that a killed process left."""
        ours = [actor for actor in self._world.get_actors() if actor.attributes.get("role_name", "").startswith(ROLE)]
        if ours:
            self.notes.append(f"{len(ours)} actors that an earlier run left were removed")
            self.batch([self.carla.command.DestroyActor(actor.id) for actor in ours])
            self._world.tick()

    # ---------------------------------------------------------------- speaking

    @contextmanager
    def _speaking(self, doing: str, seconds: float | None = None) -> Iterator[None]:
        """Whatever CARLA's client raises, as one of our errors; after it this client is lost."""
        try:
            yield
        except RuntimeError as error:
            self.lost = True
            if "time-out" in str(error):
                limit = self._settings.tick_timeout if seconds is None else seconds
                raise DeadlineError(
                    f"the CARLA server on {self._where} did not answer within {limit:g} s while {doing}", fix=_AGAIN
                ) from error
            raise SimulatorError(f"CARLA failed while {doing}: {error}", fix=_AGAIN) from error

    def batch(self, commands: list[Any]) -> list[Any]:
        """Have commands carried out before the next tick; one answer each, with `actor_id` and `error`."""
        with self._speaking("sending commands"):
            found: list[Any] = self._client.apply_batch_sync(commands, False)
        return found

    def tick(self) -> Any:
        """Advance one step; returns its snapshot."""
        # never apply_batch_sync(…, True): it ticks with Python's lock held, and a sensor's callback blocks it for ever
        with self._speaking("ticking"):
            self._world.tick()
            return self._world.get_snapshot()

    def ask(self, doing: str, question: Any) -> Any:
        """Call `question(world)`, for what is asked once."""
        with self._speaking(doing):
            return question(self._world)

    # ---------------------------------------------------------------- end

    def close(self) -> None:
        """Leave the server in asynchronous mode, without our actors; may be called twice."""
        world, self._world = self._world, None
        if world is not None and self._ours and not self.lost:
            with suppress(RuntimeError):  # it died meanwhile
                self._client.set_timeout(_CLOSE_SECONDS)
                found = world.get_settings()
                found.synchronous_mode, found.fixed_delta_seconds = False, None
                found.no_rendering_mode = not self._rendered
                world.apply_settings(found)
        self._client = None
        self._claim.close()


def _resolve(host: str) -> None:
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise SimulatorError(
            f"carla.host: {host!r} has no IPv4 address", fix="a name that this machine resolves, or 127.0.0.1"
        ) from error


def _claim(where: str) -> socket.socket:
    """Nobody of ours beside us; the system gives it back however we end.

    Raises:
        SimulatorError: another run has that server.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0opencda-marl/carla-client/{where}")  # no file: it cannot be left behind
    except OSError as error:
        held.close()
        raise SimulatorError(
            f"the server on {where} is used by another run on this machine",
            fix="give this run a server of its own (carla.port): a server has one clock",
        ) from error
    return held
