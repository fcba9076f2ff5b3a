"""The acting replica: refreshed once when stale, never written to by training."""

from __future__ import annotations

import pytest
import torch

from opencda_marl.nn.flat import Layout
from opencda_marl.nn.replica import Replica, resolve_acting_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "training", "expected"),
    [
        ("auto", CPU, CPU),
        ("auto", CUDA, CPU),
        ("train", CUDA, CUDA),
        ("train", CPU, CPU),
        ("cpu", CUDA, CPU),
        ("cpu", CPU, CPU),
    ],
)
def test_where_to_act(asked: str, training: torch.device, expected: torch.device) -> None:
    assert resolve_acting_device(asked, training) == expected


def test_refreshed_by_one_copy_when_stale() -> None:
    layout = Layout({"w": (2, 2), "b": (2,)})
    replica = Replica(layout, CPU, CPU)
    source = torch.arange(6.0, requires_grad=True)
    assert replica.refresh(source)
    assert replica.parameters["b"].tolist() == [4.0, 5.0]
    with torch.no_grad():
        source += 1.0
    assert replica.parameters["b"].tolist() == [4.0, 5.0]  # its own storage
    assert not replica.refresh(source)
    assert replica.parameters["b"].tolist() == [4.0, 5.0]
    replica.invalidate()
    assert replica.refresh(source)
    assert replica.parameters["b"].tolist() == [5.0, 6.0]
    assert not replica.flat.requires_grad


def test_engaged_only_between_devices() -> None:
    layout = Layout({"w": (1,)})
    assert not Replica(layout, CPU, CPU).engaged
    assert Replica(layout, CPU, torch.device("meta")).engaged


@pytest.mark.gpu
def test_cuda_parameters_arrive_in_pinned_memory() -> None:
    replica = Replica(Layout({"w": (5,)}), CPU, CUDA)
    assert replica.flat.is_pinned()
    replica.refresh(torch.arange(5.0, device="cuda"))
    assert replica.flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.gpu
def test_a_replica_beside_cuda_is_refreshed_by_updates_of_a_graph() -> None:
    """The source is a piece of what a captured update returned."""
    source = torch.arange(8.0, device="cuda")
    replica = Replica(Layout({"w": (2, 2), "b": (1,)}), CPU, CUDA)
    replica.refresh(source[:5])
    source = source + 1.0
    replica.invalidate()
    assert replica.refresh(source[:5])
    assert replica.parameters["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
