"""The hidden state of each prefix of a state-tracking response."""

from __future__ import annotations

import pytest

from vapo.tasks.state_tracking import oracle_states, state_tracking

PROBLEM = "3a12b45c31="  # 3, 3, 3, 1


@pytest.mark.parametrize(
    ("response", "last"),
    [
        ("", "3 on"),
        ("a", "3 on a+"),
        ("b", "3 on a-"),
        ("a3", "3 on a+1+c"),
        ("a4", "3 on a+1-c"),
        ("a4b", "2 off a+"),
        ("a4b3", "2 off a+1+c"),  # back on the way, once the step is done
        ("a4b3c", "1 on a+"),
        ("x3b", "2 off a+"),  # a wrong label is not forgotten
        ("a12", "3 on a+2-"),  # the swap is repeated
        ("a123", "3 on a+3+"),
        ("a3b3c1;", "end on 0 left"),
        ("a3;", "end on 2 left"),
        ("a3b3c2;", "end off 0 left"),
        ("a3b3c1;1", "right"),
        ("a3b3c1;2", "wrong"),
        ("a3b3c1d", "beyond on 0"),
    ],
)
def test_the_state_of_a_prefix(response: str, last: str) -> None:
    states = oracle_states(PROBLEM, response)
    assert states is not None
    assert len(states) == len(response) + 1
    assert states[-1] == last


def test_no_problem_of_the_task() -> None:
    assert oracle_states("What is 1 + 1?", "2") is None


@pytest.mark.parametrize("repeat_swaps", [False, True])
def test_right_demonstrations_are_on_the_way_to_the_end(repeat_swaps: bool) -> None:
    for row in state_tracking(50, seed=0, max_steps=60, repeat_swaps=repeat_swaps):
        states = oracle_states(row["prompt"], row["demonstration"])
        assert states is not None
        assert states[-1] == "right"
        assert not [state for state in states if " off" in state or "beyond" in state]
