"""Checkpoints: whole or not there, every bit back, refused when anything is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from opencda_marl.core.checkpoint import Checkpoints, read_checkpoint, write_checkpoint
from opencda_marl.core.errors import CheckpointError, StorageError
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.spec import LearnerState


def _state(seed: int = 0) -> LearnerState:
    rng = np.random.default_rng(seed)
    tensors = {
        "weight": rng.normal(size=(3, 5)).astype(np.float32),
        "moment": rng.normal(size=(5, 3)).T,  # not contiguous
        "scalar": np.float64(rng.normal()).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
        "mask": np.array([True, False]),
        "ids": np.array([2**62, -1], np.int64),
        "odd": np.array([np.nan, np.inf, -0.0], np.float32),
    }
    return LearnerState(tensors, {"rng": generator_state(generator(seed, Branch.MINIBATCH)), "step": seed, "rate": 0.1})


def _equal(left: LearnerState, right: LearnerState) -> bool:
    same = all(
        left.tensors[name].dtype == right.tensors[name].dtype
        and left.tensors[name].shape == right.tensors[name].shape
        and left.tensors[name].tobytes() == right.tensors[name].tobytes()
        for name in left.tensors
    )
    return same and left.tensors.keys() == right.tensors.keys() and left.values == right.values


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["manifest.json", "state.json", "tensors.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_no_reason_to_wait(tmp_path: Path, file: str) -> None:
    write_checkpoint(tmp_path / "c", _state(), {"episodes": 7}, {})
    (tmp_path / "c" / file).unlink()
    os.mkfifo(tmp_path / "c" / file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_checkpoint(tmp_path / "c")


def test_every_bit_comes_back(tmp_path: Path) -> None:
    state = _state(3)
    write_checkpoint(tmp_path / "c", state, {"episodes": 7}, {"config.yaml": "seed: 1\n"})
    found = read_checkpoint(tmp_path / "c")
    assert _equal(state, found.state)
    assert found.extra == {"episodes": 7}
    assert (tmp_path / "c" / "config.yaml").read_text() == "seed: 1\n"
    expected = generator(3, Branch.MINIBATCH).random(5)
    assert (generator_from_state(found.state.values["rng"]).random(5) == expected).all()


@pytest.mark.parametrize("odd", ["with space", "quote'\"$HOME", "line\nbreak", "ü—路"])
def test_odd_paths(tmp_path: Path, odd: str) -> None:
    checkpoints = Checkpoints(tmp_path / odd / "checkpoints")
    (tmp_path / odd).mkdir()
    checkpoints.save(1, _state(), {}, best=True)
    assert _equal(checkpoints.load("best").state, _state())


def test_latest_best_and_what_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    for episode in range(1, 8):
        checkpoints.save(episode, _state(episode), {"episodes": episode}, best=episode == 2)
    assert checkpoints.numbered() == [2, 5, 6, 7]  # best, two more, latest
    assert checkpoints.load().extra == {"episodes": 7}
    assert checkpoints.load("best").extra == {"episodes": 2}
    assert read_checkpoint(tmp_path / "c" / "latest").extra == {"episodes": 7}
    assert os.readlink(tmp_path / "c" / "latest") == "episode_7"  # relative: the folder can be moved


def test_keep_none_and_pinned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=0)
    for episode in (1, 2, 3):
        checkpoints.save(episode, _state(), {}, pinned=("episode_1",))
    assert checkpoints.numbered() == [1, 3]


def test_cut_drops_what_lies_beyond(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=9)
    for episode in (1, 2, 3):
        checkpoints.save(episode, _state(episode), {"episodes": episode})
    (tmp_path / "c" / ".episode_4.part").mkdir()
    (tmp_path / "c" / ".latest.part").symlink_to("episode_9")
    checkpoints.cut(2)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["episode_1", "episode_2", "latest"]


def test_an_episode_that_latest_stands_for_is_not_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, _state(1), {"episodes": 1})
    checkpoints.save(1, _state(2), {"episodes": 1}, best=True)
    assert _equal(checkpoints.load("best").state, _state(1))


def test_a_leftover_beyond_latest_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=9)
    checkpoints.save(1, _state(1), {})
    write_checkpoint(tmp_path / "c" / "episode_2", _state(8), {})
    checkpoints.save(2, _state(2), {})
    assert _equal(checkpoints.load().state, _state(2))


def test_a_copy_that_turned_links_into_folders(tmp_path: Path) -> None:
    """`scp -r` and some archives do that."""
    checkpoints = Checkpoints(tmp_path / "c", keep=9)
    checkpoints.save(1, _state(1), {"episodes": 1})
    (tmp_path / "c" / "latest").unlink()
    (tmp_path / "c" / "episode_1").rename(tmp_path / "c" / "latest")
    assert checkpoints.load().extra == {"episodes": 1}
    checkpoints.save(2, _state(2), {"episodes": 2})
    assert checkpoints.load().extra == {"episodes": 2}
    assert not list((tmp_path / "c").glob(".*"))


def test_without_links_a_file_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    checkpoints = Checkpoints(tmp_path / "c")
    for episode in (1, 2):
        checkpoints.save(episode, _state(episode), {"episodes": episode}, best=episode == 1)
    assert not (tmp_path / "c" / "latest").is_symlink()
    assert checkpoints.load().extra == {"episodes": 2}
    assert read_checkpoint(tmp_path / "c" / "best").extra == {"episodes": 1}


def _damages() -> dict[str, object]:
    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1])

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))

    return {"cut": cut, "flip": flip, "gone": Path.unlink, "empty": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "config.yaml", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_any_damage_is_an_error_that_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    write_checkpoint(tmp_path / "c", _state(), {}, {"config.yaml": "seed: 1\n"})
    _damages()[damage](tmp_path / "c" / name)  # type: ignore[operator]
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / "c")
    # a manifest with a flipped bit may be caught through the file that it then describes wrongly
    assert str(tmp_path / "c") in caught.value.message
    assert damage == "flip" or name in caught.value.message
    assert caught.value.exit_code == 20


def _foreign_manifest(path: Path) -> None:
    (path / "manifest.json").write_text(json.dumps({"format": "another", "version": 1, "files": {}}))


def _newer(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))


def _no_files(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "files": {}}))


def _list(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


@pytest.mark.parametrize("change", [_foreign_manifest, _newer, _no_files, _list])
def test_foreign_and_newer_ones_are_refused(tmp_path: Path, change: object) -> None:
    write_checkpoint(tmp_path / "c", _state(), {})
    change(tmp_path / "c")  # type: ignore[operator]
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "c")


def test_missing_and_not_even_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff" * 500)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / "empty"):
        with pytest.raises(CheckpointError, match=path.name):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match="no checkpoint 'latest'"):
        Checkpoints(tmp_path / "none").load()
    (tmp_path / "latest").symlink_to("episode_5")
    with pytest.raises(CheckpointError, match=r"episode_5|latest"):
        Checkpoints(tmp_path).load()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_latest_that_cannot_be_read_names_the_newest_whole_one(tmp_path: Path, damage: str) -> None:
    """`--resume` takes a run, not a checkpoint: what helps is a new run."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for episode in (2, 4, 6, 8):
        checkpoints.save(episode, _state(episode), {}, pinned=[f"episode_{n}" for n in (2, 4, 6)])
    (tmp_path / "checkpoints/episode_6/tensors.safetensors").write_bytes(b"")
    if damage == "cut":
        (tmp_path / "checkpoints/episode_8/state.json").write_bytes(b"{")
    else:
        shutil.rmtree(tmp_path / "checkpoints/episode_8")
    with pytest.raises(CheckpointError, match="episode_8") as caught:
        checkpoints.load()
    assert str(caught.value.fix).endswith(f"run -t PROFILE --init-from {tmp_path / 'checkpoints' / 'episode_4'}")
    for episode in (2, 4):
        shutil.rmtree(tmp_path / f"checkpoints/episode_{episode}")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoints.load()


