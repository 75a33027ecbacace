"""The nodes of an answer's expression, and functions that split its text outside of brackets."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction


def as_written(cleaned: str) -> str:
    """Return an answer's text without meaningless spaces, for comparison as text.

    Space between words or digits stays: `1 2` is not `12`.
    """
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", cleaned)


CONSTANTS = {"\\pi": "pi", "e": "e", "i": "i"}
GREEK = frozenset({
    r"\alpha", r"\beta", r"\gamma", r"\delta", r"\epsilon", r"\varepsilon", r"\zeta",
    r"\eta", r"\theta", r"\vartheta", r"\iota", r"\kappa", r"\lambda", r"\mu", r"\nu",
    r"\xi", r"\rho", r"\sigma", r"\tau", r"\upsilon", r"\phi", r"\varphi", r"\chi", r"\psi",
    r"\omega", r"\Gamma", r"\Delta", r"\Theta", r"\Lambda", r"\Xi", r"\Pi", r"\Sigma",
    r"\Phi", r"\Psi", r"\Omega", r"\ell",
})  # fmt: skip
CLOSING = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_PIECE = re.compile(
    r"\\text\{[^{}]*\}|\\begin\{[a-zA-Z]*\}.*?\\end\{[a-zA-Z]*\}|\\[A-Za-z]+|\\.|.", re.DOTALL
)
_OPENING_PIECES = frozenset(["(", "[", "{", "\\{", "\\lfloor", "\\lceil"])
_CLOSING_PIECES = frozenset([")", "]", "}", "\\}", "\\rfloor", "\\rceil"])
_PLAIN_THOUSANDS = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
OR = r"\text{or}"
_CONNECTOR = re.compile(r"\\text\{ ?(or|and) ?\}")


class NotUnderstoodError(ValueError):
    """Raised for text that the grammar of answers does not match."""


@dataclass(frozen=True)
class Node:
    """A node of an expression's tree.

    `kind` is number, symbol, constant, add, multiply, divide, power, root or a function's name.
    `value` is the number, or the name of a symbol or constant.
    """

    kind: str
    children: tuple[Node, ...] = ()
    value: Fraction | str | None = None


def number(value: Fraction | int) -> Node:
    return Node("number", value=Fraction(value))


def symbols_of(node: Node, kind: str = "symbol") -> frozenset[str]:
    """Return the names of the symbols in an expression, or of its nodes of another `kind`."""
    names = frozenset([str(node.value)]) if node.kind == kind else frozenset()
    return names.union(*(symbols_of(child, kind) for child in node.children))


def is_number(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and len(token) > 1)


def is_letter(token: str) -> bool:
    return len(token) == 1 and token.isascii() and token.isalpha()


def is_name(token: str) -> bool:
    return is_letter(token) or token in GREEK or token in CONSTANTS


def is_word(token: str) -> bool:
    return (token.isascii() and token.isalnum()) or token in GREEK


def pieces(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each token of a text, its position, and the number of brackets that are open around it.

    Raises: NotUnderstoodError: a bracket has no partner.
    """
    depth = 0
    for match in _PIECE.finditer(text):
        token = match.group()
        if token in _CLOSING_PIECES:
            depth -= 1
            if depth < 0:
                raise NotUnderstoodError("a bracket that is not open is closed")
        yield token, match.start(), depth
        depth += token in _OPENING_PIECES
    if depth:
        raise NotUnderstoodError("a bracket is not closed")


def split(text: str, separators: Collection[str]) -> tuple[list[str], list[str]]:
    """Split a text at separators outside of brackets; return parts and separators."""
    parts, separators_between, begin = [], [], 0
    for token, start, depth in pieces(text):
        if depth == 0 and token in separators:
            parts.append(text[begin:start].strip())
            separators_between.append(token)
            begin = start + len(token)
    return [*parts, text[begin:].strip()], separators_between


def split_list(text: str) -> tuple[list[str], list[str]]:
    r"""Split a list such as `1, 2`, `1; 2`, `1 \text{ or } 2` or `1, 2, and 3`.

    Returns: the items and the separators between them. A text that is not a list is one item.

    Raises: NotUnderstoodError: an item has no text, or there are two kinds of separators.
    """
    text = re.sub(r"(?<![{A-Za-z]) (or|and) (?![}A-Z])", r"\\text{\1}", text)
    text = _CONNECTOR.sub(r"\\text{\1}", text)
    text = re.sub(r"([,;]) ?\\text\{(?:or|and)\}", r"\1", text)
    parts, separators = split(text, (",", ";", OR, r"\text{and}"))
    if {",", ";"} <= set(separators) or (len(parts) > 1 and not all(parts)):
        raise NotUnderstoodError("a list without an item, or with two kinds of separators")
    return parts, separators


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Return opening bracket, content and closing bracket of a text in brackets; None for others.

    Raises: NotUnderstoodError: a bracket has no partner.
    """
    tokens = [(token, start) for token, start, depth in pieces(text) if depth == 0]
    if len(tokens) == 2:
        (opening, start), (closing, end) = tokens
        is_pair = opening in _OPENING_PIECES and closing in _CLOSING_PIECES
        if is_pair and start == 0 and end + len(closing) == len(text):
            return opening, text[len(opening) : end].strip(), closing
    return None


def without_thousands(text: str) -> str:
    """Write `1,000` as 1000 outside of brackets. Inside brackets a comma separates two numbers."""
    outside = {start for _, start, depth in pieces(text) if depth == 0}
    return _PLAIN_THOUSANDS.sub(
        lambda m: m.group().replace(",", "") if m.start() in outside else m.group(), text
    )
