"""MAPPO (Yu et al. 2022) and PCMAPPO: clipped policy gradients for one policy that all vehicles share.

nets     actor: ego, context (and preference) -> action. critic: the same and the scene -> value of each component.
losses   PPO's clipped surrogate on normalised advantages, squared error of normalised returns, entropy.
update   values and log-probabilities of all rows in one pass, advantages per vehicle, epochs of minibatch steps.

PCMAPPO has a vector of rewards and a preference p per vehicle (arXiv 2606.14693): components are the team's reward and
one per objective, A = team_weight * A_team + individual_weight * p . A_individual (`preference.scaling`).
MAPPO is the same with one component, the plain sum of the objectives.

With several workers (docs/workers.md) each has the rows of its own traffic until an update, where all rows are pooled.

Longer than other modules, because nets, losses and update are to be read side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from opencda_marl.core.errors import NotFiniteError
from opencda_marl.core.objectives import OBJECTIVES, scalarise
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.spans import Spans
from opencda_marl.core.spec import Action, ActionSpec, Counters, LearnerState, Observation, ObservationSpec, Step
from opencda_marl.learners.acting import ActingPolicy
from opencda_marl.learners.identity import check_complete, check_identity, identity_of, take
from opencda_marl.learners.pooling import pool, sum_up
from opencda_marl.learners.preference import mix_advantages
from opencda_marl.learners.rollout import Chains, Rollout, chain_advantages, minibatches, spread
from opencda_marl.nn.actor import Actor
from opencda_marl.nn.blocks import Arrays, Mlp, Shapes
from opencda_marl.nn.context import Encoder, make_encoder
from opencda_marl.nn.device import resolve_device
from opencda_marl.nn.flat import Layout, Parameters, as_leaf
from opencda_marl.nn.fused import passes_form
from opencda_marl.nn.graph import Inputs, State, make_update
from opencda_marl.nn.heads import make_head
from opencda_marl.nn.normaliser import RunningScale, preserve_outputs
from opencda_marl.nn.optimiser import adam, clip_by_norm, linear_schedule, rate_schedule
from opencda_marl.nn.process_group import ProcessGroup
from opencda_marl.nn.torso import Torso
from opencda_marl.settings.learning import MappoSettings
from opencda_marl.settings.networks import own_settings
from opencda_marl.settings.run import RunSettings

__all__ = ["METRICS", "Mappo", "Networks", "minibatch_step", "partial_step", "ppo_loss"]

_CHUNK = 2048  # rows of one pass over the rollout: temporaries stay in the cache
_Batch = Mapping[str, Tensor]


METRICS = (
    "loss",
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "gradient_norm",
    "actor_gradient_norm",
    "critic_gradient_norm",
)
"""Order of what `minibatch_step` measures."""

_LOSSES = METRICS.index("gradient_norm")  # those that come with the loss


class Networks:
    """Actor and critic as functions of named parameters; each has an encoder of its own where it is trained.

    Args:
        settings: of the run.
        observation: layout.
        action: kind.
        encoder: of neighbour rows; None where there are none.
        trained: see `Torso`.
    """

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        action: ActionSpec,
        encoder: Encoder | None,
        *,
        trained: bool,
    ) -> None:
        own = own_settings(settings.learner, MappoSettings)
        self._conditioned, self._central = settings.algorithm == "pcmappo", own.critic == "central"
        preference = len(OBJECTIVES) if self._conditioned else 0
        self.head = make_head(
            action, fraction=own.initial_fraction, log_std=own.initial_log_std, greedy=own.greedy_quantile
        )
        self._torso = Torso(observation, tuple(own.ego_hidden), encoder, trained=trained, activation=own.activation)
        hidden, seen = tuple(own.hidden), self._torso.width
        self._policy = Mlp(seen + preference, hidden, self.head.outputs, own.activation)
        self.actor = Actor(self._torso, self._policy, "actor.policy.", conditioned=self._conditioned)
        seen += observation.scene_size if self._central else 0
        self.components: tuple[str, ...] = ("team", *OBJECTIVES) if self._conditioned else ("value",)
        self._values = Mlp(seen + preference, hidden, len(self.components), own.activation)
        actor: Shapes = self._torso.shapes("actor.") | self._policy.shapes("actor.policy.") | self.head.shapes("actor.")
        critic: Shapes = self._torso.shapes("critic.") | self._values.shapes("critic.values.")
        self.actor_layout = Layout(actor)
        self.layout = Layout(actor | critic)  # the actor's come first

    def initialise(self, rng: np.random.Generator) -> Float32[np.ndarray, " size"]:
        """First parameters: a policy that does nearly the same everywhere."""
        made: Arrays = self._torso.initialise(rng, "actor.") | self._torso.initialise(rng, "critic.")
        made |= self._policy.initialise(rng, "actor.policy.", gain=0.01) | self.head.initialise("actor.")
        made[f"actor.policy.{len(self._policy.hidden)}.bias"] = self.head.initial_bias()
        made |= self._values.initialise(rng, "critic.values.", gain=0.1)
        return self.layout.flatten(made)

    def critic(self, parameters: Parameters, rows: _Batch) -> Float[Tensor, "rows components"]:
        """Normalised values: V(s), or the vector of V_team(s, p) and V_individual(s, p) from one network."""
        seen = [self._torso(parameters, "critic.", rows)]
        if self._central:
            seen.append(rows["scene"])
        if self._conditioned:
            seen.append(rows["preference"])
        return self._values(parameters, "critic.values.", torch.cat(seen, -1))

    def rescale(self, parameters: Parameters, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
        """Keep the critic's values where they are when (mean, std) of the returns change; in place."""
        layer = f"critic.values.{len(self._values.hidden)}."
        preserve_outputs(parameters[layer + "weight"], parameters[layer + "bias"], before, after)


