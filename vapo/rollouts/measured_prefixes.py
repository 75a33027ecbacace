"""Prefixes of a stored response that were continued: what a row of the file says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

COLUMNS = ("truth_tokens", "truth_values", "truth_noise", "truth_continuations", "truth_rows")
_LISTS = tuple(name for name in COLUMNS if name != "truth_continuations")


@dataclass(frozen=True)
class MeasuredPrefix:
    """The first `num_tokens` tokens of a response, and the mean return of continuations from them.

    `noise` is the estimated variance of that mean around the true value. The same continuations
    are those of `num_rows` responses, whose prefixes are equal: the prompt alone is one of each
    response to it.
    """

    num_tokens: int
    value: float
    noise: float
    num_continuations: int
    num_rows: int = 1

    @property
    def num_draws(self) -> float:
        """A response's share of the continuations, so that over all of them each counts once."""
        return self.num_continuations / self.num_rows


def truth_columns(prefixes: Sequence[MeasuredPrefix] | None) -> dict[str, Any]:
    """The columns of a row; null where none was measured."""
    if not prefixes:
        return dict.fromkeys(COLUMNS)
    return {
        "truth_tokens": [prefix.num_tokens for prefix in prefixes],
        "truth_values": [prefix.value for prefix in prefixes],
        "truth_noise": [prefix.noise for prefix in prefixes],
        "truth_continuations": prefixes[0].num_continuations,
        "truth_rows": [prefix.num_rows for prefix in prefixes],
    }


def read_truth(
    record: Mapping[str, Any], length: int, fail: Callable[[str, str], NoReturn]
) -> tuple[MeasuredPrefix, ...]:
    """The measured prefixes of a row whose response has `length` tokens; none where it has none.

    Another program may leave out all columns, or `truth_rows` alone, which are 1 then.

    Args:
        fail: raises the error about a column, with its reason.
    """
    tokens, num = record.get("truth_tokens"), record.get("truth_continuations")
    if tokens is None:
        for name in COLUMNS:
            if record.get(name) is not None:
                fail(name, "is given, and truth_tokens is null: both, or neither")
        return ()
    if type(num) is not int or num < 1:
        fail("truth_continuations", f"{num!r} is not a whole number from 1 up")
    lists: dict[str, Any] = {name: record.get(name) for name in _LISTS}
    if lists["truth_rows"] is None and isinstance(tokens, list):
        lists["truth_rows"] = [1] * len(tokens)
    for name, values in lists.items():
        if not isinstance(values, list) or len(values) != len(tokens):
            size = f"{len(values)} values" if isinstance(values, list) else "is no list"
            fail(name, f"{size}; each of the {len(tokens)} entries of truth_tokens needs one")
    _check_places(lists["truth_tokens"], length, fail)
    for name in ("truth_values", "truth_noise"):
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in lists[name]):
            fail(name, "has values that are not finite")
    if any(x < 0 for x in lists["truth_noise"]):
        fail("truth_noise", "is a variance, and has values below 0")
    if any(type(x) is not int or x < 1 for x in lists["truth_rows"]):
        fail("truth_rows", "has entries that are not whole numbers from 1 up")
    return tuple(
        MeasuredPrefix(place, float(value), float(noise), num, rows)
        for place, value, noise, rows in zip(*lists.values(), strict=True)
    )


def _check_places(tokens: list[Any], length: int, fail: Callable[[str, str], NoReturn]) -> None:
    if not all(type(place) is int for place in tokens):
        fail("truth_tokens", "has entries that are not whole numbers")
    if list(tokens) != sorted(set(tokens)):
        fail("truth_tokens", "does not ascend: each prefix of a response is measured once")
    outside = next((place for place in tokens if not 0 <= place < length), None)
    if outside is not None:
        fail(
            "truth_tokens",
            f"{outside} is not from 0 to {length - 1}: the prefix leaves a token of the response's "
            f"{length} to sample",
        )
