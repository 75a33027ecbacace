"""Heads without a CPU kernel: padded ones are the same model, and vLLM runs them as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.rollouts.playing import sample_all
from tests.rollouts.sampler_contract import ids_of, largest_gap
from tests.tiny_model import ragged_prompts
from tests.tiny_model import sample as sample_with_transformers
from tests.vllm_engine import make_engine, make_vllm_sampler
from vapo.errors import UserError
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.vllm.cpu_heads import padded_heads

DEFAULT_POLICY = Path(__file__).parents[2] / "models/state_tracking/policy"


def test_heads_with_a_kernel_stay():
    assert padded_heads(Qwen2Config(hidden_size=64, num_attention_heads=2)) is None
    assert padded_heads(LlamaConfig(hidden_size=576, num_attention_heads=9)) is None


def test_each_head_is_padded_for_itself():
    """Two heads of 2 out of a hidden size of 4 become heads of 32; queries grow by sqrt(16)."""
    heads = padded_heads(Qwen2Config(hidden_size=4, num_attention_heads=2, num_key_value_heads=2))
    assert heads is not None
    assert (heads.size, heads.padded) == (2, 32)
    weight, bias = torch.arange(16.0).view(4, 4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    name = "model.layers.0.self_attn."
    padded = dict(
        heads.weights(
            [
                (name + "q_proj.weight", weight),
                (name + "k_proj.bias", bias),
                (name + "o_proj.weight", weight),
                ("model.layers.0.mlp.up_proj.weight", weight),
            ]
        )
    )
    q = padded[name + "q_proj.weight"]
    assert q.shape == (64, 4)
    assert torch.equal(q[[0, 1, 32, 33]], weight * 4)
    assert q.abs().sum() == weight.sum() * 4
    k = padded[name + "k_proj.bias"]
    assert torch.equal(k[[0, 1, 32, 33]], bias)
    assert k.sum() == bias.sum()
    o = padded[name + "o_proj.weight"]
    assert torch.equal(o[:, [0, 1, 32, 33]], weight)
    assert o.sum() == weight.sum()
    assert padded["model.layers.0.mlp.up_proj.weight"] is weight


def test_other_architectures_are_refused():
    with pytest.raises(UserError, match=r"heads of 24 .*Llama and Qwen2"):
        padded_heads(Qwen3Config(hidden_size=96, num_attention_heads=4, head_dim=24))


@pytest.mark.vllm
def test_the_default_policy_decodes_like_its_trainer():
    """Its heads have 24 places. Greedy tokens are equal, log-probs within rounding."""
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_POLICY).eval()
    engine = make_engine(DEFAULT_POLICY, heads=padded_heads(model.config))
    try:
        sampler = make_vllm_sampler(engine, model)
        prompts = ragged_prompts(24)
        settings = SamplingSettings(48, greedy=True)
        greedy = sample_all(sampler, prompts, group_size=1, settings=settings, seed=0)
        expected = sample_with_transformers(
            model, prompts, group_size=1, greedy=True, max_response_tokens=48
        )
        assert ids_of(greedy) == ids_of(expected)
        drawn = sample_all(sampler, prompts, group_size=8, settings=SamplingSettings(48), seed=0)
        assert largest_gap(model, drawn) < 1e-4
    finally:
        engine.close()
