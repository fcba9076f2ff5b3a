"""Profiles: parents, merging, aliases, overrides, names, paths; each mistake is one message with its place."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opencda_marl.config import (
    bundled_root,
    changes,
    config_hash,
    export_root,
    from_run_folder,
    from_yaml,
    list_profiles,
    load_profile,
    require_budget,
    to_yaml,
)
from opencda_marl.config_check import Setting, check, leaves
from opencda_marl.config_cross import cross_check
from opencda_marl.config_yaml import Keys
from opencda_marl.core.errors import CheckpointError, ConfigError, StorageError
from opencda_marl.core.tables import Table
from opencda_marl.settings.learning import ALGORITHMS, MappoSettings, PreferenceSettings
from opencda_marl.settings.networks import LearnerSettings, own_settings
from opencda_marl.settings.offpolicy import MasacSettings
from opencda_marl.settings.qlearning import QlearningSettings
from opencda_marl.settings.run import RunSettings
from opencda_marl.settings.traffic import DemandSettings, ScenarioSettings

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(name=text, …)` makes profiles under a config root and returns the root."""

    def make(**texts: str) -> Path:
        for name, text in texts.items():
            file = tmp_path / "root" / f"{name.replace('__', '/')}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "root"

    return make


def load(root: Path, name: str = "p", *overrides: str, **more: Any) -> RunSettings:
    return load_profile(name, config_root=root, overrides=overrides, **more).settings


