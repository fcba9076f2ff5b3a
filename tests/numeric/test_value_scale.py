"""Value normalisation: the running scale by hand, and a critic whose values stay where they are when it moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opencda_marl.nn.normaliser import RunningScale, preserve_outputs


def test_nothing_seen_is_the_identity() -> None:
    scale = RunningScale(2)
    assert scale.mean.tolist() == [0.0, 0.0]
    assert scale.std.tolist() == [1.0, 1.0]


def test_first_values_count_fully_and_later_ones_by_a_tenth() -> None:
    scale = RunningScale(1)
    scale.observe(np.array([[1.0], [3.0]]))
    assert (scale.mean[0], scale.std[0]) == pytest.approx((2.0, 1.0))
    scale.observe(np.array([[7.0], [7.0]]))
    # weights 0.9 * 0.1 = 0.09 and 0.1: mean (0.09 * 2 + 0.1 * 7) / 0.19, mean square (0.09 * 5 + 0.1 * 49) / 0.19
    mean = (0.09 * 2.0 + 0.1 * 7.0) / 0.19
    square = (0.09 * 5.0 + 0.1 * 49.0) / 0.19
    assert (scale.mean[0], scale.std[0]) == pytest.approx((mean, np.sqrt(square - mean**2)))


def test_a_constant_component_is_not_blown_up() -> None:
    scale = RunningScale(2)
    scale.observe(np.array([[5.0, 0.0], [5.0, 1.0]]))
    assert scale.std[0] == pytest.approx(0.01)
    assert scale.std[1] == pytest.approx(0.5)


def test_state_round_trip() -> None:
    scale, again = RunningScale(3), RunningScale(3)
    scale.observe(np.random.default_rng(0).normal(size=(5, 3)))
    again.load(scale.state())
    assert (again.mean == scale.mean).all()
    assert (again.std == scale.std).all()


def test_values_stay_when_the_scale_moves() -> None:
    rng = np.random.default_rng(1)
    weight, bias = torch.from_numpy(rng.normal(size=(6, 2))), torch.from_numpy(rng.normal(size=2))
    inputs = torch.from_numpy(rng.normal(size=(9, 6)))
    before = torch.tensor([0.0, 3.0]).double(), torch.tensor([1.0, 0.2]).double()
    after = torch.tensor([-4.0, 2.0]).double(), torch.tensor([7.0, 0.5]).double()
    values = (inputs @ weight + bias) * before[1] + before[0]
    preserve_outputs(weight, bias, before, after)
    torch.testing.assert_close((inputs @ weight + bias) * after[1] + after[0], values)


def test_by_hand() -> None:
    weight, bias = torch.tensor([[2.0]]), torch.tensor([1.0])
    # value = (2 x + 1) * 3 + 5 = 6 x + 8; in mean 2 and std 6: (6 x + 8 - 2) / 6 = x + 1
    preserve_outputs(
        weight, bias, (torch.tensor([5.0]), torch.tensor([3.0])), (torch.tensor([2.0]), torch.tensor([6.0]))
    )
    assert (weight.item(), bias.item()) == pytest.approx((1.0, 1.0))
