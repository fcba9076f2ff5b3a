"""Is a resumed run the run that was never interrupted? Proven bit for bit, on a real kill.

Four short episodes of each worker; the same again, SIGKILLed in the middle of the third and resumed. Then everything
that the two left is compared: tensors (weights, moments, normalisers, stored rows), values (counters, generators,
schedules), the rows of a replay and the lines of every episode and update. Only what the clock decides may differ.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opencda_marl.core.checkpoint import Checkpoints
from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import require_empty
from opencda_marl.core.run_folder import read_episodes, read_metrics
from opencda_marl.core.segments import Segment
from opencda_marl.core.spec import LearnerState
from opencda_marl.journal import TIMING_FIELDS
from opencda_marl.tools.child_runs import ChildRun, differing_fields, sum_up
from opencda_marl.tools.short_runs import learn_across

__all__ = ["differing_runs", "differing_states", "verify_resume"]

_EPISODES = 4  # of each worker
_KILLED_IN = 3
_STEPS = 400  # of an episode; doubled when the kill comes too late
_TRIES = 4
_DEADLINE = 600.0  # [s] of one run
_LISTED = 50  # differences


def verify_resume(
    name: str,
    *,
    folder: Path,
    config_root: Path | None = None,
    overrides: Sequence[str] = (),
    keep: bool = False,
) -> dict[str, Any]:
    """Run, kill, resume, compare.

    Args:
        name: of the profile.
        folder: new or empty; gets `verify-resume.json` (what is returned) and what the runs said.
        config_root: folder of profiles; None: the bundled one.
        overrides: `key.sub=value`.
        keep: leave the run folders in `folder`; they stay as well when a run failed or the two differ.

    Returns:
        {exact, differences, compared, killed_after_s, runs, …}: `compared` says how many tensors, values and lines
        were held against each other, `runs` which run folders stay.

    Raises:
        OpenCDAError: a run failed, or could not be caught in the middle of its third episode.
        StorageError: the folder holds something.
    """
    require_empty(folder)
    made: list[ChildRun] = []
    workers = _workers(name, config_root, overrides)
    before = (_KILLED_IN - 1) * workers  # episodes that are finished when it is killed
    for attempt in range(_TRIES):
        steps = _STEPS * 2**attempt
        short = (*overrides, *_short_run(steps, workers, name, config_root, overrides))
        whole = ChildRun(name, folder, f"whole-{steps}", config_root, short)
        whole.finish(whole.start(), deadline=_DEADLINE)
        lasts = workers * float(read_episodes(whole.path)[before]["wall_s"])  # [s] the third episode
        broken = ChildRun(name, folder, f"resumed-{steps}", config_root, short)
        made += [whole, broken]
        killed = _kill_in_the_middle(broken, before, lasts / 2)
        if killed is None:
            continue
        broken.finish(broken.start(resume=True), deadline=_DEADLINE)
        differences, compared = differing_runs(whole.path, broken.path)
        kept = made if keep or differences else []
        answer = {
            "what": "verify-resume",
            "profile": name,
            "exact": not differences,
            "differences": differences[:_LISTED],
            "compared": compared,
            "workers": workers,
            "killed_in_episode": before + 1,
            "killed_after_s": round(killed, 3),
            "episode_steps": steps,
            "runs": [str(run.path) for run in kept],
            "folder": str(folder),
        }
        sum_up(folder / "verify-resume.json", answer, () if kept else made)
        return answer
    raise OpenCDAError(
        f"the run could not be caught inside its episode {before + 1} in {_TRIES} tries",
        fix="try again on a quieter machine, or with a longer episode",
    )


def _workers(name: str, config_root: Path | None, overrides: Sequence[str]) -> int:
    """How many the run is going to have."""
    from opencda_marl.config import load_profile
    from opencda_marl.crew import resolve_workers

    return resolve_workers(load_profile(name, config_root=config_root, overrides=overrides).settings, None)


def _short_run(
    steps: int, workers: int, name: str, config_root: Path | None, overrides: Sequence[str]
) -> tuple[str, ...]:
    """Overrides of the drill: updates happen, and rows wait across the kill and across every boundary."""
    from opencda_marl.config import load_profile

    settings = load_profile(name, config_root=config_root, overrides=overrides).settings
    return (
        f"workers={workers}",
        f"max_episodes={_EPISODES * workers}",
        "max_env_steps=null",
        "max_minutes=null",
        f"max_steps={steps}",
        "checkpoint_every=1",
        f"keep={_EPISODES * workers}",
        "evaluation.final=false",
        "eval_every=0",
        *learn_across(settings.learner, workers * steps, settings.decision_interval),
    )


def _kill_in_the_middle(run: ChildRun, before: int, delay: float) -> float | None:
    """Start a run and SIGKILL it `delay` seconds after it has finished `before` episodes.

    Returns:
        [s] after the last of their lines was there; None: it was too late, or too early.
    """
    process = run.start()
    try:
        _await_lines(run.path, before, process)
        seen = time.monotonic()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        late = time.monotonic() - seen
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    saved = Checkpoints(run.path / "checkpoints").numbered()
    inside = len(read_episodes(run.path)) == before and bool(saved) and process.returncode == -signal.SIGKILL
    return late if inside else None


def _await_lines(path: Path, wanted: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a run has written so many episode lines, or has ended."""
    file = path / "episodes.jsonl"
    give_up = time.monotonic() + _DEADLINE
    while process.poll() is None and time.monotonic() < give_up:
        if file.exists() and file.read_bytes().count(b"\n") >= wanted:
            return
        time.sleep(0.002)
    if process.poll() is None:
        raise OpenCDAError(f"{path} has not {wanted} episodes after {_DEADLINE:g} s", fix=f"see {path}.log")


