"""The numbers in a response as milestones, and what its states are worth by those of others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vapo.config.estimators import MilestonesConfig
from vapo.functional.metrics import explained_variance
from vapo.functional.milestones import milestone_values
from vapo.rollouts.engines.contract import sampled_text
from vapo.system.distributed import sum_over_ranks
from vapo.types import RolloutBatch


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text that a verifier reads of them all.

    A token is decoded behind the one before it: some tokenizers leave out the space before a word
    where it is the first.
    """

    @cache
    def text(*some: int) -> str:
        return sampled_text(some, tokenizer)

    first = [text(one) for one in ids[:1]]
    return first + [text(one, two)[len(text(one)) :] for one, two in pairwise(ids)]


def milestones_of(
    texts: Iterable[str], *, kind: Literal["nth", "all"]
) -> dict[tuple[int, str, bytes], int]:
    """The numbers so far, and how many tokens a response has when it comes to them.

    `nth` is how many numbers there are and the last one, `all` is all of them: beside those two a
    hash of the ones before, so that each milestone takes the same room. Digits that follow each
    other are one number, which is a milestone before it has ended, too. No response comes back to
    a milestone that it has left.

    >>> milestones_of(["3", "+", "1", "4"], kind="nth")
    {(0, '', b''): 0, (1, '3', b''): 1, (2, '1', b''): 3, (2, '14', b''): 4}
    """
    count, last, before = 0, "", b""
    is_open = False
    found = {(count, last, before): 0}
    for num_tokens, text in enumerate(texts, start=1):
        for part in re.findall(r"\d+|\D+", text):
            if part[0].isdecimal() and is_open:
                last += part
            elif part[0].isdecimal():
                if kind == "all":
                    before = blake2b(before + last.encode(), digest_size=16).digest()
                count, last = count + 1, part
            is_open = part[0].isdecimal()
        if re.search(r"\d", text):
            found[count, last, before] = num_tokens
    return found


def numbered_milestones(
    texts: Sequence[Sequence[str]], *, kind: Literal["nth", "all"]
) -> Int[Tensor, "G T"]:
    """The milestone before each token of a group's responses, 0 where there is no number yet.

    Equal ones have equal numbers. `texts` are of all tokens but the last; padding may be anything.
    """
    numbers: dict[tuple[int, str, bytes], int] = {}
    found = torch.zeros(len(texts), 1 + max(map(len, texts)), dtype=torch.long)
    for row, own in enumerate(texts):
        for mark, start in milestones_of(own, kind=kind).items():
            found[row, start:] = numbers.setdefault(mark, len(numbers))
    return found


def with_milestone_values(
    batch: RolloutBatch, options: MilestonesConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch with the value of each token's milestone as `step_values`.

    Metrics are over all ranks, which must all call this, each with whole groups.
    """
    mask, size = batch.response_mask, batch.group_size
    texts = [token_texts(rollout.response_ids[:-1], tokenizer) for rollout in batch.rollouts]
    states = torch.zeros_like(batch.response_ids)
    for first in range(0, len(batch), size):
        rows = slice(first, first + size)
        found = numbered_milestones(texts[rows], kind=options.kind)
        states[rows, : found.shape[1]] = found
    values, counts = milestone_values(
        batch.rewards, states, mask, group_size=size, shrinkage=options.shrinkage
    )
    has_number = mask & (states > 0)
    sums = torch.stack([mask.sum(), has_number.sum(), (has_number & (counts > 0)).sum()])
    tokens, numbers, shared = sum_over_ranks(sums).tolist()
    returns = batch.rewards[:, None].expand(mask.shape)
    explained = explained_variance(values, returns, mask, reduce=sum_over_ranks)
    return replace(batch, step_values=values), {
        "milestones/explained_variance": float(explained),
        "milestones/number_share": numbers / tokens,
        "milestones/shared_share": shared / tokens,
    }
