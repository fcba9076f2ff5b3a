"""What the benches are made of: populations, synthetic rows, tables; one short real measurement of each kind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opencda_marl.config import load_profile
from opencda_marl.core.errors import ConfigError, OpenCDAError
from opencda_marl.learners import LEARNERS
from opencda_marl.settings.qlearning import QlearningSettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.tools.bench import DEFAULT_PROFILE, bench, default_profile
from opencda_marl.tools.bench_act import bench_act
from opencda_marl.tools.bench_run import notes, present
from opencda_marl.tools.bench_sac import _answer
from opencda_marl.tools.child_runs import ChildRun
from opencda_marl.tools.measure import Block
from opencda_marl.tools.synthetic import Scene, specs


def test_vehicles_present_by_hand() -> None:
    # two vehicles for 100 steps, a decision at every step
    assert present([{"steps": 100, "decisions": 200, "departed": 2}], 1) == 2.0
    # every 10 steps: a vehicle from step 5 to 95 decides at 5, 10, …, 90: 10 times, 90 steps
    assert present([{"steps": 100, "decisions": 10, "departed": 1}], 10) == pytest.approx(0.91)
    assert present([{"steps": 100, "decisions": 0, "departed": 0}], 10) == 0.0


def test_a_population_that_was_not_reached_is_said() -> None:
    assert notes(25, 24.0) == notes(None, 3.0) == []
    (note,) = notes(100, 61.5)
    assert note.startswith("100 vehicles were asked for; ")
    assert note.endswith(" 61.5")


def test_acting_of_a_table_has_no_plain_module() -> None:
    settings = RunSettings(algorithm="qlearning", action="levels", learner=QlearningSettings())
    with pytest.raises(ConfigError, match="qlearning has no networks"):
        bench_act(settings, vehicles=5, threads=1)


@pytest.mark.parametrize("algorithm", ["mappo", "pcmappo", "masac", "pcmasac", "matd3", "pcmatd3", "dqn"])
def test_every_learner_with_networks_can_be_measured(algorithm: str) -> None:
    settings = load_profile(f"sumo-marl/intersection/route_speed_only_{algorithm}").settings
    spec, action = specs(settings)
    learner = LEARNERS.load(algorithm)(settings, spec, action)
    scene = Scene(spec, 5)
    step = scene.step(10, 0.05)
    for _ in range(3):
        observation = step.observation
        chosen = learner.act(observation, explore=True)
        step = scene.step(10, 0.05)
        learner.store(observation, chosen, step)
    assert learner.counters.acting_steps == 3
    assert action.kind == ("levels" if algorithm == "dqn" else "target_speed")


def test_synthetic_rows_keep_the_rules_of_an_observation() -> None:
    spec, action = specs(RunSettings())
    scene = Scene(spec, 25)
    observation = scene.observation()
    assert action.size == 1
    assert observation.ego.shape == (25, len(spec.ego))
    assert observation.neighbours.shape == (25, spec.max_neighbours, len(spec.neighbour))
    assert observation.scene.shape == (spec.scene_size,)
    assert observation.counts.min() >= 10 and observation.counts.max() <= 13
    assert not observation.neighbours[~observation.mask].any()
    assert all(a.dtype == np.float32 for a in (observation.ego, observation.neighbours, observation.scene))
    step = scene.step(10, 0.05)
    assert step.everyone
    assert not step.done
    assert np.array_equal(step.closed.ids, observation.ids)
    assert step.closed.elapsed == pytest.approx(0.5)
    assert len(step.final) == 0


def test_an_unknown_bench_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no bench 'speed'"):
        bench("speed")


@pytest.mark.parametrize(
    ("what", "name", "against", "said"),
    [
        ("env", DEFAULT_PROFILE, "straightforward", "for updates"),
        ("update", DEFAULT_PROFILE, "sb3", "straightforward only"),
        ("update", default_profile(["sb3"]), "rllib", "no such update"),
    ],
)
def test_what_cannot_be_measured_against_is_refused_before_anything_starts(
    what: str, name: str, against: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        bench(what, name=name, against=[against])


def test_the_headline_is_the_peer_that_comes_nearest_to_the_profiles_form() -> None:
    settings = load_profile(default_profile(["sb3"])).settings  # compiled
    blocks = {
        "eager": [Block(2.0, 100)],  # 20 ms
        "compiled": [Block(1.0, 100)],
        "sb3": [Block(1.8, 100)],
        "torchrl": [Block(3.0, 100)],
    }
    answer = _answer(settings, blocks, ("sb3", "torchrl"))
    assert (answer["form"], answer["ms_median"], answer["floor_ms_median"]) == ("compiled", 10.0, 18.0)
    assert answer["speedup"] == pytest.approx(1.8, abs=1e-3)
    assert [row["name"] for row in answer["rows"]] == [
        "eager / sb3",
        "eager / torchrl",
        "compiled / sb3",
        "compiled / torchrl",
    ]
    assert answer["rows"][0]["speedup"] == pytest.approx(0.9, abs=1e-3)


def test_a_child_run_that_fails_says_why(tmp_path: Path) -> None:
    run = ChildRun("sumo-marl/intersection/quickstrat", tmp_path, "a")
    with pytest.raises(OpenCDAError, match="ended with code 2") as caught:
        run.finish(run.start(), deadline=60.0)
    assert "quickstart" in str(caught.value)


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    sys.modules.pop("run_all", None)
    import run_all

    return run_all


def test_a_table_of_the_page_by_hand(run_all: Any) -> None:
    row = {"name": "it", "ms_median": 0.2, "floor_ms_median": 0.1, "ratio": 2.0, "speedup": 0.5}
    results = [{"command": "opencda-marl bench env", "rows": [{**row, "vehicles": 25.1, "mean_rows": 9.96}]}]
    assert run_all.markdown("env", results).splitlines() == [
        "| command | what | ms | floor ms | ratio | speed-up | vehicles | mean rows |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `opencda-marl bench env` | it | 0.200 | 0.100 | 2.00 | 0.50 | 25.1 | 10.0 |",
    ]


def test_the_command_that_stands_beside_a_figure(run_all: Any) -> None:
    command = run_all._command("run", "sumo-marl/intersection/page_layout_pcmappo", 2, 25, ["context.encoder=deepsets"])
    assert command == (
        "opencda-marl bench run -t sumo-marl/intersection/page_layout_pcmappo --threads 2 --vehicles 25 "
        "context.encoder=deepsets"
    )


def test_what_is_measured_is_chosen(run_all: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def table(name: str) -> Callable[[], list[dict[str, Any]]]:
        return lambda: [{"command": name, "name": name, "s": 0.5}]

    monkeypatch.setattr(run_all, "TABLES", {"start": table("start"), "env": table("env")})
    said: list[str] = []
    monkeypatch.setattr(run_all.sys, "stdout", type("Out", (), {"write": said.append, "flush": lambda _: None})())
    run_all.main(["--only", "start", "--json", str(tmp_path / "a.json")])
    assert "| start | 0.50 |" in "".join(said)
    assert '"env"' not in (tmp_path / "a.json").read_text()


@pytest.mark.slow
def test_the_environment_is_measured_at_the_wanted_number_of_vehicles() -> None:
    found = bench("env", vehicles=15)
    assert {"what", "ms_median", "floor_ms_median", "ratio", "speedup", "vehicles", "mean_rows"} <= found.keys()
    assert {"threads", "load", "rows", "others", "profile"} <= found.keys()
    assert [row["name"] for row in found["rows"]] == ["env step, decision every 1", "env step, decision every 10"]
    assert found["vehicles"] == pytest.approx(15, rel=0.2)
    assert found["rows"][0]["floor_vehicles"] == pytest.approx(15, rel=0.2)
    assert found["ratio"] > 1.0  # it does all that the floor does, and more
    assert sum(found["span_ms"].values()) <= found["ms_median"] * 1.05


@pytest.mark.slow
def test_acting_is_measured_against_plain_modules() -> None:
    found = bench("act", vehicles=5, threads=1)
    assert [row["name"].partition(",")[0] for row in found["rows"][1:]] == ["deepsets 64", "attention 64", "lstm 256"]
    assert all(row["ms_median"] > 0 and row["floor_ms_median"] > 0 for row in found["rows"])
    assert 10 <= found["mean_rows"] <= 13


@pytest.mark.slow
def test_updates_are_measured_in_both_forms() -> None:
    found = bench("update", vehicles=25, threads=1, overrides=["learner.epochs=1"])
    assert [row["name"] for row in found["rows"]] == ["eager", "compiled"]
    assert found["ms_median"] == found["rows"][0]["ms_median"]
    assert found["update_rows"] == 10_000


@pytest.mark.slow
def test_masac_is_measured_against_everybody() -> None:
    peers = ["straightforward", "sb3", "torchrl"]
    found = bench("update", name=default_profile(peers), threads=1, against=peers)
    assert found["form"] == "compiled"
    assert found["ms"].keys() == {"eager", "compiled", *peers}
    assert found["speedup"] == min(row["speedup"] for row in found["rows"] if row["form"] == "compiled")
    assert found["speedup"] > 1.0


@pytest.mark.slow
def test_whole_runs_are_measured_beside_the_floor() -> None:
    overrides = ["max_steps=300", "learner.n_steps=250"]
    found = bench("run", vehicles=10, threads=1, overrides=overrides)
    assert found["ratio"] > 1.0
    assert found["vehicles"] == pytest.approx(10, rel=0.4)
    assert found["span_ms"]["update"] > 0
    assert 0 < found["start_s"] < 60
    assert found["memory_mib"] > 100
    assert len(found["rows"]) == 3
    assert found["asked_vehicles"] == 10
    assert found["epochs"] == 4


@pytest.mark.slow
def test_a_run_of_a_learner_with_a_replay_learns_from_early_on() -> None:
    overrides = ["max_steps=200", "demand.rate_vph=400", "demand.rate_draw=choice", "learner.updates_per_step=0.5"]
    found = bench("run", name="sumo-marl/intersection/route_speed_only_masac", threads=1, overrides=overrides)
    assert found["asked_vehicles"] is None
    assert found["updates_per_step"] == 0.5
    assert 0.2 < found["gradient_steps_per_step"] <= 0.5  # none before the replay has a batch
    assert "learner.batch_size=80" in found["overrides"]
    assert found["span_ms"]["update"] > 0
