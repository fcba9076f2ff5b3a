"""The commands. Nothing is computed here: each command calls its owner, and imports it only then.

Results go to stdout, errors to stderr with the exit code of `core.errors`. With `--json` stdout holds exactly one
line, an object; everything else, whoever writes it, goes to stderr.

Longer than other modules, because it is a list: one short function a command, most of it their options and help.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opencda_marl import __version__
from opencda_marl.cli_answers import answering, emit, quiet_stdout
from opencda_marl.cli_benchmark import benchmark, report
from opencda_marl.cli_carla import carla_standin, parity
from opencda_marl.cli_docker import docker_app
from opencda_marl.cli_matrix import matrix_app
from opencda_marl.cli_tables import name_tables
from opencda_marl.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from opencda_marl.config import Profile
    from opencda_marl.settings.run import RunSettings

__all__ = ["app", "start"]

_FIRST = "Start with: opencda-marl run -t sumo-marl/intersection/quickstart"
app = typer.Typer(
    help="Trains cooperative driving policies, fast and reproducibly.",
    epilog=_FIRST,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long names of options off
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
config_app = typer.Typer(help="Profiles: what is set, what can be set, copies of one's own.", no_args_is_help=True)
runs_app = typer.Typer(help="Run folders: what there is, what can go.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(runs_app, name="runs")
app.add_typer(matrix_app, name="matrix")
app.add_typer(docker_app, name="docker-carla")
app.command()(benchmark)
app.command()(report)
app.command("carla-standin")(carla_standin)
app.command("parity")(parity)

ProfileName = Annotated[str, typer.Option("-t", "--profile", help="Profile, e.g. sumo-marl/intersection/quickstart.")]
MaybeProfile = Annotated[str | None, typer.Option("-t", "--profile", help="Profile; see 'opencda-marl list profiles'.")]
ConfigRoot = Annotated[Path | None, typer.Option(help="Folder of profiles instead of the bundled one.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Settings, e.g. learner.epochs=2.")]
KeepRuns = Annotated[bool, typer.Option("--keep", help="Leave the run folders there.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout's last line, the rest on stderr.")]
Runs = Annotated[Path, typer.Option("--root", help="Folder of runs.")]


def _one_of(words: Sequence[str], wrong: str, command: str) -> Callable[[str | None], str | None]:
    """A check of an argument as the command line is read: the word itself, or a ConfigError with all words."""

    def check(word: str | None) -> str | None:
        if word is None or word in words:
            return word
        raise ConfigError(f"{wrong} {word!r}", fix=f"{command} and one of: {', '.join(words)}")

    return check


_KINDS = ("profiles", "learners", "encoders", "controllers", "rewards", "observations", "policies")
_MEASURED = ("env", "act", "update", "run")

Kind = Annotated[
    str | None,
    typer.Argument(
        metavar="KIND",
        help=f"One of {', '.join(_KINDS)}; all of them when left out.",
        callback=_one_of(_KINDS, "there is no list of", "opencda-marl list"),
    ),
]
Measured = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        help=f"What to measure: {', '.join(_MEASURED)}.",
        callback=_one_of(_MEASURED, "bench does not measure", "opencda-marl bench"),
    ),
]


def start(arguments: Sequence[str] | None) -> None:
    """Read the command line and do what it says; exits with 0, or with the code of what went wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal that has no `…` is no reason to stop
    from opencda_marl.display import as_typed, program

    given = list(sys.argv[1:] if arguments is None else arguments)
    app.info.epilog = as_typed(_FIRST)
    with answering("--json" in given):
        app(args=given, prog_name=program())


def _console(as_json: bool) -> Console:
    from opencda_marl.display import make_console

    return make_console(stderr=as_json)


def _load(name: str, config_root: Path | None, overrides: Sequence[str] | None) -> Profile:
    from opencda_marl.config import load_profile

    return load_profile(name, config_root=config_root, overrides=overrides or (), tables=name_tables())


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opencda-marl {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="The version.")
    ] = False,
) -> None:
    return


