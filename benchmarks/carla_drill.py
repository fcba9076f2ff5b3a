"""A training run on CARLA's client whose server dies, is stopped, or hangs, again and again; against the stand-in.

    python benchmarks/carla_drill.py                   20 trials: killed, stopped, hanging in turn
    python benchmarks/carla_drill.py --trials 3        fewer
    python benchmarks/carla_drill.py --json FILE       the figures too

Each trial trains 3 episodes of 300 steps with some 15 vehicles. In the second one the server fails. The run has to end
by itself within its deadline, with exit code 10 or 12; a fresh server is started, the run goes on with --resume, and
what it leaves must be, bit for bit, what a run leaves whose server never failed. The stand-in is a test double: this
shows that nothing is lost and nothing hangs, not how often CARLA fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opencda_marl.core.machine import describe_machine
from opencda_marl.core.run_folder import read_episodes, read_run
from opencda_marl.standin import StandIn
from opencda_marl.tools.child_runs import ChildRun, differing_fields

__all__ = ["KINDS", "counters", "main", "reference", "trial"]

KINDS = ("SIGKILL", "SIGSTOP", "hang in tick")
PROFILE = "momarl/intersection/mappo"
TICK_TIMEOUT = 2.0  # [s]
DEADLINE = 3 * TICK_TIMEOUT + 5.0  # [s] the trainer's own for its child, the longest that a failure can go unseen
_STEPS = 300
_FAILS_AT = 4 + _STEPS + 100  # ticks: those of connecting, one episode, a third of the second
_SETTINGS = (
    f"max_steps={_STEPS}",
    "max_episodes=3",
    "checkpoint_every=1",
    "evaluation.final=false",
    "demand.rate_vph=400",
    "learner.n_steps=200",
    f"carla.tick_timeout={TICK_TIMEOUT:g}",
)
_LONG = 180.0  # [s] for a start-up, on a busy machine


def _run(folder: Path, name: str, port: int) -> ChildRun:
    return ChildRun(PROFILE, folder, name, overrides=(*_SETTINGS, f"carla.port={port}"))


def reference(folder: Path) -> ChildRun:
    """A run whose server never fails."""
    with StandIn() as server:
        run = _run(folder, "undisturbed", server.port)
        run.finish(run.start(), deadline=_LONG)
    return run


def counters(port: int) -> dict[str, Any]:
    """The stand-in's counters, asked with raw bytes."""
    import msgpack

    unpacker = msgpack.Unpacker(raw=False)
    with socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection:
        connection.sendall(msgpack.packb([0, 1, "standin_counters", [[False]]]))
        while True:
            unpacker.feed(connection.recv(1 << 16))
            for _, _, error, result in unpacker:
                assert error is None, error
                return dict(result[0][1])


def _wait_for_tick(server: StandIn, process: subprocess.Popen[bytes], tick: int) -> None:
    until = time.monotonic() + _LONG
    while time.monotonic() < until and process.poll() is None:
        if counters(server.port)["calls"].get("tick_cue", 0) >= tick:
            return
        time.sleep(0.02)
    raise AssertionError(f"the run did not get to tick {tick}; its exit code is {process.poll()}")


def trial(kind: str, folder: Path, name: str, undisturbed: ChildRun) -> dict[str, Any]:
    """One failure, and going on after it.

    Args:
        kind: one of KINDS.
        folder: for the run.
        name: of the run.
        undisturbed: what `reference` made.

    Returns:
        the exit code, seconds until the run ended and until it went on, and every difference that was found.
    """
    faults = [f"hang@tick:{_FAILS_AT}"] if kind == "hang in tick" else []
    with StandIn(*faults) as server:
        port, streaming = server.port, server.streaming_port
        run = _run(folder, name, port)
        process = run.start()
        try:
            _wait_for_tick(server, process, _FAILS_AT)
            failed = time.monotonic()
            if kind != "hang in tick":
                os.kill(server.process.pid, getattr(signal, kind))
            try:
                code: int | None = process.wait(DEADLINE + 30.0)
            except subprocess.TimeoutExpired:  # a trial that went wrong; the others are still to be made
                code = None
            detected = time.monotonic() - failed
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        storm = 0
        if kind == "hang in tick":
            storm = int(counters(port)["unknown_stream_connections"])
    saved = len(read_episodes(run.path))
    with StandIn(rpc_port=port, streaming_port=streaming) as server:
        begun = time.monotonic()
        process = run.start(resume=True)
        ticks = 0
        while ticks < 10 and process.poll() is None:
            ticks = int(counters(port)["calls"].get("tick_cue", 0))
            time.sleep(0.02)
        recovered = time.monotonic() - begun
        run.finish(process, deadline=_LONG)
        storm += int(counters(port)["unknown_stream_connections"])
    differences = differing_fields(read_episodes(undisturbed.path), read_episodes(run.path))
    return {
        "kind": kind,
        "exit_code": code,
        "detected_s": round(detected, 2),
        "saved_episodes": saved,
        "recovered_s": round(recovered, 2),
        "unknown_stream_connections": storm,
        "differences": differences,
        "backend": read_run(run.path)["init"]["backend"],
        "good": code in (10, 12) and detected < DEADLINE and saved == 1 and storm == 0 and not differences,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The drill. Returns: how many trials went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    say = sys.stdout.write
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        undisturbed = reference(folder)
        found = []
        for number in range(options.trials):
            one = trial(KINDS[number % len(KINDS)], folder, f"trial_{number}", undisturbed)
            found.append(one)
            said = f"exit code {one['exit_code']} after {one['detected_s']:.2f} s"
            what = "equal" if one["good"] else one
            say(f"{number + 1:3d}  {one['kind']:12s}  {said}, on again after {one['recovered_s']:.2f} s: {what}\n")
            sys.stdout.flush()
    good = sum(one["good"] for one in found)
    slowest = max(one["detected_s"] for one in found)
    recovery = statistics.median(one["recovered_s"] for one in found)
    say(f"{good} of {len(found)}; detected within {slowest:g} s (deadline {DEADLINE:g} s), ")
    say(f"on again after {recovery:g} s (median), against {found[0]['backend']}\n")
    if options.json is not None:
        answer = {"trials": found, "machine": describe_machine(), "deadline_s": DEADLINE}
        options.json.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    return len(found) - good


if __name__ == "__main__":
    sys.exit(main())
