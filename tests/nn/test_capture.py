"""A captured update, with a recorder in the place of a GPU: equal to eager, nothing frozen in, nothing left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from opencda_marl.core.errors import CudaGraphCaptureError
from opencda_marl.nn.capture import CapturedUpdate, check_no_graph_through
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.graph import Inputs, State
from opencda_marl.nn.optimiser import adam

Recorder = Any  # see tests/conftest.py


def learn(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    """Two layers, Adam, a target that follows: what real updates are made of."""
    theta = state["theta"]
    hidden = torch.tanh(inputs["x"] @ theta[:12].view(4, 3))
    loss = ((hidden @ theta[12:] - inputs["y"]) ** 2).mean() + inputs["alpha"] * theta.square().sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    with torch.no_grad():
        step = state["step"] + 1.0
        theta, m, v = adam(theta, gradient, state["m"], state["v"], step, inputs["rate"])
        target = torch.lerp(state["target"], theta, inputs["tau"])
        after = {"theta": theta, "m": m, "v": v, "step": step, "target": target, "before": state["theta"].detach()}
        return after, torch.stack([loss.detach(), gradient.norm()])


def first_state() -> State:
    theta = torch.randn(15, generator=torch.Generator().manual_seed(0))
    zeros = {name: torch.zeros(15) for name in ("m", "v")}
    return {"theta": theta, **zeros, "step": torch.tensor(0.0), "target": theta.clone(), "before": torch.zeros(15)}


def inputs(i: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + i)
    return {
        "x": torch.randn(8, 4, generator=generator),
        "y": torch.randn(8, generator=generator),
        "rate": torch.tensor(0.05 / (1 + i % 7)),
        "alpha": torch.tensor(0.01 * (i % 3)),
        "tau": torch.tensor(0.1 + 0.2 * (i % 4)),
    }


def given(state: State) -> State:
    return {**state, "theta": as_leaf(state["theta"])}


def test_a_hundred_updates_are_the_eager_ones_and_what_they_returned_stays(recorder: Recorder) -> None:
    """Rates, weights and columns change with each; the target follows at another pace each time."""
    eager, captured = first_state(), first_state()
    update = CapturedUpdate(learn, recorder, given(captured), inputs(0))
    kept, wanted = [], []
    for i in range(100):
        eager, expected = learn(given(eager), inputs(i))
        captured, measured = update(given(captured), inputs(i))
        assert not captured["theta"].requires_grad
        wanted.append({**eager, "metrics": expected})
        kept.append({**captured, "metrics": measured})
    assert recorder.recorded == 1
    assert not torch.equal(kept[0]["theta"], kept[99]["theta"])
    for mine, theirs in zip(kept, wanted, strict=True):  # compared at the end: no later call has written into them
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_capturing_leaves_no_trace(recorder: Recorder) -> None:
    state, batch = first_state(), inputs(0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    CapturedUpdate(learn, recorder, given(state), batch)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, first_state()[name]) for name, tensor in state.items())
    assert all(torch.equal(tensor, inputs(0)[name]) for name, tensor in batch.items())


def test_arguments_are_copied(recorder: Recorder) -> None:
    state, batch = first_state(), inputs(0)
    update = CapturedUpdate(learn, recorder, given(state), batch)
    once, _ = update(given(state), batch)
    assert recorder.sends == 2  # at capture and here: all columns in one copy
    for tensor in (*state.values(), *batch.values()):
        tensor.fill_(7.0)
    again, _ = update(given(first_state()), inputs(0))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_a_state_that_was_changed_or_loaded_is_taken_over(recorder: Recorder) -> None:
    """What was returned last is in the buffers already and not copied again, unless somebody has written into it."""
    state, _ = CapturedUpdate(learn, recorder, given(first_state()), inputs(0))(given(first_state()), inputs(0))
    update = CapturedUpdate(learn, recorder, given(state), inputs(0))
    state, _ = update(given(state), inputs(1))
    state["theta"][:3] = 0.5  # in place, as a last layer is rescaled
    expected, _ = learn(given({name: tensor.clone() for name, tensor in state.items()}), inputs(2))
    found, _ = update(given(state), inputs(2))
    assert all(torch.equal(found[name], expected[name]) for name in found)
    loaded = {name: tensor * 0.5 for name, tensor in found.items()}
    expected, _ = learn(given(loaded), inputs(3))
    found, _ = update(given(loaded), inputs(3))
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_shapes_and_names_are_those_of_the_capture(recorder: Recorder) -> None:
    update = CapturedUpdate(learn, recorder, given(first_state()), inputs(0))
    with pytest.raises(ValueError, match=r"x: torch.float32 \(1, 4\), but torch.float32 \(8, 4\) was captured"):
        update(given(first_state()), {**inputs(0), "x": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match=r"torch\.float64"):
        update(given(first_state()), {**inputs(0), "rate": torch.tensor(0.1, dtype=torch.float64)})
    with pytest.raises(ValueError, match="surplus"):
        update(given(first_state()), {**inputs(0), "surplus": torch.zeros(1)})


@pytest.mark.parametrize(
    "failure", [RuntimeError("operation not permitted when stream is capturing"), KeyError("x"), MemoryError("full")]
)
def test_a_failed_capture_is_its_own_error_and_leaves_the_state(recorder: Recorder, failure: Exception) -> None:
    recorder.failure = failure
    state = first_state()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(CudaGraphCaptureError, match="could not be captured") as caught:
        CapturedUpdate(learn, recorder, given(state), inputs(0))
    assert caught.value.exit_code == 32
    assert "update_mode=eager" in str(caught.value)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, first_state()[name]) for name, tensor in state.items())


def waits(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    scale = 1.0 if inputs["x"].sum().item() > 0 else 2.0
    return {"theta": state["theta"].detach() * scale}, torch.zeros(1)


def forgets(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    return {}, torch.zeros(1)


@pytest.mark.parametrize(("function", "why"), [(waits, "not permitted"), (forgets, "names differ.*theta")])
def test_an_update_that_breaks_the_rules_is_not_captured(recorder: Recorder, function: Any, why: str) -> None:
    with pytest.raises(CudaGraphCaptureError, match=why):
        CapturedUpdate(function, recorder, {"theta": torch.ones(3)}, {"x": torch.ones(2)})


def test_no_autograd_graph_may_be_held_through_the_parameters(recorder: Recorder) -> None:
    """The one rule: a value that somebody computed with gradients outside of the update."""
    state = given(first_state())
    outside = {"value": (state["theta"][:12].view(4, 3) * 2.0).sum()}
    with pytest.raises(CudaGraphCaptureError, match=r"shape \(\) made by SumBackward0 .* through theta"):
        CapturedUpdate(learn, recorder, state, inputs(0))
    del outside
    CapturedUpdate(learn, recorder, state, inputs(0))
    other = torch.ones(2, requires_grad=True)
    unrelated = (other * 3.0).sum()
    check_no_graph_through(state)
    assert unrelated.requires_grad


def test_a_state_that_is_itself_computed_with_gradients() -> None:
    theta = torch.ones(3, requires_grad=True) * 2.0
    with pytest.raises(CudaGraphCaptureError, match=r"theta of the state itself .*MulBackward0"):
        check_no_graph_through({"theta": theta})


def test_a_graph_in_a_dead_cycle_does_not_count() -> None:
    state = given(first_state())
    gc.disable()
    try:
        cycle: dict[str, Any] = {"value": state["theta"].sum()}
        cycle["itself"] = cycle
        del cycle
        check_no_graph_through(state)
    finally:
        gc.enable()
