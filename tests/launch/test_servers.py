"""Servers of slots, with the stand-in: begun, adopted, restarted alone, ended; others' left alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from opencda_marl.core.errors import BackendMissingError, ConfigError, SimulatorError
from opencda_marl.core.probe import version
from opencda_marl.launch.plan import Slot
from opencda_marl.launch.ports import is_free, listeners, taken
from opencda_marl.launch.processes import command_line, descendants, read_process
from opencda_marl.launch.servers import ProcessServer, ServerOptions, make_server, server_argv
from opencda_marl.standin import install
from tests.launch.real import PATIENCE, all_gone, free_ports, until

Make = Callable[..., ProcessServer]

_LAUNCHER = """
import sys, time
from pathlib import Path
from opencda_marl.launch.servers import ProcessServer, ServerOptions
port, binary, folder, keep = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "True"
server = ProcessServer(port, None, ServerOptions(binary, keep=keep, grace=0.5), folder)
server.begin()
while not server.ready():
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Servers on free ports, ended with the test."""
    made: list[ProcessServer] = []

    def one(
        *faults: str,
        port: int | None = None,
        keep: bool = False,
        folder: Path | None = None,
        adapter: int | None = None,
    ) -> ProcessServer:
        binary = install(tmp_path / "carla", faults)
        options = ServerOptions(binary, keep=keep, grace=0.5)
        made.append(ProcessServer(port or free_ports(), adapter, options, folder or tmp_path / f"slot_{len(made)}"))
        return made[-1]

    yield one
    for server in made:
        server._options = ServerOptions(Path("none"), keep=False, grace=0.5)
        server.stop()


def wait_for(server: ProcessServer) -> None:
    until(server.ready, f"the server on port {server.port}")


def failure(server: ProcessServer) -> SimulatorError:
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(SimulatorError) as caught:
        while not server.ready():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return caught.value


def child_of(server: ProcessServer) -> int:
    """The process behind the wrapper."""
    (pid,) = listeners(server.port)
    assert pid != server.describe()["pid"]
    return pid


def stranger(port: int, *faults: str, folder: Path) -> subprocess.Popen[bytes]:
    """A server that somebody else has started, with the same command line."""
    argv = server_argv(install(folder, faults), port, None)
    process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL)
    until(lambda: not is_free(port + 2), "the stranger")
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_command_line(tmp_path: Path) -> None:
    argv = server_argv(Path("/opt/CARLA_0.9.16/CarlaUE4.sh"), 2010, 1)
    assert argv == [
        "/opt/CARLA_0.9.16/CarlaUE4.sh",
        "-carla-rpc-port=2010",
        "-RenderOffScreen",
        "-quality-level=Low",
        "-graphicsadapter=1",
    ]
    assert server_argv(Path("/x"), 2010, None)[1:] == argv[1:4]


def test_begun_ready_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "offscreen")
    server = make(adapter=3)
    before = time.monotonic()
    server.begin()
    assert time.monotonic() - before < 0.5
    wait_for(server)
    assert version("127.0.0.1", server.port) == "0.9.16"
    assert server.alive()
    told = server.describe()
    assert (told["owned"], told["phase"], told["version"]) == (True, "ready", "0.9.16")
    wrapper, child = told["pid"], child_of(server)
    assert "-graphicsadapter=3" in command_line(wrapper)
    assert command_line(child)[-4:] == command_line(wrapper)[-4:]
    assert read_process(child).group == wrapper  # type: ignore[union-attr]
    record = json.loads((server._folder / "server.json").read_bytes())
    assert (record["pid"], record["port"], record["owned"]) == (wrapper, server.port, True)
    server.stop()
    assert taken(server.port) == []
    assert read_process(child) is None
    assert not server.alive()


@pytest.mark.parametrize(("card", "noted"), [(3, False), (1, True)])
def test_another_card_than_meant_is_noted(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: int, noted: bool
) -> None:
    """A fake nvidia-smi sees all of the server's processes on one card."""
    row = f"for pid in $(ls /proc | grep '^[0-9]'); do echo \"  {card} $pid C+G 1 1 - - - - x\"; done"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{row}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    server = make(adapter=3)
    wait_for(server)
    note = server.describe()["note"]
    assert (note is not None) == noted
    if noted:
        assert "was to use adapter 3, and nvidia-smi sees it on GPU 1" in note


def test_start_ups_overlap(make: Make) -> None:
    first = free_ports(30)
    servers = [make("always late:1", port=first + 10 * slot) for slot in range(3)]
    at_once, answering = 0, 0
    while answering < 3:
        answering = sum([server.ready() for server in servers])
        at_once = max(at_once, sum(server.describe()["phase"] == "starting" for server in servers))
        time.sleep(0.01)
    assert at_once == 3


