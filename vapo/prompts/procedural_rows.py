"""A generated problem, and the ranges of a generator's options."""

from __future__ import annotations

from dataclasses import dataclass

from vapo.errors import UserError

MAX_STEPS = 10_000
Demonstration = str | tuple[str, ...]
"""A worked response, or the texts of the policy's turns in an episode."""


@dataclass(frozen=True)
class ProceduralRow:
    """One generated problem, its answer and a worked response."""

    problem: str
    answer: str
    demonstration: str


@dataclass(frozen=True)
class EpisodeRow:
    """One generated problem of an environment, its answer and the turns of a worked episode."""

    problem: str
    answer: str
    demonstration: tuple[str, ...]


def check_range(name: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"options.{name} is {value!r}: give a number from {low} to {high}")


def check_steps(min_steps: int, max_steps: int) -> None:
    check_range("min_steps", min_steps, low=1, high=MAX_STEPS)
    check_range("max_steps", max_steps, low=1, high=MAX_STEPS)
    if min_steps > max_steps:
        raise UserError(
            f"options.min_steps is {min_steps}, above options.max_steps, {max_steps}: swap them"
        )
