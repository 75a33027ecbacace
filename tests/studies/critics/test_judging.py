"""What values know of stored responses, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vapo.studies.critics.judging import Judge, KnownResponse, indices_of_steps

RESPONSES = [
    KnownResponse("p", 1.0, np.array([0.0, 1.0]), [0], ["1 on", "1 on"]),
    KnownResponse("p", -1.0, np.array([0.0, -1.0]), [0], ["1 on", "1 on"]),
    KnownResponse("q", -1.0, np.array([0.0, -1.0]), [0], ["1 on", "1 on"]),
]
VALUES = [np.array([0.5, 0.5]), np.array([0.5, 0.5]), np.array([0.0, -0.5])]


def test_shares_of_returns_and_of_the_truth() -> None:
    figures = Judge(RESPONSES).measure(VALUES, num_resamples=10)
    # returns 1 1 -1 -1 -1 -1: variance 8/9; what is left .5 .5 -1.5 -1.5 -1 -.5: 6.25/6 - (3.5/6)^2
    assert figures["explained_variance"].value == pytest.approx(0.2109375)
    # truth 0 1 0 -1 0 -1: variance 17/36; what is left -.5 .5 -.5 -1.5 0 -.5: 3.25/6 - (2.5/6)^2
    assert figures["truth"].value == pytest.approx(1 - 13.25 / 17)
    # from each prompt's mean: 2 + 0.5 of the truth, 2 + 0.125 of what is left
    assert figures["truth_within_prompts"].value == pytest.approx(1 - 2.125 / 2.5)
    # from each response's mean: three times 0.5, and 0.5 + 0.5 + 0.125
    assert figures["truth_within_responses"].value == pytest.approx(1 - 1.125 / 1.5)
    assert figures["mistakes_named"].is_unknown, "no response has a mistake"


def test_an_oracle_knows_all_but_the_returns_noise() -> None:
    judge = Judge(RESPONSES)
    figures = judge.measure([response.oracle for response in RESPONSES], num_resamples=10)
    assert [figures[name].value for name in figures if name.startswith("truth")] == [1, 1, 1]
    # what is left of the returns is 1 0 -1 0 -1 0: 3/6 - (1/6)^2
    assert figures["explained_variance"].value == pytest.approx(1 - (17 / 36) / (8 / 9))


def test_intervals_are_over_prompts() -> None:
    """Alike prompts leave nothing open, and different ones do, however many responses they have."""
    alike = [
        KnownResponse(str(i), r.reward, r.oracle, [0], r.states)
        for i in range(8)
        for r in RESPONSES[:2]
    ]
    figure = Judge(alike).measure(VALUES[:2] * 8)["explained_variance"]
    assert figure == pytest.approx((figure.value,) * 3)
    different = [
        KnownResponse(
            str(i), 1.0 if i < 4 else -1.0, np.array([0.0, 1.0]), [0], RESPONSES[0].states
        )
        for i in range(8)
    ]
    values = [np.array([0.2 * i - 1, 0.1]) for i in range(8)]
    low, high = Judge(different).measure(values)["explained_variance"][1:]
    assert high - low > 0.1


STATES = ["3 on", "3 on", "2 off", "2 off", "1 off", "1 off"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([0.8, 0.8, 0.1, 0.1, 0.0, 0.0], True),  # falls by 0.7 over the first step, then by 0.1
        ([0.8, 0.8, 0.7, 0.7, 0.0, 0.0], False),
        ([0.1, 0.1, 0.2, 0.2, 0.9, 0.9], False),  # the least rise is no fall
    ],
)
def test_the_first_wrong_step_is_where_values_fall_most(values: list[float], named: bool) -> None:
    responses = [
        KnownResponse(str(i), -1.0, np.linspace(1, -1, 6), [0, 2, 4], STATES) for i in range(8)
    ]
    assert responses[0].wrong_step == 0
    assert responses[0].names_mistake(np.array(values)) is named
    right = KnownResponse("right", 1.0, np.ones(6), [0, 2, 4], ["3 on"] * 6)
    judge = Judge([*responses, right])
    figure = judge.measure([*[np.array(values)] * 8, np.ones(6)])["mistakes_named"]
    # Wilson's interval of 8 of 8: from 8 / (8 + 1.96^2) to 1
    limits = (0.6756, 1.0) if named else (0.0, 0.3244)
    assert figure == pytest.approx((float(named), *limits), abs=1e-4)


def test_a_mistake_in_the_last_step_has_no_fall_behind_it() -> None:
    states = ["3 on", "3 on", "2 on", "2 on", "1 on", "1 off"]
    response = KnownResponse("p", -1.0, np.linspace(1, -1, 6), [0, 2, 4], states)
    assert response.wrong_step is None
    assert response.names_mistake(np.zeros(6)) is None


def test_a_step_begins_after_each_end_but_the_last_token() -> None:
    assert indices_of_steps([7, 1, 7, 8, 1], {1}) == [0, 2], "no step begins behind the response"
