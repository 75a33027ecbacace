"""An answer's text in pieces: split where no bracket is open."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from vapo.rewards.answer_nodes import NotUnderstoodError

_PIECE = re.compile(
    r"\\text\{[^{}]*\}|\\begin\{[a-zA-Z]*\}.*?\\end\{[a-zA-Z]*\}|\\[A-Za-z]+|\\.|.", re.DOTALL
)
_OPENING = frozenset(["(", "[", "{", "\\{", "\\lfloor", "\\lceil"])
_CLOSING = frozenset([")", "]", "}", "\\}", "\\rfloor", "\\rceil"])
_PLAIN_THOUSANDS = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")
_CONNECTOR = re.compile(r"\\text\{ ?(or|and) ?\}")


def pieces(text: str) -> Iterator[tuple[str, int, int]]:
    """Each piece, where it begins, and how many brackets are open around it.

    Raises: NotUnderstoodError for brackets without partners.
    """
    depth = 0
    for match in _PIECE.finditer(text):
        token = match.group()
        if token in _CLOSING:
            depth -= 1
            if depth < 0:
                raise NotUnderstoodError("a bracket that is not open is closed")
        yield token, match.start(), depth
        depth += token in _OPENING
    if depth:
        raise NotUnderstoodError("a bracket is not closed")


def split(text: str, separators: Collection[str]) -> tuple[list[str], list[str]]:
    """The parts between the separators that are in no bracket, and these separators."""
    parts, found, begin = [], [], 0
    for token, start, depth in pieces(text):
        if depth == 0 and token in separators:
            parts.append(text[begin:start].strip())
            found.append(token)
            begin = start + len(token)
    return [*parts, text[begin:].strip()], found


def split_list(text: str) -> list[str]:
    r"""The items of `1, 2`, `1; 2`, `1 \text{ or } 2` and `1, 2, and 3`; one if it is no list.

    Raises: NotUnderstoodError for an item without text.
    """
    text = re.sub(r"(?<![{A-Za-z]) (or|and) (?![}A-Z])", r"\\text{\1}", text)
    text = _CONNECTOR.sub(r"\\text{\1}", text)
    text = re.sub(r"([,;]) ?\\text\{(?:or|and)\}", r"\1", text)
    parts, found = split(text, (",", ";", r"\text{or}", r"\text{and}"))
    if {",", ";"} <= set(found) or (len(parts) > 1 and not all(parts)):
        raise NotUnderstoodError("a list without an item, or with two kinds of separators")
    return parts


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, inside and closing bracket, if one pair is around all of the text."""
    tokens = [(token, start) for token, start, depth in pieces(text) if depth == 0]
    if len(tokens) != 2 or tokens[0][1] != 0:
        return None
    (opening, _), (closing, end) = tokens
    if opening not in _OPENING or closing not in _CLOSING or end + len(closing) != len(text):
        return None
    return opening, text[len(opening) : end].strip(), closing


def without_thousands(text: str) -> str:
    """`1,000` outside of brackets is 1000; in brackets a comma is between two numbers."""
    outside = {start for _, start, depth in pieces(text) if depth == 0}
    return _PLAIN_THOUSANDS.sub(
        lambda m: m.group().replace(",", "") if m.start() in outside else m.group(), text
    )
