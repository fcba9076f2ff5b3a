"""How the program answers: results on stdout, errors on stderr with an exit code, `--json` as one last line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from opencda_marl.core.errors import Interrupted, OpenCDAError

__all__ = ["answering", "emit", "quiet_stdout", "say_error"]

_USAGE = 2  # exit code of a command line that is not understood


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Turns our errors into a message and an exit code; anything else keeps its traceback."""
    try:
        yield
    except OpenCDAError as error:
        say_error(error)
        if as_json:
            from opencda_marl.display import as_typed

            fix = None if error.fix is None else as_typed(error.fix)
            emit({"error": as_typed(error.message), "fix": fix, "exit_code": error.exit_code})
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if as_json and stop.code == _USAGE:  # what is wrong has been said on stderr
            emit({"error": "the command line was not understood", "fix": "see --help", "exit_code": _USAGE})
        raise


def say_error(error: OpenCDAError) -> None:
    """What was wrong and what to do, on stderr."""
    from rich.markup import escape

    from opencda_marl.display import make_console

    console = make_console(stderr=True)
    # a wish that was granted is no error, and its fix already says what to type next
    head, fix = ("", "") if isinstance(error, Interrupted) else ("[bold red]error:[/] ", "  fix: ")
    console.print(f"{head}{escape(error.message)}", soft_wrap=True)
    if error.fix is not None:
        console.print(f"{fix}{escape(error.fix)}", soft_wrap=True)


def emit(answer: Any) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


@contextmanager
def quiet_stdout(as_json: bool) -> Iterator[None]:
    """With `--json`, what libraries, children and C++ code print on stdout goes to stderr."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
