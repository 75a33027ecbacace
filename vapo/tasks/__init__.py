"""The shipped tasks: generators of problems, as a user's own file has them.

Each module has a generator of its own name, a function `(num_examples, *, seed, **options)` which
returns rows. A row has the columns of a line of a JSONL file: `prompt`, `answer`, `demonstration`.
Row i depends only on (seed, i) and the options. Problems and demonstrations draw from separate
random streams, so the problems do not depend on the noise in the demonstrations.

The config names a module as `data.train.task`, and vapo imports it by that name, as it imports a
user's. No room of the package imports this one. What a module may have beside its generator, and
what vapo does with it, is said in docs/extending.md.
"""

from __future__ import annotations

from typing import Any

from vapo.errors import UserError

MAX_STEPS = 10_000
Row = dict[str, Any]


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