_CALLS = ("mkdir", "write", "fsync", "rename", "symlink", "replace", "open")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", _CALLS)
def test_a_refusing_disk_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=9)
    checkpoints.save(1, _state(1), {"episodes": 1})
    real = getattr(os, call)

    def refuse(*arguments: object, **named: object) -> object:
        # reading stays possible: only what is opened for writing is refused
        if call == "open" and not int(arguments[1]) & os.O_WRONLY:  # type: ignore[call-overload]
            return real(*arguments, **named)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StorageError, match=r"cannot write .*/c"):
            checkpoints.save(2, _state(2), {"episodes": 2})
    assert _equal(checkpoints.load().state, _state(1))
    checkpoints.save(2, _state(2), {"episodes": 2})
    assert _equal(checkpoints.load().state, _state(2))
    assert not list((tmp_path / "c").glob(".*"))


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments], capture_output=True, text=True, timeout=280
    )


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    """`ulimit -f`: the system sends SIGXFSZ, which Python ignores, and refuses the write."""
    done = _python(
        """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from opencda_marl.core.checkpoint import Checkpoints
        from opencda_marl.core.errors import StorageError
        from opencda_marl.core.spec import LearnerState
        checkpoints = Checkpoints(Path(sys.argv[1]))
        checkpoints.save(1, LearnerState({"x": np.ones(10)}, {}), {"episodes": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            checkpoints.save(2, LearnerState({"x": np.ones(10_000)}, {}), {"episodes": 2})
        except StorageError as error:
            print(error)
        assert checkpoints.load().extra == {"episodes": 1}
        assert checkpoints.numbered() == [1]
        """,
        str(tmp_path / "c"),
    )
    assert done.returncode == 0, done.stderr
    assert "ulimit -f" in done.stdout


