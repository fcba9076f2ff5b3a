"""The process behind the stand-in's wrapper. Standard library only: it is started as a file, and at once.

Like the real server it takes `-carla-rpc-port=P` (and the streaming and secondary ports P + 1 and P + 2, which
`-carla-streaming-port=` and `-carla-secondary-port=` override), dies when one is taken, and dies at once under
SDL_VIDEODRIVER. Requests are msgpack-rpc, `[0, id, method, [[asynchronous]]]`; `version` is answered, any other method
as rpclib answers one that it does not know, and a request with more arguments ends the connection.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import sys
import time

__all__ = ["FAULTS", "VERSION", "main"]

VERSION = "0.9.16"
FAULTS = {
    "die": "exits with a segmentation fault's code, after so many seconds",
    "hang": "accepts connections and never answers",
    "late": "listens only after so many seconds",
    "leak": "takes so many MiB more each second",
    "squat": "holds the port without listening",
    "http": "answers as a web server",
    "version": "calls itself another version",
    "deaf": "ignores SIGTERM",
    "detach": "leaves the group of its wrapper",
}

_REQUEST = re.compile(rb"\x94\x00([\x00-\x7f]|\xcc.|\xcd..|\xce....)([\xa0-\xbf])", re.S)
_NO_ARGUMENTS = (b"\x91\x91\xc2", b"\x91\x91\xc3")


def main(arguments: list[str]) -> int:
    """Serve until killed. Returns: the exit code of a server that cannot serve."""
    faults = _faults(_option(arguments, "--faults"))
    _say("Disabling core dumps.")
    if "SDL_VIDEODRIVER" in os.environ:
        return 1  # as the real one, without a word
    if "deaf" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "detach" in faults:
        os.setsid()
    if "late" in faults:
        time.sleep(float(faults["late"]))
    try:
        listening = _listen(arguments, silent="squat" in faults)
    except OSError as error:
        _say(f"LowLevelFatalError: Exception thrown: bind: {os.strerror(error.errno or 0)}")
        return 139
    _Server(listening, faults).run()
    return 139


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _option(arguments: list[str], name: str, default: str = "") -> str:
    """`-name=VALUE` or `--name VALUE`."""
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
        if argument == name and name.startswith("--"):
            return arguments[index + 1]
    return default


def _faults(listed: str) -> dict[str, str]:
    """The faults of this start; they are struck from the list."""
    if not listed or not os.path.exists(listed):
        return {}
    with open(listed, encoding="utf-8") as file:
        lines = file.read().splitlines()
    now = lines[0] if lines else ""
    if not now.startswith("always "):
        with open(listed, "w", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines[1:]))
    pairs = [word.strip().partition(":") for word in now.removeprefix("always ").split(",") if word.strip()]
    unknown = [name for name, _, _ in pairs if name not in FAULTS]
    if unknown:
        raise ValueError(f"no such fault: {', '.join(unknown)}; known: {', '.join(FAULTS)}")
    return {name: value for name, _, value in pairs}


def _listen(arguments: list[str], *, silent: bool) -> list[socket.socket]:
    """The three ports, the first one for requests."""
    port = int(_option(arguments, "-carla-rpc-port", "2000"))
    streaming = int(_option(arguments, "-carla-streaming-port", str(port + 1)))  # 0: a free one
    secondary = int(_option(arguments, "-carla-secondary-port", str(port + 2)))
    found = []
    for number in (port, streaming, secondary):
        found.append(socket.socket())
        found[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(not silent))
        found[-1].bind(("", number))
        if not silent:
            found[-1].listen(64)
        found[-1].setblocking(False)
    return found


class _Server:
    """One thread, all connections."""

    def __init__(self, listening: list[socket.socket], faults: dict[str, str]) -> None:
        self._listening = listening
        self._faults = faults
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}
        self._leaked: list[bytearray] = []

    def run(self) -> None:
        """Until it is time to die."""
        if "squat" not in self._faults:
            self._selector.register(self._listening[0], selectors.EVENT_READ)
        begun = time.monotonic()
        end = begun + float(self._faults.get("die", "inf"))
        while (now := time.monotonic()) < end:
            for key, _ in self._selector.select(min(0.2 if "leak" in self._faults else 60.0, end - now)):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if found is self._listening[0]:
                    self._accept()
                else:
                    self._hear(found)
            self._leak(time.monotonic() - begun)

    def _accept(self) -> None:
        connection, _ = self._listening[0].accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        try:
            piece = connection.recv(1 << 16)
            if not piece:
                self._close(connection)
            elif "http" in self._faults:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                self._close(connection)
            elif "hang" not in self._faults:
                self._received[connection] += piece
                self._answer(connection)
        except OSError:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._received[connection]
        connection.close()

    def _answer(self, connection: socket.socket) -> None:
        """Answer the whole requests that have come."""
        while found := _REQUEST.match(self._received[connection]):
            name_end = found.end() + (found[2][0] & 0x1F)
            name, arguments = self._received[connection][found.end() : name_end], name_end + 3
            if len(self._received[connection]) < arguments:
                return
            if self._received[connection][name_end:arguments] not in _NO_ARGUMENTS:
                self._close(connection)
                return
            self._received[connection] = self._received[connection][arguments:]
            connection.sendall(b"\x94\x01" + found[1] + self._result(name))

    def _result(self, name: bytes) -> bytes:
        if name == b"version":
            version = self._faults.get("version", VERSION).encode()
            return b"\xc0\x91\x92\x01" + bytes([0xA0 | len(version)]) + version
        text = b"rpclib: server could not find function '%s' with argument count 1." % name
        return b"\xd9" + bytes([len(text)]) + text + b"\xc0"

    def _leak(self, seconds: float) -> None:
        wanted = int(float(self._faults.get("leak", "0")) * seconds)
        while len(self._leaked) < wanted:
            self._leaked.append(bytearray(b"x" * (1 << 20)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
