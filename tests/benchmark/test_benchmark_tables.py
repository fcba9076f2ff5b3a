"""Results -> files -> tables, by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from results_by_hand import answer

from opencda_marl.benchmark.page import BEGIN, END, _curves, densities_in, page_text, updated_page, write_report
from opencda_marl.benchmark.results import (
    density_key,
    evaluation_of,
    read_results,
    short_figures,
    time_to,
    write_result,
)
from opencda_marl.benchmark.tables import (
    aggregates,
    as_csv,
    beaten,
    missing,
    rows_of,
    scores_of,
    training_rows,
    verdicts,
)
from opencda_marl.core.errors import CheckpointError, ConfigError


def _result(name: str, collided: int, rates: tuple[float, ...] = (200.0, 300.0), **more: Any) -> dict[str, Any]:
    policy, _, seed = name.partition("-s")
    blocks = {density_key(rate): short_figures(answer(policy, collided, rate=rate)) for rate in rates}
    kind = "learner" if seed else "controller"
    own = {"name": name, "policy": policy, "kind": kind, "decision_interval": 10, "commit": "abc", "densities": blocks}
    return {**own, "machine": {"processor": "P", "cores": 2}, "date": "2026-01-01", "command": "c", **more}


def test_a_file_reads_back(tmp_path: Path) -> None:
    result = _result("mappo-s1", 2)
    file = write_result(tmp_path / "results", result)
    assert file.name == "mappo-s1.json"
    assert read_results([tmp_path / "results"]) == read_results([file]) == [json.loads(file.read_text())] == [result]
    assert len([line for line in file.read_text().splitlines() if line.startswith('  "')]) == 2 + 2  # a line a density
    again = evaluation_of(result, "300")
    told = answer("mappo", 2)
    assert again["per_episode"] == told["per_episode"]
    assert (again["policy"], again["rate_vph"], again["mean_delay_s"]) == ("mappo", 300.0, 1.234568)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is no file of results"):
        read_results([file])


def test_rows_and_csv() -> None:
    rows = rows_of([_result("random", 20)], [200.0, 300.0, 400.0])
    assert [row["rate_vph"] for row in rows] == [200.0, 300.0]
    assert rows[0]["through_rate"] == pytest.approx((20 * 76 - 10) / 2000)
    read = list(csv.DictReader(io.StringIO(as_csv(rows))))
    assert read[1]["name"] == "random"
    assert float(read[1]["through_rate"]) == pytest.approx(rows[1]["through_rate"])
    assert read[1]["near_miss_rate"] == ""


def test_incomplete_runs_are_listed_and_not_averaged() -> None:
    results = [_result("mappo-s1", 2), _result("mappo-s2", 4), _result("masac-s1", 0, (300.0,)), _result("random", 20)]
    rates = [200.0, 300.0]
    assert {name: scores.shape for name, scores in scores_of(results, rates).items()} == {
        "mappo": (2, 2),
        "random": (1, 2),
    }
    only, through = aggregates(results, rates)
    assert (only["measure"], through["measure"]) == ("success_rate", "through_rate")
    # 100 - 4 - 2.5 and 100 - 4 - 4.5 of a hundred arrive
    assert through["iqm"] == pytest.approx((0.935 + 0.915) / 2)
    one, two = results[0]["densities"]["300"]["success_rate"], results[1]["densities"]["300"]["success_rate"]
    assert (only["policy"], only["runs"], only["improvement"]) == ("mappo", 2, {})
    assert only["iqm"] == pytest.approx((one + two) / 2)
    assert two - 1e-9 <= only["low"] < only["iqm"] < only["high"] <= one + 1e-9
    lines = missing(results, rates, ["mappo", "masac", "dqn", "random"])
    assert lines == [
        "mappo: fewer than 5,000 vehicles at 200, 300 vph",
        "mappo: 2 training seeds of 3; its spread is not known",
        "masac-s1: not measured at 200 vph",
        "masac: fewer than 5,000 vehicles at 300 vph",
        "masac: 1 training seed of 3; its spread is not known",
        "dqn: not measured",
        "random: fewer than 5,000 vehicles at 200, 300 vph",
    ]


def test_learners_beside_each_other() -> None:
    results = [_result("mappo-s1", 2), _result("masac-s1", 0)]
    first, second, *_ = aggregates(results, [200.0, 300.0])
    assert (first["policy"], first["improvement"], first["low"]) == ("masac", {"mappo": 1.0}, None)
    assert second["improvement"] == {"masac": 0.0}


def test_verdicts_need_the_same_traffic_and_interval() -> None:
    ours = _result("mappo-s1", 2)
    random, other = _result("random", 20), _result("random", 20, decision_interval=1)
    said = verdicts([ours, random, _result("priority", 0, decision_interval=99)], [200.0, 300.0])["mappo-s1"]
    assert [line.partition(":")[0] for line in said] == [
        "beats random driving at 200 vph",
        "beats random driving at 300 vph",
        "does NOT beat SUMO's priority rule at 200 vph",
        "does NOT beat SUMO's priority rule at 300 vph",
        "not compared with full speed",
    ]
    assert verdicts([ours, other], [300.0])["mappo-s1"] == [
        "not compared with random driving, full speed, SUMO's priority rule"
    ]
    for block in random["densities"].values():
        block["per_episode"] = [[row[0] + 1, *row[1:]] for row in block["per_episode"]]
    assert verdicts([ours, random], [300.0])["mappo-s1"][0].startswith("not compared with random driving")


def test_whom_each_beats_and_where() -> None:
    ours = _result("mappo-s1", 2)
    rivals = [_result("random", 20), _result("priority", 0), _result("full_speed", 2)]
    row = beaten([ours, *rivals], [200.0, 300.0])[0]
    assert row == {
        "policy": "mappo-s1",
        "random driving": "yes: 200 to 300",
        "full speed": "no sure difference: 200 to 300",
        "SUMO's priority rule": "NO, more crash and fewer get through: 200 to 300",
    }
    assert beaten([ours, *rivals], [200.0, 250.0, 300.0])[0]["random driving"] == "yes: 200, 300", "250 was not driven"


def test_time_to_a_quality() -> None:
    episodes = [{"episode": number, "wall_s": 10.0} for number in range(1, 7)]
    metrics = [{"kind": "update", "episode": 1}]
    for episode, success in ((2, 0.9), (4, 0.991), (5, 0.97), (6, None)):
        metrics.append({"kind": "evaluation", "episode": episode, "rate_vph": 300.0, "success_rate": success})
        metrics.append({"kind": "evaluation", "episode": episode, "rate_vph": 200.0, "success_rate": 1.0})
    assert time_to(episodes, metrics) == {"95": 40.0, "99": 40.0, "99.5": None}
    assert time_to(episodes, metrics, [0.5]) == {"50": 20.0}


def test_the_page() -> None:
    told = {"episodes": 5, "env_steps": 12000, "training_s": 61.0, "time_to_s": {"95": 40.0, "99": None}}
    results = [_result("mappo-s1", 2, training=told, budget_minutes=10.0, checkpoint="checkpoints/episode_5")]
    results += [_result("random", 20)]
    cases = {"as trained": {**answer("x", 1), "settings": []}}
    results.append({"name": "generalisation-x", "kind": "generalisation", "policy": "bundled:x", "cases": cases})
    text = page_text(results, [200.0, 300.0])
    assert training_rows(results)[0] == {
        "policy": "mappo-s1",
        "budget min": "10",
        "trained": "1:01",
        "env steps": "12,000",
        "95 % at 300 vph": "0:40",
        "99 % at 300 vph": "-",
        "checkpoint": "episode_5",
    }
    for words in (
        "| mappo-s1 | 200 | 97.40 | 2.60 | 93.5 | - | 1.23 |",
        "| mappo | 1 | 97.40 | - |",
        "| mappo | 1 | 93.50 | - |",
        "### Elsewhere than it was trained: bundled:x",
        "| as trained |",
        "| mappo-s1 | yes: 200 to 300 | not compared | not compared |",
        "- dqn: not measured",
        "| mappo-s1 | `abc` | P, 2 cores | 2026-01-01 | `c` |",
    ):
        assert words in text, words
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = updated_page(page, text)
    assert new.startswith("before\n")
    assert new.endswith(f"{END}\nafter\n")
    assert "old" not in new
    assert updated_page(new, text) == new
    with pytest.raises(ConfigError, match="the page has no lines"):
        updated_page("nothing", text)


def test_a_report(tmp_path: Path) -> None:
    results = [_result("mappo-s1", 2), _result("random", 20)]
    files = write_report(results, densities_in(results), tmp_path / "out")
    assert [file.name for file in files] == [
        *("report.md", "report.csv", "report.json"),
        *("densities.png", "profiles.png"),
    ]
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["name"] for row in told["rows"]] == ["mappo-s1"] * 2 + ["random"] * 2
    assert "dqn" not in (tmp_path / "out" / "report.md").read_text()  # nobody asked for it
    for file in files[3:]:
        with Image.open(file) as image:
            assert image.size[0] > 900


def test_a_report_of_generalisation_alone(tmp_path: Path) -> None:
    cases = {"as trained": {**answer("x", 1), "settings": []}}
    alone = {"name": "generalisation-x", "kind": "generalisation", "policy": "bundled:x", "cases": cases}
    files = write_report([alone], densities_in([alone]), tmp_path / "out")
    assert [file.name for file in files] == ["report.md", "report.csv", "report.json"]
    text = files[0].read_text()
    assert text.startswith("### Elsewhere than it was trained: bundled:x")
    assert "nan" not in text
    assert json.loads(files[2].read_text())["aggregates"] == []


def test_two_runs_of_ones_own_are_two_lines() -> None:
    ours = [{**_result(name, 2), "policy": "mappo", "kind": "learner", "own": True} for name in ("first", "second")]
    seeds = [_result("mappo-s1", 2), _result("mappo-s2", 2), _result("random", 20)]
    assert list(_curves(ours, [200.0])["collision_rate"]) == ["first", "second"]
    assert list(_curves(seeds, [200.0])["collision_rate"]) == ["mappo", "random"]
