"""The bytes of an actor's hidden states that wait in the host's memory for a probe or an
estimator.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
from transformers import PreTrainedConfig

from vapo.config import FitConfig, resolve
from vapo.config.critic import ProbeCritic
from vapo.config.estimators import PoiseOptions
from vapo.functional.logprob_columns import NUM_LOGPROB_COLUMNS
from vapo.studies.estimate.sizes import local_rollouts


def read_layers(config: FitConfig) -> tuple[int, ...]:
    """Return the numbers of the actor's layers whose states the critic or the estimator reads."""
    critic = config.critic
    if config.algorithm.has_critic and isinstance(critic, ProbeCritic):
        return tuple(critic.probe.layers)
    return config.algorithm.read_layers


def states_bytes(
    num_layers: int, actor: PreTrainedConfig, config: FitConfig, *, item_bytes: int
) -> float:
    """Return the bytes of the actor's hidden states that a process holds in the host's memory.

    They are those of one iteration's responses, or of a file of stored rollouts if it has more.

    Args:
        num_layers: the number of layers whose states are read.
        actor: the actor's model config.
        item_bytes: the bytes of one number.
    """
    rows, name = local_rollouts(config), config.components.value_pretraining.data
    if name and resolve(config).value_pretraining_iterations and Path(name).is_file():
        rows = max(rows, pyarrow.parquet.read_metadata(name).num_rows)  # each process has all
    tokens = rows * config.rollouts.max_response_tokens
    if isinstance(config.algorithm, PoiseOptions):
        tokens = rows * (1 + config.algorithm.poise.num_states)
    channels = num_layers * int(actor.get_text_config(decoder=True).hidden_size)
    return float(tokens * channels * item_bytes)


def gram_bytes(actor: PreTrainedConfig, config: FitConfig) -> float:
    """Return the bytes of `critic.ridge`'s Gram matrices, one for each batch of its window.

    They are 0.0 without `critic.ridge`.
    """
    critic = config.critic
    if critic.ridge is None or not config.algorithm.has_critic:
        return 0.0
    size = 2 + (NUM_LOGPROB_COLUMNS if critic.sampled_logprobs is not None else 0)
    if isinstance(critic, ProbeCritic):
        size += len(critic.probe.layers) * int(actor.get_text_config(decoder=True).hidden_size)
    return float(critic.ridge.window_batches * critic.count * size**2 * 8)