def refused(root: Path, name: str = "p", *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(root, name, *overrides)
    assert caught.value.exit_code == 2
    return caught.value


# --- merging


def test_a_child_is_merged_deeply_over_its_parent(write: Write) -> None:
    root = write(
        base="seed: 3\ndemand:\n  rate_vph: [1, 2]\n  peak: {begin: 5, end: 9, factor: 2}\n"
        "reward: {weights: {delay: -0.3}}\n",
        p="extends: base\ndemand:\n  rate_vph: [7]\n  peak: {factor: 3}\n",
    )
    settings = load(root)
    assert settings.seed == 3
    assert settings.demand.rate_vph == [7.0]  # a list is replaced
    assert (settings.demand.peak.begin, settings.demand.peak.factor) == (5.0, 3.0)
    assert settings.reward.weights == {"delay": -0.3, "collision": -20.0, "near_miss": -0.6}  # over the defaults


def test_grandparents_and_profiles_in_folders(write: Write) -> None:
    root = write(a__x="seed: 1\nkeep: 7\n", a__y="extends: a/x\nseed: 2\n", b__z="extends: a/y\nthreads: 2\n")
    settings = load(root, "b/z")
    assert (settings.seed, settings.keep, settings.threads) == (2, 7, 2)
    assert load(root, "b/z.yaml") == settings


def test_sources_name_the_file_that_had_the_last_word(write: Write) -> None:
    root = write(base="seed: 3\nkeep: 1\n", p="# c\nextends: base\nkeep: 2\n")
    found = load_profile("p", config_root=root, overrides=["threads=2"])
    assert str(found.sources[("seed",)]) == f"{root}/base.yaml:1"
    assert str(found.sources[("keep",)]) == f"{root}/p.yaml:3"
    assert str(found.sources[("threads",)]) == "argument 'threads=2'"
    assert ("max_steps",) not in found.sources


@pytest.mark.parametrize(
    ("p", "q", "words"),
    [
        ("extends: p\n", "", "p.yaml:1: 'extends' runs in a circle: p -> p"),
        ("seed: 1\nextends: q\n", "extends: p\n", "q.yaml:1: 'extends' runs in a circle: p -> q -> p"),
        ("seed: 1\nextends: [q, r]\n", "", "p.yaml:2: 'extends' names one profile"),
        ("extends: 5\n", "", "p.yaml:1: 'extends' names one profile"),
        ("extends: qq\n", "seed: 1\n", "p.yaml:1: there is no profile 'qq'"),
        ("extends: ../../etc/passwd\n", "", "p.yaml:1: the profile '../../etc/passwd' is not under the config root"),
    ],
)
def test_extends_refused(write: Write, p: str, q: str, words: str) -> None:
    assert words in refused(write(p=p, q=q or "seed: 1\n")).message


def test_a_missing_parent_lists_near_ones(write: Write) -> None:
    assert refused(write(p="extends: basse\n", base="seed: 1\n")).fix == "did you mean base?"


# --- the learner's block


def test_the_algorithms_own_name_is_an_alias(write: Write) -> None:
    root = write(p="algorithm: pcmappo\npcmappo: {epochs: 7}\n", q="algorithm: pcmappo\nlearner: {epochs: 7}\n")
    assert load(root, "p") == load(root, "q")
    assert load(root, "q", "pcmappo.epochs=9").learner.epochs == 9
    assert load(root, "p", "learner.epochs=9").learner.epochs == 9


def test_alias_and_learner_in_parent_and_child_are_the_same_block(write: Write) -> None:
    root = write(
        base="algorithm: mappo\nlearner: {epochs: 2, n_steps: 50}\n",
        p="extends: base\nalgorithm: pcmappo\npcmappo: {epochs: 3}\n",
    )
    assert (load(root).learner.epochs, load(root).learner.n_steps) == (3, 50)


def test_both_at_once_is_an_error(write: Write) -> None:
    root = write(p="algorithm: pcmappo\nlearner: {epochs: 2}\npcmappo: {epochs: 3}\n")
    assert "p.yaml:3: 'pcmappo' and 'learner' are the same block" in refused(root).message
    root = write(p="algorithm: pcmappo\n")
    assert "same block" in refused(root, "p", "learner.epochs=1", "pcmappo.clip=0.1").message


def test_blocks_of_other_algorithms_are_checked_ignored_and_told(write: Write) -> None:
    root = write(base="mappo: {epochs: 3}\n", p="extends: base\nalgorithm: pcmappo\n")
    found = load_profile("p", config_root=root)
    assert found.settings.learner == MappoSettings()
    assert len(found.ignored) == 1
    assert "base.yaml:1: the block 'mappo'" in found.ignored[0]
    root = write(base="mappo:\n  epochs: 3\n  epoch: 4\n")
    assert "base.yaml:3: unknown key 'mappo.epoch'" in refused(root).message
    root = write(base="mappo:\n  epochs: 0\n")
    assert "base.yaml:2: mappo.epochs is 0" in refused(root).message


def test_an_argument_for_another_algorithm_would_do_nothing(write: Write) -> None:
    assert "this run's algorithm is mappo" in refused(write(p="algorithm: mappo\n"), "p", "pcmappo.epochs=2").message


def test_the_algorithm_can_be_overridden(write: Write) -> None:
    root = write(p="algorithm: mappo\nmappo: {epochs: 9}\npcmappo: {epochs: 8}\n")
    assert load(root).learner.epochs == 9
    assert load(root, "p", "algorithm=pcmappo").learner.epochs == 8


def test_unknown_algorithms_get_the_nearest_name(write: Write) -> None:
    error = refused(write(p="seed: 1\nalgorithm: pcmapo\n"))
    assert "p.yaml:2: there is no learner named 'pcmapo'" in error.message
    assert error.fix == "did you mean 'pcmappo'?"
    assert "algorithm is text" in refused(write(p="algorithm: 3\n")).message


def test_the_word_lambda_is_the_key(write: Write) -> None:
    assert load(write(p="preference: {lambda: 0.5}\n")).preference == PreferenceSettings(individual_weight=0.5)
    assert refused(write(p="preference: {individual_weight: 1}\n")).fix == "did you mean 'preference.lambda'?"


# --- what is wrong with a value

_WRONG = [
    ("seed: '5'", "seed is a whole number", "remove the quotes"),
    ("seed: 5.0", "seed is a whole number", None),
    ("seed: true", "seed is a whole number", None),
    ("seed: null", "seed is a whole number", None),
    ("seed: [1]", "seed is a whole number", None),
    ("seed: {a: 1}", "seed is a whole number, not a block of settings", None),
    ("seed: -1", "seed is -1; it must be between 0 and 4294967295", None),
    ("seed: 99999999999999999999", "seed is 99999999999999999999; it must be", None),
    ("simulator: {gui: yes}", 'simulator.gui is true or false, not "yes"', "write true"),
    ("simulator: {gui: off}", "simulator.gui is true or false", "write false"),
    ("simulator: {gui: 1}", "simulator.gui is true or false", None),
    ("simulator: {gui: 'true'}", "simulator.gui is true or false", None),
    ("simulator: {backend: libsum}", "simulator.backend is one of auto, libsumo, traci", "did you mean libsumo?"),
    ("simulator:", "simulator is an empty block", None),
    ("simulator: 3", "simulator is a block of settings, not 3", None),
    ("learner:", "learner is an empty block", None),
    ("learner: 3", "learner is a block of settings", None),
    ("max_minutes: 0", "max_minutes is 0; it must be above 0", None),
    ("max_minutes: .inf", "max_minutes is inf; it must be a finite number", None),
    ("discount_per_second: .nan", "discount_per_second is nan; it must be a finite number", None),
    ("discount_per_second: 1.5", "discount_per_second is 1.5; it must be between 0 and 1", None),
    ("demand: {rate_vph: [100, x]}", "demand.rate_vph is a number or a list of numbers", None),
    ("demand: {rate_vph: [100, -1]}", "demand.rate_vph[1] is -1; it must be between 0 and 3000", None),
    ("demand: {rate_vph: []}", "demand.rate_vph is an empty list", None),
    ("demand: {rate_draw: range, rate_vph: [100, 200, 300]}", "demand.rate_vph must be two rates", None),
    ("demand: {rate_draw: range, rate_vph: [4, 1]}", "demand.rate_vph must be two rates", None),
    ("demand: {rate_draw: spread, rate_vph: [4, 1]}", "demand.rate_draw is spread, so demand.rate_vph", None),
    ("demand: {turning_shares: [0.5, 0.6, 0.1]}", "with sum 1; these are 3 with sum 1.2", None),
    ("demand: {turning_shares: [0.5, 0.5]}", "these are 2 with sum 1", None),
    ("demand: {peak: {factor: 2}}", "has a factor (2) but no duration", None),
    ("preference: {fixed: [0.5, 0.5]}", "preference.fixed must be 3 numbers (safety, efficiency, comfort)", None),
    ("preference: {fixed: [0.5, 0.5, 0.5]}", "these are 3 with sum 1.5", None),
    ("preference: {concentration: [1, 2]}", "preference.concentration is one number, or 3", None),
    ("preference: {team_weight: 0, lambda: 0}", "nothing would be learned", None),
    ("learner: {acting_device: gpu}", "learner.acting_device is one of auto, train, cpu", None),
    ("learner: {acting_threads: many}", "learner.acting_threads is a whole number or auto", None),
    ("learner: {acting_threads: 0}", "learner.acting_threads is 0; it must be between 1 and 1024", None),
    ("learner: {hidden: [64, 0]}", "learner.hidden[1] is 0", None),
    ("learner: {epochs: 3.5}", "learner.epochs is a whole number", None),
    ("reward: {weights: {delay: fast}}", "reward.weights.delay is a number", None),
    ("reward: {weights: {delay: 1e300}}", "reward.weights.delay is 1.0e+300; it must be between", None),
    ("max_steps: 1000000000000", "max_steps is 1000000000000; it must be between 1 and 10000000", None),
    ("learner: {n_steps: 1000000000000}", "learner.n_steps is 1000000000000", None),
    ("learner: {minibatch_size: 1000000000000}", "learner.minibatch_size is 1000000000000", None),
    ("reward: {weights: [1]}", "reward.weights is a block of 'name: number' lines", None),
    ("device: gpu", 'device is "gpu"; that is no device', None),
    ("device: cuda:x", "that is no device", None),
    ("decision_interval: 50\nmax_steps: 10", "decision_interval (50) is longer than an episode", None),
    ("envelope: {levels: [1, 0]}", "ascending", None),
    ("envelope: {levels: [0.5]}", "at least two numbers", None),
    ("simulator: {step_length: 0.0333}", "not a whole number of milliseconds", None),
    ("simulator: {gui: true, backend: libsumo}", "simulator.gui needs TraCI", None),
    ("context: {encoder: attention, hidden: 30, heads: 4}", "cannot be shared by 4 heads", None),
    ("evaluation: {seeds: [5, 5]}", "evaluation.seeds must be [first, one past the last]", None),
    ("evaluation: {seeds: [5]}", "evaluation.seeds must be", None),
    ("evaluation: {seeds: [-1, 5]}", "evaluation.seeds must be", None),
    ("evaluation: {seeds: [0, 10], selection_seeds: [9, 12]}", "overlap", None),
    ("evaluation: {rates_vph: [0, 300]}", "evaluation.rates_vph", None),
    ("evaluation: {rates_vph: []}", "evaluation.rates_vph is empty", None),
    ("evaluation: {controllers: [random, random]}", "names one twice", None),
    ("scenario: {network: nowhere.net.xml}", "there is no file", None),
    ("scenario: {map: nowhere.xodr}", "there is no file", None),
    (f"scenario: {{map: {'x' * 5000}}}", "there is no file", None),
    ('scenario: {network: "a/b\\0"}', "null character", None),
]


@pytest.mark.parametrize(("text", "words", "fix"), _WRONG, ids=[text for text, _, _ in _WRONG])
def test_one_message_with_its_place(write: Write, text: str, words: str, fix: str | None) -> None:
    error = refused(write(p=f"# a comment\n{text}\n"))
    assert words in error.message
    assert f"{write()}/p.yaml:" in error.message
    assert error.fix
    if fix is not None:
        assert error.fix == fix


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("sed: 1", "sed", "did you mean 'seed'?"),
        ("max_step: 1", "max_step", "did you mean 'max_steps'?"),
        ("pcmapo: {epochs: 1}", "pcmapo", "did you mean 'pcmappo'?"),
        ("epochs: 1", "epochs", "did you mean 'learner.epochs'?"),
        ("learner: {learning_rat: 1}", "learner.learning_rat", "did you mean 'learner.learning_rate'?"),
        ("demand: {peak: {fctor: 1}}", "demand.peak.fctor", "did you mean 'demand.peak.factor'?"),
        ("learner.epochs: 3", "learner.epochs", "nest it: one level of indentation for each part of the name"),
        ("xyzzy: 3", "xyzzy", "known: algorithm, seed"),
    ],
)
def test_unknown_keys_get_the_nearest_name(write: Write, text: str, key: str, fix: str) -> None:
    error = refused(write(p=f"keep: 1\n{text}\n"))
    assert error.message == f"{write()}/p.yaml:2: unknown key {key!r}"
    assert error.fix is not None
    assert error.fix.startswith(fix)


