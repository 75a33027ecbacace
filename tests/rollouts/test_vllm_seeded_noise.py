"""The noise that decides a sampled token, against its definition in Python's whole numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import stats
from torch import Tensor

from vapo.rollouts.engines.vllm import seeded_noise
from vapo.rollouts.engines.vllm.seeded_noise import exponential_noise, hashes, sampled_ids

_WORD = 2**32


def rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) % _WORD


def murmur3_of(words: list[int]) -> int:
    """murmur3_32 of whole words with the hash's own seed 0."""
    state = 0
    for word in words:
        key = rotated(word * 0xCC9E2D51 % _WORD, 15) * 0x1B873593 % _WORD
        state = (rotated(state ^ key, 13) * 5 + 0xE6546B64) % _WORD
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B % _WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 % _WORD
    return state ^ state >> 16


def murmur3(seed: int, place: int, token: int) -> int:
    return murmur3_of([seed % _WORD, (seed >> 32) % _WORD, place % _WORD, token])


def hashed(seeds: list[int], places: list[int], vocab_size: int) -> list[list[int]]:
    words = hashes(torch.tensor(seeds), torch.tensor(places), vocab_size)
    return [[word % _WORD for word in row] for row in words.tolist()]


def noise(seeds: list[int], places: list[int], vocab_size: int) -> Tensor:
    return exponential_noise(torch.tensor(seeds), torch.tensor(places), vocab_size)


def test_the_definition_is_murmur3() -> None:
    """Its published values for four bytes: 00 00 00 00, ff ff ff ff and 21 43 65 87."""
    assert murmur3_of([]) == 0
    assert murmur3_of([0]) == 0x2362F9DE
    assert murmur3_of([0xFFFFFFFF]) == 0x76293B50
    assert murmur3_of([0x87654321]) == 0xF55B516B


def test_each_number_is_the_definitions() -> None:
    draw = random.Random(0)
    seeds = [0, 1, -1, -(2**63), 2**63 - 1, *(draw.randrange(2**63) for _ in range(5))]
    places = [0, 1, 2**31 - 1, 2**31, *(draw.randrange(2**20) for _ in range(6))]
    assert hashed(seeds, places, 70) == [
        [murmur3(seed, place, token) for token in range(70)]
        for seed, place in zip(seeds, places, strict=True)
    ]


def test_from_a_word_to_its_exponential_number() -> None:
    """-log(1 - (h + 1/2) / 2^32), in float64 by Python."""
    made = noise([7, 8], [3, 4], 500)
    for row, (seed, place) in enumerate([(7, 3), (8, 4)]):
        for token in range(500):
            wanted = -math.log1p(-(murmur3(seed, place, token) + 0.5) / _WORD)
            assert float(made[row, token]) == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, -(2**31), -2, -1])
