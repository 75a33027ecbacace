"""Finds points at which two expressions with one varying symbol are compared: one in each case.

Absolute values, floors and the like have cases: `|x-1|+|x-2|` is `|2x-3|` except for x between 1
and 2, where points drawn at random need not lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from vapo.rewards.answer_numbers import EXACT, INEXACT, Number, bounded, inexact, mp
from vapo.rewards.answer_text import Node, symbols_of
from vapo.rewards.hostile_text import UnsafeTextError

MAX_MEETINGS = 16
"""At most this many places are used for one symbol: the ones closest to zero."""

MAX_DEGREE = 4
"""The zeros of a sum are found where it is a polynomial of at most this degree."""

WHOLE_NUMBERS = range(-6, 7)
"""Points at which an expression with a floor is also compared: there it differs from a ceiling."""

_SAMPLED = tuple(Fraction(x) for x in (0, 1, -1, 2, -2, 3, -3))
_STEPS = {"floor", "ceiling"}
_BOUNDARIES = {"arcsin": (-1, 0, 1), "arccos": (-1, 0, 1), "ln": (0, 1), "log": (0, 1)}
Evaluate = Callable[[Node, Number], Number | None]
"""Returns a part's value for a value of the symbol; None if it is not real."""


def case_points(nodes: tuple[Node, ...], name: str, evaluate: Evaluate) -> list[Number]:
    """Return values of the symbol, one in each case of the expressions.

    Cases meet where the argument of an absolute value is 0, a denominator is 0 and so on. The
    values lie between these meeting points and beyond them. If there is a floor, the rational
    meeting points themselves and some whole numbers are returned as well. Only the `MAX_MEETINGS`
    meeting points nearest to 0 are used. The list is empty if none is found.
    """
    parts = dict.fromkeys(part for node in nodes for part in _parts(node))
    places = {place for part in parts for place in _meetings(part, name, evaluate)}
    closest = sorted(places, key=lambda place: abs(inexact(place)))[:MAX_MEETINGS]
    meetings = sorted(closest, key=inexact)
    if not meetings:
        return []
    between = [(inexact(a) + inexact(b)) / 2 for a, b in pairwise(meetings)]
    least, greatest = meetings[0], meetings[-1]
    has_steps = any(part.kind in _STEPS for part in parts)
    exact = [place for place in meetings if has_steps and isinstance(place, Fraction)]
    whole = [Fraction(x) for x in WHOLE_NUMBERS] if has_steps else []
    return [least - abs(least) - 1, *between, greatest + abs(greatest) + 1, *exact, *whole]


