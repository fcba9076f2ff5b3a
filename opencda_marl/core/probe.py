"""Is there a CARLA server on a port? Asked with a raw request.

CARLA's client must not do it: at a port that answers anything else it aborts the whole process.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass
from typing import Literal

__all__ = ["HOST", "TIMEOUT", "Answer", "Probe", "look", "version"]

HOST = "127.0.0.1"
TIMEOUT = 2.0  # [s] for an answer

_REQUEST = b"\x94\x00\x01\xa7version\x91\x91\xc2"  # [0, 1, "version", [[false]]]
_HEAD = b"\x94\x01\x01\xc0\x91\x92\x01"  # [1, 1, nil, [[1, …]]], then a string
_STRING_8 = 0xD9  # a length byte follows; a shorter string has it in its first byte


@dataclass(frozen=True, slots=True)
class Answer:
    """What is on a port.

    `closed`: nobody accepts; `silent`: somebody does, and says nothing in time; `other`: something else than CARLA.
    """

    kind: Literal["closed", "silent", "other", "carla"]
    version: str | None = None


class Probe:
    """One look, without waiting.

    Args:
        port: the RPC port.
        host: where.
        timeout: [s] until a port counts as silent.
    """

    def __init__(self, port: int, *, host: str = HOST, timeout: float = TIMEOUT) -> None:
        self._deadline = time.monotonic() + timeout
        self._received = b""
        self._connected = False
        self._answer: Answer | None = None
        self._socket = socket.socket()
        self._socket.setblocking(False)
        try:
            self._socket.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            self._settle(Answer("closed"))

    def poll(self, wait: float = 0.0) -> Answer | None:
        """The answer; None: not yet.

        Args:
            wait: [s] for news, at most.
        """
        if self._answer is not None:
            return self._answer
        poll = select.poll()
        poll.register(self._socket, select.POLLIN if self._connected else select.POLLOUT)
        if poll.poll(1000 * wait):
            try:
                self._go_on()
            except OSError:
                self._settle(Answer("other" if self._connected else "closed"))
        if self._answer is None and time.monotonic() >= self._deadline:
            self._settle(Answer("silent" if self._connected else "closed"))
        return self._answer

    def close(self) -> None:
        """Give up; may be called twice."""
        self._socket.close()

    def _go_on(self) -> None:
        if not self._connected:
            refused = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if refused != 0:
                self._settle(Answer("closed"))
                return
            self._connected = True
            self._socket.send(_REQUEST)
            return
        piece = self._socket.recv(512)
        self._received += piece
        found = _read(self._received)
        if found is not None:
            self._settle(found)
        elif not piece:
            self._settle(Answer("other"))

    def _settle(self, answer: Answer) -> None:
        self._answer = answer
        self.close()


def _read(received: bytes) -> Answer | None:
    """What the bytes say; None: there must be more to come."""
    if not received.startswith(_HEAD[: len(received)]):
        return Answer("other")
    body = received[len(_HEAD) :]
    if not body or body == bytes([_STRING_8]):
        return None
    if body[0] == _STRING_8:
        length, rest = body[1], body[2:]
    elif body[0] & 0xE0 == 0xA0:
        length, rest = body[0] & 0x1F, body[1:]
    else:
        return Answer("other")
    if len(rest) < length:
        return None
    try:
        return Answer("carla", rest[:length].decode("ascii"))
    except UnicodeDecodeError:
        return Answer("other")


def look(port: int, *, host: str = HOST, timeout: float = TIMEOUT) -> Answer:
    """What is on a port, waiting for the answer.

    Args:
        port: the RPC port.
        host: where.
        timeout: [s] at most.
    """
    probe = Probe(port, host=host, timeout=timeout)
    while (answer := probe.poll(0.1)) is None:
        continue
    return answer


def version(host: str, port: int, timeout: float = TIMEOUT) -> str | None:
    """The version of the CARLA server there; None: there is none that answers."""
    return look(port, host=host, timeout=timeout).version
