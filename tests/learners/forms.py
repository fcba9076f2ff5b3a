"""How two forms of one gradient step are compared: exactly in double precision, step by step in single precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from opencda_marl.nn.flat import as_leaf

State = dict[str, Tensor]
Step = Callable[[int, State, Mapping[str, Tensor]], tuple[State, Tensor]]
"""The i-th step: (i, state, batch and rates) -> (next state, metrics)."""


def compare_forms(
    one: Step, other: Step, first: State, inputs: Sequence[Mapping[str, Tensor]], *, tolerance: float
) -> tuple[State, np.ndarray]:
    """Assert that both forms of a step are the same. Returns the last state and the metrics [step, metric] of `one`.

    In double precision each form goes its own way and they end within `tolerance` of each other. In single precision
    they would part wherever a rounding decides (a clip, the sign of a gradient that is all but zero under Adam), on one
    processor more than on another; so the other form does each step from where the first one is. What a gradient
    adds to Adam's moments is then the same but for rounding; a few steps in which a rounding decides may differ more.
    """
    exact = first["theta"].dtype == torch.float64
    state, its_state = first, first
    measured, again, apart = [], [], []
    for i, given in enumerate(inputs):
        before = state
        state, metrics = one(i, {**before, "theta": as_leaf(before["theta"])}, given)
        start = its_state if exact else before
        its_state, its_metrics = other(i, {**start, "theta": as_leaf(start["theta"])}, given)
        measured.append(metrics.tolist())
        again.append(its_metrics.tolist())
        apart.append(
            [_share(its_state[n] - state[n], state[n] - before[n]) for n in ("m", "theta", "target") if n in state]
        )
    for name in ("theta", "target"):
        if name in state:
            assert (state[name] - first[name]).norm().item() > 0.5, name
            if exact:
                assert (its_state[name] - state[name]).norm().item() < tolerance, name
    if exact:
        np.testing.assert_allclose(again, measured, rtol=tolerance, atol=tolerance)
    else:
        usual, worst = np.quantile(apart, 0.9, axis=0), np.max(apart, axis=0)
        assert (usual < 1e-3).all(), usual
        assert (worst < 0.1).all(), worst
        np.testing.assert_allclose(again, measured, rtol=1e-3, atol=1e-3)
    return state, np.array(measured)


def in_turn(batches: Sequence[Mapping[str, Tensor]], rates: Sequence[Mapping[str, float]]) -> list[dict[str, Tensor]]:
    """Inputs of one step for each of the rates: the batches in turn, and the rates as tensors of their precision."""
    dtype = batches[0]["ego"].dtype
    return [
        {**batches[i % len(batches)], **{name: torch.tensor(value, dtype=dtype) for name, value in each.items()}}
        for i, each in enumerate(rates)
    ]


def _share(difference: Tensor, change: Tensor) -> float:
    return (difference.norm() / change.norm().clamp_min(1e-12)).item()
