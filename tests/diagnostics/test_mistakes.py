"""Which steps lose value: the truth's first clear fall, and the critic's largest one."""

from __future__ import annotations

import pytest

from vapo.diagnostics.value_truth.mistakes import (
    difference_in_errors,
    first_clear_fall,
    largest_fall,
    mistake_sums,
    pair_sums,
)
from vapo.diagnostics.value_truth.points import TruthPoint

OUTCOMES = (-1.0, 1.0)


def steps(counts: list[int], values: list[float | None], k: int = 8, row: int = 0):
    """A point a step: so many of K continuations were right, and the critic's value."""
    return [
        TruthPoint(row, i, (1.0,) * n + (-1.0,) * (k - n), "p", len(counts), value)
        for i, (n, value) in enumerate(zip(counts, values, strict=True))
    ]


def test_the_rise_in_standard_errors_by_hand() -> None:
    """8 and 0 of 8 right: shares 0.9 and 0.1 with one more of each, variances 4 * 0.09 / 10."""
    before, after = steps([8, 0], [0.0, 0.0])
    assert difference_in_errors(before, after, OUTCOMES) == pytest.approx(
        -1.6 / (2 * 0.36 / 10) ** 0.5
    )


def test_other_returns_have_the_pooled_variance_as_one_draw() -> None:
    """Variances 0 and 4/3 of 4 returns, pooled 2/3: (0 + 2/3) / 4 and (4 + 2/3) / 4, over 4."""
    before, after = steps([4, 2], [0.0, 0.0], k=4)
    wanted = -1.0 / ((2 / 3) / 16 + (4 + 2 / 3) / 16) ** 0.5
    assert difference_in_errors(before, after, None) == pytest.approx(wanted)


def test_the_first_fall_that_is_clear() -> None:
    assert first_clear_fall(steps([8, 7, 8, 1, 0], [None] * 5), OUTCOMES) == 2
    assert first_clear_fall(steps([8, 7, 6, 5, 4], [None] * 5), OUTCOMES) is None
    assert first_clear_fall(steps([1, 8], [None] * 2), OUTCOMES) is None
    assert first_clear_fall(steps([8], [None]), OUTCOMES) is None


def test_more_steps_need_a_clearer_fall() -> None:
    """8 to 4 of 8: 2.2 standard errors; enough for one step, too little for one of ten."""
    assert first_clear_fall(steps([8, 4], [None] * 2), OUTCOMES) == 0
    assert first_clear_fall(steps([8] * 10 + [4], [None] * 11), OUTCOMES) is None


def test_the_largest_fall_of_the_critic() -> None:
    assert largest_fall(steps([8] * 4, [0.5, 0.4, -0.3, -0.6])) == (1, pytest.approx(0.7))
    assert largest_fall(steps([8] * 3, [0.1, 0.1, 0.2])) is None
    assert largest_fall(steps([8] * 3, [None] * 3)) is None


def test_precision_and_recall_by_hand() -> None:
    """Three responses have a clear fall; the critic's three largest falls name two of them, and
    one that has none."""
    found_it = steps([8, 8, 0], [0.5, 0.5, -0.5], row=0)
    elsewhere = steps([8, 8, 0], [0.5, 0.4, 0.4], row=1)  # too small to be among the three
    found_too = steps([8, 0, 0], [0.5, -0.1, -0.1], row=2)
    false_alarm = steps([8, 8, 8], [0.5, -0.4, 0.5], row=3)
    first, second = mistake_sums([[found_it, elsewhere], [found_too, false_alarm]], OUTCOMES)
    assert 1.5 < first.pop("found_by_exact") <= 2
    assert second.pop("found_by_exact") > 0.9, "8 of 8, then none: no other fall is near it"
    assert first == {"with_mistake": 2, "found": 1, "named": 1, "named_right": 1}
    assert second == {"with_mistake": 1, "found": 1, "named": 2, "named_right": 1}


def test_a_critic_without_falls_names_nothing() -> None:
    (sums,) = mistake_sums([[steps([8, 0], [0.1, 0.1])]], OUTCOMES)
    assert sums == {
        "with_mistake": 1, "found": 0, "found_by_exact": 1, "named": 0, "named_right": 0
    }  # fmt: skip


def test_pairs_whose_values_differ_clearly() -> None:
    """Of the six pairs of 8, 8, 0, 4 right of 8: both 8s against 0 and against 4, and 0 against 4
    are clear; one of these five is the wrong way round and one is a tie."""
    found = pair_sums([steps([8, 8, 0, 4], [0.5, 0.2, -0.5, 0.2])], OUTCOMES)
    assert found["pairs"] == 5
    assert found["pairs_right"] == 4.5