def test_no_word_gives_0_or_an_infinite_number(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """-1 has all bits: (h + 1/2) / 2^32 is 1 in float32, whose exponential number is infinite."""
    monkeypatch.setattr(
        seeded_noise, "hashes", lambda *_: torch.full((1, 2), word, dtype=torch.int32)
    )
    made = noise([0], [0], 2)
    assert torch.isfinite(made).all()
    assert (made > 0).all()
    if word == 0:
        assert float(made[0, 0]) == pytest.approx(2.0**-33, rel=1e-5)
    if word == -1:
        assert float(made[0, 0]) == pytest.approx(24 * math.log(2), rel=1e-5)


# ---- what the numbers are like ----------------------------------------------------------------


def uniforms(seeds: list[int], places: list[int], vocab_size: int) -> Tensor:
    return 1 - torch.exp(-noise(seeds, places, vocab_size).double())


@pytest.mark.parametrize(
    ("seeds", "places"),
    [([0], [0]), (list(range(200)), [5] * 200), ([11] * 200, list(range(200)))],
    ids=["one row", "seeds counted up", "places counted up"],
)
def test_they_are_uniform(seeds: list[int], places: list[int]) -> None:
    numbers = uniforms(seeds, places, 500)
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 0.001
    by_token = numbers[:, :20].numpy()  # down each column, too
    if len(seeds) > 1:
        least = min(stats.kstest(by_token[:, token], "uniform").pvalue for token in range(20))
        assert least > 0.001 / 20


@pytest.mark.parametrize("step", [1, 2, 2**32, 2**62], ids=str)
def test_neighbours_are_independent(step: int) -> None:
    """Seeds that differ by one bit or one, in either half, neighbouring places and tokens.

    By a table of 8 x 8 cells of both numbers. The correlation alone would miss much.
    """
    base = uniforms([5 + 3 * i for i in range(40)], list(range(40)), 501)
    others = {
        "seed": uniforms([5 + 3 * i + step for i in range(40)], list(range(40)), 501),
        "place": uniforms([5 + 3 * i for i in range(40)], [i + step for i in range(40)], 501),
        "token": base.roll(1 + step % 7, dims=1),
    }
    if step >= _WORD:  # a place has 32 bits
        del others["place"]
    for other in others.values():
        cells = (base * 8).long() * 8 + (other * 8).long()
        counts = torch.bincount(cells[:, 8:].flatten(), minlength=64)
        assert stats.chisquare(counts.numpy()).pvalue > 0.001 / 11


def test_no_two_rows_of_a_batch_share_their_noise() -> None:
    rows = hashed(list(range(64)), [9] * 64, 256) + hashed([3] * 64, list(range(100, 164)), 256)
    assert len({tuple(row[:4]) for row in rows}) == 128


# ---- a token from them ------------------------------------------------------------------------


def test_the_token_is_the_one_that_ends_its_race_first() -> None:
    probs = torch.rand(6, 30).softmax(dim=-1)
    seeds, places = [3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]
    ids = sampled_ids(probs, torch.tensor(seeds), torch.tensor(places))
    for row, (seed, place) in enumerate(zip(seeds, places, strict=True)):
        times = [
            -math.log1p(-(murmur3(seed, place, token) + 0.5) / _WORD) / float(probs[row, token])
            for token in range(30)
        ]
        assert int(ids[row]) == times.index(min(times))


def test_tokens_are_drawn_by_their_probabilities() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0])
    num = 20_000
    for seeds, places in (
        (torch.arange(num), torch.full((num,), 7)),
        (torch.full((num,), 7), torch.arange(num)),
    ):
        ids = sampled_ids(probs.expand(num, -1), seeds, places)
        counts = torch.bincount(ids, minlength=6)
        assert counts[5] == 0
        assert stats.chisquare(counts[:5].numpy(), (probs[:5] * num).numpy()).pvalue > 0.001


def test_a_row_has_its_token_alone_and_beside_others_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a CPU takes the rows in parts."""
    probs = torch.rand(9, 50).softmax(dim=-1)
    seeds, places = torch.arange(9) * 77, torch.arange(9) + 2
    together = sampled_ids(probs, seeds, places)
    order = torch.randperm(9)
    assert torch.equal(sampled_ids(probs[order], seeds[order], places[order]), together[order])
    for row in range(9):
        part = slice(row, row + 1)
        assert sampled_ids(probs[part], seeds[part], places[part]).item() == together[row]
    monkeypatch.setattr(seeded_noise, "_CPU_NUMBERS", 120)
    assert torch.equal(sampled_ids(probs, seeds, places), together)


def test_a_token_without_probability_is_never_taken() -> None:
    """As top-k and top-p leave them, and where a row has one token alone."""
    probs = torch.zeros(400, 40)
    probs[:, 11] = 1.0
    assert sampled_ids(probs, torch.arange(400), torch.arange(400)).unique().tolist() == [11]
    probs[:, 30] = 1e-30
    assert sampled_ids(probs, torch.arange(400), torch.arange(400)).unique().tolist() == [11]
