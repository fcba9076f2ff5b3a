"""Child processes that do a job beside their parent and never outlive it.

The parent hands over a request (a JSON file), the child leaves an answer (another one). The child holds the
read end of a pipe as its standard input: when the parent is gone, however it went, the pipe ends and so does
the child. Children are started afresh, never forked, in a session of their own, so that Ctrl-C reaches
only the parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import write_whole, writing

__all__ = ["Child", "answer", "end_with_parent", "read_request"]

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class Child:
    """`python -m MODULE REQUEST` with one thread.

    Args:
        module: whose `__main__` part reads the request.
        request: JSON values.
        folder: where request, answer and the child's output go.
        name: of those files.

    Raises:
        StorageError: the request cannot be written.
    """

    def __init__(self, module: str, request: Mapping[str, Any], *, folder: Path, name: str) -> None:
        self.name = name
        self._answer = folder / f"{name}.answer.json"
        self._log = folder / f"{name}.log"
        asked = folder / f"{name}.request.json"
        with writing(folder):
            folder.mkdir(exist_ok=True)
            self._answer.unlink(missing_ok=True)
        write_whole(asked, json.dumps({**request, "answer": str(self._answer)}).encode())
        with writing(self._log), self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(asked)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
            )

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self._process.poll() is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most `timeout` seconds; True if it has ended."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self) -> Any:
        """The answer of a child that has ended.

        Raises:
            OpenCDAError: it failed; with the end of what it said.
        """
        self.close()
        code = self._process.returncode
        if code != 0 or not self._answer.exists():
            said = self._log.read_text(errors="replace").strip().splitlines()[-12:]
            raise OpenCDAError(
                f"the child process {self.name} ended with code {code}:\n" + "\n".join(f"    {line}" for line in said),
                fix=f"all that it said is in {self._log}",
            )
        return json.loads(self._answer.read_bytes())

    def close(self) -> None:
        """End it if it still runs; may be called twice."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def read_request(path: str) -> dict[str, Any]:
    """In the child: what the parent asked for."""
    return dict(json.loads(Path(path).read_bytes()))


def answer(request: Mapping[str, Any], value: Any) -> None:
    """In the child: leave the answer."""
    write_whole(Path(request["answer"]), json.dumps(value).encode())


def end_with_parent() -> None:
    """In the child: from now on end when the parent does."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
