"""The commands on real SUMO: what a person types first, in small. Runs in processes of their own."""

from __future__ import annotations

import json
import os
import pstats
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from said import ROOT, Said, python

pytestmark = pytest.mark.timeout(600)  # the first run of a fresh clone compiles its kernels, here under cProfile

Typed = Callable[..., Said]
PROFILE = "sumo-marl/intersection/route_speed_only_pcmappo"
SHORT = ("max_steps=200", "demand.rate_vph=200", "learner.n_steps=100", "evaluation.final=false")


def apart(*arguments: str, cwd: Path, under: tuple[str, ...] = ()) -> Said:
    return python(*under, "-m", "opencda_marl.cli", *arguments, cwd=cwd, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a space in its name, a config root of one's own in it, and a run of one episode under cProfile."""
    place = tmp_path_factory.mktemp("a place with spaces")
    assert apart("config", "export", "prof_configs", cwd=place).code == 0
    profile = place / "prof_configs" / f"{PROFILE}.yaml"
    text = profile.read_text()
    assert "\nmax_episodes: " in text  # the line that a person changes
    lines = [("max_episodes: 1" if line.startswith("max_episodes:") else line) for line in text.splitlines()]
    profile.write_text("\n".join(lines) + "\n")
    command = ("run", "-t", PROFILE, "--config-root", "./prof_configs", "--out", "run", "--json", *SHORT)
    said = apart(*command, cwd=place, under=("-m", "cProfile", "-o", "prof.out"))
    assert said.code == 0, said.err
    (place / "said.json").write_text(said.out)
    return place


def test_a_run_under_cprofile_is_a_run_and_a_profile(place: Path) -> None:
    answer = Said(0, (place / "said.json").read_text(), "").answer
    assert answer["episode"] == 1
    assert answer["steps"] == 200
    assert answer["acting_steps"] > 0
    assert answer["updates_performed"] == 2  # n_steps is half of max_steps
    assert (Path(answer["run_dir"]) / "checkpoints/latest").exists()
    names = {function for _, _, function in pstats.Stats(str(place / "prof.out")).stats}  # type: ignore[attr-defined]
    assert {"run_loop", "act", "update"} <= names


def test_the_same_run_again_without_cprofile_has_the_same_line(place: Path) -> None:
    said = apart("run", "-t", PROFILE, "--config-root", "prof_configs", "--out", "again", *SHORT, cwd=place)
    assert said.code == 0, said.err
    assert "init: " in said.out
    lines = [json.loads((place / name / "episodes.jsonl").read_text()) for name in ("run", "again")]
    for line in lines:
        for timing in ("wall_s", "ms_per_step", "spans"):
            line.pop(timing)
    assert lines[0] == lines[1]


def test_resume_needs_nothing_else_and_keeps_the_rest(place: Path) -> None:
    shutil.copytree(place / "run", place / "longer")
    said = apart("run", "--resume", "longer", "max_episodes=2", "--json", cwd=place)
    assert said.code == 0, said.err
    assert said.answer["episode"] == 2
    said = apart("run", "--resume", "longer", "learner.epochs=9", "--json", cwd=place)
    assert said.code == 2
    assert "learner.epochs" in said.answer["error"]


def test_evaluate_a_run(place: Path, typed: Typed) -> None:
    said = typed("evaluate", str(place / "run"), "--seeds", "9000:9002", "--json")
    assert said.code == 0, said.err
    assert said.answer["episodes"] == 2
    assert said.answer["profile"] == PROFILE
    said = typed("evaluate", "nothing-here", "--json")
    assert said.code == 20
    assert "nothing-here" in said.answer["error"]


def test_describe_names_units(typed: Typed) -> None:
    said = typed("describe", "-t", PROFILE)
    assert said.code == 0, said.err
    for words in ("m/s", "envelope", "collision", "every 10 steps (0.5 s)"):
        assert words in said.out
    answer = typed("describe", "-t", PROFILE, "observation=ego9", "--json").answer
    assert len(answer["observation"]["ego"]) == 9
    assert {reward["name"] for reward in answer["rewards"]} == {"delay", "collision", "near_miss", "acceleration"}
    assert all(feature["unit"] and feature["about"] for feature in answer["observation"]["ego"])


def test_a_folder_that_holds_something_is_not_written_to(place: Path, typed: Typed) -> None:
    said = typed("run", "-t", PROFILE, "--out", str(place / "run"), *SHORT)
    assert said.code == 21
    assert "is not empty" in said.err
    assert "Traceback" not in said.err


def test_the_package_is_the_program(tmp_path: Path) -> None:
    of_package = python("-m", "opencda_marl", "--version", cwd=tmp_path, env=_environment())
    assert of_package.code == 0
    assert of_package.out == apart("--version", cwd=tmp_path).out