def test_several_that_do_not_hear_are_ended_at_the_same_time(make: Make) -> None:
    first, grace = free_ports(30), 2.0
    servers = [make("always deaf", port=first + 10 * slot) for slot in range(3)]
    for server in servers:
        server._options = replace(server._options, grace=grace)
        server.begin()
    for server in servers:
        wait_for(server)
    began = time.monotonic()
    for server in servers:
        server.terminate()
    for server in servers:
        server.stop()
    assert grace <= time.monotonic() - began < 2.0 * grace + 1.0  # one after another: three times


@pytest.mark.parametrize("victim", ["wrapper", "child"])
def test_a_death_is_told_and_the_next_start_is_clean(make: Make, victim: str) -> None:
    server = make()
    wait_for(server)
    child, wrapper = child_of(server), server.describe()["pid"]
    os.kill(child if victim == "child" else wrapper, signal.SIGKILL)
    until(lambda: not server.alive(), "its death to be seen")
    error = failure(server)
    assert f"the CARLA server on port {server.port} died" in str(error)
    assert "Disabling core dumps." in str(error)
    server.restart()
    wait_for(server)
    assert child_of(server) != child


def test_restart_is_of_this_server_alone(make: Make, tmp_path: Path) -> None:
    one, two = make(), make(port=free_ports() + 100)
    wait_for(one)
    wait_for(two)
    first, second = child_of(one), child_of(two)
    before = time.monotonic()
    one.restart()
    assert time.monotonic() - before < 0.5
    wait_for(one)
    assert child_of(one) != first
    assert child_of(two) == second


@pytest.mark.parametrize("fault", ["hang", "deaf"])
def test_a_server_that_hangs_or_is_deaf_is_killed_and_restarted(make: Make, fault: str) -> None:
    server = make(fault)
    server.begin()
    until(lambda: server.ready() or not is_free(server.port), "it to listen")
    if fault == "hang":
        assert not server.ready()
    child = child_of(server)
    os.kill(child, signal.SIGSTOP)
    server.restart()
    wait_for(server)
    assert child_of(server) != child


def test_a_late_start_is_waited_for(make: Make) -> None:
    server = make("late:0.5")
    before = time.monotonic()
    wait_for(server)
    assert time.monotonic() - before > 0.5


def test_one_that_dies_while_starting(make: Make) -> None:
    server = make("late:0.2,die:0")
    error = failure(server)
    assert "exit code 139" in str(error)
    wait_for(server)  # asked again, it begins anew


@pytest.mark.parametrize(
    ("fault", "message"),
    [("version:0.9.15", "is CARLA 0.9.15, and CARLA 0.9.16 is needed"), ("http", "does not answer on port")],
)
def test_the_wrong_server_is_an_error_and_is_ended(make: Make, fault: str, message: str) -> None:
    server = make(f"always {fault}")
    assert message in str(failure(server))
    until(lambda: taken(server.port) == [], "its end")


