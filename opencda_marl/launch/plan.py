"""What runs where: the options of a launch, and the slots that they give.

A slot is a place where one cell runs at a time: a GPU for the learner, and where the family needs one a CARLA server
with a GPU and ports of its own. Slot k gets the k-th entry of each list, from the beginning again when it is used up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from opencda_marl.config_yaml import parse_value
from opencda_marl.core.errors import ConfigError

__all__ = [
    "DEADLINES",
    "FIRST_PORT",
    "PORTS_APART",
    "RETRIES",
    "Options",
    "Slot",
    "cards",
    "make_slot",
    "numbered",
    "options_from",
    "parse_counts",
    "parse_values",
]

FIRST_PORT = 2000
PORTS_APART = 10  # a server takes its port and the two above it
DEFAULT_BINARY = "/opt/CARLA_0.9.16/CarlaUE4.sh"

RETRIES: Mapping[str, int] = {
    "simulator": 5,
    "mps": 3,  # the multi-process service of its GPU died, and all cells there with it
    "deadline": 3,
    "memory": 2,
    "capture": 1,  # once more, eager
    "signal": 5,
    "storage": 3,
    "error": 1,  # a traceback that nobody foresaw
    "recycle": 3,  # no failure, unless it gets nowhere
}
"""Failures of a kind that a cell is forgiven, one after another without an episode saved in between; others: none."""

DEADLINES: Mapping[str, float] = {
    "server": 300.0,  # of a simulator's server, until it answers
    "starting": 300.0,  # until the first sign of life
    "compiling": 1800.0,
    "training": 300.0,  # silence between two heartbeats
    "updating": 900.0,
    "evaluating": 3600.0,
    "reporting": 3600.0,
    "stopping": 120.0,  # from the wish to stop to the kill
    "lease": 120.0,  # of a launcher on another machine, until its cells are taken over
}
"""[s] that a cell may be silent in each phase before it is killed and counted as past its deadline."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one cell at a time."""

    index: int
    cuda: str | None = None  # CUDA_VISIBLE_DEVICES of the trainer; None: as the launcher's own
    adapter: int | None = None  # CARLA's -graphicsadapter; None: its choice
    rpc_port: int | None = None  # None: no server
    threads: int = 1

    def describe(self) -> dict[str, Any]:
        """For a table and for launcher.json."""
        ports = [] if self.rpc_port is None else [self.rpc_port + k for k in range(3)]
        return {**asdict(self), "ports": ports}


@dataclass(frozen=True, slots=True)
class Options:
    """What a launch was asked for beside its cells."""

    parallel: int | Literal["auto"] = 1  # slots, of each runner
    engine: Literal["local", "ray", "slurm"] = "local"  # who places runners
    runners: int | None = None  # at once; None: what the engine has room for
    engine_set: Mapping[str, Any] = field(default_factory=dict)  # what the engine is told
    cuda_visible_devices: tuple[str, ...] = ()  # numbers in PCI order, or UUIDs
    carla_gpus: tuple[int, ...] = ()
    carla_rpc_port: int = FIRST_PORT  # slot k: this + 10 k
    carla_restart_mode: Literal["process", "docker"] = "process"
    carla_bin: str = DEFAULT_BINARY
    keep_carla: bool = False
    cuda_graph_update: bool = False
    mps: bool = False  # learners of one GPU share its contexts
    fail_fast: bool = False
    retry_delay: float = 1.0  # [s] before the first retry; doubled with each further one
    retries: Mapping[str, int] = field(default_factory=dict)  # over RETRIES
    deadlines: Mapping[str, float] = field(default_factory=dict)  # over DEADLINES, [s]

    def __post_init__(self) -> None:
        if self.parallel != "auto" and self.parallel < 1:
            raise ConfigError(
                f"--parallel {self.parallel}: at least one cell runs", fix="write a number from 1, or auto"
            )
        if self.engine == "local" and (self.runners is not None or self.engine_set):
            raise ConfigError(
                "--runners and --engine-set are for an engine that places runners on other machines",
                fix="add --engine ray or --engine slurm; here --parallel is the number of cells at once",
            )
        if self.mps and self.engine == "local" and not self.cuda_visible_devices:
            raise ConfigError("--mps: which GPUs?", fix="name those of the learners: --cuda-visible-devices 0,1")
        if self.runners is not None and self.runners < 1:
            raise ConfigError(f"--runners {self.runners}: at least one is needed", fix="write a number from 1")
        if self.carla_restart_mode == "docker" and self.carla_gpus:
            raise ConfigError(
                "--carla-gpus does nothing with --carla-restart-mode docker: a container is pinned to its card when it "
                "is started, and CARLA sees that card as adapter 0",
                fix="leave --carla-gpus out; start the containers with: opencda-marl docker-carla start --gpu K",
            )
        if not 1024 <= self.carla_rpc_port <= 65535 - 2:
            raise ConfigError(f"--carla-rpc-port {self.carla_rpc_port} is no port", fix="write one from 1024 to 65533")
        _known(self.retries, RETRIES, "--retries", "class of failures")
        _known(self.deadlines, DEADLINES, "--deadline", "phase")
        for name, value in self.deadlines.items():
            if value <= 0:
                raise ConfigError(
                    f"--deadline {name}={value:g}: all would be late at once",
                    fix="write a number above 0, in [s]",
                )

    def retry(self, kind: str) -> int:
        """Failures of this class that are forgiven."""
        return self.retries.get(kind, RETRIES.get(kind, 0))

    def deadline(self, phase: str) -> float:
        """[s] of silence in this phase."""
        return self.deadlines.get(phase, DEADLINES.get(phase, DEADLINES["training"]))

    def record(self) -> dict[str, Any]:
        """JSON values that `options_from` reads."""
        return asdict(self)


