"""A real CUDA graph: equal to eager, nothing left behind, and what a failed capture does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from opencda_marl.core.errors import CudaGraphCaptureError
from opencda_marl.nn.capture import CapturedUpdate, CudaCapturer
from opencda_marl.nn.flat import as_leaf
from opencda_marl.nn.graph import Inputs, State, UpdateForm
from opencda_marl.nn.optimiser import adam

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def learn(state: State, inputs: Inputs) -> tuple[State, Tensor]:
    theta = state["theta"]
    loss = ((torch.tanh(inputs["x"] @ theta[:12].view(4, 3)) @ theta[12:] - inputs["y"]) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, theta)
    with torch.no_grad():
        step = state["step"] + 1.0
        theta, m, v = adam(theta, gradient, state["m"], state["v"], step, inputs["rate"])
        return {"theta": theta, "m": m, "v": v, "step": step}, torch.stack([loss.detach(), gradient.norm()])


def first_state() -> State:
    theta = torch.randn(15, generator=torch.Generator().manual_seed(0)).to(CUDA)
    return {"theta": theta, "m": torch.zeros_like(theta), "v": torch.zeros_like(theta), "step": theta.new_zeros(())}


def inputs(i: int, *, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + i)
    made = {"x": torch.randn(8, 4, generator=generator), "y": torch.randn(8, generator=generator)}
    return {name: tensor.to(device) for name, tensor in {**made, "rate": torch.tensor(0.05 / (1 + i % 7))}.items()}


def given(state: State) -> State:
    return {**state, "theta": as_leaf(state["theta"])}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_hundred_updates_are_the_eager_ones(device: str) -> None:
    """Columns from the host through pinned memory, or on the device already."""
    eager, captured = first_state(), first_state()
    update = CapturedUpdate(learn, CudaCapturer(CUDA), given(captured), inputs(0, device=device))
    kept, wanted = [], []
    for i in range(100):
        eager, _ = learn(given(eager), inputs(i, device="cuda"))
        captured, _ = update(given(captured), inputs(i, device=device))
        wanted.append(eager["theta"])
        kept.append(captured["theta"])
    torch.testing.assert_close(torch.stack(kept), torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_capturing_leaves_no_trace() -> None:
    state = first_state()
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3, device=CUDA)
    torch.manual_seed(5)
    CapturedUpdate(learn, CudaCapturer(CUDA), given(state), inputs(0))
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, device=CUDA), expected[1])
    assert all(torch.equal(tensor, first_state()[name]) for name, tensor in state.items())


def test_captured_anew_after_invalidation_and_measured_beside_eager() -> None:
    form = UpdateForm(learn, "cuda_graph", device=CUDA)
    state, plain = first_state(), first_state()
    for i in range(30):
        if i % 10 == 0:
            form.invalidate()
        state, _ = form(given(state), inputs(i))
        plain, _ = learn(given(plain), inputs(i, device="cuda"))
    torch.testing.assert_close(state["theta"], plain["theta"], rtol=1e-4, atol=1e-5)
    assert form.note.startswith("update_mode cuda_graph: eager ")


def test_a_graph_held_through_the_parameters_is_refused() -> None:
    state = given(first_state())
    outside = state["theta"].sum()
    with pytest.raises(CudaGraphCaptureError, match="through theta"):
        UpdateForm(learn, "cuda_graph", device=CUDA)(state, inputs(0))
    assert outside.requires_grad


def test_a_failed_capture_has_its_exit_code() -> None:
    """In a process of its own: after it, CUDA's generator is of no use."""
    found = subprocess.run([sys.executable, "benchmarks/gpu_check.py", "--fail"], check=False, timeout=120)
    assert found.returncode == 32
