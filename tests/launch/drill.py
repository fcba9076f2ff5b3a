"""The chaos drill: a seeded adversary against a launcher, its trainers and its servers.

    python drill.py FOLDER REQUEST.json      the command that is typed again and again

Trainers are the real ones, or those of tests/launch/trainee.py; servers are stand-ins, one for each slot. Only the
cells of `OnCarla` drive in them; for the others what dies with them is the point.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.errors import OpenCDAError
from opencda_marl.launch.cells import Request, expand
from opencda_marl.launch.folder import Matrix, MatrixFolder, Writer, read_json
from opencda_marl.launch.launcher import Launcher
from opencda_marl.launch.plan import options_from
from opencda_marl.launch.processes import is_alive, read_process
from opencda_marl.launch.servers import ServerOptions, make_server, server_argv
from opencda_marl.launch.trainers import PROGRAM
from opencda_marl.standin import install

__all__ = ["Drill", "Fakes", "OnCarla", "Real"]

ROOT = Path(__file__).parents[2]
FORGIVING = dict.fromkeys(("simulator", "deadline", "memory", "signal", "storage", "error"), 1000)
DEADLINES = {"server": 60.0, "starting": 120.0, "training": 6.0, "updating": 6.0, "stopping": 5.0}


@dataclass(frozen=True)
class Real:
    """Cells that drive in SUMO and learn."""

    cells: int
    episodes: int

    @property
    def program(self) -> tuple[str, ...]:
        return PROGRAM

    def request(self) -> dict[str, Any]:
        fixed = ["max_steps=200", f"max_episodes={self.episodes}", "checkpoint_every=1", "evaluation.final=false"]
        fixed += ["learner.n_steps=150", "learner.minibatch_size=16", "demand.rate_vph=900", "learner.hidden=[32]"]
        profile = "sumo-marl/intersection/route_speed_only_mappo"
        return {"profiles": [profile], "fixed": fixed, "axes": {"seed": list(range(self.cells))}}

    def learned(self, run: Path) -> dict[str, Any]:
        """All that a run has learned, bit by bit."""
        found = Checkpoints(run / "checkpoints").load("latest")
        return {name: (array.dtype.str, array.tobytes()) for name, array in found.state.tensors.items()}


@dataclass(frozen=True)
class OnCarla(Real):
    """Cells that drive in their slot's server."""

    def request(self) -> dict[str, Any]:
        asked = super().request()
        fixed = [*asked["fixed"], "carla.tick_timeout=2.0", "carla.connect_timeout=5.0"]
        return {**asked, "profiles": ["momarl/intersection/mappo"], "fixed": fixed}


@dataclass(frozen=True)
class Fakes(Real):
    """Cells that count."""

    @property
    def program(self) -> tuple[str, ...]:
        return (sys.executable, "-S", str(Path(__file__).with_name("trainee.py")))

    def learned(self, run: Path) -> dict[str, Any]:
        return {"weight": (run / "checkpoints/latest/weight").read_text()}