def test_killed_at_every_point(tmp_path: Path) -> None:
    """SIGKILL before each line of the modules that write: `latest` is always one of the two, whole."""
    done = _python(
        """
        import os, signal, shutil, sys
        from pathlib import Path
        import numpy as np
        import opencda_marl.core.checkpoint as checkpoint
        import opencda_marl.core.files as files
        from opencda_marl.core.spec import LearnerState

        root = Path(sys.argv[1])
        watched = {checkpoint.__file__, files.__file__, shutil.__file__}

        def state(n):
            return LearnerState({"x": np.full(100, n)}, {"n": n})

        def write(limit):
            count = 0
            def trace(frame, event, arg):
                nonlocal count
                if frame.f_code.co_filename not in watched:
                    return None
                if event == "line":
                    count += 1
                    if count == limit:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace
            sys.settrace(trace)
            checkpoint.Checkpoints(root, keep=0).save(3, state(3), {}, best=True)
            sys.settrace(None)

        killed, seen = 0, set()
        while True:
            shutil.rmtree(root, ignore_errors=True)
            before = checkpoint.Checkpoints(root, keep=0)
            before.save(1, state(1), {}, best=True)
            before.save(2, state(2), {})
            child = os.fork()
            if child == 0:
                write(killed + 1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            after = checkpoint.Checkpoints(root, keep=0)
            latest, best = after.load("latest").state.values["n"], after.load("best").state.values["n"]
            assert latest in (2, 3) and best in (1, 3), (latest, best)
            for number in after.numbered():
                assert checkpoint.read_checkpoint(root / f"episode_{number}").state.values["n"] == number
            seen.add((latest, best))
            after.cut(latest)
            after.save(4, state(4), {})
            assert after.load().state.values["n"] == 4 and not list(root.glob(".*"))
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            killed += 1
        print(killed, sorted(seen))
        """,
        str(tmp_path / "c"),
    )
    assert done.returncode == 0, done.stderr
    killed, _, seen = done.stdout.partition(" ")
    assert int(killed) > 80
    assert seen.strip() == "[(2, 1), (3, 1), (3, 3)]"  # old, in between, new: all three were met
