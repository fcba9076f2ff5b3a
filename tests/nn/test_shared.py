"""Sums in memory that processes share: equal to those of a group, and never awaited for ever."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from opencda_marl.core.errors import WorkerError
from opencda_marl.nn import process_group, shared
from opencda_marl.nn.process_group import ProcessGroup
from opencda_marl.nn.shared import Area, SharedSum, find_area, open_area

CPU = torch.device("cpu")


def nothing() -> None:
    """Nobody has anything to say."""


def area(size: int, count: int) -> Area:
    found = open_area(size, count)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("size", [2, 3])
def test_many_sums_in_turn(size: int) -> None:
    place, count = area(size, 1003), 1003

    def one(rank: int) -> list[bytes]:
        rng = np.random.default_rng(rank)
        own = SharedSum(place, rank, [os.getpid()] * size, 20.0)
        found = []
        for turn in range(50):
            flat = rng.normal(size=count).astype(np.float32)
            if (turn + rank) % 7 == 0:
                time.sleep(0.002)  # none is always the first one
            own(flat, nothing)
            found.append(flat.tobytes())
        own.close()
        return found

    with ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(one, range(size)))
    assert all(answer == answers[0] for answer in answers)
    drawn = [np.random.default_rng(rank) for rank in range(size)]
    for found in answers[0]:
        expected = np.zeros(count, np.float32)
        for rng in drawn:
            expected += rng.normal(size=count).astype(np.float32)
        assert found == expected.tobytes(), "rank 0 first"


def test_one_that_left_after_its_part_is_not_missed_and_one_that_left_before_is() -> None:
    place = area(2, 4)
    first, second = (SharedSum(place, rank, [os.getpid()] * 2, 5.0) for rank in (0, 1))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(second, np.ones(4, np.float32), nothing)
        flat = np.ones(4, np.float32)
        first(flat, nothing)
        done.result()
    second.close()
    assert flat.tolist() == [2.0] * 4
    with pytest.raises(ConnectionError, match="has left"):
        first(flat, nothing)


def test_one_that_fails_within_its_turn_has_not_delivered() -> None:
    place = area(2, 4)
    first, second = (SharedSum(place, rank, [os.getpid()] * 2, 5.0) for rank in (0, 1))
    with pytest.raises(ValueError, match="shape \\(3,\\) where 4 numbers"):
        second(np.ones(3, np.float32), nothing)
    second.close()
    with pytest.raises(ConnectionError, match="has left"):
        first(np.ones(4, np.float32), nothing)


def test_a_late_one() -> None:
    called: list[int] = []
    alone = SharedSum(area(2, 4), 0, [os.getpid()] * 2, 0.4)
    with pytest.raises(TimeoutError):
        alone(np.zeros(4, np.float32), lambda: called.append(1))
    assert 1 <= len(called) <= 5


def test_one_that_was_killed_is_noticed_long_before_the_timeout() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    alone = SharedSum(area(2, 4), 0, [os.getpid(), other.pid], 60.0)
    threading.Timer(0.3, other.send_signal, [signal.SIGKILL]).start()
    try:
        with pytest.raises(ConnectionError, match="worker 1 is gone"):
            alone(np.zeros(4, np.float32), nothing)
    finally:
        alone.close()
        other.wait()


def test_memory_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    opened = open_area(2, 8)
    assert opened is not None
    place, told = opened
    same = find_area(told, 2, 8)
    assert same is not None
    path, _, token = told.partition(" ")
    assert find_area(f"{path} {'0' * len(token)}", 2, 8) is None, "another memory at the same path"
    assert find_area(f"{tmp_path / 'none'} {token}", 2, 8) is None
    assert find_area("", 2, 8) is None
    place.close()
    assert find_area(told, 2, 8) is None, "no longer open"


def _worker(rank: int, store: str, count: int, answers: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    group = ProcessGroup(dist.FileStore(store, 2), rank, 2, timeout=30.0, device=CPU)
    flat = torch.full((count,), float(rank + 1))
    group.sum(flat)
    shorter = torch.full((3,), float(rank + 1))
    group.sum(shorter)
    used = group._shared is not None and group.sums_form(shorter) == "shared memory"
    answers.put((rank, used, flat.unique().tolist(), shorter.tolist()))
    group.close()


def test_processes_of_one_machine_share_memory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=_worker, args=(rank, str(tmp_path / "s"), 70_001, answers)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = sorted(answers.get(timeout=60.0) for _ in workers)
    for worker in workers:
        worker.join(30.0)
    assert found == [(0, True, [3.0], [3.0] * 3), (1, True, [3.0], [3.0] * 3)]


def _refuse(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("obstacle", ["unreachable", "no memory without a name", "processes cannot be watched"])
def test_where_one_cannot_reach_it_all_use_the_network(monkeypatch: pytest.MonkeyPatch, obstacle: str) -> None:
    if obstacle == "unreachable":
        monkeypatch.setattr(process_group, "find_area", lambda *_: None)
    elif obstacle == "no memory without a name":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(shared, "_watch", _refuse)
        monkeypatch.setattr(os, "getpid", lambda: threading.get_ident() % 2**31)  # threads as processes
    store = dist.HashStore()

    def one(rank: int) -> tuple[bool, list[float]]:
        group = ProcessGroup(store, rank, 2, timeout=20.0, device=CPU)
        flat = torch.full((5,), float(rank + 1))
        form = group.sums_form(flat)
        group.sum(flat)
        group.sum(flat)
        answer = group._shared is None and form == "gloo", flat.tolist()
        group.close()
        return answer

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, (0, 1))) == [(True, [6.0] * 5)] * 2


def test_a_group_says_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    def one(rank: int) -> str:
        group = ProcessGroup(store, rank, 2, timeout=20.0, device=CPU)
        try:
            group.sum(torch.zeros(5))
            if rank:
                return ""
            group.sum(torch.zeros(5))
        except WorkerError as error:
            return error.message
        finally:
            group.close()
        return "nothing was noticed"

    with ThreadPoolExecutor(2) as pool:
        said, _ = pool.map(one, (0, 1))
    lost = f"worker 1 (process {os.getpid()})"
    assert said == f"worker 0 of 2 lost {lost} when they were to add up gradients: it has left"


def test_who_is_late_is_known_from_the_memory() -> None:
    place = area(3, 4)
    mine, second, third = (SharedSum(place, rank, [os.getpid()] * 3, 0.3) for rank in range(3))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second, np.zeros(4, np.float32), nothing)
        with pytest.raises(TimeoutError):
            mine(np.zeros(4, np.float32), nothing)
        with pytest.raises(TimeoutError):
            other.result()
    assert mine.behind() == second.behind() == [2]
    third.close()
    assert mine.behind() == [2], "it has left before its turn"
    second.close()
    assert mine.behind() == [2], "and this one after it"
    mine.close()
