"""The only scalarisation."""

from __future__ import annotations

import numpy as np
import torch

from opencda_marl.core.objectives import OBJECTIVES, scalarise


def test_order() -> None:
    assert OBJECTIVES == ("safety", "efficiency", "comfort")


def test_by_hand() -> None:
    rewards = np.array([[-20.0, -1.0, -0.5], [0.0, 2.0, 4.0]])
    preference = np.array([[0.6, 0.3, 0.1], [0.0, 0.5, 0.25]])
    assert np.allclose(scalarise(rewards, preference), [-12.0 - 0.3 - 0.05, 1.0 + 1.0])
    assert np.allclose(scalarise(rewards, np.ones(3)), [-21.5, 6.0])  # one preference for all; ones: the plain sum
    found = scalarise(torch.tensor(rewards), torch.tensor(preference))
    assert found.tolist() == scalarise(rewards, preference).tolist()


def test_gradients_pass() -> None:
    preference = torch.tensor([0.2, 0.3, 0.5], requires_grad=True)
    scalarise(torch.tensor([1.0, -2.0, 4.0]), preference).backward()
    assert preference.grad is not None
    assert preference.grad.tolist() == [1.0, -2.0, 4.0]
