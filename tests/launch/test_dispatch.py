"""Runners that an engine places: cells are shared, nothing is done twice, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.errors import ConfigError, SimulatorError
from opencda_marl.display_matrix import event_line
from opencda_marl.launch.dispatch import Dispatch
from opencda_marl.launch.engines import make_engine
from opencda_marl.launch.folder import Matrix, MatrixFolder, Writer
from opencda_marl.launch.keeper import Kept, find
from opencda_marl.launch.launcher import Result
from opencda_marl.launch.leases import Leases
from opencda_marl.launch.plan import Options, options_from, parse_values
from opencda_marl.launch.runners import Seat, live_runners, within
from opencda_marl.launch.status import overview
from tests.launch.matrices import RUNNER, Heard, launch, matrix, weights
from tests.launch.real import until

LEASE = {"stopping": 5.0, "lease": 3.0}


class Processes:
    """An engine that places runners on this machine."""

    def __init__(self, path: Path, *, program: tuple[str, ...] = RUNNER) -> None:
        self.folder = MatrixFolder(path)
        self.seat = Seat(path, 10.0, path, program)
        self.jobs: dict[str, Held] = {}

    def runners(self) -> int:
        return 2

    def place(self, name: str) -> Held:
        self.jobs[name] = Held(self.seat.take(name))
        return self.jobs[name]

    def adopt(self) -> dict[str, Any]:
        found = {name: find(self.folder.runner(name) / "runner.json") for name in self.folder.runners()}
        return {name: Held(kept) for name, kept in found.items() if kept is not None}

    def close(self) -> None:
        pass


class Held:
    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def ended(self) -> str | None:
        code = self.kept.poll()
        return None if code is None else f"exit code {code}"

    def cancel(self) -> None:
        self.kept.terminate()


def made(cells: int = 6, episodes: int = 4, **options: Any) -> Matrix:
    return matrix(cells, episodes, engine="slurm", **{"deadlines": LEASE, **options})


def dispatch(
    path: Path, wanted: Matrix, heard: Any = None, *, count: int = 2, engine: Processes | None = None
) -> Result:
    with Writer(path) as folder:
        folder.write(wanted)
        listener = Heard() if heard is None else heard
        return Dispatch(folder, wanted, engine or Processes(path), listener=listener, count=count).run()


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINEE_PACE", "0.1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def _attempts(path: Path, cells: int) -> list[list[str]]:
    folder = MatrixFolder(path)
    return [[one["kind"] for one in folder.read_launch(f"{index:012x}").attempts] for index in range(cells)]


def test_two_runners_share_the_cells_and_end_where_one_would(tmp_path: Path) -> None:
    heard, path = Heard(), tmp_path / 'a "wild"\nplace' / "m"
    result = dispatch(path, made(), heard)
    assert (result.finished, result.failed, result.stopped) == (6, (), False)
    assert _attempts(path, 6) == [["finished"]] * 6  # each exactly once
    starts = [facts["runner"] for kind, facts in heard if kind == "started"]
    assert len(starts) == 6
    assert set(starts) == {"r001", "r002"}
    assert heard.kinds().count("finished") == 6
    assert MatrixFolder(path).runners() == ["r001", "r002"]
    launch(tmp_path / "one", matrix(6, 4))
    assert weights(path, made()) == weights(tmp_path / "one", made())
    again = Heard()
    assert dispatch(path, made(), again).finished == 6
    assert again.kinds() == ["launched"]
    assert dispatch(path, made(6, 5)).finished == 6  # a raised budget
    told = overview(MatrixFolder(path))
    assert (told["finished"], told["runners"]) == (6, {})


def test_no_more_runners_than_there_is_work_for(tmp_path: Path) -> None:
    heard = Heard()
    assert dispatch(tmp_path, made(3, 1, parallel=2), heard, count=9).finished == 3
    assert heard.kinds().count("runner_placed") == 2


def test_a_killed_runner_is_replaced_and_its_cells_go_on(tmp_path: Path) -> None:
    engine, killed = Processes(tmp_path), []

    def listen(kind: str, facts: dict[str, Any]) -> None:
        heard(kind, facts)
        if kind == "started" and not killed:
            killed.append(facts["runner"])
            os.kill(engine.jobs[facts["runner"]].kept.child_pid, signal.SIGKILL)

    heard, wanted = Heard(), made(6, 20)  # no cell ends before its runner is killed
    assert dispatch(tmp_path, wanted, listen, engine=engine).finished == 6
    assert len(MatrixFolder(tmp_path).runners()) == 3
    assert sum("abandoned" in one for one in _attempts(tmp_path, 6)) == 1
    launch(tmp_path / "one", matrix(6, 20))
    assert weights(tmp_path, wanted) == weights(tmp_path / "one", wanted)


def test_runners_outlive_their_dispatcher_and_are_found_again(tmp_path: Path) -> None:
    path, engine = tmp_path / "m", Processes(tmp_path / "m")
    wanted = made(6, 6)
    with Writer(path) as folder:
        folder.write(wanted)
    first = engine.place("r001")
    until(lambda: live_runners(MatrixFolder(path)), "the runner begins")
    told = overview(MatrixFolder(path))
    assert told["launcher"] is None
    assert list(told["runners"]) == ["r001"]
    heard = Heard()
    assert dispatch(path, wanted, heard).finished == 6
    assert heard[0][1]["adopted"] == 1
    assert first.ended() is not None
    assert all(kinds == ["finished"] for kinds in _attempts(path, 6))


def test_the_launcher_of_this_machine_leaves_alone_what_a_runner_has(tmp_path: Path) -> None:
    wanted = made(4, 6)
    with Writer(tmp_path) as folder:
        folder.write(wanted)
    runner = Processes(tmp_path).place("r001")
    until(lambda: list(tmp_path.glob("claims/*.1")), "the runner takes a cell")
    assert launch(tmp_path, matrix(4, 6)).finished == 4
    assert _attempts(tmp_path, 4) == [["finished"]] * 4
    assert runner.kept.wait(20.0) == 0


@pytest.mark.parametrize(
    "wish", ["stop", pytest.param("kill", marks=pytest.mark.slow), pytest.param("drain", marks=pytest.mark.slow)]
)
def test_wishes_reach_every_runner(tmp_path: Path, wish: str) -> None:
    asked: list[str] = []

    def listen(kind: str, facts: dict[str, Any]) -> None:
        heard(kind, facts)
        if heard.kinds().count("started") == 2 and not asked:
            asked.append(wish)
            MatrixFolder(tmp_path).ask(wish)

    heard = Heard()
    result = dispatch(tmp_path, made(6, 10), listen)
    assert result.stopped
    # how far those came that run depends on the machine
    assert 2 <= result.finished < 6 if wish == "drain" else result.finished < 4
    assert not live_runners(MatrixFolder(tmp_path))
    left = MatrixFolder(tmp_path)
    assert {left.read_launch(f"{index:012x}").state for index in range(6)} <= {"waiting", "stopped", "finished"}
    assert dispatch(tmp_path, made(6, 10, parallel=2)).finished == 6


def test_a_failed_cell_is_tried_again_by_a_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINEE", str(tmp_path))
    (tmp_path / f"{0:012x}").write_text("exit:30 fine")
    path = tmp_path / "m"

    def listen(kind: str, facts: dict[str, Any]) -> None:
        if kind == "failed":
            MatrixFolder(path).ask(f"retry-{facts['cell']}")

    assert dispatch(path, made(3, 6), listen).finished == 3
    (tmp_path / f"{0:012x}").write_text("exit:30")
    assert dispatch(path, made(3, 8)).failed == (f"{0:012x}",)


def test_an_engine_that_refuses_for_a_while_is_asked_again(tmp_path: Path) -> None:
    class Busy(Processes):
        refusals, never = 2, False

        def place(self, name: str) -> Held:
            if self.refusals and (self.jobs or self.never):
                self.refusals -= 1
                raise SimulatorError("sbatch: error: Socket timed out")
            return super().place(name)

    heard = Heard()
    assert dispatch(tmp_path / "m", made(2, 1), heard, engine=Busy(tmp_path / "m")).finished == 2
    assert heard.kinds().count("engine_refused") in (1, 2)  # the first runner may be done before the second refusal

    class Never(Busy):
        refusals, never = 99, True

    with pytest.raises(SimulatorError, match="Socket timed out"):
        dispatch(tmp_path / "n", made(2, 1), engine=Never(tmp_path / "n"))


def test_runners_that_get_nothing_done_are_not_placed_for_ever(tmp_path: Path) -> None:
    engine = Processes(tmp_path, program=(sys.executable, "-S", "-c", "raise SystemExit(3)"))
    with pytest.raises(
        SimulatorError, match="runners in a row have ended without an episode; the last one: exit code 3"
    ):
        dispatch(tmp_path, made(), engine=engine)
    assert 5 <= len(MatrixFolder(tmp_path).runners()) <= 6


def test_a_runner_that_is_stopped_for_long_loses_its_cells_and_lets_go_of_them(tmp_path: Path) -> None:
    """As if its machine had been away: another machine takes over, and the first one notices."""
    wanted = made(1, 30)
    with Writer(tmp_path) as folder:
        folder.write(wanted)
    runner = Processes(tmp_path).place("r001")
    until(lambda: saved(tmp_path), "an episode is saved")
    other = Leases(MatrixFolder(tmp_path), tmp_path / "launcher.json", limit=3.0)
    assert not other.free(f"{0:012x}") and other.take(f"{0:012x}")
    assert runner.kept.wait(20.0) == 0  # nothing is left for it
    events = [json.loads(line)["event"] for line in (tmp_path / "runners/r001/launcher.jsonl").read_text().splitlines()]
    assert events == ["launched", "started", "lost"]
    assert MatrixFolder(tmp_path).read_launch(f"{0:012x}").state == "running"  # not its to change any more


def saved(path: Path) -> bool:
    return bool(list(path.glob("cells/*/checkpoints/latest")))


@pytest.mark.parametrize("engine", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_a_machine_that_is_gone_has_left_is_waited_for_and_said(tmp_path: Path, engine: bool) -> None:
    wanted = made(2, 2, deadlines={"stopping": 5.0, "lease": 2.0})
    far = Leases(MatrixFolder(tmp_path), tmp_path / "runners/r001/launcher.json", limit=2.0)
    far._me |= {"host": "far", "boot": "another"}
    for index in range(2):
        assert far.take(f"{index:012x}")
    heard = Heard()
    plain = replace(wanted, options=replace(wanted.options, engine="local"))
    done = dispatch(tmp_path, wanted, heard) if engine else launch(tmp_path, plain, heard)
    assert done.finished == 2
    assert [facts["count"] for kind, facts in heard if kind == "leased"] == [2]
    assert "2 cells belong to launchers of another machine" in event_line("leased", heard[1][1])


def test_what_an_engine_gives_a_runner() -> None:
    two = within(Options(engine="slurm"), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert two.cuda_visible_devices == ("2", "3")
    assert within(Options(engine="slurm"), {"CUDA_VISIBLE_DEVICES": ""}).cuda_visible_devices == ()
    assert within(Options(engine="slurm"), {}).cuda_visible_devices == ()
    named = Options(engine="slurm", cuda_visible_devices=("1",))
    assert within(named, {"CUDA_VISIBLE_DEVICES": "2,3"}).cuda_visible_devices == ("1",)


def test_options_of_engines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--runners and --engine-set are for an engine"):
        Options(runners=2)
    with pytest.raises(ConfigError, match="--runners 0"):
        Options(engine="ray", runners=0)
    assert parse_values(["timeout_min=60", "slurm_partition=gpu"], "--engine-set") == {
        "timeout_min": 60,
        "slurm_partition": "gpu",
    }
    with pytest.raises(ConfigError, match="--engine-set 'Timeout' is not understood"):
        parse_values(["Timeout"], "--engine-set")
    kept = options_from({"engine": "slurm", "runners": 3, "engine_set": {"timeout_min": 5}}, {"parallel": 2})
    assert (kept.engine, kept.runners, kept.engine_set) == ("slurm", 3, {"timeout_min": 5})
    back = options_from(kept.record(), {"engine": "local"})
    assert (back.engine, back.runners, back.engine_set) == ("local", None, {})
    with pytest.raises(ConfigError, match="there is no such engine"):
        make_engine("mesos", MatrixFolder(tmp_path), made(), {})
