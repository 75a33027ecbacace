"""A user's function as a verifier: what it returns, and signatures of other frameworks."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.rollouts_for_tests import rollout, scorer
from vapo.errors import UserError
from vapo.rewards.verifier_code import judgement_of, make_python
from vapo.rewards.verifiers import Judgement, Verifier

TRL = """\
def accuracy(prompts, completions, solution, **kwargs):
    return [1.0 if c == s else 0.0 for c, s in zip(completions, solution)]
"""
VERL = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str == ground_truth else 0.0
"""


@pytest.mark.parametrize(
    ("result", "correct", "expected"),
    [
        (True, 1.0, Judgement(True)),
        (False, 1.0, Judgement(False)),
        (np.True_, 1.0, Judgement(True)),
        (1.0, 1.0, Judgement(True, 1.0)),
        (1, 1.0, Judgement(True, 1.0)),
        (0, 1.0, Judgement(False, 0.0)),
        (0.5, 1.0, Judgement(False, 0.5)),
        (0.5, 0.5, Judgement(True, 0.5)),
        (-1.0, 1.0, Judgement(False, -1.0)),
        (1.5, 1.0, Judgement(True, 1.5)),
        (sum([0.1] * 10), 1.0, Judgement(True, sum([0.1] * 10))),  # 0.9999999999999999
        (0.99, 1.0, Judgement(False, 0.99)),
        (np.float32(1.0), 1.0, Judgement(True, 1.0)),
        (np.array(0.25), 1.0, Judgement(False, 0.25)),
        ((True, 0.25), 1.0, Judgement(True, 0.25)),
        ((False, 2), 1.0, Judgement(False, 2.0)),
    ],
)
def test_a_number_is_a_reward_and_full_marks_are_correct(
    result: Any, correct: float, expected: Judgement
):
    found = judgement_of(result, correct=correct)
    assert found == expected
    assert type(found.is_correct) is bool
    assert found.reward is None or type(found.reward) is float


@pytest.mark.parametrize(
    "result",
    [None, "1.0", {"score": 1.0}, [1.0], (1.0, True), (True, "1"), (True, 1.0, 2), 1j, b"1",
     np.array([1.0, 2.0])],
)  # fmt: skip
def test_anything_else_is_one_error(result: Any):
    with pytest.raises(TypeError, match=r"returned .*, not a bool, a number or \(bool, number\)"):
        judgement_of(result, correct=1.0)


def test_a_dict_is_told_to_return_its_score():
    with pytest.raises(TypeError, match=r"; return its score$"):
        judgement_of({"score": 1.0}, correct=1.0)


