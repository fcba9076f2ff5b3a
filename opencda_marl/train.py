"""Training: `run_loop` is the loop; `train` sets it up around a run folder and takes it down.

A checkpoint is the state at the end of an episode. That state is also copied in memory at each boundary
(when it does not go to the disk), so a stop loses only the episode that is under way.

Longer than other modules, because what a run says at its start, at its end and when it fails stands beside the loop.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from opencda_marl.assemble import (
    kernels_are_kept,
    make_env,
    make_learner,
    make_roads,
    make_simulator,
    quiet_process,
    warm_up,
)
from opencda_marl.config import changes, config_hash, from_run_folder, require_budget, to_yaml
from opencda_marl.core.checkpoint import Checkpoint, check_observation, read_checkpoint
from opencda_marl.core.errors import (
    AccountingError,
    CheckpointError,
    ConfigError,
    CudaGraphCaptureError,
    Interrupted,
    NotFiniteError,
    RecycleError,
    SimulatorError,
    StorageError,
    WorkerError,
)
from opencda_marl.core.events import Beat, Finished, Listener, Note, Started, TrainEvent
from opencda_marl.core.files import remove_tree
from opencda_marl.core.forms import changed_forms, with_forms
from opencda_marl.core.machine import cores, describe_machine, git_commit, peak_memory_mib, versions
from opencda_marl.core.run_folder import RunFolder, best_checkpoint, read_episodes, read_run, typed
from opencda_marl.core.simulator import SimulatorInfo
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Learner, LearnerState, ObservationSpec, Step
from opencda_marl.core.speech import Speech
from opencda_marl.core.stopping import StopRequest
from opencda_marl.core.torchrun import Place, launched
from opencda_marl.crew import (
    Alone,
    Crew,
    LeftError,
    Meeting,
    Start,
    device_of,
    launched_crew,
    parted,
    resolve_workers,
    spawned,
)
from opencda_marl.env.driving import DrivingEnv
from opencda_marl.journal import Done, Journal, Recorder, recorded
from opencda_marl.nn.native import why_not_kept
from opencda_marl.outlook import identity, plan, stopped_by_the_clock, used_up
from opencda_marl.settings.networks import NetworkSettings
from opencda_marl.settings.run import RunSettings

__all__ = ["TrainResult", "run_loop", "train", "without_surprises"]


_UNLEARNED = (
    "no update was made, so the policy is the one that the run began with: the budget ended before learner.n_steps, "
    "or learner.learning_starts, learner.batch_size and learner.updates_per_step, allowed one"
)


_BITS = "the last bits may differ from those of a run that was never interrupted"

_WORKERS = "workers"  # folder of what they say, in the run folder


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A run whose budget is used up."""

    run_dir: Path
    settings: RunSettings
    last: dict[str, Any]  # the last episode's line
    summary: dict[str, Any]
    notes: tuple[str, ...] = ()  # what is to be known of its end, and stands under its table again


def run_loop(
    env: DrivingEnv,
    learner: Learner,
    journal: Recorder,
    stop: StopRequest,
    spans: Spans,
    crew: Meeting | None = None,
) -> None:
    """Act, step, store, update, log, until the budget is used up or somebody asks to stop.

    Args:
        env: of this worker.
        learner: of this worker.
        journal: is told what happens.
        stop: whether somebody asks to stop.
        spans: timers.
        crew: the other workers, with whom updates and the ends of episodes are made together; None: there are none.
    """
    crew = crew or Alone()
    world = env.world
    while not journal.over and not stop.requested():
        traced = journal.begin_episode()
        env.record_trajectory(traced)
        with spans("reset"):
            step = env.reset(journal.episode)
        if env.world != world:  # the simulator has loaded it anew
            world = env.world
            learner.invalidate()
        empty = step.steps  # before the first vehicle came; counted with its first decision
        while not step.done:
            observation = step.observation
            with spans("act"):
                action = learner.act(observation, explore=True)
            step = env.step(action)
            step.steps, empty = step.steps + empty, 0
            with spans("store"):
                learner.store(observation, action, step)
            journal.advance(step.steps)
            if learner.ready(step) and crew.meet("update", journal.counted) == "update":
                _learn(learner, step, journal, spans, crew)
            if stop.requested() and not step.done:  # an episode that is over is no loss
                return
        while (agreed := crew.meet("end", journal.counted, over=journal.ending)) == "update":
            _learn(learner, step, journal, spans, crew)  # others are not that far
        if agreed == "stop":
            return
        journal.end_episode(env.record(), env.trajectory() if traced else {})


