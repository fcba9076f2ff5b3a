"""`opencda-marl carla-standin`: a test double of a CARLA server. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["carla_standin"]


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
    from opencda_marl.standin.process import Options, serve

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
