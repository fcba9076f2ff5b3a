"""The compiled LSTM: equal to the packed module, built once, and never in the way where it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from opencda_marl.core.spec import Feature, ObservationSpec
from opencda_marl.nn import native
from opencda_marl.nn.context import make_encoder
from opencda_marl.nn.flat import Layout
from opencda_marl.nn.lstm import BoundLstm, find_kernel
from opencda_marl.nn.native import cache_root
from opencda_marl.settings.learning import ContextSettings

_QUICK = "from opencda_marl.nn import native; native._FLAGS = ('-O0', *native._FLAGS[1:])"  # a third of the time
FIND = f"{_QUICK}; from opencda_marl.nn.lstm import find_kernel; print(find_kernel())"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a folder with spaces"
    monkeypatch.setenv("OPENCDA_MARL_CACHE", str(folder))
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))
    return folder


def bind(module: torch.nn.LSTM) -> BoundLstm:
    kernel, why = find_kernel()
    assert kernel is not None, why
    bias = module.bias_ih_l0 + module.bias_hh_l0
    return kernel.bind(module.weight_ih_l0, module.weight_hh_l0, bias)


def packed(module: torch.nn.LSTM, neighbours: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows from the last real one to the first, through torch's own module."""
    last = torch.zeros(len(counts), module.hidden_size)
    real = counts > 0
    if real.any():
        reverse = (counts[:, None] - 1 - torch.arange(neighbours.shape[1])).clamp(min=0).long()
        rows = neighbours.gather(1, reverse[..., None].expand_as(neighbours))[real]
        sequence = pack_padded_sequence(rows, counts[real].long(), batch_first=True, enforce_sorted=False)
        last[real] = module(sequence)[1][0][0]
    return last


@pytest.mark.parametrize(
    ("rows", "longest", "features", "hidden"),
    [(25, 13, 28, 256), (1, 1, 3, 16), (7, 30, 28, 64), (13, 5, 1, 10), (6, 4, 2, 33), (100, 12, 28, 32)],
)
def test_equal_to_the_packed_module(rows: int, longest: int, features: int, hidden: int) -> None:
    torch.manual_seed(rows)
    module = torch.nn.LSTM(features, hidden, batch_first=True)
    bound = bind(module)
    rng = np.random.default_rng(hidden)
    for low in (0, longest):  # all lengths, and everybody at full length
        counts = torch.from_numpy(rng.integers(low, longest + 1, rows).astype(np.int32))
        neighbours = torch.from_numpy(rng.normal(0.0, 2.0, (rows, longest, features)).astype(np.float32))
        with torch.no_grad():
            torch.testing.assert_close(bound(neighbours, counts), packed(module, neighbours, counts), rtol=0, atol=1e-6)


def test_extreme_inputs_saturate_and_stay_finite() -> None:
    module = torch.nn.LSTM(2, 16, batch_first=True)
    neighbours = torch.tensor([[[1e6, -1e6]], [[-1e30, 1e30]], [[0.0, 0.0]]])
    counts = torch.ones(3, dtype=torch.int32)
    with torch.no_grad():
        got = bind(module)(neighbours, counts)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, packed(module, neighbours, counts), rtol=0, atol=1e-6)


def test_nobody_and_nothing() -> None:
    bound = bind(torch.nn.LSTM(2, 16, batch_first=True))
    assert bound(torch.zeros(0, 4, 2), torch.zeros(0, dtype=torch.int32)).shape == (0, 16)
    assert bound(torch.ones(3, 4, 2), torch.zeros(3, dtype=torch.int32)).abs().max() == 0.0


def test_what_would_read_beyond_the_rows_is_refused() -> None:
    bound = bind(torch.nn.LSTM(2, 16, batch_first=True))
    with pytest.raises(ValueError, match="not in"):
        bound(torch.zeros(2, 4, 2), torch.tensor([1, 5], dtype=torch.int32))
    with pytest.raises(ValueError, match="not in"):
        bound(torch.zeros(2, 4, 2), torch.tensor([-1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="features"):
        bound(torch.zeros(2, 4, 3), torch.tensor([1, 2], dtype=torch.int32))


def test_built_once_in_a_folder_with_spaces(cache: Path) -> None:
    assert find_kernel()[0] is not None
    (library,) = cache.iterdir()
    made = library.stat().st_mtime_ns
    assert find_kernel()[0] is not None
    assert [entry.stat().st_mtime_ns for entry in cache.iterdir()] == [made]


def test_many_builders_at_once_leave_one_whole_library(cache: Path) -> None:
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(find_kernel()[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None] * 4
    assert len(list(cache.iterdir())) == 1


def test_two_processes_at_once(cache: Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", FIND], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "LstmKernel" in out
    assert len(list(cache.iterdir())) == 1


SPEC = ObservationSpec(
    "test", 1, (Feature("e", "1", 1.0, ""),), tuple(Feature(f"f{i}", "1", 1.0, "") for i in range(3)), 4
)


@pytest.mark.parametrize(("compiler", "expected"), [("no-such-compiler", "no C++ compiler"), ("false", "false failed")])
def test_without_a_compiler_it_is_packed_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, expected: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    encoder = make_encoder(SPEC, ContextSettings(encoder="lstm", hidden=16, size=4))
    layout = Layout(encoder.shapes(""))
    flat = torch.from_numpy(layout.flatten(encoder.initialise(np.random.default_rng(0), "")))
    act, form = encoder.acting(layout.views(flat), "")
    assert form.startswith("packed (")
    assert expected in form
    rows = torch.ones(2, 4, 3), torch.tensor([0, 3], dtype=torch.int32), torch.ones(2, 1)
    torch.testing.assert_close(act(*rows), encoder.encode(layout.views(flat), "", *rows))


def _pipe(library: Path, _whole: bytes) -> None:
    os.mkfifo(library)


@pytest.mark.parametrize(
    "damage",
    [
        lambda library, _whole: library.write_bytes(b"not a library"),
        lambda library, whole: library.write_bytes(whole[:10_000]),  # mapping it would end the process
        lambda library, whole: library.write_bytes(whole[:4096] + bytes(4096) + whole[8192:]),
        _pipe,
    ],
    ids=["no library", "cut short", "a page of zeros", "a pipe"],
)
def test_a_broken_library_in_the_cache_is_built_again(cache: Path, damage: Callable[[Path, bytes], object]) -> None:
    assert find_kernel()[0] is not None
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.unlink()  # a new file: this process has the old one mapped
    damage(library, whole)
    fresh = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, timeout=120, check=True)
    assert "LstmKernel" in fresh.stdout
    assert library.is_file()
    assert library.stat().st_size > 1000


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENCDA_MARL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "opencda-marl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "opencda-marl"
