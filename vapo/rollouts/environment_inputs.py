"""What an environment is told of turns: a turn's text, and those of an episode once more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from vapo.types import Rollout


class Replayed(NamedTuple):
    """An observation's tokens, the sampled token before it, and the turn that followed it.

    `text` None: the episode is continued here.
    """

    ids: tuple[int, ...]
    last_id: int | None
    text: str | None


def replay_of(start: Rollout, tokenizer: PreTrainedTokenizerBase) -> deque[Replayed]:
    """What an environment must be told to come to where the last of these turns is under way."""
    replay: deque[Replayed] = deque()
    ids, last_id = start.response_ids, None
    *over, begun = start.turn_spans
    for begin, first, end in over:
        replay.append(Replayed(ids[begin:first], last_id, turn_text(ids[first:end], tokenizer)))
        last_id = ids[end - 1]
    replay.append(Replayed(ids[begun.begin : begun.first], last_id, None))
    return replay


def turn_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What an environment is given of a turn: its text, without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)) if ids else ""
