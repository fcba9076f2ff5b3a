"""Pieces of a replay: written once, read as they were, gone when nobody needs them."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opencda_marl.core.checkpoint import Checkpoints, read_checkpoint, write_checkpoint
from opencda_marl.core.errors import CheckpointError, StorageError
from opencda_marl.core.segments import Segment, materialise, prune_segments
from opencda_marl.core.spec import LearnerState


def piece(first: int, last: int, *, changed: tuple[int, ...] = (), seed: int = 0) -> Segment:
    """Rows from `first` to `last`, and some older ones."""
    number = np.array([*changed, *range(first, last)], np.int64)
    rng = np.random.default_rng([seed, first, last, *changed])
    arrays = {
        "number": number,
        "ego": rng.normal(size=(len(number), 3)).astype(np.float32),
        "usable": rng.random(len(number)) < 0.5,
    }
    return Segment(first, last, arrays)


def history(count: int) -> list[Segment]:
    """Ten rows each; each completes the last two of the piece before."""
    return [piece(10 * i, 10 * i + 10, changed=(10 * i - 2, 10 * i - 1) if i else ()) for i in range(count)]


def state(segments: list[Segment], episode: int = 0) -> LearnerState:
    return LearnerState({"theta": np.full(3, episode, np.float32)}, {"episode": episode}, segments)


def equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        (left[name].dtype, left[name].shape, left[name].tobytes())
        == (right[name].dtype, right[name].shape, right[name].tobytes())
        for name in left
    )


def files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Name -> what tells whether a file is still the same one."""
    found = {entry.name: entry.stat() for entry in (folder / "replay").iterdir()}
    return {name: (facts.st_ino, facts.st_mtime_ns, facts.st_size) for name, facts in found.items()}


def test_every_bit_comes_back(tmp_path: Path) -> None:
    segment = piece(7, 12, changed=(3,))
    before = {name: array.copy() for name, array in segment.read().items()}
    facts = json.loads(json.dumps(segment.keep(tmp_path)))
    assert (facts["first"], facts["last"]) == (7, 12)
    assert equal(segment.read(), before)
    assert equal(Segment.stored(facts, tmp_path).read(), before)
    assert segment.keep(tmp_path) == facts


def test_memory_is_let_go_when_the_disk_has_the_rows(tmp_path: Path) -> None:
    ego = np.zeros((100, 3), np.float32)
    gone = weakref.ref(ego)
    segment = Segment(0, 100, {"number": np.arange(100), "ego": ego})
    del ego
    gc.collect()
    assert gone() is not None
    segment.keep(tmp_path)
    gc.collect()
    assert gone() is None
    assert segment.read()["ego"].shape == (100, 3)


def test_two_pieces_between_the_same_numbers_are_two_files(tmp_path: Path) -> None:
    """Rows may be completed twice in a row without a new one."""
    pieces = [piece(0, 5), piece(5, 5, changed=(3,), seed=1), piece(5, 5, changed=(3,), seed=2)]
    expected = materialise(pieces)
    names = [segment.keep(tmp_path)["name"] for segment in pieces]
    assert len({*names}) == 3
    assert equal(materialise(pieces), expected)


# --- materialise


