"""`vapo sft`: a cold-start policy from demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.commands.sampling import policy_player_of, read_prompts, settled_sampling
from vapo.config import FitConfig, SftConfig
from vapo.environments.processes import make_environments
from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.evaluation import evaluate, evaluation_settings
from vapo.networks.actor_critic import Actor
from vapo.networks.end_tokens import EndTokens, end_tokens, name_end_tokens, turn_ids_with_end
from vapo.networks.export import check_saving, save_folder
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.generation_files import generation_file
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.new_model import make_model, make_tokenizer
from vapo.networks.token_inputs import TokenInputs, token_inputs
from vapo.prompts.load import PromptSplit
from vapo.rollouts.demonstrated_episodes import play_demonstrations
from vapo.rollouts.engines.contract import TurnRequest, check_turn
from vapo.rollouts.engines.selection import access_to
from vapo.system.libraries import pick_device
from vapo.system.process import derive_seed
from vapo.system.progress import Progress
from vapo.training.supervised import (
    Batches,
    SupervisedBatch,
    SupervisedModule,
    recorded_run,
    train_supervised,
)
from vapo.types import Prompt, Rollout

Example = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]
"""A prompt's tokens, the tokens that follow it, and for each of the latter whether it has loss."""


def run(config: SftConfig) -> None:
    """Train on demonstrations, write a Hugging Face folder, evaluate it on held-out prompts."""
    sampling = settled_sampling(config, config.export_dir, config.evaluation)
    device = pick_device(config.trainer)
    torch.manual_seed(derive_seed(config.seed, "weights") % 2**32)
    model, tokenizer, generation = starting_model(config)
    prompts = read_prompts(config, tokenizer)
    require_demonstrations(prompts.train)
    ends = end_tokens(tokenizer, model.generation_config, data=config.data)
    # without these names the policy would write on after what it learned
    generation = name_end_tokens(model, tokenizer, ends, generation)
    examples = examples_of(prompts.train, config, sampling, tokenizer, ends)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    check_lengths(prompts, examples, config, positions)
    actor = Actor(model, rounds=True)
    batches = Batches(
        examples,
        partial(cut, pad_id=int(tokenizer.pad_token_id), max_tokens=config.microbatch_tokens),
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
    export_dir = Path(config.export_dir).expanduser()
    with recorded_run(config, sampling, "sft", prompts, model) as (progress, scorer, logger):
        train_supervised(
            module,
            batches,
            loss_name="sft/loss",
            logger=logger,
            progress=progress,
            accelerator=config.trainer.accelerator,
            precision=config.trainer.precision,
        )
        state = dict(model.state_dict())
        save_folder(model, state, tokenizer, export_dir, generation=generation)
        with policy_player_of(sampling, access_to(model, device), tokenizer, scorer) as player:
            result = evaluate(
                prompts.heldout,
                player=player,
                config=config.evaluation,
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=progress,
            )
        logger.log_metrics(result.metrics, step=config.num_steps)
        logger.log_table(result.rows, "samples/final.json")
        recorded = logger.describe()
    score = result.metrics["eval/avg_at_k"]
    say(f"held-out avg@{config.evaluation.k}: {score:.3f}\n{recorded}\n{export_dir}")


def starting_model(
    config: SftConfig,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, bytes | None]:
    """Return the model to train, its tokenizer, and its generation_config.json or None.

    Raises: UserError: config.model_path cannot be loaded, or could not be saved after training.
    """
    if config.model_path is None:
        new = make_tokenizer(config.new_model.alphabet)
        return make_model(config.new_model, new), new, None
    model = load_causal_lm(config.model_path, dtype="float32", attn_implementation="auto")
    tokenizer = load_tokenizer(config.model_path)
    check_saving(model.config, tokenizer, config.model_path)
    return model, tokenizer, generation_file(config.model_path)


def examples_of(
    prompts: list[Prompt],
    config: SftConfig,
    sampling: FitConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: EndTokens,
) -> list[Example]:
    """Return the training examples of all prompts.

    An environment, if there is one, answers the turns of each demonstration.

    Raises: UserError: a demonstration does not fit the environment.
    """
    if not config.environment.is_used:
        return [prompt_example(prompt, tokenizer, ends) for prompt in prompts]
    with (
        Progress() as progress,
        closing(make_environments(sampling)) as environments,
        progress.stage("demonstrations", total=len(prompts), unit="episodes") as advance,
    ):
        episodes = play_demonstrations(
            prompts,
            environments,
            config=sampling,
            tokenizer=tokenizer,
            ends=ends,
            advance=advance,
        )
    return [episode_example(episode) for episode in episodes]


def prompt_example(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, ends: EndTokens | None = None
) -> Example:
    """Return the training example of a prompt, whose demonstration is a text.

    The tokens end with an end token: the demonstration's own, or the one that the policy learns.

    Args:
        ends: the policy's end tokens. If None, those of its tokenizer.

    Raises: UserError: the demonstration is a list of turns, which need an environment.
    """
    if not isinstance(prompt.demonstration, str):
        raise UserError(
            f"data.train: prompt {prompt.prompt_id} has a list of turns as its demonstration: set "
            "environment.kind to what answers them, or give one text"
        )
    ids = turn_ids_with_end(prompt.demonstration, tokenizer, ends or end_tokens(tokenizer))
    return prompt.prompt_ids, tuple(ids), (True,) * len(ids)


def episode_example(episode: Rollout) -> Example:
    """Return the training example of an episode, in which only the policy's tokens have loss."""
    return episode.prompt.prompt_ids, episode.response_ids, episode.is_sampled


def require_demonstrations(prompts: list[Prompt]) -> None:
    """Check that each prompt has a demonstration. Raises: UserError: one has none."""
    missing = next((prompt for prompt in prompts if prompt.demonstration is None), None)
    if missing is not None:
        raise UserError(
            f"data.train: prompt {missing.prompt_id} has no demonstration; set "
            "data.train.demonstration_column to the column of worked responses"
        )


def check_lengths(
    split: PromptSplit, examples: Sequence[Example], config: SftConfig, positions: int | None
) -> None:
    """Check that no row is longer than the model's positions, or than evaluation samples.

    `positions` is None for a model without a limit.

    Raises: UserError: there are rows that are too long; says how many, and names one.
    """
    budget = evaluation_settings(config.evaluation, config.rollouts.max_response_tokens)
    max_tokens, rows = budget.max_response_tokens, split.train
    wholes = [len(prompt_ids) + len(ids) for prompt_ids, ids, _ in examples]
    if positions is not None and max(wholes) > positions:
        raise UserError(
            f"data.train: {_longer(wholes, positions, rows)}, prompt and demonstration together, "
            f"and the model has {positions} positions: leave such rows out, or shorten them"
        )
    lengths = [len(ids) for _, ids, _ in examples]
    if max(lengths) > max_tokens:
        is_own = config.evaluation.max_response_tokens is not None
        key = f"{'evaluation' if is_own else 'rollouts'}.max_response_tokens"
        raise UserError(
            f"data.train: {_longer(lengths, max_tokens, rows)}, the demonstration with its end "
            f"token, and {key} is {max_tokens}: the policy would learn what it has no room to "
            f"finish; raise {key}, or leave such rows out"
        )
    if not config.environment.is_used:
        longest = max(split.heldout, key=lambda prompt: len(prompt.prompt_ids))
        check_turn(
            TurnRequest((0, 0), 0, longest.prompt_ids, max_tokens, longest.prompt_id), positions
        )


def _longer(lengths: Sequence[int], maximum: int, rows: Sequence[Prompt]) -> str:
    number = sum(length > maximum for length in lengths)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return (
        f"{number} of {len(lengths)} rows are too long; the longest is {rows[longest].prompt_id} "
        f"with {lengths[longest]} tokens"
    )


def cut(examples: Sequence[Example], pad_id: int, *, max_tokens: int) -> SupervisedBatch:
    """Return the micro-batches of one optimizer step.

    The denominator counts tokens with loss. `max_tokens` is the limit of a micro-batch.
    """
    lengths = [len(prompt_ids) + len(ids) for prompt_ids, ids, _ in examples]
    microbatches = []
    for rows in cut_by_tokens(lengths, range(len(examples)), max_tokens=max_tokens):
        masks = [torch.tensor(examples[row][2]) for row in rows]
        microbatches.append(
            token_inputs(
                [examples[row][:2] for row in rows],
                pad_id=pad_id,
                response_mask=pad_sequence(masks, batch_first=True, padding_value=False),
            )
        )
    return SupervisedBatch(microbatches, denominator=sum(sum(mask) for *_, mask in examples))


def summed_nll(actor: Actor, inputs: TokenInputs) -> Tensor:
    """Return the summed negative log-likelihood of the demonstrations' tokens, in nats."""
    logprobs = actor(inputs, temperature=1.0).logprobs
    return -cast(Tensor, logprobs).sum()
