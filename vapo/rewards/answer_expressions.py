r"""Parses an answer's LaTeX into a tree of nodes, by a small grammar that must match the whole
text.

What the grammar does not know is an error, and nothing is skipped: `42_8`, `42 \text{ is wrong}`
and `7 \Rightarrow 42` are not expressions. Ambiguous texts (`1/2x`, `x2`) are errors, too.
"""

from __future__ import annotations

import re
from fractions import Fraction

from vapo.rewards.answer_numbers import FUNCTIONS
from vapo.rewards.answer_text import (
    CLOSING,
    CONSTANTS,
    GREEK,
    Node,
    NotUnderstoodError,
    is_letter,
    is_name,
    is_number,
    is_word,
    number,
)

MAX_DEPTH = 40
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\[A-Za-z]+|\\.|\S", re.DOTALL)
"""Numbers, commands and single characters; whitespace separates."""

_OPERATORS = {
    "\\cdot": "multiply", "\\times": "multiply", "*": "multiply",
    "/": "divide", "\\div": "divide",
}  # fmt: skip
_BEGINNINGS = {*CLOSING, *GREEK, *FUNCTIONS, *CONSTANTS, "\\frac", "\\sqrt", "\\binom"}


def parse_expression(text: str) -> Node:
    """Parse the whole text as one expression, and return its tree.

    Raises: NotUnderstoodError: the grammar does not match the whole text.
    """
    parser = _Parser(_TOKEN.findall(text))
    node = parser.sum()
    if parser.peek():
        raise NotUnderstoodError(f"{parser.peek()!r} after an expression")
    return node


