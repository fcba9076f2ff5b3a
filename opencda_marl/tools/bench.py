"""What a step, an action, an update and a run cost here, each beside a floor measured in the same minute.

`ms_median` is ours, `floor_ms_median` what it is held against, `ratio` the median of ours / floor over repeats that
ran side by side, `speedup` its inverse. The floors: for env and run the bare simulator loop at the same number of
vehicles; for act the plain torch module of the same networks; for update PPO or SAC as one would write it, and
other packages' SAC where they are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opencda_marl.core.errors import ConfigError
from opencda_marl.core.scratch import scratch_folder

__all__ = ["DEFAULT_PROFILE", "WHAT", "bench", "default_profile"]

WHAT = ("env", "act", "update", "run")
DEFAULT_PROFILE = "sumo-marl/intersection/route_speed_only_pcmappo"

_VEHICLES = 25
_PUBLISHED = "sumo-marl/intersection/page_layout_pcmasac"  # what others' updates can be held against


def default_profile(against: Sequence[str]) -> str:
    """What is measured when nobody names a profile."""
    return _PUBLISHED if against else DEFAULT_PROFILE


def bench(
    what: str,
    *,
    name: str = DEFAULT_PROFILE,
    config_root: Path | None = None,
    overrides: Sequence[str] = (),
    vehicles: int | None = None,
    threads: int | None = None,
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure one thing.

    Args:
        what: one of WHAT.
        name: of the profile.
        config_root: folder of profiles; None: the bundled one.
        overrides: `key.sub=value`.
        vehicles: at once; None: 25, and for a run what its demand brings.
        threads: of torch; None: the profile's.
        against: for an update, whose (names of `tools.peers.PEERS`); none: as one would write it.

    Returns:
        {what, ms_median, floor_ms_median, ratio, speedup, vehicles, mean_rows, threads, load, rows, …}

    Raises:
        ConfigError: the profile, or `what`, is not there.
        OpenCDAError: it could not be measured.
    """
    from opencda_marl.config import load_profile

    if what not in WHAT:
        raise ConfigError(f"there is no bench {what!r}", fix=f"one of {', '.join(WHAT)}")
    if against and what != "update":
        raise ConfigError(f"--against is for updates, not for {what}", fix="bench update --against …")
    settings = load_profile(name, config_root=config_root, overrides=overrides).settings
    many = vehicles or _VEHICLES
    used = threads or settings.threads
    if what == "run":
        from opencda_marl.tools.bench_run import bench_run

        with scratch_folder("bench") as folder:
            return bench_run(
                settings,
                name,
                folder=Path(folder),
                config_root=config_root,
                overrides=overrides,
                vehicles=vehicles,
                threads=threads,
            )
    if what == "env":
        from opencda_marl.tools.bench_env import bench_env

        return {**bench_env(settings, vehicles=many), "threads": used, "profile": name}
    if what == "act":
        from opencda_marl.tools.bench_act import bench_act

        return {**bench_act(settings, vehicles=many, threads=used), "profile": name}
    from opencda_marl.tools.bench_update import bench_update

    return {**bench_update(settings, vehicles=many, threads=used, against=against or None), "profile": name}
