"""Refuses hostile text before anything expensive or unsafe is done with it.

Several scorers of reasoning_gym turn text into Python code and evaluate it, directly or through
SymPy's parser. So while a response is judged, an audit hook checks all source code that this
process is about to compile. It allows only arithmetic and literals of bounded size.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

MAX_SOURCE_CHARS = 20_000
MAX_BITS = 10_000.0
"""Numbers with more bits than this (3,000 digits) are not computed."""

MAX_NESTING = 12
MAX_DIGITS = 100

_NODES = (
    ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name,
    ast.expr_context, ast.Call, ast.keyword, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Compare,
    ast.cmpop, ast.BoolOp, ast.boolop,
)  # fmt: skip
_FUNCTIONS = frozenset({
    "Integer", "Float", "Rational", "Symbol", "Function", "Add", "Mul", "Pow", "Eq", "Abs", "abs",
    "sign", "sqrt", "cbrt", "root", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc",
    "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
    "floor", "ceiling", "factorial", "hex",
})  # fmt: skip
_LIBRARY_SOURCES = ("from sympy import *", b"from sympy import *")
_DENIED_EVENTS = (
    "os.", "subprocess.", "shutil.", "socket.", "ctypes.", "open", "tempfile.", "pty.",
    "urllib.", "ftplib.", "smtplib.", "webbrowser.", "signal.", "fcntl.", "mmap.",
)  # fmt: skip
_NO_EFFECT = frozenset({"os.listdir", "os.scandir", "os.walk", "os.fwalk"})


class UnsafeTextError(ValueError):
    """Raised for text that is refused because evaluating it would be unsafe."""


# ---- Python source ------------------------------------------------------------------------


def check_expression_source(source: Any) -> None:
    """Check that Python source is a small expression of numbers, literals and known functions.

    Only SymPy's own import of all its names passes, too.

    Raises: UnsafeTextError: the source is anything else.
    """
    if isinstance(source, (str, bytes)):
        if source in _LIBRARY_SOURCES:
            return
        if len(source) > MAX_SOURCE_CHARS:
            raise UnsafeTextError("source too long")
        try:
            source = ast.parse(source, mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise UnsafeTextError(f"not an expression: {type(error).__name__}") from None
    if not isinstance(source, ast.Expression):
        raise UnsafeTextError("not an expression")
    for node in ast.walk(source):
        if not isinstance(node, _NODES):
            raise UnsafeTextError(f"{type(node).__name__} in an expression")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise UnsafeTextError(f"the name {node.id!r:.40} in an expression")
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Call):  # Function('f')(x), and Integer(2)(3), which fails
                function = function.func
            if not isinstance(function, ast.Name) or function.id not in _FUNCTIONS:
                raise UnsafeTextError("a call in an expression")
        if isinstance(node, ast.BinOp) and (
            _is_text_or_container(node.left) or _is_text_or_container(node.right)
        ):
            raise UnsafeTextError("arithmetic with text or lists")
    try:
        _bits(source.body)
    except RecursionError:
        raise UnsafeTextError("nested too deep") from None


def _is_text_or_container(node: ast.AST) -> bool:
    """Whether a syntax node is a literal text, list, tuple, set or dict."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict))


def _bits(node: ast.AST) -> float:
    """Return an upper bound on the bits of each number that evaluating the expression computes.

    Raises: UnsafeTextError: the bound is above MAX_BITS.
    """
    bits = 1.0
    if isinstance(node, ast.Constant):
        bits = _constant_bits(node.value)
    elif isinstance(node, ast.BinOp):
        left_bits, right_bits = _bits(node.left), _bits(node.right)
        bits = _operation_bits(node.op, left_bits, right_bits)
    elif isinstance(node, ast.Call):
        arguments = [_bits(argument) for argument in node.args]
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        bits = max(arguments, default=1.0)
        if name == "Pow" and len(arguments) == 2:
            bits = power_bits(*arguments)
        elif name == "factorial":
            bits = power_bits(bits, bits)
        elif name in ("exp", "sinh", "cosh"):
            bits = power_bits(2.0, bits)
        elif name in ("Add", "Mul"):
            bits = sum(arguments) + 1
    else:
        bits = max([bits, *(_bits(child) for child in ast.iter_child_nodes(node))])
    if bits > MAX_BITS:
        raise UnsafeTextError("a number too large to compute")
    return bits


