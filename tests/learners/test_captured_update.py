"""Every learner's update as a captured one: equal to eager, and nothing in it that a capture would not allow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from driving_school import build, drive, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from toy_world import LEVELS, SPEED, World

from opencda_marl.core.errors import ConfigError
from opencda_marl.learners import LEARNERS, mappo, offpolicy
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.graph import Inputs, State, Update, UpdateForm
from opencda_marl.settings.learning import ALGORITHMS
from opencda_marl.settings.networks import NetworkSettings

Recorder = Any  # see tests/conftest.py
WITH_NETWORKS = sorted(name for name, kind in ALGORITHMS.items() if issubclass(kind, NetworkSettings))
PLAIN = {"masac", "matd3"}  # with preferences they have all of this and more
CASES = [
    *(pytest.param(name, "deepsets", marks=[pytest.mark.slow] if name in PLAIN else []) for name in WITH_NETWORKS),
    ("pcmappo", "attention"),
    ("pcmasac", "lstm"),
]


def make(name: str, encoder: str, **own: Any) -> Any:
    return build(small(name, encoder, **own), action=LEVELS if name == "dqn" else SPEED)


def use(monkeypatch: pytest.MonkeyPatch, form: Callable[[Update], Any]) -> None:
    """Learners built from here on call their updates through `form`."""
    for module in (mappo, offpolicy):
        monkeypatch.setattr(module, "make_update", lambda function, *_, **__: form(function))


def weights(learner: Any) -> dict[str, np.ndarray]:
    return learner.state().tensors


def test_all_learners_with_networks_are_here() -> None:
    assert set(WITH_NETWORKS) <= set(LEARNERS.targets())
    assert {"mappo", "pcmappo", "masac", "pcmasac", "matd3", "pcmatd3", "dqn"} <= set(WITH_NETWORKS)


@pytest.mark.parametrize(("name", "encoder"), CASES)
def test_a_learner_whose_update_is_captured_learns_the_same(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, name: str, encoder: str
) -> None:
    """Through a reload of the world and a checkpoint that changes the form; each captures anew."""
    eager = make(name, encoder)
    if isinstance(
        eager, offpolicy.OffPolicyLearner
    ):  # all rows, as on a GPU: sums over the real ones alone may end in other last bits
        monkeypatch.setattr(eager, "_ragged", ())
    use(monkeypatch, partial(UpdateForm, asked="cuda_graph", capturer=recorder))
    captured = make(name, encoder)
    assert captured.describe()["update_mode"] == "cuda_graph"
    assert drive(captured, World(1), 3) == drive(eager, World(1), 3)
    forms = recorder.recorded
    assert forms in (1, 2)
    assert "cuda_graph: eager" in captured.describe()["note"]
    captured.invalidate()
    assert drive(captured, World(2, first_episode=10), 2) == drive(eager, World(2, first_episode=10), 2)
    assert recorder.recorded == 2 * forms
    captured.load(eager.state())
    assert drive(captured, World(3, first_episode=20), 2) == drive(eager, World(3, first_episode=20), 2)
    assert recorder.recorded == 3 * forms
    mine, theirs = weights(captured), weights(eager)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)
    assert captured.counters == eager.counters
    assert captured.counters.training_step > 10


class OnDevice(TorchDispatchMode):
    """Nothing of the host takes part: neither a wait for the device nor a copy from the host nor its numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, Tensor) and value.device.type == "cpu":
                raise AssertionError(f"{func} takes a tensor of the host")
        return func(*args, **(kwargs or {}))


def on_device(function: Update, state: State, inputs: Inputs) -> tuple[State, Tensor]:
    """One update on a device that computes nothing and has no values to wait for: shapes alone."""
    far = {name: tensor.to("meta") for name, tensor in state.items()}
    far["theta"] = as_leaf(far["theta"])
    sent = {name: tensor.to("meta") for name, tensor in inputs.items()}
    function(dict(far), sent)  # constants that are made once are made now, as in a warm-up
    with OnDevice():
        return function(dict(far), sent)


@pytest.mark.parametrize(("name", "encoder"), CASES)
def test_nothing_of_the_host_is_in_an_update(monkeypatch: pytest.MonkeyPatch, name: str, encoder: str) -> None:
    seen: dict[int, tuple[Update, State, Inputs]] = {}

    class Spy(UpdateForm):
        def __call__(self, state: State, inputs: Inputs) -> tuple[State, Tensor]:
            seen[id(self)] = (self._function, state, dict(inputs))
            return super().__call__(state, inputs)

    use(monkeypatch, partial(Spy, asked="eager"))
    drive(make(name, encoder), World(1), 3)
    assert len(seen) == (2 if "td3" in name else 1)
    for function, state, inputs in seen.values():
        after, metrics = on_device(function, state, inputs)
        assert {key: (value.shape, value.dtype) for key, value in after.items()} == {
            key: (value.shape, value.dtype) for key, value in state.items()
        }
        assert metrics.device.type == "meta"
        assert not any(value.requires_grad for value in after.values())


@pytest.mark.parametrize("hostile", ["copies", "waits", "number"])
def test_what_the_host_takes_part_in_is_found(hostile: str) -> None:
    def function(state: State, inputs: Inputs) -> tuple[State, Tensor]:
        theta = state["theta"].detach()
        if hostile == "copies":
            theta = theta + torch.as_tensor(np.ones(3), dtype=torch.float32, device=theta.device)
        elif hostile == "number":
            theta = theta * torch.tensor(2.0)
        else:
            theta = theta[theta > 0]
        return {"theta": theta}, theta

    with pytest.raises((AssertionError, NotImplementedError)):
        on_device(function, {"theta": torch.ones(3)}, {})


@pytest.mark.parametrize("name", ["mappo", "pcmasac"])
def test_a_graph_without_cuda(name: str) -> None:
    wish = make(name, "deepsets", cuda_graph_update=True).describe()
    assert wish["update_mode"] == "eager"
    assert "cuda_graph_update: eager, because a CUDA graph needs a CUDA device" in wish["note"]
    with pytest.raises(ConfigError, match="training is on cpu"):
        make(name, "deepsets", update_mode="cuda_graph")