def own_leaves(algorithm: str) -> Iterator[tuple[Keys, Setting]]:
    """The settings of a run of this algorithm; those that are no learner's only once."""
    for keys, setting in leaves(RunSettings, learner=ALGORITHMS[algorithm]):
        if keys[0] == "learner" or algorithm == RunSettings().algorithm:
            yield keys, setting


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_field_refuses_what_is_not_of_its_type(write: Write, algorithm: str) -> None:
    found = [keys for keys, _ in own_leaves(algorithm) if keys[0] != "algorithm"]
    assert len(found) == len({*found}) > 5
    for keys in found:
        text = "{nonsense: {deeper: [1]}}"
        for key in reversed(keys[1:]):
            text = f"{{{key}: {text}}}"
        assert ".".join(keys) in refused(write(p=f"algorithm: {algorithm}\n{keys[0]}: {text}\n")).message


_BOUNDS_CHECKED = {"mappo": 80, "pcmappo": 20, "qlearning": 10}  # of whom: at least so many; others have more than 20


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_bound_is_held(write: Write, algorithm: str) -> None:
    """Just outside each declared bound is refused, the bound itself (unless open) is not out of bounds."""
    checked = 0
    for keys, setting in own_leaves(algorithm):
        bounds, kind = setting.bounds, str(setting.hint)
        if bounds is None:
            continue
        whole = "int" in kind
        step = 1 if whole else 1e-6
        edges = [(bounds.low, -step), (bounds.high, step)]
        for edge, outwards in edges:
            if edge is None:
                continue
            value = edge + outwards if whole else edge + outwards * max(1.0, abs(edge))
            listed = kind.startswith("list") or ("list" in kind and kind.startswith("dict"))
            shown = f"[{value!r}]" if listed or setting.key == "turning_shares" else repr(value)
            name = ".".join([*keys, "delay"] if kind.startswith("dict") else keys)
            error = refused(write(p=f"algorithm: {algorithm}\nkeep: 1\n"), "p", f"{name}={shown}")
            assert "it must be" in error.message, keys
            checked += 1
    assert checked > _BOUNDS_CHECKED.get(algorithm, 20)


