"""Rewards that are too large for the usual learning rates, in words. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

LARGE = 10.0
"""In absolute value: ten times the reward of a correct response, as verifiers give it."""


def about_large(rewards: Iterable[float]) -> str | None:
    """One sentence where one of them is large; None where none is."""
    largest = max(rewards, key=abs, default=0.0)
    if abs(largest) <= LARGE:
        return None
    return (
        f"a reward is {largest:g}: learning rates are chosen for rewards of about 1, and the loss "
        "of values grows with the square; let the verifier or environment return smaller ones"
    )
