"""A group of two or three in threads of one process: sums, meetings, messages, and what happens when one is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from opencda_marl.core.errors import WorkerError
from opencda_marl.nn.process_group import ProcessGroup

CPU = torch.device("cpu")


def together(size: int, work: Callable[[ProcessGroup], Any], *, timeout: float = 20.0) -> list[Any]:
    """What each of them returns, by rank; an exception is returned, not raised."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        group = ProcessGroup(store, rank, size, timeout=timeout, device=CPU)
        try:
            return work(group)
        except WorkerError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_a_sum_is_the_same_to_the_bit_everywhere_and_every_time() -> None:
    def work(group: ProcessGroup) -> np.ndarray:
        flat = torch.from_numpy(np.random.default_rng(group.rank).normal(size=10_001).astype(np.float32))
        group.sum(flat)
        return flat.numpy()

    first, again = together(3, work), together(3, work)
    assert all(found.tobytes() == first[0].tobytes() for found in (*first, *again))
    parts = [np.random.default_rng(rank).normal(size=10_001) for rank in range(3)]
    np.testing.assert_allclose(first[0], sum(parts), atol=1e-5)


def test_numbers_and_messages() -> None:
    def work(group: ProcessGroup) -> tuple[Any, ...]:
        own = bytes([65 + group.rank]) * group.rank  # worker 0 has nothing to say
        met = group.meet([group.rank, 0.5])
        told = group.broadcast(b"begin" if group.rank == 0 else None)
        nothing = group.broadcast(b"" if group.rank == 0 else None)
        return met.tolist(), group.gather(own), group.share(own), told, nothing

    found = together(3, work)
    rows = [[0.0, 0.5], [1.0, 0.5], [2.0, 0.5]]
    assert found[0] == (rows, [b"", b"B", b"CC"], [b"", b"B", b"CC"], b"begin", b"")
    assert found[1] == found[2] == (rows, [], [b"", b"B", b"CC"], b"begin", b"")


def test_whoever_loses_another_one_says_so_at_once() -> None:
    def work(group: ProcessGroup) -> Any:
        return None if group.rank else group.meet([0.0])

    lost, _ = together(2, work)
    assert isinstance(lost, WorkerError)
    assert "worker 0 of 2 lost another one when they were to meet" in lost.message


def test_a_worker_that_hangs_is_not_awaited_for_ever() -> None:
    over = threading.Event()

    def work(group: ProcessGroup) -> Any:
        if group.rank:
            over.wait(20.0)
            return None
        try:
            return group.meet([0.0])
        finally:
            over.set()

    late, _ = together(2, work, timeout=1.0)
    assert isinstance(late, WorkerError)
    assert "did not answer within 1 s" in late.message


def test_who_waits_can_be_called_away() -> None:
    over = threading.Event()

    class AwayError(Exception):
        pass

    def call() -> None:
        raise AwayError

    def work(group: ProcessGroup) -> bool:
        if group.rank:
            over.wait(20.0)
            return True
        try:
            group.meanwhile = call
            with pytest.raises(AwayError):
                group.sum(torch.zeros(3))
        finally:
            over.set()
        return True

    assert together(2, work) == [True, True]
