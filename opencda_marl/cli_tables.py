"""Settings that hold names, and where the names are listed. Listing imports nothing."""

from __future__ import annotations

from opencda_marl.core.tables import Table

__all__ = ["name_tables"]


def name_tables() -> dict[str, Table]:
    """Key of a setting -> the table that its value (or each of its names) must be in."""
    from opencda_marl.env import CONTROLLERS, OBSERVATIONS, REWARDS
    from opencda_marl.learners import LEARNERS
    from opencda_marl.nn import ENCODERS

    return {
        "algorithm": LEARNERS,
        "context.encoder": ENCODERS,
        "evaluation.controllers": CONTROLLERS,
        "reward.weights": REWARDS,
        "observation": OBSERVATIONS,
    }
