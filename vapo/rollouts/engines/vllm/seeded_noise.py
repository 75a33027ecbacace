"""Computes the noise that decides a sampled token, from a seed, a place and the token's id.

It is computed for all rows and all tokens of the vocabulary at once, without a generator for each
request:

    h = murmur3_32(seed, place, id), over 16 bytes: two words of the seed, one each of the others
    u = (h + 1/2) / 2^32, between 0 and 1
    e = -log(1 - u), exponential with mean 1

The token with the largest p / e is a sample of the distribution p (an exponential race). `place` is
the index of the newest token that the model has read: the number of tokens before the one that is
sampled, less one. So a request draws the same noise alone and beside others, in any row, and again
after vLLM has interrupted it. vLLM's own Triton kernel on a GPU has the same h
(`vllm/v1/worker/gpu/sample/gumbel.py` of 0.32). vLLM's older model runner, which a CPU has, gets
the noise from this module.

The integers are 32 bits wide and wrap around, so that a processor's vector units do eight at once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

_CPU_NUMBERS = 2**18  # at a time on a CPU, whose cache holds about as many
_MOST = 1 - 2**-24  # the largest float32 below 1


def _signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - (word >> 31 << 32)


_KEY_1, _KEY_2, _STEP = _signed(0xCC9E2D51), _signed(0x1B873593), _signed(0xE6546B64)
_END_1, _END_2, _NUM_BYTES = _signed(0x85EBCA6B), _signed(0xC2B2AE35), 16


def _shifted_right(words: Tensor, bits: int) -> Tensor:
    """Shift words to the right as if they were unsigned: zeros come in on the left."""
    return (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits).bitwise_or_(_shifted_right(words, 32 - bits))


def _key(words: Tensor) -> Tensor:
    return _rotated(words * _KEY_1, 15).mul_(_KEY_2)


def _mixed(state: Tensor, key: Tensor) -> Tensor:
    return _rotated(state ^ key, 13).mul_(5).add_(_STEP)


def _low_words(numbers: Tensor) -> Tensor:
    """Return the low 32 bits of each number as an int32."""
    low = numbers.bitwise_and(0xFFFFFFFF)
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def hashes(
    seeds: Int[Tensor, " R"], places: Int[Tensor, " R"], vocab_size: int
) -> Int32[Tensor, "R {vocab_size}"]:
    """Return for each row and token of the vocabulary a hash (murmur3_32) of seed, place and token.

    A place is the index of the newest token that the model has read. The hashes are the bits of
    unsigned words.
    """
    seeds, places = seeds.long(), places.long()
    state = torch.zeros(len(seeds), dtype=torch.int32, device=seeds.device)
    for word in (seeds, seeds >> 32, places):
        state = _mixed(state, _key(_low_words(word)))
    ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    words = _mixed(state[:, None], _key(ids)[None]).bitwise_xor_(_NUM_BYTES)
    words.bitwise_xor_(_shifted_right(words, 16)).mul_(_END_1)
    words.bitwise_xor_(_shifted_right(words, 13)).mul_(_END_2)
    return words.bitwise_xor_(_shifted_right(words, 16))


def exponential_noise(
    seeds: Int[Tensor, " R"], places: Int[Tensor, " R"], vocab_size: int
) -> Float[Tensor, "R {vocab_size}"]:
    """Return for each row and token of the vocabulary an exponential random number of mean 1.

    It depends on the row's seed, its place (the index of the newest token that the model has read)
    and the token. The numbers are float32, finite and above 0.
    """
    words = hashes(seeds, places, vocab_size)
    # Each half of a word is a float32 without rounding, so that their sum is rounded once.
    high, low = _shifted_right(words, 16).float(), words.bitwise_and_(0xFFFF).float()
    uniforms = high.mul_(2.0**-16).add_(low.add_(0.5), alpha=2.0**-32)
    return uniforms.clamp_(max=_MOST).neg_().log1p_().neg_()


def sampled_ids(
    probs: Float[Tensor, "R V"], seeds: Int[Tensor, " R"], places: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Sample one token of each row's distribution. A token of probability 0 is never sampled.

    Args:
        probs: the distributions, which need not be normalized.
        seeds: the seed of each row's request.
        places: for each row the index of the newest token that the model has read.
    """
    vocab_size = probs.shape[-1]
    num_rows = len(probs)
    if probs.device.type == "cpu":
        num_rows = max(1, _CPU_NUMBERS // vocab_size)
    parts = [
        (rows / exponential_noise(row_seeds, row_places, vocab_size)).argmax(dim=-1)
        for rows, row_seeds, row_places in zip(
            probs.split(num_rows), seeds.split(num_rows), places.split(num_rows), strict=True
        )
    ]
    return torch.cat(parts)
