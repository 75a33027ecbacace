"""A user's function as a verifier: what it returns, and signatures of other frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.rollouts_for_tests import rollout, scorer
from vapo.errors import UserError
from vapo.rewards.verifier_code import judgement_of, make_python
from vapo.rewards.verifiers import Judgement

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


@pytest.mark.parametrize(
    ("source", "name", "whose", "result"),
    [(TRL, "accuracy", "TRL", 1.0), (VERL, "compute_score", "verl", 1.0)],
)
def test_the_lines_for_other_frameworks_work_as_they_are_told(
    tmp_path: Path, source: str, name: str, whose: str, result: float
):
    file = tmp_path / "rewards.py"
    file.write_text(source)
    with pytest.raises(UserError) as error:
        make_python(f"{file}:{name}")
    said = str(error.value)
    assert f"as {whose} calls its reward functions" in said
    lines = said.partition("\n\n")[2].partition("\n\n")[0]
    file = tmp_path / "told.py"
    file.write_text(f"{source}\n\n{lines}\n")
    verifier = make_python(f"{file}:for_vapo")
    assert verifier("42", "42", {"data_source": "x"}) == Judgement(True, result)
    assert verifier("41", "42", {}) == Judgement(False, 0.0)


def test_trl_columns_are_lists_of_one():
    from vapo.rewards.verifier_code import check_parameters

    with pytest.raises(UserError) as error:
        check_parameters(["completions", "answer", "difficulty"], "rewards.function mine:f")
    said = str(error.value)
    assert "completions=[response_text]" in said
    assert "answer=[answer]" in said
    assert 'difficulty=[metadata["difficulty"]]' in said
    assert '{"role": "assistant", "content": response_text}' in said


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
