"""The turns of an episode as text, for people to read."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from vapo.types import Rollout


class TurnText(NamedTuple):
    """What the environment wrote, and what the policy answered, special tokens included."""

    observed: str
    sampled: str
    reward: float


def shows_turns(rollout: Rollout) -> bool:
    """Whether people are shown its turns. A response is its text, which a verifier judged whole."""
    return rollout.in_environment


def turn_texts(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[TurnText]:
    """The texts of the turns, each decoded by itself."""
    ids = rollout.response_ids
    return [
        TurnText(_decoded(ids[begin:first], tokenizer), _decoded(ids[first:end], tokenizer), reward)
        for (begin, first, end), reward in zip(
            rollout.turn_spans, (turn.reward for turn in rollout.turns), strict=True
        )
    ]


def shown_turns(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> str:
    """An episode as one text: each turn's two parts under a line that says whose they are."""
    parts = []
    for number, turn in enumerate(turn_texts(rollout, tokenizer), start=1):
        if turn.observed:
            parts.append(f"[environment, before turn {number}]\n{turn.observed}")
        parts.append(f"[policy, turn {number}, reward {turn.reward:g}]\n{turn.sampled}")
    return "\n".join(parts)


def _decoded(ids: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
