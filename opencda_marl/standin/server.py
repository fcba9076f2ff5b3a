"""One server: a world, its two ports, its clock, and what goes wrong with it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter, deque
from typing import Any, NoReturn

from opencda_marl.standin import wire
from opencda_marl.standin.calls import Calls
from opencda_marl.standin.faults import Action, Faults
from opencda_marl.standin.process import CRASHED, SAYS
from opencda_marl.standin.rpc import Requests, methods_of, value
from opencda_marl.standin.streams import Streams
from opencda_marl.standin.traffic_manager import TrafficManagerCalls
from opencda_marl.standin.world import Frame, World

__all__ = ["Server"]

_LEAK_LOOK = 0.2  # [s]


class Server:
    """All that one process serves.

    Args:
        streaming_port: that tokens name.
        version: that the server says it has.
        faults: what is to go wrong.
        frame_delay: [s] between the answer to a tick and its frame.
        rate: [1/s] frames of asynchronous mode.
        first_stream: id of the first sensor's stream.
        xodr: OpenDRIVE text of the first world; None: the one that is built in.
    """

    def __init__(
        self,
        *,
        streaming_port: int,
        version: str,
        faults: Faults,
        frame_delay: float = 0.0,
        rate: float = 60.0,
        first_stream: int = 2,
        xodr: str | None = None,
    ) -> None:
        self._faults, self._delay, self._rate = faults, frame_delay, rate
        self._counters: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._tick_times: deque[float] = deque(maxlen=2000)  # [s]
        self._ticks = self._due = 0
        self._hung = False
        self._leaked: list[bytearray] = []
        self.world = World(streaming_port, first_stream, xodr)
        self.streams = Streams(self._counters)
        calls = Calls(self.world, self.streams, streaming_port, version, self._tick, self._advance)
        methods = methods_of(calls, TrafficManagerCalls(self.world), self)
        self.requests = Requests(methods, self._counters, self._calls, self._intercept)

    async def run(self) -> None:
        """The clock: frames of asynchronous mode, time to die, memory."""
        begun = time.monotonic()
        dies = begun + self._faults.number("die", float("inf"))
        leak = self._faults.number("leak", 0.0)
        self._advance()
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= dies:
                _crash()
            self._leak_to(leak * (now - begun))
            if not self.world.synchronous and now >= due:
                self._advance()
                due = max(due + 1.0 / self._rate, now)
            wait = due - time.monotonic() if not self.world.synchronous else _LEAK_LOOK
            await asyncio.sleep(max(min(wait, _LEAK_LOOK, dies - now), 0.0))

    # --- ticks

    def _tick(self) -> int:
        """One tick, now or after the delay. Returns: the frame that it makes."""
        if self._delay > 0.0:
            self._due += 1
            asyncio.get_running_loop().call_later(self._delay, self._advance_late)
            return self.world.frame + self._due
        self._advance()
        return self.world.frame

    def _advance_late(self) -> None:
        self._due -= 1
        self._advance()

    def _advance(self) -> None:
        """Simulate one step and send it."""
        action = self._faults.frames.get(self.world.frame + 1)
        if action in ("die", "hang", "drop"):
            self._fail(action)
        if self._hung:
            return
        begun = time.perf_counter()
        frame = self.world.tick(self._free_step())
        if action == "malformed":
            frame = Frame(frame.number, [(stream, payload[:-1]) for stream, payload in frame.payloads])
        self.streams.publish(frame)
        self._tick_times.append(time.perf_counter() - begun)
        self._counters["frames"] += 1
        if self._faults.leak_per_frame:
            self._leak_to(len(self._leaked) + self._faults.leak_per_frame)

    def _free_step(self) -> float | None:
        """[s] of a frame that comes by itself, so that simulated time keeps to the clock; None: as the settings say."""
        free = not self.world.synchronous and not self.world.settings[wire.Settings.FIXED_DELTA_SECONDS][0]
        return 1.0 / self._rate if free else None

    # --- faults

    def _intercept(self, method: str) -> str | float | None:
        """What to do with a call instead of answering it; a number: [s] to wait with the answer."""
        action: Action | None = self._faults.methods.get(method)
        if method == "tick_cue":
            self._ticks += 1
            action = self._faults.ticks.get(self._ticks, action)
        if "http" in self._faults.alone:
            return "malformed"
        if "hang" in self._faults.alone:
            return "hang"
        if action == "die":
            _crash()
        if action == "hang" and method == "tick_cue" and self._ticks in self._faults.ticks:
            self._hung = True
        if self._hung and method == "tick_cue":
            return "hang"
        return action if action is not None else self._faults.late.get(method)

    def _fail(self, action: Action) -> None:
        """At a frame."""
        if action == "die":
            _crash()
        if action == "drop":
            self.requests.drop()
            self.streams.drop()
        self._hung = self._hung or action == "hang"

    def _leak_to(self, mebibytes: float) -> None:
        while len(self._leaked) < int(mebibytes):
            self._leaked.append(bytearray(b"x" * (1 << 20)))

    # --- what no CARLA has

    @value
    def standin(self) -> str:
        """That it is one."""
        return SAYS

    @value
    def standin_counters(self) -> dict[str, Any]:
        """Connections of each channel since the start and now, calls of each method, frames, and [ms] of a tick."""
        times = sorted(self._tick_times)
        following = self.streams.open_connections()
        return {
            "frame": self.world.frame,
            "frames": self._counters["frames"],
            "frames_skipped": self._counters["frames_skipped"],
            "rpc_connections": self._counters["rpc_connections"],
            "rpc_open": len(self.requests.open),
            "stream_connections": self._counters["stream_connections"],
            "stream_open": sum(following.values()),
            "world_open": following[wire.WORLD_STREAM],
            "unknown_stream_connections": self._counters["unknown_stream_connections"],
            "not_requests": self._counters["not_requests"],
            "actors": len(self.world.episode.actors),
            "calls": dict(self._calls),
            "tick_ms_p50": 1e3 * times[len(times) // 2] if times else 0.0,
            "tick_ms_p99": 1e3 * times[len(times) * 99 // 100] if times else 0.0,
        }


def _crash() -> NoReturn:
    sys.stdout.flush()
    os._exit(CRASHED)
