"""Scalars for TensorBoard, written without it: its import takes a second, and its writer is a thread in the loop.

The format is a public one: TFRecord frames (length, masked CRC-32C of the length, data, masked CRC-32C of the
data) around `Event` messages of protocol buffers (tensorflow/core/util/event.proto). The test reads the files
back with TensorBoard itself.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from opencda_marl.core.files import writing

__all__ = ["ScalarWriter"]


def _crc_table() -> tuple[int, ...]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class ScalarWriter:
    """Appends scalars to one event file of a folder.

    Args:
        folder: TensorBoard's log directory; made when missing.
        start: points at this step and later that older files hold are void (a resumed run writes them again).

    Raises:
        StorageError: the file cannot be made.
    """

    def __init__(self, folder: Path, *, start: int = 0) -> None:
        self._path = (
            folder / f"events.out.tfevents.{time.time_ns() // 1_000_000_000}.{time.time_ns() % 10**9}.{os.getpid()}"
        )
        with writing(self._path):
            folder.mkdir(exist_ok=True)
            self._file = self._path.open("xb", buffering=0)
        self._event(0, _field(3, b"brain.Event:2"))
        if start:
            self._event(start, _field(7, b"\x08\x01"))  # SessionLog with status START

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one point to each named curve.

        Raises:
            StorageError: the disk refused.
        """
        values = b"".join(
            _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars.items()
        )
        self._event(step, _field(5, values))

    def close(self) -> None:
        """End the file; may be called twice."""
        self._file.close()

    def _event(self, step: int, body: bytes) -> None:
        data = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + body
        length = struct.pack("<Q", len(data))
        with writing(self._path):
            self._file.write(length + _masked_crc(length) + data + _masked_crc(data))
