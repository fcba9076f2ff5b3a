"""The copy of an actor that acts: its own flat vector on the acting device, refreshed when stale."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from opencda_marl.nn.flat import Layout

__all__ = ["Replica", "resolve_acting_device"]


def resolve_acting_device(asked: Literal["auto", "train", "cpu"], training: torch.device) -> torch.device:
    """Where to act. `auto`: on the CPU when training is on CUDA, where a dozen rows are bound by launches."""
    if asked == "train" or (asked == "auto" and training.type != "cuda"):
        return training
    return torch.device("cpu")


class Replica:
    """Parameters for acting.

    Training makes new vectors and never writes into this one, so acting reads a consistent policy. When the
    devices differ the vector is pinned and the one copy of a refresh is also the one device sync of acting.
    What acting does not read (critics, the scale of their values) is not in the layout and does not cross.

    Args:
        layout: of the part of the parameters that acting needs.
        device: where to act.
        training: where the source lies.
    """

    def __init__(self, layout: Layout, device: torch.device, training: torch.device) -> None:
        self.engaged = device != training
        self.flat = torch.zeros(layout.size, device=device, pin_memory=self.engaged and training.type == "cuda")
        self.parameters = layout.views(self.flat)
        self._stale = True

    def invalidate(self) -> None:
        """The source has changed: copy before the next act."""
        self._stale = True

    def refresh(self, source: Float[Tensor, " size"]) -> bool:
        """Copy `source` if it has changed; True when something was copied."""
        if not self._stale:
            return False
        self.flat.copy_(source.detach())  # device sync: the acting replica's copy
        self._stale = False
        return True
