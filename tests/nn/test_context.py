"""Encoders: what must not matter (order, absent rows), what must (counts), and each against a plain form of itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.spec import Feature, ObservationSpec
from opencda_marl.nn import context as context_module
from opencda_marl.nn.context import DeepSets, Encoder, encoder_version, make_encoder
from opencda_marl.nn.flat import Layout
from opencda_marl.settings.learning import ContextSettings

EGO, FEATURES, MOST, SIZE = 5, 6, 4, 7
NAMES = ("deepsets", "attention", "lstm")


def features(count: int) -> tuple[Feature, ...]:
    return tuple(Feature(f"f{i}", "1", 1.0, "") for i in range(count))


SPEC = ObservationSpec("test", 1, features(EGO), features(FEATURES), MOST)


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Encoder, dict[str, Tensor]]:
    encoder = make_encoder(SPEC, ContextSettings(encoder=name, size=SIZE, hidden=8, heads=2))
    assert encoder is not None
    layout = Layout(encoder.shapes("c."))
    rng = np.random.default_rng(seed)
    flat = layout.flatten(encoder.initialise(rng, "c.")) + rng.normal(0.0, 0.1, layout.size).astype(np.float32)
    return encoder, layout.views(torch.from_numpy(flat).to(dtype))


def draw(rows: int = 9, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, MOST + 1, rows).astype(np.int32)
    counts[:2] = 0, MOST
    neighbours = rng.normal(size=(rows, MOST, FEATURES)).astype(np.float32)
    neighbours[np.arange(MOST) >= counts[:, None]] = 0.0
    ego = rng.normal(size=(rows, EGO)).astype(np.float32)
    return torch.from_numpy(neighbours), torch.from_numpy(counts), torch.from_numpy(ego)


@pytest.mark.parametrize("name", NAMES)
def test_absent_rows_change_nothing(name: str) -> None:
    encoder, parameters = build(name)
    neighbours, counts, ego = draw()
    clean = encoder.encode(parameters, "c.", neighbours, counts, ego)
    absent = torch.arange(MOST) >= counts[:, None]
    dirty = encoder.encode(parameters, "c.", torch.where(absent[..., None], 1e3, neighbours), counts, ego)
    assert clean.shape == (len(ego), SIZE)
    assert torch.isfinite(clean).all()
    torch.testing.assert_close(dirty, clean, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_present_row_matters_and_so_does_its_count(name: str) -> None:
    encoder, parameters = build(name)
    _, _, ego = draw()
    neighbours = torch.from_numpy(np.random.default_rng(2).normal(size=(len(ego), MOST, FEATURES)).astype(np.float32))
    full, fewer = torch.full((len(ego),), MOST, dtype=torch.int32), torch.full((len(ego),), MOST - 1, dtype=torch.int32)
    everything = encoder.encode(parameters, "c.", neighbours, full, ego)
    without = encoder.encode(parameters, "c.", neighbours, fewer, ego)
    assert (everything - without).abs().amax(1).min() > 1e-4


@pytest.mark.parametrize("name", ["deepsets", "attention"])
def test_order_of_rows_does_not_matter_to_sets(name: str) -> None:
    encoder, parameters = build(name)
    neighbours, counts, ego = draw()
    shuffled = neighbours.clone()
    for i, count in enumerate(counts.tolist()):
        shuffled[i, :count] = neighbours[i, torch.randperm(count, generator=torch.Generator().manual_seed(i))]
    torch.testing.assert_close(
        encoder.encode(parameters, "c.", shuffled, counts, ego),
        encoder.encode(parameters, "c.", neighbours, counts, ego),
        rtol=1e-5,
        atol=1e-6,
    )


def test_the_lstm_reads_the_nearest_row_last() -> None:
    encoder, parameters = build("lstm")
    neighbours, _, ego = draw()
    counts = torch.full((len(ego),), MOST, dtype=torch.int32)
    at = [
        (encoder.encode(parameters, "c.", neighbours + bump, counts, ego)
         - encoder.encode(parameters, "c.", neighbours, counts, ego)).abs().mean().item()
        for bump in (torch.eye(MOST)[0][None, :, None] * 0.1, torch.eye(MOST)[-1][None, :, None] * 0.1)
    ]  # fmt: skip
    assert at[0] > at[1]  # what came last is remembered best


@pytest.mark.parametrize("name", NAMES)
def test_contexts_of_rows_do_not_depend_on_the_batch(name: str) -> None:
    encoder, parameters = build(name)
    neighbours, counts, ego = draw()
    together = encoder.encode(parameters, "c.", neighbours, counts, ego)
    for i in range(len(ego)):
        alone = encoder.encode(parameters, "c.", neighbours[i : i + 1], counts[i : i + 1], ego[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-6)
    nobody = encoder.encode(parameters, "c.", neighbours[:0], counts[:0], ego[:0])
    assert nobody.shape == (0, SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_acting_form_equals_the_definition(name: str) -> None:
    encoder, parameters = build(name)
    neighbours, counts, ego = draw(25)
    with torch.inference_mode():
        act, _ = encoder.acting(parameters, "c.")
        expected = encoder.encode(parameters, "c.", neighbours, counts, ego)
        torch.testing.assert_close(act(neighbours, counts, ego), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    encoder, parameters = build(name, dtype=torch.float64)
    neighbours, counts, ego = (x.double() if x.is_floating_point() else x for x in draw(4))
    names = list(parameters)

    def contexts(*values: Tensor) -> Tensor:
        return encoder.encode(dict(zip(names, values, strict=True)), "c.", neighbours, counts, ego)

    leaves = [parameters[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(contexts, leaves, eps=1e-6, atol=1e-6, fast_mode=True)


def test_deepsets_row_by_row() -> None:
    encoder, p = build("deepsets")
    neighbours, counts, ego = draw()
    got = encoder.encode(p, "c.", neighbours, counts, ego)
    for i, count in enumerate(counts.tolist()):
        rows = [
            torch.relu(torch.relu(torch.cat([row, torch.ones(1)]) @ p["c.row0"]) @ p["c.row1"])
            for row in neighbours[i, :count]
        ]
        stacked = torch.stack(rows) if rows else torch.zeros(1, 8)
        pooled = torch.cat([stacked.max(0).values, stacked.mean(0)])
        torch.testing.assert_close(got[i], torch.tanh(pooled @ p["c.pool.weight"] + p["c.pool.bias"]))


def test_attention_row_by_row() -> None:
    encoder, p = build("attention")
    neighbours, counts, ego = draw()
    got = encoder.encode(p, "c.", neighbours, counts, ego)
    for i, count in enumerate(counts.tolist()):
        query = (ego[i] @ p["c.query.weight"] + p["c.query.bias"]).view(2, 4)
        pooled = torch.zeros(2, 4)
        if count:
            rows = torch.relu(torch.cat([neighbours[i, :count], torch.ones(count, 1)], 1) @ p["c.row0"])
            keys, values = (rows @ p["c.keys_values"]).view(count, 2, 2, 4).unbind(1)
            for head in range(2):
                weights = torch.softmax(keys[:, head] @ query[head] / math.sqrt(4.0), 0)
                pooled[head] = weights @ values[:, head]
        context = torch.tanh(pooled.view(-1) @ p["c.pool.weight"] + p["c.pool.bias"])
        torch.testing.assert_close(got[i], context, rtol=1e-4, atol=1e-6)


def test_lstm_against_torchs_packed_module() -> None:
    encoder, p = build("lstm")
    neighbours, counts, ego = draw()
    module = torch.nn.LSTM(FEATURES, 8, batch_first=True)
    with torch.no_grad():
        module.weight_ih_l0.copy_(p["c.input"])
        module.weight_hh_l0.copy_(p["c.hidden"])
        module.bias_ih_l0.copy_(p["c.bias"])
        module.bias_hh_l0.zero_()
    real = counts > 0
    reverse = (counts[:, None] - 1 - torch.arange(MOST)).clamp(min=0)
    farthest_first = neighbours.gather(1, reverse[..., None].expand_as(neighbours).long())
    packed = pack_padded_sequence(farthest_first[real], counts[real].long(), batch_first=True, enforce_sorted=False)
    last = torch.zeros(len(ego), 8)
    last[real] = module(packed)[1][0][0].detach()
    expected = torch.tanh(last @ p["c.pool.weight"] + p["c.pool.bias"])
    torch.testing.assert_close(encoder.encode(p, "c.", neighbours, counts, ego), expected, rtol=1e-5, atol=1e-6)


def test_an_observation_without_rows_has_no_encoder() -> None:
    assert make_encoder(ObservationSpec("bare", 1, features(2), (), 0), ContextSettings()) is None


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match=r"context\.hidden 64 is not a multiple of context\.heads 5"):
        make_encoder(SPEC, ContextSettings(encoder="attention", hidden=64, heads=5))


def test_versions_name_the_bits() -> None:
    flat = torch.arange(5.0)
    other = flat.clone()
    other[3] = torch.nextafter(other[3], torch.tensor(9.0))
    assert encoder_version(flat) == encoder_version(flat.clone())
    assert encoder_version(flat) != encoder_version(other)


def test_leaving_absent_rows_out_changes_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ObservationSpec("made", 1, (), tuple(Feature(f"f{i}", "1", 1.0, "") for i in range(5)), 6)
    encoder = DeepSets(spec, ContextSettings(encoder="deepsets", hidden=16, size=8))
    rng = np.random.default_rng(0)
    first = encoder.initialise(rng, "")
    neighbours = torch.from_numpy(rng.normal(size=(300, 6, 5)))
    counts = torch.from_numpy(rng.integers(0, 7, 300).astype(np.int32))

    def run() -> list[torch.Tensor]:
        parameters = {name: torch.from_numpy(array).double().requires_grad_() for name, array in first.items()}
        context = encoder.encode(parameters, "", neighbours, counts, torch.zeros(300, 0))
        return [context, *torch.autograd.grad((context**2).sum(), list(parameters.values()))]

    assert context_module._real_rows(torch.ones(300, 6)) is not None
    ragged = run()
    monkeypatch.setattr(context_module, "_MANY", 1000)
    assert context_module._real_rows(torch.ones(300, 6)) is None
    for left, right in zip(ragged, run(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["deepsets", "attention"])
def test_rows_named_as_real_are_all_that_is_computed(name: str) -> None:
    encoder, parameters = build(name)
    neighbours, counts, ego = draw()
    mask = torch.arange(neighbours.shape[1]) < counts[:, None]
    real = mask.view(-1).nonzero()[:, 0]
    found = []
    for given, where in ((neighbours, None), (torch.where(mask[..., None], neighbours, torch.nan), real)):
        flat = {key: value.clone().requires_grad_() for key, value in parameters.items()}
        context = encoder.encode(flat, "c.", given, counts, ego, where)
        found.append([context, *torch.autograd.grad((context**2).sum(), list(flat.values()))])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
