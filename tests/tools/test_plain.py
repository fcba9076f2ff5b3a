"""The plain networks and update are what they say: the floor must be a real PPO, or ratios mean nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opencda_marl.learners.mappo import Networks
from opencda_marl.nn.context import make_encoder
from opencda_marl.settings.learning import ContextSettings, MappoSettings
from opencda_marl.settings.networks import Activation
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.bench_act import sizes_of
from opencda_marl.tools.plain import PackedLstm, PlainNets, Rows, Sizes, plain_act, plain_update
from opencda_marl.tools.synthetic import specs

_SIZES = Sizes(ego=5, scene=10, neighbour=4, preference=3)
_LEARNER = MappoSettings(hidden=[16], ego_hidden=[], epochs=2, minibatch_size=32, learning_rate=1e-2, entropy=0.0)


def _rows(count: int, context: int = 8) -> Rows:
    torch.manual_seed(0)
    counts = torch.randint(0, 7, (count,))
    return Rows(
        ego=torch.randn(count, 5),
        neighbours=torch.randn(count, 6, 4),
        mask=torch.arange(6)[None, :] < counts[:, None],
        context=torch.randn(count, context),
        scene=torch.randn(count, 10),
        preference=torch.full((count, 3), 1.0 / 3.0),
        action=torch.randn(count, 1) * 0.5,
        log_prob=torch.zeros(count),
        advantage=torch.randn(count),
        target=torch.randn(count, 4),
    )


@pytest.mark.parametrize("encoder", ["deepsets", "attention", "lstm"])
def test_rows_that_are_masked_change_nothing(encoder: str) -> None:
    nets = PlainNets(_SIZES, ContextSettings(encoder=encoder, size=8, hidden=16), _LEARNER, frozen=False)
    rows = _rows(20)
    rows.mask[0] = False  # nobody is there at all
    before = nets.mean(rows), nets.values(rows)
    rows.neighbours[~rows.mask & rows.mask.any(1, keepdim=True)] = 99.0
    after = nets.mean(rows), nets.values(rows)
    assert torch.isfinite(before[0]).all()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_the_packed_lstm_is_the_lstm_run_row_by_row() -> None:
    torch.manual_seed(1)
    encoder = PackedLstm(4, ContextSettings(encoder="lstm", size=8, hidden=16))
    rows = _rows(10)
    found = encoder(rows.neighbours, rows.mask)
    for index in range(10):
        length = max(1, int(rows.mask[index].sum()))
        output, _ = encoder.lstm(rows.neighbours[index : index + 1, :length])
        torch.testing.assert_close(found[index], encoder.out(output[0, -1]), rtol=0, atol=1e-6)


def test_actions_lie_within_their_bounds() -> None:
    nets = PlainNets(_SIZES, ContextSettings(size=8, hidden=16), _LEARNER, frozen=False)
    actions = plain_act(nets, _rows(50))
    assert actions.shape == (50,)
    assert actions.abs().max() <= 1.0
    assert not actions.requires_grad


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize(("algorithm", "preference"), [("mappo", 0), ("pcmappo", 3)])
def test_the_plain_networks_are_the_learners(algorithm: str, preference: int, activation: Activation) -> None:
    """As many parameters in layers of the same shapes: else a ratio compares unequal work."""
    own = MappoSettings(hidden=[32, 16], ego_hidden=[8], activation=activation)
    settings = RunSettings(algorithm=algorithm, context=ContextSettings(size=8, hidden=16), learner=own)
    spec, action = specs(settings)
    encoder = make_encoder(spec, settings.context)
    named = Networks(settings, spec, action, encoder, trained=True).layout.shapes
    ours = [shape for name, shape in named.items() if ".context." not in name]  # the encoder's fused form differs
    assert sizes_of(settings).preference == preference
    plain = PlainNets(sizes_of(settings), settings.context, own, frozen=False)
    # Linear keeps [outputs, inputs]
    theirs = [tuple(reversed(p.shape)) for name, p in plain.named_parameters() if "encoder" not in name]
    assert sorted(ours) == sorted(theirs)
    bends = [
        type(module) for net in (plain.actor, plain.critic, plain.actor_ego) for module in net if not _linear(module)
    ]
    assert bends == [{"tanh": nn.Tanh, "relu": nn.ReLU}[activation]] * 5


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def test_the_value_of_each_component_depends_on_the_preference() -> None:
    nets = PlainNets(_SIZES, ContextSettings(size=8, hidden=16), _LEARNER, frozen=False)
    rows = _rows(5)
    before = nets.values(rows)
    rows.preference = torch.tensor([[1.0, 0.0, 0.0]]).expand(5, 3)
    assert before.shape == (5, 4)
    assert (nets.values(rows) != before).all()


@pytest.mark.parametrize("frozen", [True, False])
def test_the_update_learns_and_leaves_a_frozen_encoder_alone(frozen: bool) -> None:
    torch.manual_seed(2)
    nets = PlainNets(_SIZES, ContextSettings(size=8, hidden=16), _LEARNER, frozen=frozen)
    optimiser = torch.optim.Adam(nets.trained(), lr=_LEARNER.learning_rate)
    rows = _rows(100)
    encoder = [parameter.clone() for parameter in nets.actor_encoder.parameters()]
    loss = ((nets.values(rows) - rows.target) ** 2).mean()
    for _ in range(10):
        assert plain_update(nets, optimiser, rows, _LEARNER) == 2 * 4  # 100 rows: three of 32 and one of 4
    assert ((nets.values(rows) - rows.target) ** 2).mean() < 0.9 * loss
    unchanged = all(torch.equal(old, new) for old, new in zip(encoder, nets.actor_encoder.parameters(), strict=True))
    assert unchanged is frozen
