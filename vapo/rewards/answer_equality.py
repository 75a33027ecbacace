"""Decides whether a response's answer equals the reference, and whether two answers vote alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from vapo.rewards.answer_forms import FLIPPED, Form
from vapo.rewards.answer_text import Node, number, symbols_of
from vapo.rewards.answer_values import constant_ratio, value_of, values_equal
from vapo.rewards.answer_words import DEGREES, DOLLARS, PERCENT, RADIANS, Unit
from vapo.rewards.answers import parse_answer
from vapo.rewards.hostile_text import UnsafeTextError

_PI = Node("constant", value="pi")
_RANGE = re.compile(r"[0-9]+-[0-9]+|[0-9]+([-/])[0-9]+\1[0-9]+")
"""A reference that is a range or a date, and so neither a difference nor a quotient."""


def is_same_answer(reference: str, response: str, *, counts_percent: bool = False) -> bool:
    """Whether the whole of the response's answer equals the reference.

    A unit or a name that the reference has may be left out. A unit that the reference lacks may be
    added if it does not change the number: `42 apples` is 42, `42 million` and `42 dozen` are not.
    Answers that are not understood, or are too large to compute, equal only their own spelling.

    Args:
        counts_percent: whether `25%` equals the reference 25, too, and not only 0.25.
    """
    gold, answer = parse_answer(reference), parse_answer(response)
    if gold.spelling and gold.spelling == answer.spelling:
        return True
    if _RANGE.fullmatch(gold.spelling):
        return False
    if answer.mark == "quantity" and gold.kind == "value":  # m + n = 42
        answer = answer.items[0]
    try:
        return _same(gold, answer) or (counts_percent and _same_percentage(gold, answer))
    except (UnsafeTextError, RecursionError):  # too large to compute, or a product of hundreds
        return False


def same_both_ways(first: str, second: str) -> bool:
    r"""Whether two responses give the same answer: each equals the other taken as the reference.

    So `50\%` equals `0.5`, but not 50, because 50 does not equal a reference `0.5`. Units and
    letters must be alike: without a reference nothing says that 5 means 5 cm and not 5 m, or that
    12 is choice C.
    """
    forms = parse_answer(first), parse_answer(second)
    if _units(forms[0]) != _units(forms[1]) or _letter(forms[0]) != _letter(forms[1]):
        return False
    return is_same_answer(first, second) and is_same_answer(second, first)


def vote_classes(answers: Sequence[str]) -> list[int]:
    """Return for each answer the index of the first answer that is the same.

    Of k answers at most k(k-1)/2 pairs are compared.
    """
    firsts: list[int] = []
    classes = []
    for index, answer in enumerate(answers):
        first_equal = next((i for i in firsts if same_both_ways(answers[i], answer)), None)
        if first_equal is None:
            firsts.append(index)
            first_equal = index
        classes.append(first_equal)
    return classes


def _same_percentage(gold: Form, answer: Form) -> bool:
    """Whether the answer is a percentage whose number is the reference: 25% for the reference 25.

    It is False for a reference whose absolute value is at most 1, which is read as a fraction: 0.5%
    is not 0.5, and 1% is not 1.
    """
    if answer.kind == "equation" and answer.label:
        answer = answer.items[0]
    if answer.unit != PERCENT or gold.kind != "value" or gold.unit is not None:
        return False
    value = value_of(gold.expression)
    is_counted = isinstance(value, Fraction) and abs(value) > 1
    return is_counted and values_equal(gold.expression, answer.expression)


def _same(gold: Form, answer: Form) -> bool:
    """Whether two parsed answers are equal. The forms' kinds decide how they are compared."""
    kinds = {gold.kind, answer.kind}
    if "unknown" in kinds:
        return False
    if "choice" in kinds:
        return _same_choice(gold, answer)
    if "equation" in kinds:
        return _same_equation(gold, answer)
    if gold.label and answer.label and gold.label != answer.label:
        return False
    if "words" in kinds:
        return _same_words(gold, answer)
    is_list = kinds <= {"list", "set"} and (len(kinds) == 1 or len(answer.items) > 1)
    if is_list or kinds == {"union"}:
        return _same_in_any_order(gold, answer)
    if len(kinds) > 1:
        return False
    if gold.kind == "value":
        return _same_value(gold, answer)
    if gold.kind == "relation":
        return _same_relation(gold, answer)
    return (
        gold.mark == answer.mark
        and len(gold.items) == len(answer.items)
        and all(_same(a, b) for a, b in zip(gold.items, answer.items, strict=True))
    )


