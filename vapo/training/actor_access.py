"""What a sampling engine gets of the module in training."""

from __future__ import annotations

from torch import Tensor

from vapo.networks.token_inputs import TokenInputs
from vapo.rollouts.engines.selection import ActorAccess
from vapo.system.sharding import gathered
from vapo.training.callbacks.weight_sync import actor_weights
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
