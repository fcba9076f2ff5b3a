"""How a matrix stands: rows of cells and figures of the whole, read from its files."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from opencda_marl.core.budget import Budget
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.run_folder import ACTIVE_PHASES, is_running, read_episodes
from opencda_marl.launch.cells import Cell
from opencda_marl.launch.folder import Launch, Matrix, MatrixFolder, is_done, read_json, saved_episodes
from opencda_marl.launch.processes import is_alive
from opencda_marl.launch.runners import live_runners, together

__all__ = ["aggregate", "find_cell", "overview", "recent_success", "report", "row", "rows"]

_RECENT = 20  # episodes that figures are over
_FRESH = 300.0  # [s] since a heartbeat from another machine; an update may take some
_LINE = 4096  # bytes of a line of episodes.jsonl, generously


def overview(folder: MatrixFolder) -> dict[str, Any]:
    """Rows and figures of a matrix, for `matrix status`.

    Raises:
        CheckpointError: it is no matrix.
    """
    matrix = folder.read()
    found = rows(folder, matrix)
    slots = {slot["cell"]: slot["index"] for slot in aggregate(folder, found)["slots"] if slot["cell"] is not None}
    for one in found:
        if one["cell"] in slots and one["state"] in ("waiting", "retrying", "stopped"):  # no trainer yet
            one |= {"state": "server", "slot": slots[one["cell"]]}
    return {"name": matrix.name, "folder": str(folder.path), **aggregate(folder, found), "cells": found}


def rows(folder: MatrixFolder, matrix: Matrix) -> list[dict[str, Any]]:
    """A row for each cell, in the order of the matrix."""
    return [row(folder, cell) for cell in matrix.cells]


def row(folder: MatrixFolder, cell: Cell, launch: Launch | None = None) -> dict[str, Any]:
    """How a cell stands.

    Args:
        folder: of the matrix.
        cell: which.
        launch: its attempts; None: as its file says.

    Returns:
        cell, name, state, slot, episode, episodes (of the budget), success, ms_per_step, eta_s, env_steps, attempts,
        failure (its class), error, run.
    """
    status = folder.status(cell.id)
    done = is_done(cell, status)
    told = launch or folder.read_launch(cell.id)
    state = "finished" if done else _state(folder, cell, told, status)
    last = told.attempts[-1] if told.attempts else {}
    progress = 1.0 if done else _progress(cell, status)
    spent = _number(status, "training_s")
    running = state in ACTIVE_PHASES
    return {
        "cell": cell.id,
        "name": cell.name,
        "state": state,
        "slot": last.get("slot") if running else None,
        "episode": status.get("episodes") if done else _episode(folder, cell, status, running=running),
        "episodes": cell.budgets["max_episodes"],
        "success": status.get("success_rate_last_20") if done else recent_success(folder.run(cell.id)),
        "ms_per_step": _ms(status),
        "progress": progress,
        "eta_s": (1.0 - progress) / progress * spent if running and progress > 0 and spent else None,
        "env_steps": _number(status, "env_steps"),
        "attempts": told.made,
        "failure": None if done else told.failure,
        "error": None if done else told.error,
        "run": str(folder.run(cell.id)),
    }


def _state(folder: MatrixFolder, cell: Cell, launch: Launch, status: Mapping[str, Any]) -> str:
    """waiting, one of ACTIVE_PHASES, ending, retrying, stopped, failed, died; docs/matrix.md says what each means."""
    if launch.state == "finished":  # its budget was raised, or its run folder was taken away
        return "waiting"
    if launch.state != "running":
        return launch.state
    last = launch.attempts[-1] if launch.attempts else {}
    if last.get("pid") is None or status.get("pid") != last["pid"]:
        return "starting" if _lives(last) else "died"
    phase = str(status.get("phase"))
    if _at_work(folder, cell, launch, status):
        return phase if phase in ACTIVE_PHASES else "ending"
    if phase == "interrupted":  # it has saved its last boundary; who would have written that down is gone
        return "stopped"
    return "ending" if phase not in ACTIVE_PHASES and _lives(last) else "died"


def _lives(attempt: Mapping[str, Any]) -> bool:
    """Is the process of an attempt there? On another machine it may be for a while."""
    if attempt.get("pid") is None:
        return False
    if attempt.get("host") in (None, socket.gethostname()):
        return is_alive(int(attempt["pid"]), int(attempt.get("started_ticks") or 0))
    return time.time() - float(attempt.get("started", 0.0)) < _FRESH


def _at_work(folder: MatrixFolder, cell: Cell, launch: Launch, status: Mapping[str, Any]) -> bool:
    """Locks of other machines are not seen on every file system; there a heartbeat has to do."""
    if is_running(folder.run(cell.id)):
        return True
    elsewhere = launch.attempts[-1].get("host") not in (None, socket.gethostname())
    return elsewhere and time.time() - float(status.get("updated", 0.0)) < _FRESH


def _progress(cell: Cell, status: Mapping[str, Any]) -> float:
    """The share of the wanted budget that is done; status.json knows that of its own time only."""
    episodes, steps, minutes = (cell.budgets[key] for key in ("max_episodes", "max_env_steps", "max_minutes"))
    budget = Budget(None if episodes is None else int(episodes), None if steps is None else int(steps), minutes)
    if not status:
        return 0.0
    begun = status.get("episodes", status.get("episode", 1) - 1)
    within = min(1.0, (_number(status, "step") or 0.0) / cell.max_steps) if "episode" in status else 0.0
    return budget.used(begun + within, int(_number(status, "env_steps") or 0), _number(status, "training_s") or 0.0)


def _episode(folder: MatrixFolder, cell: Cell, status: Mapping[str, Any], *, running: bool) -> int | None:
    if running and "episode" in status:
        return int(status["episode"])
    saved = saved_episodes(folder.run(cell.id))
    return saved or None


def _ms(status: Mapping[str, Any]) -> float | None:
    spent, steps = _number(status, "training_s"), _number(status, "env_steps")
    return _number(status, "ms_per_step") or (1e3 * spent / steps if spent and steps else None)


def _number(status: Mapping[str, Any], key: str) -> float | None:
    value = status.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def recent_success(run: Path) -> float | None:
    """Share of the vehicles of the last episodes that arrived; None: no episode is done."""
    file = run / "episodes.jsonl"
    try:
        return _success(file, file.stat().st_size)
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _success(file: Path, size: int) -> float | None:
    """Lines are only appended: another size is another answer."""
    with file.open("rb") as stream:
        stream.seek(max(0, size - _RECENT * _LINE))
        raw = stream.read().split(b"\n")
    lines = [line for line in (_parsed(text) for text in raw[:-1]) if line][-_RECENT:]
    ended = sum(line.get("vehicles", 0) for line in lines)
    return sum(line.get("arrived", 0) for line in lines) / ended if ended else None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        return {}  # the first one is cut, where the file is long


def aggregate(folder: MatrixFolder, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of the whole: counts by state, the launcher at work, its steps per second."""
    states: dict[str, int] = {}
    for one in found:
        states[one["state"]] = states.get(one["state"], 0) + 1
    owner = folder.owner()
    told = read_json(folder.path / "launcher.json")
    alive = owner is not None and told.get("pid") == owner
    live = live_runners(folder)
    now = told if alive else together(live)  # runners may outlive whoever has placed them
    return {
        "total": len(found),
        "states": states,
        "finished": states.get("finished", 0),
        "failed": states.get("failed", 0),
        "launcher": owner,
        "launcher_phase": told.get("phase") if alive else None,
        "silent_s": round(time.time() - told["updated"], 1) if alive else None,
        "steps_per_s": now.get("steps_per_s"),
        "slots": now.get("slots", []),
        "runners": {name: {"host": one.get("host"), "phase": one["phase"]} for name, one in live.items()},
    }


