"""Filters, inverse CDF and seeded draws, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers import token_sampling
from vapo.rollouts.engines.transformers.token_sampling import (
    filtered_logprobs,
    inverse_cdf,
    sample_tokens,
    uniform_draws,
)

PROBS = [0.1, 0.4, 0.05, 0.3, 0.15]


def kept(top_k: int = 0, top_p: float = 1.0, probs: list[float] = PROBS) -> list[float]:
    logits = torch.tensor([probs]).log() + 3.0
    row = filtered_logprobs(logits, temperature=1.0, top_k=top_k, top_p=top_p)[0]
    return [round(p, 6) for p in row.exp().tolist()]


def test_no_filter():
    assert kept() == pytest.approx(PROBS)


def test_temperature():
    logits = torch.tensor([[0.0, math.log(2.0)]])
    probs = filtered_logprobs(logits, temperature=0.5, top_k=0, top_p=1.0).exp()
    torch.testing.assert_close(probs, torch.tensor([[0.2, 0.8]]))


def test_top_k_keeps_the_likeliest_and_renormalises():
    assert kept(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-6)
    assert kept(top_k=1) == [0, 1, 0, 0, 0]
    assert kept(top_k=99) == pytest.approx(PROBS)


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass():
    assert kept(top_p=0.6) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-6)
    assert kept(top_p=0.71) == pytest.approx([0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85], abs=1e-6)
    assert kept(top_p=1e-9) == [0, 1, 0, 0, 0]


def test_top_p_counts_mass_after_top_k():
    # of 4/7 and 3/7, the first alone reaches 0.5; of the whole it would not (0.4)
    assert kept(top_k=2, top_p=0.5) == [0, 1, 0, 0, 0]


def test_equal_logits_are_kept_by_lower_id():
    assert kept(top_k=2, probs=[0.25] * 4) == [0.5, 0.5, 0, 0]
    assert kept(top_p=0.6, probs=[0.25] * 4) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0], abs=1e-6)


def test_inverse_cdf():
    logprobs = torch.tensor([PROBS]).log().expand(7, -1)
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.8499, 0.8501])
    assert inverse_cdf(logprobs, uniforms.double()).tolist() == [0, 0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logprobs = torch.tensor([[0, 0.5, 0, 0.5, 0], [0, 0, 1.0, 0, 0]]).log()
    ids = inverse_cdf(logprobs, torch.full((2,), uniform, dtype=torch.float64))
    assert ids[0] == (1 if uniform < 0.5 else 3)
    assert ids[1] == 2


def test_a_scan_that_is_not_monotone_draws_no_token_of_probability_zero(monkeypatch):
    """As parallel scans may round: the cumulative value rises by one ulp at a zero."""
    noisy = torch.tensor([[0.5, 0.5 + 2**-53, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: noisy.clone())
    logprobs = torch.tensor([[0.5, 0.0, 0.5]]).log()
    assert inverse_cdf(logprobs, torch.tensor([0.5], dtype=torch.float64)).item() == 2


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logprobs = filtered_logprobs(logits, temperature=0.7, top_k=0, top_p=1.0)
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.double() / 0.7, -1).float())


def test_draws_are_a_function_of_the_seed():
    draws = uniform_draws([5, 6, 7, 8], num_tokens=4)
    assert len({tuple(row) for row in draws.tolist()}) == 4
    assert torch.equal(draws[2:3], uniform_draws([7], num_tokens=4))
    assert torch.equal(draws, uniform_draws([5, 6, 7, 8], num_tokens=9)[:, :4])
    assert draws.dtype == torch.float64
    assert bool(((draws >= 0) & (draws < 1)).all())


@pytest.mark.parametrize("greedy", [False, True])
def test_rows_sampled_a_few_at_a_time_get_what_they_get_together(greedy, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 40, generator=generator)
    uniforms = torch.rand(7, generator=generator, dtype=torch.float64)
    settings = SamplingSettings(max_response_tokens=1, top_p=0.9, greedy=greedy)
    ids, logprobs = sample_tokens(logits, uniforms, settings)
    monkeypatch.setattr(token_sampling, "_CPU_LOGITS", 80)
    few_ids, few_logprobs = sample_tokens(logits, uniforms, settings)
    assert torch.equal(ids, few_ids)
    assert torch.equal(logprobs, few_logprobs)
    assert len(set(ids.tolist())) > 1