def _same_equation(gold: Form, answer: Form) -> bool:
    """Whether two answers are equal, at least one of which is an equation: `x = 5` equals 5."""
    if gold.kind != "equation":
        if _is_choice(gold) and re.fullmatch("[A-Z]", answer.label):  # A = B is two choices
            return False
        return bool(answer.label) and _same(gold, answer.items[0])
    if answer.kind != "equation":
        return bool(gold.label) and _same(gold.items[0], answer)
    if gold.label and gold.label == answer.label:
        return _same(gold.items[0], answer.items[0])
    is_solved = gold.label not in ("", "y", "z")  # 2x = 10 restates the problem that x = 5 solves
    if is_solved or (gold.label and gold.items[0].node and not symbols_of(gold.items[0].node)):
        return False
    if gold.node is None or answer.node is None:
        return False
    return constant_ratio(gold.node, answer.node) is not None


def _is_choice(form: Form) -> bool:
    node = form.node
    return node is not None and node.kind == "symbol" and str(node.value).isupper()


def _same_choice(gold: Form, answer: Form) -> bool:
    """Whether two answers, one of them a choice with a text, are equal: `(C) 12` equals C, and
    12."""
    if _letter(gold) and _letter(answer):
        texts = [form.items[0] for form in (gold, answer) if form.items]
        return _letter(gold) == _letter(answer) and (len(texts) < 2 or _same(*texts))
    if gold.kind == "choice":
        return _same(gold.items[0], answer)
    return _same(gold, answer.items[0])


def _letter(form: Form) -> str:
    if form.kind == "choice":
        return form.mark
    return str(form.node.value) if form.node is not None and _is_choice(form) else ""


def _units(form: Form) -> frozenset[str]:
    """Return the names of the units in an answer that say what it counts or measures.

    Dollars and `unit` are left out, because they say no more than the number.
    """
    unit_names = {form.unit.name} if form.unit is not None and form.unit.may_be_added else set()
    free = {DOLLARS.name, "unit", "unit^2", "unit^3"}
    return frozenset(unit_names - free).union(*map(_units, form.items))


def _same_words(gold: Form, answer: Form) -> bool:
    """Whether two answers in words are spelled alike: `no` is not `on`.

    If one of them is a value, the words are read as a product of symbols, which must equal it.
    """
    if gold.kind == answer.kind:
        return gold.mark == answer.mark
    if {gold.kind, answer.kind} != {"words", "value"} or gold.unit or answer.unit:
        return False
    if gold.node is None or answer.node is None:
        return False
    return values_equal(gold.node, answer.node)


def _same_value(gold: Form, answer: Form) -> bool:
    """Whether two values are equal. A unit may be missing if it does not change the number."""
    expected, response = gold.expression, answer.expression
    if gold.unit == answer.unit:
        return values_equal(expected, response)
    if gold.unit is not None and answer.unit is not None:
        return False
    if gold.unit is None:
        if _may_be_added(answer.unit, expected) and values_equal(expected, response):
            return True
        return values_equal(expected, _without_unit(answer))
    return values_equal(expected, response) or values_equal(_without_unit(gold), response)


def _may_be_added(unit: Unit | None, gold: Node) -> bool:
    has_pi = "pi" in symbols_of(gold, "constant")
    if unit in (DEGREES, RADIANS):
        return has_pi == (unit == RADIANS)
    return unit is not None and unit.may_be_added


def _without_unit(form: Form) -> Node:
    """Return a percentage or an angle in degrees as an expression without a unit.

    With another unit the expression is a symbol, which equals no number.
    """
    if form.unit == PERCENT:
        return Node("multiply", (number(Fraction(1, 100)), form.expression))
    if form.unit == DEGREES:
        return Node("multiply", (Node("divide", (_PI, number(180))), form.expression))
    return Node("symbol", value=f"unit {form.unit and form.unit.name}")


def _same_relation(gold: Form, answer: Form) -> bool:
    """Whether two inequalities are equal, up to a constant factor, which may flip the sign."""
    ratio = constant_ratio(gold.expression, answer.expression)
    if ratio is None:
        return False
    return answer.mark == (gold.mark if ratio > 0 else FLIPPED[gold.mark])


def _same_in_any_order(gold: Form, answer: Form) -> bool:
    """Whether two lists, sets or unions have equal items, in any order."""
    reference_items, response_items = list(gold.items), list(answer.items)
    names = [{item.label for item in items} for items in (reference_items, response_items)]
    if (
        names[0] != names[1] and max(map(len, names)) > 1
    ):  # x = 1, y = 2 has an order, but 1, 2 does not
        return False
    if "set" in (gold.kind, answer.kind):
        reference_items, response_items = _distinct(reference_items), _distinct(response_items)
    if len(reference_items) != len(response_items):
        return False
    for item in reference_items:
        match = next((other for other in response_items if _same(item, other)), None)
        if match is None:
            return False
        response_items.remove(match)
    return True


def _distinct(items: list[Form]) -> list[Form]:
    distinct: list[Form] = []
    for item in items:
        if not any(_same(other, item) for other in distinct):
            distinct.append(item)
    return distinct
