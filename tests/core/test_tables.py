"""Names to what they stand for, open to plug-ins."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from opencda_marl.core import tables
from opencda_marl.core.errors import ConfigError
from opencda_marl.core.tables import Table

_TABLE = Table(
    "vehicle", "opencda_marl.vehicles", {"car": "fractions:Fraction", "cart": "json:loads"}, {"car": "a car"}
)


def test_known_names() -> None:
    assert _TABLE.load("car").__name__ == "Fraction"
    assert _TABLE.about("car") == "a car"
    assert sorted(_TABLE.targets()) == ["car", "cart"]


@pytest.mark.parametrize(("name", "hint"), [("cra", "did you mean 'car'"), ("zeppelin", "known: car, cart")])
def test_a_misspelt_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"file.yaml:3: there is no vehicle named '{name}'") as caught:
        _TABLE.check(name, where="file.yaml:3: ")
    assert hint in str(caught.value.fix)
    with pytest.raises(ConfigError):
        _TABLE.load(name)


def test_a_plug_in_adds_but_does_not_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("bus", "collections:OrderedDict", "opencda_marl.vehicles"),
        EntryPoint("car", "collections:deque", "opencda_marl.vehicles"),
    ]
    monkeypatch.setattr(tables, "entry_points", lambda group: points if group == "opencda_marl.vehicles" else [])
    assert _TABLE.load("bus").__name__ == "OrderedDict"
    assert _TABLE.load("car").__name__ == "Fraction"
    assert "collections:OrderedDict" in _TABLE.about("bus")


def test_listing_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from opencda_marl.learners import LEARNERS; from opencda_marl.nn import ENCODERS\n"
        "from opencda_marl.env import CONTROLLERS\n"
        "assert LEARNERS.targets() and ENCODERS.targets() and CONTROLLERS.targets()\n"
        "print([name for name in ('torch', 'numba', 'libsumo', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
