"""`opencda-marl docker-carla`: CARLA servers in containers for the launcher to restart. Nothing is computed here."""

from __future__ import annotations

from typing import Annotated

import typer

from opencda_marl.cli_answers import emit

__all__ = ["docker_app"]

docker_app = typer.Typer(help="CARLA in Docker: one container for each slot of a matrix.", no_args_is_help=True)

Port = Annotated[int, typer.Option("--rpc-port", min=1024, max=65533, help="RPC port; slot k: 2000 + 10 k.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout's last line, the rest on stderr.")]


def _answer(said: str, port: int, as_json: bool) -> None:
    from opencda_marl.launch.docker import container_facts

    if as_json:
        emit({"done": said, **container_facts(port)})
    else:
        typer.echo(said)


@docker_app.command("start")
def docker_start(
    rpc_port: Port = 2000,
    streaming_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0: a free one; default: the RPC port + 1.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Number or UUID of the card; default: all.")] = None,
    image: Annotated[str | None, typer.Option(help="Another image of CARLA 0.9.16.")] = None,
    as_json: AsJson = False,
) -> None:
    """Start the container of a port, or say that it is there."""
    from opencda_marl.launch.docker import IMAGE, start

    _answer(start(rpc_port, streaming_port=streaming_port, gpu=gpu, image=image or IMAGE), rpc_port, as_json)


@docker_app.command("stop")
def docker_stop(
    rpc_port: Port = 2000,
    remove: Annotated[bool, typer.Option("--remove", help="The container, too: the next start makes it anew.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the container of a port."""
    from opencda_marl.launch.docker import stop

    _answer(stop(rpc_port, remove=remove), rpc_port, as_json)


@docker_app.command("status")
def docker_status(rpc_port: Port = 2000, as_json: AsJson = False) -> None:
    """How the container of a port is, and whether CARLA answers in it."""
    from opencda_marl.launch.docker import status

    _answer(status(rpc_port), rpc_port, as_json)