@app.command()
def run(
    overrides: Overrides = None,
    profile: MaybeProfile = None,
    config_root: ConfigRoot = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: a new one in runs/.")] = None,
    init_from: Annotated[Path | None, typer.Option(help="Checkpoint, run or bundled:NAME to begin with.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to go on with; alone, or with budgets.")] = None,
    gui: Annotated[bool, typer.Option("--gui", help="Watch in sumo-gui (slow).")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy, or go on with a run."""
    from opencda_marl.config import from_run_folder, require_budget
    from opencda_marl.core.torchrun import launched
    from opencda_marl.policies.catalogue import BUNDLED, find_bundled

    place = launched()
    if place is not None and place.rank:  # worker 0 has read the command line, and says what to do
        from opencda_marl.worker import assist

        assist(place)
        return

    console = _console(as_json)
    flags = [*([f"seed={seed}"] if seed is not None else []), *(["simulator.gui=true"] if gui else [])]
    wanted = [*flags, *(overrides or ())]
    if resume is not None:
        if profile is not None or seed is not None or out is not None or init_from is not None:
            raise ConfigError(
                "--resume goes on with a run as it is",
                fix="leave -t, --seed, --out and --init-from out, or leave --resume out",
            )
        settings = from_run_folder(resume, overrides=wanted)
    elif profile is None:
        raise ConfigError("what is to be trained?", fix="name a profile: -t sumo-marl/intersection/quickstart")
    else:
        loaded = _load(profile, config_root, wanted)
        settings, profile = loaded.settings, loaded.name
        for line in loaded.ignored:
            _console(as_json=True).print(f"note: {line}", markup=False, soft_wrap=True)
    require_budget(settings)
    if init_from is not None and str(init_from).startswith(BUNDLED):
        init_from = find_bundled(str(init_from))
    with quiet_stdout(as_json):
        answer = _train(console, settings=settings, out=out, resume=resume, init_from=init_from, profile=profile)
    if as_json:
        emit(answer)


def _train(console: Console, **wanted: Any) -> dict[str, Any]:
    from opencda_marl.display import TrainingDisplay, unheard
    from opencda_marl.display_results import report_on

    with unheard(console):
        console.print("loading …", style="dim")
    from opencda_marl.train import train

    with TrainingDisplay(console) as display:
        result = train(**wanted, listener=display, report=lambda folder, stop: report_on(console, folder, stop))
    if not result.settings.evaluation.final:
        from opencda_marl.core.verdict import in_words
        from opencda_marl.report import next_line

        with unheard(console):
            console.print(f"{in_words([])[0]}: what is typed next does that", markup=False, soft_wrap=True)
            console.print(next_line(result.run_dir), markup=False, soft_wrap=True)
    return {**result.last, "run_dir": str(result.run_dir)}


@app.command()
def evaluate(
    policy: Annotated[str, typer.Argument(help="Run, checkpoint, bundled:NAME, or a controller; see 'list'.")],
    overrides: Overrides = None,
    profile: MaybeProfile = None,
    config_root: ConfigRoot = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="A:B", help="Held-out traffic, half-open; one episode a seed.")
    ] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Fewer than there are seeds.")] = None,
    compare: Annotated[
        bool, typer.Option(help="Let random, full_speed and priority drive the same traffic, and say who is better.")
    ] = True,
    animate: Annotated[
        Path | None, typer.Option(help="Twenty seconds of the first episode in motion: .gif, or a strip as .png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Drive held-out traffic without learning."""
    from opencda_marl.config import from_run_folder
    from opencda_marl.core.verdict import RIVALS
    from opencda_marl.display_results import following, show_evaluation
    from opencda_marl.env import CONTROLLERS

    console = _console(as_json)
    chosen = None if seeds is None else _seeds(seeds)
    settings, name = None, None
    if profile is not None:
        loaded = _load(profile, config_root, overrides)
        settings, name = loaded.settings, loaded.name
    elif overrides and "=" in policy:
        raise ConfigError(f"{policy!r} is no policy", fix="opencda-marl evaluate RUN key=value")
    from opencda_marl.evaluate import evaluate as drive
    from opencda_marl.evaluate import find_policy

    if settings is None and overrides:
        folder = find_policy(policy).folder
        if folder is None:
            raise ConfigError(f"{policy} needs a profile to drive in", fix="name one with -t")
        settings = from_run_folder(folder, overrides=overrides)
    tracks = None if animate is None else _tracks_of(animate)
    with quiet_stdout(as_json), following(console) as progress:
        answer = drive(
            policy,
            settings=settings,
            profile=name,
            seeds=chosen,
            episodes=episodes,
            progress=lambda done, total: progress("held-out traffic", done, total),
            trajectory=tracks,
            rivals=RIVALS if compare and policy not in CONTROLLERS.targets() else (),
        )
    if animate is not None and tracks is not None:
        _animate(policy, settings, tracks, animate)
        answer = {**answer, "animation": str(animate)}
    if as_json:
        emit(answer)
    else:
        show_evaluation(console, answer)


def _tracks_of(picture: Path) -> Path:
    """Where the tracks lie until the picture is drawn."""
    from opencda_marl.core.files import writing

    if picture.suffix.lower() not in (".gif", ".png"):
        raise ConfigError(f"{picture} is neither a GIF nor a PNG", fix="end its name in .gif or .png")
    with writing(picture):
        picture.parent.mkdir(parents=True, exist_ok=True)
    return picture.with_suffix(".safetensors")


def _animate(policy: str, settings: RunSettings | None, tracks: Path, out: Path) -> None:
    """The picture takes the place of the tracks that it was made from."""
    from safetensors.numpy import load_file

    from opencda_marl.config import from_run_folder
    from opencda_marl.evaluate import find_policy
    from opencda_marl.report import animate_tracks

    folder = find_policy(policy).folder
    if settings is None and folder is not None:
        settings = from_run_folder(folder)
    if settings is not None:
        animate_tracks(settings, load_file(tracks), out)
    tracks.unlink()


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    written = colon and all(re.fullmatch(r"[0-9]{1,10}", part) for part in (first, last))
    if not written or not int(first) < int(last) <= 2**32:
        raise ConfigError(f"--seeds {text} is not understood", fix="write A:B with A < B <= 2**32, e.g. 9000:9030")
    return range(int(first), int(last))


@config_app.command("show")
def config_show(
    overrides: Overrides = None,
    profile: MaybeProfile = None,
    config_root: ConfigRoot = None,
    from_run: Annotated[Path | None, typer.Option("--run", help="A run's settings instead of a profile's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every setting of a profile, and the file and line that each comes from."""
    from opencda_marl.config import config_hash, from_run_folder, to_yaml
    from opencda_marl.config_check import to_tree

    if (profile is None) == (from_run is None):
        raise ConfigError("which settings?", fix="-t PROFILE, or --run RUN")
    sources, ignored = None, tuple[str, ...]()
    if from_run is not None:
        settings, where = from_run_folder(from_run, overrides=overrides or ()), f"run {from_run}"
    else:
        loaded = _load(profile or "", config_root, overrides)
        settings, where = loaded.settings, f"{loaded.name} in {loaded.root}"
        sources, ignored = loaded.sources, loaded.ignored
    if as_json:
        emit({"settings": to_tree(settings), "hash": config_hash(settings), "ignored": list(ignored)})
        return
    for line in (f"{where}; hash {config_hash(settings)}", *ignored):
        typer.echo(f"# {line}")
    typer.echo(to_yaml(settings, sources), nl=False)


@config_app.command("export")
def config_export(
    folder: Annotated[Path, typer.Argument(help="Made when missing; files that are there stay as they are.")],
    as_json: AsJson = False,
) -> None:
    """Copy the bundled profiles, to change them and use them with --config-root."""
    from opencda_marl.config import export_root
    from opencda_marl.core.run_folder import typed
    from opencda_marl.core.speech import counted

    written = export_root(folder)
    if as_json:
        emit({"folder": str(folder), "written": [str(path) for path in written]})
        return
    for path in written:
        typer.echo(str(path))
    said = f"{counted(len(written), 'file')} written. Next: opencda-marl list profiles --config-root {typed(folder)}"
    _console(False).print(said, markup=False, soft_wrap=True)


@config_app.command("reference")
def config_reference(
    find: Annotated[str, typer.Argument(help="Only keys that contain this, or an algorithm's settings.")] = "",
    as_json: AsJson = False,
) -> None:
    """Everything that can be set: key, value, default, meaning; settings of learners with their algorithms."""
    from opencda_marl.config_reference import rows
    from opencda_marl.display import show_table

    found = [row for row in rows() if find in row.key or find in row.algorithms]
    if not found:
        near = get_close_matches(find, [word for row in rows() for word in (*row.key.split("."), *row.algorithms)], 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"no setting has {find!r} in its name{meant}", fix="all of them: opencda-marl config reference"
        )
    if as_json:
        names = ("key", "kind", "default", "about", "algorithms")
        emit([{"value" if name == "kind" else name: getattr(row, name) for name in names} for row in found])
        return
    console = _console(False)
    for index, (algorithms, group) in enumerate(groupby(found, key=lambda row: row.algorithms)):
        if index:
            console.print()
        cells = [[row.key, row.default, row.kind, row.about] for row in group]
        show_table(console, ("key", "default", "value", "meaning"), cells, title=", ".join(algorithms), text=4)


@app.command("list")
def list_things(
    what: Kind = None,
    config_root: ConfigRoot = None,
    as_json: AsJson = False,
) -> None:
    """What can be chosen by name."""
    from opencda_marl.config import list_profiles
    from opencda_marl.display import show_table
    from opencda_marl.policies.catalogue import BUNDLED, about_bundled, bundled_names

    tables = {table.group.rpartition(".")[2]: table for table in name_tables().values()}
    found = {"profiles": list_profiles(config_root)} if what in (None, "profiles") else {}
    for kind, table in tables.items():
        if what in (None, kind):
            found[kind] = [(name, table.about(name)) for name in sorted(table.targets())]
    if what in (None, "policies"):
        found["policies"] = [(f"{BUNDLED}{name}", about_bundled(name)) for name in bundled_names()]
    if as_json:
        emit({kind: [{"name": name, "about": about} for name, about in rows] for kind, rows in found.items()})
        return
    for kind, rows in found.items():
        show_table(_console(False), (kind, ""), [[name, about] for name, about in rows], text=2)
        typer.echo("")


@app.command()
def describe(
    profile: ProfileName, overrides: Overrides = None, config_root: ConfigRoot = None, as_json: AsJson = False
) -> None:
    """What a vehicle sees, does and is rewarded for, with units."""
    from opencda_marl.display_results import show_description
    from opencda_marl.tools.describe import describe as describe_settings

    answer = describe_settings(_load(profile, config_root, overrides).settings)
    if as_json:
        emit(answer)
    else:
        show_description(_console(False), answer)


@runs_app.command("list")
def runs_list(root: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """Run folders; the one that was last written to comes last."""
    from opencda_marl.display_results import show_runs
    from opencda_marl.tools.runs import list_runs

    rows = list_runs(root)
    if as_json:
        emit({"root": str(root), "runs": rows})
    else:
        show_runs(_console(False), rows, root)


@runs_app.command("export")
def runs_export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run (the checkpoint of its final table, else its best), or a checkpoint."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make.")],
    about: Annotated[str, typer.Option(help="A line on it, for lists.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a policy alone: what acting needs, without optimiser, stored rows and replay.

    Of a run it is the checkpoint that its final table is about; without a table the best one.
    """
    from opencda_marl.core.run_folder import typed
    from opencda_marl.policies.export import export_policy

    with quiet_stdout(as_json):
        answer = export_policy(source, out, about=about, replacing=force)
    if as_json:
        emit(answer)
        return
    said = f"{typed(out)}: {answer['bytes'] / 1024:.0f} KiB. Next: opencda-marl evaluate {typed(out)} --seeds 9000:9030"
    _console(False).print(said, markup=False, soft_wrap=True)


@runs_app.command("clean")
def runs_clean(
    runs: Annotated[list[Path] | None, typer.Argument(help="Exactly these; else those without a checkpoint.")] = None,
    root: Runs = Path("runs"),
    keep: Annotated[int | None, typer.Option(min=0, help="All but so many of the newest ones instead.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only listed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove run folders; lists what would go unless --yes is given. A running one never goes."""
    from opencda_marl.display_results import show_runs
    from opencda_marl.tools.runs import removable, remove

    rows = removable(root, named=runs or (), keep=keep)
    if yes:
        for row in rows:
            remove(Path(row["run"]))
    if as_json:
        emit({"removed" if yes else "would_remove": [row["run"] for row in rows]})
        return
    show_runs(_console(False), rows, root)
    if rows:
        typer.echo("removed" if yes else "nothing is removed yet; repeat with --yes to remove these")


@app.command()
def profile(
    name: ProfileName,
    overrides: Overrides = None,
    config_root: ConfigRoot = None,
    against: Annotated[Path | None, typer.Option(help="An older .pstats file of the same profile.")] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for what is found; default: in runs/.")] = None,
    keep: KeepRuns = False,
    as_json: AsJson = False,
) -> None:
    """Where the time of one episode goes, and whether the figures can be trusted."""
    from opencda_marl.display_results import show_profile
    from opencda_marl.tools.profile import profile as measure

    loaded = _load(name, config_root, overrides)
    with quiet_stdout(as_json):
        answer = measure(
            loaded.name,
            folder=out or _new_folder("profile"),
            config_root=config_root,
            overrides=overrides or (),
            against=against,
            keep=keep,
        )
    if as_json:
        emit(answer)
    else:
        show_profile(_console(False), answer)
    raise typer.Exit(0 if answer["identical_summary"] else 1)


@app.command()
def bench(
    what: Measured,
    overrides: Overrides = None,
    profile: MaybeProfile = None,
    config_root: ConfigRoot = None,
    vehicles: Annotated[int | None, typer.Option(min=1, max=500, help="On the crossing at once; default 25.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Of torch; default the profile's.")] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Whose updates, after commas: straightforward, sb3, torchrl (extra: bench)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a step, an action, an update or a whole run costs, beside a floor measured in turns with it."""
    from opencda_marl.display_results import show_bench
    from opencda_marl.tools.bench import bench as measure
    from opencda_marl.tools.bench import default_profile

    rivals = [rival.strip() for rival in (against or "").split(",") if rival.strip()]
    name = _load(profile or default_profile(rivals), config_root, overrides).name
    with quiet_stdout(as_json):
        answer = measure(
            what,
            name=name,
            config_root=config_root,
            overrides=overrides or (),
            vehicles=vehicles,
            threads=threads,
            against=rivals,
        )
    if as_json:
        emit(answer)
    else:
        show_bench(_console(False), answer)


@app.command("verify-resume")
def verify_resume(
    profile: ProfileName,
    overrides: Overrides = None,
    config_root: ConfigRoot = None,
    out: Annotated[Path | None, typer.Option(help="New folder for what is found; default: in runs/.")] = None,
    keep: KeepRuns = False,
    as_json: AsJson = False,
) -> None:
    """Kill a run, resume it, and compare it bit for bit with one that was left alone."""
    from opencda_marl.display_results import show_verification
    from opencda_marl.tools.verify_resume import verify_resume as verify

    loaded = _load(profile, config_root, overrides)
    folder = out or _new_folder("verify-resume")
    with quiet_stdout(as_json):
        answer = verify(loaded.name, folder=folder, config_root=config_root, overrides=overrides or (), keep=keep)
    if as_json:
        emit(answer)
    else:
        show_verification(_console(False), answer)
    raise typer.Exit(0 if answer["exact"] else 1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Is everything here that training needs? Each failure comes with its fix."""
    from opencda_marl.display_results import show_checks
    from opencda_marl.tools.doctor import exit_code, inspect, summary

    with quiet_stdout(as_json):
        checks = inspect()
    code = exit_code(checks)
    if as_json:
        emit({"checks": checks, "ok": code == 0})
    else:
        show_checks(_console(False), checks)
        typer.echo(summary(checks))
    raise typer.Exit(code)


def _new_folder(what: str) -> Path:
    return Path("runs") / f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
