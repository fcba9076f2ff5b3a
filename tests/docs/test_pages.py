"""The pages: links lead somewhere, commands parse, snippets run, tables are up to date."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from opencda_marl.cli_commands import app
from opencda_marl.config_reference import updated

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_COMMAND = re.compile(r"(?:opencda-marl|python -m opencda_marl\.cli|python opencda\.py)(?: .*)?")
_CODE = re.compile(r"^(```|~~~)(\w*)\n(.*?)^\1", re.M | re.S)


def _blocks(text: str) -> list[tuple[str, str]]:
    """Fenced blocks as (language, text), then indented ones as ("", text)."""
    fenced = [(match[2], match[3]) for match in _CODE.finditer(text)]
    rest = _CODE.sub("", text)
    indented = re.findall(r"(?:^(?: {4}).*\n)+", rest, re.M)
    return [*fenced, *(("", re.sub(r"^ {4}", "", block, flags=re.M)) for block in indented)]


def _commands(text: str) -> list[str]:
    """Whole commands of ours: lines of blocks, and code inside sentences. Synopses with … [ ] | are not commands."""
    lines = [
        line for language, block in _blocks(text) if language not in ("python", "yaml") for line in block.splitlines()
    ]
    inline = re.findall(r"`([^`\n]+)`", _CODE.sub("", text))
    found = []
    for line in [*lines, *inline]:
        line = line.split("  #")[0].split(" && ")[-1].strip().removeprefix("$ ")
        match = _COMMAND.search(line) if line.startswith(("opencda-marl", "python ", "pixi run python ")) else None
        if match and not re.search(r"[…|]|\[-|\[k", match[0]):
            found.append(match[0])
    return found


def _slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "").strip().lower()))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "mailto:")), target
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {_slug(heading) for heading in headings}, f"{page.name}: {target}"


def _parse(arguments: list[str]) -> None:
    """Parse a command line as the program would, without doing anything; raises on what it would refuse."""
    from typer.main import get_command

    command: Any = get_command(app)
    while True:
        context = command.make_context(command.name or "opencda-marl", list(arguments), resilient_parsing=False)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return
        _, command, arguments = command.resolve_command(context, rest)


_SHOWN = sorted({line for page in PAGES for line in _commands(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("line", _SHOWN)
def test_commands_parse(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "opencda-marl":
        arguments = words[1:]
    elif words[:3] == ["python", "-m", "opencda_marl.cli"]:
        arguments = words[3:]
    else:
        arguments = ["run", *(word for word in words[2:] if word != "--marl")]
    arguments = ["1" if word == "N" else word for word in arguments]
    if re.fullmatch(r"opencda-marl( [a-z-]+){1,2}", line):  # the mere name of a command, or a whole one
        with pytest.raises(typer.Exit):
            _parse([*arguments, "--help"])
    elif arguments and arguments != ["--version"] and not {"--help", "-h"} & {*arguments}:
        _parse(arguments)


def test_the_finder_of_commands_finds_and_the_parser_refuses() -> None:
    text = (
        "Type `opencda-marl runs list`, or\n\n    opencda-marl run -t X seed=3\n\nbut `opencda-marl run […]` is not.\n"
    )
    assert _commands(text) == ["opencda-marl run -t X seed=3", "opencda-marl runs list"]
    _parse(["runs", "list"])
    _parse(["run", "-t", "X", "seed=3"])
    for wrong in (
        ["rnu"],
        ["run", "--nope"],
        ["runs", "lst"],
        ["bench", "nothing"],
        ["evaluate"],
        ["bench", "env", "--vehicles", "x"],
    ):
        with pytest.raises(Exception, match=r".+"):
            _parse(wrong)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for language, block in _blocks(page.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(block, str(page), "exec"), {"__name__": "__snippet__"})


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_profiles_in_pages_are_valid(page: Path, tmp_path: Path) -> None:
    import shutil

    from opencda_marl.config import bundled_root, load_profile

    blocks = [block for language, block in _blocks(page.read_text(encoding="utf-8")) if language == "yaml"]
    if not blocks:
        return
    shutil.copytree(bundled_root(), tmp_path, dirs_exist_ok=True)
    for index, block in enumerate(blocks):
        (tmp_path / f"p{index}.yaml").write_text(block)
        load_profile(f"p{index}", config_root=tmp_path)


def test_the_settings_table_is_up_to_date() -> None:
    page = ROOT / "docs/configuration.md"
    text = page.read_text(encoding="utf-8")
    assert updated(text) == text, "run `make docs`"


def test_the_tables_of_the_benchmark_follow_from_its_results() -> None:
    from opencda_marl.benchmark.page import page_text, updated_page
    from opencda_marl.benchmark.plan import DENSITIES
    from opencda_marl.benchmark.results import read_results

    text = (ROOT / "docs/benchmark.md").read_text(encoding="utf-8")
    folder = ROOT / "benchmarks/results"
    found = read_results([folder]) if folder.is_dir() else []
    fix = "opencda-marl benchmark --collect --page docs/benchmark.md"
    assert updated_page(text, page_text(found, DENSITIES)) == text, fix


def test_every_page_is_in_the_navigation() -> None:
    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_lines_of_pages_do_not_name_where_they_were_written() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"/work/|/tmp/|/root/|/home/", text), page.name


# --- files beside the pages


def test_pixi_names_pytorchs_own_index_for_every_platform() -> None:
    manifest = tomllib.loads((ROOT / "pixi.toml").read_text())
    platforms = manifest["workspace"]["platforms"]
    assert {"linux-64", "win-64"} <= {*platforms}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(need.removeprefix("torch") for need in project["dependencies"] if need.startswith("torch"))
    for platform in platforms:
        torch = manifest["target"][platform]["pypi-dependencies"]["torch"]
        assert torch["version"] == wanted
        kind = "cpu" if platform.startswith("osx") else r"cu\d+"
        assert re.fullmatch(rf"https://download\.pytorch\.org/whl/{kind}", torch["index"])
    activation = manifest["target"]["linux-64"]["activation"]["env"]
    assert activation == {"CARLA_BIN": "/opt/CARLA_0.9.16/CarlaUE4.sh", "SDL_VIDEODRIVER": "offscreen"}
    extras = {*project["optional-dependencies"]}
    features = [manifest, *manifest["feature"].values()]
    for feature in features:
        assert {*feature["pypi-dependencies"]["opencda-marl"]["extras"]} <= extras
    assert {*manifest["environments"]} == {*manifest["feature"]}
    for task in manifest["tasks"].values():
        _parse(shlex.split(task)[3:])


def test_constraints_are_names_and_versions_that_are_installed_and_allowed() -> None:
    from importlib.metadata import version

    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][A-Za-z0-9.]*)", line).groups() for line in lines)  # type: ignore[union-attr]
    assert len(pins) == len(lines)
    canonical = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for name in ("sumo", "marl", "docs", "dev") for need in project["optional-dependencies"][name]]
    for need in map(Requirement, [*project["dependencies"], *extras]):
        if need.name == "opencda-marl":
            continue
        pin = canonical[re.sub(r"[-_.]+", "-", need.name).lower()]
        assert need.specifier.contains(pin), need
        assert version(need.name).partition("+")[0] == pin, need


def test_make_finds_its_targets_from_a_path_with_a_space(tmp_path: Path) -> None:
    import shutil

    place = tmp_path / "a path with a space"
    place.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place / name)
    for target in ("help", "setup", "train", "test", "test-slow", "bench", "docs", "clean"):
        done = subprocess.run(["make", "-n", target], cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(["make"], cwd=place, capture_output=True, text=True, check=True)
    assert "make train" in done.stdout


def test_make_says_what_a_quiet_installation_does_and_how_long_it_takes(tmp_path: Path) -> None:
    import shutil

    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"

    def setup(pip: str) -> subprocess.CompletedProcess[str]:
        shutil.rmtree(tmp_path / ".venv", ignore_errors=True)
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{pip}\n")
        python.chmod(0o755)
        command = ["make", "setup", "PYTHON=true"]  # makes no environment: the one above stands for it
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = setup("exit 0")
    assert done.returncode == 0, done.stderr
    before, after, following = done.stdout.splitlines()
    assert "about four minutes the first time" in before
    assert re.fullmatch(r"installed in \d+ s", after)
    assert "make train" in following
    failed = setup("exit 3")
    assert failed.returncode != 0
    assert "installed in" not in failed.stdout


def test_the_ci_script_runs_both_suites() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert text.index("make test\n") < text.index("make test-slow")


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert len(text.splitlines()) > 190


def test_layers_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(tool)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
