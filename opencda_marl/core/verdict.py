"""Does a policy beat simple drivers on the same traffic? Two questions, each beyond chance, and the answer in words.

1. Do fewer of its vehicles crash (collided / ended)?
2. Do more of its vehicles get through (arrived / scheduled, so that who waits or stands for ever counts against it)?

It beats a driver if one answer is yes and the other is not no. A difference is beyond chance if fewer than 1 in 20 of
all ways to swap the two drivers' episodes make one as large (an exact permutation test over paired episodes).
Delay is told beside, and decides nothing: who crashes early is never late. Where more get through and more crashes were
seen, if not beyond chance, the words say just that instead of `beats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opencda_marl.core.speech import counted, number, percent
from opencda_marl.core.statistics import paired_difference

__all__ = ["RIVALS", "RIVAL_NAMES", "compare", "in_words", "judge"]

RIVALS = ("random", "full_speed", "priority")
"""Drivers that a policy worth its name beats."""

_FEW = 1000  # vehicles
_CHANCE = 0.05  # p of a difference that counts
_LEAST_EPISODES = 6  # 2 / 2^5 is above `_CHANCE`: with fewer, no difference counts
_LEAST_ENDED = 100  # vehicles of each: the crash rate of fewer is told apart from none
_RARE = 50  # vehicles that crashed: below it they are counted, not only told in percent


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """One policy beside one controller at one density.

    Args:
        ours: an evaluation, with `per_episode`.
        theirs: of the same seeds and density.

    Returns:
        rival, rate_vph, verdict (`beats`, `worse`, `mixed`, `equal`; `unknown`: too few episodes to tell), vehicles,
        episodes; p_crash and p_through (how often chance alone makes such a difference); crashed ([collided, ended]),
        collision_rate, through and delay of both; JSON values.

    Raises:
        ValueError: it was not the same traffic.
    """
    same = [[(row["seed"], row["scheduled"]) for row in one["per_episode"]] for one in (ours, theirs)]
    if same[0] != same[1] or ours["rate_vph"] != theirs["rate_vph"]:
        raise ValueError(f"{ours['policy']} and {theirs['policy']} did not drive the same traffic")
    both = (ours["per_episode"], theirs["per_episode"])
    crashed = [np.array([[r["collided"], r["arrived"] + r["collided"] + r["removed"]] for r in rows]) for rows in both]
    through = [np.array([[r["arrived"], r["scheduled"]] for r in rows]) for rows in both]
    (apart, p_crash), (gained, p_through) = paired_difference(*crashed), paired_difference(*through)
    if min(counts[:, 1].sum() for counts in crashed) < _LEAST_ENDED:
        p_crash = 1.0  # a driver that stands still is not safe because nobody of the few that ended crashed
    safer, more = _sign(-apart, p_crash), _sign(gained, p_through)
    neither = "equal" if len(both[0]) >= _LEAST_EPISODES else "unknown"
    found = {(True, True): "mixed", (True, False): "beats", (False, True): "worse", (False, False): neither}
    return {
        "rival": theirs["policy"],
        "rate_vph": ours["rate_vph"],
        "verdict": found[(max(safer, more) > 0, min(safer, more) < 0)],
        "safer": safer,
        "more_through": more,
        "vehicles": ours["vehicles"],
        "episodes": len(both[0]),
        "p_crash": round(p_crash, 6),
        "p_through": round(p_through, 6),
        "crashed": [[int(count) for count in counts.sum(axis=0)] for counts in crashed],
        "collision_rate": [one["collision_rate"] for one in (ours, theirs)],
        "through": [_share(counts) for counts in through],
        "mean_delay_s": [one["mean_delay_s"] for one in (ours, theirs)],
    }


def _sign(difference: float, p: float) -> int:
    """1, -1, or 0: cannot be told from chance."""
    return 0 if p >= _CHANCE else int(difference > 0.0) - int(difference < 0.0)


def _share(counts: np.ndarray) -> float | None:
    hits, of = counts.sum(axis=0)
    return float(hits / of) if of else None


def judge(rows: Sequence[Mapping[str, Any]], policy: str, rivals: Sequence[str] = RIVALS) -> list[dict[str, Any]]:
    """Every comparison that a table of evaluations allows, rival by rival.

    Args:
        rows: evaluations with `policy`, `rate_vph` and `per_episode`.
        policy: name of the row(s) to judge.
        rivals: names to look for.
    """
    ours = {str(row["rate_vph"]): row for row in rows if row["policy"] == policy}
    theirs = [row for rival in rivals for row in rows if row["policy"] == rival and str(row["rate_vph"]) in ours]
    return [compare(ours[str(row["rate_vph"])], row) for row in theirs]


_HEADS = {
    "beats": "beats",
    "worse": "does NOT beat",
    "mixed": "does NOT beat",
    "equal": "is not told apart from",
    "unknown": "is not told apart from",
}
RIVAL_NAMES = {"random": "random driving", "full_speed": "full speed", "priority": "SUMO's priority rule"}
"""What they are called in sentences."""


def in_words(found: Sequence[Mapping[str, Any]], rivals: Sequence[str] = RIVALS) -> list[str]:
    """A plain sentence a comparison, and one for what was not compared.

    Args:
        found: what `judge` returned.
        rivals: those that should be in it.
    """
    driven = [one for one in found if one["vehicles"]]
    lines = [_sentence(one) for one in driven]
    if len(driven) < len(found):
        lines.append("nothing to compare where nobody arrived or crashed: episodes are too short for that (max_steps)")
    missing = [RIVAL_NAMES.get(name, name) for name in rivals if name not in {one["rival"] for one in found}]
    if missing:
        lines.append(f"not compared with {', '.join(missing)}")
    if driven and min(one["vehicles"] for one in driven) < _FEW:
        least = min(one["vehicles"] for one in driven)
        points = round(100.0 / least**0.5)  # two standard errors of a rate of a half
        lines.append(f"(only {counted(least, 'vehicle')}: rates are known to some {points} points at the worst)")
    if driven and min(one["episodes"] for one in driven) < _LEAST_EPISODES:
        least = min(one["episodes"] for one in driven)
        lines.append(
            f"(only {counted(least, 'episode')}: chance alone could make any of these differences; "
            f"it takes {_LEAST_EPISODES} at least to tell two drivers apart, e.g. --seeds 9000:9030)"
        )
    return lines


def _sentence(one: Mapping[str, Any]) -> str:
    crashed, through, delay = one["collision_rate"], one["through"], one["mean_delay_s"]
    density = one["rate_vph"]
    at = " to ".join(f"{rate:g}" for rate in density) if isinstance(density, list) else f"{density:g}"
    name = RIVAL_NAMES.get(one["rival"], one["rival"])
    on = f" on {counted(one['vehicles'], 'vehicle')}" if one["verdict"] in ("equal", "unknown") else ""
    few = max(count for count, _ in one["crashed"]) < _RARE
    (mine, of), (its, among) = one["crashed"]
    doubtful = one["verdict"] == "beats" and one["safer"] == 0 and mine * among > its * of
    head = "gets more through than" if doubtful else _HEADS[one["verdict"]]
    safety = _word(one["safer"], "fewer crash", "MORE crash")
    if doubtful:
        safety = "perhaps more crash"
    elif mine == its == 0:
        safety = "nobody crashes"
    counts = " against ".join(f"{count:,} of {ended:,}" for count, ended in one["crashed"])
    return (
        f"{head} {name} at {at} vph{on}: {safety} "
        f"({f'{counts}: ' if few else ''}{percent(crashed[0])} against {percent(crashed[1])} %), "
        f"{_word(one['more_through'], 'more get through', 'FEWER get through')} "
        f"({percent(through[0])} against {percent(through[1])} %), "
        f"delay {number(delay[0])} against {number(delay[1])} s"
    )


def _word(sign: int, better: str, worse: str) -> str:
    if sign == 0:
        return f"no sure difference in who {'crashes' if 'crash' in better else 'gets through'}"
    return better if sign > 0 else worse
