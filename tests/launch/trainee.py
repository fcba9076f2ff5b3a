"""A trainer of a few lines, for tests of the launcher: the arguments, files, signals and exit codes of the real one.

    trainee.py run -t PROFILE --config-root ROOT --out RUN max_episodes=4 …
    trainee.py run --resume RUN max_episodes=8 …

It learns a number that remembers every episode, so a run that lost or repeated one ends up elsewhere. What goes wrong
stands in `$TRAINEE/<cell>`, one word an attempt: `exit:10`, `signal:9`, `hang`, `oom`, `stubborn`, `fine`; with a `+`
behind it only after an episode.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

stop = False


def ask(number: int, frame: object) -> None:
    global stop
    stop = True


def main() -> int:
    signal.signal(signal.SIGTERM, ask)
    arguments = sys.argv[2:]
    names = {flag: arguments[arguments.index(flag) + 1] for flag in ("--out", "--resume") if flag in arguments}
    settings = dict(word.split("=", 1) for word in arguments if "=" in word and not word.startswith("-"))
    run = Path(names.get("--resume") or names["--out"])
    assert "--resume" in names or not run.exists(), "a fresh run needs a fresh folder"
    run.mkdir(parents=True, exist_ok=True)
    lock = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    write(run / "run.json", "{}")
    plan, pace = plan_of(run), float(os.environ.get("TRAINEE_PACE", "0.05"))
    budget = int(settings["max_episodes"])
    episode, weight = saved(run)
    begun = episode
    while episode < budget:
        beat(run, "training", episode=episode + 1, step=3, env_steps=100 * episode, training_s=pace * episode)
        if plan == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if plan == "hang" and episode == begun + 1:
            time.sleep(1000)
        time.sleep(pace)
        if stop:
            say("stopped")
            beat(run, "interrupted")
            return 130
        if plan.startswith(("exit", "signal", "oom")) and episode == begun + (plan[-1] == "+"):
            return fail(plan.rstrip("+"))
        episode, weight = episode + 1, hashlib.sha256(f"{weight} {episode} {run.name}".encode()).hexdigest()
        line = {"episode": episode, "vehicles": 4, "arrived": 3, "collided": 1, "mean_delay_s": 2.0, "return": -1.0}
        with (run / "episodes.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        save(run, episode, weight)
    done = {"episodes": episode, "env_steps": 100 * episode, "training_s": pace * episode}
    beat(run, "finished", success_rate_last_20=0.75, **done)
    return 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def plan_of(run: Path) -> str:
    """This attempt's word."""
    folder = os.environ.get("TRAINEE")
    if folder is None or not (Path(folder) / run.name).exists():
        return "fine"
    words = (Path(folder) / run.name).read_text().split()
    (Path(folder) / run.name).write_text(" ".join(words[1:]))
    return words[0] if words else "fine"


def fail(plan: str) -> int:
    if plan == "oom":
        say("Traceback …\ntorch.OutOfMemoryError: CUDA out of memory.")
        return 1
    kind, _, number = plan.partition(":")
    if kind == "signal":
        os.kill(os.getpid(), int(number))
        time.sleep(10)
    say(f"error: as planned {number}\n  fix: plan otherwise")
    return int(number)


def saved(run: Path) -> tuple[int, str]:
    latest = run / "checkpoints" / "latest"
    if not latest.exists():
        return 0, "0"
    number = int(os.readlink(latest).rpartition("_")[2])
    lines = (run / "episodes.jsonl").read_text().splitlines()[:number]
    assert len(lines) == number
    write(run / "episodes.jsonl", "".join(f"{line}\n" for line in lines))
    return number, (latest / "weight").read_text()


def save(run: Path, episode: int, weight: str) -> None:
    folder = run / "checkpoints" / f"episode_{episode}"
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "weight", weight)
    part = run / "checkpoints" / ".latest"
    part.unlink(missing_ok=True)
    os.symlink(folder.name, part)
    os.replace(part, run / "checkpoints" / "latest")


def beat(run: Path, phase: str, **facts: object) -> None:
    write(run / "status.json", json.dumps({**facts, "phase": phase, "pid": os.getpid(), "updated": time.time()}))


def write(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_text(text)
    os.replace(part, file)


if __name__ == "__main__":
    sys.exit(main())
