"""Programs that stand beside the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[1] / "benchmarks"


def benchmark_program(name: str) -> ModuleType:
    """`benchmarks/NAME.py` as a module."""
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
