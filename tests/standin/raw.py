"""The bare protocol, written a second time, from its description alone, to hold what the stand-in sends against."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from opencda_marl.standin import StandIn

ROOT = Path(__file__).parents[2]
CROSSING = ROOT / "opencda_marl" / "scenarios" / "intersection" / "intersection.xodr"
TESLA = [0, "vehicle.tesla.model3", [["role_name", 4, "one"]]]
COLLISION = [0, "sensor.other.collision", []]


class Raw:
    """One connection to an RPC port."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30.0)
        self._unpacker = msgpack.Unpacker(raw=False)
        self._id = 0

    def send(self, method: str, *arguments: Any, asynchronous: bool = False) -> int:
        """Ask; do not wait. Returns: the request's number."""
        self._id += 1
        self.socket.sendall(msgpack.packb([0, self._id, method, [[asynchronous], *arguments]]))
        return self._id

    def receive(self) -> list[Any] | None:
        """The next answer; None: the connection was closed."""
        for message in self._unpacker:
            return list(message)
        while piece := self.socket.recv(1 << 16):
            self._unpacker.feed(piece)
            for message in self._unpacker:
                return list(message)
        return None

    def ask(self, method: str, *arguments: Any) -> Any:
        """The bare result of a call that works."""
        number = self.send(method, *arguments)
        answer = self.receive()
        assert answer is not None
        assert answer[:3] == [1, number, None]
        return answer[3]

    def value(self, method: str, *arguments: Any) -> Any:
        """Of a Response<T>."""
        ((good, value),) = self.ask(method, *arguments)
        assert good == 1, value
        return value

    def done(self, method: str, *arguments: Any) -> None:
        """Of a Response<void>."""
        assert self.ask(method, *arguments) == [[False]]

    def refused(self, method: str, *arguments: Any) -> str:
        """The text of an error, whichever the Response."""
        ((kind, (text,)),) = self.ask(method, *arguments)
        assert kind in (0, True)
        return str(text)

    def synchronous(self, seconds: float = 0.05) -> None:
        """Ticks of this length from now on."""
        settings = self.value("get_episode_settings")
        settings[0], settings[2] = True, [True, seconds]
        self.value("set_episode_settings", settings)

    def spawn(self, x: float, y: float = 0.0, yaw: float = 0.0, z: float = 0.5) -> int:
        """A car. Returns: its number."""
        return int(self.value("spawn_actor", TESLA, [[x, y, z], [0.0, yaw, 0.0]])[0])

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()


class Running(StandIn):
    """A stand-in that can be asked for its counters."""

    def counters(self) -> dict[str, Any]:
        with Raw(self.port) as client:
            return dict(client.value("standin_counters"))


class Stream:
    """One connection to a streaming port."""

    def __init__(self, token: bytes) -> None:
        stream, port, protocol, address = struct.unpack("<IHBB", token[:8])
        assert (len(token), protocol, address) == (24, 1, 0)
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30.0)
        self.socket.sendall(struct.pack("<I", stream))

    def receive(self) -> bytes | None:
        """The next message; None: the connection was closed."""
        size = self._exactly(4)
        return None if size is None else self._exactly(*struct.unpack("<I", size))

    def _exactly(self, count: int) -> bytes | None:
        found = b""
        while len(found) < count:
            piece = self.socket.recv(count - len(found))
            if not piece:
                return None
            found += piece
        return found

    def world(self) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """The next frame of the world's stream: its head, and the actors by number."""
        payload = self.receive()
        assert payload is not None
        return read_world(payload)

    def until(self, frame: int) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
        """That frame, or the first one after it."""
        while True:
            head, actors = self.world()
            if head["frame"] >= frame:
                return head, actors

    def close(self) -> None:
        self.socket.close()


def read_world(payload: bytes) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A world frame, by the offsets of the protocol."""
    kind, frame, seconds = struct.unpack_from("<QQd", payload, 0)
    episode, platform, delta = struct.unpack_from("<Qdf", payload, 48)
    (flags,) = struct.unpack_from("<I", payload, 80)
    head = {"kind": kind, "frame": frame, "seconds": seconds, "episode": episode, "delta": delta, "flags": flags}
    head["platform"] = platform
    assert (len(payload) - 84) % 119 == 0
    actors = {}
    for at in range(84, len(payload), 119):
        number, state = struct.unpack_from("<IB", payload, at)
        actors[number] = {
            "state": state,
            "pose": struct.unpack_from("<6f", payload, at + 5),
            "velocity": struct.unpack_from("<3f", payload, at + 29),
            "angular_velocity": struct.unpack_from("<3f", payload, at + 41),
            "acceleration": struct.unpack_from("<3f", payload, at + 53),
            "control": struct.unpack_from("<3f3Bi", payload, at + 65),
        }
    return head, actors


def world_stream(client: Raw) -> Stream:
    """The world's, as a client finds it."""
    _, (token,) = client.value("get_episode_info")
    assert client.value("get_sensor_token", 1) == [token]
    return Stream(token)


def child(name: str, *arguments: Any, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """A function of tests/standin/driven.py in a process of its own: CARLA's client may abort it."""
    argv = [sys.executable, "-m", "tests.standin.driven", name, *map(str, arguments)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def eventually(condition: Any, what: str, patience: float = 30.0) -> None:
    """Wait for it; fail when it does not come."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
