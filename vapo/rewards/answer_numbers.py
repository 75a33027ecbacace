"""Numbers of answers and their arithmetic: exact for rational numbers, else with 200 digits.

Every operation is bounded in time and in the size of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from mpmath import MPContext

from vapo.rewards.hostile_text import MAX_BITS, UnsafeTextError

DIGITS = 200
MAX_POWER_BITS = 1_000_000
"""A number that is not rational may have at most this many bits before or after the point."""
MAX_ARGUMENT = 10**9
"""The largest argument of a sine and the like, in absolute value."""
MAX_FACTORIAL = 1_000
Number = Any
"""A Fraction, or mpmath's mpf or mpc."""
mp = MPContext()
mp.dps = DIGITS
_RELATIVE = mp.mpf(10) ** -150
_ABSOLUTE = mp.mpf(10) ** -(DIGITS - 20)


class UndefinedError(ArithmeticError):
    """Raised by an operation without a value: division by zero, log of zero, ambiguous root."""


def numbers_equal(a: Number, b: Number) -> bool:
    """Whether two numbers are equal: exactly if both are rational, else to 150 digits."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = inexact(a), inexact(b)
    largest = max(abs(a), abs(b))
    return bool(abs(a - b) <= max(_RELATIVE * largest, _ABSOLUTE))


def is_zero(value: Number) -> bool:
    return numbers_equal(value, Fraction(0))


def are_too_small(a: Number, b: Number) -> bool:
    """Whether both numbers are inexact and so close to 0 that they may be rounding errors of 0."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return False
    return bool(max(abs(inexact(a)), abs(inexact(b))) <= 10 * _ABSOLUTE)


def inexact(value: Number) -> Number:
    """Return a rational number as mpmath's float, and other numbers unchanged."""
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def bounded(value: Number) -> Number:
    """Return a number, after checking its size. A complex number without imaginary part becomes
    real.

    Raises: UndefinedError: it is not finite. UnsafeTextError: it is too large to compute with.
    """
    if isinstance(value, Fraction):
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        if bits > MAX_BITS:
            raise UnsafeTextError("a number too large to compute")
        return value
    if not mp.isfinite(value):
        raise UndefinedError("not finite")
    if isinstance(value, mp.mpc) and abs(value.imag) <= max(_RELATIVE * abs(value), _ABSOLUTE):
        value = value.real
    if value != 0 and abs(mp.mag(value)) > MAX_POWER_BITS:
        raise UnsafeTextError("a number too large to compute")
    return value


def _product(*factors: Number) -> Number:
    product = factors[0]
    for factor in factors[1:]:
        product = bounded(product * factor)
    return product


def _divide(a: Number, b: Number) -> Number:
    if b == 0:
        raise UndefinedError("division by zero")
    return a / b


def _power(base: Number, exponent: Number) -> Number:
    """Return base ** exponent, exactly if it is rational.

    Raises: UndefinedError: it has no value or several. UnsafeTextError: it is too large to compute.
    """
    if base == 0:
        if _is_complex(exponent) or exponent <= 0:
            raise UndefinedError("a power of zero")
        return base
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > MAX_BITS:
            raise UnsafeTextError("a number too large to compute")
        return base ** int(exponent)
    if isinstance(exponent, Fraction):
        if base < 0 and exponent.denominator != 2:  # the real root, or the principal one
            raise UndefinedError("a power that is read in two ways")
        exact_root = _exact_root(base, exponent.denominator)
        if exact_root is not None:
            return _power(exact_root, Fraction(exponent.numerator))
    base, exponent = inexact(base), inexact(exponent)
    if mp.mag(exponent) + mp.mag(abs(mp.mag(base)) + 2) > math.log2(MAX_POWER_BITS) + 2:
        raise UnsafeTextError("a number too large to compute")
    is_whole = not _is_complex(exponent) and mp.isint(exponent)
    if not _is_complex(base) and base < 0 and not is_whole:
        is_half = not _is_complex(exponent) and mp.isint(2 * exponent)
        if not is_half and not _is_complex(exponent):  # the real root, or the principal one
            raise UndefinedError("a power that is read in two ways")
        return mp.power(mp.mpc(base, 0), exponent)
    return mp.power(base, exponent)


