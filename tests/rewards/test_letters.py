r"""The verdict of `math` on expressions with symbols: the same in all letters, and by this rule.

Two expressions are equal if they are so wherever both are real and finite.
"""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vapo.rewards.answer_equality import is_same_answer
from vapo.rewards.answer_points import points, sign_patterns

PAIRS = (
    "rx",
    "ab",
    "az",
    "py",
    "ou",
    "bm",
    "pg",
    "gj",
    "xy",
    "nt",
    (r"\alpha", "k"),
    ("x_1", "y'"),
)
"""The letters that take the places of p and q."""

RIGHT = [
    (r"\sqrt{\frac{p}{q}}", r"\frac{\sqrt{p}}{\sqrt{q}}"),
    (r"\sqrt{p q}", r"\sqrt{p}\sqrt{q}"),
    (r"\sqrt{\frac{1}{p}}", r"\frac{1}{\sqrt{p}}"),
    (r"\ln\frac{p}{q}", r"\ln p-\ln q"),
    (r"\ln(p q)", r"\ln p+\ln q"),
    (r"\ln\frac{1}{p}", r"-\ln p"),
    (r"2\ln p", r"\ln p^2"),
    (r"\ln|p|", r"\frac12\ln p^2"),
    (r"|p q|", r"|p||q|"),
    (r"|p q|", r"\sqrt{p^2 q^2}"),
    (r"|p-q|", r"|q-p|"),
    (r"p-q", r"-q+p"),
    (r"\sqrt{p^2-q^2}", r"\sqrt{p-q}\sqrt{p+q}"),
    (r"\frac{1}{\sqrt{p}+\sqrt{q}}", r"\frac{\sqrt{p}-\sqrt{q}}{p-q}"),
    (r"\sqrt{1-p^2}", r"\sqrt{(1-p)(1+p)}"),
    (r"\arcsin p", r"\frac{\pi}{2}-\arccos p"),
    (r"\sqrt{p-100}", r"\sqrt{-100+p}"),
    (r"\sqrt{-1-p^2}", r"i\sqrt{1+p^2}"),
    (r"\sqrt[3]{p q}", r"\sqrt[3]{p}\sqrt[3]{q}"),
    (r"p^{q}", r"(\frac{1}{p})^{-q}"),
    (r"p+q i", r"q i+p"),
]
WRONG = [
    (r"|p q|", r"p q"),
    (r"\sqrt{p^2 q^2}", r"p q"),
    (r"\left|\frac{p}{q}\right|", r"\frac{p}{q}"),
    (r"|p|q", r"p|q|"),
    (r"|p+q|", r"|p|+|q|"),
    (r"|p-q|", r"|p|-|q|"),
    (r"|p-q|", r"p-q"),
    (r"\sqrt{\frac{1}{(p-q)^2}}", r"\frac{1}{p-q}"),
    (r"\sqrt{p^2}", r"p"),
    (r"(p^2)^{0.5}", r"p"),
    (r"\sqrt{p^2+q^2}", r"p+q"),
    (r"\sqrt{p+q}", r"\sqrt{p}+\sqrt{q}"),
    (r"\ln(p+q)", r"\ln p+\ln q"),
    (r"\ln|p|", r"\ln p"),
    (r"|p|", r"(\sqrt{p})^2"),
    (r"|p|", r"p+0\cdot\sqrt{p}"),
    (r"|p|^{1/3}", r"p^{1/3}"),
    (r"\frac{p+q+|p-q|}{2}", r"p"),
    (r"\frac{p+q+|p-q|}{2}", r"q"),
    (r"\lfloor p\rfloor+\lfloor q\rfloor", r"\lfloor p+q\rfloor"),
    (r"\sqrt{-p^2}", r"i p"),
    (r"p^{q}", r"q^{p}"),
    (r"\arcsin p", r"p"),
]


def renamed(text: str, *names: str) -> str:
    """The text with other symbols in the places of p, q and r."""
    by_letter = dict(zip("pqr", names, strict=False))
    return re.sub(r"\\[A-Za-z]+|[pqr]", lambda m: by_letter.get(m[0], m[0]), text)


@pytest.mark.parametrize("pair", PAIRS, ids="".join)
def test_verdicts_are_those_of_the_rule_in_all_letters(pair: tuple[str, str]):
    for expected, texts in ((True, RIGHT), (False, WRONG)):
        for sides in texts:
            first, second = (renamed(side, *pair) for side in sides)
            assert is_same_answer(first, second) is expected, (first, second)
            assert is_same_answer(second, first) is expected, (second, first)


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(r"({0[0]} + {0[1]})".format),
        two.map(r"({0[0]} - {0[1]})".format),
        two.map(r"({0[0]} \cdot {0[1]})".format),
        two.map(r"\frac{{{0[0]}}}{{{0[1]}}}".format),
        inner.map(r"\sqrt{{{0}}}".format),
        inner.map(r"\ln({0})".format),
        inner.map(r"({0})^2".format),
        inner.map(r"\left(\left|{0}\right|\right)".format),
        inner.map(r"\lfloor {0} \rfloor".format),
    )


EXPRESSIONS = st.recursive(st.sampled_from("pqr7"), larger, max_leaves=4)
REWRITTEN = st.one_of(
    st.tuples(EXPRESSIONS, EXPRESSIONS),
    EXPRESSIONS.map(lambda text: (text, rf"\sqrt{{({text})^2}}")),
    st.tuples(EXPRESSIONS, EXPRESSIONS).map(
        lambda ab: (rf"\sqrt{{{ab[0]} \cdot {ab[1]}}}", rf"\sqrt{{{ab[0]}}} \cdot \sqrt{{{ab[1]}}}")
    ),
    st.tuples(EXPRESSIONS, EXPRESSIONS).map(
        lambda ab: (rf"\ln(\frac{{{ab[0]}}}{{{ab[1]}}})", rf"\ln({ab[0]}) - \ln({ab[1]})")
    ),
)
SYMBOLS = st.permutations(["a", "b", "k", "m", "t", "x", "z", r"\beta", r"\theta", "v_0", "A", "Q"])


@given(sides=REWRITTEN, known=st.sampled_from(RIGHT + WRONG), names=SYMBOLS)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_renaming_letters_changes_no_verdict(
    sides: tuple[str, str], known: tuple[str, str], names: list[str]
):
    for first, second in (sides, known):
        expected = is_same_answer(first, second)
        assert is_same_answer(renamed(first, *names), renamed(second, *names)) is expected


@pytest.mark.parametrize("num", [1, 2, 3])
def test_few_symbols_have_all_signs_in_both_orders(num: int):
    """At |p| < |q| and |p| > |q| for every pattern of signs, near zero and far from it."""
    assert set(sign_patterns(num)) == set(product((1, -1), repeat=num))
    found = {
        (tuple(1 if x > 0 else -1 for x in point), abs(point[0]) < abs(point[-1]))
        for point in points(num)
    }
    assert len(found) == 2**num * (2 if num > 1 else 1)
    sizes = [abs(x) for point in points(num) for x in point]
    assert min(sizes) < 1e-4
    assert max(sizes) > 1e12


def test_more_symbols_have_a_bounded_number_of_points():
    assert len(points(40)) == 80
    assert all(len(set(map(abs, point))) == 40 for point in points(40))
    product_of_all = r"a \cdot b \cdot c \cdot d \cdot f"
    assert not is_same_answer(f"|{product_of_all}|", product_of_all)
