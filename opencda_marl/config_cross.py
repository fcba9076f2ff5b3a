"""Rules that tie one setting to another; each says which of them to change."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.networks import NetworkSettings
from opencda_marl.settings.offpolicy import MasacSettings, Matd3Settings, OffPolicySettings
from opencda_marl.settings.run import EvaluationSettings, RunSettings
from opencda_marl.settings.traffic import WITH_SERVER, DemandSettings, SimulatorSettings

__all__ = ["Problem", "cross_check", "looks_like_path"]

_CONTINUOUS = ("masac", "pcmasac", "matd3", "pcmatd3")  # algorithms that differentiate a value by the action
_AMONG_LEVELS = ("dqn", "qlearning")  # those that compare the values of all actions


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a setting."""

    keys: tuple[str, ...]
    message: str
    fix: str


def cross_check(settings: RunSettings, *, files: bool) -> list[Problem]:
    """What is wrong between settings whose types and bounds are right; `files`: networks and maps must exist."""
    return [
        *_loop(settings),
        *_workers(settings),
        *_simulator(settings.simulator),
        *_carla(settings),
        *_demand(settings.demand),
        *_objectives(settings),
        *_networks(settings),
        *_action(settings),
        *_learner(settings),
        *_evaluation(settings.evaluation),
        *(_files(settings) if files else ()),
    ]


def looks_like_path(network: str) -> bool:
    """True for the path of a network file, False for a bundled scenario's name."""
    return "/" in network or "\\" in network or network.endswith(".xml")


def _loop(settings: RunSettings) -> Iterator[Problem]:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", settings.device):
        yield Problem(
            ("device",), f'device is "{settings.device}"; that is no device', "write auto, cpu, cuda or cuda:N"
        )
    if settings.decision_interval > settings.max_steps:
        yield Problem(
            ("decision_interval",),
            f"decision_interval ({settings.decision_interval}) is longer than an episode "
            f"(max_steps {settings.max_steps})",
            "lower decision_interval, or raise max_steps",
        )
    levels = settings.envelope.levels
    if len(levels) < 2 or any(b <= a for a, b in itertools.pairwise(levels)):
        yield Problem(
            ("envelope", "levels"), "envelope.levels must be at least two numbers, ascending", "e.g. [0, 0.5, 1]"
        )


def _workers(settings: RunSettings) -> Iterator[Problem]:
    workers, own = settings.workers, settings.learner
    if workers in (1, "auto"):
        return
    if not isinstance(own, MappoSettings):
        yield Problem(
            ("workers",),
            f"workers is {workers}, but {settings.algorithm} learns in one process",
            "workers=1; mappo and pcmappo learn with several",
        )
        return
    if settings.simulator.backend in WITH_SERVER:
        yield Problem(
            ("workers",), f"workers is {workers}, but there is one CARLA server", "workers=1; or simulator.backend=auto"
        )
    if settings.simulator.gui:
        yield Problem(
            ("workers",), f"workers is {workers}, but simulator.gui shows one simulation", "workers=1, or no gui"
        )
    steps = int(workers) * settings.decision_interval
    if own.n_steps < steps or own.minibatch_size < int(workers):
        yield Problem(
            ("workers",),
            f"workers is {workers}: learner.n_steps ({own.n_steps}) and learner.minibatch_size "
            f"({own.minibatch_size}) are shared out among them, and there is too little for each",
            f"fewer workers; or learner.n_steps of {steps} and learner.minibatch_size of {workers} at least",
        )


def _simulator(simulator: SimulatorSettings) -> Iterator[Problem]:
    milliseconds = simulator.step_length * 1000.0
    if abs(milliseconds - round(milliseconds)) > 1e-6:
        yield Problem(
            ("simulator", "step_length"),
            f"simulator.step_length ({simulator.step_length} s) is not a whole number of milliseconds, "
            "which is what SUMO counts in",
            f"e.g. {round(milliseconds) / 1000.0}",
        )
    if simulator.gui and simulator.backend == "libsumo":
        yield Problem(
            ("simulator", "gui"),
            "simulator.gui needs TraCI, but simulator.backend is libsumo",
            "set simulator.backend to auto or traci",
        )


