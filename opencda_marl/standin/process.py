"""The process: command line, ports, start-up line. NumPy and msgpack are loaded after the first faults are done.

As CARLA's server it takes `-carla-rpc-port=P` (and the streaming and secondary ports P + 1 and P + 2, which
`-carla-streaming-port=` and `-carla-secondary-port=` override), dies when one is taken, and, called as CarlaUE4, dies
at once under SDL_VIDEODRIVER. What else the real one takes is ignored.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from opencda_marl.core.errors import BackendMissingError, ConfigError, OpenCDAError
from opencda_marl.settings.traffic import CARLA_VERSION
from opencda_marl.standin.faults import Faults, next_of, parse

__all__ = ["CRASHED", "HOST", "SAYS", "Options", "main", "serve"]

HOST = "127.0.0.1"
CRASHED = 139  # exit code of a segmentation fault
SAYS = "stand-in of opencda-marl: a test double, not CARLA"
"""Beginning of the start-up line, and the answer of the method `standin`, which no CARLA has."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a server is to be.

    Attributes:
        rpc_port: 0: a free one.
        streaming_port: None: the RPC port + 1; 0: a free one.
        secondary_port: None: the RPC port + 2, which the real server holds too; 0: none.
        faults: words; see `faults.FAULTS`.
        version: that it says it has.
        frame_delay: [s] between the answer to a tick and its frame.
        rate: [1/s] frames of asynchronous mode.
        xodr: file of the first world; None: the one that is built in.
        with_stdin: ends when its standard input does.
    """

    rpc_port: int = 2000
    streaming_port: int | None = None
    secondary_port: int | None = None
    faults: tuple[str, ...] = ()
    version: str = CARLA_VERSION
    frame_delay: float = 0.0
    rate: float = 60.0
    xodr: Path | None = None
    with_stdin: bool = False


def serve(options: Options) -> int:
    """Serve until killed.

    Returns:
        The exit code of a server that cannot serve; 0: it was asked to end.

    Raises:
        ConfigError: no such fault, or no readable map.
        BackendMissingError: msgpack is not installed.
    """
    faults = parse(options.faults)
    _say("Disabling core dumps.")
    if "deaf" in faults.alone:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "detach" in faults.alone:
        os.setsid()
    time.sleep(faults.number("late", 0.0))
    silent = "squat" in faults.alone
    try:
        sockets = _listen(options, silent=silent)
    except OSError as error:
        _say(f"LowLevelFatalError: Exception thrown: bind: {os.strerror(error.errno or 0)}")
        return CRASHED
    if silent:
        _introduce(options, faults, sockets)
        while True:
            signal.pause()
    return _run(options, faults, sockets)


def _listen(options: Options, *, silent: bool) -> list[socket.socket]:
    """RPC, streaming, and the secondary port, which is only held."""
    with ExitStack() as undo:  # what was bound is let go of when the next one cannot be had
        found = [_bound(options.rpc_port, undo, silent=silent)]
        port = int(found[0].getsockname()[1])
        streaming = port + 1 if options.streaming_port is None else options.streaming_port
        found.append(_bound(streaming, undo, silent=silent))
        if options.secondary_port != 0 and (options.rpc_port or options.secondary_port is not None):
            second = port + 2 if options.secondary_port is None else options.secondary_port
            found.append(_bound(second, undo, silent=silent, listening=False))
        undo.pop_all()
        return found


def _bound(port: int, undo: ExitStack, *, silent: bool, listening: bool = True) -> socket.socket:
    found = undo.enter_context(socket.socket())
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(not silent))
    found.bind((HOST, port))
    if listening and not silent:
        found.listen()  # two sockets may share a port until one of them does
    found.setblocking(False)
    return found


def _run(options: Options, faults: Faults, sockets: list[socket.socket]) -> int:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the client needs the other core
    if find_spec("msgpack") is None:
        raise BackendMissingError("the stand-in needs msgpack", fix="pip install 'opencda-marl[carla]'")
    import asyncio

    from opencda_marl.standin.roads import NotARoadError
    from opencda_marl.standin.server import Server

    xodr = None
    try:
        xodr = None if options.xodr is None else options.xodr.read_text(encoding="utf-8")
        server = Server(
            streaming_port=int(sockets[1].getsockname()[1]),
            version=faults.alone.get("version", options.version),
            faults=faults,
            frame_delay=options.frame_delay,
            rate=options.rate,
            first_stream=2 + int.from_bytes(os.urandom(3), "little"),
            xodr=xodr,
        )
    except (OSError, NotARoadError) as error:
        raise ConfigError(f"{options.xodr} is no map: {error}", fix="name an OpenDRIVE file") from error

    async def go() -> None:
        loop = asyncio.get_running_loop()
        if faults.number("die", 1.0) == 0.0:
            sys.exit(CRASHED)  # before anybody can connect
        for held in sockets[2:]:
            held.listen(1)
        await loop.create_server(server.requests.connection, sock=sockets[0])
        await loop.create_server(server.streams.connection, sock=sockets[1])
        _introduce(options, faults, sockets)
        if options.with_stdin:
            loop.add_reader(sys.stdin.fileno(), _end_with_stdin)
        await server.run()

    asyncio.run(go())
    return 0


def _introduce(options: Options, faults: Faults, sockets: list[socket.socket]) -> None:
    ports = " ".join(str(one.getsockname()[1]) for one in sockets)
    _say(f"{SAYS}; version {faults.alone.get('version', options.version)}, on {HOST}, ports {ports}")


def _end_with_stdin() -> None:
    if not os.read(sys.stdin.fileno(), 1 << 16):
        os._exit(0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """A server with CARLA's command line, and with `--NAME=VALUE` for the fields of Options.

    `--faults=FILE` has a line of faults for each start. What is not known is ignored, as the real one does.

    Returns:
        As `serve`; the code of an error, which is told.
    """
    try:
        return _main(arguments)
    except OpenCDAError as error:
        _say(str(error))
        return error.exit_code


def _main(arguments: Sequence[str]) -> int:
    if "CarlaUE4" in arguments and "SDL_VIDEODRIVER" in os.environ:
        _say("Disabling core dumps.")
        return 1  # as the real one, without a word more
    pairs = [argument.lstrip("-").partition("=") for argument in arguments if argument.startswith("-")]
    given = {name.removeprefix("carla-"): value for name, _, value in pairs}
    words = [value for name, _, value in pairs if name == "fault"]
    default = Options()
    return serve(
        Options(
            rpc_port=int(given.get("rpc-port", default.rpc_port)),
            streaming_port=int(given["streaming-port"]) if "streaming-port" in given else None,
            secondary_port=int(given["secondary-port"]) if "secondary-port" in given else None,
            faults=(*words, *(next_of(given["faults"]) if "faults" in given else ())),
            version=given.get("version", default.version),
            frame_delay=float(given.get("frame-delay", 1e3 * default.frame_delay)) / 1e3,
            rate=float(given.get("rate", default.rate)),
            xodr=Path(given["xodr"]) if "xodr" in given else None,
            with_stdin="with-stdin" in given,
        )
    )
