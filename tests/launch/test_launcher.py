"""The launcher with trainers of a few lines: what is tried again, what is not, and that nothing is lost or left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from opencda_marl.core.errors import BackendMissingError, CheckpointError, SimulatorError
from opencda_marl.display_matrix import event_line
from opencda_marl.launch.claims import Claims
from opencda_marl.launch.folder import MatrixFolder, Writer, is_done
from opencda_marl.launch.plan import Slot
from opencda_marl.launch.processes import is_alive
from tests.launch.matrices import Heard, cell, launch, launch_elsewhere, matrix, weights
from tests.launch.real import PATIENCE, until


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """`plans(0, "exit:10 fine")`: what goes wrong with a cell, attempt by attempt."""
    folder = tmp_path / "plans"
    folder.mkdir()
    monkeypatch.setenv("TRAINEE", str(folder))
    monkeypatch.setenv("TRAINEE_PACE", "0.02")

    def plan(index: int, words: str) -> None:
        (folder / f"{index:012x}").write_text(words)

    return plan


def _attempts(path: Path, index: int) -> list[str]:
    return [attempt["kind"] for attempt in MatrixFolder(path).read_launch(f"{index:012x}").attempts]


def test_every_cell_is_trained_and_the_same_command_finds_nothing_to_do(tmp_path: Path) -> None:
    made = matrix(5, parallel=2)
    heard = Heard()
    result = launch(tmp_path, made, heard)
    assert (result.finished, result.failed, result.stopped) == (5, (), False)
    assert sorted({facts["slot"] for kind, facts in heard if kind == "started"}) == [0, 1]
    folder = MatrixFolder(tmp_path)
    assert all(is_done(one, folder.status(one.id)) for one in made.cells)
    events = [json.loads(line)["event"] for line in (tmp_path / "launcher.jsonl").read_text().splitlines()]
    assert events == heard.kinds()
    again = Heard()
    assert launch(tmp_path, made, again).finished == 5
    assert again.kinds() == ["launched"]
    assert json.loads((tmp_path / "launcher.json").read_bytes())["phase"] == "ended"


def test_a_raised_budget_goes_on_where_the_cell_ended(tmp_path: Path) -> None:
    launch(tmp_path / "a", matrix(2, 2))
    more = matrix(2, 4)
    assert launch(tmp_path / "a", more).finished == 2
    launch(tmp_path / "b", more)
    assert weights(tmp_path / "a", more) == weights(tmp_path / "b", more)
    assert _attempts(tmp_path / "a", 0) == ["finished", "finished"]
    assert _attempts(tmp_path / "b", 0) == ["finished"]


@pytest.mark.parametrize(
    ("words", "kind", "tries"),
    [
        ("exit:10 " * 9, "simulator", 6),
        ("exit:12 " * 9, "deadline", 4),
        ("exit:34 " * 9, "memory", 1),  # with the machine for itself: it would be refused again
        ("oom " * 9, "memory", 3),
        ("exit:21 " * 9, "storage", 4),
        ("exit:1 " * 9, "error", 2),
        ("signal:9 " * 9, "signal", 6),
        ("exit:30 " * 9, "not_finite", 1),
        ("exit:2 " * 9, "config", 1),
        ("exit:11 " * 9, "missing", 1),
        ("exit:20 " * 9, "checkpoint", 1),
        ("exit:31 " * 9, "device", 1),
    ],
)
def test_each_class_has_a_budget_of_its_own_and_stops_nobody_else(
    tmp_path: Path, plans: Callable[[int, str], None], words: str, kind: str, tries: int
) -> None:
    plans(0, words)
    result = launch(tmp_path / "m", matrix(2, 1, retry_delay=0.0))
    assert (result.finished, result.failed) == (1, ("000000000000",))
    assert _attempts(tmp_path / "m", 0) == [kind] * tries
    assert _attempts(tmp_path / "m", 1) == ["finished"]
    told = MatrixFolder(tmp_path / "m").read_launch("000000000000")
    assert (told.state, told.failure) == ("failed", kind)
    assert told.error is not None


def test_an_episode_saved_in_between_begins_the_count_anew(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:10+ exit:10+ exit:10+ exit:10 exit:10 fine")
    assert launch(tmp_path / "m", matrix(1, 6, retries={"simulator": 3}, retry_delay=0.0)).finished == 1
    plans(1, "exit:10 exit:10 exit:10 exit:10 fine")
    assert launch(tmp_path / "n", matrix([cell(1)], retries={"simulator": 3}, retry_delay=0.0)).finished == 0


def test_a_cell_that_found_no_memory_waits_for_that_of_another(
    tmp_path: Path, plans: Callable[[int, str], None]
) -> None:
    plans(0, "exit:34 fine")
    made = matrix([cell(0), cell(1, 40)], parallel=2, retry_delay=0.0)
    assert launch(tmp_path / "m", made).finished == 2
    assert _attempts(tmp_path / "m", 0) == ["memory", "finished"]
    again, other = (MatrixFolder(tmp_path / "m").read_launch(f"{index:012x}").attempts[-1] for index in range(2))
    assert again["started"] >= other["ended"]


def test_classes_do_not_share_a_budget(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:1 exit:10 oom signal:11 fine")
    assert launch(tmp_path / "m", matrix(1, retry_delay=0.0)).finished == 1
    assert _attempts(tmp_path / "m", 0) == ["error", "simulator", "memory", "signal", "finished"]


def test_recycling_is_no_failure(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:75+ " * 12)
    heard = Heard()
    assert launch(tmp_path / "m", matrix(1, 14), heard).finished == 1
    assert _attempts(tmp_path / "m", 0) == ["recycle"] * 12 + ["finished"]
    assert heard.kinds().count("retrying") == 0


def test_a_trainer_that_somebody_else_ends_is_tried_again_and_does_not_speak_for_itself(
    tmp_path: Path, plans: Callable[[int, str], None]
) -> None:
    plans(0, "exit:130 fine")
    heard = Heard()
    assert launch(tmp_path / "m", matrix(1, 1), heard).finished == 1
    (told,) = [facts for kind, facts in heard if kind == "retrying"]
    assert told["failure"] == "signal"
    assert told["error"].startswith("ended from outside")
    assert [facts["attempt"] for kind, facts in heard if kind == "started"] == [1, 2]
    assert event_line("started", heard[1][1]).endswith("started in slot 0")


def test_recycling_that_gets_nowhere_is_one(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:75 " * 12)
    assert launch(tmp_path / "m", matrix(1)).failed == ("000000000000",)
    assert _attempts(tmp_path / "m", 0) == ["recycle"] * 4


def test_a_failed_capture_goes_on_eager_and_says_so(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:32 fine")
    heard = Heard()
    assert launch(tmp_path / "m", matrix(1), heard, program=_recorded(tmp_path)).finished == 1
    note = next(facts["note"] for kind, facts in heard if kind == "retrying")
    assert "eager" in note
    first, second = (tmp_path / "argv").read_text().splitlines()
    assert "update_mode" not in first
    assert "--out" in second
    assert "learner.update_mode=eager" in second
    assert "learner.cuda_graph_update=false" in second


def _recorded(tmp_path: Path) -> tuple[str, ...]:
    """The trainee behind a wrapper that writes down its arguments, and whose failed capture leaves no run."""
    script = tmp_path / "wrapper.py"
    script.write_text(
        "import runpy, shutil, sys\n"
        f"open({str(tmp_path / 'argv')!r}, 'a').write(' '.join(sys.argv) + chr(10))\n"
        "try:\n"
        f"    runpy.run_path({str(Path(__file__).with_name('trainee.py'))!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    if stop.code == 32:\n"
        "        shutil.rmtree(sys.argv[sys.argv.index('--out') + 1])\n"
        "    raise\n"
    )
    return (sys.executable, "-S", str(script))


def test_a_trainer_that_falls_silent_is_killed_and_goes_on(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "hang fine")
    limits = {"training": 1.0, "stopping": 5.0}
    result = launch(tmp_path / "m", matrix(1, 4, deadlines=limits))
    assert result.finished == 1
    assert _attempts(tmp_path / "m", 0) == ["deadline", "finished"]
    first = MatrixFolder(tmp_path / "m").read_launch("000000000000").attempts[0]
    assert "no sign of life" in first["error"]
    assert "training" in first["error"]
    launch(tmp_path / "n", matrix(1, 4))
    assert weights(tmp_path / "m", matrix(1)) == weights(tmp_path / "n", matrix(1))


def test_fail_fast_stops_the_others(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:30")
    result = launch(tmp_path / "m", matrix(4, 500, parallel=2, fail_fast=True))
    assert result.failed == ("000000000000",)
    assert result.stopped
    assert MatrixFolder(tmp_path / "m").read_launch("000000000001").state in ("stopped", "waiting")


def test_a_missing_backend_is_one_line_and_no_server_is_started(tmp_path: Path) -> None:
    made = matrix([cell(0), cell(1, family="carla"), cell(2, family="carla")])
    heard = Heard()
    why = BackendMissingError("the CARLA backend is not there")
    result = launch(
        tmp_path, made, heard, missing={"carla": why}, served=lambda one: one.family == "carla", server_for=None
    )
    assert (result.finished, len(result.failed)) == (1, 2)
    failures = [facts for kind, facts in heard if kind == "failed"]
    assert [facts["error"] for facts in failures] == ["the CARLA backend is not there"] * 2
    assert not any("log:" in event_line("failed", facts) for facts in failures)  # no trainer has said anything


class FakeServer:
    """Dies when it is told to."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self.calls = slot, list[str]()
        self.dead, self.asked, self.refuse = False, 0, 0

    def begin(self) -> None:
        self.calls.append("begin")

    def ready(self) -> bool:
        self.asked += 1
        if self.refuse:
            self.refuse -= 1
            raise SimulatorError("the port is taken")
        return self.asked % 3 == 0

    def restart(self) -> None:
        self.calls.append("restart")
        self.dead = False

    def terminate(self) -> None:
        self.calls.append("terminate")

    def stop(self) -> None:
        self.calls.append("stop")

    def alive(self) -> bool:
        return not self.dead

    def describe(self) -> dict[str, Any]:
        return {"port": self.slot.rpc_port}


