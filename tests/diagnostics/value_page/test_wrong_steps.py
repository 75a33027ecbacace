"""What is said of a critic and the first wrong step: marked and unmarked ones are counted apart."""

from __future__ import annotations

import base64
import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.config.fits import ROOT
from vapo.tasks.checked_steps import misconceptions, moves

END = "<eos>"
PROMPT = "1aDbD="
RIGHT = moves()["D", "1"]
WRONG = next(p for p in "12345" if p != RIGHT)
BACK = moves()["D", RIGHT]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts beside each other: here their folder is on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments/value_pages"))
    names = ("describe", "wrong_steps", "draw")
    found = {name: importlib.import_module(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found


def page(*responses: tuple[str, list[float], bool], prompt: str = PROMPT) -> dict[str, Any]:
    """A page of one group: the characters of each response, its values, whether it is right."""
    names = sorted({c for text, _, _ in responses for c in text} | {END})
    rows = []
    for text, values, is_correct in responses:
        ids = [names.index(c) for c in text] + [names.index(END)]
        assert len(values) == len(ids)
        rows.append(
            {
                "ids": base64.b64encode(np.array(ids, "<i4").tobytes()).decode(),
                "columns": {"value": base64.b64encode(np.array(values, "<f4").tobytes()).decode()},
                "is_correct": is_correct,
            }
        )
    tokens = {str(i): name for i, name in enumerate(names)}
    return {"tokens": tokens, "groups": [{"prompt": prompt, "responses": rows}]}


def values(*changes: tuple[int, float], start: float = 0.25, num: int = 11) -> list[float]:
    """`num` values: `start`, and from each place on another one."""
    row = [start] * num
    for place, value in changes:
        row[place:] = [value] * (num - place)
    return row


@pytest.mark.parametrize(
    ("response", "places", "is_right"),
    [
        ("47+8=55;55-3=52. Answer: 52", [6, 14], [True, True]),
        ("47+8=53;53-3=50. Answer: 50", [6], [False]),  # the second digit of the sum
        ("47+8=55;56-3=53. Answer: 53", [6, 9], [True, False]),  # a number copied wrongly
        ("47+8=55;55-3=5. Answer: 5", [6, 14], [True, False]),  # ends too early
        ("47+8=55. Answer: 55", [6], [True]),  # a term left out is no wrong step
    ],
)
def test_a_wrong_sum_is_found_at_its_first_wrong_token(
    scripts: dict[str, ModuleType], response: str, places: list[int], is_right: list[bool]
) -> None:
    steps = list(scripts["wrong_steps"].written_steps("47+8-3=", [*response, END]))
    assert [step.place for step in steps] == places
    assert [step.is_right for step in steps] == is_right
    assert {step.is_marked for step in steps} == {None}


def test_marked_and_unmarked_first_wrong_steps_are_counted_apart(
    scripts: dict[str, ModuleType],
) -> None:
    """aD? is wrong in both; its position is token 2, its check token 3."""
    data = page(
        (f"aD{WRONG}-bD1+;1", values((3, 0.0), (4, -0.75)), False),
        (f"aD{WRONG}+bD1-;1", values((4, 0.5)), False),
        (f"aD{WRONG}+bD1+;1", values((3, -0.5), (4, -0.5)), False),
    )
    found = scripts["wrong_steps"].values_of_steps(data)
    unmarked = "first wrong step, unmarked (+)"
    kinds = ["first wrong step, marked -", unmarked, f"{unmarked}, another mistake"]
    assert list(found) == kinds
    assert found["first wrong step, marked -"].tolist() == [[0.25, 0.0, -0.75]]
    assert found["first wrong step, unmarked (+)"].tolist() == [
        [0.25, 0.25, 0.5],
        [0.25, -0.5, -0.5],
    ]


def test_misconceptions_are_counted_apart_from_other_mistakes(
    scripts: dict[str, ModuleType],
) -> None:
    """The same step from another position is none: there it may even be right."""
    known = misconceptions()["A", "1"]
    other = next(p for p in "12345" if p not in (known, moves()["A", "1"]))
    data = page(
        (f"aA{known}+bD1+;1", values((3, -0.5)), False),
        (f"aA{other}+bD1+;1", values((3, 0.5)), False),
        prompt="1aAbD=",
    )
    found = scripts["wrong_steps"].values_of_steps(data)
    unmarked = "first wrong step, unmarked (+)"
    assert found[f"{unmarked}, a misconception"].tolist() == [[0.25, -0.5, -0.5]]
    assert found[f"{unmarked}, another mistake"].tolist() == [[0.25, 0.5, 0.5]]
    assert len(found[unmarked]) == 2


def test_right_steps_are_split_by_their_check_and_end_at_the_first_wrong_one(
    scripts: dict[str, ModuleType],
) -> None:
    data = page((f"aD{RIGHT}-bD{BACK}+;{BACK}", values((4, -0.5), (8, 0.5)), True))
    found = scripts["wrong_steps"].values_of_steps(data)
    assert found["right steps before it, marked -"].tolist() == [[0.25, 0.25, -0.5]]
    assert found["right steps before it, unmarked (+)"].tolist() == [[-0.5, -0.5, 0.5]]
    assert len(found) == 2


def test_a_task_without_checks_says_so(scripts: dict[str, ModuleType]) -> None:
    """`1a14b43=` swaps 1 and 4, then 4 and 3: a4, b3."""
    data = page(("a4b1;1", values((4, -0.5), num=7), False), prompt="1a14b43=")
    found = scripts["wrong_steps"].values_of_steps(data)
    assert found["first wrong step, a task without checks"].tolist() == [[0.25, -0.5]]
    assert found["right steps before it, a task without checks"].tolist() == [[0.25, 0.25]]


def test_ends_are_those_of_responses_that_say_so_and_that_do_not(
    scripts: dict[str, ModuleType],
) -> None:
    data = page(
        (f"aD{RIGHT}+bD{BACK}+;{BACK}", values((10, 0.75)), True),
        (f"aD{WRONG}-bD1+;1", values((10, -0.75)), False),
        (f"aD{WRONG}+bD1+;1", values((10, 0.5)), False),
        (f"aD{RIGHT}+;{RIGHT}", values((6, 0.125), num=7), False),
    )
    found = scripts["wrong_steps"].values_at_ends(data)
    assert {kind: ends.tolist() for kind, ends in found.items()} == {
        "right": [0.75],
        "wrong, with a check -": [-0.75],
        "wrong, with no check -": [0.5],
        "wrong, without a wrong step": [0.125],
    }


def test_the_picture_is_of_an_unmarked_mistake(scripts: dict[str, ModuleType]) -> None:
    """The third step's position is token 10. Marked ones fall more, and are not chosen."""
    prompt, end = "1aDbDcD=", moves()["D", BACK]
    wrong = next(p for p in "12345" if p != end)
    start = f"aD{RIGHT}+bD{BACK}+cD"

    def falls(to: float) -> list[float]:
        return values((12, to), num=15)

    data = page(
        (f"{start}{end}+;{end}", falls(0.75), True),
        (f"{start}{wrong}-;{wrong}", falls(-1.0), False),
        (f"{start}{wrong}+;{wrong}", falls(-0.5), False),
        (f"{start}{wrong}+;{wrong}", falls(-0.25), False),
        (f"{start}{wrong}+;{wrong}", falls(0.5), False),
        prompt=prompt,
    )
    num, group, right, chosen = scripts["draw"].chosen(data)
    assert num == 3
    assert right is group["responses"][0]
    assert chosen is group["responses"][3], "the median of the three unmarked ones"
