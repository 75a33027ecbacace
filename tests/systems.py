"""The presets of `conf/algorithm`, and the loss that a system's code gives made-up rollouts."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.config.fits import STATE_TRACKING
from tests.judged import judged_batch
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.poise import baseline_of
from vapo.config import FitConfig, resolve
from vapo.config.loading import load_config
from vapo.environments.contract import Verdict
from vapo.training.minibatches import make_minibatches
from vapo.training.objective import Totals, policy_objective
from vapo.types import (
    EvaluatedBatch,
    FinishReason,
    Phase,
    Prompt,
    Rollout,
    RolloutBatch,
    TrainingBatch,
)

CONF = Path(__file__).parents[1] / "conf"
CRITIC_FREE = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "raft",
    "vineppo",
    "poise",
    "milestones",
    "otb",
    "oppo",
    "gspo",
    "cispo",
)
PRESETS = (
    "sao",
    "hl_gauss",
    "bpco",
    "bpco_answer",
    "le_critique",
    "tether",
    "evpo",
    "easyppo",
    "justrl2",
    "sp3o",
    "probe",
    "adapters",
    "trusted",
    "residual",
)
"""The critics of 2026."""
WITH_CRITIC = ("vapo", "ppo", "vc_ppo", *PRESETS)
SYSTEMS = (*WITH_CRITIC, *CRITIC_FREE)
AT_ONCE = ("vapo", "grpo", "dapo", "tether", "vineppo", "gspo", "cispo")
MAX_RESPONSE_TOKENS = 10


def mostly_slow(systems: Iterable[str]) -> list[Any]:
    """Parameters of a test: of the systems that share most of their code, a few in `make check`."""
    return [n if n in AT_ONCE else pytest.param(n, marks=pytest.mark.slow) for n in systems]


def system_config(name: str, *overrides: str) -> FitConfig:
    """The default with a system's preset, as `vapo fit` composes them."""
    return copy.deepcopy(_loaded(name, *overrides))


@cache
def _loaded(name: str, *overrides: str) -> FitConfig:
    files = [*STATE_TRACKING, CONF / "algorithm" / f"{name}.yaml"]
    return load_config(FitConfig, files, list(overrides))


def made_up_batch(
    config: FitConfig, *, num_groups: int = 4, group_size: int = 3, seed: int = 0
) -> tuple[EvaluatedBatch, Tensor]:
    """Rollouts in float64 with every input that an estimator reads, and current log-probs.

    The last response is as long as the budget allows and truncated; the last group's verdicts
    are all wrong.
    """
    draw = random.Random(seed)
    rollouts, verdicts = [], []
    num = num_groups * group_size
    for i in range(num):
        length = MAX_RESPONSE_TOKENS if i == num - 1 else draw.randint(1, MAX_RESPONSE_TOKENS)
        is_correct = i < num - group_size and (i % group_size == 0 or draw.random() < 0.5)
        prompt = Prompt(f"made-up:{i // group_size}", "", (2, 3), "1")
        finish = FinishReason.LENGTH if i == num - 1 else FinishReason.STOP
        rollouts.append(Rollout(prompt, (4,) * length, "", (-1.0,) * length, finish))
        verdicts.append(Verdict(is_correct, 1.0 if is_correct else -1.0))
    batch = judged_batch(
        rollouts,
        verdicts,
        group_size=group_size,
        rewards=config.rewards,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        x = torch.randn(batch.response_mask.shape, dtype=torch.float64, generator=generator)
        return torch.where(batch.response_mask, scale * x, 0.0)

    old_logprobs = noise(1.0) - 2.0 * batch.response_mask
    ref_logprobs = old_logprobs + noise(0.3)
    old_values = noise(0.5)
    logprobs = old_logprobs + noise(0.4)
    is_start = batch.response_mask & (torch.rand(old_values.shape, generator=generator) < 0.4)
    is_start[:, 0] = True
    step_values = noise(0.5)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] * num_groups, dtype=torch.float64)
    batch = replace(
        batch,
        rewards=batch.rewards.double(),
        baseline_rewards=signs[:num_groups].repeat_interleave(group_size),
        step_starts=is_start,
        step_values=step_values,
    )
    evaluated = EvaluatedBatch(
        **vars(batch), old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, old_values=old_values
    )
    if config.algorithm.advantage_estimator == "poise":
        states = [torch.randn(3, 1, 2, generator=generator) for _ in rollouts]
        evaluated = replace(evaluated, actor_states=states, old_entropy=noise(0.1).abs())
    if config.algorithm.advantage_estimator == "otb":  # at least the sampled token's own square
        evaluated = replace(evaluated, old_collisions=old_logprobs.exp().clamp(max=1) ** 2 + 0.1)
    if config.algorithm.advantage_estimator == "oppo":
        evaluated = replace(evaluated, answer_logprobs=old_logprobs + noise(0.5))
    return evaluated, logprobs.requires_grad_()


def estimated(config: FitConfig, batch: EvaluatedBatch) -> TrainingBatch:
    """After the advantage stage of a policy iteration."""
    return estimate_advantages(
        batch, Phase.POLICY_OPTIMIZATION, config, baseline_of(config.algorithm)
    )


def with_columns(batch: RolloutBatch, **columns: Any) -> TrainingBatch:
    """With columns of later stages by hand; no token has a reward, and each counts once."""
    zeros = torch.zeros_like(batch.rollout_logprobs)
    plain = {
        **dict.fromkeys(("token_rewards", "value_rewards"), zeros),
        **dict.fromkeys(("policy_mask", "entropy_mask"), batch.loss_mask),
        **dict.fromkeys(("importance_weights", "value_draws"), zeros + 1),
        "value_weights": torch.ones_like(batch.rewards),
    }
    return TrainingBatch(**vars(batch), **{**plain, **columns})


def system_loss(
    config: FitConfig, batch: TrainingBatch, logprobs: Tensor, *, max_tokens: int = 10_000
) -> Tensor:
    """The shipped code's policy loss of the batch as one minibatch, differentiable in logprobs."""
    algorithm = config.algorithm
    # Made up, the old policy is another one, as in the second step of an iteration.
    hyperparameters = replace(resolve(config), reads_old_logprobs=True)
    # Minibatches permute rows and cut columns; the values' place carries the log-probs along.
    carrier = replace(batch, old_values=logprobs)
    (minibatch,) = make_minibatches(
        carrier, num_minibatches=1, max_tokens=max_tokens, pad_id=0, seed=0
    )
    total = torch.zeros((), dtype=torch.float64)
    for micro in minibatch.microbatches:
        carried = micro.rows.old_values
        assert carried is not None
        entropy = torch.zeros_like(carried)
        total = total + policy_objective(
            carried, entropy, micro.rows, minibatch, hyperparameters, algorithm, Totals()
        )
    return total