def _parts(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _parts(child)


def _meetings(part: Node, name: str, evaluate: Evaluate) -> Iterator[Number]:
    """Yield the values of the symbol at which this part of an expression changes its case."""
    if part.kind in _STEPS:
        yield from _steps(part.children[0], name, evaluate)
    elif part.kind == "divide":
        yield from _places(part.children[1], Fraction(0), name, evaluate)
    elif part.kind in ("abs", "root", "power"):
        yield from _places(part.children[0], Fraction(0), name, evaluate)
    for bound in _BOUNDARIES.get(part.kind, ()):
        yield from _places(part.children[0], Fraction(bound), name, evaluate)


def _steps(argument: Node, name: str, evaluate: Evaluate) -> Iterator[Number]:
    """Yield values of the symbol for which the argument of a floor is a whole number.

    Only four whole numbers are looked for: those next to the argument's value at the first sampled
    place that has one. If that value is not real, or 10**9 or more in size, none are.
    """
    values = (evaluate(argument, x) for x in _SAMPLED)
    value = next((value for value in values if value is not None), None)
    if value is not None and not isinstance(value, mp.mpc) and abs(value) < 10**9:
        for step in range(-1, 3):
            yield from _places(argument, Fraction(math.floor(value) + step), name, evaluate)


def _places(node: Node, target: Number, name: str, evaluate: Evaluate) -> Iterator[Number]:
    """Yield the values of the symbol for which the node's value is `target`.

    The operations on the symbol are inverted one after the other, from the outermost to the
    innermost. If the symbol is in several operands, the values are found only if the node is a
    polynomial of low degree, or a product or quotient that is to be 0.
    """
    varying = [child for child in node.children if name in symbols_of(child)]
    if node.kind == "symbol" and node.value == name:
        yield target
    elif node.kind in ("multiply", "divide") and target == 0:
        for child in node.children if node.kind == "multiply" else node.children[:1]:
            yield from _places(child, target, name, evaluate)
    elif len(varying) == 1:
        for inner in _undone(node, varying[0], target, evaluate):
            yield from _places(varying[0], inner, name, evaluate)
    elif varying:
        shifted = Node("add", (node, Node("number", value=-target)))
        yield from _zeros_of_polynomial([evaluate(shifted, x) for x in _SAMPLED])


def _undone(node: Node, inner: Node, target: Number, evaluate: Evaluate) -> list[Number]:
    """Return the values of the child `inner` for which the node's value is `target`.

    The other children must not contain the symbol. The list is empty if no real value is found.
    """
    other_values = [evaluate(child, Fraction(0)) for child in node.children if child is not inner]
    is_first = node.children[0] is inner
    try:
        if any(value is None or isinstance(value, mp.mpc) for value in [target, *other_values]):
            return []
        if not all(isinstance(value, Fraction) for value in [target, *other_values]):
            target, other_values = inexact(target), list(map(inexact, other_values))
        values = _INVERSES[node.kind, is_first](target, *other_values)
    except (KeyError, ArithmeticError, ValueError, UnsafeTextError):
        return []
    return [bounded(value) for value in values if not isinstance(value, mp.mpc)]


def _both_signs(value: Number) -> list[Number]:
    return [value, -value]


_POWER, _ROOT, _LN = EXACT["power"], EXACT["root"], INEXACT["ln"]
_INVERSES: dict[tuple[str, bool], Callable[..., list[Number]]] = {
    **{("add", first): lambda t, *rest: [t - sum(rest)] for first in (True, False)},
    **{("multiply", first): lambda t, *rest: [t / math.prod(rest)] for first in (True, False)},
    ("divide", True): lambda t, below: [t * below],
    ("divide", False): lambda t, above: [above / t],
    ("power", True): lambda t, k: _both_signs(_POWER(t, 1 / k)),
    ("power", False): lambda t, base: [_LN(inexact(t)) / _LN(inexact(base))],
    ("root", True): lambda t, degree: [_POWER(t, degree)],
    ("abs", True): _both_signs,
    ("ln", True): lambda t: [INEXACT["exp"](inexact(t))],
    ("exp", True): lambda t: [_LN(inexact(t))],
    ("log", True): lambda t, *base: [_POWER(*base, t)] if base else [Fraction(1)] if t == 0 else [],
    **{(f"arc{name}", True): lambda t, f=INEXACT[name]: [f(inexact(t))]
       for name in ("sin", "cos", "tan")},
}  # fmt: skip
"""The inverse of each kind of node, by whether its first part is the one that varies. Arguments are
the node's value and the values of its other parts."""


def _zeros_of_polynomial(values: list[Number | None]) -> list[Number]:
    """Return the real zeros of the polynomial that has these values at the points `_SAMPLED`.

    The list is empty if no polynomial of degree 1 to `MAX_DEGREE` has these values.
    """
    differences = [v for v in values if v is not None and not isinstance(v, mp.mpc)]
    if len(differences) < len(_SAMPLED):
        return []
    places: Sequence[Number] = _SAMPLED
    if not all(isinstance(value, Fraction) for value in differences):
        differences, places = list(map(inexact, differences)), list(map(inexact, _SAMPLED))
    for order in range(1, len(_SAMPLED)):  # divided differences, in Newton's form
        for i in range(len(_SAMPLED) - 1, order - 1, -1):
            run = places[i] - places[i - order]
            differences[i] = (differences[i] - differences[i - 1]) / run
    least = max(abs(inexact(d)) for d in differences) * inexact(Fraction(1, 10**100))
    degree = max((i for i, d in enumerate(differences) if abs(inexact(d)) > least), default=0)
    if not 1 <= degree <= MAX_DEGREE:
        return []
    coefficients = [differences[degree]]  # of the highest power first
    for i in range(degree - 1, -1, -1):
        shifted = [*coefficients, 0 * coefficients[0]]
        for j, coefficient in enumerate(coefficients):
            shifted[j + 1] -= coefficient * places[i]
        shifted[-1] += differences[i]
        coefficients = shifted
    return _roots(coefficients)


def _roots(coefficients: list[Number]) -> list[Number]:
    """Return the real roots of a polynomial. The coefficient of the highest power comes first.

    From degree 3 on they are found numerically; the list is empty if that does not converge.
    """
    first, second = coefficients[:2]
    if len(coefficients) == 2:
        return [-second / first]
    half = -second / (2 * first)
    if len(coefficients) == 3:
        squared = half**2 - coefficients[2] / first
        if squared < 0:
            return []
        root = EXACT["root"](squared, Fraction(2))
        return [inexact(half) - root, inexact(half) + root] if root else [half]
    try:
        with mp.workdps(30):
            roots = mp.polyroots([inexact(c) for c in coefficients], maxsteps=60)
    except mp.NoConvergence:
        return []
    return [mp.re(root) for root in roots if abs(mp.im(root)) < 1e-12 * (1 + abs(root))]
