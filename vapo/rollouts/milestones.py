"""The numbers in a response as milestones, which give its states a value.

A state's value comes from the other responses of its group that reach the same milestone.
"""

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
    """Return for each token the text that it adds to what a verifier reads.

    A token is decoded behind the one before it: some tokenizers leave out the space before a word
    where it is the first.
    """

    @cache
    def text(*token_ids: int) -> str:
        return sampled_text(token_ids, tokenizer)

    first = [text(token_id) for token_id in ids[:1]]
    return first + [text(last, new)[len(text(last)) :] for last, new in pairwise(ids)]


def milestones_of(
    texts: Iterable[str], *, kind: Literal["nth", "all"]
) -> dict[tuple[int, str, bytes], int]:
    """Return the milestones of a response by the number of tokens after which each is reached.

    A milestone describes the numbers that the response has written so far: (how many there are,
    the last one, a digest). The digest is empty with `nth`; with `all` it is a hash of the numbers
    before the last one, so that each milestone takes the same room. There is a milestone at the
    start, and one after each token with a digit. Neighbouring digits are one number, which may be
    spread over tokens: then there is a milestone after each of these. No milestone occurs again
    after another.

    Args:
        texts: the texts of the response's tokens.

    >>> milestones_of(["3", "+", "1", "4"], kind="nth")
    {(0, '', b''): 0, (1, '3', b''): 1, (2, '1', b''): 3, (2, '14', b''): 4}
    """
    count, last, digest = 0, "", b""
    is_open = False
    lengths = {(count, last, digest): 0}
    for num_tokens, text in enumerate(texts, start=1):
        for part in re.findall(r"\d+|\D+", text):
            if part[0].isdecimal() and is_open:
                last += part
            elif part[0].isdecimal():
                if kind == "all":
                    digest = blake2b(digest + last.encode(), digest_size=16).digest()
                count, last = count + 1, part
            is_open = part[0].isdecimal()
        if re.search(r"\d", text):
            lengths[count, last, digest] = num_tokens
    return lengths


def numbered_milestones(
    texts: Sequence[Sequence[str]], *, kind: Literal["nth", "all"]
) -> Int[Tensor, "G T"]:
    """Return for each token of a group's responses the index of the milestone before it.

    A milestone describes the numbers that a response has written so far (`milestones_of`). Equal
    milestones have equal indices, and 0 means that there is no number yet. The index at padding has
    no meaning.

    Args:
        texts: for each response the texts of all its tokens but the last.
    """
    numbers: dict[tuple[int, str, bytes], int] = {}
    milestone_numbers = torch.zeros(len(texts), 1 + max(map(len, texts)), dtype=torch.long)
    for row, row_texts in enumerate(texts):
        for mark, start in milestones_of(row_texts, kind=kind).items():
            milestone_numbers[row, start:] = numbers.setdefault(mark, len(numbers))
    return milestone_numbers


def with_milestone_values(
    batch: RolloutBatch, options: MilestonesConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[RolloutBatch, dict[str, float]]:
    """Return the batch with the values of milestones as `step_values`, and metrics over all ranks.

    A milestone describes the numbers that a response has written so far. The value before a token
    is estimated from the rewards of the group's other responses that reached the same milestone.
    Every rank must call this, with whole groups.
    """
    mask, size = batch.response_mask, batch.group_size
    texts = [token_texts(rollout.response_ids[:-1], tokenizer) for rollout in batch.rollouts]
    states = torch.zeros_like(batch.response_ids)
    for first in range(0, len(batch), size):
        rows = slice(first, first + size)
        group_states = numbered_milestones(texts[rows], kind=options.kind)
        states[rows, : group_states.shape[1]] = group_states
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
