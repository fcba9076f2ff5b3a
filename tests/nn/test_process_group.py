"""A group of two or three in threads of one process: sums, meetings, messages, and what happens when one is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from opencda_marl.core.errors import WorkerError
from opencda_marl.nn import posted, process_group
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
    assert lost.message == f"worker 0 of 2 lost worker 1 (process {os.getpid()}) when they were to meet: it has left"
    assert re.search(r"onnection (closed|reset) by peer", str(lost.__cause__)), "torch's own words, for the log"


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
    named = f"worker 0 of 2 lost worker 1 (process {os.getpid()}) when they were to meet"
    assert late.message == f"{named}: it did not answer within 1 s (worker_timeout)"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGSTOP, "it is stopped (by SIGSTOP or Ctrl-Z), and did not answer within 1 s (worker_timeout)"),
        (signal.SIGKILL, "it is gone"),
    ],
)
def test_which_of_three_it_is_is_said(number: int, words: str) -> None:
    """Two threads, and a process of another kind that they take for the third one."""
    third = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    over = threading.Barrier(3)

    def work(group: ProcessGroup) -> Any:
        if group.rank == 1:
            over.wait(20.0)
            return None
        group._peers[1] = replace(group._peers[1], process=third.pid)
        try:
            return group.meet([0.0])
        finally:
            over.wait(20.0)

    third.send_signal(number)
    time.sleep(0.2)
    try:
        lost = together(3, work, timeout=1.0)
    finally:
        third.kill()
        third.wait()
    for rank in (0, 2):
        assert isinstance(lost[rank], WorkerError)
        assert f"worker {rank} of 3 lost worker 1 (process {third.pid}) when they were to meet: {words}" in str(
            lost[rank]
        )


def test_torchs_words_are_not_a_persons() -> None:
    def work(group: ProcessGroup) -> str:
        with pytest.raises(WorkerError) as found, group._heard("meet"):
            raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] something odd\nand more")
        return found.value.message

    words = f"worker 0 of 2 lost worker 1 (process {os.getpid()}) when they were to meet: the exchange failed"
    assert together(2, work)[0] == words


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


def _own_bytes(rank: int) -> bytes:
    return np.random.default_rng(rank).bytes(300_000 * rank)  # worker 0 has nothing to say


@pytest.mark.parametrize("obstacle", ["none", "no memory", "another user's", "somebody else's"])
def test_large_messages_go_through_memory_or_where_it_cannot_be_read_over_the_network(
    monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    through: list[bool] = []
    passed = ProcessGroup._passed

    def watched(group: ProcessGroup, data: bytes, *, reader: bool) -> Any:
        found = passed(group, data, reader=reader)
        through.append(found is not None)
        return found

    monkeypatch.setattr(ProcessGroup, "_passed", watched)
    if obstacle == "no memory":
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError))
    if obstacle == "another user's":
        monkeypatch.setattr(process_group, "read", lambda _process, _where: None)
    if obstacle == "somebody else's":  # another file under the same descriptor, or none
        monkeypatch.setattr(
            process_group, "read", lambda process, where: posted.read(process, (where[0], where[1], where[2] ^ 1))
        )

    def work(group: ProcessGroup) -> Any:
        own = _own_bytes(group.rank)
        return [group.gather(own), group.share(own), group.gather(own), group.share(own)]

    everything = [_own_bytes(rank) for rank in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    found = together(3, work)
    assert found[0] == [everything] * 4
    assert found[1] == found[2] == [[], everything, [], everything]
    assert through == [True] * 12 if obstacle == "none" else through == [False] * 3, "tried once, and by all"
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "nothing stays open"
