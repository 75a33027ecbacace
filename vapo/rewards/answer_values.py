"""Decides whether two expressions are equal: exactly for rational numbers, else to 150 digits.

Expressions with symbols are compared at points (Schwartz 1980: unequal polynomials differ at almost
all points). Roots and logarithms are those of real numbers: where a part of one side is not real,
as in the root of a negative number, the sides are not compared, unless too few points remain. The
time depends on the text's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache

from vapo.rewards.answer_cases import case_points
from vapo.rewards.answer_numbers import (
    DIGITS,
    EXACT,
    INEXACT,
    Number,
    UndefinedError,
    are_too_small,
    bounded,
    inexact,
    is_zero,
    mp,
    numbers_equal,
)
from vapo.rewards.answer_points import num_near_points, points, smooth_places
from vapo.rewards.answer_text import Node, symbols_of
from vapo.rewards.hostile_text import UnsafeTextError

MIN_POINTS = 2
"""Both sides must be defined at this many points at least."""

MORE_DIGITS = 1_000
"""How many digits are computed of numbers that are so close to zero that they may be rounding."""

MAX_SYMBOLS_WITH_LINES = 3
NUM_LINES = 4
"""Through this many of the near points a line along each symbol is drawn, with points on it."""

_CASES = frozenset({
    "abs", "floor", "ceiling", "root", "ln", "log", "arcsin", "arccos", "arctan"
})  # fmt: skip


def values_equal(first: Node, second: Node) -> bool:
    """Whether two expressions are equal wherever both are real and finite.

    Raises: UnsafeTextError: a number is too large to compute.
    """
    return _holds_at_points(first, second, numbers_equal, is_equality=True)


def constant_ratio(first: Node, second: Node) -> Number | None:
    """Return the real c, not 0, with first = c * second wherever both are real and finite, or None.

    Raises: UnsafeTextError: a number is too large to compute.
    """
    ratios: list[Number] = []

    def is_constant(a: Number, b: Number) -> bool:
        if is_zero(a) or is_zero(b):
            return False
        ratios.append(a / b)
        return numbers_equal(ratios[0], ratios[-1])

    if not _holds_at_points(first, second, is_constant) or isinstance(ratios[0], mp.mpc):
        return None
    return ratios[0]


def value_of(node: Node) -> Number | None:
    """Return the value of an expression, or None if it has symbols or no value.

    Raises: UnsafeTextError: a number is too large to compute.
    """
    return None if symbols_of(node) else _values_of(node, ()).at(0)[0]


def _holds_at_points(
    first: Node,
    second: Node,
    relation: Callable[[Number, Number], bool],
    *,
    is_equality: bool = False,
) -> bool:
    r"""Whether a relation holds between two expressions' values wherever all parts are real.

    If there are too few such points, it must hold between the complex values at all points. If an
    absolute value shows that signs matter, both sides must be real at the same points, so that `\ln
    x` is not `\ln |x|`.

    Args:
        is_equality: whether the relation is equality, for which values near 0 get more digits.
    """
    names = tuple(dict.fromkeys((*_in_order(first), *_in_order(second))))
    sides = _values_of(first, names), _values_of(second, names)
    if not names:
        a, b = (side.at(0)[0] for side in sides)
        if a is None or b is None or not relation(a, b):
            return False
        return not is_equality or _are_equal_if_small(sides, 0)
    cases = _cases(first) | _cases(second)
    num_real, have_one_domain = 0, True
    not_real: list[tuple[Number, Number]] = []
    num = len(names)
    for index in range(len(points(num))) if cases else smooth_places(num):
        (a, a_is_real), (b, b_is_real) = (side.at(index) for side in sides)
        if a_is_real and b_is_real:
            if not relation(a, b) or (is_equality and not _are_equal_if_small(sides, index)):
                return False
            num_real += 1
            continue
        have_one_domain = have_one_domain and a_is_real == b_is_real
        if a is not None and b is not None:
            not_real.append((a, b))
    if num_real >= MIN_POINTS:
        has_domain = have_one_domain or "abs" not in cases
        return has_domain and _holds_on_lines(first, second, names, relation, bool(cases))
    return num_real + len(not_real) >= MIN_POINTS and all(relation(a, b) for a, b in not_real)


def _are_equal_if_small(sides: tuple[_Values, _Values], index: int) -> bool:
    r"""Whether two values near 0 are equal with more digits; True for values that are not near 0.

    The rounding error of a true 0 shrinks with more digits: `\pi^{-400}` is not `\pi^{-500}`, and
    `\sin \pi` is 0.
    """
    a, b = (side.at(index)[0] for side in sides)
    if not are_too_small(a, b):
        return True
    with mp.workdps(MORE_DIGITS):
        precise = [side.compute(index) for side in sides]
        if any(isinstance(value, UnsafeTextError) or value[0] is None for value in precise):
            return False
        more_a, more_b = (inexact(value[0]) for value in precise)  # type: ignore[index]
        rounding = abs(inexact(a) - inexact(b)) or mp.mpf(10) ** -(MORE_DIGITS - 2 * DIGITS)
        return bool(abs(more_a - more_b) <= rounding * mp.mpf(10) ** -(DIGITS // 2))


def _holds_on_lines(
    first: Node,
    second: Node,
    names: tuple[str, ...],
    relation: Callable[[Number, Number], bool],
    has_cases: bool,
) -> bool:
    """Whether a relation holds at rational points, and in each case on lines through them.

    At rational points the arithmetic is exact, so a small term beside a large power is not lost.
    Along a line one symbol varies, which visits all cases of an absolute value or a floor. With
    many symbols or without cases no lines are drawn.
    """
    num = len(names)
    num_lines = NUM_LINES if num > 1 and has_cases else 1
    for base in points(num)[:num_lines]:
        exact = [Fraction(int(mp.nint(64 * x)), 64) for x in base]
        line_points = [exact]
        for place, name in enumerate(names if has_cases and num <= MAX_SYMBOLS_WITH_LINES else ()):

            def at(
                node: Node, x: Number, place: int = place, base: list[Fraction] = exact
            ) -> Number:
                return _real_value(node, names, [*base[:place], x, *base[place + 1 :]])

            new_coordinates = case_points((first, second), name, at)
            line_points += [[*exact[:place], x, *exact[place + 1 :]] for x in new_coordinates]
        for point in line_points:
            a, b = (_real_value(node, names, point) for node in (first, second))
            if a is None or b is None or (is_zero(a) and is_zero(b)):
                continue
            if not relation(a, b):
                return False
    return True


def _real_value(node: Node, names: tuple[str, ...], coordinates: list[Number]) -> Number | None:
    """Return an expression's value at a point, or None if a part is not real or too large."""
    point = _Point(dict(zip(names, coordinates, strict=True)))
    try:
        value = point.value(node)
    except (UndefinedError, UnsafeTextError):
        return None
    return value if point.is_real else None


