"""Doctor: what it finds, the fix it names, and what blocks."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from opencda_marl.core.speech import plain
from opencda_marl.env import compiled
from opencda_marl.tools import doctor

_Usage = namedtuple("_Usage", "total used free")


def test_this_machine_is_fit_for_training(tmp_path: Path) -> None:
    checks = doctor.inspect(tmp_path)
    named = {check["name"]: check for check in checks}
    assert len(named) == len(checks)
    assert {"python", "libsumo", "sumo starts", "torch", "device", "compiler", "numba cache", "disk"} <= set(named)
    assert named["sumo starts"]["ok"] is True
    assert doctor.exit_code(checks) == 0
    assert doctor.summary(checks).startswith("ready for SUMO training")
    needed = {"python", "libsumo", "sumo starts", "numpy", "torch", "temporary folder", "disk"}
    assert {check["name"] for check in checks if check["blocks"]} == needed
    for check in checks:
        assert set(check) == {"name", "ok", "outcome", "found", "fix", "blocks"}
        assert check["found"]
        assert check["ok"] is not False or check["fix"], f"{check['name']} names no fix"


def test_only_what_blocks_makes_the_exit_code() -> None:
    slow = {"name": "compiler", "ok": False, "found": "", "fix": "x", "blocks": False}
    absent = {"name": "carla client", "ok": None, "found": "", "fix": None, "blocks": True}
    broken = {"name": "libsumo", "ok": False, "found": "", "fix": "x", "blocks": True}
    assert doctor.exit_code([slow, absent]) == 0
    assert doctor.exit_code([slow, broken]) == 1


def test_wheels_of_two_versions_are_named_with_the_command_that_mends_them() -> None:
    check = doctor._agreement({"libsumo": "1.28.0", "traci": "1.9.2", "eclipse-sumo": None, "sumo": "1.28.0"})
    assert check.ok is False
    assert "traci 1.9.2" in check.found
    assert check.fix == "pip install 'libsumo==1.28.0' 'traci==1.28.0' 'eclipse-sumo==1.28.0'"
    assert doctor._agreement({"libsumo": "1.28.0", "traci": "1.28.0"}).ok is True


def test_the_version_in_a_programs_answer() -> None:
    told = doctor.Check("sumo program", True, "Eclipse SUMO sumo 1.21.3 at /usr/bin/sumo")
    assert doctor._number(told) == "1.21.3"
    assert doctor._number(doctor.Check("sumo program", None, "not installed")) is None


def test_a_sumo_home_without_data_is_a_finding(tmp_path: Path) -> None:
    assert doctor._sumo_home(None).ok is True
    assert doctor._sumo_home(str(tmp_path)).fix == "unset SUMO_HOME"
    (tmp_path / "data").mkdir()
    assert doctor._sumo_home(str(tmp_path)).ok is True


def test_a_cpu_build_beside_a_card_is_a_finding() -> None:
    assert doctor._device(built=False, usable=False, names=[], card=False).ok is True
    lost = doctor._device(built=False, usable=False, names=[], card=True)
    assert lost.ok is False
    assert "CPU build" in lost.found
    assert "index-url" in (lost.fix or "")
    assert "driver" in (doctor._device(built=True, usable=False, names=[], card=True).fix or "")
    assert doctor._device(built=True, usable=True, names=["H200"], card=True).found == "H200"


def test_a_compiler_that_is_missing_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor._compiler()[0].found == "no-such-compiler not found (CXX)"
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    check = doctor._compiler()[0]
    assert check.ok is False
    assert (check.fix or "").startswith("apt install python3-dev")


@pytest.mark.parametrize(("name", "has"), [("my env", "a space"), ("it's", "a quote"), ("a\nb", "a line break")])
def test_a_path_that_torch_cannot_compile_in_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has: str
) -> None:
    """Which path it is, what does not work there, and that the rest does."""
    monkeypatch.setattr("sys.prefix", str(tmp_path / name))
    (check,) = [check for check in doctor._compiler() if check.ok is False]
    assert check.name == "paths"
    assert check.found.startswith("Python is installed in ")
    assert f"{plain(name)}', a path" in check.found
    assert f"a path with {has}: training works, but torch.compile does not" in check.found
    assert "make .venv in" in (check.fix or "")
    assert "TMPDIR" not in (check.fix or "")
    monkeypatch.setattr("sys.prefix", "/usr")
    assert doctor._paths() == []
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / name))
    (check,) = doctor._paths()
    assert "temporary files go to" in check.found
    assert "TMPDIR" in (check.fix or "")


def test_a_kernel_that_cannot_be_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("OPENCDA_MARL_CACHE", str(occupied))
    check = doctor._fast_acting()
    assert check.ok is False
    assert f"cannot be kept in {occupied}, so each start compiles it again" in check.found
    assert "OPENCDA_MARL_CACHE" in (check.fix or "")


def test_a_full_disk_blocks_and_a_nearly_full_one_warns(tmp_path: Path) -> None:
    def free(gib: float) -> doctor.Check:
        return doctor._disk(tmp_path / "runs" / "a", lambda _: _Usage(0, 0, int(gib * 2**30)))

    assert free(10.0).ok is True
    assert (free(1.0).ok, free(1.0).blocks) == (False, False)
    assert (free(0.05).ok, free(0.05).blocks) == (False, True)


def test_without_a_cache_of_kernels_training_is_only_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "cache_folder", lambda: None)
    check = doctor._numba_cache()[0]
    assert (check.ok, check.blocks, check.outcome) == (False, False, "warn")
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    assert doctor._numba_cache()[0].found == str(tmp_path)


def test_without_a_temporary_folder_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert doctor._temporary().outcome == "FAIL"


@pytest.mark.parametrize(
    ("ok", "blocks", "outcome"),
    [(True, True, "ok"), (True, False, "ok"), (False, True, "FAIL"), (False, False, "warn"), (None, False, "absent")],
)
def test_the_word_for_a_finding(ok: bool | None, blocks: bool, outcome: str) -> None:
    assert doctor.Check("x", ok, "y", "z", blocks).outcome == outcome


def test_the_summary_names_what_is_to_be_mended() -> None:
    slow, broken = {"name": "compiler", "outcome": "warn"}, {"name": "libsumo", "outcome": "FAIL"}
    assert doctor.summary([{"name": "python", "outcome": "ok"}]) == "ready for SUMO training"
    assert doctor.summary([slow]).endswith("with: compiler")
    assert doctor.summary([slow, broken]) == "SUMO training cannot start yet; mend first: libsumo"


def test_limits_of_a_container_are_read(tmp_path: Path) -> None:
    file = tmp_path / "limit"
    assert doctor._cpu_quota(file) is None
    file.write_text("max 100000\n")
    assert doctor._cpu_quota(file) is None
    file.write_text("150000 100000\n")
    assert doctor._cpu_quota(file) == 1.5
    file.write_text("max\n")
    assert doctor._memory_limit(file) is None
    file.write_text(f"{3 * 2**30}\n")
    assert doctor._memory_limit(file) == 3.0


def test_more_threads_than_cores_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "threadpoolctl.threadpool_info", lambda: [{"user_api": "openmp", "internal_api": "openmp", "num_threads": 64}]
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    check = next(check for check in doctor._threads() if check.name == "thread pools")
    assert check.ok is False
    assert check.fix == "export OMP_NUM_THREADS=2"


def test_the_carla_client_must_have_the_servers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda _: "0.9.15")
    assert doctor._carla().fix == "pip install 'carla==0.9.16'"
    monkeypatch.setattr(doctor, "_installed", lambda _: "0.9.16")
    assert doctor._carla().ok is True
