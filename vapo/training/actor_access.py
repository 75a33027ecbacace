"""What a sampling engine gets of the module in training."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.networks.token_inputs import TokenInputs
from vapo.rollouts.engines.contract import Sampler
from vapo.rollouts.engines.selection import ActorAccess, make_sampler
from vapo.system.sharding import gathered
from vapo.training.callbacks.weight_sync import actor_weights
from vapo.training.module import VapoModule


def sampler_maker(
    config: FitConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[VapoModule], Sampler]:
    """What makes the config's engine over a module's own actor."""
    return lambda module: make_sampler(config, actor_access(module), tokenizer)


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
