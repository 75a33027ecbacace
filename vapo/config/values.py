"""Options of value pages, of measured true values of prefixes, and of the steps of a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vapo.config.kinds import choice, option, section


@dataclass
class ValuePagesConfig:
    every_n_iterations: int | None = option(
        10,
        "a page at the first and last iteration of each phase and, in both, at every n-th; "
        "null: none",
        ge=1,
    )
    num_groups: int = option(6, "groups on a page, chosen to differ", ge=1)
    max_responses: int = option(8, "responses of a group on a page, right and wrong ones", ge=1)
    max_tokens: int = option(
        100_000, "response tokens on a page, shared evenly by the groups; about 55 bytes each", ge=1
    )


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


@dataclass
class ValueTruthConfig:
    """Options of measuring the true values of prefixes by continuations (docs/value_truth.md)."""

    every_n_iterations: int | None = option(
        None,
        "fit: measure at the first iteration of each phase, the policy's last and, in both phases, "
        "every n-th; null: never (docs/value_truth.md)",
        ge=1,
    )
    num_continuations: int = option(8, "responses sampled on from each prefix", ge=2)
    num_responses: int = option(
        64, "responses continued from each of their steps, of as many prompts as there are", ge=0
    )
    num_prefixes: int = option(
        64, "prefixes of other responses, spread evenly over the positions in a response", ge=0
    )
    segments: SegmentsConfig = section(
        SegmentsConfig, "where a response is cut into steps; an episode is, into its turns"
    )
    max_tokens: int | None = option(
        None,
        "the tokens that one measurement may be expected to sample; responses and prefixes are "
        "left out until it is; null: no limit",
        ge=1,
    )
