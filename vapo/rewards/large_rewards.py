"""Warns of rewards that are too large for the usual learning rates. This module imports no
torch."""

from __future__ import annotations

from collections.abc import Iterable

LARGE = 10.0
"""Rewards above this absolute value are large: ten times the usual reward of a correct response."""


def about_large(rewards: Iterable[float]) -> str | None:
    """Return a warning if a reward's absolute value is above `LARGE`, else None.

    The warning names the reward that is largest in size.
    """
    largest = max(rewards, key=abs, default=0.0)
    if abs(largest) <= LARGE:
        return None
    return (
        f"a reward is {largest:g}: learning rates are chosen for rewards of about 1, and the loss "
        "of values grows with the square; let the verifier or environment return smaller ones"
    )
