"""One episode under cProfile, and whether its numbers can be trusted.

Three runs of nothing but one episode would be too many; two do. The first runs plainly, the second under
`python -m cProfile`, as a person would type it. Their episode lines must be the same bit for bit, timing left
out: profiling changed nothing. Against an older profile, what moved everywhere by one factor is named as another
process's doing (see `tools.drift`).
"""

from __future__ import annotations

import pstats
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import require_empty
from opencda_marl.core.run_folder import read_episodes
from opencda_marl.core.spans import SPANS
from opencda_marl.tools.child_runs import ChildRun, differing_fields, sum_up
from opencda_marl.tools.drift import LOOP, compare, read_costs, shares_of_the_loop, short_path
from opencda_marl.tools.measure import Load
from opencda_marl.tools.short_runs import learn_within

__all__ = ["profile", "proportions"]

_DEADLINE = 1800.0  # [s] of one run
_LISTED = 30  # functions in the table


def profile(
    name: str,
    *,
    folder: Path,
    config_root: Path | None = None,
    overrides: Sequence[str] = (),
    against: Path | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Profile one episode of a profile.

    Args:
        name: of the profile.
        folder: new or empty; gets `profile.pstats`, `profile.json` (what is returned) and what the runs said.
        config_root: folder of profiles; None: the bundled one.
        overrides: `key.sub=value`.
        against: an older `.pstats` file of the same profile.
        keep: leave both run folders in `folder`; they stay as well when a run failed or the two differ.

    Returns:
        {identical_summary, differences, ms_per_step, spans, span_ms, unaccounted_share, unprofiled, functions,
        pstats, against, load, …}: `spans` are shares of the episode's time, which with `unaccounted_share` sum to 1;
        times without further word are under cProfile, those in `unprofiled` are not.

    Raises:
        OpenCDAError: a run failed, or `against` is no profile.
        StorageError: the folder holds something.
    """
    require_empty(folder)
    before = read_costs(against) if against is not None else None
    short = _one_episode(name, config_root, overrides)
    plain = ChildRun(name, folder, "plain", config_root, short)
    traced = ChildRun(name, folder, "profiled", config_root, short)
    pstats_file = folder / "profile.pstats"
    with Load() as load:
        plain.finish(plain.start(), deadline=_DEADLINE)
        traced.finish(traced.start(pstats=pstats_file), deadline=_DEADLINE)
    lines = [read_episodes(run.path) for run in (plain, traced)]
    if not all(lines):
        raise OpenCDAError("the run wrote no episode line", fix=f"see {traced.path}")
    differences = differing_fields(*lines)
    answer = {
        "what": "profile",
        "profile": name,
        "identical_summary": not differences,
        "differences": differences,
        **proportions(lines[1][-1]),
        "unprofiled": proportions(lines[0][-1]),
        "functions": _dearest(pstats_file),
        "pstats": str(pstats_file),
        "against": None if before is None else compare(before, read_costs(pstats_file)),
        **load.report(),
    }
    sum_up(folder / "profile.json", answer, () if keep or differences else (plain, traced))
    return answer


def proportions(line: Mapping[str, Any]) -> dict[str, Any]:
    """Where an episode's time went.

    Args:
        line: of episodes.jsonl; `spans` in seconds, `wall_s`, `steps`.

    Returns:
        {steps, ms_per_step, spans, span_ms, unaccounted_share}
    """
    wall, steps = float(line["wall_s"]), int(line["steps"])
    seconds = {span: float(line["spans"].get(span, 0.0)) for span in (*SPANS, *sorted(line["spans"].keys() - {*SPANS}))}
    return {
        "steps": steps,
        "ms_per_step": round(wall * 1000.0 / steps, 4),
        "spans": {span: round(value / wall, 4) for span, value in seconds.items()},
        "span_ms": {span: round(value * 1000.0 / steps, 4) for span, value in seconds.items()},
        "unaccounted_share": round(1.0 - sum(seconds.values()) / wall, 4),
    }


def _one_episode(name: str, config_root: Path | None, overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides for one episode, in this process, that holds its share of learning.

    An update comes at the first common decision when it is due, and steps count from the first vehicle on: the last
    twentieth of the episode makes sure of that moment.
    """
    from opencda_marl.config import load_profile

    settings = load_profile(name, config_root=config_root, overrides=overrides).settings
    slack = max(10 * settings.decision_interval, settings.max_steps // 20)
    return (
        *overrides,
        "max_episodes=1",
        "workers=1",
        "max_env_steps=null",
        "max_minutes=null",
        "evaluation.final=false",
        "eval_every=0",
        *learn_within(settings.learner, settings.max_steps - slack, settings.decision_interval),
    )


def _dearest(file: Path) -> list[dict[str, Any]]:
    """The functions that cost most in their own lines, as far as the loop called them."""
    entries = cast(Any, pstats.Stats(str(file))).stats  # documented, but not in the stubs
    shares = shares_of_the_loop(entries)
    rows = []
    for (path, number, function), (_, calls, own, cumulative, callers) in entries.items():
        if function != LOOP:
            calls, own, cumulative = (
                sum(shares[caller] * edge[index] for caller, edge in callers.items()) for index in (1, 2, 3)
            )
        rows.append(
            {
                "function": function if path == "~" else f"{short_path(path)}:{number}({function})",
                "calls": round(calls),
                "own_s": round(own, 4),
                "cumulative_s": round(cumulative, 4),
            }
        )
    total = sum(row["own_s"] for row in rows) or 1.0
    rows.sort(key=lambda row: row["own_s"], reverse=True)
    return [{**row, "own_share": round(row["own_s"] / total, 4)} for row in rows[:_LISTED]]
