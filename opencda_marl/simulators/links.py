"""SUMO, embedded (libsumo) or as a program of its own (TraCI): the same few verbs.

Names are strings, angles and positions are SUMO's own. Nothing here knows about slots.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float64

from opencda_marl.core.errors import DeadlineError, SimulatorError
from opencda_marl.simulators.wheels import import_backend, program

__all__ = ["LibsumoLink", "Link", "Readings", "SumoOptions", "TraciLink"]

Readings = tuple[
    Float64[np.ndarray, " twice_rows"], Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]
]  # x and y of front bumpers, one after the other [m]; angles [deg]; speeds [m/s]

_PORT_TRIES = 5
_CONNECT_SECONDS = 30.0
_CLOSE_SECONDS = 2.0
_ON_ITS_ROUTE = 1  # moveToXY's keepRoute
_REMOVED_BY_US = 3  # libsumo.constants.REMOVE_VAPORIZED


@dataclass(frozen=True, slots=True)
class SumoOptions:
    """Command line of one simulation; every option that matters is explicit, none is typed by hand."""

    network: Path
    additional: Path  # vehicle types and routes
    error_log: Path  # SUMO's exceptions do not say what happened, its log does
    seed: int
    step_length: float  # [s]
    gui: bool = False

    def arguments(self) -> list[str]:
        """Without the program's name."""
        options: dict[str, str | int | float] = {
            "--net-file": str(self.network),
            "--additional-files": str(self.additional),
            "--error-log": str(self.error_log),
            "--seed": self.seed,
            "--step-length": self.step_length,
            "--step-method.ballistic": "false",
            # SUMO's defaults under-report crashes five-fold; we take crashed vehicles out ourselves
            "--collision.action": "warn",
            "--collision.check-junctions": "true",
            "--collision.mingap-factor": 0,
            "--collision.stoptime": 0,
            "--time-to-teleport": -1,
            "--max-depart-delay": -1,
            "--no-step-log": "true",
            "--no-warnings": "true",
            "--duration-log.disable": "true",
        }
        if self.gui:
            options |= {"--start": "true", "--quit-on-end": "true"}
        return [str(word) for pair in options.items() for word in pair]


class Link(Protocol):
    """What `SumoSimulator` asks of SUMO. All vehicles are named."""

    backend: str
    errors: tuple[type[Exception], ...]  # what a failing call raises

    def begin(self, options: SumoOptions) -> None:
        """Start a simulation, or replace the one that runs."""

    def option(self, name: str) -> str:
        """An option as SUMO understood it."""

    def insert(self, name: str, route: str, kind: str, lane: int, position: float, speed: float, factor: float) -> None:
        """Ask for a vehicle; SUMO places it in the next tick, or later where it finds no room."""

    def take_over(self, name: str, mode: int) -> None:
        """Set the speed mode."""

    def follow(self, name: str) -> None:
        """Called once when a vehicle is first seen."""

    def remove(self, name: str) -> None:
        """Take a vehicle off the road at once."""

    def move(self, name: str, x: float, y: float, angle: float) -> None:
        """Have a vehicle's front bumper there, turned so [deg], at the end of the coming step; it keeps its route."""

    def write(self, names: list[str], speeds: list[float]) -> None:
        """Target speeds; -1 gives control back."""

    def tick(self) -> None:
        """Advance one step."""

    def changes(self) -> tuple[int, int, int]:
        """Vehicles on the road, departed in this step, arrived in this step."""

    def names(self) -> set[str]:
        """Everybody on the road."""

    def arrived(self) -> set[str]:
        """Everybody who left in this step at the end of the route, or was taken out."""

    def collisions(self) -> list[tuple[str, str]]:
        """Pairs that touch."""

    def read(self, names: list[str]) -> Readings:
        """Front bumpers, angles and speeds of vehicles on the road."""

    def close(self) -> None:
        """End it; may be called twice."""


