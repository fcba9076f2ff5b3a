"""The loop without learning: how a policy or a controller drives on held-out traffic.

`python -m opencda_marl.evaluate REQUEST` is the same in a child process (see core/children.py): beside training,
and for the table at the end of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from opencda_marl.assemble import Traffic, evaluation_traffic, make_env, make_learner, make_roads, quiet_process
from opencda_marl.config import from_run_folder
from opencda_marl.core.checkpoint import check_observation, read_checkpoint
from opencda_marl.core.children import answer, end_with_parent, read_request
from opencda_marl.core.errors import CheckpointError, ConfigError
from opencda_marl.core.files import array_bytes, write_whole
from opencda_marl.core.metrics import EpisodeRecord, pool
from opencda_marl.core.run_folder import best_checkpoint, typed
from opencda_marl.core.seeds import Branch, generator
from opencda_marl.core.spec import Action, Observation
from opencda_marl.core.state import Driver, Schedule
from opencda_marl.core.verdict import judge
from opencda_marl.env import CONTROLLERS
from opencda_marl.env.controllers import SUMO_DRIVES, make_controller
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.journal import objective_weights, recorded
from opencda_marl.policies.catalogue import BUNDLED, find_bundled
from opencda_marl.settings.run import RunSettings

__all__ = ["Policy", "evaluate", "find_policy", "run_episodes", "unshielded"]

Act = Callable[[Observation], Action]


@dataclass(frozen=True, slots=True)
class Policy:
    """What is to be evaluated."""

    name: str  # a controller's, or the path as it was given
    checkpoint: Path | None  # None: a controller
    folder: Path | None  # that has its config.yaml
    profile: str | None


def find_policy(policy: str | Path) -> Policy:
    """A controller's name, `bundled:NAME`, a checkpoint, or a run folder (its best checkpoint, else its latest).

    Raises:
        CheckpointError: it is none of these.
    """
    name = str(policy)
    if name.startswith(BUNDLED):
        checkpoint = read_checkpoint(find_bundled(name))
        return Policy(name, checkpoint.path, checkpoint.path, checkpoint.extra.get("profile"))
    if name in CONTROLLERS.targets():
        return Policy(name, None, None, None)
    path = Path(policy)
    if (path / "run.json").is_file():
        return Policy(name, best_checkpoint(path), path, recorded(path, "profile")["profile"])
    if not path.exists() and not path.is_symlink() and not _among_checkpoints(path):
        known = ", ".join(sorted(CONTROLLERS.targets()))
        raise CheckpointError(
            f"there is no run, checkpoint or controller {name!r}",
            fix="name a run folder (opencda-marl runs list), a checkpoint in one (RUN/checkpoints/best), "
            f"a policy of the package (opencda-marl list policies), or a controller: {known}",
        )
    if path.is_dir() and not any((path / file).is_file() for file in ("manifest.json", "state.json", "config.yaml")):
        raise CheckpointError(
            f"{path} is neither a run (it has no run.json) nor a checkpoint (no manifest.json)",
            fix="see what there is: opencda-marl runs list",
        )
    checkpoint = read_checkpoint(path)
    return Policy(name, checkpoint.path, checkpoint.path, checkpoint.extra.get("profile"))


def evaluate(
    policy: str | Path,
    *,
    settings: RunSettings | None = None,
    profile: str | None = None,
    seeds: range | None = None,
    episodes: int | None = None,
    trajectory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    rivals: Sequence[str] = (),
) -> dict[str, Any]:
    """Drive held-out episodes and pool the figures.

    Args:
        policy: see `find_policy`.
        settings: None: those of the run or checkpoint.
        profile: name of the profile that the settings come from, for the record.
        seeds: of the traffic, one episode each; None: `evaluation.seeds`.
        episodes: how many of them; None: all.
        trajectory: file for the first episode's trajectories.
        progress: hears (episodes done, episodes in all), those of rivals included.
        rivals: controllers that drive the same traffic afterwards, for `comparison` (see core/verdict.py).

    Raises:
        ConfigError: no settings, or more episodes than seeds.
        CheckpointError: there is no such policy, or it is broken or foreign.
    """
    found = find_policy(policy)
    if settings is None:
        if found.folder is None:
            raise ConfigError(f"{found.name} needs a profile to drive in", fix="name one with -t")
        settings = from_run_folder(found.folder)
    settings = _for_evaluation(settings)
    if found.checkpoint is None and settings.action == "levels":
        settings = replace(settings, action="target_speed")  # levels belong to a policy
    chosen = _chosen(seeds if seeds is not None else range(*settings.evaluation.seeds), episodes)
    if found.name in SUMO_DRIVES:
        settings = _under_its_rule(settings, found.name)
    roads = make_roads(settings)
    traffic = evaluation_traffic(settings, roads, chosen)
    if found.name in SUMO_DRIVES:
        traffic = _all_human(traffic)
    heard = None if progress is None else _from(progress, 0, len(chosen) * (1 + len(rivals)))
    with (
        quiet_process(None if found.checkpoint is None else settings.threads),
        closing(make_env(settings, traffic=traffic)) as env,
        _driver(found, settings, env) as act,
    ):
        records = run_episodes(env, act, len(chosen), trajectory, heard)
    answer = {
        "policy": found.name,
        "profile": profile or found.profile,
        **pool(records, weights=objective_weights(settings)),
        "checkpoint": None if found.checkpoint is None else str(found.checkpoint),
        "seeds": [chosen[0], chosen[-1] + 1],
        "rate_vph": settings.demand.rate_vph,
        "decision_interval": settings.decision_interval,
        "preference": _preference(settings),
        "per_episode": [_short(record) for record in records],
    }
    if not rivals:
        return answer
    beside = []
    for index, rival in enumerate(rivals, start=1):
        heard = None if progress is None else _from(progress, index * len(chosen), len(chosen) * (1 + len(rivals)))
        beside.append(evaluate(rival, settings=unshielded(settings), seeds=chosen, progress=heard))
    return {**answer, "comparison": judge([answer, *beside], found.name, rivals)}


def unshielded(settings: RunSettings) -> RunSettings:
    """Without the shield: it belongs to a policy, and drivers that a policy is compared with have none."""
    return replace(settings, shield=replace(settings.shield, enabled=False))


def _from(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int, int], None]:
    """Progress of a part, told as progress of the whole."""
    return lambda done, _part: progress(before + done, total)


def run_episodes(
    env: DrivingEnv,
    act: Act,
    episodes: int,
    trajectory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[EpisodeRecord]:
    """The loop: act and step until each episode is done.

    Args:
        env: with held-out traffic; episodes count from 1.
        act: greedy.
        episodes: how many.
        trajectory: file for the first episode's trajectories.
        progress: hears (done, in all).
    """
    records = []
    env.measure_comfort(True)
    for episode in range(1, episodes + 1):
        traced = trajectory is not None and episode == 1
        env.record_trajectory(traced)
        step = env.reset(episode)
        while not step.done:
            step = env.step(act(step.observation))
        records.append(env.record())
        if traced and trajectory is not None:
            write_whole(trajectory, array_bytes(env.trajectory()), durable=False)
        if progress is not None:
            progress(episode, episodes)
    return records


def _among_checkpoints(path: Path) -> bool:
    """Does it name a checkpoint of a run, be it there or not?"""
    return path.parent.name == "checkpoints" and path.parent.is_dir()


def _preference(settings: RunSettings) -> str | list[float] | None:
    """`grid`: each vehicle its own point of it; the vector that all have; None where there are no preferences."""
    if not settings.algorithm.startswith("pc"):
        return None
    return "grid" if settings.preference.source == "grid" else list(settings.preference.fixed)


def _for_evaluation(settings: RunSettings) -> RunSettings:
    """Everything measured; one preference for everybody unless a grid of them is asked for."""
    source: Literal["grid", "fixed"] = "grid" if settings.preference.source == "grid" else "fixed"
    return replace(
        settings,
        preference=replace(settings.preference, source=source),
        evaluation=replace(settings.evaluation, enabled=True),
    )


def _chosen(seeds: range, episodes: int | None) -> range:
    wanted = len(seeds) if episodes is None else episodes
    if wanted < 1 or wanted > len(seeds):
        raise ConfigError(
            f"{wanted} episodes cannot be driven on {len(seeds)} seeds: it is one episode a seed",
            fix=f"--seeds {seeds.start}:{seeds.start + max(1, wanted)}",
        )
    return seeds[:wanted]


def _under_its_rule(settings: RunSettings, name: str) -> RunSettings:
    """The same crossing in the form that the controller needs."""
    network = SUMO_DRIVES[name]
    if network is None:
        return settings
    if settings.simulator.backend == "carla":
        raise ConfigError(
            f"{name} is a rule that SUMO's drivers keep; in CARLA drivers take turns",
            fix="leave this controller out; priority are the drivers that CARLA has here",
        )
    if settings.scenario.network not in ("intersection", network):
        raise ConfigError(
            f"{name} needs a form of the crossing of its own, and there is none of {settings.scenario.network!r}",
            fix="leave this controller out, or set scenario.network=intersection",
        )
    return replace(settings, scenario=replace(settings.scenario, network=network))


def _all_human(traffic: Traffic) -> Traffic:
    """The simulator's own drivers and right of way for every vehicle."""

    def human(episode: int) -> tuple[Schedule, int, int]:
        schedule, simulator_seed, seed = traffic(episode)
        drivers = np.full_like(schedule.drivers, int(Driver.HUMAN))
        return replace(schedule, drivers=drivers), simulator_seed, seed

    return human


