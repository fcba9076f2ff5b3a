"""Whose ports are these? Two launchers that shared a server would drive in one world."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Self

from opencda_marl.core.errors import SimulatorError

__all__ = ["Claims"]


class Claims:
    """Ports that this launcher uses, by names that the kernel keeps and frees when the process ends, however it does.

    Args:
        ports: the first of each slot.

    Raises:
        SimulatorError: another launcher of this machine uses one of them; it names the process.
    """

    def __init__(self, ports: Iterable[int]) -> None:
        self._held: list[socket.socket] = []
        for port in ports:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._held.append(held)
            try:
                held.bind(_name(port))
            except OSError as error:
                self.close()
                raise SimulatorError(
                    f"port {port} belongs to another launcher, {_owner(port)}",
                    fix="wait for it, or choose another --carla-rpc-port: slots are 10 ports apart",
                ) from error
            held.listen()

    @classmethod
    def anywhere(cls, ports: Sequence[int], apart: int) -> tuple[Self, int]:
        """These ports, or the first ones above them that no other launcher has.

        Args:
            ports: the first of each slot.
            apart: slots are.

        Returns:
            The claims, and the first port.

        Raises:
            SimulatorError: no so many are left.
        """
        step = apart * len(ports)
        while True:
            try:
                return cls(ports), ports[0]
            except SimulatorError:
                ports = [port + step for port in ports]
                if ports[-1] + 2 > 65535:
                    raise

    def close(self) -> None:
        """Give them back; may be called twice."""
        for held in self._held:
            held.close()
        self._held = []


def _name(port: int) -> str:
    return f"\0opencda-marl/carla-rpc-port/{port}"  # no file: it cannot be left behind


def _owner(port: int) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(_name(port))
            told = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "which is just ending"
        return f"process {struct.unpack('3i', told)[0]}"
