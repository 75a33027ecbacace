"""What a verifier is, and what it says of one response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

MAX_EXTRACTED_CHARS = 200
"""Longer extracted answers are cut in verdicts and tables (never in the comparison)."""


@dataclass(frozen=True)
class Judgement:
    """A verifier's answer. `reward` None stands for the configured correct / incorrect reward."""

    is_correct: bool
    reward: float | None = None
    extracted: str | None = None


@runtime_checkable
class Verifier(Protocol):
    """Judges one response. May raise, hang or crash: it runs in a process of its own."""

    def __call__(
        self, response_text: str, answer: str, metadata: Mapping[str, Any]
    ) -> Judgement: ...