@contextmanager
def _driver(policy: Policy, settings: RunSettings, env: DrivingEnv) -> Iterator[Act]:
    """The policy, greedy, or the controller."""
    if policy.checkpoint is None:
        rng = generator(settings.seed, Branch.EVALUATION, int(Branch.EXPLORATION))
        controller = make_controller(policy.name, settings, env.roads, env.conflicts, rng)
        yield lambda observation: controller.act(observation, env.state)
        return
    checkpoint = read_checkpoint(policy.checkpoint)
    spec = env.observation_spec
    own = "evaluate it with its own settings, without -t and observation=: opencda-marl evaluate"
    check_observation(checkpoint, spec, fix=f"{own} {typed(Path(policy.name))}")
    with closing(make_learner(settings, spec, env.action_spec)) as learner:
        learner.load(checkpoint.state, weights_only=True)
        yield lambda observation: learner.act(observation, explore=False)


def _short(record: EpisodeRecord) -> dict[str, Any]:
    counts = record.accounting
    return {
        "seed": record.seed,
        "scheduled": counts.scheduled,
        "departed": record.departed,
        "arrived": counts.arrived,
        "collided": counts.collided,
        "removed": counts.removed,
        "running": counts.running,
        "waiting": counts.waiting,
    }


def _job(
    job: Mapping[str, Any], settings: RunSettings, seeds: range, profile: str | None, driven: Callable[[], None]
) -> list[dict[str, Any]]:
    """One policy at each rate, beside others: on one thread of the CPU. `driven` is called after each episode."""
    settings = replace(settings, threads=1, device="cpu")
    rows = []
    for rate in job["rates_vph"]:
        demand = replace(settings.demand, rate_vph=rate)
        wanted = job.get("trajectory_rate_vph") == rate
        rows.append(
            evaluate(
                job["policy"],
                settings=replace(settings, demand=demand),
                profile=profile,
                seeds=seeds,
                trajectory=Path(job["trajectory"]) if wanted else None,
                progress=lambda _done, _total: driven(),
            )
        )
    return rows


def _main(arguments: Sequence[str]) -> None:
    request = read_request(arguments[0])
    end_with_parent()
    settings = from_run_folder(Path(request["config"]))
    seeds = range(*request["seeds"])
    file = Path(request["answer"].replace(".answer.json", ".progress"))  # read by whoever waits for the answer
    driven = 0

    def count() -> None:
        nonlocal driven
        driven += 1
        write_whole(file, str(driven).encode(), durable=False)

    rows = []
    for job in request["jobs"]:
        own = from_run_folder(Path(request["config"]), overrides=job["overrides"]) if job.get("overrides") else settings
        rows += _job(job, own, seeds, request.get("profile"), count)
    answer(request, rows)


if __name__ == "__main__":
    _main(sys.argv[1:])
