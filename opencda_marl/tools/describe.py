"""What a vehicle of a profile sees, does and is rewarded for, with units; nothing is simulated."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from opencda_marl.settings.run import RunSettings

__all__ = ["describe"]

_ACTIONS = {
    "target_speed": ("share of the envelope: -1 is standing, 1 is as fast as limits and braking allow", "m/s"),
    "acceleration": ("-1 is full braking, 1 is full acceleration; never above the envelope", "m/s^2"),
    "levels": ("one of the listed shares of the envelope", "m/s"),
}


def describe(settings: RunSettings) -> dict[str, Any]:
    """The tables behind `opencda-marl describe`.

    Args:
        settings: of a run.

    Returns:
        {observation: {name, version, ego, neighbour, max_neighbours}, action: {…}, rewards: [{name, …}]}

    Raises:
        ConfigError: an observation or reward part is not there, or the network is no crossing.
    """
    from opencda_marl.assemble import make_roads
    from opencda_marl.core.conflicts import conflict_zones
    from opencda_marl.env import OBSERVATIONS, REWARDS
    from opencda_marl.env.command import action_spec

    roads = make_roads(settings)
    spec = OBSERVATIONS.load(settings.observation)(settings, roads, conflict_zones(roads)).spec
    action = action_spec(settings)
    about, unit = _ACTIONS[action.kind]
    seconds = settings.decision_interval * settings.simulator.step_length  # [s]
    parts = [(name, weight, REWARDS.load(name)) for name, weight in settings.reward.weights.items() if weight]
    return {
        "observation": asdict(spec),
        "action": {
            "kind": action.kind,
            "unit": unit,
            "meaning": about,
            "levels": list(action.levels),
            "decided": f"every {settings.decision_interval} steps ({seconds:g} s), and when a vehicle enters",
        },
        "rewards": [
            {"name": name, "objective": part.objective, "unit": part.unit, "weight": weight, "about": part.about}
            for name, weight, part in parts
        ],
        "team": asdict(settings.reward.team),
        "discount_per_second": settings.discount_per_second,
    }
