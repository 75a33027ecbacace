"""What the correction is for: the expected gradient under the engine's policy, enumerated.

Two tokens in the vocabulary, responses of one or two tokens, policies that are tables. Every
response is in the batch exactly as often as the engine's policy would sample it, so the
shipped objective's gradient of that batch is the expected gradient, without any noise.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.judged import judged_batch
from tests.systems import system_config, with_columns
from vapo.advantages.mismatch_correction import correct_mismatch
from vapo.config import resolve
from vapo.config.algorithm import MismatchConfig
from vapo.environments.contract import Verdict
from vapo.training.minibatches import make_minibatches
from vapo.training.objective import Totals, policy_objective
from vapo.types import FinishReason, Prompt, Rollout

# P(token 0) in the states: start, after 0, after 1
ENGINE = torch.tensor([3 / 4, 1 / 2, 1 / 4], dtype=torch.float64)
TRAINER = torch.tensor([0.4, 0.7, 0.6], dtype=torch.float64)
REWARDS = {(0,): 1.0, (1,): -0.5, (0, 0): 1.0, (0, 1): -0.5, (1, 0): 2.0, (1, 1): 0.25}
SAMPLES = 16  # makes every engine probability a whole number of rows

UNCORRECTED = MismatchConfig()
TOKEN = MismatchConfig(tis_cap=1e6)
SEQUENCE = MismatchConfig(tis_cap=1e6, tis_level="sequence")


def token_logprobs(zero_logits: Tensor, response: tuple[int, ...]) -> Tensor:
    states = [0, *(1 + token for token in response[:-1])]
    signs = torch.tensor([1.0 if token == 0 else -1.0 for token in response], dtype=torch.float64)
    return torch.nn.functional.logsigmoid(zero_logits[states] * signs)


def on_policy_gradient(length: int) -> Tensor:
    """Of -sum_y pi(y) r(y), by autograd through the probabilities themselves."""
    logits = TRAINER.logit().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for response in product((0, 1), repeat=length):
        loss = loss - token_logprobs(logits, response).sum().exp() * REWARDS[response]
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


def gradient_under_the_engine(length: int, correction: MismatchConfig) -> Tensor:
    """Of the shipped objective over the engine's samples, the response being one action."""
    responses = [
        response
        for response in product((0, 1), repeat=length)
        for _ in range(round(SAMPLES * float(token_logprobs(ENGINE.logit(), response).sum().exp())))
    ]
    assert len(responses) == SAMPLES
    config = system_config("rloo")
    prompt = Prompt("enumerated", "", (2,), "1")
    batch = judged_batch(
        [Rollout(prompt, y, "", (0.0,) * length, FinishReason.STOP) for y in responses],
        [Verdict(is_correct=True, reward=REWARDS[y]) for y in responses],
        rewards=config.rewards,
        max_response_tokens=length,
    )
    logits = TRAINER.logit().requires_grad_()
    logprobs = torch.stack([token_logprobs(logits, y) for y in responses])
    engine = torch.stack([token_logprobs(ENGINE.logit(), y) for y in responses])
    trained = with_columns(
        replace(batch, rollout_logprobs=engine),
        old_logprobs=logprobs.detach(),
        advantages=batch.rewards.double()[:, None].expand(-1, length),
    )
    trained = correct_mismatch(trained, correction)
    carrier = replace(trained, old_values=logprobs)  # minibatches permute rows
    (minibatch,) = make_minibatches(carrier, num_minibatches=1, max_tokens=10_000, pad_id=0, seed=0)
    (micro,) = minibatch.microbatches
    carried = micro.rows.old_values
    assert carried is not None
    loss = policy_objective(
        carried,
        torch.zeros_like(carried),
        micro.rows,
        minibatch,
        resolve(config),
        config.algorithm,
        Totals(),
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


def bias(length: int, correction: MismatchConfig) -> float:
    """Relative to the true gradient's norm."""
    true = on_policy_gradient(length)
    return float((gradient_under_the_engine(length, correction) - true).norm() / true.norm())


@pytest.mark.parametrize("length", [1, 2])
def test_uncorrected_the_expected_gradient_is_another(length: int) -> None:
    assert bias(length, UNCORRECTED) > 0.15


def test_one_token_responses_are_corrected_exactly_at_either_level() -> None:
    assert bias(1, TOKEN) < 1e-12
    assert bias(1, SEQUENCE) < 1e-12


def test_longer_responses_are_corrected_exactly_at_sequence_level() -> None:
    assert bias(2, SEQUENCE) < 1e-12


def test_longer_responses_are_corrected_in_part_at_token_level() -> None:
    assert 1e-3 < bias(2, TOKEN) < 0.7 * bias(2, UNCORRECTED)


def test_truncation_gives_some_bias_back() -> None:
    # the ratios are 0.4/0.75 and 0.6/0.25 = 2.4
    assert bias(1, MismatchConfig(tis_cap=2.4)) < 1e-12
    assert 1e-3 < bias(1, MismatchConfig(tis_cap=2.0)) < bias(1, UNCORRECTED)
