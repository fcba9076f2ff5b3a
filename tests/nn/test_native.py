"""The compiled library where compiler or cache are not as they should be: one plain line each, and work goes on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from opencda_marl.core.programs import await_true
from opencda_marl.nn import native
from opencda_marl.nn.lstm import find_kernel
from opencda_marl.nn.native import find_compiler, find_library, why_not_kept

FIND = "from opencda_marl.nn.lstm import find_kernel; print(find_kernel()[1])"
LOOK = "from opencda_marl.nn.native import find_library; print(find_library()[1])"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPENCDA_MARL_CACHE", str(folder))
    monkeypatch.setattr(native, "_FOUND", {})
    monkeypatch.setattr(native, "_FLAGS", ("-O0", *native._FLAGS[1:]))  # faster, and nobody else's
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return folder


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in for the compiler."""
    path = tmp_path / "my compilers" / "cxx"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\necho one >> "$0.calls"\nexec g++ "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def calls(script: Path) -> int:
    file = script.with_name("cxx.calls")
    return len(file.read_text().splitlines()) if file.exists() else 0


def temporary(tmp_path: Path) -> list[str]:
    return [entry.name for entry in (tmp_path / "tmp").iterdir()]


def test_a_compiler_that_hangs_is_given_up(
    cache: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text("#!/bin/sh\nsleep 44.5 & sleep 44.5; wait\n")
    monkeypatch.setattr(native, "_BUILD_SECONDS", 0.5)
    assert find_library() == (None, f"{script} did not end within 0.5 s")
    monkeypatch.setattr(native, "_BUILD_SECONDS", 0.0)
    assert find_library() == (None, f"{script} did not end within 0.5 s"), "it is not awaited again"
    assert temporary(tmp_path) == []
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("obstacle", ["a file for the folder", "a folder for the file", "no home folder"])
def test_what_cannot_be_kept_is_used_all_the_same_and_said(
    cache: Path, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    target = native._target(native._key([str(script)]))
    assert target is not None
    if obstacle == "a file for the folder":
        cache.touch()
        words = f"cannot be kept in {cache}, so each start compiles it again: file exists; set OPENCDA_MARL_CACHE to"
    elif obstacle == "a folder for the file":
        target.mkdir(parents=True)
        words = f"cannot be kept in {cache}, so each start compiles it again: is a directory; remove {target}, or set"
    else:
        monkeypatch.delenv("OPENCDA_MARL_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
        words = "cannot be kept anywhere, so each start compiles it again: there is no home folder; set"
    assert why_not_kept() is None, "nobody has asked for it"
    assert find_kernel()[0] is not None
    assert find_kernel()[0] is not None
    assert calls(script) == 1
    assert words in str(why_not_kept())
    assert temporary(tmp_path) == []
    assert not cache.is_dir() or [entry.name for entry in cache.iterdir()] == [target.name]


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_what_is_kept_is_not_spoken_of(cache: Path) -> None:
    assert find_kernel()[0] is not None
    assert why_not_kept() is None


def empty_library(path: Path) -> bytes:
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(path)], check=True)
    return path.read_bytes()


def test_a_library_without_our_functions_is_built_again(cache: Path, script: Path, tmp_path: Path) -> None:
    data = empty_library(tmp_path / "empty.so")
    target = native._target(native._key([str(script)]))
    assert target is not None
    cache.mkdir()
    target.write_bytes(data + hashlib.sha256(data).digest())
    assert find_kernel()[0] is not None
    assert calls(script) == 1
    native._FOUND.clear()
    assert native._whole(target)
    assert b"opencda_sum" in target.read_bytes()


def test_a_compiler_that_makes_something_else(cache: Path, script: Path, tmp_path: Path) -> None:
    empty_library(tmp_path / "empty.so")
    script.write_text(f'#!/bin/sh\nfor out; do :; done\ncp "{tmp_path}/empty.so" "$out"\n')
    library, why = find_library()
    assert library is None
    assert (why or "").startswith(f"what '{script}' has made cannot be used: it has no opencda_adam, opencda_await")
    assert list(cache.iterdir()) == []
    native._FOUND.clear()
    script.write_text('#!/bin/sh\nfor out; do :; done\necho "not a library" > "$out"\n')
    assert (find_library()[1] or "").startswith(f"what '{script}' has made cannot be used: the library: ")


def test_what_a_compiler_says_is_one_line_and_the_rest_a_file(cache: Path, script: Path) -> None:
    said = "In file included from x.cpp:\n  from y.h:\nlicense.cpp:1: fatal error: it has run out\nand more\n"
    script.write_text(f"#!/bin/sh\nprintf '{said}'\nexit 4\n")
    why = f"'{script}' failed: license.cpp:1: fatal error: it has run out (all that it said is in {cache}/compiler.log)"
    assert find_library() == (None, why)
    assert (cache / "compiler.log").read_text() == said
    native._FOUND.clear()
    (cache / "compiler.log").unlink()
    cache.rmdir()
    cache.touch()  # nothing can be kept
    assert find_library() == (None, f"'{script}' failed: license.cpp:1: fatal error: it has run out")
    native._FOUND.clear()
    script.write_text("#!/bin/sh\nexit 4\n")
    assert find_library() == (None, f"'{script}' failed: exit code 4, and it said nothing")


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("env -u HOME  'g++'", ["env", "-u", "HOME", "g++"]),
        ("env", ["env"]),
        ("no-such-compiler -v", "no-such-compiler -v not found (CXX)"),
        ("g++ 'a", 'CXX is "g++ \'a", which is no command: no closing quotation'),
        ("''", "'' not found (CXX)"),
    ],
)
def test_what_cxx_may_say(monkeypatch: pytest.MonkeyPatch, told: str, found: list[str] | str) -> None:
    monkeypatch.setenv("CXX", told)
    command, why = find_compiler()
    if isinstance(found, str):
        assert (command, why) == (None, found)
    else:
        assert command is not None
        assert Path(command[0]).is_absolute()
        assert [Path(command[0]).name, *command[1:]] == found


