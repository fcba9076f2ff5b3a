"""What became of another worker's process, as messages name it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from opencda_marl.nn.peers import here, named, parsed


def test_running_stopped_and_gone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pid, host, place = json.loads(here())
        assert pid == os.getpid()
        own, peer, far, unseen = parsed(
            [here(), *(json.dumps(told).encode() for told in ([other.pid, host, place], [7, "b", "x"], [8, "c", ""]))]
        )
        assert (own.state, peer.state, far.state, unseen.state) == ("running", "running", None, None)
        assert str(peer) == f"worker 1 (process {other.pid})"
        assert named([peer, far]) == f"worker 1 (process {other.pid}) and worker 2 (process 7 on b)"
        other.send_signal(signal.SIGSTOP)
        give_up = time.monotonic() + 20.0
        while peer.state != "stopped":
            assert time.monotonic() < give_up
            time.sleep(0.01)
        other.kill()
        while peer.state != "gone":  # a zombie, as nobody has asked for its exit code yet
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        other.kill()
        other.wait()
    assert peer.state == "gone"
