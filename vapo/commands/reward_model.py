"""`vapo reward-model`: regress the verifier's reward at the last token of whole responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.commands.sampling import policy_player_of, read_prompts, settled_sampling
from vapo.config import RewardModelConfig
from vapo.config.schema import EvaluationConfig
from vapo.errors.shown_text import say
from vapo.functional.metrics import explained_variance
from vapo.networks.actor_critic import Critic, CriticOutput
from vapo.networks.export import check_saving, save_folder
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.loading import load_causal_lm, load_tokenizer, load_value_model
from vapo.networks.token_inputs import TokenInputs, token_inputs
from vapo.prompts.training_set import group_sampling
from vapo.rewards.reward_model import end_inputs
from vapo.rewards.scorer import VerifierScorer
from vapo.rollouts.collection import sample_and_score
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.engines.selection import access_to
from vapo.rollouts.segments import with_response
from vapo.system.libraries import pick_device
from vapo.system.process import derive_seed
from vapo.training.supervised import (
    Batches,
    SupervisedBatch,
    SupervisedModule,
    recorded_run,
    train_supervised,
)
from vapo.types import FinishReason, Rollout

NUM_HELDOUT_BATCHES = 4


@dataclass(frozen=True)
class ScoredInputs:
    """The inputs of a reward model and the rewards that it learns to predict.

    Each row has one state, the one after the response's last token.
    """

    inputs: TokenInputs
    rewards: Float[Tensor, " b"]

    def to(self, device: torch.device) -> ScoredInputs:
        return ScoredInputs(self.inputs.to(device), self.rewards.to(device))


def run(config: RewardModelConfig) -> None:
    """Train a reward model on sampled and judged responses of a policy, and write its folder.

    Print how well it predicts rewards, and how biased it is as a critic.
    """
    sampling = settled_sampling(config, config.policy_path, EvaluationConfig())
    device = pick_device(config.trainer)
    tokenizer = load_tokenizer(config.policy_path, key="policy_path")
    pad_id = int(tokenizer.pad_token_id)
    prompts = read_prompts(config, tokenizer)
    policy = load_causal_lm(config.policy_path, dtype="float32", attn_implementation="auto")
    critic = Critic(
        load_value_model(config.policy_path, dtype="float32", attn_implementation="auto")
    )
    check_saving(critic.model.config, tokenizer, config.policy_path)
    export_dir = Path(config.export_dir).expanduser()
    with recorded_run(config, sampling, "reward-model", prompts, critic) as recording:
        progress, scorer, logger = recording
        with policy_player_of(sampling, access_to(policy, device), tokenizer, scorer) as player:
            sampled = []
            for source, num_batches, purpose in (
                (prompts.training, config.num_steps, "train"),
                (prompts.heldout, NUM_HELDOUT_BATCHES, "heldout"),
            ):
                num = -(-num_batches * config.batch_size // config.group_size)
                prompts_to_sample = group_sampling(
                    source, num_prompts=num, seed=config.seed, iteration=0
                )
                rollouts = sample_and_score(
                    prompts_to_sample,
                    player,
                    progress.stage,
                    group_size=config.group_size,
                    settings=sampling_settings(config.rollouts),
                    seed=derive_seed(config.seed, "reward model", purpose),
                )
                sampled.append(rollouts)
        train, heldout = sampled
        assert isinstance(scorer, VerifierScorer), "such a config has no environment"
        train = with_unfinished(train, config, tokenizer, scorer.score)
        del policy, player
        train_supervised(
            SupervisedModule(
                critic,
                lambda scored: summed_squared_error(critic, scored),
                config.optimizer,
                num_steps=config.num_steps,
            ),
            Batches(
                train,
                lambda examples: cut_scored(examples, pad_id, max_tokens=config.microbatch_tokens),
                batch_size=config.batch_size,
                num_steps=config.num_steps,
                seed=config.seed,
            ),
            loss_name="reward_model/loss",
            logger=logger,
            progress=progress,
            accelerator=config.trainer.accelerator,
            precision=config.trainer.precision,
        )
        report = value_report(critic, heldout, pad_id)
        logger.log_metrics(report, step=config.num_steps)
        save_folder(critic.model, dict(critic.model.state_dict()), tokenizer, export_dir)
        recorded = logger.describe()
    for key, value in report.items():
        say(f"{key}: {value:.3f}")
    say(f"{recorded}\n{export_dir}")


def with_unfinished(
    scored: list[Rollout],
    config: RewardModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    score: Callable[[list[Rollout]], list[Rollout]],
) -> list[Rollout]:
    """Return the responses, of which a random share is cut at a random token and judged again.

    `score` judges rollouts.
    """
    rng = Random(f"reward_model/unfinished/{config.seed}")
    cut_rows = [i for i in range(len(scored)) if rng.random() < config.unfinished_share]
    cut = []
    for index in cut_rows:
        whole = scored[index]
        num_kept = rng.randint(1, max(1, len(whole.response_ids) - 1))
        ids, logprobs = whole.response_ids[:num_kept], whole.rollout_logprobs[:num_kept]
        keeps_special = config.rewards.keep_special_tokens
        cut.append(
            with_response(
                whole,
                ids,
                logprobs,
                FinishReason.LENGTH,
                tokenizer,
                keeps_special=keeps_special,
            )
        )
    with_cut = list(scored)
    for index, rollout in zip(cut_rows, score(cut), strict=True):
        with_cut[index] = rollout
    return with_cut


def collate_scored(examples: Sequence[Rollout], pad_id: int) -> ScoredInputs:
    """Return the reward model's inputs for responses, and their rewards.

    A reward model scores the state after the last token.
    """
    inputs = end_inputs(
        [(rollout.prompt.prompt_ids, rollout.response_ids) for rollout in examples],
        pad_id=pad_id,
    )
    rewards = torch.tensor([rollout.reward for rollout in examples], dtype=torch.float32)
    return ScoredInputs(inputs, rewards)


def cut_scored(examples: Sequence[Rollout], pad_id: int, *, max_tokens: int) -> SupervisedBatch:
    """Return an optimizer step's micro-batches of responses.

    The denominator of the loss counts responses. `max_tokens` is the limit of a micro-batch.
    """
    lengths = [len(r.prompt.prompt_ids) + len(r.response_ids) for r in examples]
    chunks = cut_by_tokens(lengths, range(len(examples)), max_tokens=max_tokens)
    return SupervisedBatch(
        [collate_scored([examples[row] for row in chunk], pad_id) for chunk in chunks],
        denominator=len(examples),
    )


def summed_squared_error(critic: Critic, scored: ScoredInputs) -> Tensor:
    """Return the sum of 1/2 (score - reward)^2 over responses."""
    errors = cast(CriticOutput, critic(scored.inputs)).values - scored.rewards
    return 0.5 * errors.square().sum()


@torch.no_grad()
def value_report(critic: Critic, scored: Sequence[Rollout], pad_id: int) -> dict[str, float]:
    """Return metrics of the reward model at its task, and of its bias as a critic.

    It has only learnt to score whole responses. As a critic of unfinished ones it is biased (VC-PPO
    3.1), which value pretraining corrects.
    """
    device = next(critic.parameters()).device
    end = collate_scored(scored, pad_id)
    scores = critic(end.inputs.to(device)).values.cpu()
    every = token_inputs(
        [(rollout.prompt.prompt_ids, rollout.response_ids) for rollout in scored],
        pad_id=pad_id,
    )
    values = every.scatter(critic(every.to(device)).values.cpu())
    mask = every.response_mask
    returns = end.rewards[:, None].expand_as(values)
    last = mask.sum(dim=1) - 1
    middle = (end.rewards.max() + end.rewards.min()) / 2
    agrees = (scores > middle) == (end.rewards > middle)
    one_state_mask = torch.ones((len(scored), 1), dtype=torch.bool)
    return {
        "reward_model/accuracy": float(agrees.float().mean()),
        "reward_model/explained_variance": float(
            explained_variance(scores[:, None], end.rewards[:, None], one_state_mask)
        ),
        "reward_model/as_critic_explained_variance": float(
            explained_variance(values, returns, mask)
        ),
        "reward_model/as_critic_value_first_token_mean": float(values[:, 0].mean()),
        "reward_model/as_critic_value_last_token_mean": float(
            values[torch.arange(len(scored)), last].mean()
        ),
    }
