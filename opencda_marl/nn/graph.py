"""Forms of a pure update, made from outside: eager, compiled, captured as a CUDA graph. Eager is the definition.

An update is `step(state, inputs) -> (state, metrics)`: dicts of tensors in, new tensors out, static shapes, nothing in
place, no wait for a device. `state["theta"]` is a leaf (see `nn.flat.as_leaf`), by which the update may call
`torch.autograd.grad`. Every number that changes from call to call (a learning rate) is an input: a tensor of no axes.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Collection
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from opencda_marl.core.errors import CompilerError, ConfigError
from opencda_marl.core.files import unsuited
from opencda_marl.core.speech import plain
from opencda_marl.nn.capture import CapturedUpdate, Capturer, CudaCapturer, Inputs, State, Update
from opencda_marl.nn.device import torch_build
from opencda_marl.nn.native import find_compiler
from opencda_marl.settings.networks import NetworkSettings, UpdateMode

__all__ = ["Inputs", "Mode", "State", "Update", "UpdateForm", "make_update", "why_not_compiled"]

Mode = Literal["eager", "compiled", "cuda_graph"]

_ROUNDS = 7  # of the measurement, interleaved
_CPU = torch.device("cpu")


def why_not_compiled(device: torch.device = _CPU) -> str | None:
    """What keeps torch.compile from working here, in words; None when nothing is known to."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # seconds to import: only who compiles pays

    command, why = find_compiler()
    if command is None:
        return f"no C++ compiler: {why}"
    if len(command) > 1:
        return f"CXX has arguments ({os.environ['CXX']}), which torch.compile does not understand"
    if device.type == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed"
    try:
        cache = Path(cache_dir())  # makes it
    except OSError as error:
        return f"the compiler's cache cannot be made: {error}"
    for what, place in (("torch", Path(torch.__file__).parent), ("the compiler's cache", cache)):
        if (sign := unsuited(place)) is not None:  # inductor's command lines: pytorch#191010, pytorch#122476
            return f"the path of {what} has {sign}: {plain(str(place))}"
    return None


def make_update(
    function: Update,
    own: NetworkSettings,
    device: torch.device,
    *,
    obstacle: str | None = None,
    ragged: Collection[str] = (),
) -> UpdateForm:
    """The form that a learner's settings ask for.

    `cuda_graph_update` is a wish: where a CUDA graph is known to be impossible before anything is captured, the update
    is eager and `note` says why. `update_mode: cuda_graph` is a demand.

    Args:
        function: the definition.
        own: the learner's settings.
        device: of training.
        obstacle: why this function can be neither compiled nor captured, if so.
        ragged: see `UpdateForm`.

    Raises:
        ConfigError: a CUDA graph was demanded and cannot be had.
    """
    asked, note = own.update_mode, ""
    if own.cuda_graph_update and asked in ("compiled", "auto"):
        note = f"cuda_graph_update is left aside, because update_mode is {asked}"
    elif own.cuda_graph_update and asked == "eager":
        reason = obstacle or _why_no_graph(device)
        asked, note = ("eager", f"cuda_graph_update: eager, because {reason}") if reason else ("cuda_graph", "")
    form = UpdateForm(function, asked, device=device, obstacle=obstacle, ragged=ragged)
    form.note = "; ".join(filter(None, (form.note, note)))
    return form


def _why_no_graph(device: torch.device) -> str | None:
    if device.type == "cuda":
        return None
    return f"a CUDA graph needs a CUDA device, and training is on {device} (torch {torch_build()})"