def test_no_pieces_no_rows() -> None:
    assert materialise([]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_later_pieces_win(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    pieces, rows, total = [], {}, 0
    for i in range(12):
        added = int(rng.integers(0, 6))
        known = sorted(rows)
        changed = tuple(int(n) for n in rng.permutation(known)[: int(rng.integers(0, 4))])
        pieces.append(piece(total, total + added, changed=changed, seed=100 * seed + i))
        total += added
        read = pieces[-1].read()
        rows |= {int(n): {name: column[j] for name, column in read.items()} for j, n in enumerate(read["number"])}
    for i in (1, 5):
        pieces[i].keep(tmp_path)  # some of them from files
    found = materialise(pieces)
    assert found["number"].tolist() == sorted(rows) == list(range(total))
    assert found["number"].dtype == np.int64
    for j, number in enumerate(found["number"].tolist()):
        for name, column in found.items():
            assert column[j].tobytes() == rows[number][name].tobytes()


def test_where_pieces_begin_makes_no_difference() -> None:
    rows = {"number": np.arange(10), "x": np.arange(10.0)}
    one = [Segment(0, 10, rows)]
    many = [Segment(i, i + 2, {name: column[i : i + 2] for name, column in rows.items()}) for i in range(0, 10, 2)]
    assert equal(materialise(one), materialise(many))


# --- checkpoints


def test_a_checkpoint_writes_new_rows_only(tmp_path: Path) -> None:
    checkpoints, pieces = Checkpoints(tmp_path / "c"), history(5)
    sizes = []
    for episode in range(1, 6):
        before = files(checkpoints.folder) if episode > 1 else {}
        checkpoints.save(episode, state(pieces[:episode], episode), {})
        after = files(checkpoints.folder)
        assert len(after) == episode
        assert all(after[name] == facts for name, facts in before.items()), "written once, never again"
        sizes += [facts[2] for name, facts in after.items() if name not in before]
    assert max(sizes) < 1000
    found = checkpoints.load().state
    assert [(s.first, s.last) for s in found.segments] == [(s.first, s.last) for s in pieces]
    assert equal(materialise(found.segments), materialise(history(5)))


def test_what_no_checkpoint_to_resume_from_needs_goes(tmp_path: Path) -> None:
    checkpoints, pieces = Checkpoints(tmp_path / "c", keep=9), history(6)
    checkpoints.save(1, state(pieces[:4], 1), {}, best=True)
    checkpoints.save(2, state(pieces[2:6], 2), {})
    kept = {segment.keep(checkpoints.folder)["name"] for segment in pieces[2:6]}
    assert files(checkpoints.folder).keys() == kept
    # the older one is a policy still, but no run to go on with
    for found in (checkpoints.load("best"), read_checkpoint(checkpoints.folder / "episode_1")):
        assert found.state.tensors["theta"][0] == 1.0
        with pytest.raises(CheckpointError, match="rows_0_10_") as caught:
            materialise(found.state.segments)
        assert "--init-from" in str(caught.value.fix)
    (checkpoints.folder / "replay" / ".rows_60_70.safetensors.part").write_bytes(b"half")
    checkpoints.save(3, state(pieces[2:6], 3), {})
    assert files(checkpoints.folder).keys() == kept


def test_learners_without_rows_have_no_folder_for_them(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "c").save(1, state([]), {})
    assert not (tmp_path / "c" / "replay").exists()
    prune_segments(tmp_path / "nowhere", [])


def test_checkpoints_from_before_there_were_pieces(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", state([], 4), {})
    changed = json.loads((tmp_path / "c/state.json").read_text())
    del changed["segments"]
    _replace(tmp_path / "c", "state.json", json.dumps(changed).encode())
    assert read_checkpoint(tmp_path / "c").state.segments == []


def _replace(checkpoint: Path, name: str, data: bytes) -> None:
    """As if it had been written like that."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint / name).write_bytes(data)


@pytest.mark.parametrize("name", ["../tensors.safetensors", "/etc/passwd", "a/b", 5])
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: object) -> None:
    write_checkpoint(tmp_path / "c", state([piece(0, 3)]), {})
    changed = json.loads((tmp_path / "c/state.json").read_text())
    changed["segments"][0]["name"] = name
    _replace(tmp_path / "c", "state.json", json.dumps(changed).encode())
    with pytest.raises(CheckpointError, match="is not a checkpoint of this program"):
        read_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("text", ["[]", '{"values": {}, "extra": {}, "segments": 3}', '{"segments": [{"first": 1}]}'])
def test_a_foreign_state_is_refused(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path / "c", state([]), {})
    _replace(tmp_path / "c", "state.json", text.encode())
    with pytest.raises(CheckpointError, match="is not a checkpoint of this program"):
        read_checkpoint(tmp_path / "c")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def _swap(path: Path) -> None:
    others = [entry for entry in path.parent.iterdir() if entry != path]
    shutil.copy(others[0], path)


@pytest.mark.parametrize("damage", [_cut, _flip, _swap, Path.unlink])
def test_any_damage_is_an_error_that_names_the_file(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, state(history(3), 1), {})
    segments = checkpoints.load().state.segments
    names = [segment.keep(checkpoints.folder)["name"] for segment in segments]
    damage(checkpoints.folder / "replay" / names[1])
    found = checkpoints.load()  # its policy is whole
    assert found.state.tensors["theta"][0] == 1.0
    with pytest.raises(CheckpointError, match=names[1]) as caught:
        materialise(found.state.segments)
    assert caught.value.exit_code == 20
    assert "--init-from" in str(caught.value.fix)


def test_a_checkpoint_that_was_copied_elsewhere_is_a_policy(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, state(history(2), 1), {})
    shutil.copytree(tmp_path / "c" / "episode_1", tmp_path / "elsewhere" / "mine")
    found = read_checkpoint(tmp_path / "elsewhere" / "mine")
    assert found.state.tensors["theta"][0] == 1.0
    with pytest.raises(CheckpointError, match="elsewhere/replay/rows_0_10_"):
        materialise(found.state.segments)


def test_a_run_that_was_moved_goes_on_and_writes_nothing_again(tmp_path: Path) -> None:
    pieces = history(3)
    Checkpoints(tmp_path / "old").save(1, state(pieces[:2], 1), {})
    (tmp_path / "old").rename(tmp_path / "new")
    checkpoints = Checkpoints(tmp_path / "new")
    found, before = checkpoints.load().state, files(tmp_path / "new")
    checkpoints.save(2, state([*found.segments, pieces[2]], 2), {})
    after = files(tmp_path / "new")
    assert before.items() <= after.items()
    assert equal(materialise(checkpoints.load().state.segments), materialise(history(3)))


def test_pieces_of_one_run_can_be_kept_in_another(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "a").save(1, state(history(2), 1), {})
    found = Checkpoints(tmp_path / "a").load().state
    Checkpoints(tmp_path / "b").save(1, found, {})
    shutil.rmtree(tmp_path / "a")
    assert equal(materialise(Checkpoints(tmp_path / "b").load().state.segments), materialise(history(2)))


_CALLS = ("mkdir", "write", "fsync", "rename", "symlink", "replace", "open")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("call", _CALLS)
def test_a_refusing_disk_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    checkpoints, pieces = Checkpoints(tmp_path / "c", keep=9), history(5)
    checkpoints.save(1, state(pieces[:2], 1), {})
    real = getattr(os, call)

    def refuse(*arguments: object, **named: object) -> object:
        if call == "open" and not int(arguments[1]) & os.O_WRONLY:  # type: ignore[call-overload]
            return real(*arguments, **named)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StorageError, match=r"cannot write .*/c"):
            checkpoints.save(2, state(pieces[1:], 2), {})
    found = checkpoints.load().state
    assert found.values == {"episode": 1}
    assert equal(materialise(found.segments), materialise(history(2)))
    checkpoints.save(2, state(pieces[1:], 2), {})
    assert equal(materialise(checkpoints.load().state.segments), materialise(history(5)[1:]))
    assert len(files(checkpoints.folder)) == 4
    assert not list(tmp_path.rglob(".*"))


def test_a_disk_that_is_full_after_the_first_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pieces are on the disk already when the refusal comes; they are not lost to the next try."""
    checkpoints, pieces = Checkpoints(tmp_path / "c"), history(4)
    checkpoints.save(1, state(pieces[:1], 1), {})
    real, count = os.replace, 0

    def refuse(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.ENOSPC, "full")
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StorageError, match=r"rows_20_30_.*the disk is full"):
            checkpoints.save(2, state(pieces, 2), {})
    assert equal(materialise(checkpoints.load().state.segments), materialise(history(1)))
    checkpoints.save(2, state(pieces, 2), {})
    assert equal(materialise(checkpoints.load().state.segments), materialise(history(4)))


def test_killed_at_every_point(tmp_path: Path) -> None:
    """SIGKILL before each line of the modules that write: what `latest` speaks of is always whole."""
    script = """
        import os, shutil, signal, sys
        from pathlib import Path
        import numpy as np
        import opencda_marl.core.checkpoint as checkpoint
        import opencda_marl.core.files as files
        import opencda_marl.core.segments as segments
        from opencda_marl.core.spec import LearnerState

        root = Path(sys.argv[1])
        watched = {checkpoint.__file__, files.__file__, segments.__file__}

        def pieces(n):
            numbers = [np.arange(max(0, 5 * i - 1), 5 * i + 5) for i in range(n)]
            rows = [{"number": number, "x": 1.0 * number + i} for i, number in enumerate(numbers)]
            return [segments.Segment(5 * i, 5 * i + 5, row) for i, row in enumerate(rows)][max(0, n - 2) :]

        def state(n):
            return LearnerState({"x": np.full(9, n)}, {"n": n}, pieces(n))

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
            latest = checkpoint.Checkpoints(root, keep=0)
            going = LearnerState({"x": np.full(9, 3)}, {"n": 3}, [latest.load().state.segments[-1], pieces(3)[-1]])
            sys.settrace(trace)
            latest.save(3, going, {})
            sys.settrace(None)

        killed, seen = 0, set()
        while True:
            shutil.rmtree(root, ignore_errors=True)
            checkpoint.Checkpoints(root, keep=0).save(2, state(2), {})
            child = os.fork()
            if child == 0:
                write(killed + 1)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            after = checkpoint.Checkpoints(root, keep=0)
            found = after.load().state
            n = found.values["n"]
            rows, wanted = segments.materialise(found.segments), segments.materialise(pieces(n))
            assert (rows["number"] == wanted["number"]).all() and (rows["x"] == wanted["x"]).all(), n
            seen.add(n)
            after.cut(n)
            after.save(4, LearnerState({"x": np.full(9, 4)}, {"n": 4}, [*found.segments[-1:], pieces(4)[-1]]), {})
            segments.materialise(after.load().state.segments)
            assert len(list((root / "replay").iterdir())) == 2
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            killed += 1
        print(killed, sorted(seen))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "c")],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    killed, _, seen = done.stdout.partition(" ")
    assert int(killed) > 60
    assert seen.strip() == "[2, 3]"


def test_what_others_put_beside_the_pieces_is_left_alone(tmp_path: Path) -> None:
    replay = tmp_path / "replay"
    (replay / "notes").mkdir(parents=True)
    (replay / "mine.txt").write_text("a person's")
    old = replay / "rows_0_5_0123abcd.safetensors"
    half = replay / ".rows_5_9_89abcdef.safetensors.part"
    for ours in (old, half):
        ours.write_bytes(b"x")
    prune_segments(tmp_path, [])
    assert sorted(entry.name for entry in replay.iterdir()) == ["mine.txt", "notes"]


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_piece_is_no_reason_to_wait(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    write_checkpoint(folder / "episode_1", state(history(2)), {"episodes": 1}, {})
    (first, *_) = sorted((folder / "replay").iterdir())
    first.unlink()
    os.mkfifo(first)
    with pytest.raises(CheckpointError, match="not a regular file"):
        for segment in read_checkpoint(folder / "episode_1").state.segments:
            segment.read()
