"""`benchmark`, `report`, `runs export` and moving pictures, as they are typed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from said import ROOT, Said

from opencda_marl.benchmark.page import BEGIN, END
from opencda_marl.benchmark.results import EPISODE
from opencda_marl.config import load_profile, to_yaml
from opencda_marl.core.run_folder import RunFolder

Typed = Callable[..., Said]
PROFILE = "sumo-marl/intersection/route_speed_only_mappo"


def _row(policy: str, rate: float, checkpoint: str | None, collided: int) -> dict[str, Any]:
    episodes = [dict(zip(EPISODE, (seed, 50, 50, 45 - collided, collided, 0, 5, 0), strict=True)) for seed in range(9)]
    names = ("mean_delay_s", "mean_delay_inside_s", "stops_per_vehicle", "mean_jerk", "throughput_vph", "return")
    figures: dict[str, Any] = dict.fromkeys(names, 1.0)
    figures |= {
        "vehicles": 9 * 45,
        "success_rate": 1 - collided / 45,
        "collision_rate": collided / 45,
        "congested": False,
    }
    figures |= {"running_at_end": 5.0, "waiting_at_end": 0.0, "longest_wait_s": 0.0, "near_miss_rate": None}
    facts = {"policy": policy, "rate_vph": rate, "checkpoint": checkpoint, "seeds": [0, 9], "episodes": 9}
    return {**facts, **figures, "profile": PROFILE, "preference": None, "per_episode": episodes}


def _run(path: Path, *, table: bool = True, seed: int = 0) -> Path:
    """A run folder with a final table, as training leaves it."""
    settings = load_profile(PROFILE, overrides=[f"seed={seed}"]).settings
    with RunFolder.create(path) as folder:
        folder.write_config(to_yaml(settings))
        folder.write_run({"profile": PROFILE, "git": "abc", "machine": {}, "created": "2026-01-02T03:04:05"})
        for episode in (1, 2):
            folder.episode({"episode": episode, "wall_s": 1.5, "env_steps": 2400 * episode})
        folder.metrics({"kind": "evaluation", "episode": 2, "rate_vph": 300.0, "success_rate": 0.97})
    rows = [_row("mappo (episode_2)", rate, "x/checkpoints/episode_2", 1) for rate in (200.0, 300.0)]
    rows += [_row("random", rate, None, 20) for rate in (200.0, 300.0)]
    if table:
        (path / "plots").mkdir()
        (path / "plots" / "comparison.json").write_text(json.dumps(rows))
    return path


def test_a_report_of_runs(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "two")):
        _run(tmp_path / name, seed=seed)
    _run(tmp_path / "bare", table=False)
    said = typed("report", "one", "two", "bare", "--out", "out", "--json")
    assert said.code == 1, "one of three is not in it"
    assert said.answer["notes"] == [
        "left out: bare has no final table; opencda-marl run --resume bare evaluation.final=true"
    ]
    told = json.loads(Path("out/report.json").read_text())
    assert [row["name"] for row in told["rows"]] == ["one", "one", "random", "random", "two", "two"]  # once: the same
    own = told["aggregates"][0]
    assert (own["policy"], own["runs"]) == ("mappo", 2)  # two runs of one algorithm are its seeds
    assert told["verdicts"]["one"][0].startswith("beats random driving at 200 vph")
    text = Path("out/report.md").read_text()
    assert "| one | 0:03 | 4,800 | 0:03 | episode_2 |" in text
    # nobody fills these columns, and the numbers that the benchmark wants are not asked of a run
    for words in ("budget min", "P(better", "near-misses", "5,000 vehicles", "training seeds", "What is missing"):
        assert words not in text, words
    assert typed("report", "one", "--out", "again").code == 0
    said = typed("report", "bare")
    assert said.code == 20
    assert "nothing of this can be reported: bare has no final table" in said.err
    assert typed("report", "nowhere").code == 20
    said = typed("report", str(tmp_path))
    assert "is no run folder (it has no run.json), and no *.json lies in it; there are runs below it" in said.err
    assert "bare" in said.err
    assert "plots/comparison.json" in said.err


def test_a_copied_run_counts_once(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "one")
    shutil.copytree("one", "again")
    said = typed("report", "one", "again", "--out", "out", "--json")
    assert said.answer["notes"] == ["left out: again in again says the same as one, and counts once"]
    assert json.loads(Path("out/report.json").read_text())["aggregates"][0]["runs"] == 1


def _publish(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(ROOT / "benchmarks" / "results" / f"{name}.json", folder)


def test_a_broken_file_does_not_hide_the_others(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _publish(tmp_path / "results", "random", "mappo-s1")
    (tmp_path / "results" / "half.json").write_text('{"name": "half", "kind": "learner"}')
    shutil.copy("results/mappo-s1.json", "results/copy.json")
    said = typed("report", "results", "--out", "out", "--json")
    assert said.code == 1
    assert said.answer["notes"] == [
        "left out: results/copy.json says the same as results/mappo-s1.json, and counts once",
        "left out: results/half.json is no file of results: it has no 'policy'; measure it again, or remove it",
    ]
    told = json.loads(Path("out/report.json").read_text())
    assert {row["name"] for row in told["rows"]} == {"random", "mappo-s1"}
    assert told["aggregates"][0]["runs"] == 1
    assert typed("report", "results/half.json").code == 20
    said = typed("benchmark", "--collect", "--results", "results")  # tables without it would look whole
    assert said.code == 20
    assert "results/half.json is no file of results: it has no 'policy'" in said.err
    Path("results/half.json").unlink()
    said = typed("benchmark", "--collect", "--results", "results", "--json")
    assert said.code == 0
    assert [row["runs"] for row in said.answer["aggregates"]] == [1, 1]
    assert said.answer["notes"] == [
        "left out: results/copy.json says the same as results/mappo-s1.json, and counts once"
    ]


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes", "bare"])
def test_a_page_that_is_none(kind: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _publish(tmp_path / "results", "random")
    page = tmp_path / "page.md"
    if kind == "folder":
        page.mkdir()
    elif kind != "missing":
        page.write_bytes(b"\xff\xfe" if kind == "bytes" else b"nothing")
    said = typed("benchmark", "--collect", "--results", "results", "--page", "page.md")
    assert said.code == 2
    words = {"missing": "does not exist", "folder": "is a folder", "bytes": "is no text", "bare": "has no lines"}
    assert f"page.md {words[kind]}" in said.err
    assert "fix:" in said.err


def test_a_dry_run_asks_for_its_page_too(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = typed("benchmark", "--only", "random", "--page", "page.md", "--dry-run")
    assert (said.code, "page.md does not exist" in said.err) == (2, True)
    Path("page.md").write_text(f"{BEGIN}\n{END}\n")
    assert typed("benchmark", "--only", "random", "--page", "page.md", "--dry-run").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"], "nothing was made"


@pytest.mark.parametrize("option", ["--results", "--out"])
def test_folders_are_tried_before_anything_is_measured(
    option: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr("opencda_marl.benchmark.measure.Measurement.run", lambda *_: pytest.fail("it measured"))
    said = typed("benchmark", "--only", "random", option, "file/below")
    assert said.code == 21
    assert "cannot write file/below: a part of the path is a file, not a folder" in said.err
    (tmp_path / "results").mkdir()
    _publish(tmp_path / "results", "random")
    assert typed("report", "results", "--out", "file").code == 21


def test_the_dry_run_says_what_differs_and_how_long(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _publish(tmp_path / "results", "mappo-s1")
    words = ("benchmark", "--only", "mappo,random", "--results", "results", "--densities", "300", "--dry-run")
    said = typed(*words, "--episodes", "60", "--json")
    ours, random = said.answer["left"]
    assert ours["differs"][0] == "budget_minutes: 15.0 in the file, 10.0 wanted"
    assert "--set demand.ramp_episodes=450" in ours["differs"][-1]
    assert (random["again"], random["differs"]) == (False, [])
    told = said.answer["estimate"]
    assert told["training_minutes"] == 10.0
    rates = len(load_profile(PROFILE).settings.evaluation.rates_vph)
    assert told["episodes"] == 2 * 60 + 2 * 40 * rates
    assert told["minutes"] == pytest.approx(10.0 + told["driving_minutes"], abs=0.11)
    said = typed(*words)
    assert "mappo-s1: budget_minutes: 15.0 in the file, 10.0 wanted" in said.out
    assert "10:00 of training" in said.out


def test_the_plan_of_a_benchmark(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = typed(
        "benchmark", "--only", "mappo,random", "--seeds", "1:3", "--densities", "300,200", "--dry-run", "--json"
    )
    assert said.code == 0, said.err
    assert [(row["name"], row["state"], row["missing"]) for row in said.answer["left"]] == [
        ("mappo-s1", "train", [200.0, 300.0]),
        ("mappo-s2", "train", [200.0, 300.0]),
        ("random", "evaluate", [200.0, 300.0]),
    ]
    assert not list(tmp_path.iterdir())
    assert "mappo-s1" in typed("benchmark", "--dry-run").out
    for wrong in (
        *(("--only", "mapo"), ("--only", ""), ("--only", ","), ("--seeds", "3:1"), ("--seeds", "0:99999999999")),
        *(("--budget-minutes", text) for text in ("x", "=3", "nan", "random=3", "mappo=1e300", "-1")),
        ("--budget-minutes", "3", "--budget-minutes", "4"),
        ("--budget-minutes", "mappo=3", "--budget-minutes", "mappo=4"),
        *(("--densities", text) for text in ("0", "1e-9", "inf", "1e5", "")),
        *((flag, "9" * 20) for flag in ("--episodes", "--parallel", "--densities", "--budget-minutes", "--seeds")),
    ):
        said = typed("benchmark", "--dry-run", *wrong)
        assert said.code == 2, wrong
        assert "Traceback" not in said.err


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("flag", ["--out", "--results"])
@pytest.mark.parametrize(("where", "why"), [("file", "a file of that name"), ("file/below", "is a file, not a folder")])
def test_a_folder_that_cannot_be_is_refused_by_a_dry_run_too(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry: bool, flag: str, where: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    said = typed("benchmark", "--only", "random", flag, where, *(["--dry-run"] if dry else []))
    assert said.code == 21, said.err
    assert why in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing was made"


def test_tables_are_made_from_the_files_alone(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{BEGIN}\n{END}\n")
    said = typed("benchmark", "--collect", "--page", "page.md", "--json")
    assert said.code == 2
    assert "there are no results in benchmarks/results" in said.err
    assert page.read_text() == f"# Page\n\n{BEGIN}\n{END}\n", "a wrong folder empties no page"
    (tmp_path / "results").mkdir()
    own = Path(__file__).parents[2] / "benchmarks" / "results" / "random.json"
    (tmp_path / "results" / "random.json").write_bytes(own.read_bytes())
    said = typed("benchmark", "--collect", "--results", "results", "--page", "page.md", "--json")
    assert said.code == 0, said.err
    assert {row["name"] for row in said.answer["rows"]} == {"random"}
    assert "- mappo: not measured" in page.read_text()
    said = typed("benchmark", "--collect", "--results", "results", "--only", "random")
    assert "random: fewer than" in said.out
    assert "mappo" not in said.out, "it was not asked for"
    said = typed("benchmark", "--collect", "--results", "nowhere")
    assert (said.code, "there are no results in nowhere" in said.err) == (2, True)


def test_export_and_pictures(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("max_steps=700", "demand.rate_vph=300", "max_episodes=1", "evaluation.final=false")
    said = typed("run", "-t", PROFILE, "--out", "run", "recording.trajectories_every=1", *short)
    assert said.code == 0, said.err
    assert "not compared with random driving, full speed, SUMO's priority rule" in said.out
    said = typed("runs", "export", "run", "alone", "--about", "short", "--json")
    assert said.code == 0, said.err
    assert said.answer["algorithm"] == "mappo"
    assert typed("runs", "export", "run", "alone").code == 21
    from opencda_marl.policies import catalogue

    monkeypatch.setattr(catalogue, "_HERE", tmp_path)  # as if it had come with the package
    said = typed("run", "-t", PROFILE, "--out", "next", "--init-from", "bundled:alone", *short, "max_steps=100")
    assert said.code == 0, said.err
    assert typed("run", "-t", PROFILE, "--init-from", "bundled:nobody", *short).code == 20
    assert "bundled:alone" in typed("list", "policies").out
    wanted = ("--seeds", "9000:9002", "demand.rate_vph=200", "--no-compare", "--json")
    said = typed("evaluate", "bundled:alone", *wanted)
    assert said.code == 0, said.err
    assert (said.answer["policy"], said.answer["rate_vph"], said.answer["profile"]) == ("bundled:alone", 200, PROFILE)
    assert "comparison" not in said.answer
    said = typed("evaluate", "alone", "--seeds", "9000:9001", "--animate", "out/new.png", "--json")
    assert said.code == 0, said.err
    assert [one["rival"] for one in said.answer["comparison"]] == ["random", "full_speed", "priority"]
    with Image.open("out/new.png") as image:
        assert image.size[1] == 440
    assert [file.name for file in Path("out").iterdir()] == ["new.png"]  # its tracks are gone
    from opencda_marl.report import animate_run

    assert animate_run(tmp_path / "run", tmp_path / "kept.gif").stat().st_size > 10_000


@pytest.mark.slow
def test_killed_in_the_middle_and_typed_again(tmp_path: Path) -> None:
    """Training cells and evaluations on SUMO, killed outright while each of them is under way."""
    words = ["benchmark", "--only", "qlearning,full_speed", "--budget-minutes", "0.2", "--densities", "300"]
    words += ["--set", "evaluation.rates_vph=[300]"]  # a third of the traffic that chooses a checkpoint
    command = [sys.executable, "-m", "opencda_marl.cli", *words, "--episodes", "6", "--results", "results", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def killed_when(seen: Callable[[], bool]) -> None:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 600
        while not seen():
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()

    killed_when(lambda: any(tmp_path.glob("runs/benchmark/cells/*/episodes.jsonl")))
    killed_when(lambda: (tmp_path / "results" / "qlearning-s1.json").is_file())
    kept = (tmp_path / "results" / "qlearning-s1.json").read_bytes()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["state"] for row in answer["left"]] == ["done", "done"]
    assert (tmp_path / "results" / "qlearning-s1.json").read_bytes() == kept
    result = json.loads(kept)
    assert result["training"]["training_s"] >= 12.0
    assert set(result["training"]["time_to_s"]) == {"95", "99", "99.5"}
    assert result["densities"]["300"]["episodes"] == 6
