"""What CARLA's TrafficManager, which runs inside the client, asks of a server."""

from __future__ import annotations

from opencda_marl.standin.rpc import value, void
from opencda_marl.standin.world import World

__all__ = ["TrafficManagerCalls"]


class TrafficManagerCalls:
    """The calls of that kind; names and arguments are those of the protocol."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._running: dict[int, tuple[str, int]] = {}  # port -> where

    @value
    def is_traffic_manager_running(self, port: int) -> bool:
        """Is one registered for a port?"""
        return port in self._running

    @value
    def add_traffic_manager_running(self, where: list[object]) -> bool:
        """Register one, [host, port]; False: the port has one."""
        host, port = str(where[0]), int(str(where[1]))
        if port in self._running:
            return False
        self._running[port] = (host, port)
        return True

    @value
    def get_traffic_manager_running(self, port: int) -> list[object]:
        """Where the one of a port is; nowhere: ["", 0]."""
        return list(self._running.get(port, ("", 0)))

    @value
    def destroy_traffic_manager(self, port: int) -> bool:
        """Forget it."""
        return self._running.pop(port, None) is not None

    @value
    def get_vehicle_light_states(self) -> list[list[int]]:
        """[actor, bits] of each vehicle."""
        lights = self._world.episode.lights
        return [[number, lights.get(number, 0)] for number in self._world.episode.vehicles.rows["id"].tolist()]

    @void
    def set_vehicle_light_state(self, number: int, state: list[int]) -> None:
        """Bits of a vehicle."""
        self._world.vehicle(number)
        self._world.episode.lights[number] = int(state[0])

    @value
    def get_vehicle_light_state(self, number: int) -> list[int]:
        """Bits of a vehicle."""
        self._world.vehicle(number)
        return [self._world.episode.lights.get(number, 0)]

    @void
    def set_actor_autopilot(self, number: int, wanted: bool) -> None:
        """Noted by the real server; it is the client's TrafficManager that drives."""
        del wanted
        self._world.vehicle(number)
