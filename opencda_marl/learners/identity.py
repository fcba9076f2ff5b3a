"""What a checkpoint and a learner must agree about, compared piece by piece: an error names the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from opencda_marl.core.errors import CheckpointError
from opencda_marl.core.spec import ActionSpec, LearnerState, ObservationSpec
from opencda_marl.nn.flat import Layout

__all__ = ["check_complete", "check_identity", "identity_of", "take"]

_FIX = "use the profile that the checkpoint was made with (config.yaml beside it), or another checkpoint"


def identity_of(
    algorithm: str,
    observation: ObservationSpec,
    action: ActionSpec,
    encoder: str,
    layouts: Mapping[str, Layout],
) -> dict[str, Any]:
    """JSON values that say what the tensors of a state mean.

    Args:
        algorithm: name of the learner.
        observation: its layout.
        action: its kind.
        encoder: name of the context encoder, "none" without one.
        layouts: name of a flat tensor -> what lies in it.
    """
    return {
        "algorithm": algorithm,
        "observation": [observation.name, observation.version],
        "ego features": [feature.name for feature in observation.ego],
        "neighbour features": [feature.name for feature in observation.neighbour],
        "neighbour rows": observation.max_neighbours,
        "action": [action.kind, action.size, list(action.levels)],
        "encoder": encoder,
        "layouts": {name: layout.as_json() for name, layout in layouts.items()},
    }


def check_identity(mine: Mapping[str, Any], saved: Mapping[str, Any], layouts: Mapping[str, Layout]) -> None:
    """Raise unless the state is one of a learner like this.

    Raises:
        CheckpointError: naming the first thing that differs.
    """
    for name, value in mine.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint does not say its {name}", fix=_FIX)
        if name == "layouts":
            continue
        if value != saved[name]:
            raise CheckpointError(f"{name}: the checkpoint has {saved[name]!r}, this run {value!r}", fix=_FIX)
    for name, layout in layouts.items():
        difference = layout.mismatch(saved["layouts"].get(name, []))
        if difference is not None:
            raise CheckpointError(f"{name}: the checkpoint's {difference}", fix=_FIX)


def take(tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a state, of the shape that it must have.

    Raises:
        CheckpointError: it is missing, has another shape, or holds NaN or infinity.
    """
    if name not in tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name!r}", fix=_FIX)
    found = tensors[name]
    if found.shape != shape:
        raise CheckpointError(f"tensor {name!r} has shape {found.shape} instead of {shape}", fix=_FIX)
    if not np.isfinite(found).all():
        raise CheckpointError(f"tensor {name!r} holds NaN or infinity", fix="take an earlier checkpoint")
    return found


def check_complete(mine: LearnerState, saved: LearnerState) -> None:
    """Raise unless `saved` has everything that `mine` has, in the same form; lengths may differ.

    Raises:
        CheckpointError: naming the first thing that is missing or of another form.
    """
    for name, array in mine.tensors.items():
        if name not in saved.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}", fix=_FIX)
        found = saved.tensors[name]
        if (found.dtype, found.shape[1:]) != (array.dtype, array.shape[1:]):
            raise CheckpointError(
                f"tensor {name!r} is {found.dtype}{list(found.shape[1:])} a row instead of "
                f"{array.dtype}{list(array.shape[1:])}",
                fix=_FIX,
            )
    _check_keys(mine.values, saved.values, "")


def _check_keys(mine: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    for name, value in mine.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint has no value {where + name!r}", fix=_FIX)
        if isinstance(value, dict):
            _check_keys(value, saved[name], f"{where}{name}.")
