"""Errors, exit codes, `--json`, and what the light commands must not import."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from said import ROOT, Said, python

from opencda_marl import __version__
from opencda_marl.cli_answers import answering, emit, quiet_stdout
from opencda_marl.core import errors
from opencda_marl.core.errors import ConfigError, Interrupted, OpenCDAError

Typed = Callable[..., Said]
QUICKSTART = "sumo-marl/intersection/quickstart"

_LIGHT = [
    ["--help"],
    ["--version"],
    ["run", "--help"],
    ["list"],
    ["config", "show", "-t", QUICKSTART],
    ["config", "reference"],
    ["run", "-t", "sumo-marl/intersection/quickstar"],
    ["run", "-t", QUICKSTART, "sed=1"],
    ["run", "-t", QUICKSTART, "context.encoder=deepset"],
    ["bench", "env", "-t", "nowhere"],
    ["runs", "list", "--root", "nowhere"],
]


def test_light_commands_load_nothing_heavy() -> None:
    """Loading torch or numba takes seconds; `--help`, `config show` and a config error answer at once."""
    script = f"""
import contextlib, io, sys
from opencda_marl.cli import main
for arguments in {_LIGHT!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments)
        except SystemExit:
            pass
    heavy = {{"torch", "numba", "libsumo", "traci", "matplotlib", "tensorboard"}} & {{*sys.modules}}
    assert not heavy, (arguments, heavy)
"""
    done = python("-c", script)
    assert done.code == 0, done.err


def test_version_and_help(typed: Typed) -> None:
    assert typed("--version") == Said(0, f"opencda-marl {__version__}\n", "")
    for arguments in (["--help"], ["-h"], ["run", "-h"], ["config", "--help"], ["runs", "--help"]):
        said = typed(*arguments)
        assert said.code == 0
        assert "Usage" in said.out
    assert "quickstart" in typed("--help").out


def test_a_config_error_is_a_message_and_exit_code_2(typed: Typed) -> None:
    said = typed("run", "-t", QUICKSTART, "sed=1")
    assert said.code == 2
    assert said.out == ""
    assert said.err == "error: argument 'sed=1': unknown key 'sed'\n  fix: did you mean 'seed'?\n"


def test_an_error_under_json_is_one_object(typed: Typed) -> None:
    said = typed("run", "-t", QUICKSTART, "sed=1", "--json")
    assert said.code == 2
    assert said.answer == {
        "error": "argument 'sed=1': unknown key 'sed'",
        "fix": "did you mean 'seed'?",
        "exit_code": 2,
    }
    said = typed("run", "--nonsense", "--json")
    assert said.code == 2
    assert said.answer["exit_code"] == 2
    assert "--nonsense" in said.err


_ERRORS = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, OpenCDAError) and found is not OpenCDAError
]


@pytest.mark.parametrize("kind", _ERRORS, ids=[kind.__name__ for kind in _ERRORS])
def test_every_error_has_its_exit_code(kind: type[OpenCDAError], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, answering(True):
        raise kind("what was wrong", fix="what to do [not markup]")
    out, err = capfd.readouterr()
    assert stop.value.code == kind.exit_code
    assert Said(0, out, err).answer == {
        "error": "what was wrong",
        "fix": "what to do [not markup]",
        "exit_code": kind.exit_code,
    }
    assert "what was wrong" in err
    assert "what to do [not markup]" in err
    assert "Traceback" not in err


def test_exit_codes_are_those_of_the_table_in_errors() -> None:
    text = errors.__doc__ or ""
    assert len(_ERRORS) >= 13
    for kind in _ERRORS:
        line = next(line for line in text.splitlines() if kind.__name__ in line)
        assert str(kind.exit_code) in line.split()


def test_a_wish_to_stop_is_not_called_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, answering(False):
        raise Interrupted("stopped: nothing is lost", fix="continue with: x")
    assert stop.value.code == 130
    assert capfd.readouterr().err == "stopped: nothing is lost\ncontinue with: x\n"


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-t", QUICKSTART, "--out"],
        ["run", "-t", QUICKSTART, "--init-from"],
        ["run", "--resume"],
        ["evaluate"],
        ["config", "show", "-t", QUICKSTART, "--config-root"],
        ["report"],
    ],
)
def test_a_path_that_is_too_long_is_said(command: list[str]) -> None:
    """Longer than a file system takes for one name."""
    done = python("-m", "opencda_marl.cli", *command, "x" * 300)
    assert done.code in (2, 20, 21)
    assert "error: " in done.err
    assert "Traceback" not in done.err


def test_defects_keep_their_traceback() -> None:
    script = "from opencda_marl.cli_answers import answering\nwith answering(False):\n    {}['missing']"
    done = python("-c", script)
    assert done.code == 1
    assert "KeyError: 'missing'" in done.err
    assert "Traceback" in done.err


@pytest.mark.parametrize("module", ["typer", "rich.console", "pydantic", "opencda_marl.config", "yaml"])
def test_ctrl_c_while_things_load_is_one_line(module: str) -> None:
    script = f"""
