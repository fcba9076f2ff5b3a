"""What is no file of results says so, with the file's and the field's name; and copies count once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.benchmark.page import densities_in, page_text
from opencda_marl.benchmark.results import find_results, read_result, read_results, result_of
from opencda_marl.core.errors import CheckpointError

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def _learner() -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks" / "results" / "mappo-s1.json").read_text()))


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_files_are_files_of_results(file: Path) -> None:
    assert read_result(file)["name"] == file.stem


def _block(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda result: result["densities"]["300"].update({key: value})


def _drop(*keys: str) -> Callable[[dict[str, Any]], Any]:
    def change(result: dict[str, Any]) -> None:
        for key in keys[:-1]:
            result = result[key]
        del result[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop("kind"), "it has no 'kind'"),
        (_drop("densities"), "it has no 'densities'"),
        (_drop("checkpoint"), "has no 'checkpoint'"),
        (_drop("densities", "300", "per_episode"), "densities '300' has no 'per_episode'"),
        (_drop("training", "env_steps"), "training has no 'env_steps'"),
        (lambda r: r.update(kind="teacher"), "kind is 'teacher', not one of learner"),
        (lambda r: r.update(name=7), "name is 7, not a text"),
        (lambda r: r.update(name="../up"), "name is '../up', not a plain name"),
        (lambda r: r.update(policy=None), "policy is null, not a text"),
        (lambda r: r.update(seed="one"), "seed is 'one', not a whole number"),
        (lambda r: r.update(machine=[]), "machine is a list, not an object"),
        (lambda r: r.update(training=3), "training is 3, not an object"),
        (lambda r: r["training"].update(time_to_s={"95": "soon"}), "training.time_to_s '95' is 'soon'"),
        (lambda r: r.update(densities=[]), "densities is a list, not an object"),
        (lambda r: r["densities"].update(heavy={}), "densities 'heavy' is no number of vehicles"),
        (lambda r: r["densities"].update({"3e2": {}}), "densities '3e2' is no number of vehicles"),
        (lambda r: r["densities"].update({"300": []}), "densities '300' is a list, not an object"),
        (_block("mean_delay_s", float("nan")), "it holds NaN"),
        (_block("mean_delay_s", 1e300), "densities '300', mean_delay_s is 1e+300, not a finite number"),
        (_block("mean_jerk", "high"), "densities '300', mean_jerk is 'high'"),
        (_block("success_rate", 1.5), "densities '300', success_rate is 1.5, not a finite number from 0 to 1"),
        (_block("success_rate", 0.5), "success_rate is 0.5, but per_episode makes it"),
        (_block("vehicles", 3), "vehicles is 3, but"),
        (_block("seeds", [20000]), "seeds is a list, not a pair"),
        (_block("seeds", [20000, 20001]), "seeds say 1, episodes"),
        (_block("congested", "no"), "congested is 'no', not true or false"),
        (lambda r: r["densities"]["300"]["per_episode"].append([1, 2]), "per_episode holds"),
        (lambda r: r["densities"]["300"]["per_episode"][2].pop(), "per_episode 2 is not a list of 8 numbers"),
        (lambda r: r["densities"]["300"]["per_episode"][2].__setitem__(3, 1.5), "per_episode 2, arrived is 1.5"),
        (lambda r: r["densities"]["300"]["per_episode"][2].__setitem__(0, 1), "per_episode 2: seed is 1, not"),
        (lambda r: r["densities"]["300"]["per_episode"][2].__setitem__(1, 1), "per_episode 2: 1 were scheduled"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path) -> None:
    result = _learner()
    change(result)
    file = tmp_path / "mappo-s1.json"
    file.write_text(json.dumps(result))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        read_results([tmp_path])
    assert str(file) in caught.value.message
    assert caught.value.fix == "measure it again, or remove it"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"7",
        b"\xff",
        b"{",
        b"[" * 100_000,
        b'{"name": 1, "name": 2}',
        b'{"name": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "list", "null", "number", "bytes", "cut", "deep", "twice", "digits"],
)
def test_other_files_are_named(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.json is no file of results: "):
        read_result(file)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    (tmp_path / "y.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"x.json cannot be read: .*y.json cannot be read: No such file"):
        read_results([tmp_path])


def test_a_copy_counts_once_and_the_file_with_the_right_name_counts(tmp_path: Path) -> None:
    result = _learner()
    (tmp_path / "a-copy.json").write_text(json.dumps({**result, "name": "mappo-s9"}))  # renamed inside, too
    (tmp_path / "mappo-s1.json").write_text(json.dumps(result))
    (tmp_path / "older.json").write_text(json.dumps({**result, "budget_minutes": 1.0}))
    (tmp_path / "mappo-s2.json").write_text(json.dumps({**result, "name": "mappo-s2", "seed": 2}))
    found = find_results([tmp_path])
    assert sorted(one["name"] for one in found.results) == ["mappo-s1", "mappo-s2"]
    assert len(found.notes) == 2
    assert "a-copy.json is of the same entrant and training seed as" in found.notes[0]
    assert "older.json is of the same entrant and training seed as" in found.notes[1]
    assert all("mappo-s1.json, and counts once" in note for note in found.notes)
    assert "| mappo | 2 |" in page_text(found.results, densities_in(found.results))


def test_a_file_of_another_entrant_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "mappo-s2.json").write_text(json.dumps(_learner()))
    with pytest.raises(CheckpointError, match="holds the results of mappo-s1") as caught:
        result_of(tmp_path, "mappo-s2")
    assert caught.value.fix == "name it mappo-s1.json, or remove it"
    assert result_of(tmp_path, "mappo-s3") == {}