# --- settings that learners inherit


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_block_of_every_algorithm(write: Write, algorithm: str) -> None:
    action = "action: levels\n" if algorithm in ("dqn", "qlearning") else ""
    root = write(p=f"algorithm: {algorithm}\n{action}{algorithm}: {{learning_rate: 0.125}}\n")
    settings = load(root)
    assert type(settings.learner) is ALGORITHMS[algorithm]
    assert settings.learner == replace(ALGORITHMS[algorithm](), learning_rate=0.125)  # type: ignore[call-arg]
    assert (
        load(root, "p", "learner.learning_rate=0.25").learner
        == load(root, "p", f"{algorithm}.learning_rate=0.25").learner
    )
    check(settings)
    assert from_yaml(to_yaml(settings)) == settings
    assert config_hash(settings) != config_hash(load(root, "p", "learner.learning_rate=0.25"))
    assert changes(settings, load(root, "p", "learner.learning_rate=0.25")) == ["learner.learning_rate"]
    # the same block in another algorithm's profile is checked, and told to be ignored
    other = "mappo" if algorithm != "mappo" else "pcmappo"
    found = load_profile("p", config_root=write(p=f"algorithm: {other}\n{algorithm}: {{learning_rate: 0.1}}\n"))
    assert len(found.ignored) == 1
    assert (
        f"{algorithm}.learning_rate is 2.0"
        in refused(write(p=f"algorithm: {other}\n{algorithm}: {{learning_rate: 2.0}}\n")).message
    )


def test_an_inherited_setting_has_its_owners_default(write: Write) -> None:
    assert load(write(p="algorithm: mappo\n")).learner == MappoSettings()
    own = own_settings(load(write(p="algorithm: masac\n")).learner, MasacSettings)
    assert (own.hidden, own.ego_hidden, own.activation, own.update_mode) == ([256, 256], [], "relu", "eager")
    own = own_settings(load(write(p="algorithm: masac\nlearner: {alpha: 0.2, hidden: [8]}\n")).learner, MasacSettings)
    assert (own.alpha, own.hidden) == (0.2, [8])


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("algorithm: masac\nbuffer_size: 5000", "buffer_size", "did you mean 'learner.buffer_size'?"),
        ("algorithm: masac\nhidden: [5]", "hidden", "did you mean 'context.hidden' or 'learner.hidden'?"),
        ("algorithm: masac\nlearner: {bufer_size: 1}", "learner.bufer_size", "did you mean 'learner.buffer_size'?"),
        ("algorithm: masac\nlearner: {n_steps: 1}", "learner.n_steps", "only mappo, pcmappo have it: remove it"),
        ("algorithm: masac\nepochs: 1", "epochs", "only mappo, pcmappo have it: remove it"),
        ("algorithm: mappo\nlearner: {initial_alpha: 1}", "learner.initial_alpha", "only masac, pcmasac have it"),
        ("algorithm: qlearning\nlearner: {activation: relu}", "learner.activation", "only mappo, pcmappo"),
    ],
)
def test_a_key_of_another_algorithm_is_named_as_one(write: Write, text: str, key: str, fix: str) -> None:
    error = refused(write(p=f"{text}\n"))
    assert f"p.yaml:2: unknown key {key!r}" in error.message
    assert error.fix is not None
    assert error.fix.startswith(fix)


def test_a_block_of_lists(write: Write) -> None:
    root = write(p="algorithm: qlearning\naction: levels\nlearner: {ego: {speed: [0.5]}, nearest: {gap: []}}\n")
    settings = load(root)
    own = own_settings(settings.learner, QlearningSettings)
    assert own.ego == {**QlearningSettings().ego, "speed": [0.5]}  # over the defaults
    assert own.nearest == {"gap": []}
    fewer = replace(settings, learner=replace(own, ego={"speed": [0.5]}))
    assert from_yaml(to_yaml(fewer)) == fewer  # what was dropped stays dropped
    error = refused(root, "p", "learner.ego.speed=fast")
    assert "learner.ego.speed is a list of numbers" in error.message
    assert "learner.ego is a block of 'name: list of numbers' lines" in refused(root, "p", "learner.ego=3").message
    assert "learner.ego.speed[1] is 2000" in refused(root, "p", "learner.ego.speed=[0, 2000]").message


@pytest.mark.parametrize("algorithm", ["masac", "pcmasac", "matd3", "pcmatd3"])
def test_a_continuous_algorithm_refuses_levels(algorithm: str) -> None:
    settings = RunSettings(algorithm=algorithm, action="levels", learner=MasacSettings())
    (problem,) = cross_check(settings, files=True)
    assert problem.keys == ("action",)
    assert problem.message == f"{algorithm} needs a continuous action, but action is levels"
    assert "target_speed or acceleration" in problem.fix
    for action in ("target_speed", "acceleration"):
        assert cross_check(replace(settings, action=action), files=True) == []


