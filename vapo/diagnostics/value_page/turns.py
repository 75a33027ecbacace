"""The turns of an episode as a page shows them: where they begin among the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from vapo.diagnostics.value_page.token_text import TokenText
from vapo.rollouts.segments import shows_turns
from vapo.types import Rollout

_MAX_CHARS = 4000  # of an observation


def turns_data(
    rollout: Rollout, num_tokens: int, token_text: TokenText
) -> list[dict[str, Any]] | None:
    """The turns that begin within the first `num_tokens` sampled tokens; None: a response.

    `at`: how many sampled tokens come before the turn; `observed`: what the environment wrote
    before it, visible.
    """
    if not shows_turns(rollout):
        return None
    found: list[dict[str, Any]] = []
    turns = zip(turn_places(rollout), rollout.turns, rollout.turn_spans, strict=True)
    for at, turn, span in turns:
        observed = rollout.response_ids[span.begin : span.first]
        if turn.num_sampled and at < num_tokens:
            found.append(
                {
                    "at": at,
                    "reward": turn.reward,
                    "num_observed": turn.num_observed,
                    "observed": _shown(observed, token_text),
                }
            )
    return found


def turn_places(rollout: Rollout) -> list[int]:
    """How many sampled tokens come before each turn."""
    return list(accumulate((turn.num_sampled for turn in rollout.turns), initial=0))[:-1]


def in_context(
    rollout: Rollout, token_ids: Sequence[int], token_text: TokenText
) -> list[tuple[int, str]]:
    """(place, text) of the sampled tokens that read differently beside their neighbours, which are
    those of the same turn."""
    starts = turn_places(rollout)
    ends = [*starts[1:], len(token_ids)]
    return [
        (start + place, text)
        for start, end in zip(starts, ends, strict=True)
        for place, text in token_text.in_context(token_ids[start:end])
    ]


def _shown(token_ids: Sequence[int], token_text: TokenText) -> str:
    beside = dict(token_text.in_context(token_ids))
    texts = [beside.get(i, token_text.token(id_).text) for i, id_ in enumerate(token_ids)]
    text = "".join(texts)
    left_out = len(text) - _MAX_CHARS
    return f"{text[:_MAX_CHARS]} \u2026 ({left_out} more characters)" if left_out > 0 else text
