"""Containers, with a fake `docker` on the path that writes down what it is told."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.cli import main
from opencda_marl.core.errors import BackendMissingError, SimulatorError
from opencda_marl.core.probe import version
from opencda_marl.launch.docker import DockerServer, container_name, inspect, start, status, stop
from opencda_marl.launch.servers import server_argv
from opencda_marl.standin import install
from tests.launch.real import free_ports, until

_FAKE = """
import json, os, sys
folder, words = sys.argv[1], sys.argv[2:]
with open(f"{folder}/calls", "a") as file:
    file.write(json.dumps(words) + "\\n")
if os.path.exists(f"{folder}/refusal"):
    sys.stderr.write(open(f"{folder}/refusal").read() + "\\n")
    sys.exit(1)
path = f"{folder}/containers.json"
known = json.load(open(path)) if os.path.exists(path) else {}
if words[0] == "run":
    name = words[words.index("--name") + 1]
    known[name] = {"Status": "running", "StartedAt": "t1", "ExitCode": 0, "restarts": 0}
elif words[-1] not in known:
    sys.stderr.write(f"Error response from daemon: No such container: {words[-1]}\\n")
    sys.exit(1)
elif words[:2] == ["container", "inspect"]:
    state = known[words[-1]]
    facts = {"State": state, "RestartCount": state["restarts"], "Config": {"Image": "carlasim/carla:0.9.16"}}
    print(json.dumps([facts]))
elif words[0] in ("start", "restart"):
    state = known[words[-1]]
    state.update(Status="running", StartedAt=state["StartedAt"] + "+")
elif words[0] == "stop":
    known[words[-1]].update(Status="exited", ExitCode=137)
elif words[0] == "rm":
    del known[words[-1]]
if words[0] != "container":  # several of us may be at work
    with open(f"{path}.{os.getpid()}", "w") as file:
        json.dump(known, file)
    os.replace(file.name, path)
