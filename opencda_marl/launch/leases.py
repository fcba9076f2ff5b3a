"""Whose cell is it? Several launchers may work on one matrix, on several machines that share its folder.

    claims/<cell>.<n>        the n-th one to take the cell, and who that is; made once, never changed or removed
    claims/<cell>.<n>.free   it has given the cell back

A cell belongs to its highest number. Taking it is making the next one, which a file system lets exactly one process
do; so whoever was held for dead and is not finds a higher number than its own, and stops. Owners show that they live
by their heartbeat. Its *change* counts, on the clock of whoever looks: clocks of machines need not agree.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import OpenCDAError
from opencda_marl.core.files import storage_error, write_whole, writing
from opencda_marl.launch.folder import MatrixFolder, read_json
from opencda_marl.launch.plan import Options
from opencda_marl.launch.processes import boot_id, is_alive, read_process

__all__ = ["Leases", "say_undecided"]

_REFRESH = 1.0  # [s] between two looks at the folder of claims
_LOOK = 5.0  # [s] between two looks at somebody's heartbeat, at most
_GAP = 15.0  # [s] without a look: what was seen before counts no more, for the file system may have been away
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_NAME = re.compile(r"(.+)\.([0-9]+)(\.free)?")


@dataclass(slots=True)
class _Seen:
    """What is known of a claim of somebody else."""

    sign: object  # its last sign of life
    since: float  # [s] when that came
    looked: float  # [s] when it was looked at
    alive: bool | None = None  # None: not long enough to tell


class Leases:
    """The cells that this launcher has taken, and those of others.

    Args:
        folder: of the matrix.
        heartbeat: the file in which this launcher shows that it lives; None: nothing is ever taken here.
        limit: [s] without a sign of life, after which a cell of another machine counts as left.
        locked: is the matrix's lock ours? Then whoever had it before is gone, and his cells are free.
        clock: [s]; for tests.
    """

    def __init__(
        self,
        folder: MatrixFolder,
        heartbeat: Path | None,
        *,
        limit: float,
        locked: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._clock, self._limit, self._locked = folder, clock, limit, locked
        self._look = min(_LOOK, limit / 5.0)
        self._claims = folder.path / "claims"
        self._me = _this_process()
        if heartbeat is not None:
            self._me["heartbeat"] = str(heartbeat.relative_to(folder.path))
        self._mine: dict[str, int] = {}
        self._highest: dict[str, tuple[int, bool]] = {}  # of each cell: the number, and whether it was given back
        self._refreshed: float | None = None
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}
        self._seen: dict[tuple[str, int], _Seen] = {}

    def mine(self, cell: str) -> bool:
        """Was it taken here, and not given back?"""
        return cell in self._mine

    def free(self, cell: str) -> bool:
        """Could it be taken now? What was taken here is."""
        return cell in self._mine or self._other(cell) is False

    def elsewhere(self, cell: str) -> bool:
        """Is another launcher at work on it that is known to live?"""
        return cell not in self._mine and self._other(cell) is True

    def undecided(self, cell: str) -> bool:
        """Has another launcher taken it, of which it cannot be told yet whether it lives?"""
        return cell not in self._mine and self._other(cell) is None

    def take(self, cell: str) -> bool:
        """Take it.

        Returns:
            False: somebody else was faster.

        Raises:
            StorageError: the claim cannot be written.
        """
        if cell in self._mine:
            return True
        number = self._highest.get(cell, (0, True))[0] + 1
        part = self._claims / f".{self._me['host']}-{self._me['pid']}-{self._me['start_time']}"
        with writing(self._claims):
            self._claims.mkdir(exist_ok=True)
        write_whole(part, json.dumps(self._me).encode(), durable=False)
        try:
            won = _link(part, self._claims / f"{cell}.{number}")
        except OSError as error:
            raise storage_error(error, self._claims / f"{cell}.{number}") from error
        finally:
            part.unlink(missing_ok=True)
        self._refreshed = None
        if won:
            self._mine[cell] = number
        return won

    def holds(self, cell: str) -> bool:
        """Does what was taken here still belong to us? Nobody has taken it since."""
        return cell in self._mine and not (self._claims / f"{cell}.{self._mine[cell] + 1}").exists()

    def free_for_all(self, cell: str) -> bool:
        """Could it be taken? Then others need not find out for themselves that its owner is gone.

        Raises:
            StorageError: they cannot be told.
        """
        if not self.free(cell):
            return False
        number, given_back = self._highest.get(cell, (0, True))
        if not given_back:
            with writing(self._claims):
                (self._claims / f"{cell}.{number}.free").touch()
            self._highest[cell] = (number, True)
        return True

    def lose(self, cell: str) -> None:
        """It belongs to somebody else now."""
        self._mine.pop(cell, None)

    def give_back(self, cell: str) -> None:
        """Let others have it.

        Raises:
            StorageError: it cannot be written; the claim is kept.
        """
        number = self._mine.get(cell)
        if number is not None:
            with writing(self._claims):
                (self._claims / f"{cell}.{number}.free").touch()
            del self._mine[cell]
            self._highest[cell] = (number, True)

    def close(self) -> None:
        """Give everything back, as far as the disk lets us; what is not is seen by our death."""
        for cell in list(self._mine):
            with suppress(OpenCDAError):
                self.give_back(cell)

    def _other(self, cell: str) -> bool | None:
        """Is somebody else at work on it? None: it cannot be told yet."""
        self._refresh()
        number, given_back = self._highest.get(cell, (0, True))
        return False if given_back else self._lives(cell, number)

    def _refresh(self) -> None:
        now = self._clock()
        if self._refreshed is not None and now - self._refreshed < _REFRESH:
            return
        self._refreshed = now
        try:
            names = os.listdir(self._claims)
        except FileNotFoundError:
            return
        highest: dict[str, tuple[int, bool]] = {}
        for found in filter(None, map(_NAME.fullmatch, names)):
            if not found[1].startswith("."):
                claim = (int(found[2]), found[3] is not None)  # a claim that was given back is the greater one
                highest[found[1]] = max(highest.get(found[1], claim), claim)
        self._highest = highest

    def _lives(self, cell: str, number: int) -> bool | None:
        claim = (cell, number)
        facts = self._facts.get(claim) or read_json(self._claims / f"{cell}.{number}")
        self._facts[claim] = facts
        if self._locked and facts.get("heartbeat") == "launcher.json":
            return False
        here = facts.get("boot") == self._me["boot"] and facts.get("processes") == self._me["processes"]
        if here and not is_alive(int(facts["pid"]), int(facts["start_time"])):
            return False
        now, seen = self._clock(), self._seen.get(claim)
        if seen is not None and now - seen.looked < self._look:
            return seen.alive
        sign = self._sign(cell, facts)
        if seen is None or now - seen.looked > max(_GAP, 3.0 * self._look):
            self._seen[claim] = seen = _Seen(sign, now, now, True if here else None)
        elif sign != seen.sign:
            seen.sign, seen.since, seen.alive = sign, now, True
        elif now - seen.since > self._limit:
            seen.alive = False
        seen.looked = now
        return seen.alive

    def _sign(self, cell: str, facts: dict[str, Any]) -> object:
        """Heartbeats: the owner's, and that of the trainer, which would go on under one that was only stopped."""
        told = read_json(self._folder.path / str(facts.get("heartbeat", "")))
        same = (told.get("pid"), told.get("host")) == (facts.get("pid"), facts.get("host"))
        return told.get("updated") if same else None, self._folder.status(cell).get("updated")


def say_undecided(
    leases: Leases, cells: Iterable[str], options: Options, tell: Callable[[str, dict[str, Any]], None]
) -> bool:
    """Tell of cells that wait for the end of a lease. Returns: were there any?"""
    count = sum(leases.undecided(cell) for cell in cells)
    if count:
        tell("leased", {"count": count, "seconds": options.deadline("lease")})
    return count > 0


def _this_process() -> dict[str, Any]:
    process = read_process(os.getpid())
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "processes": os.readlink("/proc/self/ns/pid"),  # in a container numbers of processes mean something else
        "pid": os.getpid(),
        "start_time": 0 if process is None else process.start_time,
    }


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name, unless that is taken; with its whole content at once."""
    try:
        os.link(source, target)
    except FileExistsError:
        return os.stat(source).st_nlink == 2  # over a network the answer to a link that was made may be lost
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _make(target, source.read_bytes())
    return True


def _make(target: Path, content: bytes) -> bool:
    """Where files have one name only. Whoever looks before the content is there knows that it is taken, not by whom."""
    try:
        with target.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True
