"""How well-known models end their thoughts, for what reads a whole response."""

from __future__ import annotations

import re

THOUGHT_END = re.compile(
    r"</think(?:ing)?>|\[/THINK\]|<\|channel\|>final(?:[^<\n]{0,40})<\|message\|>"
)
