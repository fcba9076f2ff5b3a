"""The workers of one run as a group of torch.distributed: sums of gradients, and bytes from each to each.

A group is an object of its own, not torch's global one, so nothing has to be set up or torn down around it. Every call
is collective: all workers make the same calls in the same order. What `sum` gives is the same to the bit everywhere,
and from run to run, as long as their number stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from opencda_marl.core.errors import WorkerError
from opencda_marl.nn.peers import Peer, here, named, parsed
from opencda_marl.nn.posted import posted, read
from opencda_marl.nn.shared import SharedSum, find_area, open_area

__all__ = ["ProcessGroup"]

_POLL = 5e-5  # [s] between two looks at an exchange: in torch's own wait nobody would hear Ctrl-C
_CLOSED = ("onnection closed", "onnection reset", "roken pipe", "onnection refused", "has left", "is gone")
_LOOK = 0.1  # [s] between two calls of `meanwhile`


class ProcessGroup:
    """One worker's end of the group; made by all of them at once, and blocks until all have.

    `meanwhile` is called several times a second while another worker is awaited; what it raises ends the waiting, and
    the group with it.

    Args:
        store: where they find each other.
        rank: of this worker, from 0.
        size: how many there are.
        timeout: [s] that a worker waits for another one before it gives up.
        device: of the gradients.
        own_gpu: has every worker of this machine a GPU of its own? Then NCCL sums on them; gloo does elsewhere.
        address: that this worker listens on; None: the machine's name.

    Raises:
        WorkerError: not all of them came.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float,
        device: torch.device,
        own_gpu: bool = False,
        address: str | None = "127.0.0.1",
    ) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self.meanwhile = _nothing
        self._peers: list[Peer] = []  # by rank, this one too
        self._near = False
        self._length = -1
        self._shared: SharedSum | None = None  # of vectors that are added up, and where, on one machine
        with self._heard("come together"):
            gloo: Any = dist.ProcessGroupGloo  # torch's stubs know little of it
            options = gloo._Options()
            options._timeout = timedelta(seconds=timeout)
            options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
            self._gloo: Any = gloo(PrefixStore("gloo", store), rank, size, options)
            self._sums: Any = self._gloo
            if device.type == "cuda" and own_gpu:
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timedelta(seconds=timeout)
                self._sums = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl)
                # it meets at its first sum, and by the first update the store may be gone
                self._wait(self._sums.allreduce([torch.zeros(1, device=device)]))
        self._peers = parsed(self.share(here()))
        places = {peer.place for peer in self._peers}
        self._near = len(places) == 1 and "" not in places  # one machine: bytes go through its memory

    def sum(self, flat: Float[Tensor, " size"]) -> None:
        """Add up the same vector of all workers, in place.

        Raises:
            WorkerError: one of them is gone, or does not answer.
        """
        with self._heard("add up gradients"):
            shared = self._shared_for(flat)
            if shared is not None:
                shared(flat.numpy(), self.meanwhile)
            else:
                self._wait(self._sums.allreduce([flat]))

    def sums_form(self, like: Float[Tensor, " size"]) -> str:
        """How such vectors are added up: `shared memory`, `gloo` or `nccl`. Collective.

        Raises:
            WorkerError: one of the others is gone, or does not answer.
        """
        with self._heard("add up gradients"):
            if self._shared_for(like) is not None:
                return "shared memory"
        return "gloo" if self._sums is self._gloo else "nccl"

    def _shared_for(self, flat: Tensor) -> SharedSum | None:
        """Where such vectors are added up if all workers reach one memory. Collective at the first of a length."""
        if flat.device.type != "cpu" or flat.dtype != torch.float32 or not flat.is_contiguous():
            return None
        if self._length != len(flat):
            self._length = len(flat)
            if self._shared is not None:
                self._shared.close()
            self._shared = self._share_memory(len(flat))
        return self._shared

    def _share_memory(self, length: int) -> SharedSum | None:
        """Memory that worker 0 makes and the others find; None: sums go over the network."""
        opened = open_area(self.size, length) if self.rank == 0 else None
        told = self.broadcast((opened[1] if opened else "").encode() if self.rank == 0 else None).decode()
        area = opened[0] if opened else find_area(told, self.size, length)
        shared = None
        if area is not None:
            try:
                shared = SharedSum(area, self.rank, [peer.process for peer in self._peers], self._timeout)
            except OSError:  # an older kernel, a filter of system calls, another namespace of processes
                area.close()
        if self.meet([shared is not None]).all():
            return shared
        if shared is not None:
            shared.close()
        return None

    def meet(self, values: Sequence[float]) -> Float64[np.ndarray, "workers values"]:
        """The same few numbers of all workers, by rank. The one call that may wait long.

        Raises:
            WorkerError: one of them is gone, or does not come within the timeout.
        """
        with self._heard("meet"):
            return self._table(values)

    def gather(self, data: bytes) -> list[bytes]:
        """What each worker has to say, by rank, at worker 0; nothing elsewhere.

        Raises:
            WorkerError: one of them is gone, or does not answer.
        """
        with self._heard("gather"):
            if self._near and (passed := self._passed(data, reader=self.rank == 0)) is not None:
                return passed
            lengths, own = self._padded(data)
            found = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
            self._wait(self._gloo.gather([found] if self.rank == 0 else [], [own]))
        return [bytes(one.numpy()[:length]) for one, length in zip(found, lengths, strict=self.rank == 0)]

    def share(self, data: bytes) -> list[bytes]:
        """What each worker has to say, by rank, for all of them.

        Raises:
            WorkerError: one of them is gone, or does not answer.
        """
        with self._heard("share rows"):
            if self._near and (passed := self._passed(data, reader=True)) is not None:
                return passed
            lengths, own = self._padded(data)
            found = [torch.empty_like(own) for _ in range(self.size)]
            self._wait(self._gloo.allgather([found], [own]))
        return [one.numpy()[:length].tobytes() for one, length in zip(found, lengths, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """What worker 0 has to say; the others give None.

        Raises:
            WorkerError: one of them is gone, or does not answer.
        """
        with self._heard("begin"):
            length = torch.tensor([len(data or b"")])
            self._wait(self._gloo.broadcast(length, 0))
            text = np.zeros(int(length), np.uint8) if data is None else np.frombuffer(data, np.uint8).copy()
            told = torch.from_numpy(text)
            if len(told):
                self._wait(self._gloo.broadcast(told, 0))
        return bytes(told.numpy())

    def _table(self, values: Sequence[float]) -> Float64[np.ndarray, "workers values"]:
        """The same few numbers of all workers, by rank."""
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.zeros_like(own) for _ in range(self.size)]
        self._wait(self._gloo.allgather([found], [own]))
        return torch.stack(found).numpy()

    def _passed(self, data: bytes, *, reader: bool) -> list[bytes] | None:
        """Everybody's bytes by rank, through the memory of this machine; None: somebody could not read them so, and
        from now on nobody tries.

        Args:
            data: of this worker.
            reader: does it want those of the others? Else it gets none.
        """
        own = posted(data)
        try:
            told = [(int(row[0]), int(row[1]), int(row[2])) for row in self._table(own.where)]
            found: list[bytes | None] = []
            if reader:
                found = [
                    data if rank == self.rank else read(self._peers[rank].process, where)
                    for rank, where in enumerate(told)
                ]
            whole = [one for one in found if one is not None]
            self._near = bool(self._table([len(whole) == len(found)]).all())
        finally:
            own.close()
        return whole if self._near else None

    def _wait(self, work: Any) -> None:
        """Until an exchange is over."""
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL)
            if time.monotonic() - looked > _LOOK:
                self.meanwhile()
                looked = time.monotonic()
        work.wait()

    def _padded(self, data: bytes) -> tuple[list[int], Tensor]:
        """Everybody's lengths, and the data with what makes it as long as the longest."""
        lengths = [int(row[0]) for row in self._table([len(data)])]
        own = np.zeros(max(1, *lengths), np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        return lengths, torch.from_numpy(own)

    @contextmanager
    def _heard(self, what: str) -> Iterator[None]:
        """Turns torch's errors into one of ours, which names the other worker and says in plain words what it did.

        What torch said stays behind it as its cause.
        """
        try:
            yield
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            lost, why, fix = self._lost(str(error), late=isinstance(error, TimeoutError))
            raise WorkerError(
                f"worker {self.rank} of {self.size} lost {lost} when they were to {what}: {why}", fix=fix
            ) from error

    def _lost(self, said: str, *, late: bool) -> tuple[str, str, str]:
        """Whom an exchange failed with, why, and what to do.

        Args:
            said: by torch.
            late: did the other one not come in time?
        """
        others = [peer for peer in self._peers if peer.rank != self.rank]
        states = {peer: peer.state for peer in others}
        gone = [peer for peer in others if states[peer] == "gone"]
        stopped = [peer for peer in others if states[peer] == "stopped"]
        behind = [] if self._shared is None else [peer for peer in others if peer.rank in self._shared.behind()]
        found = gone or stopped or behind or (others if len(others) == 1 else [])
        lost, it = named(found) or "another one", "it" if len(found) < 2 else "they"
        see = "see what that one said, in workers/ of the run folder or where it was started"
        patience = f"did not answer within {self._timeout:g} s (worker_timeout)"
        if gone:
            return lost, f"{it} {'is' if it == 'it' else 'are'} gone", see
        if stopped:
            why = f"{it} {'is' if it == 'it' else 'are'} stopped (by SIGSTOP or Ctrl-Z), and {patience}"
            return lost, why, "stop no worker for longer, or set a longer worker_timeout"
        if late or "imed out" in said or "imeout" in said:
            return lost, f"{it} {patience}", see
        if any(word in said for word in _CLOSED):
            return lost, f"{it} has left" if it == "it" else f"{it} have left", see
        return lost, "the exchange failed", see

    def close(self) -> None:
        """Leave; whoever still waits for this worker hears that it is gone. May be called twice."""
        if self._shared is not None:
            self._shared.close()
        self._sums = self._gloo = None  # its sockets close when torch's object goes


def _nothing() -> None:
    """There is nothing to look at while others are awaited."""
