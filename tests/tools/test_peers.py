"""The updates that ours is measured against are real ones: losses by hand, weights that move, targets that follow."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from opencda_marl.core.errors import ConfigError
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.tools.peers import PEERS, make_peer, require_peers
from opencda_marl.tools.plain_sac import PlainSac, SacRows

_SETTINGS = MasacSettings(hidden=[16, 16], tau=0.1)


def _rows(count: int = 32, features: int = 5) -> SacRows:
    torch.manual_seed(3)
    return SacRows(
        features=torch.randn(count, features),
        action=torch.rand(count, 1) * 2.0 - 1.0,
        rewards=torch.randn(count, 1),
        discount=0.99 * (torch.arange(count) % 8 > 0).float(),
        following=torch.randn(count, features),
    )


def _constant(module: torch.nn.Module, outputs: list[float]) -> None:
    """Make a network say the same whatever it sees."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        list(module.parameters())[-1].copy_(torch.tensor(outputs))


def _fixed_noise(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    def drawn(normal: torch.distributions.Normal, *_: object) -> Tensor:
        return normal.loc + normal.scale * noise

    monkeypatch.setattr(torch.distributions.Normal, "rsample", drawn)


# noise 0.5 of a standard normal: log N = -0.125 - log(2 pi) / 2; tanh(0.5) = 0.462117, 1 - tanh^2 = 0.786448
_LOG_PROB = -0.125 - 0.5 * math.log(2 * math.pi) - math.log(0.786448 + 1e-6)  # -0.803713


def test_the_losses_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    _fixed_noise(monkeypatch, 0.5)
    sac = PlainSac(2, MasacSettings(hidden=[4], initial_alpha=0.2, target_entropy=-1.0))
    _constant(sac.actor, [0.0, 0.0])  # mean 0, standard deviation 1
    for critic, value in zip(sac.critics, (1.0, 3.0), strict=True):
        _constant(critic, [value])
    for target, value in zip(sac.targets, (5.0, 2.0), strict=True):
        _constant(target, [value])
    zeros = torch.zeros(2, 2)
    rows = SacRows(zeros, torch.zeros(2, 1), torch.tensor([[0.5], [-1.0]]), torch.tensor([0.9, 0.0]), zeros)
    # wanted: 0.5 + 0.9 (2 - 0.2 * -0.803713) = 2.444668, and -1 for the vehicle that has ended
    first = ((1.0 - 2.444668) ** 2 + (1.0 + 1.0) ** 2) / 2
    second = ((3.0 - 2.444668) ** 2 + (3.0 + 1.0) ** 2) / 2
    assert float(sac.critic_loss(rows).detach()) == pytest.approx(first + second, rel=1e-5)
    actor_loss, log_prob = sac.actor_loss(rows)
    assert log_prob.detach().tolist() == pytest.approx([_LOG_PROB, _LOG_PROB], rel=1e-5)
    assert float(actor_loss.detach()) == pytest.approx(0.2 * -0.803713 - 1.0, rel=1e-5)
    # -log(0.2) * (-0.803713 - 1)
    assert float(sac.alpha_loss(log_prob).detach()) == pytest.approx(math.log(0.2) * 1.803713, rel=1e-5)


def test_several_values_are_weighed_and_one_twin_gives_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _fixed_noise(monkeypatch, 0.5)
    sac = PlainSac(2, MasacSettings(hidden=[4], initial_alpha=0.2), values=2)
    _constant(sac.actor, [0.0, 0.0])
    for twins in (sac.critics, sac.targets):
        _constant(twins[0], [1.0, 6.0])  # weighed: 1 + 0.5 * 6 = 4
        _constant(twins[1], [3.0, 0.0])  # 3: the smaller
    zeros = torch.zeros(1, 2)
    rows = SacRows(
        zeros, torch.zeros(1, 1), torch.tensor([[0.5, 0.0]]), torch.tensor([1.0]), zeros, torch.tensor([[1.0, 0.5]])
    )
    # entropy: 0.2 * 0.803713 = 0.160743 in all, so 0.107162 to each: 0.107162 + 0.5 * 0.107162 is all of it
    # wanted: 0.5 + 3 + 0.107162 = 3.607162, and 0.107162
    first = (1.0 - 3.607162) ** 2 + (6.0 - 0.107162) ** 2
    second = (3.0 - 3.607162) ** 2 + 0.107162**2
    assert float(sac.critic_loss(rows).detach()) == pytest.approx(first + second, rel=1e-5)
    assert float(sac.actor_loss(rows)[0].detach()) == pytest.approx(0.2 * -0.803713 - 3.0, rel=1e-5)


def test_the_targets_follow_by_tau() -> None:
    sac = PlainSac(5, _SETTINGS)
    before = [target.clone() for target in sac.targets.parameters()]
    sac.update(_rows())
    for old, new, own in zip(before, sac.targets.parameters(), sac.critics.parameters(), strict=True):
        torch.testing.assert_close(new.data, 0.9 * old + 0.1 * own.data, rtol=0, atol=1e-6)


def test_the_critics_learn_what_they_are_shown() -> None:
    torch.manual_seed(0)
    sac = PlainSac(5, MasacSettings(hidden=[32], learning_rate=1e-2))
    rows = _rows()
    rows.discount.zero_()
    first = sac.update(rows)["critic_loss"]
    for _ in range(100):
        last = sac.update(rows)["critic_loss"]
    assert last < 0.2 * first


@pytest.mark.parametrize("name", PEERS)
def test_a_step_changes_every_weight(name: str) -> None:
    peer = make_peer(name, _SETTINGS, [_rows()])
    before = [weight.detach().clone() for weight in peer.weights()]
    # three networks of three layers and two targets of three, weights and biases; SB3 has mean and spread apart,
    # TorchRL has its twins stacked; and the temperature
    assert len(before) == {"straightforward": 31, "sb3": 33, "torchrl": 19}[name]
    for _ in range(2):  # after one, what feeds a dead unit may stand where it was
        peer.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, peer.weights(), strict=True)]
    assert all(changed)


def test_batches_come_in_turn() -> None:
    one, other = _rows(), _rows()
    other.rewards += 100.0
    torch.manual_seed(0)
    sac = make_peer("straightforward", _SETTINGS, [one, other])
    losses = [float(sac.step()["critic_loss"]) for _ in range(4)]
    assert [loss > 1000.0 for loss in losses] == [False, True, False, True]


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such update") as caught:
        require_peers(["straightforward", "rllib"])
    assert "sb3" in caught.value.fix


def test_a_peer_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "sb3", ("a_package_that_nobody_has",))
    with pytest.raises(ConfigError, match="a_package_that_nobody_has not installed") as caught:
        require_peers(["sb3"])
    assert caught.value.fix == "pip install 'opencda-marl[bench]'"


def test_nothing_of_the_peers_is_imported_before_they_are_made() -> None:
    import subprocess

    code = "import sys, opencda_marl.tools.peers; sys.exit(any(p in sys.modules for p in ('torchrl', 'tensordict')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
