"""Worked sums: their demonstrations add up, and the states of what a response has written."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.tasks.generated import generate
from vapo.diagnostics.oracle import state_values
from vapo.errors import UserError
from vapo.rewards.verifiers import make_regex
from vapo.tasks.worked_sums import oracle_states, worked_sums

PROBLEM = "47+8-3-9="  # 55, 52, 43
RIGHT = "47+8=55;55-3=52;52-9=43. Answer: 43"


def states_of(response: str, problem: str = PROBLEM) -> list[str]:
    states = oracle_states(problem, response)
    assert states is not None
    assert len(states) == len(response) + 1
    return states


def last_state(response: str) -> str:
    return states_of(response)[-1]


def test_demonstrations_add_up() -> None:
    for row in worked_sums(300, seed=0):
        assert re.fullmatch(r"\d+([+-]\d)+=", row["prompt"])
        first, *terms = re.findall(r"[+-]?\d+", row["prompt"])
        total, expected = int(first), []
        for term in terms:
            before, total = total, total + int(term)
            assert 0 <= total <= 99
            expected.append(f"{before}{term}={total}")
        assert row["demonstration"] == f"{';'.join(expected)}. Answer: {total}"
        assert row["answer"] == str(total)


def test_slips_are_off_by_1_to_9_and_nothing_else() -> None:
    """Problems and answers are those without slips; so many steps slip, and the next goes on."""
    plain, slipped = (worked_sums(600, seed=0, slip_rate=rate) for rate in (0.0, 0.25))
    errors = []
    for right, row in zip(plain, slipped, strict=True):
        assert (row["prompt"], row["answer"]) == (right["prompt"], right["answer"])
        worked, _, answer = row["demonstration"].partition(". Answer: ")
        before = re.findall(r"\d+", row["prompt"])[0]
        for step in worked.split(";"):
            first, term, found = re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", step).groups()  # type: ignore[union-attr]
            assert first == before, "it goes on from what it wrote"
            assert 0 <= int(found) <= 99
            errors.append(int(found) - int(first) - int(term))
            before = found
        assert answer == before
    slips = [error for error in errors if error]
    assert set(slips) == set(range(-9, 10)) - {0}
    assert 0.18 < len(slips) / len(errors) < 0.25  # some would leave the range later: no slips


def test_terms_and_sums_cover_their_ranges() -> None:
    rows = worked_sums(600, seed=1, min_terms=3, max_terms=5, max_term=20, max_total=40)
    numbers = [[int(n) for n in re.findall(r"\d+", row["prompt"])] for row in rows]
    assert {len(n) for n in numbers} == {3, 4, 5}
    assert {n[0] for n in numbers} == set(range(1, 41))
    assert {term for n in numbers for term in n[1:]} == set(range(1, 21))
    sums = {int(n) for row in rows for n in re.findall(r"=(\d+)", row["demonstration"])}
    assert sums == set(range(41))
    signs = "".join(row["prompt"] for row in rows)
    assert 0.4 < signs.count("-") / (signs.count("-") + signs.count("+")) < 0.6


def test_a_row_depends_on_seed_and_index_only() -> None:
    assert worked_sums(5, seed=1) == worked_sums(50, seed=1)[:5]
    assert worked_sums(50, seed=1) != worked_sums(50, seed=2)
    assert len({row["prompt"] for row in worked_sums(200, seed=1)}) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_terms": 9, "max_terms": 3}, "options.min_terms is 9, above options.max_terms, 3"),
        ({"min_terms": 1}, "options.min_terms is 1: give a number from 2 to 1000"),
        ({"max_term": 0}, "options.max_term is 0: give a number from 1 to 49"),
        # 12 + 12 is above 20, and 12 - 12 - 12 below 0: no sign would do
        ({"max_term": 12, "max_total": 20}, "options.max_term is 12: give a number from 1 to 10"),
        ({"max_total": 1}, "options.max_total is 1"),
        ({"slip_rate": 1.5}, "options.slip_rate is 1.5: give a share from 0 to 1"),
        (
            {"min_steps": 3},
            "options.min_steps: the task worked_sums has no such option; did you mean",
        ),
    ],
)
def test_an_option_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate("worked_sums", options)


@pytest.mark.parametrize(
    ("response", "last"),
    [
        ("", "3 on copy"),
        ("4", "3 on copy"),
        ("5", "3 off"),
        ("47+", "3 on term"),
        ("47-", "3 off"),
        ("47+8", "3 on term"),
        ("47+8=", "3 on sum"),
        ("47+8=5", "3 on sum+"),
        ("47+8=54", "3 off"),
        ("47+8=55", "3 on done"),
        ("47+8=550", "3 off"),
        ("47+8=55;", "2 on copy"),
        ("47+8=54;", "2 off"),
        ("47+8=54;54-3=51;", "1 off"),
        ("47+8=54;54-3=52;", "1 on copy"),  # a second mistake undoes the first
        ("47+8=55;52-9=", "2 off"),  # a term is left out
        ("47+8=55;52-9=43.", "answer off 1"),
        (RIGHT.partition(".")[0], "1 on done"),
        (RIGHT.partition(".")[0] + ".", "answer on"),
        (RIGHT.partition(".")[0] + ";", "beyond"),
        (RIGHT.partition(".")[0] + ";43-1=42. Answer: 43", "right"),
        (RIGHT[:-1], "answer on"),
        (RIGHT, "right"),
        (RIGHT + "3", "answer off 0"),
        (RIGHT + ". Answer: 42", "answer off 0"),
        (RIGHT.replace("Answer: 43", "Answer: 44"), "answer off 0"),
        ("47+8=54;54-3=51;51-9=42. Answer: 4", "answer off 0"),  # the answer's digit by chance
        ("47+8=54;54-3=51;51-9=42. Answer: 43", "right"),
        (". Answer: 43", "right"),  # a guess
        (". Answer: ", "answer off 2"),
    ],
)
def test_the_state_of_a_prefix(response: str, last: str) -> None:
    assert last_state(response) == last


@pytest.mark.parametrize(
    "response",
    [
        ";" * 5000,
        "." * 5000,
        "=" * 5000,
        "47+8=" + "5" * 5000,
        "47+8=\u0665\u0665;",  # digits of another script
        "47+8=5\n5;\x00\ud800",
        "Answer: " * 500,
        "\U0001f600;47+8=55;",
    ],
)
def test_a_hostile_response_has_states_and_is_not_on_its_way(response: str) -> None:
    assert " on" not in last_state(response)


def test_the_problem_may_have_text_around_it() -> None:
    assert states_of("4+3=7", "What is 4+3=?")[-1] == "1 on done"
    assert oracle_states("3a12b45c31=", "a3") is None
    assert oracle_states("-4+3=", "a3") is None  # first numbers have no sign


def test_right_demonstrations_are_on_the_way_to_the_end() -> None:
    for row in worked_sums(100, seed=0):
        states = oracle_states(row["prompt"], row["demonstration"])
        assert states is not None
        assert states[-1] == "right"
        assert not [state for state in states if "off" in state or state == "beyond"]
        left = [int(state.split()[0]) for state in states if state[0].isdigit()]
        assert all(a - b in (0, 1) for a, b in pairwise(left))


def test_an_oracle_by_the_states_knows_the_mistake() -> None:
    wrong = "47+8=54;54-3=51;51-9=42. Answer: 42"
    rows = [states_of(response) for response in (RIGHT, wrong)]
    training = [rows[0], rows[1]] * 50
    returns = [[1.0] * len(rows[0]), [-1.0] * len(rows[1])] * 50
    right_values, wrong_values = state_values(training, returns, rows)
    place = wrong.index("54;") + 2  # the wrong digit is written
    assert right_values[place - 1] == pytest.approx(0.0, abs=1e-6)
    assert wrong_values[place - 1] == pytest.approx(0.0, abs=1e-6)
    assert wrong_values[place] == pytest.approx(-1.0, abs=0.02)
    assert right_values[place] > 0


def test_the_verifier_reads_the_answer_at_the_end() -> None:
    judge = make_regex(r"Answer: (\d+)$")
    assert judge(RIGHT, "43", {}).is_correct
    for wrong in (RIGHT + "0", RIGHT + ".", RIGHT.replace("Answer: 43", "43"), "Answer: 43; no"):
        assert not judge(wrong, "43", {}).is_correct
