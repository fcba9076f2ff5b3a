"""A stand-in whose ports cannot be had says so and ends, as a CARLA server does."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from opencda_marl.cli_commands import app
from opencda_marl.core.errors import ConfigError
from opencda_marl.standin.process import CRASHED, Options, serve


def test_ports_that_cannot_be_had_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        taken, free = other.getsockname()[1], trial.getsockname()[1]
        trial.close()
        for rpc, streaming in ((free, free), (taken, free), (free, taken)):
            assert serve(Options(rpc_port=rpc, streaming_port=streaming, secondary_port=0)) == CRASHED
            assert "bind: Address already in use" in capsys.readouterr().out


def test_one_port_for_both_is_refused() -> None:
    done = CliRunner().invoke(app, ["carla-standin", "--rpc-port", "27200", "--streaming-port", "27200"])
    assert isinstance(done.exception, ConfigError)
    assert "--rpc-port and --streaming-port are both 27200" in str(done.exception)
