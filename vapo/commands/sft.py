"""`vapo sft`: a cold-start policy from demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import FitConfig, SftConfig
from vapo.environments.selection import make_environments
from vapo.errors import UserError
from vapo.evaluation import evaluate
from vapo.networks.actor_critic import Actor
from vapo.networks.export import save_folder
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.new_model import make_model, make_tokenizer
from vapo.networks.precision import settle_precision
from vapo.networks.token_inputs import TokenInputs, token_inputs
from vapo.prompts.load import load_prompts
from vapo.rollouts.demonstrated_episodes import play_demonstrations
from vapo.rollouts.engines.selection import access_to, check_engine, make_sampler, sampling_config
from vapo.rollouts.player import Player
from vapo.system.devices import pick_device, set_threads
from vapo.system.progress import Progress
from vapo.system.quiet import quiet_libraries
from vapo.system.seeding import derive_seed
from vapo.system.shown_text import say
from vapo.training.supervised import (
    Batches,
    SupervisedBatch,
    SupervisedModule,
    recorded_run,
    train_supervised,
)
from vapo.types import Prompt, Rollout


def run(config: SftConfig) -> None:
    """Train on demonstrations, write a Hugging Face folder, evaluate it on held-out prompts."""
    quiet_libraries()
    set_threads(config.trainer)
    settle_precision(config)
    device = pick_device(config.trainer)
    sampling = sampling_config(config, config.export_dir, config.evaluation)
    check_engine(sampling)
    torch.manual_seed(derive_seed(config.seed, "weights") % 2**32)
    model, tokenizer = make_or_load(config)
    prompts = load_prompts(config.data, tokenizer)
    require_demonstrations(prompts.train, environment_is_used=config.environment.is_used)
    actor = Actor(model)
    batches = Batches(
        *examples_of(prompts.train, config, sampling, tokenizer),
        batch_size=config.batch_size,
        num_steps=config.num_steps,
        seed=config.seed,
    )
    module = SupervisedModule(
        actor,
        lambda inputs: summed_nll(actor, inputs),
        config.optimizer,
        num_steps=config.num_steps,
        decay_fraction=config.decay_fraction,
    )
    export_dir = Path(config.export_dir)
    with recorded_run(config, sampling, "sft", prompts) as (progress, scorer, logger):
        train_supervised(
            module,
            batches,
            loss_name="sft/loss",
            logger=logger,
            progress=progress,
            accelerator=config.trainer.accelerator,
            precision=config.trainer.precision,
        )
        save_folder(model, dict(model.state_dict()), tokenizer, export_dir)
        with closing(make_sampler(sampling, access_to(model, device), tokenizer)) as sampler:
            result = evaluate(
                prompts.heldout,
                player=Player(sampling, sampler, scorer, tokenizer),
                config=config.evaluation,
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=progress,
            )
        logger.log_metrics(result.metrics, step=config.num_steps)
        logger.log_table(result.rows, "samples/final.json")
        recorded = logger.describe()
    score = result.metrics["eval/avg_at_k"]
    say(f"held-out avg@{config.evaluation.k}: {score:.3f}\n{recorded}\n{export_dir}")


def examples_of(
    prompts: list[Prompt],
    config: SftConfig,
    sampling: FitConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Any], Callable[[list[Any]], SupervisedBatch]]:
    """The examples, and what makes an optimizer step of some: prompts, or episodes played of them.

    Raises: UserError: a demonstration and the environment do not fit together.
    """
    pad_id, max_tokens = int(tokenizer.pad_token_id), config.microbatch_tokens
    if not config.environment.is_used:
        return prompts, partial(
            collate_demonstrations, tokenizer=tokenizer, pad_id=pad_id, max_tokens=max_tokens
        )
    with (
        Progress() as progress,
        closing(make_environments(sampling)) as environments,
        progress.stage("demonstrations", total=len(prompts), unit="episodes") as advance,
    ):
        episodes = play_demonstrations(
            prompts, environments, config=sampling, tokenizer=tokenizer, advance=advance
        )
    return episodes, partial(collate_episodes, pad_id=pad_id, max_tokens=max_tokens)


def require_demonstrations(prompts: list[Prompt], *, environment_is_used: bool) -> None:
    """Raises: UserError: a row has none, or turns that no environment would answer."""
    missing = next((prompt for prompt in prompts if prompt.demonstration is None), None)
    if missing is not None:
        raise UserError(
            f"data.train: prompt {missing.prompt_id} has no demonstration; set "
            "data.train.demonstration_column to the column of worked responses"
        )
    turns = next((p for p in prompts if not isinstance(p.demonstration, str)), None)
    if turns is not None and not environment_is_used:
        raise UserError(
            f"data.train: prompt {turns.prompt_id} has a list of turns as its demonstration: set "
            "environment.kind to what answers them, or give one text"
        )


def make_or_load(config: SftConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if config.model_path is None:
        tokenizer = make_tokenizer(config.new_model.alphabet)
        return make_model(config.new_model, tokenizer), tokenizer
    model = load_causal_lm(config.model_path, dtype="float32", attn_implementation="auto")
    return model, load_tokenizer(config.model_path)


def collate_demonstrations(
    examples: list[Prompt], tokenizer: PreTrainedTokenizerBase, pad_id: int, *, max_tokens: int
) -> SupervisedBatch:
    """Prompts and demonstrations with their end tokens; the denominator counts the latter's."""
    pairs = []
    for prompt in examples:
        ids = tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
        pairs.append((prompt.prompt_ids, (*ids, int(tokenizer.eos_token_id))))
    everything = [(True,) * len(ids) for _, ids in pairs]
    return _cut(pairs, everything, pad_id, max_tokens=max_tokens)


def collate_episodes(examples: list[Rollout], pad_id: int, *, max_tokens: int) -> SupervisedBatch:
    """Episodes, of which the policy's tokens alone have loss, and count in the denominator."""
    pairs = [(episode.prompt.prompt_ids, episode.response_ids) for episode in examples]
    return _cut(pairs, [episode.is_sampled for episode in examples], pad_id, max_tokens=max_tokens)


def _cut(
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    has_loss: Sequence[tuple[bool, ...]],
    pad_id: int,
    *,
    max_tokens: int,
) -> SupervisedBatch:
    lengths = [len(prompt_ids) + len(ids) for prompt_ids, ids in pairs]
    microbatches = []
    for chunk in cut_by_tokens(lengths, range(len(pairs)), max_tokens=max_tokens):
        masks = [torch.tensor(has_loss[row]) for row in chunk]
        microbatches.append(
            token_inputs(
                [pairs[row] for row in chunk],
                pad_id=pad_id,
                response_mask=pad_sequence(masks, batch_first=True, padding_value=False),
            )
        )
    return SupervisedBatch(microbatches, denominator=sum(map(sum, has_loss)))


def summed_nll(actor: Actor, inputs: TokenInputs) -> Tensor:
    """Negative log-likelihood of the demonstrations' tokens, summed, in nats."""
    logprobs, _ = actor(inputs, temperature=1.0)
    return -cast(Tensor, logprobs).sum()
