r"""Parse expressions of answers: LaTeX -> a tree, by a small grammar that must match all of it.

What the grammar does not know is an error, and nothing is skipped: `42_8`, `42 \text{ is wrong}`
and `7 \Rightarrow 42` are not expressions. Ambiguous texts (`1/2x`, `x2`) are errors, too.
"""

from __future__ import annotations

import re
from fractions import Fraction

from vapo.rewards.answer_text import (
    CLOSING,
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    Node,
    NotUnderstoodError,
    is_letter,
    is_number,
    is_word,
    number,
    tokens_of,
)

MAX_DEPTH = 40
_BEGINNINGS = {*CLOSING, *GREEK, *FUNCTIONS, *CONSTANTS, "\\frac", "\\sqrt", "\\binom"}


def parse_expression(text: str) -> Node:
    """Parse the whole text as one expression.

    Raises: NotUnderstoodError.
    """
    parser = _Parser(tokens_of(text))
    node = parser.sum()
    if parser.peek():
        raise NotUnderstoodError(f"{parser.peek()!r} after an expression")
    return node


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise NotUnderstoodError(f"{token!r} where {expected or 'more'!r} is needed")
        self.position += 1
        return token

    def sum(self) -> Node:
        """One sign and terms, joined by single signs."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotUnderstoodError("nested too deep")
        terms = [self.signed()]
        while self.peek() in ("+", "-"):
            terms.append(self.signed())
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed(self) -> Node:
        sign = self.take() if self.peek() in ("+", "-") else "+"
        term = self.product()
        return Node("multiply", (number(-1), term)) if sign == "-" else term

    def product(self) -> Node:
        left = self.factor()
        after_slash = False
        while True:
            token = self.peek()
            if token in ("\\cdot", "\\times", "*"):
                self.take()
                left = Node("multiply", (left, self.factor()))
                after_slash = False
            elif token in ("/", "\\div"):
                self.take()
                left = Node("divide", (left, self.factor()))
                after_slash = True
            elif self.begins_factor():
                if is_number(token) or after_slash:
                    raise NotUnderstoodError("a product that is read in two ways")
                left = Node("multiply", (left, self.factor()))
            else:
                return left

    def begins_factor(self) -> bool:
        token = self.peek()
        if token == "|":
            return self.bars == 0
        return is_number(token) or is_letter(token) or token in _BEGINNINGS

    def factor(self) -> Node:
        token = self.peek()
        is_function = token in FUNCTIONS
        node = self.function() if is_function else self.atom()
        num_powers = 0
        while True:
            token = self.peek()
            if token == "^":
                self.take()
                if self.is_circle():
                    node = Node("degrees", (node,))
                    continue
                num_powers += 1
                if num_powers > 1 or is_function:  # x^2^3; \sin(x)^2, which is read in two ways
                    raise NotUnderstoodError("a power that is read in two ways")
                node = Node("power", (node, self.argument(many_digits=True)))
            elif token == "!":
                self.take()
                if is_function or num_powers or self.peek() == "!":
                    raise NotUnderstoodError("a factorial that is read in two ways")
                node = Node("factorial", (node,))
            elif token == "_":
                raise NotUnderstoodError("a subscript of a number or an expression")
            else:
                return node

    def is_circle(self) -> bool:
        for circle in (["\\circ"], ["{", "\\circ", "}"]):
            if self.tokens[self.position : self.position + len(circle)] == circle:
                self.position += len(circle)
                return True
        return False

    def argument(self, *, many_digits: bool = False) -> Node:
        r"""What follows `\frac`, `\sqrt` or `^`: a group in braces, or one digit or letter."""
        token = self.peek()
        if token == "{":
            self.take()
            node = self.sum()
            self.take("}")
            return node
        if is_number(token):
            if not many_digits and len(token) > 1:
                raise NotUnderstoodError("digits that are read in two ways")
            self.take()
            return number(Fraction(token))
        if is_letter(token) or token in GREEK or token in CONSTANTS:
            return self.symbol()
        if token in ("\\frac", "\\sqrt"):
            return self.atom()
        raise NotUnderstoodError(f"{token!r} as an argument")

    def atom(self) -> Node:
        token = self.peek()
        if is_number(token):
            return self.number()
        if token == "|":
            self.take()
            self.bars += 1
            if self.bars > 1:
                raise NotUnderstoodError("bars in bars")
            node = self.sum()
            self.take("|")
            self.bars -= 1
            return Node("abs", (node,))
        if token in CLOSING:
            self.take()
            bars, self.bars = self.bars, 0
            node = self.sum()
            self.take(CLOSING[token])
            self.bars = bars
            kind = {"\\lfloor": "floor", "\\lceil": "ceiling"}.get(token)
            return Node(kind, (node,)) if kind else node
        if token == "\\frac":
            self.take()
            return self.fraction()
        if token == "\\binom":
            self.take()
            return Node("binomial", (self.argument(), self.argument()))
        if token == "\\sqrt":
            return self.root()
        if is_letter(token) or token in GREEK or token in CONSTANTS:
            return self.symbol()
        raise NotUnderstoodError(f"{token!r} in an expression")

    def number(self) -> Node:
        r"""A number, with what repeats (`0.\overline{3}`) or a proper fraction (`1\frac{1}{2}`)."""
        token = self.take()
        if self.peek() == "." and self.peek(1) == "\\overline":  # 0.\overline{3}
            self.take()
            return number(Fraction(token) + self.repeating(0))
        if self.peek() == "\\overline" and "." in token:
            return number(Fraction(token) + self.repeating(len(token.partition(".")[2])))
        if self.peek() == "\\frac":
            if "." in token:
                raise NotUnderstoodError("a mixed number with a decimal point")
            start = self.position
            self.take()
            fraction = self.fraction()
            parts = [child.value for child in fraction.children if child.kind == "number"]
            if len(parts) < 2:  # 2\frac{x}{3} is a product
                self.position = start
                return number(Fraction(token))
            if not parts[0] < parts[1]:  # type: ignore[operator]
                raise NotUnderstoodError("a mixed number, or a product")
            return number(Fraction(token) + parts[0] / parts[1])  # type: ignore[operator]
        return number(Fraction(token))

    def repeating(self, num_before: int) -> Fraction:
        self.take("\\overline")
        self.take("{")
        digits = self.take()
        self.take("}")
        if not digits.isdecimal():
            raise NotUnderstoodError("what repeats is not digits")
        return Fraction(int(digits), (10 ** len(digits) - 1) * 10**num_before)

    def fraction(self) -> Node:
        token = self.peek()
        if re.fullmatch(r"\d\d", token):  # \frac12
            self.take()
            return Node("divide", (number(int(token[0])), number(int(token[1]))))
        return Node("divide", (self.argument(), self.argument()))

    def root(self) -> Node:
        self.take("\\sqrt")
        degree = number(2)
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        return Node("root", (self.argument(), degree))

    def function(self) -> Node:
        r"""`\sin x`, `\sin^2 x`, `\log_{2}(8)`; without brackets, the argument is what is close."""
        name = self.take()[1:]
        base: tuple[Node, ...] = ()
        power = None
        if name == "log" and self.peek() == "_":
            self.take()
            base = (self.argument(),)
        if self.peek() == "^":
            self.take()
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
        node = self.factor()
        while self.begins_factor() and self.peek() not in (*FUNCTIONS, "(", "[", "|"):
            if is_number(self.peek()):
                raise NotUnderstoodError("a product that is read in two ways")
            node = Node("multiply", (node, self.factor()))
        return node

    def symbol(self) -> Node:
        name = self.take()
        if name in CONSTANTS and self.peek() != "_":
            return Node("constant", value=CONSTANTS[name])
        if self.peek() == "_":
            self.take()
            name += "_" + self.subscript()
        while self.peek() == "'":
            name += self.take()
        return Node("symbol", value=name)

    def subscript(self) -> str:
        if self.peek() != "{":
            token = self.take()
            if not is_word(token):
                raise NotUnderstoodError(f"the subscript {token!r}")
            return token
        self.take()
        parts = []
        while self.peek() != "}":
            token = self.take()
            if not (is_word(token) or token in ("+", "-", ",")):
                raise NotUnderstoodError(f"the subscript {token!r}")
            parts.append(token)
        self.take("}")
        return "".join(parts)