class LibsumoLink:
    """SUMO inside this process. One simulation per process: libsumo keeps it in globals.

    Raises:
        SimulatorError: another simulation runs in this process.
    """

    def __init__(self) -> None:
        self.backend = "libsumo"
        self._sumo = import_backend("libsumo")
        self.errors: tuple[type[Exception], ...] = (self._sumo.TraCIException, self._sumo.FatalTraCIError)
        self._open = False
        self._check_alone()
        vehicle, simulation = self._sumo.vehicle, self._sumo.simulation
        self._position, self._angle, self._speed = vehicle.getPosition, vehicle.getAngle, vehicle.getSpeed
        self._set_speed = vehicle.setSpeed
        self._count, self._departed, self._arrived = (
            vehicle.getIDCount,
            simulation.getDepartedNumber,
            simulation.getArrivedNumber,
        )
        self._collisions = simulation.getCollisions
        self.tick = self._sumo.simulationStep

    def _check_alone(self) -> None:
        # A second start would silently replace the first simulation.
        if not self._open and self._sumo.isLoaded():
            raise SimulatorError(
                "another SUMO simulation is alive in this process, and libsumo allows one",
                fix="close the other simulator first, or run this one in a child process (RemoteSimulator)",
            )

    def begin(self, options: SumoOptions) -> None:
        self._check_alone()
        try:
            if self._open:
                self._sumo.load(options.arguments())  # as exact and as fast as closing and starting
            else:
                self._sumo.start(["sumo", *options.arguments()])
        finally:
            self._open = self._sumo.isLoaded()

    def option(self, name: str) -> str:
        return str(self._sumo.simulation.getOption(name))

    def insert(self, name: str, route: str, kind: str, lane: int, position: float, speed: float, factor: float) -> None:
        _insert(self._sumo.vehicle, name, route, kind, lane, position, speed, factor)

    def take_over(self, name: str, mode: int) -> None:
        self._sumo.vehicle.setSpeedMode(name, mode)

    def follow(self, name: str) -> None:
        pass  # getters need no preparation

    def remove(self, name: str) -> None:
        self._sumo.vehicle.remove(name, _REMOVED_BY_US)

    def move(self, name: str, x: float, y: float, angle: float) -> None:
        self._sumo.vehicle.moveToXY(name, "", -1, x, y, angle, _ON_ITS_ROUTE)

    def write(self, names: list[str], speeds: list[float]) -> None:
        set_speed = self._set_speed
        for name, speed in zip(names, speeds, strict=True):
            set_speed(name, speed)

    def changes(self) -> tuple[int, int, int]:
        return self._count(), self._departed(), self._arrived()

    def names(self) -> set[str]:
        return set(self._sumo.vehicle.getIDList())

    def arrived(self) -> set[str]:
        return set(self._sumo.simulation.getArrivedIDList())

    def collisions(self) -> list[tuple[str, str]]:
        return [(c.collider, c.victim) for c in self._collisions()]

    def read(self, names: list[str]) -> Readings:
        count = len(names)
        return (
            np.fromiter(chain.from_iterable(map(self._position, names)), np.float64, 2 * count),
            np.fromiter(map(self._angle, names), np.float64, count),
            np.fromiter(map(self._speed, names), np.float64, count),
        )

    def close(self) -> None:
        if self._open:
            self._open = False
            self._sumo.close()


def _insert(
    vehicle: Any,  # libsumo's or traci's vehicle domain, which are untyped
    name: str,
    route: str,
    kind: str,
    lane: int,
    position: float,
    speed: float,
    factor: float,
) -> None:
    vehicle.add(
        name, route, kind, depart="now", departLane=str(lane), departPos=repr(position), departSpeed=repr(speed)
    )
    if factor != 1.0:
        vehicle.setSpeedFactor(name, factor)
    # Each lane leads to one movement, and a route's centre line is that of its lane: nobody may leave it.
    vehicle.setLaneChangeMode(name, 0)


class _WatchedSocket(socket.socket):
    """A connection that gives up on silence: traci takes a timeout, like every OSError, for SUMO's end."""

    give_up: Callable[[], str]  # ends SUMO; says how far it was

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        try:
            return super().recv(size, flags)
        except TimeoutError as error:
            seconds = self.gettimeout()
            when = self.give_up()
            raise DeadlineError(
                f"SUMO did not answer within {seconds:g} s {when}; it was ended",
                fix="start again from the last checkpoint (--resume); simulator.deadline sets the limit",
            ) from error


