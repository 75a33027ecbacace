"""A prompt that is computed once for its responses: the same states, losses and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from tests.forked import Ranks
from tests.invariance.groups import compute
from tests.invariance.test_gradients import (
    ONE_FORWARD,
    PACKED,
    PADDED,
    assert_same,
    largest_relative_difference,
)
from tests.invariance.test_packing import (
    MAKERS,
    gradient,
    kernel_error,
    make,
    relative,
    states_alone,
    states_before_responses,
)
from tests.networks.test_lora import lora_config, trained
from vapo.errors import UserError
from vapo.networks import packed_attention
from vapo.networks.actor_critic import ForwardFlops
from vapo.networks.build import make_reference
from vapo.networks.forward_passes import cut_by_tokens
from vapo.networks.layouts import choose_layout, enable_packing
from vapo.networks.packed_attention import (
    _by_segments,
    _varlen_flash,
    last_hidden_states,
)
from vapo.networks.token_inputs import Layout, PackedRow, Segment, TokenInputs, token_inputs

A, B, C = (5, 6, 7), (3,), (9, 8)
PAIRS = [
    (A, (8, 9)),
    (B, (4, 5, 6, 7, 8, 9, 2)),
    (A, (4,)),
    (C, (7,)),
    (B, (3, 4, 5)),
    (A, (8, 2, 9, 4, 3, 6)),
]
SHARED = "training.packing=shared_prompts"


def shared_inputs() -> TokenInputs:
    return token_inputs(PAIRS, pad_id=0, layout="shared_prompts")


# ---- one row ---------------------------------------------------------------------------------


def test_the_row_has_each_prompt_once() -> None:
    inputs = shared_inputs()
    own = [PAIRS[i][1] for i in (0, 2, 5)], [PAIRS[i][1] for i in (1, 4)]
    expected = [*A, *itertools.chain(*own[0]), *B, *itertools.chain(*own[1]), *C, 7]
    assert inputs.input_ids.tolist() == [expected]
    assert inputs.segments == (
        *(Segment(3), Segment(2, 0, 3), Segment(1, 0, 3), Segment(6, 0, 3)),
        *(Segment(1), Segment(7, 12, 1), Segment(3, 12, 1)),
        Segment(3),
    )
    assert inputs.num_tokens == 26
    assert inputs.targets.tolist() == [i for _, response in PAIRS for i in response]
    places = iter(inputs.state_columns.tolist())
    by_response = [[next(places) for _ in response] for _, response in PAIRS]
    assert by_response[:3] == [[2, 3], [12, 13, 14, 15, 16, 17, 18], [2]]
    assert by_response[3:] == [[24], [12, 20, 21], [2, 6, 7, 8, 9, 10]]


def test_a_response_without_tokens_has_no_segment() -> None:
    pairs = [(A, (8, 9)), (A, ()), (B, (4,))]
    inputs = token_inputs(pairs, pad_id=0, layout="shared_prompts")
    assert inputs.segments == (Segment(3), Segment(2, 0, 3), Segment(2))
    assert inputs.targets.tolist() == [8, 9, 4]
    model = make("qwen2")
    choose_layout("shared_prompts", [model])
    assert states_before_responses(model, inputs).shape[0] == 3


def test_without_a_repeated_prompt_the_row_is_the_packed_one() -> None:
    different = [PAIRS[i] for i in (0, 1, 3)]
    packed, shared = (
        token_inputs(different, pad_id=0, layout=layout) for layout in ("packed", "shared_prompts")
    )
    assert shared.segments == packed.segments
    for name in ("input_ids", "state_columns", "targets"):
        assert torch.equal(getattr(shared, name), getattr(packed, name))


def test_operations_are_counted_once_too() -> None:
    """6 tokens, 3 states; 3 x 3 pairs in the prompt, 2 x (2 + 2 x 3) and 1 x (1 + 2 x 3) behind."""
    inputs = token_inputs([(A, (8, 9)), (A, (4,))], pad_id=0, layout="shared_prompts")
    assert ForwardFlops(1, 10, 100).count(inputs) == 6 + 30 + 100 * (9 + 16 + 7)


@pytest.mark.parametrize("call_costs", [0, 300_000], ids=["segment by segment", "by group"])
@pytest.mark.parametrize("name", MAKERS)
def test_states_and_gradients_are_those_of_sequences_alone(
    name: str, call_costs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "_CALL_COST", call_costs)
    model = make(name)
    alone = states_alone(model, PAIRS)
    expected = gradient(model, alone)
    assert choose_layout("shared_prompts", [model]) == "shared_prompts"
    shared = states_before_responses(model, shared_inputs())
    assert relative(shared, alone) < 1e-6
    assert relative(gradient(model, shared), expected) < 1e-5


def test_activation_checkpointing_computes_it_again_alike() -> None:
    model = make("qwen2")
    expected = gradient(model, states_alone(model, PAIRS))
    enable_packing(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shared = states_before_responses(model, shared_inputs())
    assert relative(gradient(model, shared), expected) < 1e-5


def test_under_bf16_autocast_it_differs_by_rounding_alone() -> None:
    model = make("qwen2")
    exact = states_alone(model, PAIRS)
    enable_packing(model)
    with torch.autocast("cpu", torch.bfloat16):
        packed = states_before_responses(model, token_inputs(PAIRS, pad_id=0, layout="packed"))
        shared = states_before_responses(model, shared_inputs())
        assert torch.isfinite(gradient(model, shared)).all()
    assert relative(shared, exact) < 1.2 * relative(packed, exact)


def _sees_its_sibling(segments: tuple[Segment, ...]) -> list[Segment]:
    """The first response to A counts as a part of its prompt."""
    (prompt, first, *others), rest = segments[:4], segments[4:]
    length = prompt.length + first.length
    return [Segment(length), *(s._replace(prompt_length=length) for s in others), *rest]


def _lacks_a_token_of_its_prompt(segments: tuple[Segment, ...]) -> list[Segment]:
    """The last token of A counts as the first of its first response."""
    (_, first, *others), rest = segments[:4], segments[4:]
    shorter = [first._replace(length=first.length + 1), *others]
    return [Segment(2), *(s._replace(prompt_length=2) for s in shorter), *rest]


@pytest.mark.parametrize("call_costs", [0, 300_000], ids=["segment by segment", "by group"])
@pytest.mark.parametrize("break_it", [_sees_its_sibling, _lacks_a_token_of_its_prompt])
def test_negative_control_other_keys_are_something_else(
    break_it: Callable[[tuple[Segment, ...]], list[Segment]],
    call_costs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_attention, "_CALL_COST", call_costs)
    model = make("qwen2")
    alone = states_alone(model, PAIRS)
    enable_packing(model)
    inputs = shared_inputs()
    options = packed_attention._packed_options(model, inputs)
    right = options | {"packed_row": PackedRow(inputs.segments, torch.device("cpu"))}
    broken = options | {"packed_row": PackedRow(break_it(inputs.segments), torch.device("cpu"))}
    differences = []
    for chosen in (right, broken):
        monkeypatch.setattr(packed_attention, "_packed_options", lambda *_, chosen=chosen: chosen)
        differences.append(relative(states_before_responses(model, inputs), alone))
    assert differences[0] < 1e-6
    assert differences[1] > 0.05


def test_negative_control_positions_that_begin_at_0_are_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("qwen2")
    alone = states_alone(model, PAIRS)
    enable_packing(model)
    options = packed_attention._packed_options

    def from_0(model: PreTrainedModel, inputs: TokenInputs) -> dict[str, Any]:
        positions = torch.cat([torch.arange(s.length) for s in inputs.segments])[None]
        return options(model, inputs) | {"position_ids": positions}

    monkeypatch.setattr(packed_attention, "_packed_options", from_0)
    assert relative(states_before_responses(model, shared_inputs()), alone) > 0.05


# ---- the variable-length kernel ---------------------------------------------------------------


def aligned_to_the_end(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """As FlashAttention documents its causal mask: the last query meets the last key."""
    assert (window_size, enable_gqa) == ((-1, 0), True)
    bounds = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    parts = []
    for (q_start, q_end), (k_start, k_end) in bounds:
        num_q, num_k = q_end - q_start, k_end - k_start
        assert 0 < num_q <= max_q
        assert num_q <= num_k <= max_k
        one_q = q[q_start:q_end].transpose(0, 1)[None]
        one_k, one_v = (x[k_start:k_end].transpose(0, 1)[None] for x in (k, v))
        may = torch.tensor([[j <= i + num_k - num_q for j in range(num_k)] for i in range(num_q)])
        attended = scaled_dot_product_attention(
            one_q, one_k, one_v, attn_mask=may, scale=scale, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1))
    assert cu_q[-1] == len(q)
    assert cu_k[-1] == len(k)
    return torch.cat(parts)


def test_the_call_of_the_variable_length_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, bounds and gradients; the kernel is CUDA's, here a stand-in."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", aligned_to_the_end)
    row = PackedRow(shared_inputs().segments, torch.device("cpu"))
    monkeypatch.setattr(packed_attention, "_CALL_COST", 0)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, 26, 8, requires_grad=True) for n in (4, 2, 2))
    weights = torch.randn(1, 26, 4, 8)
    found = []
    for attend in (_varlen_flash, partial(_by_segments, dtype=torch.float32)):
        output = attend(query, key, value, scaling=0.3, row=row)
        found.append((output, *torch.autograd.grad((output * weights).sum(), [query, key, value])))
    for by_kernel, by_loop in zip(*found, strict=True):
        torch.testing.assert_close(by_kernel, by_loop)


@pytest.mark.gpu
def test_the_variable_length_kernel_agrees_with_single_sequences() -> None:
    assert kernel_error(shared_inputs(), PAIRS) < 1e-2


def test_flash_attention_2_reads_rows_without_shared_prompts() -> None:
    model = make("qwen2")
    model.config._attn_implementation = "flash_attention_2"  # the package needs a GPU
    assert choose_layout("auto", [model]) == "packed"
    assert choose_layout("packed", [model]) == "packed"
    with pytest.raises(UserError, match=r"packing is shared_prompts, but .* flash_attention_2"):
        choose_layout("shared_prompts", [model])
    with pytest.raises(ValueError, match="flash_attention_2"):
        last_hidden_states(model, shared_inputs())


# ---- cuts -------------------------------------------------------------------------------------

PROMPTS = [A, B, A, C, B, A, A, A, B, A]
LENGTHS = [13, 4, 6, 30, 11, 9, 8, 3, 21, 5]  # 110 tokens, 93 with each prompt once


def load(chunk: list[int]) -> int:
    responses = sum(LENGTHS[row] - len(PROMPTS[row]) for row in chunk)
    return responses + sum(map(len, {PROMPTS[row] for row in chunk}))


def cut(max_tokens: int) -> list[list[int]]:
    return cut_by_tokens(
        LENGTHS, range(10), max_tokens=max_tokens, layout="shared_prompts", prompts=PROMPTS
    )


@pytest.mark.parametrize("max_tokens", [1, 20, 33, 50, 93, 1000])
def test_chunks_hold_every_row_once_within_the_budget(max_tokens: int) -> None:
    chunks = cut(max_tokens)
    assert sorted(row for chunk in chunks for row in chunk) == list(range(10))
    loads = [load(chunk) for chunk in chunks]
    assert all(
        size <= max_tokens or len(chunk) == 1 for size, chunk in zip(loads, chunks, strict=True)
    )
    assert loads == sorted(loads, reverse=True)


def test_the_budget_counts_a_prompt_once_and_its_rows_go_together() -> None:
    assert len(cut(93)) == 1
    for max_tokens in (92, 63, 35):
        prompts = [{PROMPTS[row] for row in chunk} for chunk in cut(max_tokens)]
        assert sum(map(len, prompts)) == 3, "no prompt is in two chunks"
    assert list(map(load, cut(62))) == [51, 43], "a third chunk, or one more token of a prompt"


def test_the_chunks_are_about_equally_large() -> None:
    """Eight responses of 5 tokens: not 28 tokens and 18, as where the first is filled."""
    chunks = cut_by_tokens(
        [8] * 8, range(8), max_tokens=30, layout="shared_prompts", prompts=[A] * 8
    )
    assert chunks == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("wanted", [2, 3, 7, 10])
def test_every_rank_gets_as_many_chunks(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    monkeypatch.setattr(
        "vapo.networks.forward_passes.max_over_ranks",
        lambda mine: torch.tensor(max(int(mine), wanted)),
    )
    chunks = cut(600)
    assert len(chunks) == wanted
    assert sorted(row for chunk in chunks for row in chunk) == list(range(10))


# ---- a whole minibatch, through the module and Trainer ------------------------------------------

KINDS = ("responses", "episodes", "critic prompts")
SEVERAL = 60  # tokens of a micro-batch
CHECKPOINTING = tuple(f"{name}.gradient_checkpointing=true" for name in ("actor", "critic"))


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Any]]:
    return {kind: compute(1, ONE_FORWARD, kind, PADDED) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [ONE_FORWARD, SEVERAL])
def test_gradients_losses_and_metrics_do_not_change(
    whole: dict[str, Any], kind: str, budget: int
) -> None:
    found = compute(1, budget, kind, SHARED)
    assert_same(whole[kind], found)
    assert found["flops"] < whole[kind]["flops"]


def test_segment_by_segment_too(whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in larger networks, where siblings are not masked but called one by one."""
    monkeypatch.setattr(packed_attention, "_CALL_COST", 0)
    assert_same(whole[KINDS[0]], compute(1, SEVERAL, KINDS[0], SHARED))


