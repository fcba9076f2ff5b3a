"""The benchmark: what is left, what is kept, and (on SUMO) a kill in the middle of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results_by_hand import answer

from opencda_marl.benchmark import generalise as generalisation
from opencda_marl.benchmark import measure
from opencda_marl.benchmark.measure import Measurement
from opencda_marl.benchmark.plan import CONTROLLERS, DENSITIES, FIRST_SEED, LEARNERS, Entrant, Wanted, make_cells
from opencda_marl.benchmark.results import read_results
from opencda_marl.benchmark.standing import left
from opencda_marl.config import load_profile
from opencda_marl.core.errors import ConfigError, Interrupted, OpenCDAError
from opencda_marl.launch.folder import MatrixFolder


def test_everything_is_a_valid_cell() -> None:
    cells, entrants = make_cells(Wanted())
    assert [entrant.name for entrant in entrants if entrant.kind == "learner"] == [f"{name}-s1" for name in LEARNERS]
    assert {entrant.policy for entrant in entrants if entrant.kind == "controller"} == {*CONTROLLERS}
    budgets = {cell.algorithm: cell.budgets for cell, _ in cells}
    assert budgets["mappo"] == {"max_episodes": None, "max_env_steps": None, "max_minutes": 10.0}
    assert budgets["masac"]["max_minutes"] == 30.0
    for _, settings in cells:
        assert settings.eval_every > 0
        assert not settings.evaluation.final
        chosen, judged = settings.evaluation.selection_seeds, range(*settings.evaluation.seeds)
        assert chosen[1] <= judged.start < judged.stop <= FIRST_SEED


def test_what_is_asked_for() -> None:
    wanted = Wanted(only=("mappo", "random"), seeds=(1, 2), budget_minutes={"": 3.0}, sets=("decision_interval=5",))
    cells, entrants = make_cells(wanted)
    # random driving decides as often as the learner does, and as often as the default says
    assert [entrant.name for entrant in entrants] == ["mappo-s1", "mappo-s2", "random-k5", "random"]
    assert {cell.budgets["max_minutes"] for cell, _ in cells} == {3.0}
    assert all(cell.id.endswith("-3min") for cell, _ in cells)
    again = {cell.id for cell, _ in make_cells(Wanted(only=("mappo",), seeds=(1, 2), sets=wanted.sets))[0]}
    assert again.isdisjoint(cell.id for cell, _ in cells)  # another budget is another run
    (together,) = make_cells(Wanted(only=("mappo",), sets=("workers=2",)))[1]
    assert (together.name, together.policy) == ("mappo-w2-s1", "mappo-w2")  # stands beside those of one core
    with pytest.raises(ConfigError, match="another one on each machine"):
        make_cells(Wanted(only=("mappo",), sets=("workers=auto",)))
    with pytest.raises(ConfigError, match="the benchmark has no 'mapo'"):
        Wanted(only=("mapo",))
    with pytest.raises(ConfigError, match="--densities"):
        Wanted(densities=())


def test_drivers_without_learning_depend_on_what_they_drive_in() -> None:
    def identity(*overrides: str) -> str:
        settings = load_profile("sumo-marl/intersection/route_speed_only_mappo", overrides=overrides).settings
        return Entrant("random", "random", "controller", settings).identity

    same = ("learner.epochs=9", "reward.weights.delay=-1.0", "demand.rate_vph=250", "neighbours.max=5", "seed=7")
    assert {identity(one) for one in same} == {identity()}
    other = ("decision_interval=5", "max_steps=600", "envelope.comfort_braking=2.0", "demand.arrivals=exact")
    assert len({identity(), *map(identity, other)}) == 1 + len(other)


def test_episodes_bring_five_thousand_vehicles() -> None:
    for rate in DENSITIES:
        seeds = Wanted().traffic(rate, 2400, 0.05)
        assert seeds.start == FIRST_SEED
        assert len(seeds) * rate * 12 / 30 * 0.85 >= 5000
        assert len(seeds) >= 60
    assert Wanted(episodes=3).traffic(100.0, 2400, 0.05) == range(FIRST_SEED, FIRST_SEED + 3)


class _Children:
    """In place of child processes: leaves answers as they do, and can be asked to stop after some of them."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.asked: list[str] = []
        self.stop_after = stop_after

    def __call__(self, _module: str, requests: Mapping[str, Any], *, folder: Path, **more: Any) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)  # as the real one: what is above it must be there
        found = {}
        for name, request in requests.items():
            if len(self.asked) >= self.stop_after:
                raise OpenCDAError("killed")
            if not more["going_on"](len(found)):
                break
            self.asked.append(name)
            (job,), seeds = request["jobs"], range(*request["seeds"])
            rows = [answer(job["policy"], 1, rate=rate, episodes=len(seeds)) for rate in job["rates_vph"]]
            (folder / f"{name}.answer.json").write_text(json.dumps(rows))
            (folder / f"{name}.progress").write_text(str(len(seeds)))
            found[name] = rows
        more["going_on"](len(found))
        return found