def test_a_server_that_dies_takes_its_own_cell_along_and_is_restarted_alone(tmp_path: Path) -> None:
    made = matrix([cell(k, 6, family="carla") for k in range(2)], parallel=2)
    servers: list[FakeServer] = []

    def server_for(slot: Slot) -> FakeServer:
        servers.append(FakeServer(slot))
        return servers[-1]

    def listen(kind: str, facts: dict[str, Any]) -> None:
        heard(kind, facts)
        if kind == "started" and heard.kinds().count("started") == 1:
            servers[0].dead = True

    heard = Heard()
    result = launch(tmp_path, made, listen, served=lambda _cell: True, server_for=server_for)
    assert result.finished == 2
    assert [server.slot.rpc_port for server in servers] == [2000, 2010]
    assert servers[0].calls == ["begin", "restart", "terminate", "stop"]
    assert servers[1].calls == ["begin", "terminate", "stop"]
    assert _attempts(tmp_path, 0) == ["simulator", "finished"]
    assert _attempts(tmp_path, 1) == ["finished"]


def test_what_a_server_has_to_note_is_told(tmp_path: Path) -> None:
    class Elsewhere(FakeServer):
        def describe(self) -> dict[str, Any]:
            return {"port": 2000, "note": "nvidia-smi sees it on GPU 1"}

    heard = Heard()
    made = matrix([cell(0, 1, family="carla")])
    assert launch(tmp_path, made, heard, served=lambda _cell: True, server_for=Elsewhere).finished == 1
    told = [facts for kind, facts in heard if kind == "server_ready"]
    assert [facts["note"] for facts in told] == ["nvidia-smi sees it on GPU 1"]
    assert "note: nvidia-smi sees it on GPU 1" in event_line("server_ready", told[0])


