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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import write_whole, writing
from opencda_marl.core.scratch import drop_scratch_folders, sweep

__all__ = ["Child", "OneAtATime", "answer", "end_with_parent", "read_request", "run_all"]

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

_LAST = 19  # the least urgent of the system's priorities


class Child:
    """`python -m MODULE REQUEST` with one thread.

    Args:
        module: whose `__main__` part reads the request.
        request: JSON values.
        folder: where request, answer and the child's output go.
        name: of those files.
        behind: it gets the processor's time that nobody else wants.

    Raises:
        StorageError: the request cannot be written.
    """

    def __init__(
        self, module: str, request: Mapping[str, Any], *, folder: Path, name: str, behind: bool = False
    ) -> None:
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
        if behind:
            _put_behind(self._process.pid)

    @property
    def done(self) -> bool:
        """Has it ended?"""
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

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
            said = ["it left no words"]
            with suppress(OSError):
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
            with suppress(OSError):  # it had no time to remove anything
                sweep()
        if self._process.stdin is not None:
            self._process.stdin.close()


def run_all(
    module: str,
    requests: Mapping[str, Mapping[str, Any]],
    *,
    folder: Path,
    workers: int,
    going_on: Callable[[int], bool] = lambda _done: True,
) -> dict[str, Any]:
    """Answers of many jobs, some of them at once.

    Args:
        module: see `Child`.
        requests: by name; the first ones are started first.
        folder: where their files go.
        workers: jobs at once.
        going_on: asked a few times a second with the number of jobs done; False ends everything.

    Returns:
        Answers by name; those that were not finished are missing.

    Raises:
        OpenCDAError: a job failed; the others are ended.
    """
    waiting = list(requests)
    running: list[Child] = []
    answers: dict[str, Any] = {}
    try:
        while (waiting or running) and going_on(len(answers)):
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                running.append(Child(module, requests[name], folder=folder, name=name))
            running[0].wait(0.2)
            for child in [child for child in running if child.done]:
                running.remove(child)
                answers[child.name] = child.result()
    finally:
        for child in running:
            child.close()
    return answers


class OneAtATime:
    """Jobs in a child process, one after another; while one runs only the newest further one waits.

    Args:
        module: see `Child`.
        folder: where their files go.
        behind: see `Child`.
    """

    def __init__(self, module: str, *, folder: Path, behind: bool = False) -> None:
        self._module = module
        self._folder = folder
        self._behind = behind
        self._asked: Mapping[str, Any] = {}
        self._ended: Child | None = None  # whose answer nobody has read yet
        self._running: Child | None = None
        self._waiting: tuple[str, Mapping[str, Any]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Jobs that run or wait, or whose answer does."""
        names = [each.name for each in (self._ended, self._running) if each is not None]
        return tuple(names) if self._waiting is None else (*names, self._waiting[0])

    def ask(self, name: str, request: Mapping[str, Any]) -> str | None:
        """Start a job, or let it wait.

        Returns:
            The name of the job that it replaced in the queue.
        """
        if self._running is None:
            self._running = Child(self._module, request, folder=self._folder, name=name, behind=self._behind)
            self._asked = request
            return None
        replaced = None if self._waiting is None else self._waiting[0]
        self._waiting = (name, request)
        return replaced

    def poll(self, *, wait: bool = False) -> tuple[str, Any] | None:
        """Name and answer of a job that has ended since; the next one is started.

        Args:
            wait: for the end of the one that runs, a second at most.

        Raises:
            OpenCDAError: the job failed; the next one is started all the same. Or the next one could not be started,
                and is forgotten; the answer that was there then comes with the next call.
        """
        child = self._running
        if self._ended is None and child is not None and (child.wait(1.0) if wait else child.done):
            self._running, self._ended = None, child
        if self._running is None and self._waiting is not None:
            (name, request), self._waiting = self._waiting, None
            self.ask(name, request)
        ended, self._ended = self._ended, None
        return None if ended is None else (ended.name, ended.result())

    def hurry(self) -> None:
        """No job stands behind others any more; the one that runs begins anew, for nobody may move it forward."""
        if not self._behind:
            return
        self._behind = False
        if self._running is not None and not self._running.done:
            name = self._running.name
            self._running.close()
            self._running = None
            self.ask(name, self._asked)

    def close(self) -> None:
        """End what runs, forget what waits; may be called twice."""
        self._waiting = None
        for child in (self._ended, self._running):
            if child is not None:
                child.close()
        self._ended = self._running = None


def _put_behind(process: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, _LAST)
    with suppress(OSError):  # Linux may share time between sessions first, and a child has one of its own
        Path(f"/proc/{process}/autogroup").write_text(str(_LAST))


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
        drop_scratch_folders()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
