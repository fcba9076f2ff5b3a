"""A pure update recorded once on tensors of its own (a CUDA graph) and replayed.

    state, inputs --copied--> buffers of the graph --replay--> the same buffers --one clone--> state, metrics

Nothing that changes is frozen in: whatever the update reads lies in those buffers and is written anew for each call.
What a call returns is a clone, so it is the caller's to keep.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from opencda_marl.core.errors import CudaGraphCaptureError
from opencda_marl.nn.flat import as_leaf

__all__ = ["CapturedUpdate", "Capturer", "CudaCapturer", "Inputs", "State", "Update", "check_no_graph_through"]

State = dict[str, Tensor]
Inputs = Mapping[str, Tensor]
Metrics = Float[Tensor, " metrics"]
Update = Callable[[State, Inputs], tuple[State, Metrics]]
"""A pure update: state and inputs -> the state afterwards (same names, shapes, dtypes) and metrics."""

_Bytes = UInt8[Tensor, " bytes"]

_WARM_UPS = 3  # what torch recommends before a capture: lazy set-up of libraries must not be recorded
_ALIGNED = 256  # [bytes] as the allocator aligns, so that kernels read as fast as elsewhere
_METRICS = "metrics"  # no tensor of a state may have this name


class Capturer(Protocol):
    """Records a call that works on fixed tensors. `CudaCapturer` is the one in use; tests have one without a GPU."""

    device: torch.device

    def sent(self, tensor: Tensor) -> bool:
        """Does it have to cross to the device?"""

    def host_buffer(self, size: int) -> _Bytes:
        """Memory of the host to send from."""

    def wait_for_host(self) -> None:
        """Until the last `send` has read its buffer."""

    def send(self, host: _Bytes, buffer: _Bytes) -> None:
        """Copy to the device without waiting."""

    def warm_up(self, call: Callable[[], None]) -> None:
        """Run it so that nothing is set up for the first time while it is recorded."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """What does again what `call` does, on the same tensors."""


class CudaCapturer:
    """A CUDA graph. Warm-up is on a side stream, as torch asks for.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._read: torch.cuda.Event | None = None

    def sent(self, tensor: Tensor) -> bool:
        """See `Capturer`."""
        return tensor.device.type == "cpu"

    def host_buffer(self, size: int) -> _Bytes:
        """See `Capturer`: pinned."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def wait_for_host(self) -> None:
        """See `Capturer`; it has long been read, except when updates follow each other without anything between."""
        if self._read is not None:
            self._read.synchronize()

    def send(self, host: _Bytes, buffer: _Bytes) -> None:
        """See `Capturer`."""
        buffer.copy_(host, non_blocking=True)
        self._read = self._read or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._read.record(torch.cuda.current_stream(self.device))

    def warm_up(self, call: Callable[[], None]) -> None:
        """See `Capturer`."""
        here, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                call()
        here.wait_stream(side)
        torch.cuda.synchronize(self.device)

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """See `Capturer`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            call()
        return graph.replay


class _Packing:
    """Where named tensors lie in one flat buffer of bytes, so that one copy moves them all."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._parts: dict[str, tuple[int, int, torch.dtype, torch.Size]] = {}
        size = 0
        for name, tensor in like.items():
            length = tensor.numel() * tensor.element_size()
            self._parts[name] = (size, length, tensor.dtype, tensor.shape)
            size += -(-length // _ALIGNED) * _ALIGNED
        self.size = size

    def views(self, flat: _Bytes) -> dict[str, Tensor]:
        """The named tensors in a buffer."""
        return {
            name: flat[first : first + length].view(dtype).view(shape)
            for name, (first, length, dtype, shape) in self._parts.items()
        }

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Raises ValueError: names, shapes or dtypes are others."""
        if given.keys() != self._parts.keys():
            raise ValueError(f"names differ from those that were captured: {sorted(given.keys() ^ self._parts.keys())}")
        for name, (_, _, dtype, shape) in self._parts.items():
            if given[name].shape != shape or given[name].dtype != dtype:
                raise ValueError(
                    f"{name}: {given[name].dtype} {tuple(given[name].shape)}, but {dtype} {tuple(shape)} was captured"
                )


