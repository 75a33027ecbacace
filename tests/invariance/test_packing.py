"""Packed rows, padded rows and sequences alone: the same states and the same gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    GemmaConfig,
    GemmaModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

from tests.tiny_model import ragged_prompts, sample, tiny_model
from vapo.errors import UserError
from vapo.networks import packed_attention
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.layouts import choose_layout, enable_packing
from vapo.networks.packed_attention import (
    _varlen_flash,
    counts_for_gpu,
    last_hidden_states,
    packed_sdpa,
    window_mask,
)
from vapo.networks.token_inputs import (
    Layout,
    PackedRow,
    Segment,
    Sequences,
    TokenInputs,
    token_inputs,
)

PAIRS = [((5, 6, 7), (8, 9)), ((3,), (4, 5, 6, 7, 8, 9, 2)), ((9, 8), (7,)), ((2,), (3, 4, 5))]
SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MAKERS = {
    "qwen2": lambda: Qwen2Model(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SMALL, head_dim=8)),
    "llama": lambda: LlamaModel(LlamaConfig(**SMALL)),
    "mistral": lambda: MistralModel(MistralConfig(**SMALL, sliding_window=None)),
    "gemma": lambda: GemmaModel(GemmaConfig(**SMALL, head_dim=8)),
    "gpt2": lambda: GPT2Model(
        GPT2Config(vocab_size=30, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                   attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, initializer_range=0.2)
    ),
}  # fmt: skip


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MAKERS[name]().train()


def states_before_responses(model: PreTrainedModel, inputs: TokenInputs) -> Tensor:
    return last_hidden_states(model, inputs)[inputs.state_rows, inputs.state_columns]


def states_alone(model: PreTrainedModel, pairs: Sequences = PAIRS) -> Tensor:
    """Each sequence by a forward of its own, without anything of ours."""
    states = []
    for prompt, response in pairs:
        alone = model(torch.tensor([[*prompt, *response]]), use_cache=False).last_hidden_state[0]
        states.append(alone[len(prompt) - 1 : -1])
    return torch.cat(states)


def gradient(model: PreTrainedModel, states: Tensor) -> Tensor:
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(
        (states * weights).sum(), list(model.parameters()), allow_unused=True
    )
    return torch.cat([g.flatten() for g in grads if g is not None])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("name", MAKERS)
def test_packed_padded_and_alone_agree(name: str) -> None:
    model = make(name)
    alone = states_alone(model)
    expected = gradient(model, alone)
    padded = states_before_responses(model, token_inputs(PAIRS, pad_id=0))
    assert relative(padded, alone) < 1e-6
    assert relative(gradient(model, padded), expected) < 1e-5
    assert choose_layout("packed", [model]) == "packed"
    packed = states_before_responses(model, token_inputs(PAIRS, pad_id=0, layout="packed"))
    assert relative(packed, alone) < 1e-6
    assert relative(gradient(model, packed), expected) < 1e-5
    still_padded = states_before_responses(model, token_inputs(PAIRS, pad_id=0))
    assert torch.equal(still_padded, padded)


def test_with_activation_checkpointing_too() -> None:
    model = make("qwen2")
    expected = gradient(model, states_alone(model))
    enable_packing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = states_before_responses(model, token_inputs(PAIRS, pad_id=0, layout="packed"))
    assert relative(gradient(model, packed), expected) < 1e-5


def test_critic_reads_packed_rows() -> None:
    config = Qwen2Config(**SMALL)
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config)
    alone = states_alone(model.model)
    assert choose_layout("auto", [model]) == "shared_prompts"
    packed = states_before_responses(model, token_inputs(PAIRS, pad_id=0, layout="packed"))
    assert relative(packed, alone) < 1e-6


def test_negative_control_one_sequence_out_of_all_is_something_else() -> None:
    model = make("qwen2")
    enable_packing(model)
    packed = token_inputs(PAIRS, pad_id=0, layout="packed")
    joined = replace(packed, segments=(Segment(packed.num_tokens),))
    difference = relative(
        states_before_responses(model, joined), states_before_responses(model, packed)
    )
    assert difference > 0.1


def test_padding_needs_no_mask_and_its_content_does_not_matter() -> None:
    model = make("qwen2")
    zeros, nines = (token_inputs(PAIRS, pad_id=pad_id) for pad_id in (0, 9))
    assert not torch.equal(zeros.input_ids, nines.input_ids)
    first, second = (states_before_responses(model, inputs) for inputs in (zeros, nines))
    assert torch.equal(first, second)
    lengths = torch.tensor([segment.length for segment in zeros.segments])
    attention_mask = torch.arange(zeros.input_ids.shape[1]) < lengths[:, None]
    masked = model(zeros.input_ids, attention_mask=attention_mask.long(), use_cache=False)
    assert relative(first, masked.last_hidden_state[zeros.state_rows, zeros.state_columns]) < 1e-6


def test_sampling_is_the_same_with_a_network_that_reads_packed_rows() -> None:
    model, prompts = tiny_model(), ragged_prompts(4)
    before = sample(model, prompts)
    enable_packing(model)
    assert sample(model, prompts) == before


def test_the_call_of_the_variable_length_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layout and bounds as torch documents them; the kernel is CUDA's, here a stand-in."""
    row = PackedRow([Segment(3), Segment(1), Segment(5)], torch.device("cpu"))
    ends = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert (q.shape, k.shape, v.shape) == ((9, 4, 8), (9, 2, 8), (9, 2, 8))
        assert (max_q, max_k, window_size, enable_gqa) == (5, 5, (-1, 0), True)
        assert torch.equal(cu_q, ends)
        assert torch.equal(cu_k, ends)
        parts = []
        for start, end in itertools.pairwise(cu_q.tolist()):
            one_q, one_k, one_v = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            attended = scaled_dot_product_attention(
                one_q, one_k, one_v, is_causal=True, scale=scale, enable_gqa=True
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    by_kernel = _varlen_flash(query, key, value, scaling=0.3, row=row)
    by_loop, _ = packed_sdpa(
        torch.nn.Module(), query, key, value, window_mask(None), scaling=0.3, packed_row=row
    )
    torch.testing.assert_close(by_kernel, by_loop)


def test_a_gpu_under_autocast_attends_in_one_call_of_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rotary embeddings make queries float32 there, which the kernel does not take."""
    row = PackedRow([Segment(3), Segment(1), Segment(5)], torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    called = []

    def attention(q, k, v, **_):
        called.append((q.dtype, k.dtype, v.dtype))
        return q

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", attention)
    with counts_for_gpu(), torch.autocast("cpu", dtype=torch.bfloat16):
        packed_sdpa(torch.nn.Module(), query, key, value, window_mask(None), packed_row=row)
    assert called == [(torch.bfloat16,) * 3]


def kernel_error(inputs: TokenInputs, pairs: Sequences) -> float:
    """Of the CUDA kernel on a packed row, against a forward of each sequence."""
    model = make("qwen2").to("cuda", torch.bfloat16)  # type: ignore[arg-type]
    alone = [
        model(torch.tensor([[*prompt, *response]], device="cuda"), use_cache=False)
        .last_hidden_state[0][len(prompt) - 1 : -1]
        for prompt, response in pairs
    ]  # fmt: skip
    assert choose_layout("auto", [model]) == "shared_prompts"
    packed = states_before_responses(model, inputs.to(torch.device("cuda")))
    return relative(packed, torch.cat(alone))


@pytest.mark.gpu
def test_the_variable_length_kernel_agrees_with_single_sequences() -> None:
    assert kernel_error(token_inputs(PAIRS, pad_id=0, layout="packed"), PAIRS) < 1e-2


# ---- what cannot be packed ----------------------------------------------------------------


def test_eager_attention_is_refused_if_packing_is_demanded() -> None:
    model = tiny_model(attn_implementation="eager")
    assert choose_layout("auto", [model]) == "padded"
    with pytest.raises(UserError, match=r"training\.packing is packed, but attn_impl.* eager"):
        choose_layout("packed", [tiny_model(), model])
    with pytest.raises(ValueError, match="without packed attention"):
        last_hidden_states(model, token_inputs(PAIRS, pad_id=0, layout="packed"))


def test_padded_leaves_the_network_alone() -> None:
    model = tiny_model()
    assert choose_layout("padded", [model]) == "padded"
    assert model.config._attn_implementation == "sdpa"


# ---- cuts -----------------------------------------------------------------------------------

LENGTHS = [50, 3, 3, 3, 20, 19, 2, 30, 7, 1]


@pytest.mark.parametrize("max_tokens", [1, 20, 60, 70, 138, 1000])
def test_packed_chunks_hold_every_row_once_within_the_budget(max_tokens: int) -> None:
    chunks = cut_by_tokens(LENGTHS, range(10), max_tokens=max_tokens, layout="packed")
    assert sorted(row for chunk in chunks for row in chunk) == list(range(10))
    loads = [sum(LENGTHS[row] for row in chunk) for chunk in chunks]
    assert all(
        load <= max_tokens or len(chunk) == 1 for load, chunk in zip(loads, chunks, strict=True)
    )
    assert loads == sorted(loads, reverse=True)


def test_packed_chunks_are_few_and_even() -> None:
    def loads(max_tokens: int) -> list[int]:
        chunks = cut_by_tokens(LENGTHS, range(10), max_tokens=max_tokens, layout="packed")
        return [sum(LENGTHS[row] for row in chunk) for chunk in chunks]

    assert loads(70) == [69, 69]  # 138 tokens; padded, the same budget needs four
    assert loads(60) == [50, 44, 44]
    assert len(cut_by_tokens(LENGTHS, range(10), max_tokens=70)) == 4


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("wanted", [2, 3, 7, 10])
def test_every_rank_gets_as_many_chunks(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, wanted: int
) -> None:
    monkeypatch.setattr(
        "vapo.networks.forward_passes.max_over_ranks",
        lambda mine: torch.tensor(max(int(mine), wanted)),
    )
    chunks = cut_by_tokens(LENGTHS, range(10), max_tokens=600, layout=layout)
    assert len(chunks) == wanted
    assert sorted(row for chunk in chunks for row in chunk) == list(range(10))
