"""Whose cell it is: exactly one launcher's, whoever dies, hangs or comes back."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.errors import StorageError
from opencda_marl.launch.folder import MatrixFolder
from opencda_marl.launch.leases import Leases

LIMIT = 120.0


class Machine:
    """A launcher on a machine of its own, with a clock that the test moves."""

    def __init__(self, path: Path, name: str) -> None:
        self.now, self.beats = 1000.0, 0
        self.file = path / "runners" / name / "launcher.json"
        self.leases = Leases(MatrixFolder(path), self.file, limit=LIMIT, clock=lambda: self.now)
        self.leases._me |= {"host": name, "boot": f"boot of {name}", "pid": 1}

    def beat(self) -> None:
        self.beats += 1
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"pid": 1, "host": self.leases._me["host"], "updated": self.beats}))

    def watch(self, seconds: float, *, beating: Machine | None = None, cell: str = "a") -> None:
        """Look every second, while another one may give signs of life."""
        for _ in range(int(seconds)):
            self.now += 1.0
            if beating is not None:
                beating.beat()
            self.leases.free(cell)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Machine, Machine]:
    return Machine(tmp_path, "left"), Machine(tmp_path, "right")


def test_one_takes_it_and_the_other_one_does_not(two: tuple[Machine, Machine]) -> None:
    left, right = (one.leases for one in two)
    assert left.free("a")
    assert right.free("a")
    assert left.take("a")
    assert not right.take("a")
    assert not right.free("a")
    assert left.free("a") and left.mine("a") and left.holds("a")
    assert right.take("b")
    left.give_back("a")
    two[1].now += 2.0
    assert right.free("a") and right.take("a")
    assert not left.mine("a") and not left.holds("a")


def test_who_comes_late_to_what_was_had_and_given_back_looks_again(two: tuple[Machine, Machine]) -> None:
    left, right = (one.leases for one in two)
    assert right.free("a")  # as it was then
    assert left.take("a")
    left.give_back("a")
    assert not right.take("a")  # number 1 is made for ever
    assert right.free("a") and right.take("a")


def test_a_machine_that_beats_keeps_its_cells(two: tuple[Machine, Machine]) -> None:
    left, right = two
    left.beat()
    left.leases.take("a")
    assert not right.leases.free("a")
    assert not right.leases.elsewhere("a")  # not known to live yet
    right.watch(10.0, beating=left)
    assert right.leases.elsewhere("a")
    right.watch(5 * LIMIT, beating=left)
    assert right.leases.elsewhere("a") and not right.leases.free("a")


def test_a_machine_that_is_gone_loses_them_after_the_limit_and_not_before(two: tuple[Machine, Machine]) -> None:
    left, right = two
    left.beat()
    left.leases.take("a")
    right.watch(LIMIT)
    assert not right.leases.free("a")
    right.watch(10.0)
    assert right.leases.free("a")
    assert right.leases.take("a")
    # it was only stopped, and wakes up
    left.beat()
    assert not left.leases.holds("a")
    left.now += 2.0
    assert not left.leases.take("b") or left.leases.holds("b")
    left.leases.lose("a")
    assert not left.leases.free("a")


def test_a_trainer_that_goes_on_is_a_sign_of_life(two: tuple[Machine, Machine], tmp_path: Path) -> None:
    left, right = two
    left.leases.take("a")
    status = tmp_path / "cells/a/status.json"
    status.parent.mkdir(parents=True)
    for number in range(40):
        status.write_text(json.dumps({"updated": number}))
        right.watch(10.0)
        assert not right.leases.free("a")
    right.watch(LIMIT + 10.0)
    assert right.leases.free("a")


def test_who_did_not_look_for_a_while_begins_anew(two: tuple[Machine, Machine]) -> None:
    """The file system was away, perhaps for the other one, too."""
    left, right = two
    left.beat()
    left.leases.take("a")
    right.watch(LIMIT - 10.0)
    right.now += 50.0
    right.watch(LIMIT - 10.0)
    assert not right.leases.free("a")


def test_who_has_the_lock_of_the_matrix_follows_whoever_had_it(tmp_path: Path) -> None:
    """A container that was started again: other numbers of processes, and nobody to ask."""
    before, now = (Leases(MatrixFolder(tmp_path), tmp_path / "launcher.json", limit=LIMIT, locked=True) for _ in "12")
    before._me |= {"processes": "pid:[1]", "pid": 7}
    assert before.take("a")
    assert now.free("a") and now.take("a")
    runner = Machine(tmp_path, "far")
    runner.leases.take("b")
    now = Leases(MatrixFolder(tmp_path), tmp_path / "launcher.json", limit=LIMIT, locked=True)
    assert not now.free("b") and now.undecided("b")


def test_a_dead_process_of_this_machine_has_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from opencda_marl.launch.folder import MatrixFolder\n"
        "from opencda_marl.launch.leases import Leases\n"
        "folder = MatrixFolder(Path(sys.argv[1]))\n"
        "Leases(folder, folder.path / 'launcher.json', limit=120).take('a'); print(flush=True); input()"
    )
    here = Leases(MatrixFolder(tmp_path), tmp_path / "launcher.json", limit=LIMIT)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert here.elsewhere("a")
        other.kill()
        other.communicate()
    assert here.free("a")  # at once
    assert here.take("a")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x"}', '{"heartbeat": 3, "pid": null}'])
def test_a_broken_claim_is_that_of_nobody_known(two: tuple[Machine, Machine], tmp_path: Path, text: str) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims/a.1").write_text(text)
    _, right = two
    assert not right.leases.free("a")
    right.watch(LIMIT + 10.0)
    assert right.leases.free("a") and right.leases.take("a")


def test_many_want_the_same_cells(tmp_path: Path) -> None:
    machines = [Machine(tmp_path, f"m{number}") for number in range(8)]
    cells = [f"cell{number}" for number in range(40)]

    def grab(machine: Machine) -> list[str]:
        return [cell for cell in cells if machine.leases.free(cell) and machine.leases.take(cell)]

    with ThreadPoolExecutor(8) as pool:
        found: list[Any] = list(pool.map(grab, machines))
    assert sorted(cell for own in found for cell in own) == sorted(cells)
    assert not list((tmp_path / "claims").glob(".*"))


def test_a_file_system_without_second_names(
    two: tuple[Machine, Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    left, right = (one.leases for one in two)
    assert left.take("a") and not right.take("a")
    assert not right.free("a")
    claim = tmp_path / "claims/b.1"
    claim.touch()  # somebody has just made it, and not written it yet
    two[1].now += 2.0
    assert not right.free("b")
    claim.write_text(json.dumps(left._me))
    two[1].now += 6.0
    two[0].beat()
    assert not right.free("b") and right.elsewhere("b")


def test_a_folder_that_takes_no_claims(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file")
    leases = Leases(MatrixFolder(tmp_path), tmp_path / "launcher.json", limit=LIMIT)
    with pytest.raises(StorageError):
        leases.take("a")
