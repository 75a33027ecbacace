"""Computes the last position's logits, and samples a token for each row by a random number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from vapo.functional.logprobs import output_logits
from vapo.networks.packed_attention import computes_on_cpu
from vapo.networks.precision import rounded_inputs
from vapo.rollouts.engines.contract import SamplingSettings

_ORDERED_AT_FIRST = 256  # on a CPU, where ordering a large vocabulary takes longer than the model
_CPU_LOGITS = 2**20  # sampled from at a time: tensors that a CPU's cache and its allocator keep
_BLOCK = 256  # neighbouring tokens whose probabilities are added up before one of them is drawn


@contextmanager
def float32_logits(model: PreTrainedModel, *, rounds: bool = False) -> Iterator[None]:
    """Inside the block, let the model compute float32 logits, as the trainer's log-probs do.

    Its own output layer would round the logits of bfloat16 states to bfloat16. The logits have no
    gradient. `rounds` says whether products may round their inputs. Blocks must not be nested.
    """
    head: Any = model.get_output_embeddings()
    rounding = rounded_inputs if rounds else None

    def forward(states: Tensor) -> Tensor:
        weight = head.weight
        on_cpu = computes_on_cpu(states)
        rows = states.to(weight.dtype)
        return output_logits(rows, weight, on_cpu=on_cpu, rounding=rounding)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def sample_tokens(
    logits: Float[Tensor, "R V"], uniforms: Float64[Tensor, " R"], settings: SamplingSettings
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """Sample a token for each row, and return it with its log-prob under the sampled distribution.

    The row's random number decides the token (`inverse_cdf`); with `greedy` it is the likeliest.
    """
    on_cpu = logits.device.type == "cpu"
    num_rows = max(1, _CPU_LOGITS // logits.shape[-1]) if on_cpu else len(logits)
    parts = []
    for rows, draws in zip(logits.split(num_rows), uniforms.split(num_rows), strict=True):
        logprobs = filtered_logprobs(
            rows,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            ordered_at_first=_ORDERED_AT_FIRST if on_cpu else None,
        )
        ids = logprobs.argmax(dim=-1) if settings.greedy else inverse_cdf(logprobs, draws)
        parts.append((ids, logprobs.gather(1, ids[:, None]).squeeze(1)))
    ids, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs


def filtered_logprobs(
    logits: Float[Tensor, "R V"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    ordered_at_first: int | None = None,
) -> Float[Tensor, "R V"]:
    """Return the log-probs of the distribution that is sampled from; -inf for tokens not kept.

    In this order: logits / temperature; the `top_k` likeliest (0: all); of what is left and
    renormalised, the fewest likeliest tokens whose mass reaches `top_p`; renormalised again.
    Equal logits are kept by lower id first. Float32, whatever the model's dtype.

    Args:
        ordered_at_first: how many of the likeliest tokens are ordered at first; more are ordered
            only if these are too few. None: order all, and never wait for the device.
    """
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    has_top_k = 0 < top_k < logits.shape[-1]
    if not has_top_k and top_p >= 1:
        return logprobs
    num_top = top_k if has_top_k else None
    lowest, num_kept = _nucleus(logprobs, ordered_at_first, top_k=num_top, top_p=top_p)
    is_dropped = logprobs < lowest
    is_last = logprobs == lowest
    num_last = num_kept - (logprobs > lowest).sum(dim=-1, keepdim=True)
    if ordered_at_first is None or bool((is_last.sum(dim=-1, keepdim=True) > num_last).any()):
        is_dropped |= is_last & (is_last.cumsum(dim=-1) > num_last)
    return torch.log_softmax(logprobs.masked_fill(is_dropped, -torch.inf), dim=-1)


def _nucleus(
    logprobs: Float[Tensor, "R V"], at_first: int | None, *, top_k: int | None, top_p: float
) -> tuple[Float[Tensor, "R 1"], Int[Tensor, "R 1"]]:
    """Return for each row the least log-prob of a token that is kept, and how many are kept.

    Top-k and top-p decide which tokens are kept.

    Args:
        at_first: how many of the likeliest tokens are ordered at first; None: all.
        top_k: the largest number of kept tokens; None: no limit.
    """
    vocab_size = logprobs.shape[-1]
    num = vocab_size if at_first is None else min(vocab_size, max(at_first, top_k or 0))
    while True:
        ordered = logprobs.topk(num, dim=-1).values[:, :top_k]
        probs = ordered.exp() if top_k is None else torch.softmax(ordered, dim=-1)
        mass = probs.cumsum(dim=-1)
        is_kept = ((mass - probs) < top_p) & ~torch.isneginf(ordered)
        is_kept[:, 0] = True
        if num == vocab_size or top_k is not None or bool((mass[:, -1] >= top_p).all()):
            num_kept = is_kept.sum(dim=-1, keepdim=True)
            return ordered.gather(1, num_kept - 1), num_kept
        num = min(vocab_size, 16 * num)


def inverse_cdf(
    logprobs: Float[Tensor, "R V"], uniforms: Float64[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Return for each row the first token whose cumulative probability exceeds the row's uniform.

    Probabilities are added up in the order of token ids.
    A token of probability 0 is never returned, whatever the rounding. In a large vocabulary the
    token's block is looked up first, so that few cumulative probabilities are needed.
    """
    probs = logprobs.exp()
    if probs.shape[-1] <= _BLOCK:
        return _first_above(probs.double(), uniforms)[0]
    blocks = pad(probs, (0, -probs.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    block, remainder = _first_above(blocks.sum(dim=-1).double(), uniforms)
    inside = blocks.take_along_dim(block[:, None, None], dim=1).squeeze(1).double()
    place, _ = _first_above(inside, remainder / inside.sum(dim=-1))
    return block * _BLOCK + place


def _first_above(
    masses: Float64[Tensor, "R n"], shares: Float64[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float64[Tensor, " R"]]:
    """Return for each row the first column whose cumulative mass exceeds a share of all mass.

    Also return how much of that share is left at the beginning of the column. The column has mass
    itself: a column without mass gets a cumulative value below every threshold, as a parallel scan
    need not be monotone. A column with the largest cumulative value counts as above every
    threshold.
    """
    cumulative = masses.cumsum(dim=-1).masked_fill_(masses == 0, -1.0)
    largest = cumulative.amax(dim=-1, keepdim=True)
    threshold = shares[:, None] * largest
    is_above = (cumulative > threshold) | (cumulative == largest)
    place = is_above.to(torch.uint8).argmax(dim=-1, keepdim=True)
    begin = cumulative.gather(1, place) - masses.gather(1, place)
    return place.squeeze(1), (threshold - begin).squeeze(1)


def uniform_draws(seeds: Sequence[int], *, num_tokens: int) -> Float64[Tensor, "R num_tokens"]:
    """Draw `num_tokens` uniform numbers in [0, 1) for each row, by the row's seed alone.

    With a larger `num_tokens` the first numbers stay the same.
    """
    draws = np.empty((len(seeds), num_tokens))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=draws[row])
    return torch.from_numpy(draws)
