"""Passes of an update in C++: values and gradients are those of torch's operations in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from opencda_marl.core.spec import Feature, ObservationSpec
from opencda_marl.nn import fused as module
from opencda_marl.nn.blocks import Mlp
from opencda_marl.nn.context import DeepSets, make_encoder
from opencda_marl.nn.flat import Layout
from opencda_marl.nn.fused import Fused, find_fused, passes_form
from opencda_marl.nn.optimiser import adam
from opencda_marl.settings.learning import ContextSettings
from opencda_marl.settings.networks import Activation


@pytest.fixture
def passes() -> Fused:
    found = find_fused(torch.zeros(1))
    assert found is not None, "no compiler"
    return found


def both(shapes: dict[str, tuple[int, ...]], seed: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Flat parameters and their views, once in single and once in double precision; the latter is torch's alone."""
    rng = np.random.default_rng(seed)
    layout = Layout(shapes)
    made = {name: rng.normal(0.0, 1.0 / math.sqrt(shape[0]), shape) for name, shape in shapes.items()}
    single = torch.from_numpy(layout.flatten(made))
    flats = [single.clone().requires_grad_(), single.double().requires_grad_()]
    return [(flat, layout.views(flat)) for flat in flats]


def sets(features: int, most: int, hidden: int, size: int) -> DeepSets:
    named = tuple(Feature(f"f{i}", "1", 1.0, "") for i in range(features))
    spec = ObservationSpec("test", 1, named[:1], named, most)
    encoder = make_encoder(spec, ContextSettings(encoder="deepsets", hidden=hidden, size=size))
    assert isinstance(encoder, DeepSets)
    return encoder


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("inputs", "hidden", "outputs"), [(24, (64, 64), None), (9, (33, 17), 5), (7, (), 3), (1, (1,), 1)]
)
@pytest.mark.parametrize("rows", [0, 1, 130])
def test_layers(
    passes: Fused, activation: Activation, inputs: int, hidden: tuple[int, ...], outputs: int | None, rows: int
) -> None:
    network = Mlp(inputs, hidden, outputs, activation)
    x = torch.from_numpy(np.random.default_rng(1).normal(0.0, 2.0, (rows, inputs)).astype(np.float32))
    found = []
    for (flat, views), seen in zip(both(network.shapes("n."), 2), (x, x.double()), strict=True):
        seen.requires_grad_()
        out = network(views, "n.", seen)
        assert ("_Layers" in type(out.grad_fn).__name__) == (seen.dtype == torch.float32)
        weigh = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
        found.append((out, *torch.autograd.grad((out * weigh).sum(), (flat, seen))))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=2e-5, atol=2e-5)


def test_a_gradient_by_weights_alone_or_by_the_input_alone(passes: Fused) -> None:
    network = Mlp(3, (5,), 2)
    flat, views = both(network.shapes(""), 3)[0]
    x = torch.randn(4, 3)
    (by_weights,) = torch.autograd.grad(network(views, "", x).sum(), flat)
    x.requires_grad_()
    (by_input,) = torch.autograd.grad(network({n: v.detach() for n, v in views.items()}, "", x).sum(), x)
    together = torch.autograd.grad(network(views, "", x).sum(), (flat, x))
    assert torch.equal(by_weights, together[0])
    assert torch.equal(by_input, together[1])


@pytest.mark.parametrize(("features", "most", "hidden", "size"), [(38, 13, 64, 64), (5, 4, 19, 7), (1, 1, 1, 1)])
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_sets(passes: Fused, features: int, most: int, hidden: int, size: int, rows: int) -> None:
    encoder = sets(features, most, hidden, size)
    rng = np.random.default_rng(4)
    seen = torch.from_numpy(rng.normal(size=(rows, most, features)).astype(np.float32))
    if rows:
        seen[:, -1] = seen[:, 0]  # twice the same: equal maxima, which share the gradient
    counts = torch.from_numpy(rng.integers(0, most + 1, rows))
    found = []
    for flat, views in both(encoder.shapes("c."), 5):
        out = encoder.encode(views, "c.", seen.to(flat.dtype), counts, seen[:, 0].to(flat.dtype))
        weigh = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
        found.append((out, *torch.autograd.grad((out * weigh).sum(), flat)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=5e-5, atol=5e-5)


def test_counts_that_point_outside_are_refused(passes: Fused) -> None:
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=r"not in \[0, 3\]"):
            passes.gather(torch.zeros(2, 3, 5), torch.tensor([1, wrong], dtype=torch.int32))


