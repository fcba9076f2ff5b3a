"""The table beside controllers: who is chosen, on which seeds, and how it reads."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opencda_marl import report as module
from opencda_marl.config import to_yaml
from opencda_marl.core.errors import CheckpointError, Interrupted, OpenCDAError, StorageError
from opencda_marl.core.run_folder import RunFolder
from opencda_marl.core.spec import LearnerState
from opencda_marl.core.stopping import StopRequest
from opencda_marl.report import COLUMNS, cell, final_report, kept_report, markdown, next_line
from opencda_marl.settings.run import EvaluationSettings, RunSettings

_SETTINGS = RunSettings(
    algorithm="pcmappo",
    max_episodes=1,
    evaluation=EvaluationSettings(
        seeds=[9000, 9003], selection_seeds=[8000, 8002], rates_vph=[200.0, 300.0], controllers=["random", "priority"]
    ),
)


def _run(path: Path, episodes: tuple[int, ...], best: int) -> Path:
    with RunFolder.create(path) as folder:
        folder.write_config(to_yaml(_SETTINGS))
        folder.write_run({"profile": "a/quick"})
        for episode in episodes:
            folder.checkpoints.save(episode, LearnerState({}, {}), {}, best=episode == best)
    return path


def _row(policy: str, rate: float, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": policy, "rate_vph": rate, "episodes": 1, "vehicles": 30, "throughput_vph": 1234.4}
    row |= {"success_rate": 0.9, "collision_rate": 0.1, "near_miss_rate": None, "mean_delay_s": 2.0}
    row["checkpoint"] = f"checkpoints/{policy.rpartition('/')[2]}" if "/" in policy else None
    row["per_episode"] = [{"seed": 1, "scheduled": 40, "arrived": 27, "collided": 3, "removed": 0}]
    return row | {"running_at_end": 3.25, "waiting_at_end": 0.0} | changes


class _Jobs:
    """In place of child processes: answers, and remembers what was asked."""

    def __init__(self, scores: Mapping[str, Mapping[str, float]]) -> None:
        self.asked: dict[str, Any] = {}
        self.scores = scores

    def __call__(self, _module: str, requests: Mapping[str, Any], *, folder: Path, **more: Any) -> dict[str, Any]:
        self.asked.update(requests)
        more["going_on"](0)
        for name, request in requests.items():  # as a child does
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.progress").write_text(str(len(request["jobs"][0]["rates_vph"])))
            more["going_on"](0)
        answers = {}
        for name, request in requests.items():
            (job,) = request["jobs"]
            answers[name] = [_row(job["policy"], rate, **self.scores.get(name, {})) for rate in job["rates_vph"]]
        return answers


@pytest.fixture
def quiet_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_draw_traffic", lambda run, *_: run / "plots" / "traffic.png")


@pytest.mark.parametrize(
    ("latest", "chosen"),
    [
        ({"success_rate": 0.95}, "episode_2"),
        ({"success_rate": 0.85}, "episode_1"),
        ({"mean_delay_s": 1.0}, "episode_2"),
        ({"success_rate": 0.899, "mean_delay_s": 1.0}, "episode_2"),  # 0.1 % of 200 s is less than a second
        ({"success_rate": 0.89, "mean_delay_s": 1.0}, "episode_1"),
        ({"success_rate": None}, "episode_1"),
        ({"success_rate": 0.95, "waiting_at_end": 1.0}, "episode_2"),  # 1 of 34 did not get in
        ({"success_rate": 1.0, "waiting_at_end": 4.0}, "episode_1"),  # 4 of 37: it holds traffic up
    ],
)
def test_the_checkpoint_is_chosen_on_other_seeds_than_it_is_reported_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_plots: None, latest: dict[str, Any], chosen: str
) -> None:
    run = _run(tmp_path / "run", (1, 2), best=1)
    jobs = _Jobs({"selection-episode_2": latest})
    monkeypatch.setattr(module, "run_all", jobs)
    report = final_report(run)
    assert report.checkpoint == run / "checkpoints" / chosen
    seeds = {name: request["seeds"] for name, request in jobs.asked.items()}
    assert seeds == {
        "selection-episode_1": [8000, 8002],
        "selection-episode_2": [8000, 8002],
        "policy": [9000, 9003],
        "random": [9000, 9003],
        "priority": [9000, 9003],
    }
    assert jobs.asked["random"]["jobs"][0]["overrides"] == ["shield.enabled=false"]
    assert "overrides" not in jobs.asked["policy"]["jobs"][0]
    assert jobs.asked["policy"]["jobs"][0]["policy"] == str(report.checkpoint)
    assert jobs.asked["policy"]["jobs"][0]["trajectory_rate_vph"] == 300.0
    assert [(row["policy"], row["rate_vph"]) for row in report.rows] == [
        *((f"pcmappo ({chosen})", rate) for rate in (200.0, 300.0)),
        *((name, rate) for name in ("random", "priority") for rate in (200.0, 300.0)),
    ]
    assert json.loads((run / "plots" / "comparison.json").read_text()) == report.rows
    said = [
        f"is not told apart from {name} at {rate} vph on 30 vehicles"
        for name in ("random", "priority")
        for rate in (200, 300)
    ]
    found = [line.partition(":")[0].replace("driving ", "").replace("SUMO's priority rule", "priority")
             for line in report.verdict]  # fmt: skip
    assert found == [*said, "not compared with full speed", *found[-2:]]
    assert found[-1] == "(only 1 episode"
    assert report.table.read_text() == markdown(report.rows) + "\n" + "".join(f"- {x}\n" for x in report.verdict)
    assert (run / "plots" / "learning.png").is_file()
    assert str(run) in report.next


def test_one_checkpoint_needs_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_plots: None) -> None:
    jobs = _Jobs({})
    monkeypatch.setattr(module, "run_all", jobs)
    final_report(_run(tmp_path / "run", (1,), best=1))
    assert list(jobs.asked) == ["policy", "random", "priority"]


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        final_report(_run(tmp_path / "run", (), best=0))


def test_a_stop_says_what_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_module: str, requests: Mapping[str, Any], *, going_on: Any, **_: Any) -> dict[str, Any]:
        assert going_on(0)
        os.kill(os.getpid(), signal.SIGINT)
        assert not going_on(0)
        return {}

    monkeypatch.setattr(module, "run_all", interrupted)
    with pytest.raises(Interrupted, match="training is done, and saved") as caught:
        final_report(_run(tmp_path / "a b", (1,), best=1))
    assert f"--resume '{tmp_path / 'a b'}'" in str(caught.value.fix)


def test_a_signal_that_came_before_the_children_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this module was imported, say: it is heard by whoever waits for the table."""
    stop = StopRequest()
    stop.ask()
    monkeypatch.setattr(module, "run_all", lambda *_, going_on, **__: {} if not going_on(0) else pytest.fail())
    with pytest.raises(Interrupted):
        final_report(_run(tmp_path / "run", (1,), best=1), stop=stop)