import os, signal, sys

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Impatient())
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
from opencda_marl.cli import main
main(["config", "show", "-t", {QUICKSTART!r}])
"""
    done = python("-c", script)
    assert (done.code, done.out) == (130, "")
    assert done.err.strip() == "interrupted"


def test_the_door_loads_nothing_before_it_listens() -> None:
    done = python(
        "-c", "import sys; import opencda_marl.cli; sys.exit('typer' in sys.modules or 'rich' in sys.modules)"
    )
    assert done.code == 0


def test_long_lines_are_not_folded_in_a_pipe(capfd: pytest.CaptureFixture[str]) -> None:
    message = "word " * 200
    with pytest.raises(SystemExit), answering(False):
        raise ConfigError(message.strip(), fix=message.strip())
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_with_json_all_other_output_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_stdout(True):
        print("from Python")  # noqa: T201 - the very thing under test
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    emit({"a": 1})
    out, err = capfd.readouterr()
    assert out == '{"a": 1}\n'
    assert "from Python" in err
    assert "from a child" in err


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), quiet_stdout(True):
        raise KeyError
    print("again")  # noqa: T201
    assert capfd.readouterr().out == "again\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    for command in ("config reference", f"config show -t {QUICKSTART}", f"config show -t {QUICKSTART} --json"):
        pipe = f"{shlex.quote(sys.executable)} -m opencda_marl.cli {command} | true"
        done = subprocess.run(["bash", "-c", pipe], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr == "", command


def test_no_colours_in_a_pipe(typed: Typed) -> None:
    for arguments in (["list"], ["--help"], ["run"]):
        said = typed(*arguments)
        assert "\x1b" not in said.out + said.err


def test_the_other_doors_lead_to_the_same_commands() -> None:
    wanted = python("-m", "opencda_marl.cli", "run", "-t", "nowhere")
    assert wanted.code == 2
    assert python("opencda.py", "-t", "nowhere", "--marl") == wanted
    assert python("opencda.py", "--marl", "-t", "nowhere") == wanted
    tool = Path(sys.executable).with_name("opencda-marl")
    if tool.exists():
        done = subprocess.run([tool, "run", "-t", "nowhere"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (2, wanted.err)


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    program = f"{shlex.quote(sys.executable)} -m opencda_marl.cli"
    return subprocess.run(
        ["bash", "-c", command.replace("PROGRAM", program)], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("where", [">&-", ">/dev/full"])
def test_a_stdout_that_takes_nothing_is_an_error_of_the_disk(where: str) -> None:
    done = _shell(f"PROGRAM config show -t {QUICKSTART} --json {where}")
    assert done.returncode == 21
    assert done.stderr.startswith("error: stdout cannot be written: ")
    assert "Traceback" not in done.stderr
    done = _shell(f"PROGRAM config show -t {QUICKSTART} >/dev/full")
    assert done.returncode == 21
    assert "Traceback" not in done.stderr


def test_a_stdout_without_the_signs_gets_others() -> None:
    done = _shell("PYTHONIOENCODING=latin-1 PROGRAM run --help && PYTHONIOENCODING=ascii PROGRAM config reference")
    assert done.returncode == 0
    assert done.stderr == ""
