"""Parses the text of a mathematical answer into a form, which `answer_equality` compares.

A form is a value with its unit, a list, set, tuple, interval, union, matrix, equation, inequality,
number in another base, or words. Any other text is equal only to its own spelling.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from vapo.rewards.answer_expressions import parse_expression
from vapo.rewards.answer_forms import (
    Form,
    difference,
    have_an_order,
    inequality,
    named_point,
    point_of,
    union_of,
)
from vapo.rewards.answer_setting import clean, plain_characters
from vapo.rewards.answer_text import (
    GREEK,
    OR,
    Node,
    NotUnderstoodError,
    as_written,
    enclosed,
    number,
    split,
    split_list,
    symbols_of,
    without_thousands,
)
from vapo.rewards.answer_values import value_of, values_equal
from vapo.rewards.answer_words import (
    CHOICE,
    CHOICE_WITH_TEXT,
    MAX_WORDS,
    named_unit,
    number_in_words,
    split_unit,
)
from vapo.rewards.hostile_text import UnsafeTextError, check_latex

MAX_ANSWER_CHARS = 500
"""A longer answer is not parsed: it is equal only to its own spelling."""

MAX_ITEMS = 40
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne")
_SYMBOL = r"(?:[A-Za-z]|" + "|".join(re.escape(name) for name in sorted(GREEK)) + r")"
_SUBSCRIPT = r"(?: ?_ ?(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?"
_LABEL = re.compile(
    rf"{_SYMBOL}{_SUBSCRIPT}'*"  # x, a_1
    rf"|(?:[fghpq]|[A-Z]){_SUBSCRIPT}'* ?\([^()=<>]*\)"  # f(2), P(A)
    r"|[A-Z]{2,3}|\\overline ?\{[A-Z]{2}\}|(?:m ?)?\\angle ?[A-Z]{1,3}"  # AB, an angle
)
_NAMES = re.compile(rf"\( ?{_SYMBOL}(?: ?, ?{_SYMBOL})+ ?\)")
_QUANTITY = re.compile(  # what a problem asks for, by a name that holds no number
    r"(?!.*([A-Za-z]).*\1)[A-Za-z](?: ?\+ ?[A-Za-z])+|\| ?[A-Z]{2} ?\||\[ ?[A-Z]{3,4} ?\]"
    r"|\\text\{ ?(?:[Tt]he )?(?:[Tt]otal |[Ff]inal )?"
    r"(?i:answer|area|average|cost|distance|length|mean|number|perimeter|probability|product|profit"
    r"|ratio|remainder|speed|sum|time|total|volume) ?\}"
)
_WORDS = re.compile(  # but x-y is a difference
    r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*|(?!(?:[A-Za-z]-)+[A-Za-z]$)[A-Za-z](?:[ -][A-Za-z]+)+"
)
_MAY_BE_PRODUCT = re.compile(r"[abcdfghjkmnpqrstvwxyz]{2,3}")
_BASED = re.compile(
    r"\(?([0-9]+)\)? ?_ ?(?:\{ ?([0-9]{1,2}) ?\}|([0-9])|\{?\\text\{ ?([a-z]+) ?\}\}?)"
)
_MATRIX = re.compile(r"\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}")
_SCIENTIFIC = re.compile(r"([+-]?) ?([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([+-]?[0-9]{1,6})")
"""A number as programs write it: 5e-05. With a space, as in 5 e-5, it is 5 times e, less 5."""

_MAX_EXPONENT = 3_000
_MIXED = re.compile(r"(-?) ?([0-9]+) ([0-9]+) ?/ ?([0-9]+)")


@lru_cache(maxsize=4096)
def parse_answer(text: str) -> Form:
    """Parse an answer's text. The form is `unknown` if any part of the text is not understood.

    It is `unknown`, too, for a text that is too long, or that could take long to parse.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return Form("unknown", spelling=text.strip())
    cleaned = clean(text)
    try:
        check_latex(plain_characters(text))
        form = _any(without_thousands(cleaned))
    except (NotUnderstoodError, UnsafeTextError, RecursionError):
        form = Form("unknown")
    return replace(form, spelling=as_written(cleaned))


