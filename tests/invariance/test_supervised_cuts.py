"""The gradient of a supervised step, through the Trainer, does not depend on its cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2ForSequenceClassification

from tests.judged import judged
from tests.tiny_model import ragged_prompts, sample, tiny_model, tiny_tokenizer
from vapo.commands.reward_model import cut_scored, summed_squared_error
from vapo.commands.sft import Example, cut, prompt_example, summed_nll
from vapo.config.schema import OptimizerConfig
from vapo.environments.contract import Verdict
from vapo.networks.actor_critic import Actor, Critic
from vapo.system.progress import Progress
from vapo.tracking.logger import RunLogger
from vapo.training.supervised import Batches, SupervisedBatch, SupervisedModule, train_supervised
from vapo.types import Prompt, Rollout


def gradient(
    network: nn.Module,
    summed_loss: Callable[[Any], Tensor],
    examples: list[Any],
    collate: Callable[[list[Any]], SupervisedBatch],
) -> Tensor:
    """Of one optimizer step on all examples, as left behind in `grad`."""
    with Progress() as progress:
        train_supervised(
            SupervisedModule(
                network, summed_loss, OptimizerConfig(lr=1e-9, max_grad_norm=1e9), num_steps=1
            ),
            Batches(examples, collate, batch_size=len(examples), num_steps=1, seed=0),
            loss_name="loss",
            logger=MagicMock(spec=RunLogger),
            progress=progress,
            accelerator="cpu",
            precision="32-true",
        )
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def demonstrations() -> list[Prompt]:
    return [
        Prompt(p.prompt_id, p.text, p.prompt_ids, "1", demonstration="a3b1" * (1 + i % 5) + ";1")
        for i, p in enumerate(ragged_prompts(12))
    ]


def scored() -> list[Rollout]:
    rollouts = sample(tiny_model(), ragged_prompts(3))
    verdicts = [Verdict(i % 3 == 0, 1.0 if i % 3 == 0 else -1.0) for i in range(len(rollouts))]
    return judged(rollouts, verdicts)


def assert_equal_gradients(gradients: list[Tensor]) -> None:
    whole, *others = gradients
    assert whole.norm() > 1e-3
    for other in others:
        assert (other - whole).norm() < 1e-5 * whole.norm()


def test_demonstrations() -> None:
    tokenizer = tiny_tokenizer()
    cuts: list[int] = []

    def of(max_tokens: int) -> Tensor:
        def collate(examples: list[Example]) -> SupervisedBatch:
            batch = cut(examples, 0, max_tokens=max_tokens)
            cuts.append(len(batch.microbatches))
            return batch

        actor = Actor(tiny_model())
        examples = [prompt_example(prompt, tokenizer) for prompt in demonstrations()]
        return gradient(actor, lambda m: summed_nll(actor, m), examples, collate)

    assert_equal_gradients([of(10_000), of(100), of(1)])
    assert cuts[0] == 1
    assert 1 < cuts[1] < cuts[2] == 12


def test_demonstration_loss_is_the_mean_over_response_tokens() -> None:
    actor, example = Actor(tiny_model()), demonstrations()[0]
    batch = cut([prompt_example(example, tiny_tokenizer())], 0, max_tokens=100)
    ids = tiny_tokenizer()(example.demonstration)["input_ids"] + [1]
    start = len(example.prompt_ids)
    with torch.no_grad():
        logits = actor.model(torch.tensor([[*example.prompt_ids, *ids]])).logits[0]
        expected = nn.functional.cross_entropy(logits[start - 1 : -1], torch.tensor(ids))
        actual = summed_nll(actor, batch.microbatches[0]) / batch.denominator
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [150, 1])
def test_scored_responses(max_tokens: int) -> None:
    def of(max_tokens: int) -> Tensor:
        torch.manual_seed(0)
        config = tiny_model().config
        config.num_labels = 1
        critic = Critic(Qwen2ForSequenceClassification(config))
        return gradient(
            critic,
            lambda m: summed_squared_error(critic, m),
            scored(),
            lambda examples: cut_scored(examples, 0, max_tokens=max_tokens),
        )

    assert_equal_gradients([of(10_000), of(max_tokens)])
    assert len(cut_scored(scored(), 0, max_tokens=max_tokens).microbatches) > 1
