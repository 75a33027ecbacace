"""Functions that all commands share which sample from a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.schema import EvaluationConfig
from vapo.config.sources import default_name
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.precision import resolve_precision
from vapo.networks.special_tokens import special_text
from vapo.prompts.load import PromptSplit, load_prompts
from vapo.rewards.scorer import Scorer, make_scorer
from vapo.rollouts.engines.selection import (
    ActorAccess,
    access_to,
    check_engine,
    make_sampler,
    sampling_config,
)
from vapo.rollouts.player import RolloutRunner
from vapo.runs.checkpoints import Checkpoint
from vapo.system.libraries import pick_device, quiet_libraries, set_threads
from vapo.system.progress import Progress
from vapo.tracking.inputs import dataset_inputs, model_tags, params, recorded_tracking

if TYPE_CHECKING:
    from vapo.tracking.logger import RunLogger


def read_inputs(config: FitConfig) -> tuple[PreTrainedTokenizerBase, PromptSplit]:
    """Set threads and precision, and check the engine. Return the tokenizer and the prompts.

    Raises: UserError: one of them does not fit the config or the machine.
    """
    quiet_libraries()
    set_threads(config.trainer)
    check_engine(config)
    tokenizer = load_tokenizer(config.actor.path, key="actor.path")
    resolve_precision(config)
    return tokenizer, read_prompts(config, tokenizer)


def read_prompts(
    config: FitConfig | SftConfig | RewardModelConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptSplit:
    """Return the prompts, after a check that responses can have the text `rewards.answer_after`.

    Raises: UserError: the prompts cannot be read, or that text is a special token that responses
    leave out.
    """
    mark, keeps_special = config.rewards.answer_after, config.rewards.keep_special_tokens
    special = None if mark is None or keeps_special else special_text(tokenizer).search(mark)
    if special is not None:
        raise UserError(
            f"rewards.answer_after {mark!r} would be in no response: {special[0]!r} is a special "
            "token of the policy's tokenizer, and rewards.keep_special_tokens=false leaves these "
            "out; set it to true"
        )
    return load_prompts(config.data, tokenizer)


def settled_sampling(
    config: SftConfig | RewardModelConfig, path: str, evaluation: EvaluationConfig
) -> FitConfig:
    """Set threads and precision. Return the config for sampling from the policy in `path`.

    Raises: UserError: the config does not fit the machine.
    """
    quiet_libraries()
    set_threads(config.trainer)
    resolve_precision(config)
    sampling = sampling_config(config, path, evaluation)
    check_engine(sampling)
    return sampling


@contextmanager
def command_recorder(
    config: FitConfig,
    command: str,
    prompts: PromptSplit | None,
    *,
    name: str | None = None,
    critic: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[tuple[Progress, RunLogger]]:
    """Yield the progress display and the MLflow run of a command, with config and prompts recorded.

    Args:
        name: the run's name if the config has none. If None, it comes from command and config.
        critic: the folder of the critic with which the command begins.
    """
    from vapo.tracking.logger import RunLogger  # imports Lightning, so only here

    with (
        Progress() as progress,
        RunLogger(
            recorded_tracking(config),
            run_name=config.tracking.run_name or name or default_name(config, command),
            tags={"command": command, **(tags or {}), **model_tags(config, critic)},
            note=progress.note,
        ) as logger,
    ):
        logger.log_config(to_yaml(config), params(config))
        if prompts is not None:
            logger.log_inputs(dataset_inputs(config, prompts))
            progress.note(prompts.report.describe())
        yield progress, logger


@contextmanager
def policy_player_of(
    config: FitConfig, access: ActorAccess, tokenizer: PreTrainedTokenizerBase, scorer: Scorer
) -> Iterator[RolloutRunner]:
    """Start the config's engine on a policy, and yield a player that samples and judges with it."""
    with closing(make_sampler(config, access, tokenizer)) as sampler:
        yield RolloutRunner(config, sampler, scorer, tokenizer)


@contextmanager
def policy_player(config: FitConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[RolloutRunner]:
    """Load the config's policy, start engine and scorer, and yield a player that uses them."""
    access = load_policy(config)
    with (
        make_scorer(config) as scorer,
        policy_player_of(config, access, tokenizer, scorer) as player,
    ):
        yield player


def load_policy(config: FitConfig, checkpoint: Checkpoint | None = None) -> ActorAccess:
    """Load the actor from the config's folder, or its weights from a checkpoint.

    Return what a sampling engine needs of it.
    """
    model = load_causal_lm(
        config.actor.path,
        dtype=config.actor.dtype,
        attn_implementation=config.actor.attn_implementation,
    )
    if checkpoint is not None:
        checkpoint.fill(model, "actor", config.actor.path)
    return access_to(model, pick_device(config.trainer))