def _any(text: str) -> Form:
    """Parse an answer, which may be a list or a choice.

    Raises: NotUnderstoodError: a part of the text is not understood.
    """
    if match := CHOICE.fullmatch(text):
        text = match[1]
    if words := _words(text):
        return words
    if match := CHOICE_WITH_TEXT.fullmatch(text):
        *letters, rest = match.groups()
        return Form("choice", (_any(rest),), mark=next(filter(None, letters)))
    parts, connectors = split_list(text)
    if len(parts) > MAX_ITEMS:
        raise NotUnderstoodError("a long list")
    if len(parts) == 1:
        return _one(text)
    items = [_one(part) for part in parts]
    are_alternatives = set(connectors) == {OR}
    if combined := (union_of(items) if are_alternatives else point_of(items)):
        return combined
    labels = {item.label for item in items}
    is_one_name = labels == {items[0].label} or not any(item.label for item in items[1:])
    is_named = items[0].label and all(item.kind == "equation" for item in items if item.label)
    if is_one_name and is_named:  # x = 1, x = 2; x = 1, 2
        items = [item.items[0] if item.label else item for item in items]
    return Form("list", _flat(items))


def _flat(items: list[Form]) -> tuple[Form, ...]:
    r"""Replace each item that is a list by its items: `1 \pm \sqrt{5}, -2` has three."""
    return tuple(i for item in items for i in (item.items if item.kind == "list" else (item,)))


def _one(text: str) -> Form:
    """Parse the text of one answer. It may be a list only within brackets.

    Raises: NotUnderstoodError: a part of the text is not understood.
    """
    if not text:
        raise NotUnderstoodError("no text")
    if words := _words(text):
        return words
    if belongs := re.fullmatch(rf"({_SYMBOL}) ?\\in(?![A-Za-z]) ?(.*)", text):
        collection = _one(belongs[2])
        if collection.kind not in ("bracket", "set", "union"):
            raise NotUnderstoodError("an element of something that is not a set")
        return replace(collection, label=belongs[1])
    parts, relations = split(text, _RELATIONS)
    if relations:
        return _equation(parts) if set(relations) == {"="} else inequality(parts, relations)
    parts, _ = split(text, (r"\cup",))
    if len(parts) > 1:
        return Form("union", tuple(_one(part) for part in parts))
    if special := _special(text):
        return special
    parts, _ = split(text, (":",))
    if 1 < len(parts) < 5:
        ratio = tuple(_value(part) for part in parts)
        if any(part.kind != "value" for part in ratio):  # Total: 18
            raise NotUnderstoodError("a ratio of other things than values")
        return Form("ratio", ratio)
    if text.count(r"\pm") == 1 and re.search(r"\\pm(?![A-Za-z])", text):
        values = [_value(text.replace(r"\pm", sign)) for sign in "+-"]
        return Form("list", tuple(values))
    return _value(text)


def _special(text: str) -> Form | None:
    """Parse infinity, sets, tuples, intervals, matrices and based numbers; None for others.

    Raises: NotUnderstoodError: a text in brackets, a matrix or a number in a base is malformed.
    """
    if match := re.fullmatch(r"([+-]?) ?\\infty", text):
        return Form("infinity", mark=match[1].replace("+", ""))
    if text == r"\emptyset":
        return Form("set")
    if text == r"\reals":
        return Form("bracket", (Form("infinity", mark="-"), Form("infinity")), mark="()")
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in match[2].split(r"\\") if row.strip()]
        cells = [tuple(_value(cell.strip()) for cell in row.split("&")) for row in rows]
        if len({len(row) for row in cells}) != 1:
            raise NotUnderstoodError("rows of different lengths")
        return Form("matrix", tuple(Form("row", row) for row in cells))
    if match := _BASED.fullmatch(text):
        base = int(match[2] or match[3] or _BASES.get(match[4], 0))
        if not all(int(digit) < base for digit in match[1]):
            raise NotUnderstoodError("digits that this base does not have")
        return Form("based", mark=f"{match[1].lstrip('0')}_{base}")
    if (bracketed := enclosed(text)) is None:
        return None
    opening, inside, closing = bracketed
    parts, _ = split(inside, (",",))
    if len(parts) > MAX_ITEMS:
        raise NotUnderstoodError("a long list")
    if (opening, closing) == (r"\{", r"\}"):
        return Form("set", _flat([_one(part) for part in parts]) if inside else ())
    if opening not in "([" or closing not in ")]":
        return None
    if len(parts) == 1:
        if (opening, closing) != ("(", ")"):
            raise NotUnderstoodError("a list of one")
        return None
    if opening + closing in ("(]", "[)") and len(parts) != 2:
        raise NotUnderstoodError("an interval of more than two ends")
    items = tuple(_one(part) for part in parts)
    if (opening, closing) == ("(", ")") and have_an_order([item.label for item in items]):
        return point_of(items)
    if any(item.kind == "equation" for item in items):  # (y=1, x=2) is not (1, 2)
        raise NotUnderstoodError("an equation in a point")
    return Form("bracket", items, mark=opening + closing)