def test_rewards_of_a_number_reach_the_verdict(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def score(text, answer, metadata):\n    return float(text)\n")
    with scorer("python", function=f"{file}:score", num_workers=1, correct=2.0) as judge:
        verdicts = judge.score([rollout("2.0"), rollout("0.5"), rollout("-3"), rollout("nan")])
    assert [(v.is_correct, v.reward) for v in verdicts[:3]] == [
        (True, 2.0),
        (False, 0.5),
        (False, -3.0),
    ]
    assert verdicts[3].failure == "nan"


def verifier(folder: Path, source: str, *, correct: float = 1.0) -> Verifier:
    file = folder / f"mine_{abs(hash(source))}.py"
    file.write_text(source)
    name = source.partition("def ")[2].partition("(")[0]
    return make_python(f"{file}:{name}", correct=correct)


@pytest.mark.parametrize("source", [TRL, VERL])
def test_functions_of_trl_and_verl_are_called_as_these_do(tmp_path: Path, source: str):
    judge = verifier(tmp_path, source)
    assert judge("42", "42", {"data_source": "x"}) == Judgement(True, 1.0)
    assert judge("41", "42", {}) == Judgement(False, 0.0)


SEEN = """\
def seen(prompts, completions, final, difficulty=None, **columns):
    raise LookupError(repr((prompts, completions, final, difficulty, columns)))
"""


def test_trl_gets_lists_of_one_and_every_column(tmp_path: Path):
    row = {"prompt": "1+1=", "final": 2, "difficulty": "low", "topic": "sums", "solution": "s"}
    with pytest.raises(LookupError) as error:
        verifier(tmp_path, SEEN)("2", "two", row)
    prompts, completions, final, difficulty, columns = ast.literal_eval(str(error.value))
    assert (prompts, completions, final, difficulty) == (["1+1="], ["2"], [2], ["low"])
    assert columns["topic"] == ["sums"]
    assert columns["solution"] == ["s"]  # the row's own, not the answer
    assert columns["answer"] == columns["ground_truth"] == ["two"]
    assert "prompt" not in columns


def test_trl_gets_messages_where_the_prompt_has_them(tmp_path: Path):
    asked = ({"role": "user", "content": "1+1?"},)
    with pytest.raises(LookupError) as error:
        verifier(tmp_path, SEEN)("2", "2", {"prompt": asked, "final": 2})
    prompts, completions, *_ = ast.literal_eval(str(error.value))
    assert prompts == [asked]
    assert completions == [[{"role": "assistant", "content": "2"}]]


def test_a_column_that_the_rows_lack_is_named(tmp_path: Path):
    with pytest.raises(TypeError, match=r"the rows have no column 'final'$"):
        verifier(tmp_path, SEEN)("2", "2", {"prompt": "1+1="})


@pytest.mark.parametrize("result", ["1.0", "[]", "[1.0, 1.0]", "[None]", "{'score': [1.0]}"])
def test_what_no_list_of_one_number_is_is_an_error(tmp_path: Path, result: str):
    judge = verifier(tmp_path, f"def f(completions, **kwargs):\n    return {result}\n")
    with pytest.raises(TypeError, match=r"^returned "):
        judge("2", "2", {})


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("0.5", Judgement(False, 0.5)),
        ("True", Judgement(True, 1.0)),
        ("{'score': 1.0}", Judgement(True, 1.0)),
        ("{'score': 0.9, 'acc': True}", Judgement(True, 0.9)),
        ("{'score': 1.0, 'acc': 0}", Judgement(False, 1.0)),
    ],
)
def test_what_a_function_of_verl_returns(tmp_path: Path, result: str, expected: Judgement):
    source = f"def f(data_source, solution_str, ground_truth):\n    return {result}\n"
    assert verifier(tmp_path, source)("2", "2", {}) == expected


def test_a_dict_of_verl_without_a_score_is_an_error(tmp_path: Path):
    source = "def f(solution_str, ground_truth, **kwargs):\n    return {'accuracy': 1.0}\n"
    with pytest.raises(TypeError, match=r"^returned a dict without 'score': \{'accuracy'"):
        verifier(tmp_path, source)("2", "2", {})


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("def f(completions, completion_ids)", "needs completion_ids, which TRL's trainer has"),
        ("def f(solution_str, ground_truth, model)", "needs model beside what verl gives"),
    ],
)
def test_a_function_that_needs_what_is_not_there_is_refused(tmp_path: Path, head: str, said: str):
    with pytest.raises(UserError, match=f"rewards.function .*mine_.*py:f {said}"):
        verifier(tmp_path, f"{head}:\n    return 1.0\n")


def test_the_judge_gets_the_whole_row_and_the_prompt(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(prompts, completions, gold, **columns):\n"
        "    assert columns['level'] == [3] and columns['answer'] == ['42']\n"
        "    return [float(prompts == ['6*7='] and gold == [42])]\n"
    )
    asked = replace(
        rollout("42").prompt,
        text="6*7=",
        answer="42",
        metadata={"level": 3},
        record={"question": "6*7", "gold": 42, "level": 3},
    )
    with scorer("python", function=f"{file}:f", num_workers=1) as judge:
        (verdict,) = judge.score([replace(rollout("42"), prompt=asked)])
    assert (verdict.failure, verdict.reward, verdict.is_correct) == (None, 1.0, True)


@pytest.mark.parametrize(
    "parameters",
    ["text, ground_truth, metadata", "response_text, answer, metadata", "*args", "a, b, c=None"],
)
def test_other_names_are_called_in_order(tmp_path: Path, parameters: str):
    file = tmp_path / f"mine_{abs(hash(parameters))}.py"
    file.write_text(f"def score({parameters}):\n    return True\n")
    assert make_python(f"{file}:score")("42", "42", {}).is_correct


@pytest.mark.parametrize("parameters", ["text, answer", "text, answer, metadata, more", "*, text"])
def test_too_few_or_too_many_parameters_are_refused(tmp_path: Path, parameters: str):
    file = tmp_path / f"mine_{abs(hash(parameters))}.py"
    file.write_text(f"def score({parameters}):\n    return True\n")
    said = r"cannot be called with \(response_text, answer, metadata\)"
    with pytest.raises(UserError, match=said):
        make_python(f"{file}:score")
