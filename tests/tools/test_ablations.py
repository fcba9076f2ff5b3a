"""benchmarks/ablations.py: its rows are profiles that load, and a row is trained, driven and listed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from opencda_marl.config import load_profile
from tests.programs import benchmark_program


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return benchmark_program("ablations")


def test_each_row_changes_the_recipe(program: ModuleType) -> None:
    recipe = load_profile(program.PROFILE).settings
    for name, changes in program.ROWS.items():
        settings = load_profile(program.PROFILE, overrides=changes).settings
        assert (settings != recipe) == bool(changes), name


def test_more_frequent_decisions_blame_the_same_seconds(program: ModuleType) -> None:
    for name, every in (("every-step", 1), ("every-2", 2), ("every-5", 5)):
        settings = load_profile(program.PROFILE, overrides=program.ROWS[name]).settings
        assert settings.decision_interval == every
        assert settings.learner.gae_lambda == pytest.approx(0.9 ** (every / 10), abs=1e-3)


@pytest.mark.parametrize("bad", [["--episodes", "0"], ["--densities", "-5"], ["--minutes", "nan"], ["--only", "nope"]])
def test_bad_arguments_are_refused_before_anything_is_trained(program: ModuleType, bad: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(bad)
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["", '{"x":', '{"x": 1}', "[1]"])
def test_a_broken_file_of_a_row_is_named(program: ModuleType, tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit, match="there is no row in"):
        program.main(["--table", "--results", str(tmp_path)])
    (tmp_path / "plain-s1-5min.json").write_text(text)
    with pytest.raises(SystemExit, match=r"plain-s1-5min.json is not the file of a row"):
        program.main(["--table", "--results", str(tmp_path)])


@pytest.mark.slow
def test_a_row_is_trained_driven_and_listed(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    small = ["--only", "plain", "--minutes", "0.05", "--episodes", "1", "--densities", "200", *places]
    program.main(small)
    (file,) = (tmp_path / "results").iterdir()
    found = json.loads(file.read_text())
    assert found["env_steps"] > 0
    assert found["densities"]["200"]["vehicles"] > 10
    assert "`observation=plain`" in capsys.readouterr().out
    before = file.stat().st_mtime_ns
    program.main([*small, "--table"])
    program.main(small)
    assert file.stat().st_mtime_ns == before
