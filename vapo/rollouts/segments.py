"""Parts of a response: its steps, the turns that it goes on from, and their texts for people."""

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
    """The number of tokens before each step, ascending; the first is 0.

    The steps of an episode are its turns: a turn begins at its first sampled token, when what the
    environment wrote before it has been read.

    No step begins behind the last token; a pattern that takes longer than a second has no match.
    Of more than `max_segments` steps the first is kept, and others evenly spread, so that the rest
    belong to the steps before them.
    """
    starts = turn_starts(rollout)
    if len(open_places(rollout)) > len(starts):  # it goes on inside of its turn, too
        starts = sorted({0, *_boundaries(rollout, segments, tokenizer)})
        starts = [place for place in starts if place < len(rollout.response_ids)]
    return _spread(starts, segments.max_segments)


def turn_starts(rollout: Rollout) -> list[int]:
    """The number of tokens before each turn's first sampled one; those observed last among them."""
    return [span.first for span in rollout.turn_spans if span.end > span.first]


def open_places(rollout: Rollout) -> Sequence[int]:
    """The numbers of tokens after which it can be played on.

    An environment answers whole turns, so its episodes go on where a turn begins. A verifier has
    not been asked anything before the end, so a response goes on anywhere.
    """
    return turn_starts(rollout) if rollout.in_environment else range(len(rollout.response_ids))


def begun_turns(rollout: Rollout, num_tokens: int) -> tuple[Turn, ...]:
    """The turns as they were after so many tokens; the last one is under way, and earned nothing.

    Raises: ValueError: it cannot be played on from there.
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
    begun = replace(rollout.turns[index], num_sampled=sampled, reward=0.0)
    return (*rollout.turns[:index], begun)


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
    return places_of(_spread(ends, segments.max_segments), rollout, tokenizer)


def _ends(pattern: str, text: str) -> list[int]:
    """Where the pattern's matches end; none where that takes longer than a second.

    The text is a policy's, and a pattern that backtracks may take for ever on some of it.
    """
    try:
        return [match.end() for match in regex.finditer(pattern, text, timeout=_TIMEOUT_S)]
    except TimeoutError:
        return []


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the first and others evenly spread."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[i * len(numbers) // most] for i in range(most)]


def places_of(
    characters: Sequence[int], rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The fewest tokens whose text has so many characters, for each of ascending numbers.

    The text of a token depends on those before it, so the text of the tokens before a place is
    decoded, log2(length) times a place.
    """
    ids, found = list(rollout.response_ids), [0]

    def length(num_tokens: int) -> int:
        return len(sampled_text(ids[:num_tokens], tokenizer))

    for number in characters:
        found.append(bisect_left(range(len(ids)), number, lo=found[-1], key=length))
    return found[1:]


def with_response(
    rollout: Rollout,
    response_ids: Sequence[int],
    rollout_logprobs: Sequence[float],
    finish_reason: FinishReason,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keeps_special: bool = True,
) -> Rollout:
    """A response with these tokens and log-probabilities, and their text; nobody has judged it."""
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
    """What the environment wrote, special tokens included, and what the policy answered."""

    observed: str
    sampled: str
    reward: float


def shows_turns(rollout: Rollout) -> bool:
    """Whether people are shown its turns. A response is its text, which a verifier judged whole."""
    return rollout.in_environment


def turn_texts(
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int] = (),
    *,
    keeps_special: bool = True,
) -> list[TurnText]:
    """Return the texts of the turns. Each is decoded by itself, without end tokens behind it.

    Args:
        end_ids: the end tokens that are left out.
        keeps_special: whether the policy's texts have special tokens, as those that were judged.
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
    """An episode as one text: each turn's two parts under a line that says whose they are."""
    parts, turns = [], turn_texts(rollout, tokenizer, end_ids, keeps_special=keeps_special)
    for number, turn in enumerate(turns, start=1):
        if turn.observed:
            parts.append(f"[environment, before turn {number}]\n{turn.observed}")
        parts.append(f"[policy, turn {number}, reward {turn.reward:g}]\n{turn.sampled}")
    return "\n".join(parts)