def _learn(learner: Learner, step: Step, journal: Recorder, spans: Spans, crew: Meeting) -> None:
    """An update, with everybody."""
    learner.progress(crew.counted)
    journal.updating()
    with spans("update"):
        losses = learner.update(step)
    journal.updated(losses)


def train(
    settings: RunSettings | None = None,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    init_from: Path | None = None,
    listener: Listener | None = None,
    profile: str | None = None,
    root: Path = Path("runs"),
    report: Callable[[RunFolder, StopRequest], None] | None = None,
) -> TrainResult:
    """Train until the budget is used up.

    Args:
        settings: of the run. On resume None takes those of the run; others may differ in budgets and display only.
        out: the run folder; None: a fresh name under `root`.
        resume: a run folder to go on with.
        init_from: checkpoint or run folder whose policy to start from; counters and optimiser start afresh.
        listener: hears events; for display.
        profile: name of the profile, for the record.
        root: where runs live.
        report: makes what the run ends with, if `evaluation.final`; the run is not over before, and stays locked. It
            hears of signals from the second argument.

    Raises:
        Interrupted: somebody asked to stop; what is lost and how to go on is in the message.
        ConfigError, CheckpointError, StorageError, SimulatorError, …: see core/errors.py.
    """
    kept = out is not None and out.exists()  # a folder that is not ours to remove
    place = launched()
    if place is not None and place.rank:
        raise ConfigError("train() is worker 0's: the other processes of torchrun call worker.assist()")
    if resume is not None:
        settings = _resumed_settings(settings, resume)
        resolve_workers(settings, place)
        folder = RunFolder.resume(resume, keep=settings.keep)
    elif settings is None:
        raise ConfigError("there are no settings to train with", fix="name a profile, or a run to --resume")
    else:
        require_budget(settings)
        settings = replace(settings, workers=resolve_workers(settings, place))
        policy = None if init_from is None else _policy(init_from)
        folder = RunFolder.create(out, root=root, profile=profile, seed=settings.seed, keep=settings.keep)
    hear = _Telling(folder, listener)
    with (
        _forgotten(folder, hear, made=resume is None, kept=kept),
        folder,
        StopRequest() as stop,
        quiet_process(settings.threads),
    ):
        folder.beat("starting")
        if resume is None:
            folder.write_config(to_yaml(settings))
            folder.write_run(_facts(settings, profile, None if policy is None else policy.path))
        try:
            result = _run(folder, settings, stop, hear, place, table=report is not None and settings.evaluation.final)
        finally:
            hear.rest()
        if report is not None and settings.evaluation.final:
            # training is done, whatever happens to the report
            folder.beat("evaluating", episode=result.summary["episodes"], step=0, progress=1.0, **result.summary)
            report(folder, stop)
            for note in result.notes:  # before the table it was seen by those only who watched
                hear(Note(note))
        folder.beat("finished", progress=1.0, **result.summary)
        return result


@contextmanager
def _forgotten(folder: RunFolder, hear: _Telling, *, made: bool, kept: bool) -> Iterator[None]:
    """A run that was refused before it began leaves no folder in the way of the next try.

    Args:
        folder: of the run.
        hear: knows whether the run began.
        made: was the folder made into a run by us?
        kept: was it there, empty, before?
    """
    try:
        yield
    except BaseException:  # whatever it was, Ctrl-C among it
        if made and not hear.begun:
            with suppress(OSError):
                for name in ("config.yaml", "run.json", "status.json", "log.txt", ".lock"):
                    (folder.path / name).unlink(missing_ok=True)
                remove_tree(folder.path / _WORKERS)
                if not kept:
                    folder.path.rmdir()
        raise


