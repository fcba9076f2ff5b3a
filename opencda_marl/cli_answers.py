"""How the program answers: results on stdout, errors on stderr with an exit code, `--json` as one last line."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Any, NoReturn

from opencda_marl.core.errors import Interrupted, OpenCDAError, StorageError
from opencda_marl.core.streams import into_nothing

__all__ = ["answering", "emit", "quiet_stdout", "say_error"]

_USAGE = 2  # exit code of a command line that is not understood
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # a stream's writes


@contextmanager
def answering(as_json: bool) -> Iterator[None]:
    """Turns our errors into a message and an exit code; anything else keeps its traceback.

    Raises:
        KeyboardInterrupt: Ctrl-C before a run began to listen for it.
    """
    try:
        yield
    except OpenCDAError as error:
        _answer(error, as_json)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and error.filename is not None:  # whatever path a person typed
            _answer(StorageError(f"the name is too long: {error.filename}", fix="choose a shorter one"), as_json)
        if error.filename is not None or error.errno not in _REFUSED:  # no matter of stdout
            raise
        into_nothing(sys.stdout)
        _answer(_unwritable(error.strerror), as_json=False)
    except SystemExit as stop:
        if stop.code == Interrupted.exit_code:  # typer's answer to Ctrl-C, which says nothing
            raise KeyboardInterrupt from stop
        if as_json and stop.code == _USAGE:  # what is wrong has been said on stderr
            emit({"error": "the command line was not understood", "fix": "see --help", "exit_code": _USAGE})
        raise


def _answer(error: OpenCDAError, as_json: bool) -> NoReturn:
    say_error(error)
    if as_json:
        from opencda_marl.display import as_typed

        fix = None if error.fix is None else as_typed(error.fix)
        with suppress(StorageError):  # stdout may be the very thing that failed
            emit({"error": as_typed(error.message), "fix": fix, "exit_code": error.exit_code})
    sys.exit(error.exit_code)


def _unwritable(why: str | None) -> StorageError:
    return StorageError(f"stdout cannot be written: {why}", fix="send it somewhere else")


def say_error(error: OpenCDAError) -> None:
    """What was wrong and what to do, on stderr."""
    from rich.markup import escape

    from opencda_marl.display import make_console, unheard

    console = make_console(stderr=True)
    # a wish that was granted is no error, and its fix already says what to type next
    head, fix = ("", "") if isinstance(error, Interrupted) else ("[bold red]error:[/] ", "  fix: ")
    with unheard(console):
        console.print(f"{head}{escape(error.message)}", soft_wrap=True)
        if error.fix is not None:
            console.print(f"{fix}{escape(error.fix)}", soft_wrap=True)


def emit(answer: Any) -> None:
    """One line of JSON on stdout.

    Raises:
        StorageError: it is closed, or what it leads to is full.
    """
    _require_stdout()
    try:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it is gone
        raise
    except OSError as error:
        into_nothing(sys.stdout)
        raise _unwritable(error.strerror) from error


def _require_stdout() -> None:
    stream: IO[str] | None = sys.stdout
    if stream is None:  # `>&-`
        raise _unwritable("it is closed")


@contextmanager
def quiet_stdout(as_json: bool) -> Iterator[None]:
    """With `--json`, what libraries, children and C++ code print on stdout goes to stderr."""
    if not as_json:
        yield
        return
    _require_stdout()
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
