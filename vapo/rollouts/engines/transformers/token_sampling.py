"""From the last position's logits to one token a row, and the random numbers that decide it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


def filtered_logprobs(
    logits: Float[Tensor, "R V"], *, temperature: float, top_k: int, top_p: float
) -> Float[Tensor, "R V"]:
    """Log-probs of the distribution that is sampled from: -inf outside the kept tokens.

    In this order: logits / temperature; the `top_k` likeliest (0: all); of what is left and
    renormalised, the fewest likeliest tokens whose mass reaches `top_p`; renormalised again.
    Equal logits are kept by lower id first. Float32, whatever the model's dtype.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    vocab_size = logits.shape[-1]
    has_top_k = 0 < top_k < vocab_size
    if not has_top_k and top_p >= 1:
        return logprobs
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if has_top_k:
        ordered[:, top_k:] = -torch.inf
    probs = torch.softmax(ordered, dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    is_dropped = torch.isneginf(ordered) | (mass_before >= top_p)
    is_dropped[:, 0] = False
    is_dropped = torch.zeros_like(is_dropped).scatter_(1, ids, is_dropped)
    return torch.log_softmax(logprobs.masked_fill(is_dropped, -torch.inf), dim=-1)


def inverse_cdf(
    logprobs: Float[Tensor, "R V"], uniforms: Float64[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Take the first token, in id order, whose cumulative probability exceeds the row's uniform.

    A token of probability 0 is never returned, whatever the rounding: its cumulative value is
    set below every threshold (a parallel scan need not be monotone), and the threshold is below
    the largest one left, since a float64 uniform is at most 1 - 2**-53.
    """
    probs = logprobs.exp()
    cumulative = probs.double().cumsum(dim=-1).masked_fill_(probs == 0, -1.0)
    threshold = uniforms * cumulative.amax(dim=-1)
    return (cumulative > threshold[:, None]).to(torch.uint8).argmax(dim=-1)


def uniform_draws(seeds: Sequence[int], *, num_tokens: int) -> Float64[Tensor, "R num_tokens"]:
    """Draw each row's uniforms in [0, 1): a function of its seed only; more begin with the same."""
    draws = np.empty((len(seeds), num_tokens))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=draws[row])
    return torch.from_numpy(draws)
