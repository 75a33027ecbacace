"""Parts of a response: its steps, the positions where it can be continued, its turns as text."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import regex
from transformers import PreTrainedTokenizerBase

from vapo.config.values import PatternSegments, SegmentsConfig, TokenSegments, UnlikelySegments
from vapo.rollouts.engines.contract import sampled_text
from vapo.types import FinishReason, Rollout, Turn

_TIMEOUT_S = 1.0


def step_starts(
    rollout: Rollout, segments: SegmentsConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return for each step of a rollout the number of tokens before it, ascending.

    The config's `segments` say how a response is cut into steps, of which the first starts at 0.
    The steps of an episode are its turns: a turn begins at its first sampled token, after what the
    environment wrote before it. No step begins behind the last token. A pattern whose search takes
    longer than a second has no match. If there are more than `max_segments` steps, some are joined
    to the step before them, so that the starts that are left are evenly spread.
    """
    starts = turn_starts(rollout)
    if len(open_places(rollout)) > len(starts):  # it can be continued inside its turn, too
        starts = sorted({0, *_boundaries(rollout, segments, tokenizer)})
        starts = [place for place in starts if place < len(rollout.response_ids)]
    return _spread(starts, segments.max_segments)


def turn_starts(rollout: Rollout) -> list[int]:
    """Return for each turn the number of tokens of the response before its first sampled token."""
    return [span.first for span in rollout.turn_spans if span.end > span.first]


def open_places(rollout: Rollout) -> Sequence[int]:
    """Return the numbers of tokens after which a rollout can be continued.

    An environment answers whole turns, so its episodes can go on where a turn begins. A verifier
    reads a response only at its end, so the response can go on anywhere.
    """
    return turn_starts(rollout) if rollout.in_environment else range(len(rollout.response_ids))


def begun_turns(rollout: Rollout, num_tokens: int) -> tuple[Turn, ...]:
    """Return the turns of a rollout as they were after `num_tokens` tokens of its response.

    The last of them is unfinished, and has no reward.

    Raises: ValueError: the rollout is an episode of an environment, and no turn begins there.
    """
    places = open_places(rollout)
    if num_tokens not in places:
        raise ValueError(
            f"no turn begins after {num_tokens} tokens of the episode; they begin after "
            f"{', '.join(map(str, places))}"
        )
    spans = rollout.turn_spans
    index = next(i for i, span in enumerate(spans) if span.first <= num_tokens < span.end)
    sampled = num_tokens - spans[index].first
    open_turn = replace(rollout.turns[index], num_sampled=sampled, reward=0.0)
    return (*rollout.turns[:index], open_turn)


def _boundaries(
    rollout: Rollout, segments: SegmentsConfig, tokenizer: PreTrainedTokenizerBase
) -> Sequence[int]:
    if isinstance(segments, TokenSegments):
        return range(0, len(rollout.response_ids), segments.num_tokens)
    if isinstance(segments, UnlikelySegments):
        bound = math.log(segments.max_probability)
        return [i for i, logprob in enumerate(rollout.rollout_logprobs) if logprob < bound]
    assert isinstance(segments, PatternSegments)
    # not `response_text`, which may lack special tokens: each token has its place in this one
    end_ids = rollout.response_ids[-1:] if rollout.finish_reason is FinishReason.STOP else ()
    text = sampled_text(rollout.response_ids, tokenizer, end_ids)
    ends = [0, *_ends(segments.pattern, text)]
    return token_counts_at(_spread(ends, segments.max_segments), rollout, tokenizer)


def _ends(pattern: str, text: str) -> list[int]:
    """Return the positions in the text at which the pattern's matches end.

    If the search takes longer than a second, there are none.

    The text is a policy's, and a pattern that backtracks may take for ever on some texts.
    """
    try:
        return [match.end() for match in regex.finditer(pattern, text, timeout=_TIMEOUT_S)]
    except TimeoutError:
        return []


def _spread(numbers: Sequence[int], max_count: int) -> list[int]:
    """Return at most `max_count` of the numbers: the first, and others evenly spread."""
    if len(numbers) <= max_count:
        return list(numbers)
    return [numbers[i * len(numbers) // max_count] for i in range(max_count)]


def token_counts_at(
    characters: Sequence[int], rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Turn numbers of characters into numbers of tokens, both from the response's start.

    The result has for each number in `characters` the fewest tokens whose text has at least that
    many characters, or all tokens if the whole text is shorter. The numbers must ascend.

    The text of a token depends on those before it. So the beginning of the response is decoded
    about log2(length) times for each number.
    """
    ids, token_counts = list(rollout.response_ids), [0]

    def length(num_tokens: int) -> int:
        return len(sampled_text(ids[:num_tokens], tokenizer))

    for number in characters:
        token_counts.append(bisect_left(range(len(ids)), number, lo=token_counts[-1], key=length))
    return token_counts[1:]


def with_response(
    rollout: Rollout,
    response_ids: Sequence[int],
    rollout_logprobs: Sequence[float],
    finish_reason: FinishReason,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keeps_special: bool = True,
) -> Rollout:
    """Return the rollout with another response of one turn, without a verdict."""
    end_ids = response_ids[-1:] if finish_reason is FinishReason.STOP else ()
    return replace(
        rollout,
        response_ids=tuple(response_ids),
        response_text=sampled_text(response_ids, tokenizer, end_ids, keeps_special=keeps_special),
        rollout_logprobs=tuple(rollout_logprobs),
        finish_reason=finish_reason,
        turns=(Turn(0, len(response_ids)),),
        is_correct=None,
        extracted=None,
        failure=None,
        by_verifier={},
    )


class TurnText(NamedTuple):
    """One turn of a rollout as text.

    `observed` is what the environment wrote before the policy's answer `sampled`, special tokens
    included.
    """

    observed: str
    sampled: str
    reward: float


def shows_turns(rollout: Rollout) -> bool:
    """Whether a rollout is shown turn by turn: one with an environment is.

    Any other is a single response.
    """
    return rollout.in_environment


def turn_texts(
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int] = (),
    *,
    keeps_special: bool = True,
) -> list[TurnText]:
    """Return the text of each turn, decoded by itself, without an end token behind it.

    Args:
        end_ids: the end tokens that are left out.
        keeps_special: whether the policy's texts have special tokens, as the judged texts may.
    """
    ids = rollout.response_ids
    return [
        TurnText(
            sampled_text(ids[begin:first], tokenizer),
            sampled_text(ids[first:end], tokenizer, end_ids, keeps_special=keeps_special),
            turn.reward,
        )
        for (begin, first, end), turn in zip(rollout.turn_spans, rollout.turns, strict=True)
    ]


def shown_turns(
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int] = (),
    *,
    keeps_special: bool = True,
) -> str:
    """Return an episode's turns as one text, with lines that say who wrote what follows.

    `end_ids` are the end tokens that are left out. `keeps_special` says whether the policy's texts
    have special tokens.
    """
    parts, turns = [], turn_texts(rollout, tokenizer, end_ids, keeps_special=keeps_special)
    for number, turn in enumerate(turns, start=1):
        if turn.observed:
            parts.append(f"[environment, before turn {number}]\n{turn.observed}")
        parts.append(f"[policy, turn {number}, reward {turn.reward:g}]\n{turn.sampled}")
    return "\n".join(parts)