def differing_runs(left: Path, right: Path) -> tuple[list[str], dict[str, int]]:
    """Every difference between two finished runs, and how much was compared.

    Args:
        left: run folder.
        right: run folder.

    Returns:
        differences (empty: exact), {tensors, numbers, replay_rows, values, episodes, metrics, gradient_steps}; the last
        one tells whether anything was learned that could have differed.

    Raises:
        CheckpointError: one of them has no whole checkpoint.
    """
    first, second = (Checkpoints(path / "checkpoints").load("latest") for path in (left, right))
    episodes = [read_episodes(path) for path in (left, right)]
    metrics = [read_metrics(path) for path in (left, right)]
    differences = differing_states(first.state, second.state)
    differences += differing_values(first.extra, second.extra, "run")
    differences += differing_fields(*episodes)
    differences += differing_fields(*metrics, what="metrics of episode")
    compared = {
        "tensors": len(first.state.tensors),
        "numbers": sum(int(array.size) for array in first.state.tensors.values()),
        "replay_rows": len(_replay_of(first.state.segments).get("number", ())),
        "values": len(_leaves(first.state.values)) + len(_leaves(first.extra)),
        "episodes": len(episodes[0]),
        "metrics": len(metrics[0]),
        "gradient_steps": int(episodes[0][-1].get("training_step", 0)) if episodes[0] else 0,
    }
    return differences, compared


def differing_states(left: LearnerState, right: LearnerState) -> list[str]:
    """Every difference between two learners: type, shape and each bit of each tensor, and each value.

    Raises:
        CheckpointError: rows of a replay cannot be read.
    """
    found = _differing_arrays(left.tensors, right.tensors, "tensor")
    found += _differing_arrays(_replay_of(left.segments), _replay_of(right.segments), "replay column")
    return found + differing_values(left.values, right.values, "learner")


def _differing_arrays(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], what: str) -> list[str]:
    found = []
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            found.append(f"{what} {name}: only one run has it")
            continue
        one, other = left[name], right[name]
        if one.dtype != other.dtype or one.shape != other.shape:
            found.append(f"{what} {name}: {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}")
        elif one.tobytes() != other.tobytes():
            found.append(f"{what} {name}: {_how_far(one, other)}")
    return found


def _replay_of(segments: Sequence[Segment]) -> dict[str, np.ndarray]:
    """What all pieces of a replay give: each row once, as the last piece that has it; in the order of their numbers."""
    pieces = [segment.read() for segment in reversed(segments)]
    if not pieces:
        return {}
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    _, newest = np.unique(columns["number"], return_index=True)
    return {name: array[newest] for name, array in columns.items()}


def differing_values(left: Mapping[str, Any], right: Mapping[str, Any], what: str) -> list[str]:
    """Every difference between two trees of JSON values, timing left out."""
    one, other = _leaves(left), _leaves(right)
    found = []
    for key in sorted(one.keys() | other.keys()):
        if key not in one or key not in other:
            found.append(f"{what} value {key}: only one run has it")
        elif one[key] != other[key]:
            found.append(f"{what} value {key}: {one[key]} and {other[key]}")
    return found


def _leaves(tree: Any, path: str = "") -> dict[str, str]:
    """Leaves by path, each as text that keeps type and every bit."""
    if isinstance(tree, Mapping):
        pairs = [(str(key), value) for key, value in tree.items() if key not in TIMING_FIELDS]
    elif isinstance(tree, list | tuple):
        pairs = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {path: repr(tree)}
    found: dict[str, str] = {path or "(all)": f"{len(pairs)} entries"}
    for key, value in pairs:
        found.update(_leaves(value, f"{path}.{key}" if path else key))
    return found


def _how_far(one: np.ndarray, other: np.ndarray) -> str:
    unequal = one != other
    count = int(np.count_nonzero(unequal))
    if count == 0 or one.dtype.kind not in "fiu":
        return f"{count} of {one.size} numbers differ" if count else "its bits differ (NaN or the sign of zero)"
    far = float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))
    return f"{count} of {one.size} numbers differ, by at most {far:.3g}"