def test_a_server_that_does_not_come_up_is_the_trouble_of_its_slot_and_of_no_cell(tmp_path: Path) -> None:
    server = FakeServer(Slot(0))
    server.refuse = 2
    made = matrix([cell(0, 1, family="carla")])
    heard = Heard()
    assert launch(tmp_path, made, heard, served=lambda _cell: True, server_for=lambda _slot: server).finished == 1
    assert _attempts(tmp_path, 0) == ["finished"]
    assert heard.kinds() == ["launched", "slot_set_aside", "slot_set_aside", "server_ready", "started", "finished"]


class Refusing(FakeServer):
    """That of slot 0 never comes up, nor does any, if `all`."""

    all = False

    def ready(self) -> bool:
        if self.slot.index == 0 or self.all:
            raise SimulatorError(f"port {self.slot.rpc_port} is taken\nby somebody", fix="choose another")
        return True


@pytest.mark.parametrize("parallel", [2, "auto"])
def test_a_slot_without_a_server_burns_no_cell_and_another_one_does_its_work(tmp_path: Path, parallel: Any) -> None:
    made = matrix([cell(k, 1, family="carla") for k in range(3)], parallel=parallel)
    heard = Heard()
    served = {"served": lambda _cell: True, "server_for": Refusing, "limit": 2}
    assert launch(tmp_path, made, heard, **served).finished == 3
    assert [_attempts(tmp_path, k) for k in range(3)] == [["finished"]] * 3
    assert {facts["slot"] for kind, facts in heard if kind == "started"} == {1}
    aside = next(facts for kind, facts in heard if kind == "slot_set_aside")
    assert "slot 0: set aside, tried again in 0 s (failure 1): port 2000 is taken" in event_line(
        "slot_set_aside", aside
    )
    told = json.loads((tmp_path / "launcher.json").read_bytes())["slots"]
    assert [bool(slot["trouble"]) for slot in told] == [True, False]