def _constant_bits(value: object) -> float:
    if isinstance(value, int):
        return float(max(value.bit_length(), 1))
    if isinstance(value, float):
        return abs(math.log2(abs(value))) + 1 if value and math.isfinite(value) else 1.0
    if isinstance(value, str) and re.fullmatch(r"[\d.eE+-]+", value):  # Float('1e9'), Integer('9')
        _, _, exponent = value.lower().partition("e")
        digits = len(value)
        power = abs(int(exponent)) if re.fullmatch(r"[+-]?\d{1,9}", exponent) else 0
        return 3.33 * (digits + power)
    return 1.0


def _operation_bits(operator: ast.operator, left_bits: float, right_bits: float) -> float:
    if isinstance(operator, ast.Pow):
        return power_bits(left_bits, right_bits)
    if isinstance(operator, ast.LShift):
        return left_bits + 2.0 ** min(right_bits, 64.0)
    if isinstance(operator, (ast.Mult, ast.Div, ast.FloorDiv)):
        return left_bits + right_bits
    return max(left_bits, right_bits) + 1


def power_bits(base_bits: float, exponent_bits: float) -> float:
    """Return an upper bound on the bits of a power, from bounds on those of base and exponent.

    An exponent of more than 64 bits counts as one of 64, whose power has far more than `MAX_BITS`.
    """
    return base_bits * 2.0 ** min(exponent_bits, 64.0)


# ---- the audit hook -----------------------------------------------------------------------

_guarded = False


@cache
def install() -> None:
    """Install the audit hook, once in a process. The hook refuses hostile code inside `guarded`."""
    sys.dont_write_bytecode = True
    sys.addaudithook(_audit)


@contextmanager
def guarded() -> Iterator[None]:
    """Refuse code from text, files for writing, processes and connections in the block."""
    global _guarded
    _guarded = True
    try:
        yield
    finally:
        _guarded = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """While `guarded`, refuse what this audit event announces: code, a file for writing, a process.

    Small expressions (`check_expression_source`), reading files and listing folders are allowed,
    and so is all that importing a library does.

    Raises: UnsafeTextError: the event is refused.
    """
    global _guarded
    if not _guarded or not event.startswith(("compile", *_DENIED_EVENTS)):
        return
    _guarded = False  # the checks below compile and import code themselves
    try:
        if _is_importing() or event in _NO_EFFECT:
            return
        if event == "compile":
            check_expression_source(arguments[0])
        elif event == "open":
            mode, flags = arguments[1], arguments[2]
            is_read = (mode or "r") in ("r", "rb") and not (flags or 0) & 0b11
            if not is_read:
                raise UnsafeTextError("opening a file for writing")
        else:
            raise UnsafeTextError(f"{event} while judging a response")
    finally:
        _guarded = True


def _is_importing() -> bool:
    """Whether a library is being imported, which may compile code and open files."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ---- LaTeX --------------------------------------------------------------------------------

_REFUSED = {
    "control characters": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]"),
    "a sum, product, integral, limit or determinant": re.compile(
        r"\\(?:sum|prod|coprod|i*o?int|lim|liminf|limsup|det|Gamma|gamma|zeta|pmod|bmod|mod|gcd|lcm)"
        r"(?![A-Za-z])"
    ),
    "a very long number": re.compile(rf"\d{{{MAX_DIGITS + 1}}}"),
    "a chain of signs, or a large factorial": re.compile(
        r"(?:[-+]\s*){4}|(?:!\s*\)*\s*){3}|\d{5}\s*\)*\s*!"
    ),
    "a large binomial": re.compile(r"\\[dt]?binom\D{0,4}\d{4}"),
}
_BRACKETS = re.compile(r"\\[{}|]|\\.|[][(){}|]", re.DOTALL)


def check_latex(text: str) -> None:
    """Check that parsing a LaTeX text cannot take long.

    A parser's time grows exponentially with nesting, and it would compute sums, integrals and
    limits. The bounds on length and nesting are far above what an answer needs.

    Raises: UnsafeTextError: the text is above a bound, or has a command or a character that is
        refused, such as a sum's or a digit that is not ASCII.
    """
    if any(c.isdigit() and not c.isascii() for c in text):
        raise UnsafeTextError("digits that are not ASCII")
    for reason, pattern in _REFUSED.items():
        if pattern.search(text):
            raise UnsafeTextError(reason)
    if text.count("=") > 5:
        raise UnsafeTextError("a chain of equations")
    if text.count("|") > 8 or _nesting(text) > MAX_NESTING:
        raise UnsafeTextError("nested too deep")


def _nesting(text: str) -> int:
    """Return the largest number of brackets that are open at once.

    A closing bracket without an open one before it has no effect.
    """
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        bracket = match.group().lstrip("\\")
        if bracket in ("(", "[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in (")", "]", "}"):
            depth = max(depth - 1, 0)
    return deepest
