"""Decoding: attention of one token, draws from a large vocabulary, mixed precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.rollouts.playing import sample_all
from tests.tiny_model import ragged_prompts, tiny_model, tiny_tokenizer
from vapo.networks.actor_critic import Actor
from vapo.networks.layouts import enable_packing
from vapo.networks.packed_attention import counts_for_gpu
from vapo.networks.token_inputs import token_inputs
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.kv_cache import decoding_attention, decoding_sdpa
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.engines.transformers.token_sampling import filtered_logprobs, inverse_cdf
from vapo.system.private_attributes import attention_implementation
from vapo.types import Rollout

V = 5000
SETTINGS = SamplingSettings(max_response_tokens=12, temperature=1.0, top_p=1.0, top_k=0)


class Grouped(torch.nn.Module):
    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_attention_is_that_of_torch(is_masked: bool, num_queries: int) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(5, 6, num_queries, 8, generator=draw)
    key, value = (torch.randn(5, 2, 7, 8, generator=draw) for _ in range(2))
    mask = torch.rand(5, 1, num_queries, 7, generator=draw) > 0.4 if is_masked else None
    if mask is not None:
        mask[..., -1] = True
    ours, _ = decoding_sdpa(Grouped(), query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(Grouped(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    if num_queries == 1:
        other, _ = decoding_sdpa(Grouped(), query, key.roll(1, dims=1), value, mask, scaling=0.3)
        assert float((other - expected).abs().max()) > 0.1, "the control: another head's keys"


class Made(TorchDispatchMode):
    """Keeps each result that has memory of its own."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known, self.made = {x.untyped_storage().data_ptr() for x in known}, list[Tensor]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.known.add(result.untyped_storage().data_ptr())
            self.made.append(result)
        return result


@pytest.mark.parametrize("attend", [decoding_sdpa, sdpa_attention_forward])
def test_on_a_gpu_no_keys_and_values_are_copied(attend: Any) -> None:
    """They are as long as the context, so that copies would grow with each token."""
    query, key, value = (torch.randn(5, n, length, 8) for n, length in ((6, 1), (2, 700), (2, 700)))
    if attend is decoding_sdpa:  # as under autocast; the control cannot mix
        value = value.bfloat16()
    mask = torch.ones(5, 1, 1, 700, dtype=torch.bool)
    with counts_for_gpu(), Made(query, key, value, mask) as results:
        found, _ = attend(Grouped(), query, key, value, mask, scaling=0.3)
    assert (found.shape, found.dtype) == ((5, 1, 6, 8), torch.float32)
    largest = max(result.nbytes for result in results.made)
    assert (largest < value.nbytes) == (attend is decoding_sdpa)


@pytest.mark.parametrize("packs", [True, False])
def test_a_module_has_its_own_attention_again_after_decoding(packs: bool) -> None:
    model = tiny_model()
    if packs:
        enable_packing(model)
    before = attention_implementation(model)
    with decoding_attention(model):
        assert attention_implementation(model) != before
    assert attention_implementation(model) == before
    eager = tiny_model(attn_implementation="eager")
    with decoding_attention(eager):
        assert attention_implementation(eager) == "eager"


