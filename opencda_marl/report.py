"""What a run was worth: the table beside controllers, and the plots. Everything is read from run folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from opencda_marl.animation import animate
from opencda_marl.assemble import make_roads
from opencda_marl.config import from_run_folder
from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.children import run_all
from opencda_marl.core.errors import CheckpointError, Interrupted, StorageError
from opencda_marl.core.files import read_regular, storage_error, write_whole, writing
from opencda_marl.core.machine import cores
from opencda_marl.core.run_folder import progress_file, read_episodes, read_metrics, typed
from opencda_marl.core.stopping import StopRequest
from opencda_marl.core.verdict import in_words, judge
from opencda_marl.held_out import held_out_score
from opencda_marl.journal import recorded
from opencda_marl.plots import learning_plot, traffic_plot
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import WITH_SERVER

__all__ = [
    "COLUMNS",
    "Report",
    "animate_run",
    "animate_tracks",
    "choose_checkpoint",
    "driven_in",
    "episodes_of",
    "final_report",
    "kept_report",
    "markdown",
    "next_line",
]

COLUMNS = {
    "policy": "policy",
    "rate_vph": "vph/lane",
    "success_rate": "success %",
    "collision_rate": "collisions %",
    "near_miss_rate": "near-misses %",
    "mean_delay_s": "delay s",
    "throughput_vph": "through vph",
    "running_at_end": "inside at end",
    "waiting_at_end": "waiting at end",
    "vehicles": "vehicles",
}
"""Of the table, in order: the field of an evaluation, and its heading."""

_MODULE = "opencda_marl.evaluate"
_DEAR = ("policy", "rule_based")
_HUGE = 1e15  # no figure of a table is as large; neither is inf or NaN smaller
_PERCENT = ("success_rate", "collision_rate", "near_miss_rate")


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a run, as data."""

    rows: list[dict[str, Any]]  # one a policy and rate, see `COLUMNS`; the policy's own come first
    checkpoint: Path  # that was chosen
    table: Path | None  # markdown; None: the disk refused
    plots: list[Path]
    next: str  # one line: where everything is, what to type next
    notes: list[str] = field(default_factory=list)  # what could not be written
    verdict: list[str] = field(default_factory=list)  # whom the policy beats, and whom it does not
    kept: bool = False  # it was made before, and nothing was trained since


def kept_report(run: Path) -> Report | None:
    """The report that an earlier end of this run left, if nothing was trained since; None: there is none."""
    table = run / "plots" / "comparison.json"
    latest = Checkpoints(run / "checkpoints").find("latest")
    if latest is None or not table.is_file():
        return None
    try:
        rows = json.loads(read_regular(table))
        own = rows[0]["policy"]
        evaluation = from_run_folder(run).evaluation
        wanted = [(who, rate) for who in (own, *evaluation.controllers) for rate in evaluation.rates_vph]
        whole = [(row["policy"], row["rate_vph"]) for row in rows] == wanted and all(
            row["trained_episodes"] == _episode(latest) and _figures(row) for row in rows
        )
        checkpoint = run / "checkpoints" / Path(rows[0]["checkpoint"]).name
        if not whole or not checkpoint.is_dir():
            return None
        markdown(rows)
        verdict = in_words(judge(rows, own))
    # of an earlier version, or edited: it is made again
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
        return None
    plots = [file for name in ("learning", "traffic") if (file := run / "plots" / f"{name}.png").is_file()]
    made = table.with_suffix(".md")
    following = next_line(run, checkpoint)
    return Report(rows, checkpoint, made if made.is_file() else None, plots, following, verdict=verdict, kept=True)


def _figures(row: Mapping[str, Any]) -> bool:
    """Are all columns of a row there, and figures that can be?"""
    found = [row[name] for name in COLUMNS if name != "policy"]
    shares = [row[name] for name in _PERCENT]
    return all(value is None or (type(value) in (int, float) and abs(value) < _HUGE) for value in found) and all(
        value is None or 0.0 <= value <= 1.0 for value in shares
    )


