"""The acting side of a learner: what vehicles see, what they prefer, what they do. Arrays in, arrays out.

A replica of the actor acts, with the encoder in its fastest form. Training never writes into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from opencda_marl.core.objectives import OBJECTIVES
from opencda_marl.core.seeds import Branch, generator, generator_from_state, generator_state
from opencda_marl.core.spec import Action, Observation, ObservationSpec
from opencda_marl.learners.identity import take
from opencda_marl.learners.preference import Preferences
from opencda_marl.nn.actor import ActorNetwork
from opencda_marl.nn.context import ActingEncoder, Encoder, encoder_version
from opencda_marl.nn.device import resolve_acting_threads, set_threads, torch_build
from opencda_marl.nn.flat import Layout
from opencda_marl.nn.heads import ActingHead
from opencda_marl.nn.native import build_of_library
from opencda_marl.nn.replica import Replica, resolve_acting_device
from opencda_marl.settings.networks import NetworkSettings, own_settings
from opencda_marl.settings.run import RunSettings

__all__ = ["ActingPolicy"]

Columns = dict[str, tuple[tuple[int, ...], Any]]


class ActingPolicy:
    """What turns observations into actions, and into the rows that a learner stores.

    Args:
        settings: of the run.
        observation: layout.
        encoder: of neighbour rows; None where there are none.
        trained: the encoder is part of the actor, under `actor.context.`; else it is frozen and its own.
        actor: up to its head; takes the context from `rows["context"]`.
        layout: of the actor's parameters.
        head: of the actor.
        conditioned: the policy sees a preference.
        device: of training.
        rng: for a frozen encoder's parameters.
        rank: of the worker; each explores and prefers on a twig of its own.
    """

    def __init__(
        self,
        settings: RunSettings,
        observation: ObservationSpec,
        encoder: Encoder | None,
        *,
        trained: bool,
        actor: ActorNetwork,
        layout: Layout,
        head: ActingHead,
        conditioned: bool,
        device: torch.device,
        rng: np.random.Generator,
        rank: int = 0,
    ) -> None:
        own = own_settings(settings.learner, NetworkSettings)
        self.device = resolve_acting_device(own.acting_device, device)
        self._training = device
        self._observation = observation
        self._head, self._encoder = head, encoder
        self._replica = Replica(layout, self.device, device)
        self._actor, self._actor_form = actor.acting(self._replica.parameters)
        self.threads = settings.threads
        if self._replica.engaged:
            self.threads = resolve_acting_threads(own.acting_threads)
        set_threads(self.threads)
        twig = (rank,) if rank else ()  # worker 0 draws what a run of one worker draws
        self._preferences = Preferences(settings.preference, settings.seed, *twig) if conditioned else None
        self._exploration = generator(settings.seed, Branch.EXPLORATION, *twig)
        self._frozen = encoder is not None and not trained
        self.encoder_layout = Layout(encoder.shapes("") if encoder is not None and self._frozen else {})
        self._encoder_flat = torch.zeros(self.encoder_layout.size, device=self.device)
        self._encode: ActingEncoder | None = None
        self._form = "none"
        self.encoder_version = ""  # of a frozen encoder: names its bits
        if encoder is not None and self._frozen:
            self._set_encoder(self.encoder_layout.flatten(encoder.initialise(rng, "")))

    def _set_encoder(self, flat: Float32[np.ndarray, " size"]) -> None:
        """Give a frozen encoder its parameters."""
        if self._encoder is not None and self._frozen:
            self._encoder_flat = torch.from_numpy(flat.copy()).to(self.device)
            self.encoder_version = encoder_version(self._encoder_flat)
            self._encode, self._form = self._encoder.acting(self.encoder_layout.views(self._encoder_flat), "")

    def columns(self) -> Columns:
        """What `view` gives: name -> (shape of a row, dtype)."""
        spec = self._observation
        view: Columns = {"ego": ((len(spec.ego),), np.float32)}
        if self._encoder is not None and self._frozen:
            view["context"] = ((self._encoder.size,), np.float32)
        elif self._encoder is not None:
            view["neighbours"] = ((spec.max_neighbours, len(spec.neighbour)), np.float32)
            view["counts"] = ((), np.int32)
        if self._preferences is not None:
            view["preference"] = ((len(OBJECTIVES),), np.float32)
        return view

    def view(self, observation: Observation, action: Action | None = None) -> dict[str, np.ndarray]:
        """What networks need of an observation: raw rows for a trained encoder, the context of a frozen one.

        Args:
            observation: what vehicles see.
            action: what `act` made of it; None: it was not acted upon, and a frozen encoder's context is made now.
        """
        view = {"ego": observation.ego}
        if self._frozen and action is not None:
            view["context"] = action.extras["context"]
        elif self._frozen:
            with torch.inference_mode():
                view["context"] = self._context(observation).cpu().numpy()
        elif self._encoder is not None:
            view["neighbours"], view["counts"] = observation.neighbours, observation.counts
        if self._preferences is not None:
            view["preference"] = self._preferences.of(observation.ids, explore=True)
        return view

    def act(self, observation: Observation, source: Float[Tensor, " size"], *, explore: bool) -> Action:
        """Actions for the rows of an observation.

        Args:
            observation: who must act.
            source: the actor's parameters; copied if they have changed.
            explore: draw noise, and preferences as in training.
        """
        if self._replica.refresh(source) and self._encoder is not None and not self._frozen:
            self._encode, self._form = self._encoder.acting(self._replica.parameters, "actor.context.")
        noise = self._head.noise(self._exploration, len(observation)) if explore else None
        with torch.inference_mode():
            rows = {"ego": self._tensor(observation.ego)}
            if self._encoder is not None:
                rows["context"] = self._context(observation)
            if self._preferences is not None:
                rows["preference"] = self._tensor(self._preferences.of(observation.ids, explore=explore))
            drawn = None if noise is None else self._tensor(noise)
            values, stored = self._head.act(self._replica.parameters, "actor.", self._actor(rows), drawn)
            extras = {"stored": stored.cpu().numpy()}
            if self._frozen:
                extras["context"] = rows["context"].cpu().numpy()
            return Action(values.cpu().numpy(), extras)

    def forget(self, ids: Int64[np.ndarray, " ended"]) -> None:
        """These vehicles have ended."""
        if self._preferences is not None:
            self._preferences.forget(ids)

    def invalidate(self) -> None:
        """The actor has changed: the replica is refreshed before the next act."""
        self._replica.invalidate()

    def _context(self, observation: Observation) -> Tensor:
        if self._encode is None:
            raise ValueError("a trained encoder has no parameters before the first act")
        neighbours, counts = self._tensor(observation.neighbours), self._tensor(observation.counts)
        return self._encode(neighbours, counts, self._tensor(observation.ego))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def describe(self) -> dict[str, Any]:
        """For the init line."""
        return {
            "device": str(self._training),
            "acting_device": str(self.device),
            "acting_threads": self.threads,
            "torch": torch_build(),
            "encoder_form": self._form,
            "actor_form": self._actor_form,
            "kernels": build_of_library() if "cpu" in (self.device.type, self._training.type) else "none",
        }

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Tensors and values, for a checkpoint; the actor's parameters are the learner's."""
        tensors = {"encoder": np.array(self._encoder_flat.cpu().numpy())}
        values: dict[str, Any] = {
            "exploration": generator_state(self._exploration),
            "encoder_version": self.encoder_version,
        }
        if self._preferences is not None:
            held, values["preference"] = self._preferences.state()
            tensors |= held
        return tensors, values

    def load(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any], *, weights_only: bool) -> None:
        """Become what `state` returned; generators last, so that nothing draws from them on the way."""
        self._set_encoder(take(tensors, "encoder", (self.encoder_layout.size,)))
        self.invalidate()
        if weights_only:
            return
        if self._preferences is not None:
            self._preferences.load(tensors, values["preference"])
        self._exploration = generator_from_state(values["exploration"])