def logits(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    made = torch.randn(16, V, generator=draw)
    if kind == "peaked":
        return 6 * made
    if kind == "tied":  # many equal ones on both sides of what is ordered at first
        return made.round()
    return 0.01 * made


@pytest.mark.parametrize("kind", ["peaked", "tied", "flat"])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.7), (0, 0.999), (40, 1.0), (300, 0.9), (1, 1.0)]
)
def test_a_nucleus_does_not_depend_on_how_many_are_ordered(
    kind: str, top_k: int, top_p: float
) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "top_k": top_k, "top_p": top_p}
    expected = by_sorting(logits(kind), **settings)
    for at_first in (None, 256, 8):
        found = filtered_logprobs(logits(kind), **settings, ordered_at_first=at_first)
        assert torch.equal(found.isneginf(), expected.isneginf())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def by_sorting(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    probs = torch.softmax(ordered, dim=-1) if top_k else ordered.exp()
    dropped = ordered.isneginf() | (probs.cumsum(dim=-1) - probs >= top_p)
    dropped[:, 0] = False
    dropped = torch.zeros_like(dropped).scatter_(1, ids, dropped)
    return torch.log_softmax(logprobs.masked_fill(dropped, -torch.inf), dim=-1)


@pytest.mark.parametrize("kind", ["peaked", "tied", "flat"])
def test_a_large_vocabulary_is_drawn_from_as_token_by_token(kind: str) -> None:
    probs = torch.softmax(logits(kind).double(), dim=-1)
    probs[:, 7::3] = 0
    logprobs = probs.log().float()
    uniforms = torch.rand(200, 16, generator=torch.Generator().manual_seed(2)).double()
    masses = logprobs.exp().double()
    cumulative = masses.cumsum(dim=-1)
    for row in (*uniforms, torch.zeros(16).double(), torch.full((16,), 1 - 2**-53).double()):
        ids = inverse_cdf(logprobs, row)
        assert bool((masses.gather(1, ids[:, None]) > 0).all())
        place = row * cumulative[:, -1]
        end = cumulative.gather(1, ids[:, None]).squeeze(1)
        begin = end - masses.gather(1, ids[:, None]).squeeze(1)
        assert bool(((begin <= place + 1e-6) & (place <= end + 1e-6)).all())


def sampled(sampler: TransformersSampler) -> list[Rollout]:
    settings = replace(SETTINGS, max_response_tokens=12)
    return sample_all(sampler, ragged_prompts(6), group_size=2, settings=settings, seed=3)


def mean_gap(model: Qwen2ForCausalLM, rollouts: list[Rollout], *, mixed: bool) -> float:
    """How far the engine's log-probs are from the trainer's own, in nats a token."""
    pairs = [(r.prompt.prompt_ids, r.response_ids) for r in rollouts]
    inputs = token_inputs(pairs, pad_id=0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logprobs = Actor(model)(inputs, temperature=1.0).logprobs
    assert logprobs is not None
    ours = torch.tensor([x for r in rollouts for x in r.rollout_logprobs])
    return float((ours - logprobs).abs().mean())


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize(
    "uses_onednn",
    [
        pytest.param(True, id="onednn"),
        pytest.param(False, id="torch_alone", marks=pytest.mark.slow),
    ],
)
def test_a_mixed_copy_says_what_a_trainer_in_mixed_precision_says(uses_onednn: bool) -> None:
    """On a processor that has products in bfloat16, and by torch's own kernels, which emulate them.

    The copy is half as far from the trainer as an engine in float32 is, with either kernels.
    """
    with torch.backends.mkldnn.flags(enabled=uses_onednn):
        check_a_mixed_copy()


def check_a_mixed_copy() -> None:
    model = tiny_model(hidden_size=256)  # wide enough for rounded products to show
    options: dict[str, Any] = {"max_concurrent_sequences": 5, "device": "cpu"}
    mixed = DetachedTransformersSampler(
        model, tiny_tokenizer(), mixed_dtype=torch.bfloat16, **options
    )
    plain = TransformersSampler(model, tiny_tokenizer(), **options)
    rounding = mean_gap(model, sampled(plain), mixed=True)
    assert rounding > 0.03, "the control: bfloat16 shows in this model"
    assert mean_gap(model, sampled(plain), mixed=False) < 1e-5
    assert mean_gap(model, sampled(mixed), mixed=True) < 0.6 * rounding
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    rounding = mean_gap(model, sampled(plain), mixed=True)
    assert mean_gap(model, sampled(mixed), mixed=True) > 5 * rounding, "the control: old weights"
    mixed.sync(model.state_dict().items())
    assert mean_gap(model, sampled(mixed), mixed=True) < 0.6 * rounding
    layers = mixed._model.model.layers
    assert layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert mixed._model.get_output_embeddings().weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu"), "left with the stream"
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
