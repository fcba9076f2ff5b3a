"""What a person sees while training: one picture in a terminal, a line every ten seconds in a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from opencda_marl.cli_answers import answering
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Evaluated, Finished, Note, Started
from opencda_marl.core.speech import number, percent, seconds
from opencda_marl.display import TrainingDisplay, as_typed, program, show_facts, show_table
from opencda_marl.display_results import following


def line(episode: int, **more: Any) -> dict[str, Any]:
    return {
        "episode": episode,
        "rate_vph": 300.0,
        "scheduled": 100,
        "return": -2.0,
        "arrived": 90,
        "collided": 10,
        "removed": 0,
        "mean_delay_s": 1.5,
        "steps": 2000,
        "wall_s": 1.0,
        "spans": {"act": 0.5, "tick": 0.25, "store": 0.1, "log": 0.125},
        **more,
    }


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200, highlight=False), out


def test_figures_in_words() -> None:
    assert (number(None), number(1.26), number(3.0, 0)) == ("-", "1.3", "3")
    assert (percent(None), percent(0.9975)) == ("-", "99.8")
    assert [seconds(value) for value in (None, 0, 65.2, 7265)] == ["-", "0:00", "1:05", "2:01:05"]


def test_a_pipe_gets_a_line_every_ten_seconds_averaged_over_what_came_since() -> None:
    console, out = plain()
    now = [0.0]
    with TrainingDisplay(console, clock=lambda: now[0]) as display:
        display(Started(Path("runs/x"), {"algorithm": "pcmappo", "device": "cpu", "secret": 1}, 0))
        for episode in range(1, 8):
            now[0] += 4.0
            display(EpisodeDone(line(episode, arrived=100 if episode == 7 else 90, collided=0), episode / 10, 30.0))
    said = out.getvalue().splitlines()
    assert said[0] == "run: runs/x"
    assert said[1] == "init: algorithm=pcmappo  device=cpu"
    assert [text.split("  ")[0] for text in said[2:]] == ["episode 1", "episode 4", "episode 7"]
    assert "episode 1  300 vph  return -2.00" in said[2]
    assert "delay 1.5 s" in said[2]
    assert "0.50 ms/step (act 0.25, tick 0.12, log 0.06)" in said[2], "the dearest come first"
    assert "store" not in said[2], "three are enough for a line"
    assert "10.0 % done, 0:30 left" in said[2]
    assert "\x1b" not in out.getvalue()


def test_rates_are_pooled_over_vehicles_and_times_over_steps() -> None:
    console, out = plain()
    now = [0.0]
    with TrainingDisplay(console, clock=lambda: now[0]) as display:
        display(EpisodeDone(line(1), 0.1, None))
        display(EpisodeDone(line(2, arrived=0, collided=2, wall_s=8.0, steps=1000), 0.2, None))
        display(EpisodeDone(line(3, arrived=98, collided=0, wall_s=1.0, steps=2000), 0.3, None))
    last = out.getvalue().splitlines()[-1]
    # 98 of 100 arrived, not the mean of 0 and 1; 9 s over 3000 steps
    assert "success 98.0 %" in last
    assert "collisions 2.0 %" in last
    assert "3.00 ms/step" in last


def test_episodes_in_which_nobody_ended_have_no_rates() -> None:
    console, out = plain()
    with TrainingDisplay(console) as display:
        nobody = dict.fromkeys(("return", "mean_delay_s"))
        display(EpisodeDone(line(1, arrived=0, collided=0, spans={}, **nobody), 0.0, None))
    assert "success - %" in out.getvalue()
    assert out.getvalue().endswith("0.0 % done\n"), "time left is not told before it is known"


def test_everything_else_is_said_once() -> None:
    console, out = plain()
    with TrainingDisplay(console) as display:
        display(Started(Path("runs/x"), {}, 4, "300 episodes"))
        display(Beat({"phase": "training"}))
        display(Note("[bold]not markup[/bold]"))
        display(Evaluated(5, [{"success_rate": 0.991, "rate_vph": 200.0}, {"success_rate": None, "rate_vph": 300.0}]))
        display(Checkpointed(Path("c"), 5, best=True))
        display(Finished({"episodes": 5, "env_steps": 12000, "training_s": 61.0}))
    said = out.getvalue()
    assert "resumed: runs/x" in said
    assert "plan: 300 episodes\n" in said
    assert "note: [bold]not markup[/bold]" in said
    assert "policy of episode 5: success 99.1 % at 200 vph, - % at 300 vph" in said
    assert "trained: 5 episodes, 12000 steps in 1:01" in said


def test_a_terminal_gets_one_picture() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, height=40, force_terminal=True, highlight=False, legacy_windows=False)
    with TrainingDisplay(console) as display:
        display(Started(Path("runs/x"), {"algorithm": "pcmappo"}, 0))
        display(Beat({"phase": "updating"}))
        for episode in range(1, 30):
            display(EpisodeDone(line(episode), episode / 30, 12.0))
        display(Checkpointed(Path("c"), 29, best=True))
    shown = out.getvalue()
    for words in (
        "success %",
        "collisions %",
        "ms/step",
        "last 20",
        "tick",
        "0:12 left",
        "updating",
        "best: episode 29",
    ):
        assert words in shown, words


def test_nothing_is_folded_in_a_pipe() -> None:
    console, out = plain()
    show_facts(console, {"name": "x" * 500})
    show_table(console, ("a", "b"), [["[red]text[/red]", "1"]], title="title")
    text = out.getvalue()
    assert len(text.splitlines()) == 4
    assert "[red]text[/red]" in text


def test_the_last_episode_comes_before_the_end() -> None:
    console, out = plain()
    with TrainingDisplay(console, clock=lambda: 0.0) as display:
        for episode in (1, 2):
            display(EpisodeDone(line(episode), episode / 2, 0.0))
        display(Finished({"episodes": 1, "env_steps": 2000, "training_s": 61.0}))
    starts = [text.split("  ")[0] for text in out.getvalue().splitlines()]
    assert starts == ["episode 1", "episode 2", "trained: 1 episode, 2000 steps in 1:01"]


def test_progress_in_a_pipe_is_a_line_every_15_seconds() -> None:
    console, out = plain()
    now = [0.0]
    with following(console, clock=lambda: now[0]) as tell:
        for done in range(121):
            tell("held-out traffic", done, 120)
            now[0] += 0.5
        tell("plots", 0, 0)
    assert out.getvalue().splitlines() == [
        "held-out traffic: 0 of 120 episodes",
        "held-out traffic: 30 of 120 episodes, 0:45 left",
        "held-out traffic: 60 of 120 episodes, 0:30 left",
        "held-out traffic: 90 of 120 episodes, 0:15 left",
        "held-out traffic: 120 of 120 episodes, 0:00 left",
        "plots …",
    ]


def test_a_pace_needs_something_that_was_done_since() -> None:
    """The first word may come with the first episode: how long that took is not known."""
    console, out = plain()
    now = [100.0]
    with following(console, clock=lambda: now[0]) as tell:
        for done in (1, 2, 3):
            tell("held-out traffic", done, 4)
            now[0] += 20.0
    assert out.getvalue().splitlines() == [
        "held-out traffic: 1 of 4 episodes",
        "held-out traffic: 2 of 4 episodes, 0:40 left",
        "held-out traffic: 3 of 4 episodes, 0:20 left",
    ]


def test_what_comes_before_the_first_episode_is_no_pace_and_is_not_said_over_and_over() -> None:
    console, out = plain()
    now = [0.0]
    with following(console, clock=lambda: now[0]) as tell:
        for _ in range(36):
            tell("held-out traffic", 0, 60)
            now[0] += 5.0
        for done in (1, 2, 3):
            now[0] += 20.0
            tell("held-out traffic", done, 60)
    assert out.getvalue().splitlines() == [
        *3 * ["held-out traffic: 0 of 60 episodes"],
        "held-out traffic: 1 of 60 episodes",
        "held-out traffic: 2 of 60 episodes, 19:20 left",
        "held-out traffic: 3 of 60 episodes, 19:00 left",
    ]


def test_progress_in_a_terminal_stands_in_one_line() -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, highlight=False, legacy_windows=False)
    with following(console) as tell:
        tell("held-out traffic", 40, 120)
        time.sleep(0.3)  # rich draws by itself, some times a second
    assert "40 of 120 episodes" in out.getvalue()


def test_no_line_of_a_table_ends_in_spaces() -> None:
    console, out = plain()
    show_table(console, ("a", "b"), [["x", ""], ["[y]", "1234"]], title="title", text=2)
    assert out.getvalue().splitlines() == ["title", "a    b", "x", "[y]  1234"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A virtual environment with our script, and a shell that knows none."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "opencda-marl"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "cli.py")])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    program.cache_clear()
    yield folder
    program.cache_clear()


def test_commands_run_as_typed(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_typed("opencda-marl run x; update opencda-marl, or `opencda-marl runs list`") == (
        ".venv/bin/opencda-marl run x; update opencda-marl, or `.venv/bin/opencda-marl runs list`"
    )
    assert as_typed("/a/opencda-marl run") == "/a/opencda-marl run"
    monkeypatch.setenv("PATH", str(installed))
    program.cache_clear()
    assert program() == "opencda-marl"
    (installed / "opencda-marl").unlink()
    program.cache_clear()
    assert program() == "python -m opencda_marl.cli"
    monkeypatch.setenv("PATH", "")
    program.cache_clear()
    assert program() == ".venv/bin/python -m opencda_marl.cli"


def test_another_installation_on_the_path_is_not_this_one(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opencda-marl").touch(mode=0o755)
    assert program() == ".venv/bin/opencda-marl"


def test_what_is_printed_carries_the_program(installed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), answering(True):
        raise ConfigError("what", fix="opencda-marl runs list [all]")
    out, err = capfd.readouterr()
    assert "fix: .venv/bin/opencda-marl runs list [all]" in err
    assert json.loads(out)["fix"] == ".venv/bin/opencda-marl runs list [all]"


class _Gone(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error
        self.tries = 0

    def write(self, _text: str, /) -> int:
        self.tries += 1
        raise self.error


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_a_stream_that_is_gone_silences_the_display_and_stops_nothing(
    error: OSError, terminal: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    out = _Gone(error)
    with capfd.disabled():  # rich turns the process's own stdout off when a pipe breaks
        kept = os.dup(1)
        try:
            with TrainingDisplay(Console(file=out, force_terminal=terminal, width=100)) as display:
                for episode in range(1, 4):
                    display(EpisodeDone(line(episode), episode / 3, None))
                display(Note("x"))
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    assert out.tries == 1
