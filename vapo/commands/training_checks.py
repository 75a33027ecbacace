"""What is checked of a config that trains actor and critic, before any weights are loaded."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from vapo.advantages.estimators import estimator_of
from vapo.config import FitConfig
from vapo.networks.build import check_critic, check_tokenizers
from vapo.networks.loading import load_tokenizer
from vapo.rollouts.engines.selection import check_engine
from vapo.system.devices import pick_device, set_threads


def checked_tokenizer(config: FitConfig) -> PreTrainedTokenizerBase:
    """Set the threads, and check device, engine, estimator, critic and tokenizers; the policy's.

    Raises: UserError: one of them does not fit the config or the machine.
    """
    set_threads(config.trainer)
    pick_device(config.trainer)
    check_engine(config)
    estimator_of(config.algorithm)
    check_critic(config)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    check_tokenizers(config, tokenizer)
    return tokenizer
