"""Which cells there are: a matrix file or flags -> the product of what varies, every cell a validated run.

    name: rates                                       # of the matrix; default: the file's name
    profile: sumo-marl/intersection/quickstart        # what all cells start from; a list varies it
    set: {max_steps: 1200}                            # for all cells
    axes: {seed: "0:5", demand.rate_vph: [200, 300]}  # every combination of these
    pairs:                                            # each of these with every combination
      - {learner.learning_rate: 1e-3, learner.epochs: 4}
      - {learner.learning_rate: 3e-4, learner.epochs: 8}
    exclude: [{seed: 0, demand.rate_vph: 300}]        # but not these
    budgets: {max_episodes: 100}
    retries: {simulator: 9}                           # see launch/plan.py, likewise deadlines

A cell's id is the hash of what it computes, so cells that differ in budgets or display alone are one cell.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from opencda_marl import __version__
from opencda_marl.config import BUDGETS, DISPLAY, PLACE, config_hash, load_profile, require_budget
from opencda_marl.config_files import find_root
from opencda_marl.config_yaml import Document, Keys, Source, dump_scalar, read
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.machine import cores
from opencda_marl.core.tables import Table
from opencda_marl.launch.plan import DEADLINES, RETRIES
from opencda_marl.settings.networks import NetworkSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["Cell", "Family", "Request", "expand", "family", "fingerprint", "read_request", "seeds"]

Family = Literal["sumo", "carla"]

_CARLA = ("momarl/intersection/", "momarl-cosim/intersection/")
_ID = 12  # hexadecimal digits
_MOST = 100_000  # cells
_SHOWN = 5  # wrong cells in one message
_GRAPH = "learner.cuda_graph_update=true"
_KEYS = ("name", "profile", "config_root", "set", "axes", "pairs", "exclude", "budgets", "retries", "deadlines")


@dataclass(frozen=True, slots=True)
class Cell:
    """One training run."""

    id: str
    name: str  # for people
    profile: str
    family: Family
    algorithm: str
    seed: int
    threads: int
    device: str
    max_steps: int  # of an episode
    chosen: dict[str, Any]  # what makes it different from the other cells
    budgets: dict[str, float | None]
    display: dict[str, Any]
    workers: int = 1  # processes, each of which keeps a core busy

    @property
    def free(self) -> list[str]:
        """Overrides that do not change what is computed; a resumed run takes them too."""
        return [f"{key}={dump_scalar(value)}" for key, value in {**self.budgets, **self.display}.items()]

    @property
    def budget(self) -> str:
        """For people."""
        names = {"max_episodes": "episodes", "max_env_steps": "steps", "max_minutes": "minutes"}
        return ", ".join(f"{value:g} {names[key]}" for key, value in self.budgets.items() if value is not None)

    @property
    def varies(self) -> str:
        """For people: what makes it different, beside profile and seed."""
        return " ".join(f"{k}={dump_scalar(v)}" for k, v in self.chosen.items() if k not in ("profile", "seed"))

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Cell:
        """What `asdict` made."""
        return cls(**{item.name: values[item.name] for item in fields(cls)})


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, before it is multiplied out."""

    name: str
    profiles: tuple[str, ...]
    config_root: str | None = None
    fixed: tuple[str, ...] = ()  # key=value
    axes: dict[str, list[Any]] = field(default_factory=dict)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    exclude: list[dict[str, Any]] = field(default_factory=list)
    retries: dict[str, float] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)


def family(profile: str) -> Family:
    """What moves the vehicles of a profile."""
    return "carla" if profile.startswith(_CARLA) else "sumo"


def seeds(text: str, where: str = "--seeds") -> list[int]:
    """`0:5` (half-open), `3`, or `1,2,7`.

    Raises:
        ConfigError: it is something else.
    """
    if match := re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text.strip()):
        first, last = int(match[1]), int(match[2])
        if first < last <= 2**32 and last - first <= _MOST:
            return list(range(first, last))
    elif re.fullmatch(r"[0-9]{1,10}(\s*,\s*[0-9]{1,10})*", text.strip()):
        return list(dict.fromkeys(int(word) for word in text.split(",")))
    raise ConfigError(f"{where} {text!r} is not understood", fix="write A:B with A < B, or numbers with commas: 1,2,7")


def read_request(file: Path) -> Request:
    """A matrix file.

    Raises:
        ConfigError: with file and line.
    """
    document = read(file)
    values = document.values
    for key in values:
        if key not in _KEYS:
            raise _wrong(document, (key,), f"there is no {key!r} in a matrix file", f"known: {', '.join(_KEYS)}")
    named = _axis(document, ("profile",), values.get("profile"))
    budgets = _block(document, "budgets")
    for key in budgets:
        if key not in BUDGETS:
            raise _wrong(document, ("budgets", key), f"{key!r} is no budget", f"budgets: {', '.join(BUDGETS)}")
    root = values.get("config_root")
    return Request(
        name=_text(document, "name") or file.stem,
        profiles=tuple(str(name) for name in named),
        config_root=None if root is None else str((file.parent / str(root)).resolve()),
        fixed=tuple(f"{key}={dump_scalar(value)}" for key, value in {**_block(document, "set"), **budgets}.items()),
        axes={key: _axis(document, ("axes", key), value) for key, value in _block(document, "axes").items()},
        pairs=_blocks(document, "pairs"),
        exclude=_blocks(document, "exclude"),
        retries=_counts(document, "retries", RETRIES),
        deadlines=_counts(document, "deadlines", DEADLINES),
    )


