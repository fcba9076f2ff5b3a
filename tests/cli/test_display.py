"""What a person sees while training: one picture in a terminal, a line every ten seconds in a pipe."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from opencda_marl.core.events import Beat, Checkpointed, EpisodeDone, Evaluated, Finished, Note, Started
from opencda_marl.display import TrainingDisplay, number, percent, seconds, show_facts, show_table


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
        "spans": {"act": 0.5, "tick": 0.25, "log": 0.125},
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
    assert "return -2.00" in said[2]
    assert "0.50 ms/step (tick 0.12 act 0.25 log 0.06)" in said[2]
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


def test_everything_else_is_said_once() -> None:
    console, out = plain()
    with TrainingDisplay(console) as display:
        display(Started(Path("runs/x"), {}, 4))
        display(Beat({"phase": "training"}))
        display(Note("[bold]not markup[/bold]"))
        display(Evaluated(5, [{"success_rate": 0.991, "rate_vph": 200.0}, {"success_rate": None, "rate_vph": 300.0}]))
        display(Checkpointed(Path("c"), 5, best=True))
        display(Finished({"episodes": 5, "env_steps": 12000, "training_s": 61.0}))
    said = out.getvalue()
    assert "resumed: runs/x" in said
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
