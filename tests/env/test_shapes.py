"""The shapes that public signatures promise, checked while the room is at work."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from scripted import CONFLICTS, ROADS, ScriptedSimulator, schedule_of

from opencda_marl.core import conflicts
from opencda_marl.core.spec import Action
from opencda_marl.core.state import Driver
from opencda_marl.env import driving, near_miss, neighbours, observe, reward
from opencda_marl.env.book import Book
from opencda_marl.env.command import Commander
from opencda_marl.env.controllers import make_controller
from opencda_marl.env.ledger import Ledger
from opencda_marl.env.reservation import Reservation
from opencda_marl.settings.run import RunSettings

CLASSES = [
    Book,
    Commander,
    Ledger,
    Reservation,
    near_miss.Proximity,
    observe.FlatObserver,
    observe.FullObserver,
    reward.RewardParts,
]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public method of the classes above checks what it gets and gives."""
    for kind in CLASSES:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") or name == "__init__":
                monkeypatch.setattr(kind, name, jaxtyped(typechecker=beartype)(method))
    for name in ("conflict_zones", "zone_table"):
        monkeypatch.setattr(conflicts, name, jaxtyped(typechecker=beartype)(getattr(conflicts, name)))


def _check_record(record: object) -> None:
    """The fields of a record against its own annotations."""
    kind = type(record)
    fields = kind.__annotations__
    source = "def check(" + ", ".join(f"{name}: {text}" for name, text in fields.items()) + "): pass"
    scope = dict(vars(inspect.getmodule(kind)))
    exec(source, scope)
    jaxtyped(typechecker=beartype)(scope["check"])(*(getattr(record, name) for name in fields))


@pytest.mark.parametrize("layout", ["full", "plain", "ego9", "ego43"])
def test_signatures_hold(checked: None, layout: str) -> None:
    settings = RunSettings(max_steps=500, observation=layout)
    drivers = np.array([Driver.CAV, Driver.RULE, Driver.CAV])
    schedule = schedule_of(np.array([0.0, 0.3, 2.0]), np.array([1, 4, 2]), drivers)
    env = driving.DrivingEnv(ScriptedSimulator(settings), settings, lambda _: (schedule, 1, 1))
    driver = make_controller("rule_based", settings, ROADS, env.conflicts, np.random.default_rng(0))
    step = env.reset(0)
    while not step.done:
        action = driver.act(step.observation, env.state)
        step = env.step(action)
        for record in (action, step.observation, step.closed, step.final, env.state):
            _check_record(record)
    assert env.record().accounting.arrived >= 2
    _check_record(conflicts.conflict_zones(ROADS))
    _check_record(neighbours.road_tables(ROADS, CONFLICTS))


def test_a_wrong_shape_would_be_seen(checked: None) -> None:
    commander = Commander(RunSettings(), neighbours.road_tables(ROADS, CONFLICTS).route, 4)
    with pytest.raises(TypeCheckError):
        commander.take(np.zeros(2, np.float32), np.arange(2))
    with pytest.raises(TypeCheckError):
        _check_record(Action(np.zeros(3, np.float32)))
