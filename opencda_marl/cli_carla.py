"""`opencda-marl carla-standin`, a test double of a CARLA server, and `parity`. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["carla_standin", "parity"]


def carla_standin(
    rpc_port: Annotated[int, typer.Option(min=0, max=65533, help="For requests; 0: a free one.")] = 2000,
    streaming_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0: a free one; default: the RPC port + 1.")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="What goes wrong, e.g. hang:get_map_data, die@tick:100; may be repeated.")
    ] = None,
    version: Annotated[str | None, typer.Option(help="That it says it has; default: the one of CARLA.")] = None,
    frame_delay: Annotated[float, typer.Option(min=0.0, help="[ms] between a tick's answer and its frame.")] = 0.0,
    rate: Annotated[float, typer.Option(min=1.0, max=1000.0, help="[1/s] frames of asynchronous mode.")] = 60.0,
    xodr: Annotated[Path | None, typer.Option(help="OpenDRIVE file of the first world; default: a straight.")] = None,
) -> None:
    """Serve as a CARLA server would, without CARLA: a test double that drives simple vehicles."""
    from opencda_marl.core.errors import ConfigError
    from opencda_marl.standin.process import Options, serve

    if rpc_port and streaming_port == rpc_port:
        raise ConfigError(f"--rpc-port and --streaming-port are both {rpc_port}", fix="leave --streaming-port out")
    code = serve(
        Options(
            rpc_port=rpc_port,
            streaming_port=streaming_port,
            faults=tuple(fault or ()),
            version=version or Options().version,
            frame_delay=frame_delay / 1e3,
            rate=rate,
            xodr=xodr,
        )
    )
    raise typer.Exit(code)


def parity(
    profile: Annotated[str, typer.Option("-t", "--profile", help="Of traffic, vehicles, server.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the profile.")] = None,
    policy: Annotated[str, typer.Option(help="A run, a checkpoint, or a controller.")] = "full_speed",
    seed: Annotated[int | None, typer.Option(min=0, help="Of the traffic; default: the first held-out one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the tracks and the plot.")] = Path("runs/parity"),
    config_root: Annotated[Path | None, typer.Option(help="Folder of profiles; default: the bundled ones.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout.")] = False,
) -> None:
    """The same traffic and policy in SUMO and in CARLA: where they differ, as one table and one plot."""
    from opencda_marl.cli_answers import emit, quiet_stdout
    from opencda_marl.config import load_profile
    from opencda_marl.display import make_console
    from opencda_marl.display_results import show_parity
    from opencda_marl.tools.parity import parity as measure

    loaded = load_profile(profile, config_root=config_root, overrides=overrides or ())
    with quiet_stdout(as_json):
        answer = measure(policy, loaded.settings, folder=out, profile=loaded.name, seed=seed)
    if as_json:
        emit(answer)
    else:
        show_parity(make_console(stderr=False), answer)