def test_as_many_counts_as_sets(passes: Fused) -> None:
    encoder = sets(5, 3, 8, 6)
    _, views = both(encoder.shapes("c."), 9)[0]
    with pytest.raises(ValueError, match=r"\(1,\) counts of 2 sets"):
        encoder.encode(views, "c.", torch.zeros(2, 3, 5), torch.tensor([1]), torch.zeros(2, 1))


def test_a_gradient_of_a_gradient_is_refused_and_not_wrong(passes: Fused) -> None:
    network, encoder = Mlp(3, (5,), 2), sets(5, 3, 8, 6)
    flat, views = both(network.shapes("n.") | encoder.shapes("c."), 10)[0]
    outputs = [network(views, "n.", torch.ones(4, 3))]
    outputs.append(encoder.encode(views, "c.", torch.ones(2, 3, 5), torch.tensor([1, 2]), torch.zeros(2, 1)))
    for out in outputs:
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(out.sum(), flat, create_graph=True)


def test_torch_alone_where_precision_is_chosen_for_it(passes: Fused) -> None:
    network = Mlp(3, (5,), 2)
    views = both(network.shapes(""), 11)[0][1]
    with torch.autocast("cpu", torch.bfloat16):
        assert find_fused(torch.zeros(3)) is None
        assert network(views, "", torch.ones(4, 3)).dtype == torch.bfloat16


def test_what_is_not_a_number_is_not_hidden(passes: Fused) -> None:
    encoder = sets(4, 3, 8, 6)
    flat, views = both(encoder.shapes("c."), 6)[0]
    seen = torch.zeros(2, 3, 4)
    seen[1, 0, 0] = math.nan
    out = encoder.encode(views, "c.", seen, torch.tensor([1, 1]), seen[:, 0])
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()
    (gradient,) = torch.autograd.grad(out.sum(), flat)
    assert torch.isnan(gradient).any()
    for activation in ("tanh", "relu"):
        assert torch.isnan(passes.bend_(torch.full((3,), math.nan), activation)).all()


def test_tanh_is_as_near_as_a_float_can_tell(passes: Fused) -> None:
    x = np.concatenate([np.geomspace(1e-30, 40.0, 20_001), [0.0, 0.65, np.inf]]).astype(np.float32)
    x = np.concatenate([x, -x])
    found = passes.bend_(torch.from_numpy(x.copy()), "tanh").numpy()
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=3e-7, atol=0.0)


def test_adam(passes: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    vectors = [torch.from_numpy(rng.normal(size=1001).astype(np.float32)) for _ in range(3)]
    vectors.append(torch.from_numpy(rng.uniform(size=1001).astype(np.float32)))
    before = [vector.clone() for vector in vectors]
    for count in (1.0, 7.0, 5000.0):
        numbers = torch.tensor(count), torch.tensor(1e-3)
        ours = adam(*vectors, *numbers)
        theirs = adam(*(vector.double() for vector in vectors), *(number.double() for number in numbers))
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=2e-6, atol=1e-8)
        assert all(torch.equal(a, b) for a, b in zip(vectors, before, strict=True)), "nothing changes in place"
    monkeypatch.setattr(module, "_found", lambda: None)
    np.testing.assert_allclose(adam(*vectors, *numbers)[0].numpy(), ours[0].numpy(), rtol=1e-6, atol=1e-8)


def test_torchs_own_operations_where_the_passes_cannot_be_had(passes: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_fused(torch.zeros(4, 4).t()[1:]) is None, "not in a row"
    assert find_fused(torch.zeros(3, dtype=torch.float64)) is None
    assert find_fused(torch.zeros(3), torch.zeros(3, device="meta")) is None
    encoder, network = sets(5, 4, 8, 6), Mlp(6, (8,), 2)
    flat, views = both(encoder.shapes("c.") | network.shapes("n."), 8)[0]
    seen, counts = torch.randn(9, 4, 5), torch.arange(9) % 5

    def out() -> tuple[Tensor, Tensor]:
        found = network(views, "n.", encoder.encode(views, "c.", seen, counts, seen[:, 0]))
        return found.detach(), torch.autograd.grad((found * found).sum(), flat)[0]

    ours = out()
    monkeypatch.setattr(module, "_found", lambda: None)
    for one, other in zip(ours, out(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_init_line_says_where_updates_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes_form(torch.device("cpu")) == "c++"
    assert passes_form(torch.device("cuda")) == "torch"
    monkeypatch.setattr(module, "find_library", lambda: (None, "no C++ compiler: g++ not found"))
    module._found.cache_clear()
    try:
        assert find_fused(torch.zeros(1)) is None
        assert passes_form(torch.device("cpu")) == "torch (no C++ compiler: g++ not found)"
    finally:
        module._found.cache_clear()