def _carla(settings: RunSettings) -> Iterator[Problem]:
    if settings.simulator.backend not in WITH_SERVER:
        return
    if settings.simulator.gui:
        yield Problem(
            ("simulator", "gui"),
            f"simulator.gui is SUMO's window, but simulator.backend is {settings.simulator.backend}",
            "set carla.rendering to true, and start the server without -RenderOffScreen",
        )
    if settings.eval_every:
        yield Problem(
            ("eval_every",),
            f"eval_every is {settings.eval_every}, but a CARLA server has one clock: nothing can be evaluated beside "
            "training",
            "set eval_every to 0, and evaluate afterwards: opencda-marl evaluate RUN",
        )


def _demand(demand: DemandSettings) -> Iterator[Problem]:
    rates = demand.rate_vph
    if isinstance(rates, list) and not rates:
        yield Problem(("demand", "rate_vph"), "demand.rate_vph is an empty list", "name at least one rate")
    # One number needs no drawing: `demand.rate_vph=300` on the command line works whatever the profile draws.
    drawn = demand.rate_draw
    if drawn != "choice" and isinstance(rates, list) and (len(rates) != 2 or rates[0] > rates[1]):
        yield Problem(
            ("demand", "rate_vph"),
            f"demand.rate_draw is {drawn}, so demand.rate_vph must be two rates, the lower one first",
            "e.g. [100, 400]; or set demand.rate_draw to choice",
        )
    shares = demand.turning_shares
    if shares is not None and (len(shares) != 3 or abs(sum(shares) - 1.0) > 1e-6):
        yield Problem(
            ("demand", "turning_shares"),
            f"demand.turning_shares must be three numbers (right, straight, left) with sum 1; these are "
            f"{len(shares)} with sum {sum(shares):g}",
            "e.g. [0.2, 0.6, 0.2]",
        )
    peak = demand.peak
    if peak.factor != 1.0 and peak.end <= peak.begin:
        yield Problem(
            ("demand", "peak"),
            f"demand.peak has a factor ({peak.factor:g}) but no duration (begin {peak.begin:g} s, end {peak.end:g} s)",
            "set demand.peak.end after demand.peak.begin",
        )


def _objectives(settings: RunSettings) -> Iterator[Problem]:
    preference = settings.preference
    if len(preference.fixed) != len(OBJECTIVES) or abs(sum(preference.fixed) - 1.0) > 1e-6:
        yield Problem(
            ("preference", "fixed"),
            f"preference.fixed must be {len(OBJECTIVES)} numbers ({', '.join(OBJECTIVES)}) with sum 1; these are "
            f"{len(preference.fixed)} with sum {sum(preference.fixed):g}",
            "e.g. [0.6, 0.3, 0.1]",
        )
    concentration = preference.concentration
    if isinstance(concentration, list) and len(concentration) != len(OBJECTIVES):
        yield Problem(
            ("preference", "concentration"),
            f"preference.concentration is one number, or {len(OBJECTIVES)} ({', '.join(OBJECTIVES)}); "
            f"these are {len(concentration)}",
            "e.g. [6.0, 3.0, 1.0]",
        )
    if preference.team_weight == 0.0 and preference.individual_weight == 0.0:
        yield Problem(
            ("preference", "team_weight"),
            "preference.team_weight and preference.lambda are both 0: nothing would be learned",
            "make one of them positive",
        )


def _networks(settings: RunSettings) -> Iterator[Problem]:
    context = settings.context
    if context.encoder == "attention" and context.hidden % context.heads:
        yield Problem(
            ("context", "heads"),
            f"context.hidden ({context.hidden}) cannot be shared by {context.heads} heads",
            "make context.hidden a multiple of context.heads",
        )


