"""A bound on what a parsed answer would come to, before SymPy computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from sympy.functions.elementary.hyperbolic import (  # type: ignore[import-untyped]
    HyperbolicFunction,
)
from sympy.functions.elementary.trigonometric import (  # type: ignore[import-untyped]
    TrigonometricFunction,
)

from vapo.rewards.hostile_text import MAX_BITS, UnsafeTextError, power_bits

MAX_TERMS = 5_000
MAX_FUNCTIONS = 5
"""Nested in one another (logarithms, sines): SymPy's time to simplify them grows exponentially."""

MAX_DEGREE = 30
"""In sines and their kind: SymPy factors such a polynomial, which took a minute at 500."""

_GROWING = frozenset({
    "factorial", "factorial2", "subfactorial", "gamma", "loggamma", "binomial", "RisingFactorial",
    "FallingFactorial", "fibonacci", "lucas", "bell", "catalan", "bernoulli", "euler", "harmonic",
    "partition", "primepi", "prime", "zeta",
})  # fmt: skip
_EXPONENTIAL = frozenset(["exp", "sinh", "cosh"])


def check_size(parsed: Sequence[Any]) -> None:
    """Raises: UnsafeTextError if a number, an expansion or a nesting in it is too large."""
    try:
        for expression in parsed:
            if hasattr(expression, "args"):
                _bits(expression)
                _terms(expression)
                if _nested_functions(expression) > MAX_FUNCTIONS:
                    raise UnsafeTextError("functions nested too deep")
                if _degree(expression) > MAX_DEGREE:
                    raise UnsafeTextError("too high a power of a function")
    except RecursionError:
        raise UnsafeTextError("nested too deep") from None


def _bits(expression: Any) -> float:
    """A bound on log2 of the numbers in it, symbols left aside."""
    if isinstance(expression, sympy.Rational):
        bits = float(max(int(expression.p).bit_length(), int(expression.q).bit_length(), 1))
    elif isinstance(expression, sympy.Float):
        _, _, exponent, num_bits = expression._mpf_
        bits = float(abs(int(exponent)) + int(num_bits) + 1)
    else:
        arguments = [_bits(argument) for argument in expression.args if hasattr(argument, "args")]
        bits = _bits_of(expression, arguments)
    if bits > MAX_BITS:
        raise UnsafeTextError("a number too large to compute")
    return bits


def _bits_of(expression: Any, arguments: list[float]) -> float:
    name = type(expression).__name__
    largest = max(arguments, default=2.0)
    if isinstance(expression, (sympy.Pow, sympy.MatPow)):
        # a root or a symbol as the exponent makes no large number
        base, exponent = expression.args
        if exponent.free_symbols or (base.free_symbols and not base.is_Add):
            return largest
        return power_bits(*arguments)
    if name in _GROWING:
        return power_bits(largest, largest)
    if name in _EXPONENTIAL:
        return largest if expression.free_symbols else power_bits(2.0, largest)
    if isinstance(expression, (sympy.Add, sympy.Mul)):
        return sum(arguments) + 1.0
    return largest


def _nested_functions(expression: Any) -> int:
    arguments = [a for a in expression.args if hasattr(a, "args")]
    inner = max(map(_nested_functions, arguments), default=0)
    return inner + isinstance(expression, sympy.Function)


def _degree(expression: Any) -> float:
    """Of the expression as a polynomial in its trigonometric and hyperbolic functions."""
    degrees = [_degree(argument) for argument in expression.args if hasattr(argument, "args")]
    if isinstance(expression, (TrigonometricFunction, HyperbolicFunction)):
        return max(1.0, *degrees)
    if isinstance(expression, sympy.Pow) and expression.args[1].is_number and degrees[0]:
        return degrees[0] * max(1.0, abs(float(expression.args[1].as_real_imag()[0])))
    return sum(degrees) if isinstance(expression, sympy.Mul) else max(degrees, default=0.0)


def _terms(expression: Any) -> int:
    """Terms of the expression multiplied out."""
    if not hasattr(expression, "args") or not expression.args:
        return 1
    counts = [_terms(argument) for argument in expression.args]
    terms = max(counts)
    if isinstance(expression, sympy.Add):
        terms = sum(counts)
    elif isinstance(expression, sympy.Mul):
        terms = math.prod(counts)
    elif isinstance(expression, sympy.Pow) and counts[0] > 1:
        exponent = expression.args[1]
        if exponent.is_Integer and abs(int(exponent)) > 1:
            n = min(abs(int(exponent)), 10_000)
            terms = math.comb(n + min(counts[0], 50) - 1, min(counts[0], 50) - 1)
    if terms > MAX_TERMS:
        raise UnsafeTextError("too many terms")
    return terms
