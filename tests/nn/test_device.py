"""Devices and threads: what is not there is an error, never a quiet fallback."""

from __future__ import annotations

import os

import pytest
import torch

from opencda_marl.core.errors import DeviceError
from opencda_marl.nn.device import resolve_acting_threads, resolve_device, torch_build


def test_cuda_without_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DeviceError, match="sees no CUDA device"):
            resolve_device(name)
    assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("cpu") == torch.device("cpu")


def test_cuda_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(DeviceError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:0", ""])
def test_other_names_mean_nothing(name: str) -> None:
    with pytest.raises(DeviceError, match="is no device"):
        resolve_device(name)


def test_the_build_is_named() -> None:
    assert torch_build().startswith(torch.__version__)
    assert ("CPU build" in torch_build()) == (torch.version.cuda is None)


def test_acting_threads_are_never_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    assert resolve_acting_threads("auto") == 8
    assert resolve_acting_threads(12) == 12
    assert resolve_acting_threads(100) == 24
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert resolve_acting_threads("auto") == 2