def find_cell(matrix: Matrix, named: str) -> Cell:
    """A cell by the beginning of its id, or by its name.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = [cell for cell in matrix.cells if named in (cell.id, cell.name)]
    found = found or [cell for cell in matrix.cells if named and cell.id.startswith(named)]
    if len(found) != 1:
        some = ", ".join(f"{cell.id} ({cell.name})" for cell in (found or matrix.cells)[:4])
        raise ConfigError(
            f"{'no cell' if not found else 'more than one cell'} of {matrix.name} is {named!r}", fix=f"e.g. {some}"
        )
    return found[0]


def report(folder: MatrixFolder) -> dict[str, Any]:
    """What the cells came to: for each, and for cells that differ in their seed alone, over the last episodes.

    Raises:
        CheckpointError: it is no matrix, or lines of a run are broken.
    """
    matrix = folder.read()
    cells = []
    for cell in matrix.cells:
        lines = read_episodes(folder.run(cell.id))[-_RECENT:] if folder.run(cell.id).is_dir() else []
        stands = row(folder, cell)
        told = {key: stands[key] for key in ("cell", "name", "state", "failure", "error", "run")}
        cells.append({**told, "seed": cell.seed, "group": _group(cell), "episodes": len(lines), **_figures(lines)})
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in cells:
        groups.setdefault(one["group"], []).append(one)
    summed = [{"group": name, "seeds": len(own), **_spread(own)} for name, own in groups.items()]
    return {"name": matrix.name, "folder": str(folder.path), "over_episodes": _RECENT, "groups": summed, "cells": cells}


_FIGURES = ("success_rate", "collision_rate", "mean_delay_s", "return")


def _group(cell: Cell) -> str:
    return cell.name.removesuffix(f" s{cell.seed}")


def _figures(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    ended = sum(line["vehicles"] for line in lines)
    delays = [line["mean_delay_s"] for line in lines if line.get("mean_delay_s") is not None]
    returns = [line["return"] for line in lines if line.get("return") is not None]
    return {
        "success_rate": sum(line["arrived"] for line in lines) / ended if ended else None,
        "collision_rate": sum(line["collided"] for line in lines) / ended if ended else None,
        "mean_delay_s": _mean(delays),
        "return": _mean(returns),
    }


def _spread(own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard error over the seeds."""
    found: dict[str, Any] = {"finished": sum(one["state"] == "finished" for one in own)}
    for key in _FIGURES:
        values = [one[key] for one in own if one[key] is not None]
        mean = _mean(values)
        found[key] = mean
        error = None
        if mean is not None and len(values) > 1:
            variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
            error = math.sqrt(variance / len(values))
        found[f"{key}_error"] = error
    return found


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
