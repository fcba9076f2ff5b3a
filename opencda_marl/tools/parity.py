"""The same traffic and the same policy in SUMO and in CARLA, laid over each other.

An error of a frame (a sign, an offset, an angle) shows as metres at once: each place of a vehicle in CARLA is compared
with its place in SUMO *at the same progress along its route*, where speeds do not matter. What follows from other
dynamics shows at the same time, in arrivals, and in what is earned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from safetensors.numpy import load_file

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.files import require_writable
from opencda_marl.core.frames import wrap
from opencda_marl.core.state import Ending, Field
from opencda_marl.evaluate import evaluate
from opencda_marl.plots import parity_plot
from opencda_marl.settings.run import RunSettings

__all__ = ["compare", "parity"]

FRAME = 1.0
"""[m] between the places at the same progress, for 95 of 100 samples: more is no matter of dynamics."""

_TURNED = 15.0  # [deg] likewise
_PLACES = (Field.X, Field.Y, Field.HEADING, Field.SPEED, Field.PROGRESS)

Tracks = Mapping[str, np.ndarray]
"""As `env.trajectory()` gives them."""


def parity(
    policy: str,
    settings: RunSettings,
    *,
    folder: Path,
    profile: str | None = None,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Drive one held-out episode in both, and compare.

    Args:
        policy: a run, checkpoint or controller.
        settings: of the profile; its backend is replaced.
        folder: for tracks and the plot.
        profile: its name, for the record.
        seed: of the traffic; None: the first of `evaluation.seeds`.
        progress: hears which simulator drives.

    Returns:
        figures of both, differences, and whether the frames agree.

    Raises:
        ConfigError: nobody drove in both.
        SimulatorError, CheckpointError, …: as `evaluate`.
    """
    chosen = settings.evaluation.seeds[0] if seed is None else seed
    figures: dict[str, dict[str, Any]] = {}
    tracks: dict[str, Tracks] = {}
    require_writable(folder)
    backends = {
        "sumo": replace(settings.simulator, backend="auto"),
        "carla": replace(settings.simulator, backend="carla"),
    }
    for name, simulator in backends.items():
        progress(name)
        file = folder / f"{name}.safetensors"
        there = replace(settings, simulator=simulator, eval_every=0)
        seeds = range(chosen, chosen + 1)
        figures[name] = evaluate(policy, settings=there, profile=profile, seeds=seeds, trajectory=file)
        tracks[name] = load_file(file)
    dt = settings.simulator.step_length
    found = compare(tracks["sumo"], tracks["carla"], dt)
    title = f"{policy}, seed {chosen}: SUMO and CARLA"
    plot = parity_plot(tracks["sumo"], tracks["carla"], found.pop("errors"), dt, title, folder / "parity.png")
    shown = (
        "vehicles",
        "success_rate",
        "collision_rate",
        "mean_delay_s",
        "mean_travel_time_s",
        "overridden_share",
        "return",
    )
    return {
        "policy": policy,
        "profile": profile,
        "seed": chosen,
        **found,
        "figures": {name: {key: answer[key] for key in shown} for name, answer in figures.items()},
        "plot": str(plot),
    }


def compare(sumo: Tracks, carla: Tracks, step_length: float) -> dict[str, Any]:
    """What differs between the tracks of the same vehicles.

    Args:
        sumo, carla: of one episode each.
        step_length: [s]

    Returns:
        `place_m`, `heading_deg`, `speed_ms` and `time_s` at the same progress, `place_at_time_m`, `departure_s`,
        `reward` of the decisions that ended in the same step: median, 95th percentile and largest of the absolute
        differences; arrivals and crashes of both; `frames_agree`; and `errors`, arrays for the plot (progress, place,
        and step, reward).

    Raises:
        ConfigError: no vehicle drove in both.
    """
    differences: dict[str, list[Float64[np.ndarray, " samples"]]] = {}
    along: list[Float64[np.ndarray, " samples"]] = []
    both = np.intersect1d(sumo.get("id", np.zeros(0)), carla.get("id", np.zeros(0)))
    for identity in both.tolist():
        one, other = _track(sumo, identity, step_length), _track(carla, identity, step_length)
        if len(one) < 2 or len(other) < 2:
            continue
        for name, values in _apart(one, other).items():
            differences.setdefault(name, []).append(values)
        along.append(_within(one, other)[:, 4])
    if not along:
        raise ConfigError(
            "no vehicle drove in both simulators", fix="raise max_steps or demand.rate_vph, or choose another --seed"
        )
    joined = {name: np.concatenate(values) for name, values in differences.items()}
    steps, joined["reward"] = _rewards_apart(sumo, carla)
    spread = {name: _spread(np.abs(values)) for name, values in joined.items()}
    agree = spread["place_m"]["p95"] < FRAME and spread["heading_deg"]["p95"] < _TURNED
    return {
        "compared": len(along),
        "frames_agree": agree,
        **spread,
        "ends": {"sumo": _ends(sumo), "carla": _ends(carla)},
        "errors": {
            "progress": np.concatenate(along),
            "place": joined["place_m"],
            "step": steps,
            "reward": joined["reward"],
        },
    }


