"""The texts with which well-known models end their thoughts, for code that reads whole responses.

What a run judges depends on `rewards.answer_after` alone.
"""

from __future__ import annotations

import re

THOUGHT_END = re.compile(
    r"</think(?:ing)?>|\[/THINK\]|<\|channel\|>final(?:[^<\n]{0,40})<\|message\|>"
)