def _episode(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def final_report(
    run: Path,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    workers: int | None = None,
    stop: StopRequest | None = None,
) -> Report:
    """Choose a checkpoint on the selection seeds, measure it beside the controllers on the held-out ones, draw.

    Args:
        run: the run folder; its settings say which seeds, rates and controllers.
        progress: hears what is being done, and how many of how many episodes are.
        workers: child processes at once; None: one a core.
        stop: whether somebody asked to stop; None: signals are heard from here on.

    Raises:
        CheckpointError: the run has no checkpoint.
        Interrupted: somebody asked to stop; the run itself is complete.
        StorageError: the run folder cannot be written, or was removed.
        OpenCDAError: an evaluation failed.
    """
    try:
        with nullcontext(stop) if stop is not None else StopRequest() as heard:
            return _report(run, progress or _deaf, max(1, workers or cores()), heard)
    except BrokenPipeError:  # whoever read our output is gone: that is no matter of the disk
        raise
    except OSError as error:
        raise storage_error(error, run) from error


def _report(run: Path, tell: Callable[[str, int, int], None], at_once: int, stop: StopRequest) -> Report:
    settings = from_run_folder(run)
    if settings.simulator.backend in WITH_SERVER:
        at_once = 1  # a server has one clock

    def jobs(requests: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, Any]:
        files = [progress_file(run, name) for name in requests]
        total = sum(episodes_of(request) for request in requests.values())
        for file in files:  # of an earlier table
            file.unlink(missing_ok=True)

        def going_on(_done: int) -> bool:
            tell(what, sum(map(driven_in, files)), total)
            return not stop.requested()

        found = run_all(_MODULE, requests, folder=run / "evaluations", workers=at_once, going_on=going_on)
        if stop.requested():
            raise Interrupted(
                "the table is left out; training is done, and saved",
                fix=f"for the table: opencda-marl run --resume {typed(run)}",
            )
        return found

    checkpoint = choose_checkpoint(run, settings, jobs)
    rows = _measure(run, settings, checkpoint, jobs)
    tell("plots", 0, 0)
    made: list[Path] = []
    notes: list[str] = []
    steps: tuple[Callable[[], Path], ...] = (
        lambda: _write_table(run, rows),
        lambda: learning_plot(read_episodes(run), read_metrics(run), run / "plots" / "learning.png"),
        lambda: _draw_traffic(run, settings, rows[0]["policy"]),
    )
    for step in steps:  # what cannot be written must not hide the figures
        try:
            made.append(step())
        except (StorageError, OSError) as error:
            notes.append(f"note: {error}")
    table = next((path for path in made if path.suffix == ".md"), None)
    plots = [path for path in made if path != table]
    return Report(
        rows, checkpoint, table, plots, next_line(run, checkpoint), notes, in_words(judge(rows, rows[0]["policy"]))
    )


def _write_table(run: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    table = run / "plots" / "comparison.md"
    with writing(table):
        table.parent.mkdir(exist_ok=True)
    said = "".join(f"- {line}\n" for line in in_words(judge(rows, rows[0]["policy"])))
    write_whole(table, f"{markdown(rows)}\n{said}".encode())
    write_whole(table.with_suffix(".json"), json.dumps(rows, indent=1).encode())
    return table


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as text; `-` where nothing was there to measure."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(name, row.get(name)) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def cell(name: str, value: Any) -> str:
    """A value of the table as text.

    Args:
        name: its field, a key of `COLUMNS`.
        value: None: absent.
    """
    if value is None:
        return "-"
    if name in _PERCENT:
        return f"{100.0 * value:.1f}"
    if name in ("rate_vph", "throughput_vph", "vehicles"):
        return f"{value:.0f}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def next_line(run: Path, checkpoint: Path | None = None) -> str:
    """Where everything is, and what to type next, with the policy that the table is about."""
    policy = typed(checkpoint or run)
    return f"Everything is in {typed(run)}. Next: opencda-marl evaluate {policy} --seeds 9000:9030 demand.rate_vph=300"


def choose_checkpoint(run: Path, settings: RunSettings, jobs: Callable[..., dict[str, Any]]) -> Path:
    """`best` or `latest`: the one with the higher `held_out_score` on the selection seeds.

    Args:
        run: its folder.
        settings: its seeds and rates.
        jobs: takes requests by name and what they are for, returns answers by name.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    checkpoints = Checkpoints(run / "checkpoints")
    found = {path for name in ("best", "latest") if (path := checkpoints.find(name)) is not None}
    if not found:
        raise CheckpointError(f"{run} has no checkpoint", fix="train longer")
    if len(found) == 1:
        return found.pop()
    rates = settings.evaluation.rates_vph
    requests = {
        f"selection-{path.name}": _request(run, settings.evaluation.selection_seeds, str(path), rates)
        for path in sorted(found)
    }
    answers = jobs(requests, "choosing a checkpoint")
    scores = {path: held_out_score(answers[f"selection-{path.name}"]) for path in sorted(found)}
    return max(scores, key=lambda path: scores[path])


def _measure(
    run: Path, settings: RunSettings, checkpoint: Path, jobs: Callable[..., dict[str, Any]]
) -> list[dict[str, Any]]:
    chosen = settings.evaluation
    rates = list(chosen.rates_vph)
    requests = {"policy": _request(run, chosen.seeds, str(checkpoint), rates)}
    requests["policy"]["jobs"][0] |= {
        "trajectory": str(run / "evaluations" / "trajectory.safetensors"),
        "trajectory_rate_vph": _shown(rates),
    }
    requests |= {name: _request(run, chosen.seeds, name, rates) for name in chosen.controllers}
    for name in chosen.controllers:  # a shield belongs to the policy
        requests[name]["jobs"][0]["overrides"] = ["shield.enabled=false"]
    # The dear ones first: whoever starts last should not need longest.
    answers = jobs(dict(sorted(requests.items(), key=lambda item: item[0] not in _DEAR)), "held-out traffic")
    label = f"{settings.algorithm} ({checkpoint.name})"
    latest = Checkpoints(run / "checkpoints").find("latest") or checkpoint
    of = {"trained_episodes": _episode(latest)}
    return [{**row, "policy": label if name == "policy" else name, **of} for name in requests for row in answers[name]]


def _draw_traffic(run: Path, settings: RunSettings, policy: str) -> Path:
    tracks = load_file(run / "evaluations" / "trajectory.safetensors")
    rate = _shown(settings.evaluation.rates_vph)
    title = f"{policy} on held-out traffic: {rate:.0f} vehicles per hour and lane, seed {settings.evaluation.seeds[0]}"
    out = run / "plots" / "traffic.png"
    return traffic_plot(make_roads(settings), tracks, settings.simulator.step_length, title, out)


def animate_run(run: Path, out: Path) -> Path:
    """The traffic that a run kept, in motion: that of its final table, else of its last recorded episode.

    Raises:
        CheckpointError: it kept none.
        ConfigError: the file is neither a GIF nor a PNG.
    """
    settings = from_run_folder(run)
    kept = sorted((run / "traffic").glob("episode_*.safetensors"), key=lambda file: int(file.stem[8:]))
    final = run / "evaluations" / "trajectory.safetensors"
    file = final if final.is_file() else kept[-1] if kept else None
    if file is None:
        raise CheckpointError(
            f"{run} kept no traffic",
            fix="train with evaluation.final=true or recording.trajectories_every=N; or: opencda-marl evaluate "
            f"{typed(run)} --animate crossing.gif",
        )
    return animate_tracks(settings, load_file(file), out)


def animate_tracks(settings: RunSettings, tracks: Mapping[str, Any], out: Path) -> Path:
    """Twenty seconds of an episode's tracks, from the middle of it."""
    vehicle = settings.scenario.vehicle
    length = settings.max_steps * settings.simulator.step_length  # [s]
    begin = max(0.0, min(30.0, length - 20.0))
    step = settings.simulator.step_length
    return animate(make_roads(settings), tracks, step, out, begin=begin, vehicle=(vehicle.length, vehicle.width))


def _shown(rates: Sequence[float]) -> float:
    """The rate whose traffic is drawn: the nearest to the heavy case."""
    return min(rates, key=lambda rate: abs(rate - 300.0))


def _request(run: Path, seeds: Sequence[int], policy: str, rates: Sequence[float]) -> dict[str, Any]:
    return {
        "jobs": [{"policy": policy, "rates_vph": list(rates)}],
        "config": str(run),
        "profile": recorded(run, "profile")["profile"],
        "seeds": list(seeds),
    }


def episodes_of(request: Mapping[str, Any]) -> int:
    """Episodes that a request of `opencda_marl.evaluate` comes to."""
    return len(range(*request["seeds"])) * sum(len(job["rates_vph"]) for job in request["jobs"])


def driven_in(file: Path) -> int:
    """Episodes that a child has driven; it may not have begun."""
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _deaf(_what: str, _done: int, _total: int) -> None:
    return None