def _run(
    folder: RunFolder, settings: RunSettings, stop: StopRequest, hear: Listener, place: Place | None, *, table: bool
) -> TrainResult:
    """From the files of a run folder to the end of its budget."""
    spans = Spans(enabled=settings.recording.spans)
    facts = recorded(folder.path, "init_from", "profile", "resumed", "versions")
    if not kernels_are_kept():
        folder.beat("compiling")
        hear(Note("compiling kernels once, which takes half a minute …"))
        hear(Beat({"phase": "compiling"}))
    chosen = _settled(settings, facts)
    with closing(_crew(folder, chosen, spans, stop, place)) as crew:
        if isinstance(crew, Crew):
            chosen = replace(chosen, device=device_of(chosen.device, crew.place)[0])
        simulator = make_simulator(settings, make_roads(settings), spans=spans)
        with closing(simulator), closing(make_env(settings, simulator=simulator, spans=spans)) as env:
            crew.begin()
            learner = make_learner(chosen, env.observation_spec, env.action_spec, group=crew.group)
            with closing(learner):
                # before the checkpoint is read: it leaves no trace in a fresh learner
                warm_up(settings, simulator, learner)
                crew.agree(learner.describe())
                done, start = _restore(folder, learner, facts, env, crew.size)
                planned = plan(settings, done=done.episodes, table=table)
                _announce(folder, settings, facts, (simulator.info, env.observation_spec), learner, done, planned, hear)
                journal = Journal(folder, settings, env.observation_spec, learner, spans, done, hear, crew)
                with closing(journal):
                    journal.boundary = learner.state() if done.episodes == 0 and crew.size == 1 else None
                    nothing_left = journal.spent
                    crew.hand_out([replace(one, episodes=done.episodes, over=nothing_left) for one in start])
                    with _guarded(folder, journal, crew, stop), without_surprises():
                        journal.begin()
                        run_loop(env, learner, journal, stop, spans, crew)
                    if not journal.over:
                        _stopped(folder, journal)
                    result = _finish(folder, settings, journal, stop)
                    hear(Finished(result.summary))
                    notes = _end_in_words(folder, settings, journal, learner, nothing_left=nothing_left)
                    for note in notes:
                        hear(Note(note))
                    return replace(result, notes=notes)


def _crew(
    folder: RunFolder, settings: RunSettings, spans: Spans, stop: StopRequest, place: Place | None
) -> Alone | Crew:
    """The workers of the run; those that are to be children are started here."""
    text = to_yaml(settings)
    if place is not None:
        return launched_crew(settings, text, place, spans=spans, stop=stop)
    if settings.workers == 1:
        return Alone()
    return spawned(settings, text, folder=folder.path / _WORKERS, spans=spans, stop=stop)


@contextmanager
def _guarded(folder: RunFolder, journal: Journal, crew: Alone | Crew, stop: StopRequest) -> Iterator[None]:
    """Whatever fails, the last boundary is saved; but when a number is not finite, its batch is."""
    try:
        with _explained(crew, stop):
            yield
    except (SimulatorError, AccountingError, RecycleError, WorkerError) as error:
        journal.save(judged=False)
        error.fix = _again(folder, error.fix)
        raise
    except NotFiniteError as error:
        dumped = folder.arrays(f"not_finite_episode_{journal.episode}", error.batch) if error.batch else None
        good = folder.checkpoints.find("latest")
        where = f"; its batch is in {dumped}" if dumped else ""
        raise NotFiniteError(
            f"{error.message} (episode {journal.episode}, step {journal.steps}){where}; "
            f"last good checkpoint: {good or 'none'}",
            fix=error.fix
            or "lower learner.learning_rate or learner.max_grad_norm, and start from that checkpoint with --init-from",
            batch=error.batch,
        ) from error
    except CudaGraphCaptureError:
        raise
    except BaseException:
        with suppress(StorageError, OSError):  # the first error is the one to show
            journal.save(judged=False)
        raise


@contextmanager
def _explained(crew: Alone | Crew, stop: StopRequest) -> Iterator[None]:
    """Whoever lost another worker says why that one went; and if all of them were asked to stop, that is why."""
    try:
        yield
    except LeftError:
        pass
    except WorkerError as error:
        if stop.requested():
            return
        found = crew.explained(error)
        if found is error:
            raise
        raise found from error


def _stopped(folder: RunFolder, journal: Journal) -> None:
    """Save the last boundary and say what is lost.

    Raises:
        Interrupted: always.
    """
    journal.save(judged=False)
    lost = f"{journal.steps} steps of episode {journal.episode} are dropped" if journal.steps else "nothing is lost"
    raise Interrupted(
        f"stopped: {lost}; all {journal.done.episodes} finished episodes are saved in {folder.path}",
        fix=_again(folder, None),
    )


