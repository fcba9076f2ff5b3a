"""The door of the program. Nothing is imported out here: whoever presses Ctrl-C while the rest loads gets one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The program: exits with 0, or with the code of what went wrong."""
    try:
        from opencda_marl.cli_commands import start

        start(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
