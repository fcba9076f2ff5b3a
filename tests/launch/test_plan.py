"""Slots and options, as the documented command lines give them."""

from __future__ import annotations

import json

import pytest

from opencda_marl.core.errors import ConfigError
from opencda_marl.launch.gpus import Gpu
from opencda_marl.launch.plan import DEADLINES, RETRIES, Options, make_slot, numbered, options_from, parse_counts
from opencda_marl.launch.request import gpu_notes, slot_table
from tests.launch.matrices import cell, matrix


def test_slots_go_around_the_lists() -> None:
    options = Options(cuda_visible_devices=("2", "3"), carla_gpus=(0, 1, 4), carla_rpc_port=2000)
    slots = [make_slot(options, k, carla=True, threads=1) for k in range(4)]
    assert [slot.cuda for slot in slots] == ["2", "3", "2", "3"]
    assert [slot.adapter for slot in slots] == [0, 1, 4, 0]
    assert [slot.rpc_port for slot in slots] == [2000, 2010, 2020, 2030]
    assert slots[1].describe()["ports"] == [2010, 2011, 2012]


def test_slots_without_servers_and_without_gpus() -> None:
    slot = make_slot(Options(carla_gpus=(0,)), 3, carla=False, threads=2)
    assert (slot.cuda, slot.adapter, slot.rpc_port, slot.threads) == (None, None, None, 2)
    with pytest.raises(ConfigError, match="slot 7000 would have the port 72000"):
        make_slot(Options(), 7000, carla=True, threads=1)


def test_the_slot_table_knows_uuids() -> None:
    gpus = [Gpu(0, "GPU-aa", "H200", 1000, 900), Gpu(1, "GPU-bb", "H200", 1000, 900)]
    made = matrix([cell(0, family="carla", threads=3)], cuda_visible_devices=("1", "GPU-aa"), parallel=3)
    table = slot_table(made, 3, gpus)
    assert [slot["uuid"] for slot in table] == ["GPU-bb", "GPU-aa", "GPU-bb"]
    assert [slot["threads"] for slot in table] == [3, 3, 3]
    assert slot_table(made, 1, None)[0]["uuid"] is None
    assert gpu_notes(made.options, gpus) == []
    assert "no GPU 7" in gpu_notes(Options(cuda_visible_devices=("7",)), gpus)[0]
    assert "not checked" in gpu_notes(Options(cuda_visible_devices=("7",)), None)[0]
    assert gpu_notes(Options(), None) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"parallel": 0},
        {"carla_restart_mode": "docker", "carla_gpus": (0,)},
        {"carla_rpc_port": 80},
        {"retries": {"simulater": 1}},
        {"deadlines": {"trainin": 1}},
        {"deadlines": {"training": -1.0}},
    ],
)
def test_options_that_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Options(**wrong)  # type: ignore[arg-type]


def test_options_last_until_others_are_given() -> None:
    first = options_from({}, {"parallel": 4, "carla_gpus": (0, 1), "retries": {"simulator": 2}, "keep_carla": True})
    recorded = json.loads(json.dumps(first.record()))
    assert options_from(recorded, {}) == first
    later = options_from(recorded, {"parallel": "auto", "keep_carla": False, "retries": None})
    assert (later.parallel, later.keep_carla, later.carla_gpus) == ("auto", False, (0, 1))
    docker = options_from(recorded, {"carla_restart_mode": "docker"})  # those were for the other mode
    assert docker.carla_gpus == ()
    assert first.retry("simulator") == 2
    assert first.retry("memory") == RETRIES["memory"]
    assert first.retry("not_finite") == first.retry("config") == 0
    assert Options(deadlines={"training": 5.0}).deadline("training") == 5.0
    assert Options().deadline("compiling") == DEADLINES["compiling"]


def test_words_of_the_command_line() -> None:
    assert numbered("0, 1", "--carla-gpus") == (0, 1)
    assert parse_counts(["simulator=3", "training=2.5"], "--retries") == {"simulator": 3, "training": 2.5}
    with pytest.raises(ConfigError, match="--carla-gpus '0,a'"):
        numbered("0,a", "--carla-gpus")
    with pytest.raises(ConfigError, match="--retries 'simulator'"):
        parse_counts(["simulator"], "--retries")
