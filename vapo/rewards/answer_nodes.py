"""The nodes and tokens of answers' expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

CONSTANTS = {"\\pi": "pi", "e": "e", "i": "i"}
GREEK = frozenset({
    r"\alpha", r"\beta", r"\gamma", r"\delta", r"\epsilon", r"\varepsilon", r"\zeta",
    r"\eta", r"\theta", r"\vartheta", r"\iota", r"\kappa", r"\lambda", r"\mu", r"\nu",
    r"\xi", r"\rho", r"\sigma", r"\tau", r"\upsilon", r"\phi", r"\varphi", r"\chi", r"\psi",
    r"\omega", r"\Gamma", r"\Delta", r"\Theta", r"\Lambda", r"\Xi", r"\Pi", r"\Sigma",
    r"\Phi", r"\Psi", r"\Omega", r"\ell",
})  # fmt: skip
FUNCTIONS = frozenset({
    r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc", r"\arcsin", r"\arccos",
    r"\arctan", r"\sinh", r"\cosh", r"\tanh", r"\ln", r"\log", r"\exp",
})  # fmt: skip
CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_TOKEN = re.compile(
    r"\s+|(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))|(?P<command>\\[A-Za-z]+|\\.)|(?P<other>.)",
    re.DOTALL,
)


class NotUnderstoodError(ValueError):
    """Text that the grammar of answers does not know."""


@dataclass(frozen=True)
class Node:
    """`kind` is number, symbol, constant, add, multiply, divide, power, root or a function's name.

    `value` is the number, or the name of a symbol or constant.
    """

    kind: str
    children: tuple[Node, ...] = ()
    value: Fraction | str | None = None


def tokens_of(text: str) -> list[str]:
    """Numbers, commands and single characters; whitespace separates and is left out."""
    return [match.group() for match in _TOKEN.finditer(text) if not match.group().isspace()]


def number(value: Fraction | int) -> Node:
    return Node("number", value=Fraction(value))


def symbols_of(node: Node, kind: str = "symbol") -> frozenset[str]:
    """The names of the symbols, or of another kind, in an expression."""
    own = frozenset([str(node.value)]) if node.kind == kind else frozenset()
    return own.union(*(symbols_of(child, kind) for child in node.children))


def is_number(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and len(token) > 1)


def is_letter(token: str) -> bool:
    return len(token) == 1 and token.isascii() and token.isalpha()


def is_word(token: str) -> bool:
    return (token.isascii() and token.isalnum()) or token in GREEK
