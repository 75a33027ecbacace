"""Made-up episodes with all that a page shows of them."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from tests.judged import judged_batch
from tests.systems import estimated
from tests.tiny_model import tiny_tokenizer
from vapo.config import FitConfig
from vapo.environments.contract import Verdict
from vapo.types import EvaluatedBatch, FinishReason, Prompt, Rollout, TrainingBatch, Turn

TOKENIZER = tiny_tokenizer()
MAX_TOKENS = 40
_ENDS = (FinishReason.STOP, FinishReason.TURNS, FinishReason.LENGTH, FinishReason.STOP)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def episodes(num_groups: int = 3, group_size: int = 4) -> tuple[list[Rollout], list[Verdict]]:
    """Guesses of a hidden number and their answers; every other one begins with an observation."""
    draw = random.Random(0)
    rollouts, verdicts = [], []
    for i in range(num_groups * group_size):
        ids, turns = [], []
        for k in range(1 + (i + i // group_size) % 4):
            observed = ids_of(draw.choice(("low;", "high;"))) if k or i % 2 else []
            sampled = [*ids_of(f"{draw.randint(10, 99)}"), TOKENIZER.eos_token_id]
            turns.append(Turn(len(observed), len(sampled), draw.choice((-0.25, 0.0, 1.0))))
            ids += [*observed, *sampled]
        reward = sum(turn.reward for turn in turns)
        finish = _ENDS[i % group_size]
        prompt = Prompt(f"guess:{i // group_size}", "guess", tuple(ids_of("1=")), "42")
        logprobs = tuple(-draw.random() for _ in ids)
        rollouts.append(Rollout(prompt, tuple(ids), "", logprobs, finish, tuple(turns)))
        rollouts[-1] = replace(rollouts[-1], in_environment=True)
        verdicts.append(Verdict(finish is FinishReason.STOP and reward > 0, reward))
    return rollouts, verdicts


def episode_batch(config: FitConfig) -> TrainingBatch:
    """After the advantage stage; what stands on observations is 999."""
    rollouts, verdicts = episodes()
    batch = judged_batch(
        rollouts, verdicts, group_size=4, rewards=config.rewards, max_response_tokens=MAX_TOKENS
    )
    generator = torch.Generator().manual_seed(0)

    def column(mean: float) -> Tensor:
        x = mean + 0.4 * torch.randn(batch.response_mask.shape, generator=generator)
        return torch.where(batch.response_mask, x, 999.0)

    evaluated = EvaluatedBatch(
        **vars(replace(batch, rollout_logprobs=column(-2.0))),
        old_logprobs=column(-2.0),
        old_values=column(0.3),
        old_entropy=column(1.0),
    )
    return estimated(config, evaluated)
