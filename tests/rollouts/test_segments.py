"""Where the steps of a response begin."""

from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerBase

from tests.tiny_model import tiny_tokenizer
from vapo.config.kinds import make
from vapo.config.values import SegmentsConfig
from vapo.rollouts.segments import begun_turns, step_starts, token_counts_at, turn_starts
from vapo.types import FinishReason, Prompt, Rollout, Turn

PROMPT = Prompt("p", "1=", (2, 3), "1")


def rollout(text: str, logprobs: list[float] | None = None, *, ends: bool = True) -> Rollout:
    ids = tuple(tiny_tokenizer().encode(text, add_special_tokens=False)) + (1,) * ends
    found = tuple(logprobs or [0.0] * len(ids))
    return Rollout(PROMPT, ids, text, found, FinishReason.STOP if ends else FinishReason.LENGTH)


def starts(response: Rollout, **options: object) -> list[int]:
    return step_starts(response, make(SegmentsConfig, **options), tiny_tokenizer())


def test_a_step_ends_with_each_match_of_the_pattern() -> None:
    assert starts(rollout("ab;c;;d"), pattern=";") == [0, 3, 5, 6]
    assert starts(rollout("ab;c;;d"), pattern=";+") == [0, 3, 6]
    assert starts(rollout("abcd"), pattern=";") == [0]


def test_no_step_begins_behind_the_last_token() -> None:
    assert starts(rollout("a;b;", ends=False), pattern=";") == [0, 2]
    assert starts(rollout("a;b;"), pattern=";") == [0, 2, 4]  # the end token is a step


def test_steps_of_so_many_tokens() -> None:
    assert starts(rollout("abcdef"), kind="tokens", num_tokens=3) == [0, 3, 6]
    assert starts(rollout("abcdef", ends=False), kind="tokens", num_tokens=3) == [0, 3]


def test_a_step_starts_at_each_unlikely_token() -> None:
    logprobs = [math.log(p) for p in (0.9, 0.2, 0.5, 0.49)]
    assert starts(
        rollout("abcd", logprobs, ends=False), kind="unlikely_token", max_probability=0.5
    ) == [0, 1, 3]


@pytest.mark.parametrize("most", [1, 2, 5, 7])
def test_of_more_steps_evenly_spread_ones_are_kept(most: int) -> None:
    found = starts(rollout("a" * 20, ends=False), kind="tokens", num_tokens=1, max_segments=most)
    assert len(found) == most
    assert found[0] == 0
    gaps = [b - a for a, b in zip(found, [*found[1:], 20], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_a_place_is_the_token_that_completes_the_text() -> None:
    """Byte-pair pieces of several characters, and a character of several tokens."""

    pieces = ("ab", "c", "\xf6", "", "de")  # the fourth has no text of its own
    tokenizer = Mock(spec=PreTrainedTokenizerBase)
    tokenizer.decode.side_effect = lambda ids, **_: "".join(pieces[i] for i in ids)
    tokenizer.pad_token_id = None
    response = Rollout(PROMPT, (0, 1, 2, 3, 4), "abc\xf6de", (0.0,) * 5, FinishReason.LENGTH)
    assert token_counts_at([1, 2, 3, 4, 5, 6], response, tokenizer) == [1, 1, 2, 3, 5, 5]


def test_the_steps_of_an_episode_are_its_turns() -> None:
    """Whatever the pattern: a turn begins when what the environment wrote has been read."""
    turns = (Turn(2, 3), Turn(0, 1), Turn(4, 2))
    ids = tuple(tiny_tokenizer().encode(";" * 12, add_special_tokens=False))
    episode = Rollout(
        PROMPT, ids, ";" * 12, (0.0,) * 12, FinishReason.TURNS, turns, in_environment=True
    )
    assert turn_starts(episode) == [2, 5, 10]
    for options in ({"pattern": ";"}, {"kind": "tokens", "num_tokens": 1}):
        assert starts(episode, **options) == [2, 5, 10]
    assert starts(episode, pattern=";", max_segments=2) == [2, 5]
    assert [len(begun_turns(episode, place)) for place in (2, 5, 10)] == [1, 2, 3]
    for place in (0, 3, 6, 12):
        with pytest.raises(ValueError, match=f"no turn begins after {place} tokens"):
            begun_turns(episode, place)
