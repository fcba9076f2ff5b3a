"""The engines themselves: a Ray cluster of this machine, submitit's local executor, and a Slurm of a few lines."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from opencda_marl.core.errors import ConfigError
from opencda_marl.launch.dispatch import Dispatch
from opencda_marl.launch.engine_ray import RayEngine
from opencda_marl.launch.engine_slurm import SlurmEngine
from opencda_marl.launch.folder import Matrix, MatrixFolder, Writer, read_json
from opencda_marl.launch.launcher import Result
from opencda_marl.launch.runners import live_runners
from tests.launch.matrices import ROOT, RUNNER, Heard, launch, matrix, weights
from tests.launch.real import until

DEADLINES = {"stopping": 5.0, "lease": 5.0}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINEE_PACE", "0.2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def dispatch(path: Path, wanted: Matrix, engine: Any, heard: Any = None, count: int = 2) -> Result:
    engine._seat = replace(engine._seat, program=RUNNER)
    with Writer(path) as folder:
        folder.write(wanted)
        listener = Heard() if heard is None else heard
        return Dispatch(folder, wanted, engine, listener=listener, count=count).run()


def same_as_undisturbed(path: Path, wanted: Matrix, aside: Path) -> bool:
    alone = replace(wanted, options=replace(wanted.options, engine="local", engine_set={}))
    launch(aside, alone)
    return weights(path, wanted) == weights(aside, wanted)


@pytest.mark.slow
def test_a_ray_cluster_of_this_machine(tmp_path: Path) -> None:
    """One of its actors is killed on the way; in another launch the whole is stopped."""
    path = tmp_path / "m"
    given = {"address": "local", "num_cpus": 0.5}
    wanted = matrix(6, 6, engine="ray", engine_set=given, deadlines=DEADLINES)
    killed: list[int] = []

    def listen(kind: str, facts: dict[str, Any]) -> None:
        heard(kind, facts)
        if kind == "started" and not killed:
            told = read_json(path / "runners" / facts["runner"] / "runner.json")
            actor = psutil.Process(int(told["keepers"][0][0])).parent()
            assert actor is not None
            assert "ray" in " ".join(actor.cmdline())
            killed.append(actor.pid)
            actor.kill()

    heard = Heard()
    engine = RayEngine(MatrixFolder(path), wanted, given)
    assert engine.runners() == 1
    assert dispatch(path, wanted, engine, listen).finished == 6
    assert len(MatrixFolder(path).runners()) >= 3
    assert same_as_undisturbed(path, wanted, tmp_path / "one")

    def stop(kind: str, facts: dict[str, Any]) -> None:
        if kind == "started":
            MatrixFolder(path).ask("stop")

    more = matrix(6, 60, engine="ray", engine_set=given, deadlines=DEADLINES)
    assert dispatch(path, more, RayEngine(MatrixFolder(path), more, given), stop).stopped
    assert not live_runners(MatrixFolder(path))


def test_what_ray_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ray has no such option here"):
        RayEngine(MatrixFolder(tmp_path), matrix(1), {"num_cores": 1})


def local(path: Path, wanted: Matrix) -> SlurmEngine:
    return SlurmEngine(MatrixFolder(path), wanted, {"cluster": "local"})


@pytest.mark.slow
def test_jobs_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "a place"
    wanted = matrix(4, 4, engine="slurm", engine_set={"cluster": "local"}, deadlines=DEADLINES)
    assert dispatch(path, wanted, local(path, wanted)).finished == 4
    assert same_as_undisturbed(path, wanted, tmp_path / "one")


@pytest.mark.slow
def test_jobs_outlive_their_launcher_and_go_back_into_the_queue_when_their_time_is_up(tmp_path: Path) -> None:
    """The time is up: submitit sends USR2; the cell's last boundary is saved, and the same job goes on with it."""
    path = tmp_path / "m"
    wanted = matrix(1, 25, engine="slurm", engine_set={"cluster": "local"}, deadlines=DEADLINES)
    with Writer(path) as folder:
        folder.write(wanted)
    engine = local(path, wanted)
    engine._seat = replace(engine._seat, program=RUNNER)
    job = engine.place("r001")
    until(lambda: list(path.glob("cells/*/checkpoints/latest")), "an episode is saved")
    found = local(path, wanted).adopt()  # by a launcher that comes later
    assert list(found) == ["r001"]
    (task,) = psutil.Process(int(read_json(path / "runners/r001/job.json")["job"])).children()
    for process in (*task.children(recursive=True), task):  # Slurm tells every process of a job
        process.send_signal(signal.SIGUSR2)
    until(lambda: len(attempts(path)) == 2, "the job goes on")
    assert attempts(path)[0] == "stopped"
    until(job.ended, "the job ends")
    assert attempts(path) == ["stopped", "finished"]
    until(found["r001"].ended, "seen by the other one, too")
    assert same_as_undisturbed(path, wanted, tmp_path / "one")


def attempts(path: Path) -> list[str | None]:
    return [attempt.get("kind") for attempt in MatrixFolder(path).read_launch(f"{0:012x}").attempts]


