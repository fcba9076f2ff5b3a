"""Weights of the objectives, one vector per vehicle, held for its life."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.objectives import OBJECTIVES, scalarise
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.settings.learning import PreferenceSettings

__all__ = ["Preferences", "draw_preferences", "mix_advantages", "simplex_grid"]


def simplex_grid(divisions: int, components: int = len(OBJECTIVES)) -> Float64[np.ndarray, "points components"]:
    """All vectors of multiples of 1 / divisions that sum to 1, in lexical order."""
    bars = combinations(range(divisions + components - 1), components - 1)
    edges = np.array([(-1, *bar, divisions + components - 1) for bar in bars])
    return (np.diff(edges, axis=1) - 1) / divisions


def draw_preferences(
    settings: PreferenceSettings, rng: np.random.Generator, count: int
) -> Float32[np.ndarray, "count objectives"]:
    """From the Dirichlet distribution of `preference.concentration`, whatever the source."""
    alphas = np.broadcast_to(np.asarray(settings.concentration, np.float64), (len(OBJECTIVES),))
    return np.asarray(rng.dirichlet(alphas, count), np.float32)


class Preferences:
    """Who weighs what.

    Args:
        settings: source and its parameters.
        seed: of the run.
        path: further coordinates of the generator, see `core.seeds.generator`.

    Raises:
        ConfigError: `preference.fixed` is no point of the simplex.
    """

    def __init__(self, settings: PreferenceSettings, seed: int, *path: int) -> None:
        fixed = np.asarray(settings.fixed, np.float64)
        if fixed.shape != (len(OBJECTIVES),) or abs(fixed.sum() - 1.0) > 1e-6:
            raise ConfigError(
                f"preference.fixed {list(settings.fixed)} must be {len(OBJECTIVES)} weights "
                f"({', '.join(OBJECTIVES)}) that sum to 1"
            )
        self._settings = settings
        self._fixed = fixed.astype(np.float32)
        self._grid = simplex_grid(settings.divisions).astype(np.float32)
        self._rng = generator(seed, Branch.PREFERENCE, *path)
        self._dealt = 0  # points of the grid given out so far
        self._ids = np.zeros(0, np.int64)
        self._held = np.zeros((0, len(OBJECTIVES)), np.float32)
        self._asked, self._told = b"", self._held  # the last answer: from step to step the same vehicles ask, and twice

    def of(self, ids: Int64[np.ndarray, " rows"], *, explore: bool) -> Float32[np.ndarray, "rows objectives"]:
        """The preference of each vehicle, drawn at its first sight.

        `sampled` is for training: without `explore` everybody has `preference.fixed`.
        """
        source = self._settings.source
        if source == "fixed" or (source == "sampled" and not explore):
            return np.tile(self._fixed, (len(ids), 1))
        asked = ids.tobytes()
        if asked == self._asked:
            return self._told
        at, known = self._find(ids)
        if not known.all():
            together = np.concatenate([self._ids, ids[~known]])
            order = np.argsort(together)
            self._held = np.concatenate([self._held, self._draw(int((~known).sum()))])[order]
            self._ids = together[order]
            at, _ = self._find(ids)
        self._asked, self._told = asked, np.asarray(self._held[at])
        return self._told

    def _find(self, ids: Int64[np.ndarray, " rows"]) -> tuple[Int64[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
        """Where each vehicle stands among those known, and whether it does; `_ids` ascend."""
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return at, self._ids[at] == ids

    def forget(self, ids: Int64[np.ndarray, " ended"]) -> None:
        """These vehicles have ended; their ids never come back."""
        if not len(ids):
            return
        self._asked, self._told = b"", self._held[:0]
        kept = ~np.isin(self._ids, ids)
        self._ids, self._held = self._ids[kept], self._held[kept]

    def _draw(self, count: int) -> Float32[np.ndarray, "count objectives"]:
        if self._settings.source == "sampled":
            return draw_preferences(self._settings, self._rng, count)
        index = (self._dealt + np.arange(count)) % len(self._grid)
        self._dealt += count
        return np.asarray(self._grid[index])

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Tensors and values, for a checkpoint."""
        tensors: dict[str, np.ndarray] = {"preference.ids": self._ids.copy(), "preference.held": self._held.copy()}
        return tensors, {"dealt": self._dealt, "generator": generator_state(self._rng)}

    def load(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Become what `state` returned."""
        self._ids, self._held = tensors["preference.ids"].copy(), tensors["preference.held"].copy()
        self._asked, self._told = b"", self._held[:0]
        self._dealt = int(values["dealt"])
        self._rng = generator_from_state(values["generator"])


def mix_advantages(
    advantages: Float64[np.ndarray, "rows components"],
    rewards: Float64[np.ndarray, "rows components"],
    preference: Float[np.ndarray, "rows objectives"] | None,
    weights: PreferenceSettings,
) -> Float64[np.ndarray, " rows"]:
    """One advantage per row: components weighed against each other, and the mix normalised over the rows.

    With `preference.scaling: component` each component is first divided by its own spread. A component without
    any reward is left out: its advantages are the critic's noise, and would be made as loud as the others.

    Args:
        advantages: of each component; the team's comes first when there is a preference.
        rewards: of the same rows.
        preference: of each row; None: there is one component.
        weights: how to mix.
    """
    parts = advantages - advantages.mean(0)
    parts[:, ~rewards.any(0)] = 0.0
    if preference is None:
        mixed = parts[:, 0]
    else:
        if weights.scaling == "component":
            parts /= parts.std(0) + 1e-8
        individual = scalarise(parts[:, 1:], preference)
        mixed = weights.team_weight * parts[:, 0] + weights.individual_weight * individual
    return np.asarray((mixed - mixed.mean()) / (mixed.std() + 1e-8))