def _equation(parts: list[str]) -> Form:
    r"""Parse the sides of an equation. `x = 5` gives 5 with the label x, `6 \cdot 7 = 42` gives 42.

    Any other equation is stored as the difference of its sides.

    Raises: NotUnderstoodError: an equation of numbers is not true, or a side has no value.
    """
    if len(parts) == 2 and re.fullmatch(_SYMBOL, parts[1]) and not _LABEL.fullmatch(parts[0]):
        parts = [parts[1], parts[0]]  # 5 = x
    if len(parts) == 2 and _NAMES.fullmatch(parts[0]):  # (x, y) = (3, 4)
        return named_point(parts[0][1:-1].replace(" ", "").split(","), _one(parts[1]))
    is_quantity = bool(_QUANTITY.fullmatch(parts[0]))
    label = parts[0] if is_quantity or _LABEL.fullmatch(parts[0]) else ""
    forms = [_one(part) for part in parts[bool(label) :]]
    nodes = [form.node for form in forms]
    if len(forms) > 1 and (label or not any(map(_has_symbols, forms))):
        for first, second in pairwise(forms):
            if first.kind != "value" or second.kind != "value" or first.unit or second.unit:
                raise NotUnderstoodError("an equation of other things than values")
            if not values_equal(first.node, second.node):  # type: ignore[arg-type]
                raise NotUnderstoodError("an equation that is not true")
    value = forms[-1]
    if label:
        try:
            node = difference(parse_expression(parts[0]), value.node) if value.node else None
        except NotUnderstoodError:
            node = None
        if is_quantity:
            return Form("equation", (value,), node, mark="quantity")
        if value.node is not None and as_written(label) in symbols_of(
            value.node
        ):  # x = 2x + 1 is not a value
            return Form("equation", (), node)
        return Form("equation", (value,), node, label=as_written(label))
    if not any(map(_has_symbols, forms)):
        return value
    if len(nodes) != 2 or nodes[0] is None or nodes[1] is None or any(f.unit for f in forms):
        raise NotUnderstoodError("an equation of other things than two values")
    return Form("equation", (), difference(nodes[0], nodes[1]))


def _value(text: str) -> Form:
    """Parse a single value: words, a mixed number, or an expression with a unit.

    Raises: NotUnderstoodError: a part of the text is not understood.
    """
    if words := _words(text):
        return words
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = (int(match[i]) for i in (2, 3, 4))
        if top >= bottom:
            raise NotUnderstoodError("a mixed number whose fraction is not below 1")
        sign = -1 if match[1] else 1
        return Form("value", node=number(sign * (whole + Fraction(top, bottom))))
    text, unit, scale = split_unit(text)
    if unit is not None and unit.name.startswith("/"):
        raise NotUnderstoodError("a rate of nothing")
    node = _scientific(text) or parse_expression(text)
    if scale != 1:
        node = Node("multiply", (number(scale), node))
    if not symbols_of(node) and value_of(node) is None:
        raise NotUnderstoodError("an expression without a value")
    return Form("value", node=node, unit=unit)


def _scientific(text: str) -> Node | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return None
    if abs(int(match[3])) > _MAX_EXPONENT:
        raise NotUnderstoodError("a number too large to compute")
    return number(Fraction(match[1] + match[2]) * Fraction(10) ** int(match[3]))


def _words(text: str) -> Form | None:
    """Parse an answer in words, which may name a number or a quantity; None for others."""
    if not _WORDS.fullmatch(text):
        return None
    if quantity := _counted_in_words(text):
        return quantity
    node = parse_expression(text) if _MAY_BE_PRODUCT.fullmatch(text) else None
    if (value := number_in_words(text)) is not None:
        node = number(value)
    is_ordinary = text[1:].islower() and (len(text) > 2 or text.lower() == "no")
    return Form("words", mark=text.lower() if is_ordinary else text, node=node)


def _counted_in_words(text: str) -> Form | None:
    """Parse a quantity in words, such as `four days`; return None for other words."""
    words = text.split(" ")
    for index in range(min(len(words) - 1, MAX_WORDS), 0, -1):
        value = number_in_words(" ".join(words[:index]))
        if value is None:
            continue
        try:
            unit, scale = named_unit(" ".join(words[index:]))
        except NotUnderstoodError:  # words like any others
            return None
        return Form("value", node=number(value * scale), unit=unit)
    return None


def _has_symbols(form: Form) -> bool:
    return form.node is not None and bool(symbols_of(form.node))
