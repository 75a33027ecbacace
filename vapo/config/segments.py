"""Where a response is cut into steps: after a pattern, by tokens, or at unlikely ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vapo.config.fields import choice, option


@dataclass
class PatternSegments:
    pattern: str = option(
        r"\n+", "regular expression; a step ends with each of its matches in the response's text"
    )


@dataclass
class TokenSegments:
    num_tokens: int = option(32, "tokens in a step", ge=1)


@dataclass
class UnlikelySegments:
    max_probability: float = option(
        0.5,
        "a step starts at each token that the engine sampled with a lower probability (SAE, arXiv "
        "2601.07320, whose threshold is not known)",
        gt=0,
        le=1,
    )


@dataclass
class SegmentsConfig:
    kind: Literal["pattern", "tokens", "unlikely_token"] = choice(
        "pattern",
        "what ends a step",
        pattern=PatternSegments,
        tokens=TokenSegments,
        unlikely_token=UnlikelySegments,
    )
    max_segments: int = option(
        16,
        "steps of one response at most; of more, boundaries evenly spread over them are kept",
        ge=1,
    )