def test_cells_fail_when_no_slot_is_left_that_could_get_a_server(tmp_path: Path) -> None:
    class Nowhere(Refusing):
        all = True

    made = matrix([cell(0, 1), *(cell(k, 1, family="carla") for k in (1, 2))], parallel=2, retries={"simulator": 1})
    heard = Heard()
    result = launch(tmp_path, made, heard, served=lambda one: one.family == "carla", server_for=Nowhere)
    assert (result.finished, result.failed) == (1, ("000000000001", "000000000002"))
    assert _attempts(tmp_path, 1) == _attempts(tmp_path, 2) == []
    assert heard.kinds().count("slot_set_aside") >= 4
    told = MatrixFolder(tmp_path).read_launch("000000000001")
    assert told.error == "no slot can get a server: slot 0: port 2000 is taken; slot 1: port 2010 is taken"
    last = next(facts for kind, facts in heard if kind == "failed")
    assert event_line("failed", last).endswith("is taken\n  fix: choose another")  # and no log: there is none


def test_a_runner_that_can_get_no_server_leaves_the_cells_to_others(tmp_path: Path) -> None:
    made = matrix([cell(0, 1, family="carla")], retries={"simulator": 0})
    with pytest.raises(SimulatorError, match="no slot can get a server: slot 0: port 2000 is taken"):
        launch(tmp_path, made, served=lambda _cell: True, server_for=Refusing, shared=True)
    assert MatrixFolder(tmp_path).read_launch("000000000000").state == "waiting"