class TraciLink:
    """SUMO as a program of its own, spoken to over a socket; several may run at once.

    Args:
        gui: use sumo-gui, which a person may pause: there is no deadline.
        deadline: [s] for one answer; a SUMO that misses it is killed, and DeadlineError raised.

    Raises:
        BackendMissingError: traci or the program is not installed.
    """

    def __init__(self, *, gui: bool = False, deadline: float = 30.0) -> None:
        self._deadline = None if gui else deadline
        self.backend = "traci"
        self._traci = import_backend("traci")
        self._program = program("sumo-gui" if gui else "sumo")
        self.errors: tuple[type[Exception], ...] = (self._traci.TraCIException, self._traci.FatalTraCIError, OSError)
        tc = self._traci.constants
        self._variables = (tc.VAR_POSITION, tc.VAR_ANGLE, tc.VAR_SPEED)
        self._simulation_variables = (
            tc.VAR_DEPARTED_VEHICLES_NUMBER,
            tc.VAR_ARRIVED_VEHICLES_NUMBER,
            tc.VAR_COLLISIONS,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None
        self._socket: _WatchedSocket | None = None
        self._step = 0  # of the episode, the last one that was made
        self._step_length = 0.0  # [s]

    def begin(self, options: SumoOptions) -> None:
        self._step, self._step_length = 0, options.step_length
        if self._connection is not None:
            self._allow(_CONNECT_SECONDS)  # loading a network takes longer than a step
            self._connection.load(options.arguments())
        else:
            self._launch(options)
        self._connection.simulation.subscribe(self._simulation_variables)
        self._allow(0.0)

    def _allow(self, seconds: float) -> None:
        """Let an answer take so long, or the deadline if that is longer."""
        assert self._socket is not None
        self._socket.settimeout(None if self._deadline is None else max(self._deadline, seconds))

    def _watch(self) -> None:
        self._socket = _WatchedSocket(fileno=self._connection._socket.detach())
        self._socket.give_up = self._give_up
        self._connection._socket = self._socket
        self._allow(_CONNECT_SECONDS)

    def _give_up(self) -> str:
        """A stopped process ignores everything but SIGKILL, and asking it to close would wait again.

        Returns:
            when that was, in words.
        """
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
        self._end_process(patience=_CLOSE_SECONDS)
        if not self._step:
            return "at the beginning of an episode"
        return f"after step {self._step} of the episode ({self._step * self._step_length:.2f} s)"

    def _launch(self, options: SumoOptions) -> None:
        for _ in range(_PORT_TRIES):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            self._process = subprocess.Popen(
                [self._program, *options.arguments(), "--remote-port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            # the port may be taken in between, perhaps by another SUMO that answers
            if self._connect(port) and self.option("additional-files") == str(options.additional):
                return
            self._end_process(patience=0.0)
        raise ConnectionError(f"{self._program} did not answer on any of {_PORT_TRIES} ports")

    def _connect(self, port: int) -> bool:
        assert self._process is not None
        until = time.monotonic() + _CONNECT_SECONDS
        while self._process.poll() is None and time.monotonic() < until:
            try:
                self._connection = self._traci.connection.Connection("127.0.0.1", port, self._process, None, True, None)
            except OSError:
                time.sleep(0.02)
                continue
            self._watch()
            return True
        return False

    def option(self, name: str) -> str:
        return str(self._connection.simulation.getOption(name))

    def insert(self, name: str, route: str, kind: str, lane: int, position: float, speed: float, factor: float) -> None:
        _insert(self._connection.vehicle, name, route, kind, lane, position, speed, factor)

    def take_over(self, name: str, mode: int) -> None:
        self._connection.vehicle.setSpeedMode(name, mode)

    def follow(self, name: str) -> None:
        self._connection.vehicle.subscribe(name, self._variables)

    def remove(self, name: str) -> None:
        self._connection.vehicle.unsubscribe(name)
        self._connection.vehicle.remove(name, _REMOVED_BY_US)

    def move(self, name: str, x: float, y: float, angle: float) -> None:
        self._connection.vehicle.moveToXY(name, "", -1, x, y, angle, _ON_ITS_ROUTE)

    def write(self, names: list[str], speeds: list[float]) -> None:
        set_speed = self._connection.vehicle.setSpeed
        for name, speed in zip(names, speeds, strict=True):
            set_speed(name, speed)

    def tick(self) -> None:
        self._connection.simulationStep()
        self._step += 1

    def changes(self) -> tuple[int, int, int]:
        departed, arrived, _ = self._simulation_results()
        return self._connection.vehicle.getIDCount(), departed, arrived

    def _simulation_results(self) -> list[Any]:
        results = self._connection.simulation.getSubscriptionResults()
        return [results[variable] for variable in self._simulation_variables]

    def names(self) -> set[str]:
        return set(self._connection.vehicle.getIDList())

    def arrived(self) -> set[str]:
        return set(self._connection.simulation.getArrivedIDList())

    def collisions(self) -> list[tuple[str, str]]:
        return [(c.collider, c.victim) for c in self._simulation_results()[2]]

    def read(self, names: list[str]) -> Readings:
        results = self._connection.vehicle.getAllSubscriptionResults()
        position, angle, speed = self._variables
        rows = [results[name] for name in names]
        return (
            np.array([r[position] for r in rows]).ravel(),
            np.array([r[angle] for r in rows]),
            np.array([r[speed] for r in rows]),
        )

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            # it may be dead or stopped; the process is ended below either way
            with contextlib.suppress(DeadlineError, *self.errors):
                if self._socket is not None and self._deadline is not None:
                    self._socket.settimeout(_CLOSE_SECONDS)
                connection.close(False)
        self._end_process(patience=_CLOSE_SECONDS)

    def _end_process(self, *, patience: float) -> None:
        self._connection = None
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