def _wrong(document: Document, keys: Keys, message: str, fix: str) -> ConfigError:
    while keys and keys not in document.sources:
        keys = keys[:-1]
    source: Source | str = document.sources.get(keys, "the matrix file")
    return ConfigError(f"{source}: {message}", fix=fix)


def _text(document: Document, key: str) -> str | None:
    value = document.values.get(key)
    if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[\w.+ -]{1,100}", value)):
        raise _wrong(document, (key,), f"{key} is {value!r}", "write letters, digits, '-', '_' and '.'")
    return value


def _block(document: Document, key: str) -> dict[str, Any]:
    value = document.values.get(key)
    if value is not None and not isinstance(value, dict):
        raise _wrong(document, (key,), f"{key!r} is a block of settings", f"e.g. {key}: {{learner.epochs: 4}}")
    for name, inner in (value or {}).items():
        if isinstance(inner, dict):
            raise _wrong(document, (key, name), f"{name!r} is a block", f"write the whole name: {name}.…: value")
    return dict(value or {})


def _blocks(document: Document, key: str) -> list[dict[str, Any]]:
    value = document.values.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) and item for item in value):
        raise _wrong(document, (key,), f"{key!r} is a list of blocks", f"e.g. {key}: [{{seed: 1, learner.epochs: 4}}]")
    return [dict(item) for item in value]


def _axis(document: Document, keys: Keys, value: Any) -> list[Any]:
    if keys[-1] == "seed" and isinstance(value, str):
        return list(seeds(value, where=f"{document.sources[keys]}: seed"))
    if keys == ("profile",) and (value is None or value == []):
        raise _wrong(document, keys, "which profile?", "profile: sumo-marl/intersection/quickstart")
    found = value if isinstance(value, list) else [value]
    if not found or any(isinstance(item, dict) for item in found):
        raise _wrong(document, keys, f"{keys[-1]!r} needs a list of values", f"e.g. {keys[-1]}: [1, 2]")
    if keys == ("profile",) and not all(isinstance(item, str) for item in found):
        raise _wrong(document, keys, "profiles are names", "profile: sumo-marl/intersection/quickstart")
    return list(found)


