"""The RPC port: msgpack-rpc as rpclib speaks it.

    request   [0, id, "method", [[asynchronous], arguments …]]   nothing marks where one ends: they follow each other
    answer    [1, id, error or nil, result or nil]               one for each request, whether anybody reads it or not

A method is a function with a name, and with the form of its answer: `value` (Response<T>), `void` (Response<void>) or
`bare` (the result as it is).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import msgpack

from opencda_marl.standin import wire
from opencda_marl.standin.world import RefusedError

__all__ = ["Method", "Requests", "bare", "methods_of", "value", "void"]

Form = Literal["value", "void", "bare"]
F = TypeVar("F", bound=Callable[..., Any])
_LARGEST = 256 << 20  # [bytes] of a request: a whole map comes in one string
_HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Method:
    """One that can be called."""

    name: str
    form: Form
    function: Callable[..., Any]
    arguments: int  # without the metadata


def value(function: F) -> F:
    """Answered by Response<T>."""
    return _marked(function, "value")


def void(function: F) -> F:
    """Answered by Response<void>."""
    return _marked(function, "void")


def bare(function: F) -> F:
    """Answered by what it returns."""
    return _marked(function, "bare")


def _marked(function: F, form: Form) -> F:
    function.__dict__["answer_form"] = form
    return function


def methods_of(*owners: object) -> dict[str, Method]:
    """The marked methods of some objects, by name."""
    found = {}
    for owner in owners:
        for name, function in inspect.getmembers(owner, inspect.ismethod):
            form = function.__func__.__dict__.get("answer_form")
            if form is not None:
                found[name] = Method(name, form, function, len(inspect.signature(function).parameters))
    return found


class Requests:
    """What is done with requests, for all connections.

    Args:
        methods: by name.
        counters: `rpc_connections` is counted in it.
        calls: how often each method was called.
        intercept: asked before each call; says what to do instead of answering (`die`, `hang`, `drop`, `malformed`),
            or after how many seconds to answer.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        counters: Counter[str],
        calls: Counter[str],
        intercept: Callable[[str], str | float | None],
    ) -> None:
        self.methods, self.counters, self.calls = methods, counters, calls
        self.intercept = intercept
        self.open: set[asyncio.Transport] = set()

    def connection(self) -> asyncio.Protocol:
        """One more connection, for `loop.create_server`."""
        return _Connection(self)

    def drop(self) -> None:
        """Close all connections."""
        for transport in self.open:
            transport.abort()

    def answer(self, number: int, name: str, arguments: list[Any]) -> list[Any]:
        """Call a method. Returns: the whole answer."""
        method = self.methods.get(name)
        if method is None:
            error = f"rpclib: server could not find function '{name}' with argument count {len(arguments)}."
            return [1, number, error, None]
        if len(arguments) != method.arguments + 1:
            error = (
                f"rpclib: function '{name}' (called with {len(arguments)} arg(s)) was called with an invalid number of "
                f"arguments. Expected: {method.arguments + 1}."
            )
            return [1, number, error, None]
        try:
            result = method.function(*arguments[1:])
        except RefusedError as error:
            text = f"Responding error from function {name}: {error}" if "registry" in str(error) else str(error)
            return [1, number, None, wire.done_error(text) if method.form == "void" else wire.failed(text)]
        except (LookupError, TypeError, ValueError) as error:
            # an argument of another shape than it has in 0.9.16: the client is told, and who runs the server too
            text = f"{name}: {type(error).__name__}: {error}"
            sys.stderr.write(f"stand-in: {text}\n")
            return [1, number, None, wire.done_error(text) if method.form == "void" else wire.failed(text)]
        if method.form == "bare":
            return [1, number, None, result]
        return [1, number, None, wire.DONE if method.form == "void" else wire.ok(result)]


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=_LARGEST)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._requests.open.add(self._transport)
        self._requests.counters["rpc_connections"] += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._requests.open.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                kind, number, name, arguments = message
                if kind != 0 or not isinstance(name, str) or not isinstance(arguments, list):
                    raise ValueError(message)
                self._take(int(number), name, arguments)
        except (ValueError, TypeError, msgpack.UnpackException, msgpack.BufferFull):
            self._requests.counters["not_requests"] += 1
            self._transport.abort()

    def _take(self, number: int, name: str, arguments: list[Any]) -> None:
        requests = self._requests
        requests.calls[name] += 1
        instead = requests.intercept(name)
        if instead == "hang":
            return
        if instead == "drop":
            self._transport.abort()
            return
        if instead == "malformed":
            self._transport.write(_HTTP)
            return
        answer = msgpack.packb(requests.answer(number, name, arguments), use_bin_type=True)
        if isinstance(instead, float):
            asyncio.get_running_loop().call_later(instead, self._transport.write, answer)
        else:
            self._transport.write(answer)