def ppo_loss(
    networks: Networks, settings: MappoSettings, parameters: Parameters, batch: _Batch, entropy_weight: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a minibatch, each row times its weight (0 for padding), and its parts.

    Of a part of a minibatch (`total_weight`: that of the whole) they are its share, and sum up to those of the whole.

    policy   -min(r A, clip(r, 1 - c, 1 + c) A) with r = pi / pi_old      (Schulman et al. 2017, equation 7)
    value    (V - R)^2 / 2 in units of the returns' spread, summed over components
    entropy  of the action as executed
    """
    share = batch["weight"] / (batch["total_weight"] if "total_weight" in batch else batch["weight"].sum())

    outputs = networks.actor(parameters, batch)
    log_prob = networks.head.log_prob(parameters, "actor.", outputs, batch["action"])
    log_ratio = log_prob - batch["log_prob"]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
    advantage = batch["advantage"]
    policy_loss = -(torch.minimum(ratio * advantage, clipped * advantage) * share).sum()

    errors = networks.critic(parameters, batch) - batch["returns"]
    value_loss = 0.5 * ((errors * errors).sum(-1) * share).sum()

    entropy = (networks.head.entropy(parameters, "actor.", outputs) * share).sum()

    loss = policy_loss + settings.value_weight * value_loss - entropy_weight * entropy
    metrics = {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": ((ratio - 1.0 - log_ratio) * share).sum(),  # http://joschu.net/blog/kl-approx.html, k3
        "clip_fraction": (((ratio - 1.0).abs() > settings.clip).to(share.dtype) * share).sum(),
    }
    return loss, metrics


def minibatch_step(
    networks: Networks, settings: MappoSettings, state: State, inputs: Inputs
) -> tuple[State, Float[Tensor, " metrics"]]:
    """One gradient step: a pure update, see `nn.graph`.

    Args:
        networks: actor and critic.
        settings: of the learner.
        state: theta (a leaf), its moments m and v, and step, the number of steps so far.
        inputs: columns of the minibatch, learning_rate and entropy_weight.

    Returns:
        The state afterwards, and the metrics in the order of `METRICS`.
    """
    gradient, metrics = _gradient(networks, settings, state["theta"], inputs)
    return _descend(networks, settings, state, gradient, metrics, inputs["learning_rate"])


def partial_step(
    networks: Networks, settings: MappoSettings, state: State, inputs: Inputs
) -> tuple[State, Float[Tensor, " metrics"]]:
    """A worker's part of a gradient step: the gradient of its rows, as `state["gradient"]`; theta stays.

    Args:
        networks: actor and critic.
        settings: of the learner.
        state: theta (a leaf) and gradient, which is replaced.
        inputs: columns of its rows, the `total_weight` of the minibatch, and entropy_weight.

    Returns:
        The state with the gradient, and the part's share of the first of `METRICS`.
    """
    gradient, metrics = _gradient(networks, settings, state["theta"], inputs)
    return {"theta": state["theta"].detach(), "gradient": gradient}, metrics


def _gradient(
    networks: Networks, settings: MappoSettings, theta: Tensor, inputs: Inputs
) -> tuple[Float[Tensor, " size"], Float[Tensor, " losses"]]:
    """Of the loss by theta, and what the loss measured."""
    loss, metrics = ppo_loss(networks, settings, networks.layout.views(theta), inputs, inputs["entropy_weight"])
    (gradient,) = torch.autograd.grad(loss, theta)
    with torch.no_grad():
        return gradient, torch.stack([metrics[name] for name in METRICS[:_LOSSES]])


def _descend(
    networks: Networks, settings: MappoSettings, state: State, gradient: Tensor, metrics: Tensor, rate: Tensor
) -> tuple[State, Float[Tensor, " metrics"]]:
    """The step along a gradient, and the metrics with its norms behind them."""
    with torch.no_grad():
        actor = networks.actor_layout.size  # the actor's parameters come first
        parts = [torch.linalg.vector_norm(gradient[:actor]), torch.linalg.vector_norm(gradient[actor:])]
        gradient, norm = clip_by_norm(gradient, settings.max_grad_norm)
        step = state["step"] + 1.0
        theta, m, v = adam(state["theta"], gradient, state["m"], state["v"], step, rate)
        return {"theta": theta, "m": m, "v": v, "step": step}, torch.cat([metrics, torch.stack([norm, *parts])])


class Mappo:
    """The learner; see `core.spec.Learner`.

    Args:
        settings: of the run.
        observation: layout of what vehicles see.
        action: kind of what they do.
        spans: timers of the loop.
        group: of the workers; None: there is one.

    Raises:
        DeviceError: the device asked for is not there.
        ConfigError: settings that do not fit together.
    """

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        action: ActionSpec,
        *,
        spans: Spans | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.counters = Counters()
        self._settings, self._own = settings, own_settings(settings.learner, MappoSettings)
        self._spans, self._group = spans or Spans(enabled=False), group
        self._device = resolve_device(settings.device)
        self._conditioned = settings.algorithm == "pcmappo"
        encoder = make_encoder(observation, settings.context)
        wish = self._own.train_context_encoder
        trained = encoder is not None and (encoder.trained if wish is None else wish)
        self._networks = Networks(settings, observation, action, encoder, trained=trained)
        rng = generator(settings.seed, Branch.INITIALISATION)
        self._theta = torch.from_numpy(self._networks.initialise(rng)).to(self._device)
        self._m, self._v = torch.zeros_like(self._theta), torch.zeros_like(self._theta)
        self._average = self._theta.clone()
        self._greedy = False  # does the acting side have the average now?
        self._policy = ActingPolicy(
            settings,
            observation,
            encoder,
            trained=trained,
            actor=self._networks.actor,
            layout=self._networks.actor_layout,
            head=self._networks.head,
            conditioned=self._conditioned,
            device=self._device,
            rng=rng,
            rank=0 if group is None else group.rank,
        )
        name = settings.context.encoder
        obstacle = None
        if encoder is not None and trained and not encoder.static:
            obstacle = f"a trained {name} encoder has no static shapes"
        step = partial(minibatch_step if group is None else partial_step, self._networks, self._own)
        self._step = make_update(step, self._own, self._device, obstacle=obstacle)
        self._encoder = "none" if encoder is None else f"{name} ({'trained' if trained else 'frozen'})"
        self._layouts = {"theta": self._networks.layout, "encoder": self._policy.encoder_layout}
        self._identity = identity_of(settings.algorithm, observation, action, self._encoder, self._layouts)
        self._identity["activation"] = self._own.activation
        summed = self._theta.new_zeros(self._networks.layout.size + _LOSSES)
        self._sums = {} if group is None else {"gradient_sums": group.sums_form(summed)}  # as `sum_up` makes them
        self._shuffling = generator(settings.seed, Branch.MINIBATCH)
        self._scale = RunningScale(len(self._networks.components))
        self._make_rollout = partial(
            Rollout,
            self._policy.columns(),
            {"action": ((self._networks.head.stored,), np.float32)},
            objectives=len(OBJECTIVES),
            scene=observation.scene_size,
        )
        self._rollout = self._make_rollout()
        self._clock = 0  # env steps of the learner's life
        self._steps = self._own.n_steps if group is None else -(-self._own.n_steps // group.size)  # of this worker
        self._due = self._steps  # value of the clock at which the next update is due
        self._progress = 0.0

    def describe(self) -> dict[str, Any]:
        """See `core.spec.Learner`."""
        return {
            "algorithm": self._settings.algorithm,
            **self._policy.describe(),
            "threads": self._settings.threads,
            "encoder": self._encoder,
            "update_mode": self._step.mode or self._own.update_mode,
            "update_passes": passes_form(self._device),
            **self._sums,
            "parameters": self._networks.layout.size + self._policy.encoder_layout.size,
            **({"note": self._step.note} if self._step.note else {}),
        }

    def act(self, observation: Observation, *, explore: bool) -> Action:
        """See `core.spec.Learner`."""
        with self._spans("act"):
            if not len(observation):
                return Action(np.zeros((0, self._networks.head.stored), np.float32))
            self.counters.acting_steps += 1
            averaged = not explore and self._own.average_decay > 0.0
            if averaged != self._greedy:
                self._greedy = averaged
                self._policy.invalidate()
            source = self._average if averaged else self._theta
            return self._policy.act(observation, source[: self._networks.actor_layout.size], explore=explore)

    def store(self, observation: Observation, action: Action, step: Step) -> None:
        """See `core.spec.Learner`."""
        with self._spans("store"):
            if len(observation):
                columns = {**self._policy.view(observation, action), "action": action.extras["stored"]}
                self._rollout.open(observation.ids, observation.scene, columns, self._clock)
            finals = self._policy.view(step.final) if len(step.final) else {}
            self._rollout.close(step.closed, step.final.scene, finals)
            self._policy.forget(step.closed.ids[step.closed.terminated | step.closed.truncated])
            self._clock += step.steps
            self.counters.buffer_size = len(self._rollout)

    def ready(self, step: Step) -> bool:
        """See `core.spec.Learner`: every `n_steps` env steps, when no interval is open."""
        due = self._clock >= self._due and (step.everyone or step.done)
        return due and (self._group is not None or len(self._rollout) > 0)  # the others may have rows

    def progress(self, done: float) -> None:
        """See `core.spec.Learner`."""
        self._progress = done

    def update(self, step: Step) -> dict[str, float]:
        """See `core.spec.Learner`; with several workers it is collective."""
        with self._spans("update"):
            chains = self._rollout.chains(step.observation.ids)
            self._due = self._steps + (self._clock if self._group is None else self._due)
            if not len(chains.rows) and self._group is None:
                return {}
            rows, finals, scenes = self._rollout.views()
            table = {**rows, "action": self._rollout.column("action")}
            data = self._tensors(table, scenes)
            found = self._look_ahead(chains, step, data, finals, scenes)
            chosen = chains.rows
            if self._group is not None:
                table["log_prob"] = data["log_prob"].cpu().numpy()
                own = {name: column[chosen] for name, column in table.items()}
                table, scenes = pool(self._group, {**own, **found}, scenes, self._theta)
                found = {name: table.pop(name) for name in found}
                chosen = np.arange(len(table["scene"]))
                if not len(chosen):
                    return {}
                data = self._tensors(table, scenes)
            theta, normal = self._normalise(found["returns"])
            preference = table["preference"][chosen] if self._conditioned else None
            mixed = mix_advantages(found["advantages"], found["rewards"], preference, self._settings.preference)
            for name, column in (("returns", normal), ("advantage", mixed)):
                data[name] = torch.from_numpy(spread(column, chosen, len(table["scene"]))).to(self._device)

            metrics = self._learn(theta, data, chosen)
            self._policy.invalidate()
            self._rollout.discard(chains.rows)
            self.counters.updates_performed += 1
            self._follow()
            self.counters.buffer_size = len(self._rollout)
            return metrics | self._value_metrics(found["advantages"], found["returns"])

    def _look_ahead(
        self,
        chains: Chains,
        step: Step,
        data: dict[str, Tensor],
        finals: Mapping[str, np.ndarray],
        scenes: Float32[np.ndarray, "scenes scene"],
    ) -> dict[str, Float64[np.ndarray, "chained components"]]:
        """Advantages, returns and rewards of the rows of `chains`; `data` gets the log-probabilities of all rows."""
        going = {**self._policy.view(step.observation), "scene": np.zeros(len(step.observation), np.int64)}
        values, data["log_prob"] = self._look_back(data)
        after_final, _ = self._look_back(self._tensors(finals, scenes))
        after_going, _ = self._look_back(self._tensors(going, step.observation.scene[None]))
        rewards = self._rewards()
        discounts = self._settings.discount_per_second ** self._rollout.column("elapsed").astype(np.float64)
        advantages = chain_advantages(
            chains, rewards, values, after_final, after_going, discounts, self._own.gae_lambda
        )
        self._rollout.check_finite({"value": values, "log_prob": data["log_prob"].cpu().numpy()})
        returns = advantages + values[chains.rows]
        return {"advantages": advantages, "returns": returns, "rewards": rewards[chains.rows]}

    def _follow(self) -> None:
        """Move the average of the weights towards them; the first ones weigh little in it."""
        count = self.counters.updates_performed
        kept = min(self._own.average_decay, count / (count + 9.0))
        self._average = torch.lerp(self._theta, self._average, kept)

    def _tensors(self, table: Mapping[str, np.ndarray], scenes: np.ndarray) -> dict[str, Tensor]:
        """A table of views on the training device; the index of a scene becomes the scene."""
        found = {name: torch.from_numpy(array).to(self._device) for name, array in table.items()}
        found["scene"] = torch.from_numpy(scenes).to(self._device)[found["scene"]]
        return found

    def _look_back(self, data: _Batch) -> tuple[Float64[np.ndarray, "rows components"], Float[Tensor, " acted"]]:
        """Values in units of the rewards, and log-probabilities of actions where the rows have some."""
        parameters = self._networks.layout.views(self._theta)
        judging = self._networks.layout.views(self._average if self._own.average_decay else self._theta)
        values, log_probs = [], []
        with torch.no_grad():
            for first in range(0, max(1, len(data["ego"])), _CHUNK):
                rows = {name: tensor[first : first + _CHUNK] for name, tensor in data.items()}
                values.append(self._networks.critic(judging, rows))
                if "action" in rows:
                    outputs = self._networks.actor(parameters, rows)
                    log_probs.append(self._networks.head.log_prob(parameters, "actor.", outputs, rows["action"]))
        found = torch.cat(values).to("cpu", torch.float64).numpy()  # device sync: advantages are made in NumPy
        return found * self._scale.std + self._scale.mean, torch.cat(log_probs) if log_probs else torch.zeros(0)

    def _rewards(self) -> Float64[np.ndarray, "rows components"]:
        rewards = self._rollout.column("rewards").astype(np.float64)
        if self._conditioned:
            return np.concatenate([self._rollout.column("team")[:, None], rewards], 1)
        return scalarise(rewards, np.ones(len(OBJECTIVES)))[:, None]

    def _normalise(
        self, returns: Float64[np.ndarray, "chained components"]
    ) -> tuple[Tensor, Float64[np.ndarray, "chained components"]]:
        """Move the scale of returns along. Parameters that give the same values in it, and the returns in it."""
        before = self._scale.tensors(self._device)
        self._scale.observe(returns)
        theta, self._average = self._theta.clone(), self._average.clone()
        for weights in (theta, self._average):
            self._networks.rescale(self._networks.layout.views(weights), before, self._scale.tensors(self._device))
        return theta, (returns - self._scale.mean) / self._scale.std

    def _learn(self, theta: Tensor, data: dict[str, Tensor], rows: np.ndarray) -> dict[str, float]:
        """Epochs of minibatch steps, until the policy has moved by `target_kl`."""
        own, device = self._own, self._device
        rate = rate_schedule(own.learning_rate_schedule, own.learning_rate, own.learning_rate_end, self._progress)
        bonus = linear_schedule(own.entropy, own.entropy_end, self._progress)
        numbers = {
            "learning_rate": torch.tensor(rate, device=device),
            "entropy_weight": torch.tensor(bonus, device=device),
        }
        step = torch.tensor(float(self.counters.training_step), device=device)
        state: State = {"theta": theta, "m": self._m, "v": self._v, "step": step}
        tables: list[np.ndarray] = []
        for _ in range(own.epochs):
            order, weight = minibatches(rows, own.minibatch_size, self._shuffling)
            chosen, weights = torch.from_numpy(order).to(device), torch.from_numpy(weight).to(device)
            measured = []
            for index, share in zip(chosen, weights, strict=True):
                state, metrics = self._advance(state, data, index, share, numbers)
                measured.append(metrics)
            table = torch.stack(measured).cpu().numpy()  # device sync: the metrics flush, once an epoch
            broken = np.flatnonzero(~np.isfinite(table).all(1))
            if len(broken):
                dump = {name: tensor[chosen[broken[0]]].cpu().numpy() for name, tensor in data.items()}
                raise NotFiniteError(f"the loss or its gradient is not finite: {_named(table[broken[0]])}", batch=dump)
            tables.append(table)
            if own.target_kl is not None and table[:, METRICS.index("approx_kl")].mean() > own.target_kl:
                break
        self._theta, self._m, self._v = state["theta"], state["m"], state["v"]
        self.counters.training_step += sum(len(table) for table in tables)
        found = _named(np.concatenate(tables).mean(0)) | {"approx_kl": _named(tables[-1].mean(0))["approx_kl"]}
        used = {"learning_rate": rate, "entropy_weight": bonus, "epochs": len(tables), "rows": len(rows)}
        return {**found, **{name: float(value) for name, value in used.items()}}

    def _advance(
        self, state: State, data: _Batch, rows: Tensor, weight: Tensor, numbers: dict[str, Tensor]
    ) -> tuple[State, Float[Tensor, " metrics"]]:
        """A gradient step on a minibatch, of which each of several workers does its part."""
        group = self._group
        part = slice(None) if group is None else slice(group.rank, None, group.size)
        inputs = {name: tensor.index_select(0, rows[part]) for name, tensor in data.items()}
        inputs |= {"weight": weight[part], **numbers}
        leaf = as_leaf(state["theta"])
        if group is None:
            return self._step({**state, "theta": leaf}, inputs)
        inputs["total_weight"] = weight.sum()
        found, losses = self._step({"theta": leaf, "gradient": torch.zeros_like(state["theta"])}, inputs)
        gradient, losses = sum_up(group, found["gradient"], losses)
        return _descend(self._networks, self._own, state, gradient, losses, numbers["learning_rate"])

    def _value_metrics(self, advantages: np.ndarray, returns: np.ndarray) -> dict[str, float]:
        """Per component: how much of the returns' variance the critic foresaw, and the returns' running scale."""
        explained = 1.0 - advantages.var(0) / np.maximum(returns.var(0), 1e-12)
        found: dict[str, float] = {}
        for i, name in enumerate(self._networks.components):
            tag = f"_{name}" if self._conditioned else ""
            found[f"explained_variance{tag}"] = float(explained[i])
            found[f"value_mean{tag}"], found[f"value_std{tag}"] = float(self._scale.mean[i]), float(self._scale.std[i])
        return found

    def state(self) -> LearnerState:
        """See `core.spec.Learner`."""
        tensors = {"theta": self._theta, "m": self._m, "v": self._v}
        if self._own.average_decay:
            tensors["average"] = self._average
        arrays = {name: np.array(tensor.cpu().numpy()) for name, tensor in tensors.items()}
        acting, values = self._policy.state()
        rows = {f"rollout.{name}": array for name, array in self._rollout.state().items()}
        own = {
            "identity": self._identity,
            "counters": asdict(self.counters),
            "clock": self._clock,
            "due": self._due,
            "progress": self._progress,
            "update_mode": self._step.mode,
            "shuffling": generator_state(self._shuffling),
        }
        return LearnerState({**arrays, "scale": self._scale.state(), **acting, **rows}, {**own, "acting": values})

    def load(self, state: LearnerState, *, weights_only: bool = False) -> None:
        """See `core.spec.Learner`. Rows of another policy are of no use to this one: `weights_only` drops them.

        Raises:
            CheckpointError: it is another learner's, or something is missing.
        """
        tensors, values = state.tensors, state.values
        check_identity(self._identity, values.get("identity", {}), self._layouts)
        size = (self._networks.layout.size,)
        flats = {name: take(tensors, name, size) for name in (("theta",) if weights_only else ("theta", "m", "v"))}
        scale = take(tensors, "scale", self._scale.state().shape)
        rollout = self._make_rollout()
        if not weights_only:
            check_complete(self.state(), state)
            rollout.load({name[8:]: array for name, array in tensors.items() if name.startswith("rollout.")})
        self._policy.load(tensors, values.get("acting", {}), weights_only=weights_only)
        zeros = np.zeros(size, np.float32)
        self._theta, self._m, self._v = (
            torch.from_numpy(flats.get(name, zeros).copy()).to(self._device) for name in ("theta", "m", "v")
        )
        self._average = torch.from_numpy(self._saved_average(tensors, flats["theta"])).to(self._device)
        self._scale.load(scale)
        self._rollout = rollout
        self.counters = Counters()
        self._clock, self._due = 0, self._steps
        if not weights_only:
            self.counters = Counters(**values["counters"])
            self._clock, self._due, self._progress = values["clock"], values["due"], values["progress"]
            self._step.choose(values["update_mode"])
            self._shuffling = generator_from_state(values["shuffling"])
        self.invalidate()

    def _saved_average(
        self, tensors: Mapping[str, np.ndarray], theta: Float32[np.ndarray, " size"]
    ) -> Float32[np.ndarray, " size"]:
        """What a checkpoint has of it: all weights, the actor alone (older ones), or nothing; the rest is theta."""
        average, found = theta.copy(), tensors.get("average")
        if found is not None:
            covered = len(theta) if found.shape == theta.shape else self._networks.actor_layout.size
            average[:covered] = take(tensors, "average", (covered,))
        return average

    def invalidate(self) -> None:
        """See `core.spec.Learner`."""
        self._step.invalidate()
        self._policy.invalidate()

    def close(self) -> None:
        """See `core.spec.Learner`; nothing is held."""


def _named(measured: np.ndarray) -> dict[str, float]:
    return {name: float(value) for name, value in zip(METRICS, measured, strict=True)}