def _root(base: Number, degree: Number) -> Number:
    """Return a root, exactly if it is rational. An odd root of a negative number is real.

    Raises: UndefinedError: the degree is unusable, or the number has no such root.
    """
    if _is_complex(degree) or degree != int(degree) or not 2 <= degree <= 1_000:
        raise UndefinedError("a root of this degree")
    whole_degree = int(degree)
    if isinstance(base, Fraction):
        exact_root = _exact_root(base, whole_degree)
        if exact_root is not None:
            return exact_root
        base = inexact(base)
    if not _is_complex(base) and base < 0:
        if whole_degree % 2:
            return -mp.root(-base, whole_degree)
        if whole_degree > 2:
            raise UndefinedError("an even root of a negative number")
        return mp.mpc(0, mp.sqrt(-base))
    return mp.root(base, whole_degree)


def _exact_root(base: Fraction, n: int) -> Fraction | None:
    if n > 1_000 or (base < 0 and n % 2 == 0):
        return None
    top, bottom = _whole_root(abs(base.numerator), n), _whole_root(base.denominator, n)
    if top is None or bottom is None:
        return None
    return Fraction(top if base >= 0 else -top, bottom)


def _whole_root(value: int, n: int) -> int | None:
    is_exact = value == 0 or n == 2
    root = math.isqrt(value) if is_exact else int(mp.nint(mp.root(mp.mpf(value), n)))
    return root if root**n == value else None


def _floor(value: Number) -> Number:
    if _is_complex(value) or abs(value) > MAX_ARGUMENT**9:
        raise UndefinedError("the floor of a number that is complex or large")
    if isinstance(value, Fraction):
        return Fraction(math.floor(value))
    nearest = Fraction(int(mp.nint(value)))  # rounding may have left it just below
    return nearest if numbers_equal(value, nearest) else Fraction(int(mp.floor(value)))


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        if not 0 <= value <= MAX_FACTORIAL:
            raise UnsafeTextError("a large factorial")
        return Fraction(math.factorial(int(value)))
    if _is_complex(value) or abs(value) > MAX_FACTORIAL:
        raise UndefinedError("the factorial of a number that is complex or large")
    return mp.gamma(inexact(value) + 1)


def _binomial(n: Number, k: Number) -> Number:
    if all(isinstance(v, Fraction) and v.denominator == 1 for v in (n, k)):
        if not 0 <= n <= MAX_FACTORIAL or not 0 <= k <= MAX_FACTORIAL:
            raise UnsafeTextError("a large binomial")
        return Fraction(math.comb(int(n), int(k)))
    return _divide(_factorial(n), _factorial(k) * _factorial(n - k))


def _bounded_mpmath_function(name: str) -> Callable[[Number], Number]:
    """Return mpmath's function of this name, with bounds on its argument and its result."""
    function = getattr(mp, name)

    def bounded(value: Number) -> Number:
        if abs(value) > MAX_ARGUMENT:
            raise UnsafeTextError("a large argument")
        result = function(value)
        if abs(result) > 10**100:  # the tangent of a right angle
            raise UndefinedError("not finite")
        return result

    return bounded


def _exp(value: Number) -> Number:
    if abs(value) > MAX_POWER_BITS:
        raise UnsafeTextError("a number too large to compute")
    return mp.exp(value)


def _ln(value: Number) -> Number:
    if value == 0:
        raise UndefinedError("the logarithm of zero")
    return mp.log(value)


def _log(value: Number, base: Number | None = None) -> Number:
    """Return a logarithm. Without a base, the result is that of a fixed base, neither e nor 10."""
    if base is None:
        return _ln(value) * _UNKNOWN
    return _divide(_ln(value), _ln(base))


def _is_complex(value: Number) -> bool:
    return isinstance(value, mp.mpc)


_UNKNOWN = mp.sqrt(mp.mpf(7)) / 3 + mp.pi / 1_000
EXACT: Mapping[str, Callable[..., Number]] = {
    "add": lambda *terms: sum(terms[1:], terms[0]), "multiply": _product,
    "divide": _divide, "power": _power, "root": _root, "abs": abs, "floor": _floor,
    "ceiling": lambda value: -_floor(-value), "factorial": _factorial, "binomial": _binomial,
}  # fmt: skip
_MPMATH_NAMES = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
INEXACT: Mapping[str, Callable[..., Number]] = {
    **{name: _bounded_mpmath_function(name) for name in _MPMATH_NAMES},
    **{f"arc{name}": _bounded_mpmath_function(f"a{name}") for name in ("sin", "cos", "tan")},
    "exp": _exp, "ln": _ln, "log": _log, "degrees": lambda value: value * mp.pi / 180,
}  # fmt: skip
FUNCTIONS = frozenset("\\" + name for name in INEXACT if name != "degrees")
"""The names of functions, as LaTeX writes them."""
