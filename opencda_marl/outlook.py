"""What a run says that it is going to do, and in the end how much of it was done."""

from __future__ import annotations

import math
from pathlib import Path

from opencda_marl.core.files import typed
from opencda_marl.core.machine import cores
from opencda_marl.core.speech import about, amount, counted
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import WITH_SERVER, DemandSettings

__all__ = ["densities", "identity", "plan", "stopped_by_the_clock", "table_episodes", "table_seconds", "used_up"]

_STEP = 0.6e-3  # [s] of a core for a step of held-out traffic; the bundled crossing at 300 vehicles/h/lane


def plan(settings: RunSettings, *, done: int = 0, table: bool) -> str:
    """One line: until when it trains, on what traffic, and what comes then.

    Args:
        settings: of the run.
        done: episodes that were done before.
        table: does a table of held-out traffic follow?
    """
    length = f"{settings.max_steps * settings.simulator.step_length:g} s"
    budgets = [
        *([] if settings.max_episodes is None else [f"{counted(settings.max_episodes, 'episode')} of {length}"]),
        *([] if settings.max_env_steps is None else [counted(settings.max_env_steps, "step")]),
        *([] if settings.max_minutes is None else [f"{_minutes(settings.max_minutes)} of training"]),
    ]
    said = " or ".join(budgets) + (", whichever comes first" if len(budgets) > 1 else "")
    if settings.max_episodes is None:
        said += f", in episodes of {length}"
    if done:
        said += f"; {counted(done, 'episode')} of it done before"
    said += f"; {densities(settings.demand)}"
    if not table:
        return said
    takes = table_seconds(settings)
    return f"{said}; then a table of held-out traffic ({about(takes) if takes is not None else 'on the server'})"


def densities(demand: DemandSettings) -> str:
    """How the density of an episode comes about, in words."""
    rates, unit = demand.rate_vph, "vehicles per hour and lane"
    if not isinstance(rates, list):
        return f"{rates:g} {unit}"
    if demand.rate_draw == "choice":
        *others, last = [f"{rate:g}" for rate in rates]
        if not others:
            return f"{last} {unit}"
        return f"{', '.join(others)} or {last} {unit}, one of these drawn for each episode"
    low, high = rates
    grows = demand.ramp > 0
    ramp = f", at first up to {max(low, demand.ramp_from):g}" if grows else ""
    comes = "drawn anew for each episode" if demand.rate_draw == "range" else "evenly spread over the episodes"
    return f"{low:g} to {high:g} {unit}, {comes}{ramp}"


def table_episodes(settings: RunSettings) -> int:
    """Episodes behind the final table: of the policy, of each controller, and those that choose a checkpoint."""
    chosen = settings.evaluation
    drivers = 1 + len(chosen.controllers)
    return len(chosen.rates_vph) * (drivers * len(range(*chosen.seeds)) + 2 * len(range(*chosen.selection_seeds)))


def table_seconds(settings: RunSettings) -> float | None:
    """About how long the final table takes, [s]; None with a CARLA server, whose pace nobody knows."""
    if settings.simulator.backend in WITH_SERVER:
        return None
    at_once = max(1, min(cores(), 1 + len(settings.evaluation.controllers)))
    return table_episodes(settings) * settings.max_steps * _STEP / at_once


def identity(settings: RunSettings) -> str:
    """What can be said in advance of a second run of these settings."""
    if settings.max_episodes is None and settings.max_env_steps is None:
        return "max_minutes alone steers the learning rate here: two runs differ, because clocks do"
    equal = "two runs of this config, with the same update_mode, workers and threads, are equal bit for bit"
    return equal if settings.max_minutes is None else f"{equal}, as far as max_minutes lets both of them go"


def stopped_by_the_clock(settings: RunSettings, episodes: int, env_steps: int) -> str:
    """How much of its plan a run had done when `max_minutes` ended it."""
    limits = _counts(settings, episodes, env_steps)
    unit, done, limit = max(limits, key=lambda one: one[1] / one[2]) if limits else ("episode", episodes, None)
    of = f"{amount(done)} of {counted(limit, unit)}" if limit is not None else counted(done, unit)
    return f"stopped by max_minutes={settings.max_minutes:g} after {of}"


def used_up(
    settings: RunSettings, run: Path, episodes: int, env_steps: int, seconds: float, *, by_clock: bool, nothing: bool
) -> str:
    """That a run is over though a person may not expect it, and the command that trains longer.

    The command raises each limit that was reached, to more than what is done: another one would change nothing.

    Args:
        settings: of the run.
        run: its folder.
        episodes: done.
        env_steps: done.
        seconds: of training, done.
        by_clock: was it `max_minutes` that ended it?
        nothing: was the budget used up before anything was trained?
    """
    reached = [one for one in _counts(settings, episodes, env_steps) if one[1] >= one[2]]
    said = [counted(done, unit) for unit, done, _ in reached]
    more = [
        f"max_{'env_steps' if unit == 'step' else 'episodes'}={_more(limit, done)}" for unit, done, limit in reached
    ]
    minutes = settings.max_minutes
    if minutes is not None and (by_clock or seconds / 60.0 / minutes >= 1.0):
        spent = float(f"{seconds / 60.0:.3g}")
        said.append(f"{_minutes(spent)} of training")
        more.append(f"max_minutes={_more(minutes, spent)}")
    told = stopped_by_the_clock(settings, episodes, env_steps) if by_clock else " and ".join(said)
    if nothing:
        told = f"nothing was trained, the budget is used up: {told}"
    return f"{told}; to train longer: opencda-marl run --resume {typed(run)} {' '.join(more)}"


def _counts(settings: RunSettings, episodes: int, env_steps: int) -> list[tuple[str, int, int]]:
    """Of each limit of a count: its unit, how much is done, the limit."""
    limits = (("episode", episodes, settings.max_episodes), ("step", env_steps, settings.max_env_steps))
    return [(unit, done, limit) for unit, done, limit in limits if limit is not None]


def _more(limit: float, done: float) -> int:
    """A limit that trains longer, rounded up to two digits: three times the present one, or twice what is done."""
    wanted = max(1, math.ceil(3 * limit), math.ceil(2 * done))
    unit = int(10 ** max(0, len(str(wanted)) - 2))
    return -(-wanted // unit) * unit


def _minutes(value: float) -> str:
    if value < 1.0 / 60.0:
        return "less than a second"
    return "1 minute" if value == 1.0 else f"{amount(value)} minutes"
