"""The rows that procedural tasks return, and checks of the tasks' options."""

from __future__ import annotations

from dataclasses import dataclass

from vapo.errors import UserError

MAX_STEPS = 10_000
Demonstration = str | tuple[str, ...]
"""A worked response, or the texts of the policy's turns in an episode."""


@dataclass(frozen=True)
class ProceduralRow:
    """A generated problem, its answer and a worked response."""

    problem: str
    answer: str
    demonstration: str


@dataclass(frozen=True)
class EpisodeRow:
    """A generated problem of an environment, its answer and the turns of a worked episode."""

    problem: str
    answer: str
    demonstration: tuple[str, ...]


def check_range(name: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"options.{name} is {value!r}: give a number from {low} to {high}")


def check_shares(**shares: float) -> None:
    for name, value in shares.items():
        check_range(name, value, low=0, high=1)


def check_steps(min_steps: int, max_steps: int) -> None:
    check_bounds("steps", min_steps, max_steps, low=1, high=MAX_STEPS)


def check_bounds(name: str, smallest: int, largest: int, *, low: int, high: int) -> None:
    """Check that the options `min_NAME` and `max_NAME` are from `low` to `high`, and in this order.

    Raises: UserError: they are not.
    """
    check_range(f"min_{name}", smallest, low=low, high=high)
    check_range(f"max_{name}", largest, low=low, high=high)
    if smallest > largest:
        raise UserError(
            f"options.min_{name} is {smallest}, above options.max_{name}, {largest}: swap them"
        )
