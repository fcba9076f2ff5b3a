"""Layers and their first values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opencda_marl.nn.blocks import Mlp, TwinMlp, orthogonal
from opencda_marl.nn.flat import Layout


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_orthogonal_matrices_are(inputs: int, outputs: int) -> None:
    matrix = orthogonal(np.random.default_rng(0), inputs, outputs, 2.0)
    assert matrix.shape == (inputs, outputs)
    short = matrix @ matrix.T if inputs <= outputs else matrix.T @ matrix
    np.testing.assert_allclose(short, 4.0 * np.eye(min(inputs, outputs)), atol=1e-12)


def test_one_generator_one_matrix() -> None:
    first, again, other = (orthogonal(np.random.default_rng(seed), 3, 3) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_a_network_by_hand() -> None:
    network = Mlp(2, (2,), 1)
    parameters = {
        "n.0.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        "n.0.bias": torch.tensor([0.5, 0.0]),
        "n.1.weight": torch.tensor([[3.0], [-1.0]]),
        "n.1.bias": torch.tensor([10.0]),
    }
    got = network(parameters, "n.", torch.tensor([[1.0, 1.0]]))
    assert got.item() == pytest.approx(3.0 * math.tanh(1.5) - math.tanh(2.0) + 10.0)


@pytest.mark.parametrize(
    ("network", "width"), [(Mlp(4, (), None), 4), (Mlp(4, (), 3), 3), (Mlp(4, (5, 6)), 6), (Mlp(4, (5, 6), 2), 2)]
)
def test_widths_and_shapes_agree(network: Mlp, width: int) -> None:
    layout = Layout(network.shapes("x."))
    flat = torch.from_numpy(layout.flatten(network.initialise(np.random.default_rng(0), "x.")))
    assert network.width == width
    assert network(layout.views(flat), "x.", torch.zeros(7, 4)).shape == (7, width)


def test_the_gain_is_of_the_last_linear_layer_alone() -> None:
    made = Mlp(8, (8,), 8).initialise(np.random.default_rng(0), "", gain=0.01)
    assert np.linalg.norm(made["1.weight"], 2) == pytest.approx(0.01)
    assert np.linalg.norm(made["0.weight"], 2) == pytest.approx(math.sqrt(2.0))


# --- twins


@pytest.mark.parametrize("hidden", [(), (5,), (5, 6)])
@pytest.mark.parametrize("actions", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_twins_are_two_networks_of_view_and_action(hidden: tuple[int, ...], actions: int, activation: str) -> None:
    twins = TwinMlp(4, actions, hidden, 3, activation)
    layout = Layout(twins.shapes("t."))
    arrays = twins.initialise(np.random.default_rng(0), "t.")
    arrays = {name: array + (0.1 if name.endswith("bias") else 0.0) for name, array in arrays.items()}
    parameters = layout.views(torch.from_numpy(layout.flatten(arrays)).double().requires_grad_())
    x, action = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, actions, dtype=torch.float64)
    found = twins(parameters, "t.", x, action)
    assert found.shape == (2, 7, 3)
    one = Mlp(4 + actions, hidden, 3, activation)
    for i in range(2):
        alone = {
            name: parameters[name][i].reshape(shape) for name, shape in one.shapes("t.").items() if "0.w" not in name
        }
        alone["t.0.weight"] = torch.cat([parameters["t.0.weight"][i], parameters["t.0.action"][i]])
        expected = one(alone, "t.", torch.cat([x, action], -1))
        torch.testing.assert_close(found[i], expected)
        gradients = torch.autograd.grad(expected.square().sum(), parameters["t.0.action"], retain_graph=True)
        mine = torch.autograd.grad(found[i].square().sum(), parameters["t.0.action"], retain_graph=True)
        torch.testing.assert_close(mine, gradients)
        assert not mine[0][1 - i].any(), "one does not move the other"
    begun = twins.begin(parameters, "t.", x)
    assert torch.equal(twins.finish(parameters, "t.", begun, action), found)
    assert (twins.finish(parameters, "t.", begun, action + 1.0) != found).any()


def test_twins_begin_apart_each_like_a_network_of_its_own() -> None:
    made = TwinMlp(4, 1, (6,), 2).initialise(np.random.default_rng(3), "", gain=0.1)
    assert (made["0.weight"][0] != made["0.weight"][1]).any()
    rng = np.random.default_rng(3)
    for i in range(2):
        alone = Mlp(5, (6,), 2).initialise(rng, "", gain=0.1)
        together = np.concatenate([made["0.weight"][i], made["0.action"][i]])
        np.testing.assert_array_equal(together, alone["0.weight"])
        np.testing.assert_array_equal(made["1.weight"][i], alone["1.weight"])
        assert np.linalg.norm(made["1.weight"][i], 2) == pytest.approx(0.1)
    assert not made["0.bias"].any()