def _again(folder: RunFolder, fix: str | None) -> str:
    command = f"opencda-marl run --resume {typed(folder.path)}"
    return f"{fix}; then continue with: {command}" if fix else f"continue with: {command}"


def _end_in_words(
    folder: RunFolder, settings: RunSettings, journal: Journal, learner: Learner, *, nothing_left: bool
) -> tuple[str, ...]:
    """What a person may not expect of the end: the clock, a budget that was used up, a policy that never learned.

    Where the clock ended the run, run.json must not promise an equal second one.
    """
    count = (journal.done.episodes, journal.done.env_steps)
    if journal.out_of_time:
        told = f"{stopped_by_the_clock(settings, *count)}: another run of this config ends where its own clock says"
        folder.write_run({**read_run(folder.path), "identity": told})
    if journal.out_of_time or nothing_left:
        spent, clock = journal.done.wall_s, journal.out_of_time
        return (used_up(settings, folder.path, *count, spent, by_clock=clock, nothing=nothing_left),)
    return (_UNLEARNED,) if learner.counters.updates_performed == 0 else ()


def _finish(folder: RunFolder, settings: RunSettings, journal: Journal, stop: StopRequest) -> TrainResult:
    journal.save()
    while journal.held_out.names and not stop.requested():
        folder.beat("evaluating")
        journal.held_out.finish()
    if stop.requested():
        raise Interrupted(
            f"stopped; training was done, and all {journal.done.episodes} episodes are saved in {folder.path}",
            fix=_again(folder, None),
        )
    lines = read_episodes(folder.path)
    recent = lines[-20:]
    ended = sum(line["vehicles"] for line in recent)
    summary = {
        "run_dir": str(folder.path),
        "episodes": journal.done.episodes,
        "env_steps": journal.done.env_steps,
        "training_s": journal.done.wall_s,
        "success_rate_last_20": sum(line["arrived"] for line in recent) / ended if ended else None,
        "best": str(best_checkpoint(folder.path)),
        "peak_memory_mib": peak_memory_mib(),
    }
    return TrainResult(folder.path, settings, lines[-1], summary)


def _resumed_settings(wanted: RunSettings | None, run: Path) -> RunSettings:
    """The run's settings with the budgets and display that are wanted now.

    Raises:
        ConfigError: something else differs.
    """
    stored = from_run_folder(run)
    if wanted is None:
        return stored
    changed = changes(stored, wanted)
    if changed:
        raise ConfigError(
            f"a resumed run keeps its settings, but these differ: {', '.join(changed)}",
            fix="change budgets (max_episodes, max_env_steps, max_minutes), simulator.gui, evaluation.final only; or "
            f"begin a new run with --init-from {typed(run)}",
        )
    require_budget(wanted)
    return wanted


def _policy(path: Path) -> Checkpoint:
    return read_checkpoint(best_checkpoint(path) if (path / "run.json").is_file() else path)


def _restore(
    folder: RunFolder, learner: Learner, facts: dict[str, Any], env: DrivingEnv, workers: int
) -> tuple[Done, list[Start]]:
    """Load the latest checkpoint and cut what lies beyond it; without one the run begins at its beginning.

    Returns:
        what is done, and where each worker begins.
    """
    if folder.checkpoints.find("latest") is None:
        folder.cut(0)
        if facts["init_from"] is None:
            return Done(), [Start()] * workers
        policy = _matching(_policy(Path(facts["init_from"])), env).state
        learner.load(policy, weights_only=True)
        shown = LearnerState(policy.tensors, policy.values)  # a policy needs no replay
        return Done(), [Start(state=shown, weights_only=True)] * workers
    found = _matching(folder.checkpoints.load("latest"), env)
    done = Done(**{item.name: found.extra[item.name] for item in fields(Done)})
    folder.cut(done.episodes)
    lines = len(read_episodes(folder.path))
    if lines != done.episodes:
        raise CheckpointError(
            f"{folder.path / 'episodes.jsonl'} has {lines} lines, but its checkpoint is that of episode "
            f"{done.episodes}",
            fix=f"put the file back; or begin a new run with --init-from {typed(folder.path)}",
        )
    states = parted(found.state, workers)
    learner.load(states[0])
    return done, [Start(state=state) for state in states]