def test_a_missing_binary_names_the_flag(tmp_path: Path) -> None:
    server = ProcessServer(free_ports(), None, ServerOptions(tmp_path / "none" / "CarlaUE4.sh"), tmp_path)
    error = failure(server)
    assert isinstance(error, BackendMissingError)
    assert "--carla-bin" in str(error)
    (tmp_path / "plain").write_text("no program")
    server = ProcessServer(free_ports(), None, ServerOptions(tmp_path / "plain"), tmp_path)
    assert "may not be executed" in str(failure(server))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_taken_port_is_an_error_and_its_holder_is_left_alone(
    make: Make, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opencda_marl.launch.servers._FIRST_LOOK", 0.3)
    server = make()
    with socket.create_server(("127.0.0.1", server.port + which)) as other:
        error = failure(server)
        assert f"port {server.port + which} is taken by process {os.getpid()}" in str(error)
        assert other.fileno() >= 0
    wait_for(server)


@pytest.mark.parametrize("fault", ["hang", "http", "squat"])
def test_what_is_no_server_is_not_used(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr("opencda_marl.launch.servers._FIRST_LOOK", 0.3)
    server = make()
    process = stranger(server.port, fault, folder=tmp_path / "theirs")
    try:
        assert f"no CARLA server answers on port {server.port}" in str(failure(server))
        assert process.poll() is None
    finally:
        end(process)


def test_a_child_that_leaves_its_group_is_ended_too(make: Make) -> None:
    server = make("detach")
    wait_for(server)
    child = child_of(server)
    process = read_process(child)
    assert process is not None
    assert process.session == child != server.describe()["pid"]
    server.stop()
    assert read_process(child) is None


def test_a_leak_is_one(make: Make) -> None:
    server = make("leak:200")
    wait_for(server)
    child = child_of(server)
    until(lambda: psutil.Process(child).memory_info().rss > 80 * 2**20, "80 MiB")


def test_a_foreign_server_is_used_and_never_touched(make: Make, tmp_path: Path) -> None:
    server = make()
    process = stranger(server.port, folder=tmp_path / "theirs")
    processes = [read_process(process.pid), *descendants(process.pid)]
    try:
        wait_for(server)
        assert (server.owned, server.describe()["pid"], server.alive()) == (False, None, True)
        with pytest.raises(SimulatorError, match="was not started by this matrix"):
            server.restart()
        wait_for(server)
        server.stop()
        assert not any(all_gone([one]) for one in processes if one is not None)
        later = make(port=server.port, folder=server._folder)
        wait_for(later)
        assert not later.owned
    finally:
        end(process)
    until(lambda: not later.alive(), "its death to be seen")
    assert "is gone" in str(failure(later))


def test_after_the_launchers_death_the_port_is_free_again(make: Make, tmp_path: Path) -> None:
    server = make("deaf")  # so it is still there when the next launcher comes
    launcher = _launch(server, tmp_path, keep=False)
    child = child_of_port(server.port)
    _kill(launcher)
    wait_for(server)  # whatever is still ending there is waited for, and not taken over
    assert server.owned
    assert child_of(server) != child


def test_kept_servers_are_adopted_after_the_launchers_death(make: Make, tmp_path: Path) -> None:
    server = make()
    launcher = _launch(server, tmp_path, keep=True)
    child = child_of_port(server.port)
    _kill(launcher)
    time.sleep(0.3)
    wait_for(server)
    assert server.owned
    assert child_of(server) == child
    server.stop()
    assert is_free(server.port)


def test_a_kept_server_that_is_wanted_otherwise_is_replaced(make: Make, tmp_path: Path) -> None:
    server = make(adapter=1)
    launcher = _launch(server, tmp_path, keep=True)
    child = child_of_port(server.port)
    _kill(launcher)
    wait_for(server)
    assert child_of(server) != child
    assert "-graphicsadapter=1" in command_line(child_of(server))


def test_keep_carla_leaves_it_there(make: Make) -> None:
    server = make(keep=True)
    wait_for(server)
    child = child_of(server)
    server.stop()
    time.sleep(0.3)
    assert child_of_port(server.port) == child
    again = make(port=server.port, folder=server._folder)
    wait_for(again)
    assert child_of(again) == child
    again.stop()


def test_a_record_with_a_number_that_is_somebody_elses_now(make: Make, tmp_path: Path) -> None:
    """server.json names a process that lives, but it is another one: not ours, not touched."""
    server = make()
    process = stranger(server.port, folder=tmp_path / "theirs")
    try:
        now = read_process(process.pid)
        assert now is not None
        server._folder.mkdir()
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        stale = {"pid": now.pid, "start_time": now.start_time - 1, "boot": boot, "exit": None, "survive": True}
        stale |= {"argv": server._argv, "keepers": [[now.pid, now.start_time - 2], [now.pid, now.start_time - 2]]}
        (server._folder / "server.json").write_text(json.dumps(stale))
        wait_for(server)
        assert not server.owned
        server.stop()
        assert version("127.0.0.1", server.port) == "0.9.16"
    finally:
        end(process)


def test_paths_with_everything_in_them(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c\"d\ne"
    binary = install(folder / "carla 0.9", ["version:0.9.15"])
    server = ProcessServer(free_ports(), None, ServerOptions(binary, grace=0.5), folder / "slots" / "slot_0")
    assert "0.9.15" in str(failure(server))  # its list of faults is found there, too
    wait_for(server)
    server.stop()
    assert is_free(server.port)


def test_modes(tmp_path: Path) -> None:
    options = ServerOptions(Path("/x"))
    assert isinstance(make_server("process", Slot(0, rpc_port=2000, adapter=1), options, tmp_path), ProcessServer)
    docker = make_server("docker", Slot(1, rpc_port=2010), options, tmp_path)
    assert docker.describe()["container"] == "opencda-carla-2010"
    with pytest.raises(ConfigError, match="--carla-gpus"):
        make_server("docker", Slot(1, rpc_port=2010, adapter=0), options, tmp_path)


def child_of_port(port: int) -> int:
    (pid,) = listeners(port)
    return pid


def _launch(server: ProcessServer, tmp_path: Path, *, keep: bool) -> subprocess.Popen[str]:
    arguments = [str(server.port), str(tmp_path / "carla" / "CarlaUE4.sh"), str(server._folder), str(keep)]
    process = subprocess.Popen([sys.executable, "-c", _LAUNCHER, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
