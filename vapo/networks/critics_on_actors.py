"""Critics without a network of their own: they compute values from an actor's states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from vapo.networks.actor_critic import Actor, Critic, ForwardFlops, num_parameters
from vapo.networks.adapters import AdaptersForSequenceClassification, on_base
from vapo.networks.lora import adapter_layers
from vapo.networks.probe import ProbeForSequenceClassification
from vapo.networks.token_inputs import TokenInputs


class Probe(Critic):
    """A critic that is a value head on hidden states which the actor computes before the update.

    It contains no part of the actor, so no gradient reaches the actor.
    """

    def _flops(self) -> ForwardFlops:
        return ForwardFlops(0, 2 * num_parameters(self.model.parameters()), 0)

    def states(self, inputs: TokenInputs) -> Float[Tensor, "n F"]:
        if inputs.actor_states is None:
            raise ValueError("a probe reads the actor's states, which these inputs lack")
        states: Tensor = self.model.get_submodule("model")(inputs.actor_states)
        return states


class AdapterCritic(Critic):
    """A critic that computes values with the actor's frozen base, adapters of its own and a head.

    The actor's own adapters are off in its passes. The actor is not a submodule, so that it is
    sharded, moved, trained and saved only once.

    Raises: ValueError: the actor's model has no hook for a module that has an adapter
        (`accept_adapters`).
    """

    actor: Actor
    _actor_adapters: list[Any]

    def __init__(self, model: PreTrainedModel, actor: Actor) -> None:
        places: frozenset[str] = getattr(actor.model, "adapter_places", frozenset())
        if missing_modules := model.config.targets.keys() - places:
            raise ValueError(
                f"the actor has no place for the adapters of {sorted(missing_modules)}"
            )
        self.__dict__.update(actor=actor, _actor_adapters=adapter_layers(actor))
        super().__init__(model)

    def _flops(self) -> ForwardFlops:
        base_flops = ForwardFlops.of(self.actor.model, self.model.get_submodule("score"))
        adapter_flops = 2 * num_parameters(self.model.base_model.parameters())
        return replace(base_flops, per_token=base_flops.frozen_per_token + adapter_flops)

    def states(self, inputs: TokenInputs) -> Float[Tensor, "n F"]:
        layers: Any = self.model.get_submodule("model")
        with on_base(layers, self._actor_adapters):
            states: Tensor = self.actor(inputs, temperature=None, layers=(-1,)).states[:, 0]
        return states


def critic_of(model: PreTrainedModel, actor: Actor | None = None) -> Critic:
    """Wrap a value model in the critic class that runs it: on an actor's states, or by itself.

    Args:
        actor: the actor on whose base a critic of adapters works; other critics do not need it.
    """
    if isinstance(model, AdaptersForSequenceClassification):
        assert actor is not None, "adapters are on an actor's base"
        return AdapterCritic(model, actor)
    return Probe(model) if isinstance(model, ProbeForSequenceClassification) else Critic(model)
