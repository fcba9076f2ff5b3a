"""Dense layers and sets in C++: equal to torch's over all shapes, whatever the batch, and never quiet about NaN."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from opencda_marl.core.spec import Feature, ObservationSpec
from opencda_marl.nn.actor import Actor
from opencda_marl.nn.blocks import Mlp
from opencda_marl.nn.context import DeepSets, make_encoder
from opencda_marl.nn.dense import DenseKernel, find_dense
from opencda_marl.nn.flat import Layout
from opencda_marl.nn.torso import Torso
from opencda_marl.settings.learning import ContextSettings
from opencda_marl.settings.networks import Activation

CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture
def kernel() -> DenseKernel:
    found, why = find_dense()
    assert found is not None, why
    return found


def drawn(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, Tensor]:
    """Parameters as a learner has them: views of one flat vector, of the size that keeps sums near 1."""
    made = {name: rng.normal(0.0, 1.0 / math.sqrt(shape[0]), shape) for name, shape in shapes.items()}
    layout = Layout(shapes)
    return layout.views(torch.from_numpy(layout.flatten(made)))


def spec(ego: int, features: int, most: int) -> ObservationSpec:
    def named(count: int) -> tuple[Feature, ...]:
        return tuple(Feature(f"f{i}", "1", 1.0, "") for i in range(count))

    return ObservationSpec("test", 1, named(ego), named(features), most)


def sets(features: int, most: int, hidden: int, size: int, seed: int) -> tuple[DeepSets, dict[str, Tensor]]:
    encoder = make_encoder(spec(3, features, most), ContextSettings(encoder="deepsets", hidden=hidden, size=size))
    assert isinstance(encoder, DeepSets)
    return encoder, drawn(encoder.shapes("c."), np.random.default_rng(seed))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(
    ("inputs", "hidden", "outputs"),
    [(90, (256, 256), 2), (90, (128, 128), 1), (23, (64, 64), None), (7, (), 3), (1, (1,), 1), (33, (17, 130, 66), 11)],
)
def test_mlp_equals_torchs(
    kernel: DenseKernel, activation: Activation, inputs: int, hidden: tuple[int, ...], outputs: int | None
) -> None:
    mlp = Mlp(inputs, hidden, outputs, activation)
    rng = np.random.default_rng(inputs)
    parameters = drawn(mlp.shapes("n."), rng)
    bound = kernel.mlp(mlp, parameters, "n.")
    for rows in (0, 1, 2, 5, 6, 7, 25, 200):
        x = torch.from_numpy(rng.normal(0.0, 2.0, (rows, inputs)).astype(np.float32))
        torch.testing.assert_close(bound(x), mlp(parameters, "n.", x), **CLOSE)


def test_every_width_beside_those_of_vectors(kernel: DenseKernel) -> None:
    rng = np.random.default_rng(0)
    for width in range(1, 150):
        mlp = Mlp(5, (width,), None, "relu")
        parameters = drawn(mlp.shapes(""), rng)
        x = torch.from_numpy(rng.normal(size=(7, 5)).astype(np.float32))
        torch.testing.assert_close(kernel.mlp(mlp, parameters, "")(x), mlp(parameters, "", x), **CLOSE)


def test_a_network_without_layers_is_its_input(kernel: DenseKernel) -> None:
    x = torch.ones(3, 4)
    assert kernel.mlp(Mlp(4, ()), {}, "")(x).equal(x)


@pytest.mark.parametrize(("features", "most", "hidden", "size"), [(35, 30, 64, 64), (6, 12, 32, 16), (1, 1, 5, 3)])
@pytest.mark.parametrize("rows", [0, 1, 25, 200])
def test_sets_equal_torchs(rows: int, features: int, most: int, hidden: int, size: int) -> None:
    encoder, parameters = sets(features, most, hidden, size, seed=rows)
    act, form = encoder.acting(parameters, "c.")
    assert form == "c++"
    rng = np.random.default_rng(rows + most)
    for low, high in ((0, most), (0, 0), (most, most)):  # all numbers of neighbours, nobody has any, everybody all
        counts = torch.from_numpy(rng.integers(low, high + 1, rows).astype(np.int32))
        neighbours = torch.from_numpy(rng.normal(0.0, 2.0, (rows, most, features)).astype(np.float32))
        expected = encoder.encode(parameters, "c.", neighbours, counts, torch.zeros(rows, 3))
        torch.testing.assert_close(act(neighbours, counts, torch.zeros(rows, 3)), expected, **CLOSE)


def test_absent_rows_are_not_even_read() -> None:
    encoder, parameters = sets(6, 4, 32, 16, seed=1)
    act, _ = encoder.acting(parameters, "c.")
    neighbours, counts, ego = torch.ones(2, 4, 6), torch.tensor([0, 3], dtype=torch.int32), torch.zeros(2, 3)
    clean = act(neighbours, counts, ego)
    neighbours[0], neighbours[1, 3:] = math.nan, math.nan
    assert act(neighbours, counts, ego).equal(clean)


def test_a_row_comes_out_the_same_in_every_batch(kernel: DenseKernel) -> None:
    rng = np.random.default_rng(3)
    mlp = Mlp(23, (64, 70), 3, "tanh")
    bound = kernel.mlp(mlp, drawn(mlp.shapes(""), rng), "")
    x = torch.from_numpy(rng.normal(size=(25, 23)).astype(np.float32))
    together = bound(x)
    assert bound(x).equal(together)
    for rows in (1, 4, 6, 13):
        assert bound(x[:rows]).equal(together[:rows])


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_extreme_inputs_stay_finite_where_torchs_do(kernel: DenseKernel, activation: Activation) -> None:
    mlp = Mlp(2, (16, 16), 1, activation)
    parameters = drawn(mlp.shapes(""), np.random.default_rng(4))
    x = torch.tensor([[1e30, -1e30], [-1e6, 1e6], [0.0, -0.0], [1e-30, 1e-38]])
    got = kernel.mlp(mlp, parameters, "")(x)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, mlp(parameters, "", x), **CLOSE)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_nan_comes_out_wherever_it_went_in(kernel: DenseKernel, activation: Activation) -> None:
    mlp = Mlp(3, (20,), 2, activation)
    for name in mlp.shapes(""):
        parameters = drawn(mlp.shapes(""), np.random.default_rng(5))
        parameters[name].view(-1)[0] = math.nan
        assert kernel.mlp(mlp, parameters, "")(torch.ones(9, 3))[:, 0].isnan().all()
    for name in ("row0", "row1", "pool.weight", "pool.bias"):
        encoder, parameters = sets(3, 4, 20, 2, seed=5)
        parameters["c." + name].view(-1)[:20] = math.nan
        act, _ = encoder.acting(parameters, "c.")
        got = act(torch.ones(9, 4, 3), torch.full((9,), 2, dtype=torch.int32), torch.zeros(9, 3))
        assert got[:, 0].isnan().all()


def test_new_numbers_in_the_same_place_are_acted_with(kernel: DenseKernel) -> None:
    mlp = Mlp(4, (8,), 2)
    parameters = drawn(mlp.shapes(""), np.random.default_rng(6))
    bound = kernel.mlp(mlp, parameters, "")
    before = bound(torch.ones(1, 4))
    parameters["1.bias"].add_(1.0)
    torch.testing.assert_close(bound(torch.ones(1, 4)), before + 1.0)


def test_what_would_read_beyond_the_rows_is_refused(kernel: DenseKernel) -> None:
    encoder, parameters = sets(3, 4, 16, 2, seed=7)
    act, _ = encoder.acting(parameters, "c.")
    for counts in ([1, 5], [-1, 2]):
        with pytest.raises(ValueError, match=r"not in \[0, 4\]"):
            act(torch.zeros(2, 4, 3), torch.tensor(counts, dtype=torch.int32), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="features per neighbour"):
        act(torch.zeros(2, 4, 2), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3))
    mlp = Mlp(4, (8,), 2)
    with pytest.raises(ValueError, match="5 inputs instead of 4"):
        kernel.mlp(mlp, drawn(mlp.shapes(""), np.random.default_rng(8)), "")(torch.zeros(2, 5))


def actor(*, conditioned: bool, hidden: tuple[int, ...]) -> tuple[Actor, dict[str, Tensor]]:
    torso = Torso(spec(5, 6, 4), hidden, None, trained=False)
    mlp = Mlp(torso.width + 7 + (3 if conditioned else 0), (32, 32), 2, "relu")
    shapes = torso.shapes("actor.") | mlp.shapes("actor.policy.")
    made = Actor(torso, mlp, "actor.policy.", conditioned=conditioned)
    return made, drawn(shapes, np.random.default_rng(len(hidden)))


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("hidden", [(), (16, 16)])
def test_actor_equals_its_definition(conditioned: bool, hidden: tuple[int, ...]) -> None:
    made, parameters = actor(conditioned=conditioned, hidden=hidden)
    act, form = made.acting(parameters)
    assert form == "c++"
    rng = np.random.default_rng(9)
    for count in (0, 1, 25):
        widths = {"ego": 5, "context": 7} | ({"preference": 3} if conditioned else {})
        rows = {name: torch.from_numpy(rng.normal(size=(count, w)).astype(np.float32)) for name, w in widths.items()}
        torch.testing.assert_close(act(rows), made(parameters, rows), **CLOSE)


def test_torch_acts_where_the_kernel_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, parameters = actor(conditioned=False, hidden=())
    rows = {"ego": torch.ones(2, 5, dtype=torch.float64), "context": torch.ones(2, 7, dtype=torch.float64)}
    double = {name: tensor.double() for name, tensor in parameters.items()}
    act, form = made.acting(double)
    assert form == "torch (parameters are not float32 in a row)"
    assert act(rows).equal(made(double, rows))
    assert made.acting({name: tensor.to("meta") for name, tensor in parameters.items()})[1] == "torch (on meta)"
    monkeypatch.setenv("OPENCDA_MARL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert made.acting(parameters)[1].startswith("torch (no C++ compiler")
    encoder, own = sets(3, 4, 16, 2, seed=7)
    act_sets, form = encoder.acting(own, "c.")
    assert form.startswith("deepsets (no C++ compiler")
    seen = torch.ones(2, 4, 3), torch.tensor([0, 3], dtype=torch.int32), torch.ones(2, 3)
    assert act_sets(*seen).equal(encoder.encode(own, "c.", *seen))


def test_a_kernel_that_was_found_is_not_used_for_what_it_cannot_read() -> None:
    encoder, parameters = sets(3, 4, 16, 2, seed=7)
    assert encoder.acting(parameters, "c.")[1] == "c++"
    double = {name: tensor.double() for name, tensor in parameters.items()}
    assert encoder.acting(double, "c.")[1] == "deepsets (parameters are not float32 in a row)"
