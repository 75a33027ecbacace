r"""Expressions that differ in one case alone, at whole numbers alone, or by very little."""

from __future__ import annotations

import pytest

from vapo.rewards.answer_equality import is_same_answer

UNEQUAL_IN_ONE_CASE = [
    (r"|x-1|+|x-2|", r"|2x-3|"),  # between 1 and 2
    (r"|x-3|+|x-4|", r"|2x-7|"),
    (r"\sqrt{(x-3)^2}+\sqrt{(x-5)^2}", r"\sqrt{(2x-8)^2}"),
    (r"|x^2-4|+|x^2-5|", r"|2x^2-9|"),
    (r"|x^2-10^{30}|", r"10^{30}-x^2"),
    (r"|a-b|+|a-c|", r"|2a-b-c|"),
    (r"|e^x-5|+|e^x-6|", r"|2e^x-11|"),
    (r"|\log_2 x-5|+|\log_2 x-6|", r"|2\log_2 x-11|"),
    (r"\ln(\ln a)", r"\sqrt{(\ln(\ln a))^2}"),
    (r"1-\arcsin z", r"|1-\arcsin z|"),
    (r"\arctan x+\arctan\left(\frac{1}{x}\right)+y", r"\frac{\pi}{2}+y"),  # where x is negative
    (r"\lfloor x+\frac{1}{100}\rfloor", r"\lfloor x\rfloor"),
    (r"\lfloor 2x\rfloor", r"\lfloor x\rfloor+\lfloor x+\frac13\rfloor"),
    (r"\lceil x\rceil", r"\lfloor x\rfloor+1"),  # at whole numbers
    (r"\lceil a+b\rceil", r"\lfloor a+b\rfloor+1"),
    (r"\lfloor \frac{n}{2}\rfloor", r"\lceil \frac{n}{2}\rceil-1"),
    (r"\lfloor x\rfloor+\lfloor -x\rfloor", "-1"),
]
UNEQUAL_BY_LITTLE = [
    (r"\pi^{-400}", r"\pi^{-500}"),
    (r"e^{-500}", "0"),
    (r"\frac{\sqrt2}{10^{190}}", r"\frac{\sqrt3}{10^{190}}"),
    (r"\frac{\sqrt2+1}{10^{190}}", r"\frac{\sqrt3+1}{10^{190}}"),
    (r"\frac{1}{\sqrt{2}\cdot 100!^2}", r"\frac{1}{\sqrt3 \cdot 100!^2}"),
    (r"\sqrt{10^{400}+1}-10^{200}", "0"),
    (r"\frac{x}{10^{190}}", r"\frac{2x}{10^{190}}"),
    (r"x", r"x+3^{-400}"),
    (r"x^{400}+1+x^{-400}", r"x^{400}+2+x^{-400}"),
    (r"(\frac{x}{y})^{400}+(\frac{y}{x})^{400}+1", r"(\frac{x}{y})^{400}+(\frac{y}{x})^{400}+2"),
]
EQUAL = [
    (r"|x-1|+|x-2|", r"|2-x|+|1-x|"),
    (r"|x-1||x+1|", r"|x^2-1|"),
    (r"\sqrt{x^2-4x+4}", r"|x-2|"),
    (r"\sqrt{\frac{a}{b}}", r"\frac{\sqrt{ab}}{|b|}"),
    (r"y=2|x|+2", r"2|x|-y=-2"),
    (r"\lfloor x\rfloor+1", r"\lfloor x+1\rfloor"),
    (r"\lceil -x\rceil", r"-\lfloor x\rfloor"),
    (r"\lfloor 2x\rfloor", r"\lfloor x\rfloor+\lfloor x+\frac12\rfloor"),
    (r"\lfloor\sqrt{x^2}\rfloor", r"\lfloor|x|\rfloor"),
    (r"\lfloor \sqrt{2}\sqrt{18} \rfloor", "6"),
    (r"\lceil \sqrt{2}\sqrt{18} \rceil", "6"),
    (r"\sin\pi", "0"),
    (r"\sqrt2\sqrt3-\sqrt6", "0"),
    (r"\sin\pi+x", "x"),
    (r"(x+y)^{400}", r"(y+x)^{400}"),
]


@pytest.mark.parametrize(("first", "second"), UNEQUAL_IN_ONE_CASE)
def test_one_case_is_enough_to_differ(first: str, second: str):
    assert not is_same_answer(first, second)
    assert not is_same_answer(second, first)


@pytest.mark.parametrize(("first", "second"), UNEQUAL_BY_LITTLE)
def test_what_is_small_is_not_nothing(first: str, second: str):
    assert not is_same_answer(first, second)
    assert not is_same_answer(second, first)


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_equal_in_all_cases_is_equal(first: str, second: str):
    assert is_same_answer(first, second)
    assert is_same_answer(second, first)