class CapturedUpdate:
    """The update on buffers of its own.

    Args:
        function: the definition; run eagerly a few times, and recorded.
        capturer: how.
        state: of the first call; it is read only.
        inputs: of the first call.

    Raises:
        CudaGraphCaptureError: it could not be recorded. Weights, moments and the CPU's generator are as before, but
            torch cannot set CUDA's generator right after a broken capture, so the process must end.
    """

    def __init__(self, function: Update, capturer: Capturer, state: State, inputs: Inputs) -> None:
        check_no_graph_through(state)
        self._function, self._capturer = function, capturer
        self._leaves = frozenset(name for name, tensor in state.items() if tensor.requires_grad)
        self._given: dict[str, tuple[Tensor, int]] = {}  # what was returned last, and its versions
        generators = _generators(capturer.device)
        try:
            self._make_buffers(state, inputs)
            self._load(state)
            self._load_inputs(inputs)
            capturer.warm_up(self._advance)
            self._load(state)  # the warm-up has moved weights and moments
            self._replay = capturer.record(self._advance)
        except Exception as error:  # whatever it is, the stream was being captured: this is the end of the process
            torch.set_rng_state(generators[0])
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise CudaGraphCaptureError(
                f"the update could not be captured as a CUDA graph: {type(error).__name__}: {' '.join(lines[:2])}",
                fix="learner.update_mode=eager learner.cuda_graph_update=false",
            ) from error
        _restore(capturer.device, generators)

    def _make_buffers(self, state: State, inputs: Inputs) -> None:
        capturer, device = self._capturer, self._capturer.device
        self._state, self._inputs = _Packing(state), _Packing(inputs)
        sent = _Packing({name: tensor for name, tensor in inputs.items() if capturer.sent(tensor)})
        self._host = capturer.host_buffer(sent.size)
        self._arrival = torch.zeros(sent.size, dtype=torch.uint8, device=device)
        self._host_views = sent.views(self._host)
        self._near = [name for name in inputs if name not in self._host_views]
        near = {name: torch.zeros_like(inputs[name], device=device) for name in self._near}
        self._input_views = sent.views(self._arrival) | near
        # one eager call: a function that breaks the protocol is found out, and the number of metrics is known
        found, measured = self._function(dict(state), {name: tensor.to(device) for name, tensor in inputs.items()})
        self._state.check(found)
        self._packing = _Packing({**state, _METRICS: measured})
        self._flat = torch.zeros(self._packing.size, dtype=torch.uint8, device=device)
        self._views = self._packing.views(self._flat)
        self._names = list(state)

    def __call__(self, state: State, inputs: Inputs) -> tuple[State, Metrics]:
        """See `Update`. What is returned is the caller's; both arguments are copied.

        Raises:
            ValueError: other names, shapes or dtypes than at capture.
        """
        self._state.check(state)
        self._inputs.check(inputs)
        self._load({name: tensor for name, tensor in state.items() if not self._holds(name, tensor)})
        self._load_inputs(inputs)
        self._replay()
        found = self._packing.views(self._flat.clone())
        measured = found.pop(_METRICS)
        self._given = {name: (tensor, tensor._version) for name, tensor in found.items()}
        return found, measured

    def _advance(self) -> None:
        """The update from the buffers into the buffers: what is recorded."""
        # a leaf made here is new each time: no autograd graph of another stream can hang on to it
        state = {name: self._views[name] for name in self._names}
        state |= {name: as_leaf(state[name]) for name in self._leaves}
        found, measured = self._function(state, dict(self._input_views))
        with torch.no_grad():
            # a tensor handed through as another one would be overwritten before it is read
            own = self._flat.untyped_storage().data_ptr()
            free = {n: t.clone() if t.untyped_storage().data_ptr() == own else t for n, t in found.items()}
            torch._foreach_copy_([self._views[name] for name in self._names], [free[name] for name in self._names])
            self._views[_METRICS].copy_(measured)

    @torch.no_grad()
    def _load(self, state: State) -> None:
        if state:
            torch._foreach_copy_([self._views[n] for n in state], [tensor.detach() for tensor in state.values()])

    @torch.no_grad()
    def _load_inputs(self, inputs: Inputs) -> None:
        if self._host_views:
            self._capturer.wait_for_host()
            for name, view in self._host_views.items():
                view.copy_(inputs[name])
            self._capturer.send(self._host, self._arrival)
        if self._near:
            torch._foreach_copy_([self._input_views[name] for name in self._near], [inputs[n] for n in self._near])

    def _holds(self, name: str, tensor: Tensor) -> bool:
        """Is it what was returned last, so that the buffer has it? A detached one shares storage and version."""
        if name not in self._given:
            return False
        kept, version = self._given[name]
        return tensor.data_ptr() == kept.data_ptr() and tensor._version == version


def check_no_graph_through(state: Mapping[str, Tensor]) -> None:
    """No live tensor may have been computed with gradients from these, outside of the update.

    Its nodes belong to the stream that it was made on, which a capture must not touch. Looks at all tensors that Python
    knows of, once per capture.

    Raises:
        CudaGraphCaptureError: one has; it is named by shape and by what made it.
    """
    for name, tensor in state.items():
        if tensor.grad_fn is not None:
            raise _held(f"{name} of the state itself was computed with gradients ({tensor.grad_fn.name()})")
    gc.collect()  # a graph in a cycle that nobody reaches is no graph
    leaves_last = sorted(state, key=lambda name: state[name].requires_grad)  # one storage may hold them all
    storages = {state[name].untyped_storage().data_ptr(): name for name in leaves_last if state[name].numel()}
    for found in [found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter)]:
        reached = _reached(found, storages)
        if reached is not None:
            made = f"{tuple(found.shape)} made by {found.grad_fn.name()}"
            raise _held(f"a tensor of shape {made} holds an autograd graph through {reached}")


def _held(what: str) -> CudaGraphCaptureError:
    return CudaGraphCaptureError(
        f"the update cannot be captured as a CUDA graph: {what}, built outside of update()",
        fix="compute it under torch.no_grad(), or let it go before the update",
    )


def _reached(tensor: Tensor, storages: Mapping[int, str]) -> str | None:
    """The name of the storage that the tensor's autograd graph ends in; None if in none of them."""
    try:
        seen, ahead = set(), [tensor.grad_fn]
    except RuntimeError:  # a view that torch refuses to differentiate by: nobody can hold a graph through it
        return None
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of nodes that accumulate into a leaf
        if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in storages:
            return storages[leaf.untyped_storage().data_ptr()]
        ahead.extend(following for following, _ in node.next_functions)
    return None


def _generators(device: torch.device) -> list[Tensor]:
    """States of the default generators that the update could draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _restore(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
