"""The block `value_truth`: what prefixes are worth, by continuations from them."""

from __future__ import annotations

from dataclasses import dataclass

from vapo.config.fields import option, section
from vapo.config.kinds import make
from vapo.config.segments import SegmentsConfig


@dataclass
class ValueTruthConfig:
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
        lambda: make(SegmentsConfig),
        "where a response is cut into steps; an episode is, into its turns",
    )
    max_tokens: int | None = option(
        None,
        "the tokens that one measurement may be expected to sample; responses and prefixes are "
        "left out until it is; null: no limit",
        ge=1,
    )