def _known(given: Mapping[str, float], names: Mapping[str, float], flag: str, what: str) -> None:
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"{flag}: there is no {what} named {name!r}", fix=f"known: {', '.join(names)}")
        if value < 0:
            raise ConfigError(f"{flag} {name}={value}: not below 0", fix="write a number from 0")


def options_from(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> Options:
    """Options of an earlier launch with those that are given now (not None) over them.

    Raises:
        ConfigError: one of them is wrong.
    """
    names = {item.name for item in fields(Options)}
    both = {name: value for name, value in recorded.items() if name in names}
    both |= {name: value for name, value in given.items() if value is not None}
    for name in ("cuda_visible_devices", "carla_gpus"):
        both[name] = tuple(both.get(name, ()))
    if given.get("engine") is not None and given["engine"] != recorded.get("engine"):  # what another one was told
        both |= {"runners": given.get("runners"), "engine_set": given.get("engine_set") or {}}
    if both.get("carla_restart_mode") == "docker" and given.get("carla_gpus") is None:
        both["carla_gpus"] = ()
    return Options(**both)


def make_slot(options: Options, index: int, *, carla: bool, threads: int) -> Slot:
    """The slot with this number.

    Args:
        options: lists of GPUs and the first port.
        index: from 0.
        carla: does a cell of this launch need a server?
        threads: of its cells, the most.

    Raises:
        ConfigError: there is no such port.
    """
    cuda, gpus = options.cuda_visible_devices, options.carla_gpus
    port = options.carla_rpc_port + PORTS_APART * index if carla else None
    if port is not None and port + 2 > 65535:
        raise ConfigError(f"slot {index} would have the port {port}", fix="lower --parallel or --carla-rpc-port")
    return Slot(
        index,
        cuda=cuda[index % len(cuda)] if cuda else None,
        adapter=gpus[index % len(gpus)] if gpus and carla else None,
        rpc_port=port,
        threads=threads,
    )


def cards(text: str, flag: str) -> tuple[str, ...]:
    """`0,1` or UUIDs, as nvidia-smi shows them; an empty text: none.

    Raises:
        ConfigError: it is something else.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if not re.fullmatch(r"[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]+", word):
            raise ConfigError(
                f"{flag} {text!r} is not understood: {word!r} is no GPU",
                fix=f"write numbers or UUIDs of nvidia-smi -L with commas: {flag} 0,1",
            )
    return tuple(words)


def numbered(text: str, flag: str) -> tuple[int, ...]:
    """`0,1` as numbers.

    Raises:
        ConfigError: it is something else.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,3}", word) for word in words):
        raise ConfigError(f"{flag} {text!r} is not understood", fix=f"write numbers with commas: {flag} 0,1")
    return tuple(int(word) for word in words)


def parse_values(given: list[str], flag: str) -> dict[str, Any]:
    """`timeout_min=60` arguments; numbers and true and false are such, all else is text.

    Raises:
        ConfigError: one is not a name and a value.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or not value:
            raise ConfigError(f"{flag} {text!r} is not understood", fix=f"write NAME=VALUE, e.g. {flag} num_gpus=1")
        found[name] = parse_value(value, f"{flag} {name}=")
    return found


def parse_counts(given: list[str], flag: str) -> dict[str, float]:
    """`simulator=3` arguments.

    Raises:
        ConfigError: one is not a name and a number.
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value):
            raise ConfigError(f"{flag} {text!r} is not understood", fix=f"write NAME=NUMBER, e.g. {flag} {name}=3")
        found[name] = float(value) if "." in value else int(value)
    return found
