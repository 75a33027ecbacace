"""The engine's log-probs against Hugging Face's plain forward over each finished sequence."""

from __future__ import annotations

import pytest
import torch

from tests.rollouts.sampler_contract import largest_gap
from tests.tiny_model import full_forward_logits, ragged_prompts, sample, tiny_model


@pytest.mark.parametrize(
    "temperature", [1.0, *(pytest.param(t, marks=pytest.mark.night) for t in (0.6, 1.7))]
)
@pytest.mark.parametrize("rows", [1, 64])
def test_logprobs_are_those_of_the_plain_forward(rows, temperature):
    """Ragged prompts, one by one and all at once; 5 at a time: `SamplerContract`."""
    model = tiny_model()
    num = {"group_size": 2} if rows == 1 else {}
    rollouts = sample(model, ragged_prompts(10), rows=rows, temperature=temperature, **num)
    lengths = {len(rollout.response_ids) for rollout in rollouts}
    assert len(lengths) > 5, "the responses must end at different times for this to test anything"
    assert largest_gap(model, rollouts, temperature) < 1e-5


@pytest.mark.slow
def test_logprobs_hold_beyond_the_spare_columns():
    """Responses longer than the cache's spare room, so that it grows more than once."""
    model = tiny_model(max_position_embeddings=256)
    rollouts = sample(model, ragged_prompts(4), rows=3, group_size=3, max_response_tokens=200)
    assert max(len(rollout.response_ids) for rollout in rollouts) > 140
    assert largest_gap(model, rollouts, 1.0) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_logprobs_under_both_kernels(attn_implementation):
    model = tiny_model(attn_implementation=attn_implementation)
    assert model.config._attn_implementation == attn_implementation
    assert largest_gap(model, sample(model, ragged_prompts(6), rows=5), 1.0) < 1e-5


def test_bfloat16_weights_stay_close():
    """The softmax is float32; what differs is the rounding of the hidden states."""
    model = tiny_model(dtype=torch.bfloat16)
    rollouts = sample(model, ragged_prompts(6), rows=5)
    gaps = []
    for rollout in rollouts:
        logprobs = torch.log_softmax(full_forward_logits(model, rollout), dim=-1)
        expected = logprobs.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        gaps.append((expected - torch.tensor(rollout.rollout_logprobs)).abs())
    assert torch.cat(gaps).mean() < 1e-2