@pytest.mark.parametrize(("algorithm", "kind"), [("masac", MasacSettings), ("mappo", MappoSettings)])
def test_an_exponential_schedule_cannot_end_at_zero(algorithm: str, kind: Callable[..., LearnerSettings]) -> None:
    own = {"learning_rate_schedule": "exponential", "learning_rate_end": 0.0}
    (problem,) = cross_check(RunSettings(algorithm=algorithm, learner=kind(**own)), files=True)
    assert problem.keys == ("learner", "learning_rate_end")
    for change in ({"learning_rate_schedule": "linear"}, {"learning_rate_end": 1e-5}):
        assert cross_check(RunSettings(algorithm=algorithm, learner=kind(**own | change)), files=True) == []


def test_preferences_are_drawn_anew_only_where_there_are_some() -> None:
    settings = RunSettings(algorithm="masac", learner=MasacSettings(relabel=0.5))
    (problem,) = cross_check(settings, files=True)
    assert problem.keys == ("learner", "relabel")
    assert problem.message == "learner.relabel is 0.5, but masac has no preferences to draw anew"
    assert "pcmasac" in problem.fix
    assert cross_check(replace(settings, algorithm="pcmasac"), files=True) == []


@pytest.mark.parametrize("algorithm", ["dqn", "qlearning"])
def test_an_algorithm_among_levels_refuses_others(algorithm: str) -> None:
    settings = RunSettings(algorithm=algorithm, action="acceleration", learner=LearnerSettings())
    (problem,) = cross_check(settings, files=True)
    assert problem.message == f"{algorithm} chooses among levels, but action is acceleration"
    assert problem.fix.startswith("set action to levels")
    assert cross_check(replace(settings, action="levels"), files=True) == []


def test_actions_of_a_profile_are_held_against_its_algorithm(write: Write) -> None:
    root = write(p="algorithm: masac\naction: levels\n")
    assert "p.yaml:2: masac needs a continuous action" in refused(root).message
    root = write(p="keep: 3\nalgorithm: qlearning\n")
    assert "qlearning chooses among levels, but action is target_speed" in refused(root).message
    for algorithm in ("mappo", "pcmappo"):
        assert load(write(p=f"algorithm: {algorithm}\naction: levels\n")).action == "levels"


@pytest.mark.parametrize("algorithm", ["mappo", "masac"])
def test_two_wishes_for_the_form_of_an_update(write: Write, algorithm: str) -> None:
    root = write(p=f"algorithm: {algorithm}\n{algorithm}: {{cuda_graph_update: true}}\n")
    for mode in ("eager", "cuda_graph", "auto"):  # whether there is CUDA is asked when the run starts
        load(root, "p", f"learner.update_mode={mode}")
    error = refused(root, "p", "learner.update_mode=compiled")
    assert "p.yaml:2: learner.update_mode is compiled, but learner.cuda_graph_update" in error.message
    load(root, "p", "learner.update_mode=compiled", "learner.cuda_graph_update=false")


def test_a_batch_comes_out_of_the_buffer(write: Write) -> None:
    root = write(p="algorithm: masac\nlearner:\n  buffer_size: 1000\n")
    load(root, "p", "learner.batch_size=1000")
    error = refused(root, "p", "learner.batch_size=1001")
    assert "argument 'learner.batch_size=1001': learner.batch_size (1001) is larger" in error.message


# --- several mistakes


def test_several_mistakes_are_told_at_once_in_the_order_of_lines(write: Write) -> None:
    root = write(base="kep: 1\n", p="extends: base\nthreads: 0\nsed: 1\nseed: x\n")
    message = refused(root).message
    assert message.startswith("4 settings are wrong")
    places = [message.index(place) for place in ("base.yaml:1", "p.yaml:2", "p.yaml:3", "p.yaml:4")]
    assert places == sorted(places)


def test_unknown_keys_types_bounds_and_names_are_told_in_one_go(write: Write) -> None:
    """The active block before those of other algorithms, arguments before files."""
    root = write(
        p="algorithm: pcmappo\nmappo: {epoch: 1, clip: 7}\nseed: x\nthreads: 0\n"
        "learner: {epochs: 0, clip: x, hidn: [1]}\nobservation: ego\n"
    )
    tables = {"context.encoder": Table("encoder", "none", {"deepsets": "a:b"}, {})}
    with pytest.raises(ConfigError) as caught:
        load(root, "p", "context.encoder=nope", "foo", tables=tables)
    message = caught.value.message
    assert message.startswith("10 settings are wrong")
    places = [
        "argument 'foo' is not understood",
        "argument 'context.encoder=nope': context.encoder: there is no encoder named 'nope'",
        "p.yaml:3: seed is a whole number",
        "p.yaml:4: threads is 0",
        "learner.epochs is 0",
        "p.yaml:6: observation is one of",
        "unknown key 'mappo.epoch'",
        "mappo.clip is 7",
    ]
    found = [message.index(place) for place in places]
    assert found == sorted(found)
    for words in ("p.yaml:5: learner.clip is a number", "p.yaml:5: unknown key 'learner.hidn'"):
        assert found[3] < message.index(words) < found[5]