def _action(settings: RunSettings) -> Iterator[Problem]:
    algorithm, action = settings.algorithm, settings.action
    if algorithm in _CONTINUOUS and action == "levels":
        yield Problem(
            ("action",),
            f"{algorithm} needs a continuous action, but action is levels",
            "set action to target_speed or acceleration; dqn, qlearning, mappo and pcmappo can choose among levels",
        )
    if algorithm in _AMONG_LEVELS and action != "levels":
        yield Problem(
            ("action",),
            f"{algorithm} chooses among levels, but action is {action}",
            "set action to levels; envelope.levels says which there are",
        )


def _learner(settings: RunSettings) -> Iterator[Problem]:
    own = settings.learner
    if isinstance(own, NetworkSettings) and own.cuda_graph_update and own.update_mode == "compiled":
        yield Problem(
            ("learner", "cuda_graph_update"),
            "learner.update_mode is compiled, but learner.cuda_graph_update asks for cuda_graph",
            "keep one of the two",
        )
    if (
        isinstance(own, MappoSettings | OffPolicySettings)
        and own.learning_rate_schedule == "exponential"
        and not own.learning_rate_end
    ):
        yield Problem(
            ("learner", "learning_rate_end"),
            "learner.learning_rate_end is 0, which learner.learning_rate_schedule exponential never reaches",
            "raise learner.learning_rate_end, or write linear",
        )
    if isinstance(own, OffPolicySettings) and own.batch_size > own.buffer_size:
        yield Problem(
            ("learner", "batch_size"),
            f"learner.batch_size ({own.batch_size}) is larger than learner.buffer_size ({own.buffer_size})",
            "lower learner.batch_size, or raise learner.buffer_size",
        )
    if isinstance(own, MasacSettings | Matd3Settings) and own.relabel and not settings.algorithm.startswith("pc"):
        yield Problem(
            ("learner", "relabel"),
            f"learner.relabel is {own.relabel:g}, but {settings.algorithm} has no preferences to draw anew",
            f"leave it out, or use pc{settings.algorithm}",
        )


def _evaluation(evaluation: EvaluationSettings) -> Iterator[Problem]:
    ranges = {"seeds": evaluation.seeds, "selection_seeds": evaluation.selection_seeds}
    for name, seeds in ranges.items():
        if len(seeds) != 2 or not 0 <= seeds[0] < seeds[1] <= 2**32:
            yield Problem(
                ("evaluation", name),
                f"evaluation.{name} must be [first, one past the last], not {seeds}",
                "e.g. [9000, 9010]: ten seeds",
            )
            return
    if max(seeds[0] for seeds in ranges.values()) < min(seeds[1] for seeds in ranges.values()):
        yield Problem(
            ("evaluation", "selection_seeds"),
            f"evaluation.selection_seeds {evaluation.selection_seeds} and evaluation.seeds {evaluation.seeds} overlap: "
            "a checkpoint chosen on the seeds that judge it looks better than it is",
            "keep the two ranges apart",
        )
    if not evaluation.rates_vph:
        yield Problem(("evaluation", "rates_vph"), "evaluation.rates_vph is empty", "name at least one rate")
    if len(set(evaluation.controllers)) != len(evaluation.controllers):
        yield Problem(("evaluation", "controllers"), "evaluation.controllers names one twice", "keep one of them")


def _files(settings: RunSettings) -> Iterator[Problem]:
    network, drawing = settings.scenario.network, settings.scenario.map
    if looks_like_path(network) and not _is_file(network):
        yield Problem(
            ("scenario", "network"),
            f"scenario.network: there is no file {network}",
            "name a bundled scenario, or a .net.xml (relative: to the profile's folder)",
        )
    if drawing is not None and not _is_file(drawing):
        yield Problem(
            ("scenario", "map"), f"scenario.map: there is no file {drawing}", "name an .xodr, or leave it out"
        )


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # no permission, or a name that is too long: nothing that could be read
        return False