def test_a_path_with_a_space_is_one_program_and_blanks_are_none(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_compiler() == ([str(script)], "")
    monkeypatch.setenv("CXX", f"'{script}' -DX")
    assert find_compiler() == ([str(script), "-DX"], "")
    monkeypatch.setenv("CXX", "  ")
    assert Path((find_compiler()[0] or [""])[0]).name in ("g++", "c++", "clang++")


def test_a_compiler_with_arguments_compiles(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++")
    assert find_kernel() != (None, None)
    assert find_library()[0] is not None
    assert len(list(cache.iterdir())) == 1


def test_files_of_writers_that_were_killed_are_swept(cache: Path) -> None:
    cache.mkdir()
    old, young = cache / ".kernels-1.so-1-a.part", cache / ".kernels-1.so-2-b.part"
    for file in (old, young):
        file.touch()
    os.utime(old, (0, 0))
    assert find_library()[0] is not None
    assert not old.exists()
    assert young.exists()


def test_a_second_process_finds_what_the_first_has_kept(cache: Path, script: Path) -> None:
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, timeout=200, check=True)
        assert done.stdout == "None\n"
    assert calls(script) == 1


def test_of_processes_that_start_together_one_compiles(cache: Path, script: Path) -> None:
    """A compiler that fails its second caller (a license, memory) must not leave two workers in two forms."""
    script.write_text('#!/bin/sh\necho one >> "$0.calls"\nsleep 1\n[ $(wc -l < "$0.calls") = 1 ] && exec g++ "$@"\n')
    started = [subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=200)[0] for process in started] == ["None\n"] * 3
    assert calls(script) == 1
    assert [entry.suffix for entry in cache.iterdir()] == [".so"], "the lock is gone"


def test_another_one_that_hangs_is_not_awaited_for_ever(
    cache: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = native._target(native._key([str(script)]))
    assert target is not None
    with native._alone(target):
        assert native._locked(target.with_name(f".{target.name}.lock")) is None
        monkeypatch.setattr(native, "await_true", lambda ready, what, limit: await_true(ready, what=what, limit=0.2))
        assert find_library()[0] is not None, "it compiles beside the other one"