def test_an_unknown_algorithm_leaves_only_its_block_unchecked(write: Write) -> None:
    root = write(p="algorithm: pcmapo\nlearner: {epochs: 0}\nmappo: {clip: 7}\nsed: 1\nthreads: x\n")
    message = refused(root, "p", "pcmappo.epochs=0").message
    assert message.startswith("5 settings are wrong")
    for words in ("named 'pcmapo'", "'sed'", "threads is", "mappo.clip is 7", "pcmappo.epochs is 0"):
        assert words in message
    assert "learner.epochs" not in message
    assert refused(write(p="algorithm: [1]\n")).message.endswith("p.yaml:1: algorithm is text, not [1]")


def test_a_block_given_twice_is_told_with_what_is_wrong_in_it(write: Write) -> None:
    root = write(p="algorithm: pcmappo\nlearner: {epochs: 0}\npcmappo: {clip: 7}\n")
    message = refused(root).message
    assert message.startswith("3 settings are wrong")
    for words in ("p.yaml:3: 'pcmappo' and 'learner'", "p.yaml:2: learner.epochs is 0", "p.yaml:3: learner.clip is 7"):
        assert words in message


def test_very_many_mistakes_are_counted(write: Write) -> None:
    message = refused(write(p="".join(f"x{i}: 1\n" for i in range(40)))).message
    assert message.startswith("40 settings are wrong")
    assert message.endswith("and 10 more")


# --- overrides


def test_all_bad_arguments_are_told_together(write: Write) -> None:
    arguments = ("learner.epoch=3", "seed=x", "max_episodes=", "foo", "bar.baz=1", "pcmappo.clip=2")
    message = refused(write(p="seed: 1\n"), "p", *arguments).message
    assert message.startswith("6 settings are wrong")
    for argument in arguments:
        assert f"argument {argument!r}" in message


def test_overrides_have_the_last_word(write: Write) -> None:
    root = write(p="seed: 1\ndemand: {rate_vph: 100}\n")
    settings = load(root, "p", "seed=2", "demand.rate_vph=[1, 2]", "reward.weights.comfort=-0.1", "seed=3")
    assert (settings.seed, settings.demand.rate_vph, settings.reward.weights["comfort"]) == (3, [1.0, 2.0], -0.1)
    assert settings.reward.weights["collision"] == -20.0
    assert load(root, "p", "max_minutes=null").max_minutes is None


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("seed", "argument 'seed' is not understood"),
        ("=3", "argument '=3' is not understood"),
        ("a..b=3", "is not understood"),
        ("seed=", "argument 'seed=' has no value"),
        ("seed=abc", "argument 'seed=abc': seed is a whole number"),
        ("seed=yes", "argument 'seed=yes': seed is a whole number"),
        ("sed=1", "argument 'sed=1': unknown key 'sed'"),
        ("seed.x=1", "argument 'seed.x=1': seed is a whole number, not a block"),
        ("demand={a: 1}", "a value is a scalar or a list"),
        ("demand=3", "argument 'demand=3': demand is a block"),
        ("learner.epochs=0", "argument 'learner.epochs=0': learner.epochs is 0"),
        ("seed=[1", "argument 'seed=[1': not valid YAML"),
        ("seed=${X}", "argument 'seed=${X}'"),
        ("reward.weights.delay=1e400", "argument 'reward.weights.delay=1e400': reward.weights.delay is"),
        (f"max_episodes={10**20}", "it must be at most 9007199254740992"),
        (f"keep={2**53 + 1}", "keep is 9007199254740993; it must be at most 9007199254740992"),
        ("extends=q", "'extends' stands in files only"),
        ("algorithm=nope", "argument 'algorithm=nope': there is no learner"),
    ],
)
def test_an_argument_is_named_in_its_error(write: Write, argument: str, words: str) -> None:
    assert words in refused(write(p="seed: 1\nreward: {weights: {delay: 0}}\n"), "p", argument).message


# --- names, tables, budgets, paths


def test_missing_profiles_list_near_ones(write: Write, tmp_path: Path) -> None:
    root = write(sumo__crossing__quick="seed: 1\n", sumo__crossing___base="seed: 1\n", other="seed: 1\n")
    assert refused(root, "sumo/crossing/quik").fix == "did you mean sumo/crossing/quick?"
    assert "sumo/crossing/quick" in (refused(root, "quick").fix or "")
    assert "sumo/crossing/quick" in (refused(root, "sumo/crossing").fix or "")
    assert refused(root, "zzz").fix == "known: other, sumo/crossing/quick"
    assert refused(root, "sumo/crossing/zzz").fix == "known: other, sumo/crossing/quick"  # folders do not count
    assert [name for name, _ in list_profiles(root)] == ["other", "sumo/crossing/quick"]
    for name in ("", "/", "..", "x" * 5000, "sumo/", "~", "*"):
        refused(root, name)
    (root / "adir.yaml").mkdir()
    assert "adir" not in (refused(root, "adir").fix or "")
    (root / "loop.yaml").symlink_to("loop.yaml")
    refused(root, "loop")
    with pytest.raises(ConfigError, match="there is no config root"):
        load_profile("p", config_root=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mappo", ["momarl/intersection/mappo", "momarl-cosim/intersection/mappo"]),
        ("momarl-cosim/intersection/mapo", ["momarl-cosim/intersection/mappo", "momarl/intersection/mappo"]),
        ("sumo-marl/intersection/mapo", ["sumo-marl/intersection/route_speed_only_mappo"]),
        ("quikstart", ["sumo-marl/intersection/quickstart"]),
        ("sumo-marl/intersection/xyzzy", []),
        ("momarl/intersection/quick", ["sumo-marl/intersection/quickstart"]),
        ("fast", []),
    ],
)
def test_what_is_proposed_is_close_to_what_was_typed(name: str, near: list[str], tmp_path: Path) -> None:
    """Among the bundled profiles, whose folders are alike and whose last names are not."""
    with pytest.raises(ConfigError) as caught:
        load_profile(name)
    fix = caught.value.fix or ""
    if near:
        found = fix.removeprefix("did you mean ").removesuffix("?").split(" or ")
        assert found[: len(near)] == near
        assert len(found) <= 4
    else:
        assert fix == "see what there is: opencda-marl list profiles"
    root = tmp_path / "my root"
    export_root(root)
    with pytest.raises(ConfigError) as caught:
        load_profile("sumo-marl/intersection/xyzzy", config_root=root)
    assert caught.value.fix == f"see what there is: opencda-marl list profiles --config-root '{root}'"


