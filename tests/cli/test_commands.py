"""Each command hands its owner what was typed, and shows or prints what comes back. Owners are stood in for."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from said import Said

from opencda_marl.config import from_yaml, load_profile, to_yaml
from opencda_marl.core.errors import CheckpointError, Interrupted
from opencda_marl.core.events import Note
from opencda_marl.core.metrics import pool
from opencda_marl.core.stopping import StopRequest
from opencda_marl.settings.run import RunSettings

Typed = Callable[..., Said]
QUICKSTART = "sumo-marl/intersection/quickstart"


@dataclass(frozen=True)
class Result:
    run_dir: Path
    settings: RunSettings
    last: dict[str, Any]


@dataclass(frozen=True)
class Folder:
    """In place of a run folder that is being written."""

    path: Path
    said: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)

    def beat(self, phase: str, **_: Any) -> None:
        self.said.append(phase)

    def log(self, text: str) -> None:
        self.logged.append(text)


class Owner(ModuleType):
    """Stands in for a module: keeps what its functions are called with."""

    def __init__(self, name: str, **functions: Callable[..., Any]) -> None:
        super().__init__(name)
        self.calls: list[dict[str, Any]] = []
        for key, function in functions.items():
            setattr(self, key, self._kept(function))

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            self.calls.append({"": positional, **named})
            return function(*positional, **named)

        return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Owner]:
    def make(name: str, **functions: Callable[..., Any]) -> Owner:
        owner = Owner(f"opencda_marl.{name}", **functions)
        monkeypatch.setitem(sys.modules, owner.__name__, owner)
        package, _, leaf = owner.__name__.rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), leaf, owner, raising=False)
        return owner

    return make


@pytest.fixture
def trainer(stand_in: Callable[..., Owner], tmp_path: Path) -> Owner:
    def train(
        *,
        settings: RunSettings,
        listener: Callable[[Any], None],
        report: Callable[[Folder, StopRequest], None],
        **_: Any,
    ) -> Result:
        print("what a library prints")  # noqa: T201
        listener(Note("something to know"))
        if settings.evaluation.final:
            owner.folder = Folder(tmp_path / "runs/x")
            owner.folder.path.mkdir(parents=True)
            (owner.folder.path / "config.yaml").write_text(to_yaml(settings))
            report(owner.folder, owner.stop)
        return Result(tmp_path / "runs/x", replace(settings), {"episode": 3, "return": 1.5})

    stand_in("report", next_line=lambda run: f"Everything is in {run}.")
    owner = stand_in("train", train=train)
    owner.stop = StopRequest()
    return owner


# --- run


def test_run_hands_over_the_settings(typed: Typed, trainer: Owner, tmp_path: Path) -> None:
    said = typed(
        "run", "-t", QUICKSTART, "evaluation.final=false", "--seed", "7", "--out", str(tmp_path / "o"), "--gui"
    )
    assert said.code == 0, said.err
    call = trainer.calls[0]
    wanted = load_profile(QUICKSTART, overrides=["seed=7", "simulator.gui=true", "evaluation.final=false"]).settings
    assert call["settings"] == wanted
    assert (call["out"], call["resume"], call["init_from"]) == (tmp_path / "o", None, None)
    assert call["profile"] == QUICKSTART
    assert "something to know" in said.out
    assert "Everything is in" in said.out


def test_run_json_is_the_last_line_of_the_run(typed: Typed, trainer: Owner, tmp_path: Path) -> None:
    said = typed("run", "-t", QUICKSTART, "evaluation.final=false", "--json")
    assert said.answer == {"episode": 3, "return": 1.5, "run_dir": str(tmp_path / "runs/x")}
    assert "what a library prints" in said.err
    assert "something to know" in said.err


def test_run_resumes_with_budgets(typed: Typed, trainer: Owner, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(replace(RunSettings(), max_episodes=5)))
    assert typed("run", "--resume", str(run), "max_episodes=9").code == 0
    call = trainer.calls[0]
    assert call["resume"] == run
    assert call["settings"].max_episodes == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "what is to be trained?"),
        (["--resume", "R", "-t", "P"], "--resume goes on with a run as it is"),
        (["--resume", "R", "--seed", "1"], "--resume goes on with a run as it is"),
        (["--resume", "R", "--init-from", "C"], "--resume goes on with a run as it is"),
        (["-t", QUICKSTART, "max_minutes=null", "max_episodes=null"], "no budget"),
        (["-t", QUICKSTART, "evaluation.controllers=[nobody]"], "there is no controller named 'nobody'"),
        (["-t", QUICKSTART, "reward.weights.spped=1"], "there is no reward part named 'spped'"),
        (["-t", QUICKSTART, "--config-root", "nowhere"], "there is no config root"),
    ],
)
def test_run_refused(typed: Typed, trainer: Owner, arguments: list[str], words: str) -> None:
    said = typed("run", *arguments)
    assert said.code == 2
    assert words in said.err
    assert trainer.calls == []


def test_run_a_folder_that_is_no_run(typed: Typed, trainer: Owner, tmp_path: Path) -> None:
    assert typed("run", "--resume", str(tmp_path)).code == CheckpointError.exit_code


def test_run_says_which_blocks_are_ignored(typed: Typed, trainer: Owner, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("algorithm: pcmappo\nmax_episodes: 1\nmappo: {epochs: 2}\n")
    said = typed("run", "-t", "p", "--config-root", str(tmp_path))
    assert "p.yaml:3: the block 'mappo' is another algorithm's" in said.err
    assert "'mappo'" in typed("config", "show", "-t", "p", "--config-root", str(tmp_path)).out


@dataclass
class Report:
    rows: list[dict[str, Any]]
    table: Path
    plots: list[Path]
    next: str
    notes: list[str]
    verdict: list[str]
    kept: bool = False


def _report(run: Path, *, kept: bool = False) -> Report:
    return Report(
        [{"policy": "random", "success_rate": 0.43}],
        run / "t.md",
        [run / "learning.png"],
        "type this next",
        ["note: the disk is full"],
        ["does NOT beat full speed"],
        kept,
    )


def _reporter(stand_in: Callable[..., Owner], **functions: Callable[..., Any]) -> None:
    owner = stand_in("report", cell=lambda name, value: f"{value}", next_line=lambda run: "type this", **functions)
    owner.COLUMNS = {"policy": "policy", "success_rate": "success %"}


def test_a_table_that_is_there_is_shown_again(typed: Typed, trainer: Owner, stand_in: Callable[..., Owner]) -> None:
    _reporter(stand_in, kept_report=lambda run: _report(run, kept=True), final_report=lambda *_, **__: pytest.fail())
    said = typed("run", "-t", QUICKSTART)
    assert said.code == 0, said.err
    assert "0.43" in said.out
    assert "made before; nothing was trained since" in said.out
    assert "now the table" not in said.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 130)])
def test_ctrl_c_leaves_the_table_out_and_nothing_else_does(
    typed: Typed, trainer: Owner, stand_in: Callable[..., Owner], number: int, code: int
) -> None:
    """Whoever presses it has a finished run; whoever sends SIGTERM (a launcher) goes on later."""

    def final_report(_run: Path, *, progress: Any, stop: StopRequest) -> Report:
        with stop:
            os.kill(os.getpid(), number)
        assert stop.requested()
        raise Interrupted("the table is left out", fix="for the table: opencda-marl run --resume x")

    _reporter(stand_in, final_report=final_report, kept_report=lambda run: None)
    said = typed("run", "-t", QUICKSTART)
    assert said.code == code, said.err
    assert "for the table: " in (said.out if code == 0 else said.err)
    if code == 0:
        assert "the table is left out" in said.out
        assert "type this" in said.out
        assert "the table is left out" in trainer.folder.logged[1]


def test_the_table_at_the_end(typed: Typed, trainer: Owner, stand_in: Callable[..., Owner], tmp_path: Path) -> None:
    def final_report(run: Path, *, progress: Callable[[str, int, int], None], stop: StopRequest) -> Report:
        progress("held-out traffic", 0, 120)
        progress("held-out traffic", 40, 120)
        return _report(run)

    _reporter(stand_in, final_report=final_report, kept_report=lambda run: None)
    said = typed("run", "-t", QUICKSTART)
    assert said.code == 0, said.err
    announced, table = trainer.folder.logged
    assert announced.startswith("now the table: at most 174 episodes of held-out traffic, about ")
    assert announced.endswith("; Ctrl-C leaves it out")
    assert announced in said.out
    assert trainer.folder.said == ["evaluating", "evaluating"]
    assert table.startswith("Held-out traffic, the same for everybody\npolicy")
    assert "type this next" in table
    assert said.out.count("held-out traffic: 0 of 120 episodes") == 1
    assert not any(line.endswith(" ") for line in said.out.splitlines())
    for words in (
        "random",
        "0.43",
        "learning.png",
        "type this next",
        "note: the disk is full",
        "does NOT beat full speed",
    ):
        assert words in said.out


# --- evaluate


@pytest.fixture
def evaluator(stand_in: Callable[..., Owner]) -> Owner:
    figures = {name: 0.25 for name in pool([]) if name not in ("episodes", "vehicles")}

    def evaluate(policy: str, **named: Any) -> dict[str, Any]:
        named["progress"](1, 2)
        seeds = named["seeds"] or range(9000, 9010)
        facts = {"policy": policy, "profile": named["profile"], "checkpoint": None, "vehicles": 9, "episodes": 2}
        return {
            **facts,
            "rate_vph": [100.0, 400.0],
            "seeds": [seeds.start, seeds.stop],
            **figures,
            "near_miss_rate": None,
            "preference": "grid",
        }

    @dataclass
    class Found:
        folder: Path | None

    return stand_in("evaluate", evaluate=evaluate, find_policy=lambda name: Found(None))


def test_evaluate_hands_over_seeds_and_episodes(typed: Typed, evaluator: Owner) -> None:
    said = typed("evaluate", "random", "-t", QUICKSTART, "--seeds", "10:30", "--episodes", "4", "demand.rate_vph=300")
    assert said.code == 0, said.err
    call = evaluator.calls[0]
    assert call[""] == ("random",)
    assert (call["seeds"], call["episodes"], call["profile"]) == (range(10, 30), 4, QUICKSTART)
    assert call["settings"].demand.rate_vph == 300.0
    assert "25.0 %" in said.out
    assert "seeds 10:30" in said.out
    assert "100 to 400 vehicles/h a lane" in said.out
    assert "preference   grid" in said.out


def test_evaluate_json_has_the_names_that_programs_read(typed: Typed, evaluator: Owner) -> None:
    said = typed("evaluate", "random", "-t", QUICKSTART, "--json")
    assert {"policy", "profile", "episodes", "vehicles", "success_rate", "return", "near_miss_rate"} <= {*said.answer}
    assert evaluator.calls[0]["seeds"] is None


@pytest.mark.parametrize(
    "seeds", ["5", "5:", ":5", "5:5", "7:5", "a:b", "-1:5", "1:2:3", "1.5:3", "²:³", "٣:٤", f"0:{10**20}"]
)
def test_evaluate_refuses_odd_seeds(typed: Typed, evaluator: Owner, seeds: str) -> None:
    said = typed("evaluate", "random", "-t", QUICKSTART, f"--seeds={seeds}")
    assert said.code == 2
    assert f"--seeds {seeds} is not understood" in said.err


def test_evaluate_with_overrides_of_the_runs_own_settings(
    typed: Typed, stand_in: Callable[..., Owner], evaluator: Owner, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(replace(RunSettings(), seed=5)))

    @dataclass
    class Found:
        folder: Path | None

    evaluator.find_policy = lambda name: Found(tmp_path)
    assert typed("evaluate", str(tmp_path), "demand.rate_vph=250").code == 0
    settings = evaluator.calls[-1]["settings"]
    assert (settings.seed, settings.demand.rate_vph) == (5, 250.0)
    evaluator.find_policy = lambda name: Found(None)
    said = typed("evaluate", "random", "demand.rate_vph=250")
    assert said.code == 2
    assert "needs a profile" in said.err
    assert "is no policy" in typed("evaluate", "demand.rate_vph=250", "seed=1").err


# --- config, list, runs


def test_config_show_is_a_profile_with_places(typed: Typed) -> None:
    said = typed("config", "show", "-t", QUICKSTART, "seed=4")
    assert from_yaml(said.out) == load_profile(QUICKSTART, overrides=["seed=4"]).settings
    assert "seed: 4  # argument 'seed=4'" in said.out
    assert "quickstart.yaml:" in said.out
    shown = typed("config", "show", "-t", QUICKSTART, "--json").answer
    assert shown["settings"]["algorithm"] == "pcmappo"
    assert shown["settings"] == yaml.safe_load(to_yaml(load_profile(QUICKSTART).settings))


def test_config_show_of_a_run(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(replace(RunSettings(), seed=5)))
    assert "seed: 5\n" in typed("config", "show", "--run", str(tmp_path)).out
    for arguments in ([], ["-t", QUICKSTART, "--run", str(tmp_path)]):
        assert "which settings?" in typed("config", "show", *arguments).err


def test_config_export_and_its_use(typed: Typed, tmp_path: Path) -> None:
    root = tmp_path / "prof configs"
    said = typed("config", "export", str(root))
    assert said.code == 0
    assert "quickstart.yaml" in said.out
    assert typed("config", "export", str(root), "--json").answer["written"] == []
    shown = typed("config", "show", "-t", QUICKSTART, "--config-root", str(root)).out
    assert from_yaml(shown) == load_profile(QUICKSTART).settings


def test_a_setting_that_is_not_there(typed: Typed) -> None:
    said = typed("config", "reference", "demmand")
    assert said.code == 2
    assert "no setting has 'demmand' in its name; did you mean demand?" in said.err


def test_config_reference(typed: Typed) -> None:
    said = typed("config", "reference", "learning_rate")
    assert "learner.learning_rate_end" in said.out
    assert "seed" not in said.out
    rows = typed("config", "reference", "--json").answer
    assert {"key", "value", "default", "about", "algorithms"} == {*rows[0]}
    assert all(row["about"] for row in rows)
    said = typed("config", "reference", "masac").out  # an algorithm's own settings, the inherited ones with them
    for key in ("learner.alpha", "learner.buffer_size", "learner.hidden"):
        assert f"\n{key} " in said
    assert "learner.n_steps" not in said
    assert "\nmasac, pcmasac\n" in said  # whose the table below is
    assert "…" not in typed("config", "reference").out


def test_list(typed: Typed) -> None:
    found = typed("list", "--json").answer
    assert {*found} == {"profiles", "learners", "encoders", "controllers", "rewards", "observations", "policies"}
    names = {kind: {row["name"] for row in rows} for kind, rows in found.items()}
    assert {"mappo", "pcmappo"} <= names["learners"]
    assert {"lstm", "attention", "deepsets"} <= names["encoders"]
    assert {"random", "full_speed", "priority", "rule_based"} <= names["controllers"]
    assert {"delay", "collision", "near_miss"} <= names["rewards"]
    assert {"full", "ego9", "ego43"} <= names["observations"]
    assert QUICKSTART in names["profiles"]
    assert {*typed("list", "encoders", "--json").answer} == {"encoders"}
    text = typed("list").out
    assert all(name in text for kind in names.values() for name in kind)


@pytest.mark.parametrize(
    ("command", "wrong", "kinds"),
    [
        ("list", "there is no list of 'nonsense'", ["profiles", "learners", "encoders", "controllers", "policies"]),
        ("bench", "bench does not measure 'nonsense'", ["env", "act", "update", "run"]),
    ],
)
def test_a_kind_that_there_is_not_is_answered_with_those_there_are(
    typed: Typed, command: str, wrong: str, kinds: list[str]
) -> None:
    said = typed(command, "nonsense")
    assert said.code == 2
    assert said.err.startswith(f"error: {wrong}\n")
    assert "Value error" not in said.err
    assert f"{command} and one of: {kinds[0]}, {kinds[1]}" in said.err
    assert all(kind in said.err for kind in kinds)
    helped = typed(command, "--help").out
    assert all(kind in helped for kind in kinds)


def test_list_profiles_of_a_root(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("# About p\nseed: 1\n")
    answer = typed("list", "profiles", "--config-root", str(tmp_path), "--json").answer
    assert answer == {"profiles": [{"name": "p", "about": "About p"}]}


def test_bench_profile_and_drill_hand_over(typed: Typed, stand_in: Callable[..., Owner], tmp_path: Path) -> None:
    numbers = {
        "what": "env",
        "ms_median": 0.5,
        "ratio": 1.8,
        "threads": 1,
        "rows": [{"name": "bare", "ms_median": 0.3}],
    }
    bench = stand_in("tools.bench", bench=lambda *a, **k: numbers)
    bench.default_profile = lambda against: "page" if against else QUICKSTART
    said = typed("bench", "env", "--vehicles", "30", "--threads", "2", "seed=2", "--json")
    assert said.answer == numbers
    assert bench.calls[0] == {
        "": ("env",),
        "name": QUICKSTART,
        "config_root": None,
        "overrides": ["seed=2"],
        "vehicles": 30,
        "threads": 2,
        "against": [],
    }
    assert "0.3" in typed("bench", "env").out
    typed("bench", "update", "-t", QUICKSTART, "--against", "sb3, torchrl")
    assert bench.calls[-1]["against"] == ["sb3", "torchrl"]

    verified = {
        "exact": True,
        "differences": [],
        "compared": {"tensors": 3},
        "killed_in_episode": 3,
        "killed_after_s": 1.0,
        "runs": ["a", "b"],
    }
    drill = stand_in("tools.verify_resume", verify_resume=lambda *a, **k: verified)
    assert typed("verify-resume", "-t", QUICKSTART, "--out", str(tmp_path / "v")).code == 0
    assert drill.calls[0]["folder"] == tmp_path / "v"
    verified["exact"], verified["differences"] = False, ["weights differ"]
    said = typed("verify-resume", "-t", QUICKSTART, "--json")
    assert said.code == 1
    assert said.answer["differences"] == ["weights differ"]
    assert "weights differ" in typed("verify-resume", "-t", QUICKSTART).out

    side = {"ms_per_step": 1.0, "span_ms": {"tick": 0.5}, "spans": {"tick": 0.5}, "unaccounted_share": 0.5}
    profiled: dict[str, Any] = {
        **side,
        "identical_summary": True,
        "differences": [],
        "unprofiled": side,
        "functions": [{"function": "f", "calls": 1, "own_s": 0.1, "cumulative_s": 0.2}],
        "pstats": "x.pstats",
        "against": {"moved_together": True, "factor": 1.7, "changed": [{"function": "g", "factor": 3.0}]},
        "others": 0.4,
    }
    measure = stand_in("tools.profile", profile=lambda *a, **k: profiled)
    said = typed("profile", "-t", QUICKSTART, "--against", "old.pstats")
    assert said.code == 0, said.err
    assert measure.calls[0]["against"] == Path("old.pstats")
    for words in ("tick", "x.pstats", "another process's doing", "g x3"):
        assert words in said.out
    profiled["identical_summary"], profiled["differences"] = False, ["return"]
    assert typed("profile", "-t", QUICKSTART, "--json").code == 1


def test_doctor(typed: Typed, stand_in: Callable[..., Owner]) -> None:
    checks = [
        {"name": "sumo", "ok": True, "found": "1.28", "fix": None, "blocks": True, "outcome": "ok"},
        {
            "name": "compiler",
            "ok": False,
            "found": "none",
            "fix": "install g++ [now]",
            "blocks": False,
            "outcome": "FAIL",
        },
        {
            "name": "carla",
            "ok": None,
            "found": "not installed",
            "fix": "pip install x",
            "blocks": False,
            "outcome": "absent",
        },
    ]
    doctor = stand_in("tools.doctor", inspect=lambda: checks, exit_code=lambda found: 1, summary=lambda found: "sum")
    said = typed("doctor")
    assert said.code == 1
    assert "FAIL" in said.out
    assert "fix: install g++ [now]" in said.out
    answer = typed("doctor", "--json").answer
    assert answer == {"checks": checks, "ok": False}
    assert len(doctor.calls) == 5
    assert "sum" in said.out
