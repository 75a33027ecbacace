"""`vapo sft`: a cold-start policy from demonstrations."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import SftConfig
from vapo.errors import UserError
from vapo.evaluation import evaluate
from vapo.networks.actor import Actor
from vapo.networks.export import save_folder
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.new_model import make_model, make_tokenizer
from vapo.networks.token_inputs import TokenInputs, cut_by_tokens, token_inputs
from vapo.prompts.load import load_prompts
from vapo.rollouts.engines.selection import access_to, check_engine, make_sampler, sampling_config
from vapo.system.devices import pick_device, set_threads
from vapo.system.quiet import quiet_libraries
from vapo.system.seeding import derive_seed
from vapo.training.supervised import (
    Batches,
    SupervisedBatch,
    SupervisedModule,
    recorded_run,
    train_supervised,
)
from vapo.types import Prompt


def run(config: SftConfig) -> None:
    """Train on demonstrations, write a Hugging Face folder, evaluate it on held-out prompts."""
    quiet_libraries()
    set_threads(config.trainer)
    device = pick_device(config.trainer)
    sampling = sampling_config(config, config.export_dir, config.evaluation)
    check_engine(sampling)
    torch.manual_seed(derive_seed(config.seed, "weights") % 2**32)
    model, tokenizer = make_or_load(config)
    prompts = load_prompts(config.data, tokenizer)
    require_demonstrations(prompts.train)
    actor = Actor(model)
    pad_id = int(tokenizer.pad_token_id)
    batches = Batches(
        prompts.train,
        lambda examples: collate_demonstrations(
            examples, tokenizer, pad_id, max_tokens=config.microbatch_tokens
        ),
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
    with recorded_run(config, "sft", prompts) as (progress, scorer, logger):
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
                sampler=sampler,
                scorer=scorer,
                config=config.evaluation,
                max_response_tokens=config.rollouts.max_response_tokens,
                progress=progress,
            )
        logger.log_metrics(result.metrics, step=config.num_steps)
        logger.log_table(result.rows, "samples/final.json")
        recorded = logger.describe()
    score = result.metrics["eval/avg_at_k"]
    print(f"held-out avg@{config.evaluation.k}: {score:.3f}\n{recorded}\n{export_dir}")


def require_demonstrations(prompts: list[Prompt]) -> None:
    missing = next((prompt for prompt in prompts if prompt.demonstration is None), None)
    if missing is not None:
        raise UserError(
            f"data.train: prompt {missing.prompt_id} has no demonstration; set "
            "data.train.demonstration_column to the column of worked responses"
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
        pairs.append((prompt.prompt_ids, [*ids, int(tokenizer.eos_token_id)]))
    lengths = [len(prompt_ids) + len(ids) for prompt_ids, ids in pairs]
    chunks = cut_by_tokens(lengths, range(len(pairs)), max_tokens=max_tokens)
    return SupervisedBatch(
        [token_inputs([pairs[row] for row in chunk], pad_id=pad_id) for chunk in chunks],
        denominator=sum(len(ids) for _, ids in pairs),
    )


def summed_nll(actor: Actor, inputs: TokenInputs) -> Tensor:
    """Negative log-likelihood of the demonstrations' tokens, summed, in nats."""
    logprobs, _ = actor(inputs, temperature=1.0)
    return -cast(Tensor, logprobs).sum()