@dataclass
class Drill:
    """One drill.

    Args:
        path: of the matrix; anything that a path may be.
        kind: of cells.
        port: of slot 0; thirteen from there are free.
        seed: of the adversary.
    """

    path: Path
    kind: Real
    port: int
    seed: int
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.log = self.path.parent / "drill.log"
        self.request = self.path.parent / "request.json"
        self.binary = install(self.path.parent / "carla")
        self.squatters: list[tuple[float, socket.socket]] = []
        asked = {"port": self.port, "binary": str(self.binary), "program": list(self.kind.program)}
        self.request.write_text(json.dumps({**asked, **self.kind.request()}))

    # --- the command

    def begin(self) -> subprocess.Popen[bytes]:
        """Type the command."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, __file__, str(self.path), str(self.request)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TRAINEE_PACE": "0.3"},
                start_new_session=True,
            )

    def finish(self, seconds: float) -> int:
        """Type it until nothing is left; returns how often."""
        deadline = time.monotonic() + seconds
        for times in range(1, 9):
            process = self.begin()
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if code == 0:
                return times
        raise AssertionError(f"never finished:\n{self.log.read_text()[-3000:]}")

    def learned(self) -> dict[str, Any]:
        """What each cell has learned, by its seed."""
        folder = MatrixFolder(self.path)
        return {str(cell.seed): self.kind.learned(folder.run(cell.id)) for cell in folder.read().cells}

    # --- the adversary

    def disturb(self, seconds: float, pause: tuple[float, float]) -> None:
        """Do harm for so long, typing the command again whenever it has ended; leaves it ended."""
        harms: list[Callable[[subprocess.Popen[bytes]], str]] = [
            self._kill_trainer, self._kill_trainer, self._stop_trainer, self._kill_keeper, self._kill_server,
            self._stop_server, self._kill_launcher, self._pause_launcher, self._fill_disk, self._fill_disk_of_launcher,
            self._take_port,
        ]  # fmt: skip
        process = self.begin()
        order: list[Callable[[subprocess.Popen[bytes]], str]] = []
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                time.sleep(self.random.uniform(*pause))
                if process.poll() is not None:
                    self.said.append(f"ended with {process.returncode}; typed again")
                    process = self.begin()
                    continue
                if not order:
                    order = self.random.sample(harms, len(harms))
                self.said.append(order.pop()(process))
                self._leave_ports()
        finally:
            self._leave_ports(at_once=True)
            process.kill()
            process.wait()

    def _records(self, pattern: str) -> list[dict[str, Any]]:
        found = [read_json(file) for file in sorted(self.path.glob(pattern))]
        return [facts for facts in found if "pid" in facts and is_alive(facts["pid"], facts["start_time"])]

    def _one(self, pattern: str) -> dict[str, Any] | None:
        found = self._records(pattern)
        return self.random.choice(found) if found else None

    def _send(self, facts: dict[str, Any] | None, number: int, what: str) -> str:
        if facts is None:
            return f"no {what} to send {number}"
        with suppress(ProcessLookupError):
            os.kill(facts["pid"], number)
        return f"{signal.Signals(number).name} to {what} {facts['pid']}"

    def _kill_trainer(self, _launcher: subprocess.Popen[bytes]) -> str:
        return self._send(self._one("launches/*/trainer.json"), signal.SIGKILL, "trainer")

    def _stop_trainer(self, _launcher: subprocess.Popen[bytes]) -> str:
        """Only one that drives: another deadline would be too long for a drill."""
        at_work = [read_json(file) for file in sorted(self.path.glob("cells/*/status.json"))]
        pids = {status.get("pid") for status in at_work if status.get("phase") == "training"}
        found = [facts for facts in self._records("launches/*/trainer.json") if facts["pid"] in pids]
        return self._send(self.random.choice(found) if found else None, signal.SIGSTOP, "trainer")

    def _kill_keeper(self, _launcher: subprocess.Popen[bytes]) -> str:
        facts = self._one(self.random.choice(["launches/*/trainer.json", "slots/*/server.json"]))
        keepers = facts["keepers"] if facts else []
        chosen = self.random.choice(keepers)[0] if keepers else None
        return self._send(None if chosen is None else {"pid": int(chosen)}, signal.SIGKILL, "keeper")

    def _kill_server(self, _launcher: subprocess.Popen[bytes]) -> str:
        """The wrapper, or the child behind it."""
        facts = self._one("slots/*/server.json")
        below = psutil.Process(facts["pid"]).children() if facts and psutil.pid_exists(facts["pid"]) else []
        chosen = self.random.choice([facts["pid"], *(child.pid for child in below)]) if facts else None
        return self._send(None if chosen is None else {"pid": chosen}, signal.SIGKILL, "server")

    def _stop_server(self, _launcher: subprocess.Popen[bytes]) -> str:
        return self._send(self._one("slots/*/server.json"), signal.SIGSTOP, "server")

    def _kill_launcher(self, launcher: subprocess.Popen[bytes]) -> str:
        launcher.kill()
        launcher.wait()
        return "SIGKILL to the launcher"

    def _pause_launcher(self, launcher: subprocess.Popen[bytes]) -> str:
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        launcher.send_signal(signal.SIGCONT)
        return "the launcher was stopped for a second"

    def _fill_disk(self, _launcher: subprocess.Popen[bytes]) -> str:
        facts = self._one("launches/*/trainer.json")
        if facts is not None:
            with suppress(ProcessLookupError):
                resource.prlimit(facts["pid"], resource.RLIMIT_FSIZE, (1, 1))
        return f"trainer {facts and facts['pid']} writes no more"

    def _fill_disk_of_launcher(self, launcher: subprocess.Popen[bytes]) -> str:
        with suppress(ProcessLookupError):
            resource.prlimit(launcher.pid, resource.RLIMIT_FSIZE, (1, 1))
        return "the launcher writes no more"

    def _take_port(self, _launcher: subprocess.Popen[bytes]) -> str:
        port = self.port + 10 * self.random.randrange(2) + self.random.randrange(3)
        squatter = socket.socket()
        try:
            squatter.bind(("127.0.0.1", port))
            squatter.listen()
        except OSError:
            squatter.close()
            return f"port {port} is in use"
        self.squatters.append((time.monotonic() + 1.5, squatter))
        return f"port {port} is taken"

    def _leave_ports(self, *, at_once: bool = False) -> None:
        for until, squatter in list(self.squatters):
            if at_once or time.monotonic() > until:
                squatter.close()
                self.squatters.remove((until, squatter))

    # --- what is left

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this matrix."""
        words = (str(self.path), str(self.binary.parent))
        found = []
        for process in psutil.process_iter(["cmdline", "environ", "cwd"]):
            told = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
            if process.pid != os.getpid() and any(word in text for word in words for text in told):
                found.append(process)
        return found