def _counts(document: Document, key: str, known: Mapping[str, float]) -> dict[str, float]:
    found = _block(document, key)
    for name, value in found.items():
        if name not in known:
            raise _wrong(document, (key, name), f"there is no {name!r} in {key}", f"known: {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise _wrong(document, (key, name), f"{name} is {value!r}", "write a number from 0")
    return found


def fingerprint(request: Request, *, graph: bool) -> str | None:
    """Equal for equal requests on equal profiles, so that cells need not be multiplied out again; None: cannot be told.

    Networks outside of the config root are part of a cell's identity, but not looked at here.
    """
    if any("scenario." in text for text in (*request.fixed, *request.axes, *(key for p in request.pairs for key in p))):
        return None
    root = find_root(None if request.config_root is None else Path(request.config_root))
    files = [(file, file.stat()) for file in sorted(root.rglob("*")) if file.is_file()]
    seen = [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in files]
    told = json.dumps([asdict(request), graph, __version__, seen], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def expand(
    request: Request, *, graph: bool = False, tables: Mapping[str, Table] | None = None
) -> list[tuple[Cell, RunSettings]]:
    """Every cell with its settings, in the order in which they are started.

    Args:
        request: what varies.
        graph: `--cuda-graph-update`: for each algorithm that has networks.
        tables: see `config.load_profile`.

    Raises:
        ConfigError: one of them is not valid; it names the cell.
    """
    every = list(_combinations(request))
    combinations = [choice for choice in every if not _excluded(request.exclude, choice)]
    for rule in request.exclude:
        if not any(_excluded([rule], choice) for choice in every):
            told = ", ".join(f"{key}: {value}" for key, value in rule.items())
            raise ConfigError(f"exclude: no cell is {{{told}}}", fix="mend it, or leave it out")
    if not combinations:
        raise ConfigError(f"the matrix {request.name} has no cells", fix="exclude fewer of them")
    found: dict[str, tuple[Cell, RunSettings]] = {}
    wrong: list[ConfigError] = []
    named: set[tuple[Any, ...]] = set()
    for choice in combinations:
        # a name is looked up among all installed packages: once for each profile and choice is enough
        names: tuple[str, ...] = (choice["profile"], *(repr(value) for key, value in choice.items() if key != "seed"))
        try:
            cell, settings = _made(request, choice, graph, None if names in named else tables)
            before = found.setdefault(cell.id, (cell, settings))[0]
            if before.budgets != cell.budgets:
                raise ConfigError(
                    f"it has other budgets than {before.name}, but computes the same",
                    fix="budgets do not make another cell: give one budget to all with 'budgets'",
                )
        except ConfigError as error:
            wrong.append(ConfigError(f"cell {_name(choice)}: {error.message}", fix=error.fix))
        else:
            named.add(names)
    if wrong:
        raise _all_wrong(wrong, len(combinations))
    return list(found.values())


def _combinations(request: Request) -> Iterator[dict[str, Any]]:
    given = {text.partition("=")[0] for text in request.fixed}
    paired = {key for pair in request.pairs for key in pair}
    for key in PLACE:
        if key in given | paired | set(request.axes):
            raise ConfigError(
                f"{key} cannot be set for a cell: it drives on the server of its slot",
                fix="choose the ports of the slots: --carla-rpc-port 2000",
            )
    for key in sorted(paired):
        if key in given or key in BUDGETS:
            fix = "give it to all cells with 'budgets'" if key in BUDGETS else "keep one of the two"
            raise ConfigError(f"{key} varies in 'pairs', and is given elsewhere or is a budget", fix=fix)
    for key in request.axes:
        if key in given or any(key in pair for pair in request.pairs) or key in BUDGETS:
            fix = "give it to all cells with 'budgets'" if key in BUDGETS else "keep one of the two"
            raise ConfigError(f"{key} varies as an axis, and is given elsewhere or is a budget", fix=fix)
    count = len(request.profiles) * max(1, len(request.pairs))
    for axis in request.axes.values():
        count *= len(axis)
    if count > _MOST:
        raise ConfigError(f"{count:,} combinations are too many", fix=f"at most {_MOST:,}")
    # seeds vary fastest, whatever the order of the axes: what is compared runs at about the same time
    axes = sorted(request.axes.items(), key=lambda item: item[0] == "seed")
    for profile, pair in itertools.product(request.profiles, request.pairs or [{}]):
        for values in itertools.product(*(values for _, values in axes)):
            yield {"profile": profile, **pair, **dict(zip((key for key, _ in axes), values, strict=True))}


def _excluded(rules: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> bool:
    for rule in rules:
        for key in rule:
            if key not in choice:
                raise ConfigError(f"exclude: {key!r} does not vary", fix=f"these do: {', '.join(choice)}")
        if all(choice[key] in (value if isinstance(value, list) else [value]) for key, value in rule.items()):
            return True
    return False


def _made(
    request: Request, choice: Mapping[str, Any], graph: bool, tables: Mapping[str, Table] | None
) -> tuple[Cell, RunSettings]:
    own = [f"{key}={dump_scalar(value)}" for key, value in choice.items() if key != "profile"]
    root = None if request.config_root is None else Path(request.config_root)
    wanted = [*request.fixed, *own]
    loaded = load_profile(choice["profile"], config_root=root, overrides=wanted, tables=tables)
    if graph and isinstance(loaded.settings.learner, NetworkSettings):
        loaded = load_profile(choice["profile"], config_root=root, overrides=[*wanted, _graph(wanted, loaded.settings)])
    settings = loaded.settings
    require_budget(settings)
    display = {key: _at(settings, key) for key in DISPLAY}
    cell = Cell(
        id=config_hash(settings)[:_ID],
        name=_name({**choice, "seed": settings.seed, "profile": loaded.name}),
        profile=loaded.name,
        family=family(loaded.name),
        algorithm=settings.algorithm,
        seed=settings.seed,
        threads=settings.threads,
        device=settings.device,
        max_steps=settings.max_steps,
        chosen={**choice, "seed": settings.seed, "profile": loaded.name},
        budgets={key: getattr(settings, key) for key in BUDGETS},
        display=display,
        workers=cores() if settings.workers == "auto" else settings.workers,
    )
    return cell, settings


def _graph(overrides: Sequence[str], settings: RunSettings) -> str:
    """The setting under the name of the block that the other overrides use: both names at once are refused."""
    alias = any(text.startswith(f"{settings.algorithm}.") for text in overrides)
    return f"{settings.algorithm}.{_GRAPH.partition('.')[2]}" if alias else _GRAPH


def _at(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = getattr(settings, name)
    return settings


def _name(choice: Mapping[str, Any]) -> str:
    """For people: the profile's last part, what varies, the seed."""
    rest = [f"{key.rpartition('.')[2]}={dump_scalar(choice[key])}" for key in choice if key not in ("profile", "seed")]
    seed = [f"s{choice['seed']}"] if "seed" in choice else []
    return " ".join([str(choice["profile"]).rpartition("/")[2], *rest, *seed])


def _all_wrong(wrong: Sequence[ConfigError], of: int) -> ConfigError:
    if len(wrong) == 1:
        return wrong[0]
    # most often they are wrong in the same way
    kinds = {error.message.partition(": ")[2]: error for error in reversed(wrong)}
    shown = list(kinds.values())[::-1][:_SHOWN]
    lines = "\n".join(f"  {error.message}" for error in shown)
    more = f"\n  and {len(wrong) - len(shown)} more" if len(wrong) > len(shown) else ""
    return ConfigError(f"{len(wrong)} of {of} cells are not valid:\n{lines}{more}", fix=shown[0].fix)
