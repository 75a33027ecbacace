"""Where the thoughts of a response end, and which part of it is judged."""

from __future__ import annotations

import re

from vapo.config.rewards import RewardConfig

THOUGHT_END = re.compile(
    r"</think(?:ing)?>|\[/THINK\]|<\|channel\|>final(?:[^<\n]{0,40})<\|message\|>"
)
"""How well-known models end their thoughts, for what reads a whole response."""


def judged_part(rewards: RewardConfig, response: str, prompt: str = "") -> str | None:
    """The part of a response that is judged; None: it has no answer, and is incorrect.

    With `rewards.answer_after` that is what follows its last occurrence, without the space at its
    beginning. A prompt that ends with it, as one with thinking turned off, has closed the thoughts:
    then a response without it is an answer as a whole.

    Args:
        prompt: what the policy read, special tokens included; empty where nobody knows it.
    """
    mark = rewards.answer_after
    if mark is None:
        return response
    _, found, part = response.rpartition(mark)
    if found:
        return part.lstrip()
    is_closed = prompt.rstrip().endswith(mark.strip())
    return response if is_closed or rewards.without_answer_after == "whole" else None


def which_part(rewards: RewardConfig, response: str, prompt: str = "") -> str:
    """What is judged of a response, in words; empty where that is all of it by the config."""
    mark = rewards.answer_after
    if mark is None:
        return ""
    part = judged_part(rewards, response, prompt)
    if mark in response:
        return f"the {len(part or '')} characters after the last {mark!r}"
    if part is None:
        return f"nothing, because it has no {mark!r} (rewards.without_answer_after)"
    return f"all of it, which has no {mark!r}"