class UpdateForm:
    """A pure update, called in the form that was asked for or that proved faster.

    What it returns is the caller's to keep, in every form. Inputs may lie on the CPU: they are sent to the device.

    Args:
        function: the definition.
        asked: the form. `auto`: eager and another (the graph on CUDA, else compiled) are timed once, at the first call,
            on its own arguments. They are also timed, and `note` says so, when `cuda_graph` was asked for.
        device: of the state.
        obstacle: why this function can be neither compiled nor captured, if so.
        ragged: names of inputs whose first axis has another length at each call; see `static`.
        capturer: what captures; None: CUDA graphs on a CUDA device.

    Raises:
        ConfigError: `cuda_graph` was asked for and cannot be had.
    """

    def __init__(
        self,
        function: Update,
        asked: UpdateMode,
        *,
        device: torch.device = _CPU,
        obstacle: str | None = None,
        ragged: Collection[str] = (),
        capturer: Capturer | None = None,
    ) -> None:
        self._function, self._device, self._ragged = function, device, tuple(ragged)
        self._asked: UpdateMode = asked
        self._capturer = CudaCapturer(device) if capturer is None and device.type == "cuda" else capturer
        self._compiled: Callable[..., Any] | None = None
        self._captured: CapturedUpdate | None = None
        self._rival: Mode = "cuda_graph" if self._capturer is not None and asked != "compiled" else "compiled"
        self._measured = False
        self.mode: Mode | None = None if asked == "auto" else asked  # None: `auto` has not measured yet
        self.note = ""  # for the init line
        self._refuse_or_yield(obstacle)

    @property
    def static(self) -> bool:
        """Inputs must have the same shapes at each call, because this is captured, or may be."""
        return (self.mode or self._rival) == "cuda_graph"

    def _refuse_or_yield(self, obstacle: str | None) -> None:
        """What cannot be had is an error where a graph was demanded; else it is eager and says why."""
        if self._asked == "cuda_graph":
            reason = obstacle or (_why_no_graph(self._device) if self._capturer is None else None)
            if reason is not None:
                raise ConfigError(
                    f"learner.update_mode: cuda_graph cannot be had: {reason}",
                    fix="learner.update_mode=eager, or compiled, or auto; a run that began with it needs CUDA to go on",
                )
        elif self._asked != "eager":
            reason = obstacle or (why_not_compiled(self._device) if self._rival == "compiled" else None)
            if reason is not None:
                self.mode, self.note = "eager", f"update_mode {self._asked}: eager, because {reason}"

    def __call__(self, state: State, inputs: Inputs) -> tuple[State, Tensor]:
        """State and metrics after the update.

        Raises:
            CompilerError: `compiled` was asked for and failed.
            CudaGraphCaptureError: a CUDA graph could not be captured; the process must end.
            ValueError: shapes are others than those that were captured.
        """
        if self.mode is None or (self.mode == "cuda_graph" and not self._measured):
            self._measure(state, inputs)
        return self._call(cast("Mode", self.mode), state, inputs)

    def choose(self, mode: Mode | None) -> None:
        """Take over what an earlier part of the run decided; it stays, unless it cannot be had here."""
        if self._asked == "auto" and self.mode is None and mode in ("eager", self._rival):
            self.mode, self.note = mode, f"update_mode auto: {mode}, as this run decided before"
            self._measured = True

    def invalidate(self) -> None:
        """Forget the compiled or captured form; the next call makes it anew. The choice of a mode stays."""
        self._compiled = self._captured = None

    def _call(self, mode: Mode, state: State, inputs: Inputs) -> tuple[State, Tensor]:
        if mode == "cuda_graph":
            return self._call_captured(state, inputs)
        if self._device.type != "cpu":
            inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        return self._function(state, inputs) if mode == "eager" else self._call_compiled(state, inputs)

    def _call_captured(self, state: State, inputs: Inputs) -> tuple[State, Tensor]:
        if self._captured is None:
            self._captured = CapturedUpdate(self._function, cast("Capturer", self._capturer), state, inputs)
        return self._captured(state, inputs)

    def _call_compiled(self, state: State, inputs: Inputs) -> tuple[State, Tensor]:
        from torch._dynamo import config as dynamo_config
        from torch._dynamo import mark_dynamic
        from torch._dynamo.exc import TorchDynamoException

        if self._compiled is None:
            dynamic = None if self._ragged else False  # None: what is marked below, and nothing else
            self._compiled = torch.compile(_with_code_of_its_own(self._function), fullgraph=True, dynamic=dynamic)
        for name in self._ragged:
            if name in inputs:
                mark_dynamic(inputs[name], 0)  # one graph for all lengths
        try:
            # without this setting dynamo refuses torch.autograd.grad inside of a graph
            with dynamo_config.patch(trace_autograd_ops=True), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own use of its own parts
                found: tuple[State, Tensor] = self._compiled(state, inputs)
                return found
        except TorchDynamoException as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise CompilerError(
                f"learner.update_mode: the update could not be compiled: {' '.join(lines[:2])}",
                fix="learner.update_mode=eager",
            ) from error

    def _measure(self, state: State, inputs: Inputs) -> None:
        """Time eager and the other form; nothing changes, because the function is pure."""
        self._measured = True
        try:
            self._call(self._rival, state, inputs)
        except CompilerError as error:
            self.mode, self.note = "eager", f"update_mode auto: eager; {error.message}"
            return
        times: dict[Mode, list[float]] = {"eager": [], self._rival: []}
        for _ in range(_ROUNDS):
            for mode, found in times.items():
                found.append(_seconds(partial(self._call, mode, state, inputs)))
        medians = {mode: statistics.median(found) for mode, found in times.items()}
        measured = ", ".join(f"{mode} {1e3 * value:.2f} ms" for mode, value in medians.items())
        if self.mode is None:
            self.mode = self._rival if medians[self._rival] < medians["eager"] else "eager"
            self.note = f"update_mode auto: {self.mode} ({measured})"
        else:
            self.note = f"update_mode {self.mode}: {measured}"
        if self.mode == "eager":
            self.invalidate()  # a graph that is not used would keep its memory


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function under a code object that nobody else has.

    Compiled forms are kept by code object, at most eight of them. Learners share the code of their step, so without
    this the ninth learner of a process could not compile.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return FunctionType(call.__code__.replace(), call.__globals__, "update", None, call.__closure__)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
