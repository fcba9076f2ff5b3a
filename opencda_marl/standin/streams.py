"""The streaming port: one connection for each stream that a client follows.

The client connects, writes the stream's id (4 bytes), and from then on only listens. One that asks for a stream that
is not there is disconnected, and comes back at once, without end: such connections are counted.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from typing import cast

from opencda_marl.standin.wire import WORLD_STREAM, framed
from opencda_marl.standin.world import Frame

__all__ = ["Streams"]

_ID = struct.Struct("<I")
_TOO_MUCH = 16 << 20  # [bytes] waiting for a subscriber that does not read: it misses frames, the server's memory stays


class Streams:
    """Who follows which stream.

    Args:
        counters: `stream_connections` (all), `unknown_stream_connections` (of them, those refused) and
            `frames_skipped` (not sent to a subscriber that does not read) are counted in it.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._followers: dict[int, set[asyncio.Transport]] = {WORLD_STREAM: set()}
        self._latest = b""

    def connection(self) -> asyncio.Protocol:
        """One more connection, for `loop.create_server`."""
        return _Connection(self, self._counters)

    def open(self, stream: int) -> None:
        """From now on it can be followed."""
        self._followers[stream] = set()

    def close(self, stream: int) -> None:
        """Its sensor is gone: whoever follows it is disconnected."""
        for transport in self._followers.pop(stream, set()):
            transport.close()

    def known(self, stream: int) -> bool:
        """Can it be followed?"""
        return stream in self._followers

    def open_connections(self) -> dict[int, int]:
        """How many follow each stream."""
        return {stream: len(followers) for stream, followers in self._followers.items()}

    def publish(self, frame: Frame) -> None:
        """Send what a tick has made. The world's frame is kept for whoever comes before the next."""
        for stream, payload in frame.payloads:
            message = framed(payload)
            if stream == WORLD_STREAM:
                self._latest = message
            self.send(stream, message)

    def send(self, stream: int, message: bytes) -> None:
        """Bytes as they are, to all who follow a stream."""
        for transport in self._followers.get(stream, ()):
            if transport.get_write_buffer_size() > _TOO_MUCH:
                self._counters["frames_skipped"] += 1
            else:
                transport.write(message)

    def drop(self) -> None:
        """Close all connections; the streams stay."""
        for followers in self._followers.values():
            for transport in followers:
                transport.abort()

    def follow(self, stream: int, transport: asyncio.Transport) -> bool:
        """One more for a stream; False: there is no such stream."""
        if stream not in self._followers:
            self._counters["unknown_stream_connections"] += 1
            return False
        self._followers[stream].add(transport)
        if stream == WORLD_STREAM and self._latest:
            transport.write(self._latest)
        return True

    def leave(self, stream: int, transport: asyncio.Transport) -> None:
        """It has gone."""
        self._followers.get(stream, set()).discard(transport)


class _Connection(asyncio.Protocol):
    """One socket on the streaming port."""

    def __init__(self, streams: Streams, counters: Counter[str]) -> None:
        self._streams, self._counters = streams, counters
        self._received = b""
        self._stream: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._counters["stream_connections"] += 1

    def data_received(self, data: bytes) -> None:
        if self._stream is not None:
            return  # clients have nothing more to say
        self._received += data
        if len(self._received) >= _ID.size:
            self._stream = int(_ID.unpack_from(self._received)[0])
            if not self._streams.follow(self._stream, self._transport):
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._stream is not None:
            self._streams.leave(self._stream, self._transport)
