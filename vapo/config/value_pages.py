"""Pages that show the tokens of some rollouts by value (docs/value_page.md)."""

from __future__ import annotations

from dataclasses import dataclass

from vapo.config.fields import option


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