SBATCH = r"""import json, os, pathlib, re, subprocess, sys
home = pathlib.Path(__file__).parent
number = 100 + len(list(home.glob("job_*")))
script = pathlib.Path(sys.argv[-1]).read_text()
options = dict(re.findall(r"#SBATCH --([a-z-]+)(?:=(.*))?", script))
env = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
env |= {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
job = subprocess.Popen(["bash", "-c", script], env=env, start_new_session=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
(home / f"job_{number}").write_text(json.dumps({"pid": job.pid, "options": options}))
print(f"Submitted batch job {number}")
"""
SRUN = r"""import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2 if words[0] in ("--output", "--error") else 1:]
os.execvp(words[0], words)
"""
SACCT = r"""import json, os, pathlib
home = pathlib.Path(__file__).parent
print("JobID|State|NodeList")
for file in home.glob("job_*"):
    pid = json.loads(file.read_text())["pid"]
    try:
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        state = "Z"
    print(f"{file.name[4:]}|{'COMPLETED' if state == 'Z' else 'RUNNING'}|here")
"""
SCANCEL = r"""import json, os, pathlib, signal, sys
os.killpg(json.loads((pathlib.Path(__file__).parent / f"job_{sys.argv[1]}").read_text())["pid"], signal.SIGTERM)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, for one machine with room for everything."""
    home = tmp_path / "slurm"
    home.mkdir()
    # sh first: the path of Python may have a space, which no first line of a script can hold
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", SACCT), ("scancel", SCANCEL)):
        (home / name).write_text(f"#!/bin/sh\n''':'\nexec \"{sys.executable}\" \"$0\" \"$@\"\n'''\n{text}")
        (home / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return home


def test_jobs_of_slurm(tmp_path: Path, slurm: Path) -> None:
    path = tmp_path / "a 'shared' place"
    given = {"slurm_partition": "gpu", "gpus_per_node": 1}
    wanted = matrix(4, 4, engine="slurm", engine_set=given, deadlines=DEADLINES)
    assert dispatch(path, wanted, SlurmEngine(MatrixFolder(path), wanted, given)).finished == 4
    assert same_as_undisturbed(path, wanted, tmp_path / "one")
    options = read_json(slurm / "job_100")["options"]
    assert options["time"] == "1440"  # submitit's own default is five minutes
    assert options["signal"] == "USR2@65"
    assert (options["partition"], options["gpus-per-node"], options["cpus-per-task"]) == ("gpu", "1", "1")


def test_jobs_that_slurm_has_forgotten_are_not_waited_for(tmp_path: Path, slurm: Path) -> None:
    path, wanted = tmp_path / "m", matrix(1, engine="slurm")
    engine = SlurmEngine(MatrixFolder(path), wanted, {})
    own = path / "runners/r001"
    own.mkdir(parents=True)
    told = {"job": "4711", "cluster": "slurm", "start_time": None}
    (own / "job.json").write_text(json.dumps({**told, "submitted": time.time() - 1e6}))
    assert engine.adopt() == {}
    (own / "job.json").write_text(json.dumps({**told, "submitted": time.time()}))
    assert list(engine.adopt()) == ["r001"]  # it may not be known yet


def test_a_stop_reaches_jobs_of_slurm(tmp_path: Path, slurm: Path) -> None:
    path = tmp_path / "m"
    wanted = matrix(4, 60, engine="slurm", deadlines=DEADLINES)

    def stop(kind: str, facts: dict[str, Any]) -> None:
        if kind == "started":
            MatrixFolder(path).ask("stop")

    assert dispatch(path, wanted, SlurmEngine(MatrixFolder(path), wanted, {}), stop).stopped
    assert not live_runners(MatrixFolder(path))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"nodez": 5}, "Parameter 'nodez' need to be prefixed"),
        ({"slurm_planet": "x"}, "Unknown argument 'planet'"),
        ({"timeout_min": "long"}, 'Parameter "timeout_min" expected type'),
        ({"cluster": "pbs"}, "any executor named pbs"),
    ],
)
def test_what_slurm_is_not_told(tmp_path: Path, slurm: Path, given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        SlurmEngine(MatrixFolder(tmp_path), matrix(1), given)


def test_no_slurm_here_and_a_path_that_it_does_not_take(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="takes no line break or % in a path"):
        SlurmEngine(MatrixFolder(tmp_path / "a\nb"), matrix(1), {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Could not detect"):
        SlurmEngine(MatrixFolder(tmp_path), matrix(1), {})


def test_a_packet_that_is_not_installed_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from pathlib import Path\n"
        "from opencda_marl.core.errors import ConfigError\n"
        "from opencda_marl.launch.engines import make_engine\n"
        "from opencda_marl.launch.folder import Matrix, MatrixFolder\n"
        "from opencda_marl.launch.plan import Options\n"
        "try: make_engine(sys.argv[2], MatrixFolder(Path('x')), Matrix('m', (), Options()), {})\n"
        "except ConfigError as error: print(error)"
    )
    for package, engine in (("ray", "ray"), ("submitit", "slurm")):
        said = subprocess.run([sys.executable, "-c", code, package, engine], capture_output=True, text=True, check=True)
        assert f"--engine {engine}: the package {package} is not installed" in said.stdout
        assert f"pip install 'opencda-marl[{engine}]'" in said.stdout