"""


class Docker:
    """The fake: what it knows, and what it was told."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "fake.py").write_text(_FAKE)
        words = [sys.executable, "-I", "-S", str(folder / "fake.py"), str(folder)]
        (folder / "docker").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / "docker").chmod(0o755)

    def calls(self, verb: str) -> list[list[str]]:
        """Those with this verb."""
        file = self._folder / "calls"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [words for words in lines if words[0] == verb]

    def put(self, port: int, state: str, *, started: str = "t1", restarts: int = 0) -> None:
        """A container in this state."""
        facts = {"Status": state, "StartedAt": started, "ExitCode": 139, "restarts": restarts}
        (self._folder / "containers.json").write_text(json.dumps({container_name(port): facts}))

    def refuse(self, text: str) -> None:
        (self._folder / "refusal").write_text(text)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    fake = Docker(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return fake


@pytest.fixture
def port() -> int:
    return free_ports()


class Inside:
    """What runs in a container: a stand-in, started and ended by the test."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *faults: str) -> None:
        self.end()
        argv = server_argv(install(self._folder, faults), self._port, None)
        self._process = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL)
        if not faults:
            until(lambda: version("127.0.0.1", self._port), "the server in the container")

    def end(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def inside(tmp_path: Path, port: int) -> Iterator[Inside]:
    one = Inside(tmp_path / "inside", port)
    yield one
    one.end()


@pytest.fixture
def server(docker: Docker, port: int, tmp_path: Path) -> Iterator[DockerServer]:
    one = DockerServer(port, tmp_path / "slot")
    yield one
    one.stop()


def test_start_is_the_documented_container(docker: Docker, port: int) -> None:
    assert f"opencda-carla-{port} started" in start(port, streaming_port=0, gpu="1")
    (words,) = docker.calls("run")
    text = " ".join(words)
    assert words[words.index("--name") + 1] == f"opencda-carla-{port}"
    for part in ("--network host", "--gpus device=1", "--restart unless-stopped", "carlasim/carla:0.9.16 "):
        assert part in text
    assert f"-carla-rpc-port={port}" in words
    assert "-carla-streaming-port=0" in words
    for never in ("privileged", "-graphicsadapter"):
        assert never not in text


def test_start_without_a_card_or_a_streaming_port(docker: Docker, port: int) -> None:
    start(port)
    (words,) = docker.calls("run")
    assert words[words.index("--gpus") + 1] == "all"
    assert not any("streaming" in word for word in words)


def test_start_says_what_is_there_already(docker: Docker, port: int) -> None:
    docker.put(port, "running")
    assert "is running already" in start(port)
    docker.put(port, "restarting")
    assert "is restarting already" in start(port)
    assert docker.calls("start") == docker.calls("run") == []
    docker.put(port, "exited")
    assert "existed (exited, exit code 139)" in start(port)
    assert docker.calls("start") == [["start", f"opencda-carla-{port}"]]
    assert docker.calls("run") == []


def test_start_does_not_take_a_port_that_is_in_use(docker: Docker, port: int, inside: Inside) -> None:
    inside.start()
    with pytest.raises(SimulatorError, match=f"port {port} is taken"):
        start(port)
    assert docker.calls("run") == []


def test_stop_and_status(docker: Docker, port: int, inside: Inside) -> None:
    assert "there is no container" in stop(port)
    assert f"opencda-marl docker-carla start --rpc-port {port} --gpu K" in status(port)
    start(port)
    assert f"nobody listens on port {port}" in status(port)
    inside.start()
    assert f"CARLA 0.9.16 answers on port {port}" in status(port)
    assert "stopped" in stop(port)
    assert inspect(port) is not None
    assert "removed" in stop(port, remove=True)
    assert inspect(port) is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: ...",
            "the account running docker must be in the host's docker group",
        ),
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?", "daemon does not run"),
        ('could not select device driver "" with capabilities: [[gpu]].', "cannot hand out the GPU"),
        ("Error response from daemon: something new", "docker refused: Error response from daemon: something new"),
    ],
)
def test_what_docker_refuses_is_explained(
    docker: Docker, port: int, said: str, meant: str, server: DockerServer
) -> None:
    docker.refuse(said)
    with pytest.raises(SimulatorError, match=meant) as caught:
        start(port)
    if "permission" in said:
        assert "--carla-restart-mode process --carla-bin /path/to/CarlaUE4.sh" in str(caught.value)
    with pytest.raises(SimulatorError, match=meant):
        server.begin()


def test_no_docker_at_all(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendMissingError, match="docker is not installed"):
        start(port)


def test_a_missing_container_is_not_made(docker: Docker, port: int, server: DockerServer) -> None:
    with pytest.raises(SimulatorError, match="the launcher makes none") as caught:
        server.begin()
    assert f"docker-carla start --rpc-port {port} --gpu K" in str(caught.value)
    assert docker.calls("run") == []


def test_a_running_container_is_used_and_survives(
    docker: Docker, port: int, inside: Inside, server: DockerServer
) -> None:
    docker.put(port, "running")
    inside.start()
    server.begin()
    until(server.ready, "the container")
    assert server.alive()
    server.stop()
    assert version("127.0.0.1", port) == "0.9.16"
    assert [docker.calls(verb) for verb in ("run", "start", "stop", "restart", "rm")] == [[], [], [], [], []]


def test_a_container_that_does_not_run_is_restarted(
    docker: Docker, port: int, inside: Inside, server: DockerServer
) -> None:
    docker.put(port, "exited")
    server.begin()
    server.restart()  # it is at it
    until(lambda: server.ready() or docker.calls("restart"), "docker restart")
    inside.start()
    until(server.ready, "the container")
    assert docker.calls("restart") == [["restart", f"opencda-carla-{port}"]]


def test_a_sick_container_is_bounced(docker: Docker, port: int, inside: Inside, server: DockerServer) -> None:
    docker.put(port, "running")
    inside.start()
    until(server.ready, "the container")
    server.restart()
    until(server.ready, "the container again")
    assert len(docker.calls("restart")) == 1
    assert server.alive()


@pytest.mark.parametrize("seen", ["restarting", "running"])
def test_what_docker_restarts_itself_is_waited_for(
    docker: Docker, port: int, inside: Inside, seen: str, server: DockerServer
) -> None:
    docker.put(port, "running")
    inside.start()
    until(server.ready, "the container")
    inside.end()
    docker.put(port, seen, started="t2", restarts=1)
    assert not server.alive()
    server.restart()
    assert not server.ready()
    docker.put(port, "running", started="t2", restarts=1)
    inside.start()
    until(server.ready, "the container")
    assert docker.calls("restart") == []
    server.restart()  # it is sick again, and docker did nothing this time
    until(server.ready, "the container")
    assert len(docker.calls("restart")) == 1


def test_another_version_inside(docker: Docker, port: int, inside: Inside, server: DockerServer) -> None:
    docker.put(port, "running")
    inside.start("always version:0.9.15")
    until(lambda: version("127.0.0.1", port), "the server")
    with pytest.raises(SimulatorError, match=r"CARLA 0\.9\.15, and CARLA 0\.9\.16 is needed"):
        until(server.ready, "the container")


def test_the_commands(docker: Docker, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Any] = []
    for words in (["start", "--streaming-port", "0", "--gpu", "2"], ["status"], ["stop"]):
        with pytest.raises(SystemExit) as ended:
            main(["docker-carla", *words, "--rpc-port", str(port), "--json"])
        assert ended.value.code == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert [answer["status"] for answer in answers] == ["running", "running", "exited"]
    assert answers[0]["name"] == f"opencda-carla-{port}"
    docker.refuse("permission denied … /var/run/docker.sock")
    with pytest.raises(SystemExit) as ended:
        main(["docker-carla", "status", "--rpc-port", str(port)])
    assert ended.value.code == SimulatorError.exit_code
    assert "docker group" in capsys.readouterr().err