def _in_order(node: Node) -> Iterator[str]:
    """Yield the names of an expression's symbols from left to right, with repetitions."""
    if node.kind == "symbol":
        yield str(node.value)
    for child in node.children:
        yield from _in_order(child)


@lru_cache(maxsize=4096)
def _cases(node: Node) -> frozenset[str]:
    """Return the kinds of nodes that make cases by a symbol's sign or size, as abs does."""
    if not symbols_of(node):
        return frozenset()
    kinds = frozenset[str]().union(*map(_cases, node.children))
    if node.kind in _CASES:
        return kinds | {node.kind}
    if node.kind == "power" and symbols_of(node.children[0]):
        exponent = node.children[1].value
        is_whole = isinstance(exponent, Fraction) and exponent.denominator == 1
        return kinds if is_whole else kinds | {node.kind}
    return kinds


class _Values:
    """Caches one expression's values at the points of `answer_points`, for all comparisons."""

    def __init__(self, node: Node, names: tuple[str, ...]) -> None:
        self.node = node
        self.names = names if symbols_of(node) else ()
        self.computed: dict[int, tuple[Number | None, bool] | UnsafeTextError] = {}

    def at(self, index: int) -> tuple[Number | None, bool]:
        """Return the value at a point, None if undefined, and whether all its parts are real.

        Raises: UnsafeTextError: a number is too large to compute.
        """
        if not self.names:
            index = 0
        if index not in self.computed:
            self.computed[index] = self.compute(index)
        value = self.computed[index]
        if isinstance(value, UnsafeTextError):
            raise UnsafeTextError(str(value))
        return value

    def compute(self, index: int) -> tuple[Number | None, bool] | UnsafeTextError:
        """Return what `at` returns, computed with the current number of digits.

        An UnsafeTextError is returned, not raised, so that it can be cached.
        """
        num_symbols = len(self.names)
        coordinates = points(num_symbols)[index] if num_symbols else ()
        point = _Point(dict(zip(self.names, coordinates, strict=True)))
        try:
            value = point.value(self.node)
        except UndefinedError:
            return None, False
        except UnsafeTextError as error:
            is_far = num_symbols > 0 and index >= num_near_points(num_symbols)
            return (None, False) if is_far else UnsafeTextError(str(error))
        return value, point.is_real


_values_of = lru_cache(maxsize=4096)(_Values)


class _Point:
    """Computes expressions' values at one point, which gives each symbol a number.

    `is_real` becomes False once a part with symbols is complex although all its own parts are real,
    as the root of x is for a negative x.
    """

    def __init__(self, coordinates: Mapping[str, Number]) -> None:
        self.coordinates = coordinates
        self.is_real = True

    def value(self, node: Node) -> Number:
        """Return an expression's value at the point.

        Raises: UndefinedError: it has none. UnsafeTextError: a number is too large to compute.
        """
        if node.kind == "number":
            return bounded(node.value)
        if node.kind == "symbol":
            return self.coordinates[str(node.value)]
        if node.kind == "constant":
            return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1)}[str(node.value)]
        values = [self.value(child) for child in node.children]
        result = _applied(node.kind, values)
        if isinstance(result, mp.mpc) and not any(isinstance(v, mp.mpc) for v in values):
            self.is_real = self.is_real and not symbols_of(node)
        return result


def _applied(kind: str, values: list[Number]) -> Number:
    """Return the value of an operation or function, named `kind`, for the values of its arguments.

    Raises: UndefinedError: it has none. UnsafeTextError: a number is too large to compute.
    """
    if kind in EXACT:
        if not all(isinstance(value, Fraction) for value in values):
            values = [inexact(value) for value in values]
        return bounded(EXACT[kind](*values))
    values = [inexact(value) for value in values]
    if any(mp.mag(value) > 400 for value in values if value != 0):
        raise UnsafeTextError("a number too large to compute")
    try:
        return bounded(INEXACT[kind](*values))
    except (ValueError, ZeroDivisionError):
        raise UndefinedError(kind) from None
