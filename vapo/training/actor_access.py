"""What a sampling engine gets of the module in training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from vapo.networks.lora import merged
from vapo.networks.token_inputs import TokenInputs
from vapo.rollouts.engines.selection import ActorAccess
from vapo.system.sharding import full_state, gathered
from vapo.training.module import VapoModule


def actor_access(module: VapoModule) -> ActorAccess:
    """What a sampling engine needs of the module's own actor."""

    def logprobs(inputs: TokenInputs) -> Tensor:
        with module.trainer.precision_plugin.forward_context():
            return inputs.scatter(module.actor(inputs, temperature=1.0)[0])

    return ActorAccess(
        model=module.actor.model,
        device=module.device,
        weights=lambda: actor_weights(module),
        logprobs=logprobs,
        gather=lambda: gathered(module.actor),
        local_rank=module.local_rank,
    )


def actor_weights(module: VapoModule) -> Iterator[tuple[str, Tensor]]:
    """Yield the actor's full weights under the model folder's names; every rank must iterate.

    A state dict names a tied weight twice, a list of parameters once: an engine that unties them
    would miss the second. Adapters are merged.
    """
    weights = ((name.removeprefix("model."), tensor) for name, tensor in full_state(module.actor))
    yield from merged(weights, module.config.actor.lora)
