"""Where profiles lie: a config root, the files in it, a profile and its parents."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from opencda_marl.config_yaml import Document, Source, read
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.files import typed, write_whole, writing

__all__ = ["bundled_root", "chain", "export_root", "find_root", "list_profiles"]

_CLOSE = 0.65  # of two names, 0 to 1: further apart, one is no slip of the other
_FEW = 8  # profiles: more are not listed in an error


def bundled_root() -> Path:
    """The profiles that come with the package."""
    return Path(__file__).parent / "profiles"


def find_root(config_root: Path | None) -> Path:
    """The folder of profiles, absolute.

    Raises:
        ConfigError: there is no such folder.
    """
    root = bundled_root() if config_root is None else config_root
    if not root.is_dir():
        raise ConfigError(
            f"there is no config root {root}", fix=f"'opencda-marl config export {root}' makes one of the bundled ones"
        )
    return root.resolve()


def list_profiles(root: Path | None = None) -> list[tuple[str, str]]:
    """Names under a config root and the first comment line of each, sorted; `_name` is a parent only.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = find_root(root)
    files = [file for file in sorted(folder.rglob("*.yaml")) if not file.name.startswith("_") and file.is_file()]
    return [(file.relative_to(folder).with_suffix("").as_posix(), _first_comment(file)) for file in files]


def export_root(destination: Path) -> list[Path]:
    """Copy the bundled profiles to a folder of one's own; files that are there already stay as they are.

    Returns:
        the files that were written.

    Raises:
        StorageError: the folder cannot be written.
    """
    written = []
    for file in sorted(bundled_root().rglob("*.yaml")):
        target = destination / file.relative_to(bundled_root())
        if target.exists():
            continue
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, file.read_bytes())
        written.append(target)
    return written


def chain(name: str, root: Path) -> list[Document]:
    """The profile's file and its parents, oldest first.

    Raises:
        ConfigError: one of them is missing (near ones listed) or unreadable, or the parents run in a circle.
    """
    documents: list[Document] = []
    seen: list[Path] = []
    source: Source | None = None
    wanted: Any = name
    while wanted is not None:
        try:
            file = _find(wanted, root, source)
        except (OSError, RuntimeError) as error:  # no permission, a name that is too long, a circle of links
            why = error.strerror if isinstance(error, OSError) else "its links run in a circle"
            raise ConfigError(
                f"the profile {str(wanted)[:80]!r} cannot be looked for: {why}", fix="check the name"
            ) from error
        if file in seen:
            raise ConfigError(
                f"{source}: 'extends' runs in a circle: {' -> '.join(f.stem for f in [*seen, file])}",
                fix="remove one of these 'extends'",
            )
        seen.append(file)
        document = read(file)
        documents.append(document)
        source = document.sources.pop(("extends",), None)
        wanted = document.values.pop("extends", None)
    return documents[::-1]


def _find(name: Any, root: Path, source: Source | None) -> Path:
    where = "" if source is None else f"{source}: "
    if not isinstance(name, str) or not name.strip("/"):
        raise ConfigError(f"{where}'extends' names one profile, not {name!r}", fix="write the name of one profile")
    file = root / f"{name.removesuffix('.yaml')}.yaml"
    if not file.resolve().is_relative_to(root):
        fix = "name it by its path under --config-root"
        if file.is_file():
            fix = f"--config-root {file.parent} -t {file.stem}"
        raise ConfigError(f"{where}the profile {name!r} is not under the config root {root}", fix=fix)
    if file.is_file():
        return file
    if Path(name).is_file() and source is None:
        given = Path(name).resolve()
        raise ConfigError(
            f"{name} is a file; a profile is named by its path under a config root",
            fix=f"--config-root {given.parent} -t {given.stem}",
        )
    raise ConfigError(f"{where}there is no profile {name!r} in {root}", fix=_near_profiles(name, root))


def _near_profiles(name: str, root: Path) -> str:
    """What to type instead: profiles in the folder of that name, else those whose own names are close to it."""
    names = [known for known, _ in list_profiles(root)]
    if not names:
        return "the folder holds no profiles; name another --config-root"
    near = [known for known in names if known.startswith(name.strip("/") + "/")] or _alike(name, names)
    if near:
        return f"did you mean {' or '.join(near[:4])}?"
    if len(names) <= _FEW:
        return f"known: {', '.join(names)}"
    bundled = root == bundled_root().resolve()
    return f"see what there is: opencda-marl list profiles{'' if bundled else f' --config-root {typed(root)}'}"


def _alike(name: str, names: list[str]) -> list[str]:
    """The closest first. Folders count for nothing: else every profile would be close to any name in its folder."""
    folder, _, short = name.rpartition("/")

    def closeness(known: str) -> float:
        own = known.rpartition("/")[2]
        return max(difflib.SequenceMatcher(None, short, part).ratio() for part in (own, own.rpartition("_")[2]))

    found = {known: closeness(known) for known in names}
    same = {known: known.rpartition("/")[0] == folder for known in names}
    return sorted((k for k in names if found[k] >= _CLOSE), key=lambda k: (-round(found[k], 1), not same[k], len(k)))


def _first_comment(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            first = stream.readline(300)
    except OSError:
        return ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""
