"""What nvidia-smi says, with a fake one on the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from opencda_marl.launch.gpus import Gpu, cards_of, find_gpus

_TWO = """\
0, GPU-5a0f6f0c-1111-2222-3333-444455556666, NVIDIA GeForce RTX 5090, 32607, 30011
1, GPU-99999999-aaaa-bbbb-cccc-ddddeeeeffff, NVIDIA GB10, [N/A], [N/A]
"""


def _fake(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer").write_text(_TWO)
    _fake(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer')
    assert find_gpus() == [
        Gpu(0, "GPU-5a0f6f0c-1111-2222-3333-444455556666", "NVIDIA GeForce RTX 5090", 32607, 30011),
        Gpu(1, "GPU-99999999-aaaa-bbbb-cccc-ddddeeeeffff", "NVIDIA GB10", None, None),
    ]
    asked = (tmp_path / "asked").read_text()
    assert asked == "--query-gpu=index,uuid,name,memory.total,memory.free --format=csv,noheader,nounits\n"


@pytest.mark.parametrize(
    "script",
    ["echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9", "sleep 60"],
)
def test_a_driver_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr("opencda_marl.launch.gpus._TIMEOUT", 0.3)
    _fake(tmp_path, monkeypatch, f"exec {script}" if script.startswith("sleep") else script)
    assert find_gpus() is None


def test_no_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() is None
    _fake(tmp_path, monkeypatch, "echo 'No devices were found'")
    assert find_gpus() == []


_PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       2211     G      1      0      -      -      -      -    Xorg
    1       4000   C+G     35      8      -      -      -      -    CarlaUE4-Linux-
    1       4001     C      -      -      -      -      -      -    python
    2          -     -      -      -      -      -      -      -    -
"""


def test_which_card_a_process_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answer").write_text(_PMON)
    _fake(tmp_path, monkeypatch, f'[ "$*" = "pmon -c 1" ] && cat {tmp_path}/answer')
    assert cards_of([4000, 4001, 1]) == {1}
    assert cards_of([2211, 4000]) == {0, 1}
    assert cards_of([5]) == set()
    _fake(tmp_path, monkeypatch, "exit 3")
    assert cards_of([4000]) is None
