"""What the commands share that sample with a policy and train nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig
from vapo.config.sources import default_name
from vapo.config.written import to_yaml
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.precision import settle_precision
from vapo.prompts.load import PromptSplit, load_prompts
from vapo.rewards.scorer import Scorer
from vapo.rollouts.engines.selection import ActorAccess, access_to, check_engine, make_sampler
from vapo.rollouts.player import Player
from vapo.runs.checkpoints import Checkpoint
from vapo.system.libraries import pick_device, set_threads
from vapo.system.progress import Progress
from vapo.tracking.inputs import dataset_inputs, model_tags, params, recorded_tracking

if TYPE_CHECKING:
    from vapo.tracking.logger import RunLogger


def read_inputs(config: FitConfig) -> tuple[PreTrainedTokenizerBase, PromptSplit]:
    """Set threads and precision, check the engine, and read tokenizer and prompts.

    Raises: UserError: one of them does not fit the config or the machine.
    """
    set_threads(config.trainer)
    settle_precision(config)
    check_engine(config)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    return tokenizer, load_prompts(config.data, tokenizer)


@contextmanager
def recorded(
    config: FitConfig, command: str, prompts: PromptSplit
) -> Iterator[tuple[Progress, RunLogger]]:
    """Open the display and the MLflow run of a command; record its config and what it reads."""
    from vapo.tracking.logger import RunLogger  # a Lightning logger: not where nothing is recorded

    with (
        Progress() as progress,
        RunLogger(
            recorded_tracking(config),
            run_name=config.tracking.run_name or default_name(config, command),
            tags={"command": command, **model_tags(config, None)},
            note=progress.note,
        ) as logger,
    ):
        logger.log_config(to_yaml(config), params(config))
        logger.log_inputs(dataset_inputs(config, prompts))
        progress.note(prompts.report.describe())
        yield progress, logger


@contextmanager
def policy_player(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Player]:
    """Load the config's policy, start its engine and what judges, and play with them."""
    with (
        closing(make_sampler(config, load_policy(config), tokenizer)) as sampler,
        Scorer(config) as scorer,
    ):
        yield Player(config, sampler, scorer, tokenizer)


def load_policy(config: FitConfig, checkpoint: Checkpoint | None = None) -> ActorAccess:
    """The actor of the config's folder, or of a checkpoint, for a sampling engine."""
    model = load_causal_lm(
        config.actor.path,
        dtype=config.actor.dtype,
        attn_implementation=config.actor.attn_implementation,
    )
    if checkpoint is not None:
        checkpoint.fill(model, "actor", config.actor.path)
    return access_to(model, pick_device(config.trainer))
