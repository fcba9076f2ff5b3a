"""What captures an update without a GPU, for the tests of more than one folder; and no test is judged by a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from opencda_marl.nn import fused

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Tape(TorchDispatchMode):
    """Writes down every operation on tensors; playing it runs the operations again, and no Python between them.

    So whatever was a Python number while it was recorded is frozen in, as in a CUDA graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = func(*args, **(kwargs or {}))
        self._lines.append((func, args, kwargs or {}, found))
        return found

    def play(self) -> None:
        now: dict[int, Tensor] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, Tensor) else value

        with torch.no_grad():
            for func, args, kwargs, then in self._lines:
                found = func(*tree_map(current, args), **tree_map(current, kwargs))
                pairs = zip(tree_flatten(then)[0], tree_flatten(found)[0], strict=True)
                now |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}


class Recorder:
    """A `Capturer` on the CPU. Columns cross from its host to its device, numbers are there already."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.recorded = self.sends = 0
        self.failure: Exception | None = None

    def sent(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def wait_for_host(self) -> None:
        pass

    def send(self, host: Tensor, buffer: Tensor) -> None:
        self.sends += 1
        buffer.copy_(host)

    def warm_up(self, call: Callable[[], None]) -> None:
        for _ in range(3):
            call()
        torch.rand(5)  # as a careless library would

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        if self.failure is not None:
            raise self.failure
        self.recorded += 1
        tape = Tape()
        with tape:
            call()
        return tape.play


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(fused, "_found", lambda: None)  # as on a GPU: no pass of ours that a tape would not see
    return Recorder()