class _Parser:
    """A recursive-descent parser of tokens. Each method parses a rule of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.bars = 0

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise NotUnderstoodError(f"{token!r} where {expected or 'more'!r} is needed")
        self.position += 1
        return token

    def accept(self, *tokens: str) -> bool:
        """Consume these tokens if they are the next ones, and return whether they were."""
        end = self.position + len(tokens)
        is_next = self.tokens[self.position : end] == list(tokens)
        self.position = end if is_next else self.position
        return is_next

    def sum(self) -> Node:
        """Parse a sum: terms joined by single signs, with at most one sign before the first.

        Raises: NotUnderstoodError: a term is malformed, or brackets are nested too deep.
        """
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotUnderstoodError("nested too deep")
        terms: list[Node] = []
        while not terms or self.peek() in ("+", "-"):
            sign = self.take() if self.peek() in ("+", "-") else "+"
            term = self.product()
            terms.append(Node("multiply", (number(-1), term)) if sign == "-" else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        """Parse factors and divisors into one node each, so that the tree stays flat."""
        factors = [self.factor()]
        divisors: list[Node] = []
        divides = False  # the last operator
        while True:
            token = self.peek()
            if token in _OPERATORS:
                divides = _OPERATORS[self.take()] == "divide"
                (divisors if divides else factors).append(self.factor())
            elif self.begins_factor():
                if is_number(token) or divides:
                    raise NotUnderstoodError("a product that is read in two ways")
                factors.append(self.factor())
            else:
                break
        return Node("divide", (_times(factors), _times(divisors))) if divisors else _times(factors)

    def begins_factor(self) -> bool:
        token = self.peek()
        if token == "|":
            return self.bars == 0
        return is_number(token) or is_letter(token) or token in _BEGINNINGS

    def factor(self) -> Node:
        """Parse a function, or an atom with its power, degree sign or factorial."""
        is_function = self.peek() in FUNCTIONS
        node = self.function() if is_function else self.atom()
        num_powers = 0
        while True:
            if self.accept("^"):
                if self.accept("\\circ") or self.accept("{", "\\circ", "}"):
                    node = Node("degrees", (node,))
                    continue
                num_powers += 1
                if num_powers > 1 or is_function:  # x^2^3; \sin(x)^2, which is read in two ways
                    raise NotUnderstoodError("a power that is read in two ways")
                node = Node("power", (node, self.argument(many_digits=True)))
            elif self.accept("!"):
                if is_function or num_powers or self.peek() == "!":
                    raise NotUnderstoodError("a factorial that is read in two ways")
                node = Node("factorial", (node,))
            elif self.peek() == "_":
                raise NotUnderstoodError("a subscript of a number or an expression")
            else:
                return node

    def argument(self, *, many_digits: bool = False) -> Node:
        r"""Parse the argument of `\frac`, `\sqrt` or `^`: a group in braces, or one digit or
        letter.

        `many_digits` says whether a number without braces may have several digits.
        """
        token = self.peek()
        if self.accept("{"):
            return self.group("}")
        if is_number(token):
            if not many_digits and len(token) > 1:
                raise NotUnderstoodError("digits that are read in two ways")
            return number(Fraction(self.take()))
        if is_name(token):
            return self.symbol()
        if token in ("\\frac", "\\sqrt"):
            return self.atom()
        raise NotUnderstoodError(f"{token!r} as an argument")

    def group(self, closing: str) -> Node:
        node = self.sum()
        self.take(closing)
        return node

    def atom(self) -> Node:
        """Parse a number, symbol, group in brackets or bars, fraction, binomial or root."""
        token = self.peek()
        if is_number(token):
            return self.number()
        if is_name(token):
            return self.symbol()
        if self.accept("|"):
            self.bars += 1
            if self.bars > 1:
                raise NotUnderstoodError("bars in bars")
            node = self.group("|")
            self.bars -= 1
            return Node("abs", (node,))
        if token in CLOSING:
            self.take()
            bars, self.bars = self.bars, 0
            node = self.group(CLOSING[token])
            self.bars = bars
            kind = {"\\lfloor": "floor", "\\lceil": "ceiling"}.get(token)
            return Node(kind, (node,)) if kind else node
        if self.accept("\\frac"):
            return self.fraction()
        if self.accept("\\binom"):
            return Node("binomial", (self.argument(), self.argument()))
        if self.accept("\\sqrt"):
            degree = self.group("]") if self.accept("[") else number(2)
            return Node("root", (self.argument(), degree))
        raise NotUnderstoodError(f"{token!r} in an expression")

    def number(self) -> Node:
        r"""Parse a number. Decimals may repeat (`0.\overline{3}`); it may be mixed
        (`1\frac{1}{2}`)."""
        token = self.take()
        whole = Fraction(token)
        if self.accept(".", "\\overline"):
            return number(whole + self.repeating(0))
        if "." in token and self.accept("\\overline"):
            return number(whole + self.repeating(len(token.partition(".")[2])))
        start = self.position
        if not self.accept("\\frac"):
            return number(whole)
        if "." in token:
            raise NotUnderstoodError("a mixed number with a decimal point")
        parts = [child.value for child in self.fraction().children if child.kind == "number"]
        if len(parts) < 2:  # 2\frac{x}{3} is a product
            self.position = start
            return number(whole)
        if not parts[0] < parts[1]:  # type: ignore[operator]
            raise NotUnderstoodError("a mixed number, or a product")
        return number(whole + parts[0] / parts[1])  # type: ignore[operator]

    def repeating(self, num_before: int) -> Fraction:
        self.take("{")
        digits = self.take()
        self.take("}")
        if not digits.isdecimal():
            raise NotUnderstoodError("what repeats is not digits")
        return Fraction(int(digits), (10 ** len(digits) - 1) * 10**num_before)

    def fraction(self) -> Node:
        if re.fullmatch(r"\d\d", self.peek()):  # \frac12
            return Node("divide", tuple(number(int(digit)) for digit in self.take()))
        return Node("divide", (self.argument(), self.argument()))

    def function(self) -> Node:
        r"""Parse a function with its argument: `\sin x`, `\sin^2 x`, `\log_{2}(8)`.

        Without brackets, the argument is the product that follows directly.
        """
        name = self.take()[1:]
        base: tuple[Node, ...] = ()
        power = None
        if name == "log" and self.accept("_"):
            base = (self.argument(),)
        if self.accept("^"):
            power = self.argument()
            if power.kind != "number":  # \sin^{-1} is the inverse or the reciprocal
                raise NotUnderstoodError("a power of a function")
        is_bracketed = self.peek() in ("(", "{", "|")
        argument = self.atom() if is_bracketed else self.close_product()
        node = Node(name, (argument, *base))
        return node if power is None else Node("power", (node, power))

    def close_product(self) -> Node:
        if self.peek() in FUNCTIONS:
            raise NotUnderstoodError("a function of a function without brackets")
        factors = [self.factor()]
        while self.begins_factor() and self.peek() not in (*FUNCTIONS, "(", "[", "|"):
            if is_number(self.peek()):
                raise NotUnderstoodError("a product that is read in two ways")
            factors.append(self.factor())
        return _times(factors)

    def symbol(self) -> Node:
        name = self.take()
        if name in CONSTANTS and self.peek() != "_":
            return Node("constant", value=CONSTANTS[name])
        if self.accept("_"):
            name += "_" + self.subscript()
        while self.accept("'"):
            name += "'"
        return Node("symbol", value=name)

    def subscript(self) -> str:
        parts: list[str] = []
        is_group = self.accept("{")
        while not self.accept("}") if is_group else not parts:
            parts.append(self.take())
        if not all(is_word(part) or (is_group and part in ("+", "-", ",")) for part in parts):
            raise NotUnderstoodError(f"the subscript {parts}")
        return "".join(parts)


def _times(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))
