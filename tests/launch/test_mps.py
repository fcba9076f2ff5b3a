"""The multi-process service, with a control daemon of a few lines and a fake nvidia-smi beside it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.core.errors import ConfigError, DeviceError
from opencda_marl.launch.folder import MatrixFolder, read_json
from opencda_marl.launch.gpus import find_gpus
from opencda_marl.launch.mps import CONTROL, Mps
from opencda_marl.launch.plan import Options
from opencda_marl.launch.processes import is_alive
from opencda_marl.launch.scaling import Switch, Tuner
from opencda_marl.launch.trainers import classify
from tests.launch.matrices import Heard, cell, launch, matrix
from tests.launch.real import until

# sh first: the path of Python may have a space, which no first line of a script can hold
DAEMON = """#!/bin/sh
''':'
exec "{python}" -S "$0" "$@"
'''
import json, os, pathlib, sys, time
assert sys.argv[1:] == ["-f"]
names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
told = {{name: os.environ[name] for name in names}}
with open({told!r}, "a") as file:
    file.write(json.dumps({{**told, "pid": os.getpid()}}) + chr(10))
if os.path.exists({broken!r}):
    sys.exit("no driver")
pathlib.Path(told["CUDA_MPS_PIPE_DIRECTORY"], "control").touch()
while True:
    time.sleep(1)
"""
UUIDS = ("GPU-aaaa", "GPU-bbbb")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs and a control program; the file in which it writes down what it was told."""
    programs = tmp_path / "programs"
    programs.mkdir()
    rows = "\n".join(f"{index}, {uuid}, A card, 8000, 7000" for index, uuid in enumerate(UUIDS))
    (programs / "nvidia-smi").write_text(f"#!/bin/sh\necho '{rows}'\n")
    text = DAEMON.format(python=sys.executable, told=str(tmp_path / "told"), broken=str(tmp_path / "broken"))
    (programs / CONTROL).write_text(text)
    for name in ("nvidia-smi", CONTROL):
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TRAINEE_PACE", "0.1")
    return tmp_path / "told"


def _lines(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()]


def test_one_service_a_gpu_with_a_pipe_of_its_own(tmp_path: Path, told: Path) -> None:
    mps = Mps(tmp_path / "m", ("0", "GPU-bbbb", "0"), find_gpus())
    try:
        for gpu in ("0", "GPU-bbbb"):
            until(lambda gpu=gpu: mps.ready(gpu), "the service")
            assert not mps.died(gpu)
        first, second = _lines(told)
        assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == UUIDS
        assert first["CUDA_MPS_PIPE_DIRECTORY"] != second["CUDA_MPS_PIPE_DIRECTORY"]
        assert mps.environment("0")["CUDA_MPS_PIPE_DIRECTORY"] == first["CUDA_MPS_PIPE_DIRECTORY"]
        assert mps.environment("0")["CUDA_VISIBLE_DEVICES"] == "GPU-aaaa"
        assert first["CUDA_MPS_LOG_DIRECTORY"] == str(tmp_path / "m/mps")
        os.kill(first["pid"], signal.SIGKILL)
        until(lambda: mps.died("0"), "its death is seen")
        assert not mps.died("GPU-bbbb")
        until(lambda: mps.ready("0"), "another one")
        assert len(_lines(told)) == 3
    finally:
        mps.close()
    assert not Path(first["CUDA_MPS_PIPE_DIRECTORY"]).parent.exists()
    assert not any(Path(f"/proc/{line['pid']}").exists() for line in _lines(told))


def test_a_service_that_does_not_come_up(tmp_path: Path, told: Path) -> None:
    (tmp_path / "broken").touch()
    mps = Mps(tmp_path / "m", ("0",), find_gpus())
    with pytest.raises(DeviceError, match="the multi-process service of GPU 0 does not come up"):
        until(lambda: mps.ready("0"), "the service")
    assert "no driver" in (tmp_path / "m/mps/GPU-aaaa.log").read_text()
    mps.close()


def test_what_is_refused(tmp_path: Path, told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nvidia-smi knows of no GPU 7"):
        Mps(tmp_path, ("0", "7"), find_gpus())
    for wrong in (lambda: Mps(tmp_path, (), find_gpus()), lambda: Options(mps=True)):
        with pytest.raises(ConfigError, match="--mps: which GPUs"):
            wrong()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=f"the program {CONTROL} is not there"):
        Mps(tmp_path, ("0",), None)


def test_all_cells_of_a_gpu_fail_with_its_service_and_go_on(tmp_path: Path, told: Path) -> None:
    """Slots 0 and 2 share a GPU, slot 1 has another one."""
    path = tmp_path / "m"
    options = {"parallel": 3, "cuda_visible_devices": ("0", "1"), "mps": True, "retry_delay": 0.0}
    made = matrix([cell(index, 15, device="cuda") for index in range(3)], **options)
    heard = Heard()

    def listen(kind: str, facts: dict[str, Any]) -> None:
        heard(kind, facts)
        if heard.kinds().count("started") == 3 and kind == "started":
            os.kill(next(line["pid"] for line in _lines(told) if line["CUDA_VISIBLE_DEVICES"] == UUIDS[0]), 9)

    mps = Mps(path, ("0", "1"), find_gpus())
    assert launch(path, made, listen, mps=mps).finished == 3
    kinds = [[one["kind"] for one in MatrixFolder(path).read_launch(each.id).attempts] for each in made.cells]
    assert kinds == [["mps", "finished"], ["finished"], ["mps", "finished"]]
    assert len(_lines(told)) == 3
    pids = [line["pid"] for line in _lines(told)]
    assert not any(is_alive(pid, read_json(path / "mps/GPU-aaaa.json").get("start_time", 0)) for pid in pids)


def test_cells_without_a_gpu_do_without(tmp_path: Path, told: Path) -> None:
    made = matrix([cell(0)], cuda_visible_devices=("0",), mps=True)  # its device is the cpu
    assert launch(tmp_path / "m", made, mps=Mps(tmp_path / "m", ("0",), find_gpus())).finished == 1
    assert not told.exists()


def test_an_error_of_its_own_is_that_of_the_service() -> None:
    said = "Traceback\ntorch.AcceleratorError: CUDA error: MPS client failed to connect to the MPS control daemon\n"
    assert classify(1, said, finished=False).kind == "mps"


def test_auto_measures_it_off_and_on() -> None:
    for gain, stays in ((1.2, True), (1.05, False), (0.8, False)):
        tuner = Tuner(2, window=10.0, switch=Switch())
        assert tuner.switch is not None
        now, told = 0.0, []
        for _ in range(6):
            cells, on = tuner.scale.cells, tuner.switch.on
            rate = 100.0 * cells * (gain if on else 1.0)
            tuner.consider(now, [], waiting=9)  # they are being started
            own = [(now + k, rate * k / cells) for k in range(12)]
            now += 11.0
            told.append(tuner.consider(now, [own] * cells, waiting=9))
        assert tuner.switch.decided
        assert tuner.switch.on is stays
        switched = [one["mps"] for one in told if one is not None and "mps" in one]
        assert switched == ([True] if stays else [True, False])
        assert tuner.scale.cells == 2
