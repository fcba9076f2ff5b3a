"""Which cells there are: products, pairs, exclusions, ids; errors with file, line and cell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opencda_marl.cli_tables import name_tables
from opencda_marl.config import config_hash, export_root, load_profile
from opencda_marl.core.errors import ConfigError
from opencda_marl.launch.cells import Request, expand, family, fingerprint, read_request, seeds

MAPPO = "sumo-marl/intersection/route_speed_only_mappo"
MASAC = "sumo-marl/intersection/route_speed_only_masac"
TABLE = "sumo-marl/intersection/route_speed_only_qlearning"


def _file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rates.yaml"
    file.write_text(text)
    return file


def test_the_product_of_a_file(tmp_path: Path) -> None:
    request = read_request(
        _file(
            tmp_path,
            f"""
            profile: [{MAPPO}, {MASAC}]
            set: {{max_steps: 200}}
            axes:
              seed: "0:3"
              demand.rate_vph: [200, [100, 300]]
            pairs:
              - {{learner.learning_rate: 1e-3, decision_interval: 10}}
              - {{learner.learning_rate: 3e-4, decision_interval: 20}}
            exclude:
              - {{seed: [0, 1], demand.rate_vph: 200, decision_interval: 20}}
            budgets: {{max_episodes: 7}}
            retries: {{simulator: 9}}
            deadlines: {{training: 60.5}}
            """,
        )
    )
    assert (request.name, request.retries, request.deadlines) == ("rates", {"simulator": 9}, {"training": 60.5})
    made = expand(request, tables=name_tables())
    assert len(made) == 2 * 2 * 3 * 2 - 2 * 2
    assert len({cell.id for cell, _ in made}) == len(made)
    for cell, settings in made:
        assert cell.id == config_hash(settings)[:12]
        assert (settings.max_steps, settings.max_episodes) == (200, 7)
        assert cell.budgets == {"max_episodes": 7, "max_env_steps": None, "max_minutes": None}
        fast = settings.decision_interval == 10
        assert settings.learner.learning_rate == (1e-3 if fast else 3e-4)  # type: ignore[attr-defined]
        assert fast or settings.demand.rate_vph != 200 or settings.seed == 2
    # seeds of one kind stand together
    assert [cell.seed for cell, _ in made[:6]] == [0, 1, 2, 0, 1, 2]
    assert made[0][0].name == "route_speed_only_mappo learning_rate=0.001 decision_interval=10 rate_vph=200 s0"


def test_an_id_leaves_out_budgets_and_display_and_nothing_else() -> None:
    def only(*fixed: str) -> str:
        return expand(Request("m", (MAPPO,), fixed=fixed))[0][0].id

    assert only("max_episodes=3") == only("max_episodes=4", "evaluation.final=false")
    assert only("max_episodes=3") != only("max_episodes=3", "seed=2")
    assert only("max_episodes=3") != only("max_episodes=3", "learner.epochs=5")
    assert only() == config_hash(load_profile(MAPPO).settings)[:12]


def test_cells_that_compute_the_same_are_one() -> None:
    same = Request("m", (MAPPO,), fixed=("seed=1",), axes={"learner.epochs": [4, 4]})
    assert len(expand(same)) == 1


def test_graph_updates_only_for_algorithms_with_networks() -> None:
    request = Request("m", (MAPPO, MASAC, TABLE), fixed=("seed=1",))
    plain, graph = expand(request), expand(request, graph=True)
    assert [getattr(settings.learner, "cuda_graph_update", None) for _, settings in graph] == [True, True, None]
    assert [a[0].id == b[0].id for a, b in zip(plain, graph, strict=True)] == [False, False, True]
    alias = Request("m", (MASAC,), fixed=("masac.batch_size=32",))
    assert expand(alias, graph=True)[0][1].learner.cuda_graph_update is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("profile: x\naxis: {}\n", r"rates.yaml:2: there is no 'axis' in a matrix file"),
        ("name: m\n", r"which profile\?"),
        ("profile: [1]\n", r"rates.yaml:1: profiles are names"),
        ("profile: x\naxes: [1]\n", r"rates.yaml:2: 'axes' is a block"),
        ("profile: x\naxes:\n  learner: {epochs: 3}\n", r"rates.yaml:3: 'learner' is a block"),
        ("profile: x\naxes: {seed: '5:1'}\n", r"rates.yaml:2: seed '5:1' is not understood"),
        ("profile: x\naxes: {learner.epochs: []}\n", r"rates.yaml:2: 'learner.epochs' needs a list"),
        ("profile: x\nbudgets: {max_steps: 3}\n", r"rates.yaml:2: 'max_steps' is no budget"),
        ("profile: x\nretries: {simulater: 3}\n", r"rates.yaml:2: there is no 'simulater' in retries"),
        ("profile: x\nretries: {simulator: yes}\n", r"rates.yaml:2: simulator is 'yes'"),
        ("profile: x\npairs: {seed: 1}\n", r"rates.yaml:2: 'pairs' is a list of blocks"),
        ("name: [1]\nprofile: x\n", r"rates.yaml:1: name is \[1\]"),
    ],
)
def test_errors_of_a_file_name_file_and_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_request(_file(tmp_path, text))


def test_every_cell_is_validated_and_the_wrong_ones_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cell route_speed_only_mappo epochs=0: .*learner.epochs is 0"):
        expand(Request("m", (MAPPO,), fixed=("seed=1",), axes={"learner.epochs": [0]}))
    with pytest.raises(
        ConfigError, match=r"2 of 4 cells are not valid:\n  cell route_speed_only_mappo encoder=nope s0"
    ):
        expand(Request("m", (MAPPO,), axes={"context.encoder": ["lstm", "nope"], "seed": [0, 1]}), tables=name_tables())
    with pytest.raises(ConfigError, match=r"has no budget"):
        expand(Request("m", (MAPPO,), fixed=("max_episodes=null", "seed=1")))


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (Request("m", (MAPPO,), fixed=("seed=1",), axes={"seed": [1, 2]}), "seed varies as an axis, and is given"),
        (Request("m", (MAPPO,), axes={"max_episodes": [1, 2]}), "or is a budget"),
        (Request("m", (MAPPO,), exclude=[{"seed": 1}]), "exclude: 'seed' does not vary"),
        (Request("m", (MAPPO,), axes={"seed": [1]}, exclude=[{"seed": 1}]), "has no cells"),
        (Request("m", (MAPPO,), axes={"seed": [*range(1000)], "learner.epochs": [*range(1, 200)]}), "too many"),
    ],
)
def test_what_contradicts_itself(request_: Request, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        expand(request_)


def test_seeds() -> None:
    assert seeds("2:5") == [2, 3, 4]
    assert seeds("3") == [3]
    assert seeds("1, 7,7") == [1, 7]
    for wrong in ("", "5:5", "a", "1:", "-1", "0:9999999", "1,,2"):
        with pytest.raises(ConfigError):
            seeds(wrong)


def test_families() -> None:
    assert family("momarl/intersection/masac") == "carla"
    assert family(MASAC) == "sumo"
    assert [cell.family for cell, _ in expand(Request("m", ("momarl/intersection/masac", MASAC)))] == ["carla", "sumo"]


def test_a_fingerprint_changes_with_the_request_and_the_profiles(tmp_path: Path) -> None:
    export_root(tmp_path)
    one = Request("m", (MAPPO,), config_root=str(tmp_path))
    first = fingerprint(one, graph=False)
    assert first is not None
    assert first == fingerprint(one, graph=False)
    assert first != fingerprint(one, graph=True)
    assert first != fingerprint(Request("m", (MASAC,), config_root=str(tmp_path)), graph=False)
    file = tmp_path / f"{MAPPO}.yaml"
    os.utime(file, (1, 1))
    assert first != fingerprint(one, graph=False)
    assert fingerprint(Request("m", (MAPPO,), fixed=("scenario.network=x.net.xml",)), graph=False) is None