def _matching(found: Checkpoint, env: DrivingEnv) -> Checkpoint:
    check_observation(found, env.observation_spec, fix="choose the same observation, or another checkpoint")
    return found


def _settled(settings: RunSettings, facts: dict[str, Any]) -> RunSettings:
    """What `auto` was found to mean when the run began; it does not change within a run."""
    chosen, own = facts.get("init", {}).get("update_mode"), settings.learner
    if not isinstance(own, NetworkSettings) or own.update_mode != "auto" or chosen in (None, "auto"):
        return settings
    return replace(settings, learner=replace(own, update_mode=chosen))


def _facts(settings: RunSettings, profile: str | None, init_from: Path | None) -> dict[str, Any]:
    """run.json of a fresh run."""
    return {
        "profile": profile,
        "algorithm": settings.algorithm,
        "seed": settings.seed,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "machine": describe_machine(),
        "git": git_commit(Path(__file__).resolve().parent),
        "hashes": {"config": config_hash(settings)},
        "workers": settings.workers,
        "threads": settings.threads,
        "identity": identity(settings),
        "init_from": None if init_from is None else str(init_from.resolve()),
        "resumed": [],
    }


def _announce(
    folder: RunFolder,
    settings: RunSettings,
    facts: dict[str, Any],
    world: tuple[SimulatorInfo, ObservationSpec],
    learner: Learner,
    done: Done,
    planned: str,
    hear: Listener,
) -> None:
    """The init line: to run.json, log.txt and the listener; what was noted is said once."""
    info, observation = world
    described = learner.describe()
    notes = [*info.notes, *([described.pop("note")] if "note" in described else [])]
    init = {
        "backend": info.backend,
        "simulator_versions": info.versions,
        "step_length": info.step_length,
        "observation": f"{observation.name} v{observation.version}",
        "algorithm": settings.algorithm,
        **({} if settings.workers == 1 else {"workers": settings.workers}),
        "threads": settings.threads,
        **described,
    }
    again = {"episode": done.episodes, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions()}
    resumed = [*facts["resumed"], again] if "init" in facts else facts["resumed"]
    folder.write_config(to_yaml(settings))
    folder.write_run(with_forms({**facts, "identity": identity(settings), "init": init, "resumed": resumed}, init))
    hear(Started(folder.path, init, done.episodes, planned))
    if described.get("acting_device") == "cpu" and (form := str(described.get("actor_form"))).startswith("torch ("):
        both = " and updates go" if str(described.get("update_passes")).startswith("torch (") else " goes"
        notes.append(f"acting{both} through torch, which is slower than C++: {form[7:-1]}")
    if settings.threads > cores():
        notes.append(f"threads: {settings.threads}, but there are {cores()} cores: that is slower than fewer threads")
    elif launched() is None and int(settings.workers) * settings.threads > cores() > 0:
        notes.append(f"workers: {settings.workers}, but there are {cores()} cores: that is slower than fewer workers")
    if settings.max_episodes is not None and settings.max_episodes % int(settings.workers):
        notes.append(f"max_episodes: workers drive in rounds, so there will be a multiple of {settings.workers}")
    if (unkept := why_not_kept()) is not None:
        notes.append(unkept)
    if done.episodes and (changed := changed_forms(facts, init, workers=int(settings.workers))):
        notes.append(f"computed in another form than before (see run.json): {', '.join(changed)}; {_BITS}")
    if facts["versions"] != versions():
        notes.append("versions differ from those that the run began with (see run.json): the last bits may differ")
    for note in notes:
        hear(Note(note))


@contextmanager
def without_surprises() -> Iterator[None]:
    """What was made at the start is not looked at by the garbage collector again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Telling:
    """Tells the listener what happens, and writes down in log.txt what there is to say about it."""

    def __init__(self, folder: RunFolder, listener: Listener | None) -> None:
        self._folder, self._listener = folder, listener
        self._speech = Speech()
        self.begun = False

    def __call__(self, event: TrainEvent) -> None:
        self.begun = self.begun or isinstance(event, Started)
        for line in self._speech(event):
            self._folder.log(line)
        if self._listener is not None:
            self._listener(event)

    def rest(self) -> None:
        """Write down what was not yet spoken of."""
        for line in self._speech.rest():
            self._folder.log(line)