def _measure(tmp_path: Path, wanted: Wanted, heard: list[tuple[str, int, int]] | None = None) -> list[str]:
    _, entrants = make_cells(wanted)
    matrix, results = MatrixFolder(tmp_path / "out"), tmp_path / "results"

    def tell(what: str, done: int, total: int) -> None:
        if heard is not None:
            heard.append((what, done, total))

    return Measurement(wanted, matrix, results, command="type this", workers=1, tell=tell).run(entrants)


def test_killed_and_typed_again_it_does_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Wanted(only=("random", "full_speed"), densities=(200.0, 300.0), episodes=20)
    first = _Children(stop_after=3)
    monkeypatch.setattr(measure, "run_all", first)
    with pytest.raises(OpenCDAError, match="killed"):
        _measure(tmp_path, wanted)
    assert first.asked == ["random-200", "random-300", "full_speed-200"]
    kept = (tmp_path / "results" / "random.json").read_bytes()
    rest = _Children()
    monkeypatch.setattr(measure, "run_all", rest)
    heard: list[tuple[str, int, int]] = []
    assert _measure(tmp_path, wanted, heard) == ["full_speed"]
    assert set(rest.asked) <= {"full_speed-200", "full_speed-300"}
    assert "full_speed-300" in rest.asked
    assert heard[-1][1:] in ((20, 20), (40, 40))
    assert (tmp_path / "results" / "random.json").read_bytes() == kept
    assert _measure(tmp_path, wanted) == []
    _, entrants = make_cells(wanted)
    stands = left(wanted, entrants, MatrixFolder(tmp_path / "out"), tmp_path / "results")
    assert [(row["name"], row["state"], row["missing"]) for row in stands] == [
        ("random", "done", []),
        ("full_speed", "done", []),
    ]
    for result in read_results([tmp_path / "results"]):
        assert sorted(result["densities"]) == ["200", "300"]
        assert "host" not in result["machine"]
        assert result["command"] == "type this"
        assert result["settings"]["decision_interval"] == 10
        assert "learner.epochs" not in result["settings"], "a driver without learning does not depend on it"


def test_more_traffic_or_other_settings_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_all", _Children())
    small = Wanted(only=("random",), densities=(300.0,), episodes=5)
    _measure(tmp_path, small)
    assert _measure(tmp_path, small) == []
    assert _measure(tmp_path, Wanted(only=("random",), densities=(300.0,), episodes=6)) == ["random"]
    assert _measure(tmp_path, small) == []  # more than is wanted is enough
    file = tmp_path / "results" / "random.json"
    file.write_text(file.read_text().replace('"identity": "k=10 ', '"identity": "k=1 '))
    _, entrants = make_cells(small)
    (row,) = left(small, entrants, MatrixFolder(tmp_path / "out"), tmp_path / "results")
    assert (row["state"], row["again"]) == ("evaluate", True)
    assert _measure(tmp_path, small) == ["random"]


def test_the_setting_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_all", _Children())
    small = Wanted(only=("random",), densities=(300.0,), episodes=5)
    _measure(tmp_path, small)
    _, (entrant,) = make_cells(small)
    slower = replace(entrant.settings, envelope=replace(entrant.settings.envelope, comfort_braking=2.0))
    (row,) = left(small, [replace(entrant, settings=slower)], MatrixFolder(tmp_path / "out"), tmp_path / "results")
    old = entrant.settings.envelope.comfort_braking
    assert row["differs"] == [f"envelope.comfort_braking: {old} in the file, 2.0 wanted"]
    (row,) = left(small, [entrant], MatrixFolder(tmp_path / "out"), tmp_path / "results")
    assert (row["state"], row["differs"]) == ("done", [])


def test_a_learner_is_trained_first(tmp_path: Path) -> None:
    wanted = Wanted(only=("qlearning",))
    _, entrants = make_cells(wanted)
    (row,) = left(wanted, entrants, MatrixFolder(tmp_path / "out"), tmp_path / "results")
    assert (row["state"], row["missing"]) == ("train", list(DENSITIES))


