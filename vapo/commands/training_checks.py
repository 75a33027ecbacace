"""What is checked of a config that trains actor and critic, before any weights are loaded."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from vapo.advantages.estimators import estimator_of
from vapo.config import FitConfig
from vapo.networks.build import check_critic, check_tokenizers
from vapo.networks.loading import load_tokenizer
from vapo.networks.precision import settle_precision
from vapo.prompts.critic_prompts import with_critic_prompts
from vapo.prompts.load import load_prompts
from vapo.rollouts.engines.selection import check_engine
from vapo.rollouts.stored_rollouts import open_stored
from vapo.system.distributed import check_launch
from vapo.system.libraries import pick_device, quiet_libraries, set_threads
from vapo.training.parts import Inputs


def checked_inputs(config: FitConfig) -> Inputs:
    """Check the config against the machine, and read tokenizer, prompts and stored rollouts.

    Raises: UserError: one of them does not fit the config or the machine.
    """
    quiet_libraries()
    check_launch(config.trainer)
    return read_inputs(config, checked_tokenizer(config))


def read_inputs(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> Inputs:
    """The prompts and stored rollouts of a config. Raises: UserError."""
    prompts = with_critic_prompts(load_prompts(config.data, tokenizer), config, tokenizer)
    return Inputs(tokenizer, prompts, open_stored(config, tokenizer))


def checked_tokenizer(config: FitConfig) -> PreTrainedTokenizerBase:
    """Set threads and precision, and check device, engine, estimator, critic and tokenizers; the
    policy's.

    Raises: UserError: one of them does not fit the config or the machine.
    """
    set_threads(config.trainer)
    pick_device(config.trainer)
    check_engine(config)
    estimator_of(config.algorithm)
    check_critic(config)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    check_tokenizers(config, tokenizer)
    settle_precision(config)
    return tokenizer
