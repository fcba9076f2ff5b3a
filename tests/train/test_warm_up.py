"""The rehearsal before the first step: everything is compiled, and nobody remembers it."""

from __future__ import annotations

import gc
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from opencda_marl.assemble import make_env, make_learner, make_roads, make_simulator, warm_up
from opencda_marl.config import load_profile
from opencda_marl.core.spec import Action, Learner
from opencda_marl.simulators.rehearsal import Rehearsal


def _compiled() -> dict[str, int]:
    """Forms of every kernel of ours in this process."""
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), Dispatcher))
    return {f"{one.py_func.__module__}.{one.py_func.__name__}": len(one.signatures) for one in found}


@pytest.mark.parametrize("source", ["sampled", "grid"])
def test_the_learner_is_as_before(source: str) -> None:
    overrides = [f"preference.source={source}", "context.encoder=deepsets"]
    settings = load_profile("sumo-marl/intersection/quickstart", overrides=overrides).settings
    stage = Rehearsal(make_roads(settings), slots=24, step_length=0.05)
    with closing(make_env(settings, simulator=stage, traffic=stage.traffic)) as env:
        learner: Learner = make_learner(settings, env.observation_spec, env.action_spec)
    before = learner.state()
    tensors = {name: array.copy() for name, array in before.tensors.items()}
    warm_up(settings, stage, learner)
    after = learner.state()
    assert after.values == before.values
    assert after.tensors.keys() == tensors.keys()
    assert all(after.tensors[name].tobytes() == tensors[name].tobytes() for name in tensors)


@pytest.mark.parametrize("observation", ["full", "ego43", "ego9"])
def test_nothing_is_left_to_compile(observation: str) -> None:
    overrides = [f"observation={observation}", "action=target_speed", "max_steps=400", "demand.rate_vph=600"]
    settings = load_profile("sumo-marl/intersection/quickstart", overrides=overrides).settings
    if observation != "full":
        settings = replace(settings, context=replace(settings.context, encoder="none"))
    simulator = make_simulator(settings, make_roads(settings))
    with closing(make_env(settings, simulator=simulator)) as env:
        with closing(make_learner(settings, env.observation_spec, env.action_spec)) as learner:
            warm_up(settings, simulator, learner)
        before = _compiled()
        step = env.reset(1)
        while not step.done:
            step = env.step(Action(np.ones((len(step.observation), 1), np.float32)))
        assert env.record().accounting.collided > 0
    assert _compiled() == before
