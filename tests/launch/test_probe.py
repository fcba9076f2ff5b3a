"""What is on a port is found out with bytes, whatever it answers; the bytes are those of the protocol's description."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opencda_marl.core.probe import Answer, Probe, look, version
from opencda_marl.launch.ports import holder, is_free, listeners, taken
from tests.launch.real import free_ports

_OK = b"\x94\x01\x01\xc0\x91\x92\x01\xa60.9.16"
_LONG = b"0.9.16-1234-g0123456789ab-dirty-local"  # 37 bytes: no short string


class Speaker:
    """Accepts one connection after another, reads, answers with given pieces, closes or waits."""

    def __init__(self, pieces: list[bytes], *, close: bool) -> None:
        self.port = free_ports(1)
        self.heard = b""
        self._pieces, self._close = pieces, close
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            self.heard = connection.recv(100)
            for piece in self._pieces:
                connection.sendall(piece)
                time.sleep(0.05)
            if not self._close:
                connection.recv(1)  # until the other side goes

    def end(self) -> None:
        self._thread.join(30.0)
        self._socket.close()


@pytest.fixture
def port() -> Iterator[int]:
    yield free_ports(1)


@pytest.mark.parametrize(
    ("pieces", "close", "answer"),
    [
        ([_OK], False, Answer("carla", "0.9.16")),
        ([_OK[:3], _OK[3:7], _OK[7:9], _OK[9:]], False, Answer("carla", "0.9.16")),
        ([_OK[:7] + b"\xd9", b"\x25" + _LONG], False, Answer("carla", _LONG.decode())),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], True, Answer("other")),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], False, Answer("other")),
        ([b"\x94\x01\x01\xc0\x91\x92\x00\x91\xa5error"], False, Answer("other")),
        ([b"\x94\x01\x01\xc0\x91\x92\x01\xa2\xff\xfe"], False, Answer("other")),
        ([_OK[:9]], True, Answer("other")),
        ([], True, Answer("other")),
        ([], False, Answer("silent")),
        ([_OK[:9]], False, Answer("silent")),
    ],
)
def test_whatever_answers(pieces: list[bytes], close: bool, answer: Answer) -> None:
    speaker = Speaker(pieces, close=close)
    found = look(speaker.port, timeout=0.7)
    speaker.end()
    assert found == answer
    assert speaker.heard == bytes.fromhex("94 00 01 a7") + b"version" + bytes.fromhex("91 91 c2")


def test_nobody_there(port: int) -> None:
    before = time.monotonic()
    assert look(port) == Answer("closed")
    assert version("127.0.0.1", port) is None
    assert time.monotonic() - before < 1.0


def test_a_look_does_not_wait() -> None:
    speaker = Speaker([], close=False)
    probe = Probe(speaker.port, timeout=0.5)
    before = time.monotonic()
    assert probe.poll() is None
    assert time.monotonic() - before < 0.2
    while probe.poll(0.1) is None:
        continue
    assert probe.poll() == Answer("silent")
    speaker.end()


def test_ports_are_tried_out(port: int) -> None:
    first = free_ports(3)
    assert taken(first) == []
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 2))  # held, without listening
        assert taken(first) == [first + 2]
        assert listeners(first + 2) == set()
        other.listen(1)
        assert not is_free(first + 2)
        assert listeners(first + 2) == {os.getpid()}
        assert listeners(first + 2, among=[1]) == set()
        assert f"process {os.getpid()}" in holder(first + 2)
    assert is_free(first + 2)


def test_a_port_whose_connections_fade_is_free(tmp_path: Path) -> None:
    """TIME_WAIT on our side is no hindrance for a server."""
    first = free_ports(1)
    with socket.create_server(("127.0.0.1", first)) as server:
        client = socket.create_connection(("127.0.0.1", first))
        connection, _ = server.accept()
        connection.close()
        client.recv(1)
        client.close()
    assert is_free(first)