def _track(tracks: Tracks, identity: int, step_length: float) -> Float64[np.ndarray, "steps 6"]:
    """x, y, heading, speed, progress, time of one vehicle, as long as it moves on (the last of standing samples)."""
    mine = tracks["id"] == identity
    rows = np.column_stack([tracks["values"][mine][:, _PLACES].astype(np.float64), tracks["step"][mine] * step_length])
    rows[:, 2] = np.unwrap(rows[:, 2])
    ahead = np.append(np.diff(rows[:, 4]) > 1e-6, True)
    moving: Float64[np.ndarray, "steps 6"] = rows[ahead]
    return moving


def _within(
    one: Float64[np.ndarray, "steps 6"], other: Float64[np.ndarray, "steps 6"]
) -> Float64[np.ndarray, "steps 6"]:
    """Samples of the other whose progress the first one has reached, too."""
    inside: Float64[np.ndarray, "steps 6"] = other[(other[:, 4] >= one[0, 4]) & (other[:, 4] <= one[-1, 4])]
    return inside


def _apart(
    one: Float64[np.ndarray, "steps 6"], other: Float64[np.ndarray, "steps 6"]
) -> dict[str, Float64[np.ndarray, " samples"]]:
    there = _within(one, other)
    here = np.column_stack([np.interp(there[:, 4], one[:, 4], one[:, column]) for column in range(6)])
    both = (other[:, 5] >= one[0, 5]) & (other[:, 5] <= one[-1, 5])
    then = np.column_stack([np.interp(other[both, 5], one[:, 5], one[:, column]) for column in range(2)])
    return {
        "place_m": np.hypot(*(there[:, :2] - here[:, :2]).T),
        "heading_deg": np.degrees(wrap(there[:, 2] - here[:, 2])),
        "speed_ms": there[:, 3] - here[:, 3],
        "time_s": (there[:, 5] - other[0, 5]) - (here[:, 5] - one[0, 5]),
        "place_at_time_m": np.hypot(*(other[both, :2] - then).T),
        "departure_s": np.array([other[0, 5] - one[0, 5]]),
    }


def _rewards_apart(
    sumo: Tracks, carla: Tracks
) -> tuple[Int64[np.ndarray, " decisions"], Float64[np.ndarray, " decisions"]]:
    """Of decisions of one vehicle that ended in one step in both: that step, and how much more CARLA gave."""
    (one, earned), (other, earned_there) = _earned(sumo), _earned(carla)
    same, here, there = np.intersect1d(one, other, return_indices=True)
    return same >> 32, earned_there[there] - earned[here]


def _earned(tracks: Tracks) -> tuple[Int64[np.ndarray, " decisions"], Float64[np.ndarray, " decisions"]]:
    """Step and vehicle of each decision as one number, and the sum of what it brought."""
    keys = (tracks["reward_step"].astype(np.int64) << 32) + tracks["reward_id"]
    return keys, tracks["reward"].sum(-1, dtype=np.float64)


def _spread(values: Float64[np.ndarray, " samples"]) -> dict[str, float]:
    if not len(values):
        return {"median": 0.0, "p95": 0.0, "max": 0.0}
    median, late = np.percentile(values, [50, 95]).tolist()
    return {"median": median, "p95": late, "max": float(values.max())}


def _ends(tracks: Tracks) -> dict[str, int]:
    endings = tracks["end_ending"]
    return {ending.name.lower(): int((endings == ending).sum()) for ending in Ending}
