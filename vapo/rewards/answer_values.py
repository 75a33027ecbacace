"""Whether two expressions are equal: exactly for rational numbers, else to 150 digits.

Expressions with symbols are compared at points (Schwartz 1980: unequal polynomials differ at almost
all points). The time is that of the text's length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

from vapo.rewards.answer_numbers import (
    EXACT,
    INEXACT,
    Number,
    UndefinedError,
    bounded,
    inexact,
    mp,
    numbers_equal,
)
from vapo.rewards.answer_text import Node, symbols_of
from vapo.rewards.hostile_text import UnsafeTextError

NUM_POINTS = 6
FAR_POINTS = ((40, 1), (40, -1), (-20, 1), (-20, -1))
"""Exponent of 2 and sign of the points that only expressions made of cases are compared at."""

MIN_POINTS = 2
"""So many points at which both are defined are needed."""


def values_equal(first: Node, second: Node) -> bool:
    """Whether two expressions are equal wherever both are defined.

    Raises: UnsafeTextError for what is too large to compute.
    """
    pairs = _values(first, second)
    return bool(pairs) and all(numbers_equal(a, b) for a, b in pairs)


def constant_ratio(first: Node, second: Node) -> Number | None:
    """c with first = c * second wherever both are defined, c real and not 0; None if there is none.

    Raises: UnsafeTextError for what is too large to compute.
    """
    pairs = _values(first, second)
    if not pairs or any(numbers_equal(value, Fraction(0)) for pair in pairs for value in pair):
        return None
    ratio, *others = (a / b for a, b in pairs)
    is_constant = all(numbers_equal(ratio, other) for other in others)
    return ratio if is_constant and not isinstance(ratio, mp.mpc) else None


def value_of(node: Node) -> Number | None:
    """The value of an expression without symbols; None if it has none.

    Raises: UnsafeTextError for what is too large to compute.
    """
    return None if symbols_of(node) else _at_points(node)[0]


def _values(first: Node, second: Node) -> list[tuple[Number, Number]]:
    """The values of both at every point at which both have one; none if that is too few points."""
    used = slice(None if _has_cases(first) or _has_cases(second) else NUM_POINTS)
    pairs = [
        (a, b)
        for a, b in zip(_at_points(first)[used], _at_points(second)[used], strict=True)
        if a is not None and b is not None
    ]
    if not symbols_of(first) and not symbols_of(second):
        return pairs[:1]
    return pairs if len(pairs) >= MIN_POINTS else []


def _has_cases(node: Node) -> bool:
    """Whether a symbol's size may decide what it is: |x + 100| - 100 is x from -100 on only."""
    kinds = ("abs", "floor", "ceiling", "root", "power")
    if node.kind in kinds and symbols_of(node.children[0]):
        exponent = node.children[1] if node.kind == "power" else None
        if exponent is None or (exponent.kind != "number" and not symbols_of(exponent)):
            return True
    return any(_has_cases(child) for child in node.children)


def _at_points(node: Node) -> tuple[Number | None, ...]:
    values = _computed(node)
    if isinstance(values, UnsafeTextError):
        raise UnsafeTextError(str(values))
    return values


@lru_cache(maxsize=4096)
def _computed(node: Node) -> tuple[Number | None, ...] | UnsafeTextError:
    """The value at each point, None where there is none; computed once for all comparisons."""
    symbols = symbols_of(node)
    values: list[Number | None] = []
    for index in range(NUM_POINTS + len(FAR_POINTS) if symbols else 1):
        try:
            values.append(_evaluate(node, {name: _coordinate(name, index) for name in symbols}))
        except UndefinedError:
            values.append(None)
        except UnsafeTextError as error:
            if index < NUM_POINTS:
                return UnsafeTextError(str(error))
            values.append(None)
    return tuple(values) if symbols else tuple(values * (NUM_POINTS + len(FAR_POINTS)))


def _coordinate(symbol: str, index: int) -> Number:
    """Between -16 and 16, as if drawn at random; all of the first two points' are positive.

    Those of the far points are far from zero, or close to it.
    """
    digest = hashlib.sha256(f"{index}/{symbol}".encode()).digest()
    size = mp.mpf(int.from_bytes(digest[:16], "big") + 1) / 2**124
    if index >= NUM_POINTS:
        exponent, sign = FAR_POINTS[index - NUM_POINTS]
        return sign * (size + 16) * mp.mpf(2) ** exponent
    return -size if index > 1 and digest[16] % 2 else size


def _evaluate(node: Node, point: Mapping[str, Number]) -> Number:
    if node.kind == "number":
        return bounded(node.value)
    if node.kind == "symbol":
        return point[str(node.value)]
    if node.kind == "constant":
        return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[str(node.value)]
    values = [_evaluate(child, point) for child in node.children]
    if node.kind in EXACT:
        if not all(isinstance(value, Fraction) for value in values):
            values = [inexact(value) for value in values]
        return bounded(EXACT[node.kind](*values))
    values = [inexact(value) for value in values]
    if any(mp.mag(value) > 400 for value in values if value != 0):
        raise UnsafeTextError("a number too large to compute")
    try:
        return bounded(INEXACT[node.kind](*values))
    except (ValueError, ZeroDivisionError):
        raise UndefinedError(node.kind) from None