def test_a_file_holds_the_figures_of_one_training(tmp_path: Path) -> None:
    """A second training of the same settings (another `--out`, a fresh clone) is another policy."""
    committed = Path(__file__).parents[2] / "benchmarks" / "results" / "qlearning-s1.json"
    wanted = Wanted(only=("qlearning",), densities=(300.0, 400.0))
    _, (entrant,) = make_cells(wanted)
    assert entrant.cell is not None
    known = json.loads(committed.read_text()) | {"identity": entrant.identity}
    del known["densities"]["400"]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "qlearning-s1.json").write_text(json.dumps(known))
    matrix = MatrixFolder(tmp_path / "out")

    def stands(*densities: float) -> tuple[str, bool, list[float]]:
        (row,) = left(replace(wanted, densities=densities), [entrant], matrix, tmp_path / "results")
        assert bool(row["differs"]) == row["again"]
        return row["state"], row["again"], row["missing"]

    assert stands(300.0) == ("done", False, [])
    assert stands(300.0, 400.0) == ("train", True, [300.0, 400.0])
    run = matrix.run(entrant.cell.id)
    run.mkdir(parents=True)
    told = known["training"]
    lines = [{"episode": k, "env_steps": told["env_steps"], "wall_s": 0.0} for k in range(1, told["episodes"])]
    lines.append({"episode": told["episodes"], "env_steps": told["env_steps"], "wall_s": told["training_s"]})
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert stands(300.0, 400.0)[1:] == (False, [400.0])  # the one that made the file


def test_two_commands_on_one_folder_keep_what_both_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = _Children()
    monkeypatch.setattr(measure, "run_all", children)
    first, second = (Wanted(only=("random",), densities=(rate,), episodes=5) for rate in (200.0, 300.0))
    begin = Measurement._begin

    def beside(self: Measurement, entrant: Entrant) -> dict[str, Any]:
        found = begin(self, entrant)
        monkeypatch.setattr(Measurement, "_begin", begin)
        _measure(tmp_path, second)  # another command, from beginning to end, while this one is under way
        return found

    monkeypatch.setattr(Measurement, "_begin", beside)
    _measure(tmp_path, first)
    assert list(read_results([tmp_path / "results"])[0]["densities"]) == ["200", "300"]


def test_what_ended_beside_one_that_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = _Children()

    def fails(module: str, requests: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        first = next(iter(requests))
        children(module, {first: requests[first]}, folder=more["folder"], going_on=lambda _done: True)
        raise OpenCDAError("the other one failed")

    monkeypatch.setattr(measure, "run_all", fails)
    with pytest.raises(OpenCDAError, match="the other one failed"):
        _measure(tmp_path, Wanted(only=("random",), densities=(200.0, 300.0), episodes=5))
    assert list(read_results([tmp_path / "results"])[0]["densities"]) == ["200"]


def test_a_wish_to_stop_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = _Children()
    monkeypatch.setattr(measure, "run_all", children)

    class Stop:
        def __enter__(self) -> Stop:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def requested(self) -> bool:
            return len(children.asked) >= 1

    monkeypatch.setattr(measure, "StopRequest", Stop)
    with pytest.raises(Interrupted, match="1 of 2 evaluations are done") as caught:
        _measure(tmp_path, Wanted(only=("random",), densities=(200.0, 300.0), episodes=5))
    assert caught.value.fix == "for the rest: type this"
    assert list(read_results([tmp_path / "results"])[0]["densities"]) == ["200"]


def test_generalisation_where_nothing_was_trained_and_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> dict[str, Any]:
        return generalisation.generalise(
            "bundled:mappo",
            name="generalisation-mappo",
            wanted=Wanted(episodes=3),
            results=tmp_path / "results",
            work=tmp_path / "runs" / "benchmark" / "evaluations",
            workers=1,
            command="type this",
            tell=lambda *_: None,
        )

    first, again = _Children(stop_after=2), _Children()
    monkeypatch.setattr(measure, "run_all", first)
    with pytest.raises(OpenCDAError, match="killed"):
        run()
    monkeypatch.setattr(measure, "run_all", again)
    found = run()
    assert 0 < len(again.asked) < len(found["cases"])
    assert next(iter(found["cases"])) == "as trained"
    assert found["cases"]["others' movements hidden"]["settings"] == ["neighbours.intent=none"]
    (kept,) = read_results([tmp_path / "results"])
    assert kept["cases"] == found["cases"]
    monkeypatch.setattr(measure, "run_all", nothing := _Children())
    assert run() == found
    assert nothing.asked == []


def test_cases_of_generalisation_change_what_they_say() -> None:
    profile = "sumo-marl/intersection/route_speed_only_mappo"
    settings = load_profile(profile).settings
    cases = generalisation.cases_of(settings)
    rates = [rate for rate, overrides in cases.values() if not overrides]
    assert rates == [300.0, 50.0, 700.0]  # 100 to 600 were seen
    overrides = [text for _, texts in cases.values() for text in texts]
    assert overrides == [
        *("demand.cav_share=0.25", "demand.cav_share=0.5", "demand.cav_share=0.75"),
        *("neighbours.radius=75", "neighbours.dropout=0.2", "neighbours.intent=none"),
    ]
    for text in overrides:
        load_profile(profile, overrides=[text])
