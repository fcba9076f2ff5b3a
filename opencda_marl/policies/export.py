"""A policy alone: a checkpoint folder with what acting needs, and nothing that only training needs.

    opencda_marl/policies/<name>/   tensors.safetensors, state.json, config.yaml, manifest.json

Weights and running scales stay; optimiser, stored rows, replay and generators go. `evaluate bundled:<name>` drives it,
`run --init-from` begins with it, as with any checkpoint.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from opencda_marl import __version__
from opencda_marl.assemble import make_env, make_learner, quiet_process
from opencda_marl.config import from_run_folder, to_yaml
from opencda_marl.core.checkpoint import check_observation, read_checkpoint, write_checkpoint
from opencda_marl.core.errors import StorageError
from opencda_marl.core.files import remove_tree, typed, writing
from opencda_marl.core.run_folder import best_checkpoint, read_run
from opencda_marl.core.spec import LearnerState

__all__ = ["export_policy"]


class _Noting(dict[str, np.ndarray]):
    """Tensors that remember which of them were asked for."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        super().__init__(tensors)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> np.ndarray:
        self.asked.add(name)
        return super().__getitem__(name)


def _chosen(run: Path) -> Path:
    """The checkpoint of the final table, if it is still there; else the best."""
    table = run / "plots" / "comparison.json"
    if table.is_file():
        rows = json.loads(table.read_bytes())
        named = next((row.get("checkpoint") for row in rows if row.get("checkpoint")), None)
        found = None if named is None else run / "checkpoints" / Path(named).name
        if found is not None and found.is_dir():
            return found
    return best_checkpoint(run)


def export_policy(source: Path, out: Path, *, about: str = "", replacing: bool = False) -> dict[str, Any]:
    """Write the policy of a run or of one checkpoint into a folder of its own.

    Of a run it is the checkpoint that its final table is about, chosen on held-out traffic; without a table the best.

    Args:
        source: run folder or checkpoint.
        out: folder to make.
        about: a line for lists.
        replacing: may it be there already?

    Returns:
        policy (the folder), checkpoint, algorithm, bytes, tensors, left_out; JSON values.

    Raises:
        CheckpointError: there is no such policy, or it is broken.
        StorageError: the folder cannot be made.
    """
    run = source if (source / "run.json").is_file() else None
    found = read_checkpoint(source if run is None else _chosen(source))
    settings = replace(from_run_folder(found.path), device="cpu")
    if out.exists() and not replacing:
        raise StorageError(f"{typed(out)} is there already", fix="name another folder, or give --force")
    tensors = _Noting(dict(found.state.tensors))
    values = {"identity": found.state.values.get("identity", {})}
    with quiet_process(settings.threads), closing(make_env(settings)) as env:
        with closing(make_learner(settings, env.observation_spec, env.action_spec)) as learner:
            learner.load(LearnerState(tensors, values), weights_only=True)
        spec = env.observation_spec
    check_observation(found, spec, fix="export it with its own settings")
    kept = {name: found.state.tensors[name] for name in sorted(tensors.asked)}
    facts = {key: found.extra.get(key) for key in ("algorithm", "profile", "episodes", "env_steps", "wall_s")}
    commit = None if run is None else read_run(run).get("git")
    extra = {**facts, "observation": found.extra["observation"], "program": __version__, "commit": commit}
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(out)
    config = {"config.yaml": to_yaml(replace(settings, device="auto"))}
    write_checkpoint(out, LearnerState(kept, values), {**extra, "about": about}, config)
    return {
        "policy": str(out),
        "checkpoint": str(found.path),
        "algorithm": facts["algorithm"],
        "bytes": sum(file.stat().st_size for file in out.iterdir()),
        "tensors": sorted(kept),
        "left_out": sorted(set(found.state.tensors) - set(kept)),
    }
