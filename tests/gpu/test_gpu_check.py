"""The script that checks updates on a GPU: that it runs where nothing else is installed, and finds what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_BARE = """
import sys

ALLOWED = {"torch", "torchgen", "functorch", "numpy", "safetensors", "opencda_marl", "gpu_check"}
# what torch itself depends on
ALLOWED |= {"sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "typing_extensions", "triton"}


class Bare:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        raise ModuleNotFoundError(f"{name} is not installed on that machine", name=top)


sys.meta_path.insert(0, Bare())
sys.path[:0] = ["benchmarks", "."]
import importlib.util

search = importlib.util.find_spec


def found(name, package=None):
    try:
        return search(name, package)
    except ModuleNotFoundError:
        return None


importlib.util.find_spec = found
import gpu_check
for name, encoder in gpu_check.cases(None):
    traffic = gpu_check.Traffic(3, 0, discrete=name == "dqn")
    settings = gpu_check.settings_of(name, encoder, "eager", "cpu")
    learner = gpu_check.LEARNERS.load(name)(settings, traffic.spec, traffic.action)
    learner.act(traffic.first().observation, explore=True)
    print(name, encoder)
"""


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=280)


def test_learners_need_torch_and_numpy_alone() -> None:
    found = _run(sys.executable, "-c", _BARE)
    assert found.returncode == 0, found.stderr
    names = {line.split()[0] for line in found.stdout.splitlines()}
    assert {"mappo", "pcmappo", "masac", "pcmasac", "matd3", "pcmatd3", "dqn"} <= names


def test_without_a_gpu_it_says_so() -> None:
    found = _run("benchmarks/gpu_check.sh", CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 31
    assert "sees no CUDA device; --cpu checks without one" in found.stderr


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is off by a thousandth of a step each time does not pass for equal."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_check

    from opencda_marl.learners import offpolicy
    from opencda_marl.nn.graph import Inputs, State, UpdateForm

    class Off(UpdateForm):
        def __call__(self, state: State, inputs: Inputs) -> tuple[State, object]:
            return super().__call__(state, {**inputs, "learning_rate": inputs["learning_rate"] * self.factor})

    made: list[Off] = []

    def make_update(function: object, *_: object, **__: object) -> Off:
        made.append(Off(function, "eager"))
        made[-1].factor = 1.0 if len(made) % 2 else factor
        return made[-1]

    monkeypatch.setattr(offpolicy, "make_update", make_update)
    factor = 1.0
    same = gpu_check.check("masac", "deepsets", "eager", "cpu", updates=40, vehicles=25)
    assert (same.failures, same.apart, same.actions) == ([], 0.0, 0.0)
    assert same.steps >= 40
    factor = 1.01
    row = gpu_check.check("masac", "deepsets", "eager", "cpu", updates=40, vehicles=25)
    assert row.failures
    assert row.failures[0].startswith("weights differ after the first updates")
    assert "weights differ" in gpu_check.table([row], "eager")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_cpu_the_compiled_form_passes() -> None:
    found = _run("benchmarks/gpu_check.sh", "--cpu", "--learners", "masac", "--updates", "40")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "all equal" in found.stdout


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = _run("benchmarks/gpu_check.sh")
    assert found.returncode == 0, found.stdout + found.stderr