def test_it_is_the_default(whole: dict[str, Any]) -> None:
    default, packed = compute(1, ONE_FORWARD, KINDS[0]), compute(1, ONE_FORWARD, KINDS[0], PACKED)
    assert default["flops"] < packed["flops"] == whole[KINDS[0]]["flops"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [CHECKPOINTING, ("critic.count=2",)],
    ids=["activation checkpointing", "two critics"],
)
def test_with_other_options_too(overrides: tuple[str, ...]) -> None:
    one = compute(1, ONE_FORWARD, KINDS[0], PADDED, *overrides)
    assert_same(one, compute(1, SEVERAL, KINDS[0], SHARED, *overrides))


@pytest.mark.parametrize("overrides", [(), ("actor.gradient_checkpointing=true",)])
def test_with_adapters_too(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Log-probs, entropies and the adapters' gradients; and with the adapters off."""
    config = lora_config(tmp_path, *overrides)
    actor = trained(config).train()
    reference = make_reference(config, None, actor)
    weights = torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    found: dict[Layout, list[Tensor]] = {}
    for layout in ("padded", "shared_prompts"):
        assert choose_layout(layout, [actor.model]) == layout
        inputs = token_inputs(PAIRS, pad_id=0, layout=layout)
        output = actor(inputs, temperature=1.0)
        actor.zero_grad()
        (weights * torch.stack([output.logprobs, output.entropy])).sum().backward()
        gradients = [p.grad for p in actor.parameters() if p.requires_grad]
        flat = torch.cat([g.flatten() for g in gradients if g is not None])
        with torch.no_grad():
            frozen = reference(inputs, temperature=1.0).logprobs
        found[layout] = [output.logprobs, output.entropy, flat, frozen]
    for padded, shared in zip(*found.values(), strict=True):
        assert relative(shared, padded) < 1e-5
    assert relative(found["padded"][3], found["padded"][0]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        (KINDS[0], SEVERAL),
        pytest.param(KINDS[2], ONE_FORWARD, marks=pytest.mark.night),
        pytest.param(KINDS[1], SEVERAL, marks=pytest.mark.night),
    ],
)
def test_two_sharded_processes_equal_one(
    whole: dict[str, Any], two_ranks: Ranks, kind: str, budget: int
) -> None:
    sharded, _ = two_ranks.run(compute, 2, budget, kind, SHARED)
    assert_same(whole[kind], sharded)


def test_negative_control_siblings_in_the_keys_are_another_gradient(
    whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each response sees what stands before it in the row."""

    def joined(self: PackedRow, index: int, dtype: torch.dtype, **_: Any) -> Tensor:
        size = sum(segment.length for segment in self.groups[index])
        return torch.zeros(size, size, dtype=dtype).masked_fill(
            ~torch.ones(size, size, dtype=torch.bool).tril(), -torch.inf
        )

    monkeypatch.setattr(PackedRow, "group_mask", joined)
    broken = compute(1, ONE_FORWARD, KINDS[0], SHARED)
    assert largest_relative_difference(whole[KINDS[0]]["gradients"], broken["gradients"]) > 1e-2