def test_a_table_is_kept_as_long_as_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_plots: None
) -> None:
    monkeypatch.setattr(module, "run_all", _Jobs({}))
    run = _run(tmp_path / "run", (1, 2), best=1)
    assert kept_report(run) is None
    made = final_report(run)
    assert {row["trained_episodes"] for row in made.rows} == {2}
    kept = kept_report(run)
    assert kept is not None
    assert kept == replace(made, kept=True, plots=[run / "plots/learning.png"])  # the other one was not drawn here
    table = run / "plots" / "comparison.json"
    whole = table.read_text()
    for broken in ("", "[]", "{}", whole[:-20], whole.replace("near_miss_rate", "x"), whole.replace("trained_ep", "x")):
        table.write_text(broken)
        assert kept_report(run) is None, "it is made again"
    for index, name, value in (
        *((0, "success_rate", value) for value in ("abc", 1.5, math.nan, True)),
        *((1, name, value) for name, value in (("rate_vph", "x"), ("vehicles", 10**400), ("per_episode", 3))),
        *((2, name, value) for name, value in (("policy", "x"), ("mean_delay_s", math.inf), ("crashed", [[1, 2]]))),
    ):
        rows = json.loads(whole)
        rows[index][name] = value
        table.write_text(json.dumps(rows))
        assert (kept_report(run) is None) == (name != "crashed"), name
    table.write_text(json.dumps(json.loads(whole)[:-1]))
    assert kept_report(run) is None, "a part of it is not it"
    table.write_text("[" * 100_000)
    assert kept_report(run) is None
    table.write_text(whole)
    with RunFolder.resume(run) as folder:
        folder.checkpoints.save(3, LearnerState({}, {}), {})
    assert kept_report(run) is None, "there was more training"


def test_a_failing_evaluation_is_an_error(tmp_path: Path) -> None:
    """For real: the child cannot read the learner's state that is in this folder."""
    run = _run(tmp_path / "run", (1,), best=1)
    settings = replace(_SETTINGS, evaluation=replace(_SETTINGS.evaluation, controllers=[], rates_vph=[300.0]))
    (run / "config.yaml").write_text(to_yaml(settings))
    with pytest.raises(OpenCDAError, match="the child process policy ended with code"):
        final_report(run)


def test_the_table_reads_well() -> None:
    lines = markdown([_row("pcmappo", 300.0), _row("random", 200.0, mean_delay_s=None)]).splitlines()
    assert len(lines) == 4
    assert lines[0].count("|") == lines[2].count("|") == len(COLUMNS) + 1
    assert lines[2] == "| pcmappo | 300 | 90.0 | 10.0 | - | 2.0 | 1234 | 3.2 | 0.0 | 30 |"
    assert lines[3].startswith("| random | 200 | 90.0 | 10.0 | - | - |")
    assert cell("success_rate", 1.0) == "100.0"


def test_the_next_line_can_be_typed() -> None:
    assert "opencda-marl evaluate 'my runs/it'\"'\"'s'" in next_line(Path("my runs/it's"))
    chosen = Path("run/checkpoints/episode_9")
    assert "evaluate run/checkpoints/episode_9 --seeds" in next_line(Path("run"), chosen), "not always `best`"


def test_progress_counts_episodes_of_all_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_plots: None
) -> None:
    monkeypatch.setattr(module, "run_all", _Jobs({}))
    heard: list[tuple[str, int, int]] = []
    run = _run(tmp_path / "run", (1, 2), best=1)
    for _ in range(2):  # what an earlier table left does not count
        heard.clear()
        final_report(run, progress=lambda *told: heard.append(told))
        # two checkpoints, two rates, two seeds; then three policies, two rates, three seeds
        assert heard[:3] == [("choosing a checkpoint", done, 8) for done in (0, 2, 4)]
        assert heard[3:] == [*(("held-out traffic", done, 18) for done in (0, 2, 4, 6)), ("plots", 0, 0)]


def test_a_run_that_somebody_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet_plots: None
) -> None:
    run = _run(tmp_path / "run", (1,), best=1)

    def jobs(*_: Any, **__: Any) -> dict[str, Any]:
        raise FileNotFoundError(2, "No such file or directory", "evaluations/policy.answer.json")

    monkeypatch.setattr(module, "run_all", jobs)
    with pytest.raises(StorageError, match="the folder is gone"):
        final_report(run)