def test_a_file_instead_of_a_name_is_explained(write: Write, tmp_path: Path) -> None:
    root = write(a__p="seed: 1\n")
    found = load_profile(str(root / "a/p.yaml"), config_root=root)  # under the root it is plain which one is meant
    assert found.name == "a/p"
    (tmp_path / "q.yaml").write_text("seed: 1\n")
    assert refused(root, str(tmp_path / "q.yaml")).fix == f"--config-root {tmp_path} -t q"


def test_names_are_held_against_tables(write: Write) -> None:
    tables = {
        "context.encoder": Table("encoder", "none", {"deepsets": "a:b"}, {}),
        "evaluation.controllers": Table("controller", "none", {"random": "a:b"}, {}),
        "reward.weights": Table("reward", "none", {"delay": "a:b", "collision": "a:b", "near_miss": "a:b"}, {}),
    }
    good = "evaluation: {controllers: [random]}\n"
    load(write(p=good), tables=tables)
    for text, words in (
        ("context: {encoder: deepset}\n", "p.yaml:2: context.encoder: there is no encoder named 'deepset'"),
        ("reward: {weights: {dely: 1}}\n", "p.yaml:2: reward.weights: there is no reward named 'dely'"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(write(p=good + text), tables=tables)
        assert words in caught.value.message
        assert (caught.value.fix or "").startswith("did you mean")
    with pytest.raises(ConfigError, match=r"p.yaml:1: evaluation.controllers: there is no controller named 'rndom'"):
        load(write(p="evaluation: {controllers: [random, rndom]}\n"), tables=tables)


def test_a_run_needs_a_budget(write: Write) -> None:
    root = write(p="seed: 1\n")
    with pytest.raises(ConfigError, match="no budget"):
        require_budget(load(root))
    for budget in ("max_episodes=1", "max_env_steps=1", "max_minutes=0.1"):
        require_budget(load(root, "p", budget))


def test_paths_are_relative_to_the_file_that_names_them(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(a__base="scenario: {network: maps/x.net.xml, map: maps/x.xodr}\n", b__p="extends: a/base\n")
    (root / "a/maps").mkdir()
    for name in ("x.net.xml", "x.xodr"):
        (root / "a/maps" / name).write_text("x")
    scenario = load(root, "b/p").scenario
    assert scenario == ScenarioSettings(network=str(root / "a/maps/x.net.xml"), map=str(root / "a/maps/x.xodr"))
    here = tmp_path / "elsewhere"
    here.mkdir()
    (here / "y.net.xml").write_text("y")
    monkeypatch.chdir(here)
    assert load(root, "b/p", "scenario.network=y.net.xml").scenario.network == str(here / "y.net.xml")
    assert load(root, "b/p", "scenario.network=intersection").scenario.network == "intersection"


# --- writing and reading back


def unlike_the_defaults() -> RunSettings:
    return RunSettings(
        algorithm="pcmappo",
        seed=7,
        max_minutes=1e-05,
        demand=DemandSettings(rate_vph=[100.0, 1e-07], turning_shares=[0.2, 0.6, 0.2]),
        preference=PreferenceSettings(individual_weight=0.25, fixed=[0.1, 0.2, 0.7]),
        learner=MappoSettings(acting_threads=3, target_kl=None, hidden=[32], train_context_encoder=True),
    )


@pytest.mark.parametrize("settings", [RunSettings(), unlike_the_defaults()])
def test_resolved_settings_round_trip(settings: RunSettings, tmp_path: Path) -> None:
    assert from_yaml(to_yaml(settings)) == settings
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    assert from_run_folder(tmp_path) == settings
    assert from_run_folder(tmp_path, overrides=["max_minutes=9"]).max_minutes == 9.0
    check(settings)


def test_resolved_settings_are_a_profile_too(write: Write) -> None:
    root = write(p=to_yaml(unlike_the_defaults()))
    assert load(root) == unlike_the_defaults()
    found = load_profile("p", config_root=root)
    root = write(p=to_yaml(found.settings, found.sources))  # with comments about sources
    assert load(root) == unlike_the_defaults()


def test_a_dropped_reward_part_stays_dropped_in_a_run_folder() -> None:
    settings = RunSettings()
    settings = replace(settings, reward=replace(settings.reward, weights={"delay": -1.0}))
    assert from_yaml(to_yaml(settings)).reward.weights == {"delay": -1.0}


def test_broken_run_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run folder"):
        from_run_folder(tmp_path)
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(CheckpointError, match=r"config\.yaml cannot be read"):
        from_run_folder(tmp_path)  # and does not wait for a writer
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config.yaml").write_text("seed: x\n")
    with pytest.raises(ConfigError, match=r"config.yaml:1: seed is a whole number"):
        from_run_folder(tmp_path)


def test_settings_made_in_python_are_checked_too() -> None:
    check(RunSettings())
    with pytest.raises(ConfigError, match="max_steps is 0"):
        check(replace(RunSettings(), max_steps=0))
    with pytest.raises(ConfigError, match=r"preference\.fixed"):
        check(replace(RunSettings(), preference=PreferenceSettings(fixed=[1.0, 1.0, 1.0])))


def test_the_hash_is_about_what_is_computed(write: Write) -> None:
    root = write(p="seed: 1\n")
    same = config_hash(load(root))
    assert len(same) == 16
    for argument in (
        "max_minutes=5",
        "max_episodes=2",
        "max_env_steps=9",
        "simulator.gui=true",
        "evaluation.final=true",
    ):
        assert config_hash(load(root, "p", argument)) == same
    assert config_hash(load(root, "p", "demand.ramp_from=300")) == same  # without a ramp it means nothing
    ramped = {config_hash(load(root, "p", "demand.ramp_episodes=9", f"demand.ramp_from={k}")) for k in (300, 400)}
    assert len(ramped | {same}) == 3
    others = {
        config_hash(load(root, "p", argument))
        for argument in (
            *("seed=2", "learner.epochs=5", "reward.weights.delay=-0.2", "algorithm=pcmappo", "threads=2"),
            "learner.greedy_quantile=0.4",
        )
    }
    assert len(others | {same}) == 7


def test_the_hash_follows_a_networks_content_not_its_place(write: Write, tmp_path: Path) -> None:
    root = write(p="seed: 1\n")
    places = [tmp_path / "one.net.xml", tmp_path / "two.net.xml", tmp_path / "three.net.xml"]
    for place, content in zip(places, ("same", "same", "other"), strict=True):
        place.write_text(content)
    one, two, three = (config_hash(load(root, "p", f"scenario.network={place}")) for place in places)
    assert one == two != three


def test_what_a_resumed_run_may_not_change() -> None:
    old = RunSettings()
    assert changes(old, replace(old, max_minutes=5.0, max_episodes=3, max_env_steps=4)) == []
    assert changes(old, replace(old, seed=2, max_minutes=5.0)) == ["seed"]
    assert changes(old, replace(old, learner=MappoSettings(epochs=9))) == ["learner.epochs"]


# --- the bundled profiles


def test_the_bundled_profiles_are_these_and_valid() -> None:
    names = [name for name, about in list_profiles() if about]
    assert {f"sumo-marl/intersection/{name}" for name in _BUNDLED} <= set(names)
    assert len(names) == len(list_profiles())
    for name in names:
        found = load_profile(name)
        assert found.ignored == ()
        require_budget(found.settings)
        assert from_yaml(to_yaml(found.settings)) == found.settings


_BUNDLED = ("quickstart", "route_speed_only_mappo", "route_speed_only_pcmappo", "page_layout_pcmappo")


def test_the_recipe_of_the_learning_profiles() -> None:
    for name in _BUNDLED[:3]:
        settings = load_profile(f"sumo-marl/intersection/{name}").settings
        assert settings.decision_interval == 10
        densest = 600.0 if name.endswith("_mappo") else 400.0
        assert (settings.demand.rate_vph, settings.demand.rate_draw) == ([100.0, densest], "range")
        assert (settings.demand.ramp_episodes > 0) == (densest > 400.0)
        assert settings.context.encoder == "deepsets"
        assert settings.neighbours.selection == "conflict"
        assert settings.algorithm == ("mappo" if name.endswith("_mappo") else "pcmappo")


def test_the_documented_layout() -> None:
    settings = load_profile("sumo-marl/intersection/page_layout_pcmappo").settings
    assert (settings.algorithm, settings.decision_interval) == ("pcmappo", 1)
    assert (settings.neighbours.selection, settings.neighbours.max) == ("nearest", 30)
    assert (settings.context.encoder, settings.context.hidden, settings.context.size) == ("lstm", 256, 64)
    assert settings.learner.train_context_encoder is False
    own = own_settings(settings.learner, MappoSettings)
    assert (own.minibatch_size, own.hidden, own.activation, own.epochs) == (256, [256, 256], "relu", 3)


def test_quickstart_fits_five_minutes() -> None:
    settings = load_profile("sumo-marl/intersection/quickstart").settings
    assert settings.max_minutes is not None
    assert settings.max_minutes <= 5.0
    assert settings.evaluation.final


def test_an_exported_root_is_the_bundled_one(tmp_path: Path) -> None:
    root = tmp_path / "with a space"
    written = export_root(root)
    assert {path.relative_to(root) for path in written} == {
        path.relative_to(bundled_root()) for path in bundled_root().rglob("*.yaml")
    }
    for name, _ in list_profiles():
        assert load_profile(name, config_root=root).settings == load_profile(name).settings
    mine = root / "sumo-marl/intersection/quickstart.yaml"
    mine.write_text(mine.read_text() + "keep: 9\n")
    assert export_root(root) == []  # what is there stays
    assert load_profile("sumo-marl/intersection/quickstart", config_root=root).settings.keep == 9
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        export_root(tmp_path / "file")