@contextmanager
def strangers(port: int) -> Iterator[Callable[[], bool]]:
    """Processes that look like ours; yields whether they are untouched."""
    names = [server_argv(Path("/opt/CARLA_0.9.16/CarlaUE4.sh"), port, None), ["opencda_marl.cli", "run", "-t", "x"]]
    code = "import time\nwhile True: time.sleep(0.05)"
    started = [subprocess.Popen([sys.executable, "-S", "-c", code, *words]) for words in names]
    before = [read_process(process.pid) for process in started]

    def untouched() -> bool:
        return all(
            process.poll() is None
            and first is not None
            and is_alive(process.pid, first.start_time)
            and psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
            for process, first in zip(started, before, strict=True)
        )

    try:
        yield untouched
    finally:
        for process in started:
            process.kill()
            process.wait()


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Equal bit by bit, and not because nothing was learned."""
    distinct = {str(value) for value in left.values()}
    return left == right and len(distinct) == len(left)


def main() -> int:
    path, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    asked = Request("drill", tuple(request["profiles"]), fixed=tuple(request["fixed"]), axes=request["axes"])
    given = {"parallel": 2, "retries": FORGIVING, "deadlines": DEADLINES, "retry_delay": 0.05}
    options = options_from({}, {**given, "carla_rpc_port": request["port"]})
    servers = ServerOptions(Path(request["binary"]), grace=1.0)
    try:
        with Writer(path) as folder:
            cells = expand(asked)
            folder.write_settings(cells)
            matrix = Matrix("drill", tuple(cell for cell, _ in cells), options)
            folder.write(matrix)
            result = Launcher(
                folder,
                matrix,
                listener=lambda kind, facts: None if kind == "beat" else say(f"{kind} {facts}"),
                served=lambda _cell: True,
                server_for=lambda slot: make_server("process", slot, servers, folder.slot(slot.index)),
                missing={},
                program=request["program"],
            ).run()
    except OpenCDAError as error:
        say(str(error))
        return error.exit_code
    return 130 if result.stopped else len(result.failed)


def say(text: str) -> None:
    with suppress(OSError):  # the disk may be full
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