def test_a_cell_whose_simulator_failed_tries_another_slot(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    plans(0, "exit:10 fine")
    made = matrix([cell(k, 1, family="carla") for k in range(2)], parallel=2, retry_delay=1.0)
    path = tmp_path / "m"
    assert launch(path, made, served=lambda _cell: True, server_for=FakeServer).finished == 2
    assert [at["slot"] for at in MatrixFolder(path).read_launch("000000000000").attempts] == [0, 1]


def test_servers_of_others_and_those_that_start_are_told_apart(tmp_path: Path) -> None:
    class Told(FakeServer):
        def describe(self) -> dict[str, Any]:
            return {"port": 2000, "mode": "process", "owned": owned, "phase": "starting" if owned else "looking"}

    said = []
    for owned in (True, False):
        heard = Heard()
        made = matrix([cell(0, 1, family="carla")])
        launch(tmp_path / str(owned), made, heard, served=lambda _cell: True, server_for=Told)
        said.append([event_line(kind, facts) for kind, facts in heard if kind.startswith("server")])
    assert said[0][0] == "slot 0: its server is starting on port 2000"
    assert said[0][1].startswith("slot 0: its server answers after ")
    assert said[1] == ["slot 0: a server that is not ours answers on port 2000: used, never restarted"]


# --- somebody stops it


@contextmanager
def _elsewhere(path: Path, **request: Any) -> Iterator[subprocess.Popen[str]]:
    whole = {"cells": 4, "episodes": 6, "options": {"parallel": 2}, **request}
    process = launch_elsewhere(path, whole, TRAINEE_PACE="0.2")
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _trainers(path: Path) -> list[psutil.Process]:
    """Everything that runs with this folder in its command line, launchers left out."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(path) in word for word in words) and not any("matrices.py" in word for word in words):
            found.append(process)
    return found


def _saved(path: Path, count: int = 2) -> Callable[[], bool]:
    def enough() -> bool:
        return len(list(path.glob("cells/*/checkpoints/latest"))) >= count

    return enough


def _undisturbed(tmp_path: Path, cells: int, episodes: int) -> dict[str, str]:
    made = matrix(cells, episodes, parallel=2)
    launch(tmp_path / "undisturbed", made)
    return weights(tmp_path / "undisturbed", made)


def test_a_killed_launcher_leaves_no_orphan_and_the_same_command_finishes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with _elsewhere(path) as process:
        until(_saved(path), "two cells save an episode")
        left = _trainers(path)
        assert left
        process.send_signal(signal.SIGKILL)
        until(lambda: not _trainers(path), "the trainers end")
    made = matrix(4, 6, parallel=2)
    assert launch(path, made).finished == 4
    assert weights(path, made) == _undisturbed(tmp_path, 4, 6)
    assert "abandoned" in _attempts(path, 0) + _attempts(path, 1)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_saves_and_twice_kills_and_both_can_go_on(tmp_path: Path, times: int) -> None:
    path = tmp_path / "m"
    with _elsewhere(path) as process:
        until(_saved(path), "two cells save an episode")
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.wait(PATIENCE) == 130
    assert _trainers(path) == []
    states = {MatrixFolder(path).read_launch(f"{index:012x}").state for index in range(4)}
    assert states <= {"stopped", "waiting"}
    assert "stopped" in states
    made = matrix(4, 6, parallel=2)
    assert launch(path, made).finished == 4
    assert weights(path, made) == _undisturbed(tmp_path, 4, 6)


def test_a_second_ctrl_c_ends_trainers_that_do_not_hear_the_first(
    tmp_path: Path, plans: Callable[[int, str], None]
) -> None:
    path = tmp_path / "m"
    for index in range(2):
        plans(index, "stubborn")
    with _elsewhere(path, options={"parallel": 2, "deadlines": {"stopping": 100.0}}, episodes=500) as process:
        until(_saved(path), "two cells save an episode")
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert _trainers(path) == []


@pytest.mark.parametrize("wish", ["stop", "kill", "drain"])
def test_wishes_of_other_processes(tmp_path: Path, wish: str) -> None:
    path = tmp_path / "m"
    with _elsewhere(path) as process:
        until(_saved(path), "two cells save an episode")
        MatrixFolder(path).ask(wish)
        assert process.wait(PATIENCE) == 130  # two cells have not begun
    folder = MatrixFolder(path)
    done = [one.id for one in matrix(4, 6).cells if is_done(one, folder.status(one.id))]
    assert len(done) == 2 if wish == "drain" else not done
    assert folder.owner() is None
    assert launch(path, matrix(4, 6, parallel=2)).finished == 4  # an old wish stops nobody


def test_failed_cells_stay_failed_until_retry(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    path = tmp_path / "m"
    plans(0, "exit:30 exit:30 fine")
    made = matrix(2)
    assert launch(path, made).failed == ("000000000000",)
    assert launch(path, made).failed == ("000000000000",)
    assert _attempts(path, 0) == ["not_finite"]
    with Writer(path) as writer:
        writer.forgive("000000000000")
    assert launch(path, made).failed == ("000000000000",)
    with Writer(path) as writer:
        writer.forgive("000000000000")
    assert launch(path, made).finished == 2


def test_a_retry_reaches_the_launcher_that_is_at_work(tmp_path: Path, plans: Callable[[int, str], None]) -> None:
    path = tmp_path / "m"
    plans(0, "exit:30 fine")

    def listen(kind: str, facts: dict[str, Any]) -> None:
        if kind == "failed":
            MatrixFolder(path).ask("retry-000000000000")

    assert launch(path, matrix(2, 4), listen).finished == 2


def test_two_launchers_on_one_matrix(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with _elsewhere(path, episodes=500) as process:
        until(_saved(path), "two cells save an episode")
        with pytest.raises(CheckpointError, match=rf"the matrix m in .* is being run by process {process.pid} on "):
            launch(path, matrix(4, 500))
        assert MatrixFolder(path).owner() == process.pid
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
    assert MatrixFolder(path).owner() is None


def test_two_launchers_on_the_same_ports(tmp_path: Path) -> None:
    made = matrix([cell(0, 2, family="carla")], carla_rpc_port=2500)
    served = {"served": lambda _cell: True, "server_for": FakeServer}
    theirs = "from opencda_marl.launch.claims import Claims\nheld = Claims([2500]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SimulatorError, match=rf"port 2500 belongs to another launcher, process {other.pid}\n"):
            launch(tmp_path / "m", made, **served)
        assert _attempts(tmp_path / "m", 0) == []
        plain = matrix([cell(0, 1)], carla_rpc_port=2500)  # needs no server, and so no port
        assert launch(tmp_path / "n", plain).finished == 1
        other.kill()
        other.communicate()
    assert launch(tmp_path / "m", made, **served).finished == 1
    assert launch(tmp_path / "m", matrix([cell(0, 3, family="carla")], carla_rpc_port=2500), **served).finished == 1


def test_a_runner_takes_the_next_ports_where_another_one_of_the_machine_has_its_own(tmp_path: Path) -> None:
    made = matrix([cell(index, 1, family="carla") for index in range(2)], carla_rpc_port=2600, parallel=2)
    slots: list[Slot] = []

    def server_for(slot: Slot) -> FakeServer:
        slots.append(slot)
        return FakeServer(slot)

    theirs = "from opencda_marl.launch.claims import Claims\nheld = Claims([2610, 2620]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", theirs], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        served = {"served": lambda _cell: True, "server_for": server_for}
        assert launch(tmp_path / "m", made, shared=True, **served).finished == 2
        other.kill()
        other.communicate()
    assert [slot.rpc_port for slot in slots] == [2640, 2650]
    claims, first = Claims.anywhere([2600, 2610], 10)
    claims.close()
    assert first == 2600  # they were given back
    highest = Claims([65530])
    with pytest.raises(SimulatorError, match="port 65530 belongs to another launcher"):
        Claims.anywhere([65530], 10)
    highest.close()


def test_a_path_with_spaces_quotes_and_a_newline(tmp_path: Path) -> None:
    path = tmp_path / 'a matrix\'s "own"\nfolder'
    made = matrix(2)
    assert launch(path, made).finished == 2
    assert set(weights(path, made)) == {"000000000000", "000000000001"}


def test_a_cell_that_somebody_else_trains_waits(tmp_path: Path) -> None:
    path = tmp_path / "m"
    made = matrix(2)
    run = MatrixFolder(path).run(made.cells[0].id)
    run.mkdir(parents=True)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        order: list[str] = []

        def listen(kind: str, facts: dict[str, Any]) -> None:
            if kind == "finished":
                order.append(facts["cell"])
                if other.poll() is None:
                    other.communicate(b"\n")

        assert launch(path, made, listen).finished == 2
    assert order == ["000000000001", "000000000000"]


def test_two_hundred_cells_wait_and_the_launcher_is_small(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with _elsewhere(path, cells=200, episodes=500) as process:
        until(_saved(path), "two cells save an episode")
        ours = psutil.Process(process.pid)
        before, began = ours.cpu_times(), time.monotonic()
        time.sleep(3.0)
        after, took = ours.cpu_times(), time.monotonic() - began
        assert (after.user + after.system - before.user - before.system) / took < 0.05
        assert ours.memory_info().rss < 150 * 2**20
        told = json.loads((path / "launcher.json").read_bytes())
        assert told["waiting"] == 198
        assert told["pid"] == process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert not any(is_alive(slot.pid, 0) for slot in _trainers(path))


def test_a_disk_that_is_full_ends_the_launch_and_not_the_matrix(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with _elsewhere(path, episodes=6) as process:
        until(_saved(path), "two cells save an episode")
        import resource

        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10, 10))
        assert process.wait(PATIENCE) == 21
    assert _trainers(path) == []
    made = matrix(4, 6, parallel=2)
    assert launch(path, made).finished == 4
    assert weights(path, made) == _undisturbed(tmp_path, 4, 6)


def test_the_environment_of_this_process_is_left_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    launch(tmp_path, matrix(1, 1, cuda_visible_devices=("3",)))
    assert dict(os.environ) == before
