"""Compiled forms of a pure update function, made from outside; eager is the definition."""

from __future__ import annotations

import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch

from opencda_marl.core.errors import CompilerError

__all__ = ["Mode", "UpdateForm", "why_not_compiled"]

Mode = Literal["eager", "compiled"]

_ROUNDS = 7  # of the measurement, interleaved


def why_not_compiled() -> str | None:
    """What keeps torch.compile from working here, in words; None when nothing is known to."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # seconds to import: only who compiles pays

    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    if not any(shutil.which(name) for name in names):
        return f"no C++ compiler ({', '.join(names)})"
    for what, place in (("torch", Path(torch.__file__).parent), ("the compiler's cache", Path(cache_dir()))):
        if " " in str(place):  # unquoted in inductor's command lines: pytorch#191010, pytorch#122476
            return f"the path of {what} has a space: {place}"
    return None


class UpdateForm:
    """A pure function, called in the form that was asked for or that proved faster.

    The function takes and returns tensors (and dicts of them), changes nothing in place and has static shapes. It may
    call `torch.autograd.grad` by an argument that is a leaf (see `nn.flat.as_leaf`).

    Args:
        function: the definition.
        asked: `eager`, `compiled`, or `auto`: both are timed once, at the first call, on its own arguments.
        obstacle: why this function cannot be compiled at all, if so; eager then, and `note` says it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        asked: Literal["eager", "compiled", "auto"],
        *,
        obstacle: str | None = None,
    ) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._asked = asked
        self.mode: Mode | None = None  # None: `auto` has not measured yet
        self.note = ""  # for the init line
        if asked == "eager":
            self.mode = "eager"
        elif reason := obstacle or why_not_compiled():
            self.mode, self.note = "eager", f"update_mode {asked}: eager, because {reason}"
        elif asked == "compiled":
            self.mode = "compiled"

    def __call__(self, *arguments: Any) -> Any:
        """The function's result.

        Raises:
            CompilerError: `compiled` was asked for and failed.
        """
        if self.mode is None:
            self._measure(arguments)
        return self._function(*arguments) if self.mode == "eager" else self._call_compiled(arguments)

    def choose(self, mode: Mode | None) -> None:
        """Take over what an earlier part of the run decided; it stays, unless it cannot be had here."""
        if mode is not None and self._asked == "auto" and self.mode is None:
            self.mode, self.note = mode, f"update_mode auto: {mode}, as this run decided before"

    def invalidate(self) -> None:
        """Forget the compiled form; the next call makes it anew. The choice of a mode stays."""
        self._compiled = None

    def _call_compiled(self, arguments: tuple[Any, ...]) -> Any:
        from torch._dynamo import config as dynamo_config
        from torch._dynamo.exc import TorchDynamoException

        if self._compiled is None:
            self._compiled = torch.compile(_with_code_of_its_own(self._function), fullgraph=True, dynamic=False)
        try:
            # without this setting dynamo refuses torch.autograd.grad inside of a graph
            with dynamo_config.patch(trace_autograd_ops=True), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the compiler's own use of its own parts
                return self._compiled(*arguments)
        except TorchDynamoException as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise CompilerError(
                f"learner.update_mode: the update could not be compiled: {' '.join(lines[:2])}",
                fix="learner.update_mode=eager",
            ) from error

    def _measure(self, arguments: tuple[Any, ...]) -> None:
        """Time both forms; nothing changes, because the function is pure."""
        try:
            self._call_compiled(arguments)
        except CompilerError as error:
            self.mode, self.note = "eager", f"update_mode auto: eager; {error.message}"
            return
        eager, compiled = [], []
        for _ in range(_ROUNDS):
            eager.append(_seconds(lambda: self._function(*arguments)))
            compiled.append(_seconds(lambda: self._call_compiled(arguments)))
        times = {"eager": statistics.median(eager), "compiled": statistics.median(compiled)}
        self.mode = "compiled" if times["compiled"] < times["eager"] else "eager"
        measured = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in times.items())
        self.note = f"update_mode auto: {self.mode} ({measured})"


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
