"""What each verifier calls correct, on ordinary and on hostile text (in-process)."""

from __future__ import annotations

import pytest

from vapo.errors import UserError
from vapo.rewards.answer_extraction import last_boxed
from vapo.rewards.verifier_code import make_python
from vapo.rewards.verifiers import (
    MAX_EXTRACTED_CHARS,
    exact,
    make_math,
    make_reasoning_gym,
    make_regex,
)


@pytest.mark.parametrize(
    ("text", "answer", "is_correct"),
    [
        ("42", "42", True),
        (" 42\n", "42 ", True),
        ("42.", "42", False),
        ("4 2", "42", False),
        ("", "42", False),
        ("", "", False),
        ("42\x00", "42", False),
        ("٤٢", "42", False),
    ],
)
def test_exact(text: str, answer: str, is_correct: bool):
    assert exact(text, answer, {}).is_correct is is_correct


@pytest.mark.parametrize(
    ("text", "is_correct", "extracted"),
    [
        ("a3b1;1", True, "1"),
        (";2;1", True, "1"),
        (";1;2", False, "2"),
        ("a3b1", False, None),
        ("", False, None),
        (";\n 1 \n", True, "1"),
        (";٤", False, "٤"),
    ],
)
def test_regex_takes_the_last_matchs_first_group(text: str, is_correct: bool, extracted: str):
    judgement = make_regex(r";\s*(\w)(?:(\w))?")(text, "1", {})
    assert (judgement.is_correct, judgement.extracted) == (is_correct, extracted)


def test_regex_group_that_took_no_part_or_is_empty():
    assert not make_regex(r"answer: (\d)?")("answer: 1 answer: x", "1", {}).is_correct
    assert not make_regex(r"answer: (\d*)")("answer: ", "", {}).is_correct


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (None, r"rewards\.pattern is not set"),
        ("", r"rewards\.pattern is not set"),
        ("(a", "does not compile"),
        ("(" * 5000, "nested too deeply"),
        ("(a{99999999999999999999})", "too large"),
        (r"\d+", "put the answer's part in parentheses"),
        (r"(?:\d+)", "put the answer's part in parentheses"),
    ],
)
def test_bad_patterns(pattern: str | None, message: str):
    with pytest.raises(UserError, match=message):
        make_regex(pattern)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{42", ""),
        (r"\boxed{1} \boxed {2}", "2"),
        ("\\boxed{1} \\boxed\n {2}", "2"),
        (r"\boxed{1} \boxed 2", ""),
        (r"\boxed{\boxed {2} }", "2"),
        (r"\boxed{1 \boxed{2}}", r"1 \boxed{2}"),
        (r"\boxed{1} \boxedminus{2}", "1"),
        (r"\boxed{ open \boxed{2}", "2"),
        (r"\boxed{}", ""),
        ("boxed{42}", None),
        ("", None),
        ("\\boxed{" * 5000 + "1" + "}" * 5000, "1"),
        ("\\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}", "{" * 5000 + "1" + "}" * 5000),
    ],
)
def test_last_boxed(text: str, expected: str | None):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "is_correct"),
    [
        (r"thus \boxed{42}", "42", True),
        ("The answer is 42.", "42", True),
        ("42", "42", True),
        (r"\boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{1/2}", "$0.5$", True),
        (r"\boxed{1,000}", "1000", True),
        (r"\boxed{x+1}", "1+x", True),
        (r"\boxed{2^{10}}", r"\boxed{1024}", True),
        (r"\boxed{41}", "42", False),
        (r"\boxed{41} or \boxed{42}", "42", False),
        (r"\boxed{41}, so \boxed{42}", "42", True),
        (r"\boxed{42} or \boxed{41}", "42", False),
        (r"\boxed{42, 41}", "42", False),
        (r"\boxed{40} \boxed{41} \boxed{42} \boxed{43}", "42", False),
        (r"it is 42, so \boxed{41}", "42", False),
        (r"\boxed{42} and then \boxed{42", "42", False),
        (r"\boxed{}", "42", False),
        (r"\boxed{42", "42", False),
        (r"\boxed{٤٢}", "43", False),
        ("", "42", False),
        ("no number", "42", False),
        ("\x00\x00\\boxed{42}\x00", "42", True),
        (r"\boxed{__import__('os').abort()}", "42", False),
        ("__import__('os').abort()", "42", False),
        (r"\boxed{\input{/etc/passwd}}", "42", False),
    ],
)
def test_math(text: str, answer: str, is_correct: bool):
    assert make_math()(text, answer, {}).is_correct is is_correct


def test_math_extracts_the_answer_as_it_is_written():
    verifier = make_math()
    texts = (r"\boxed{1/2}", r"\boxed {0.50}", "so it is 0.5", r"\boxed{\sqrt{8}}", r"\boxed{}")
    extracted = [verifier(text, "0.5", {}).extracted for text in texts]
    assert extracted == ["1/2", "0.50", "0.5", r"\sqrt{8}", ""]


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" + "\\frac{" * 500 + "1" + "}{2}" * 500 + "}",
        "\\boxed{" + "(" * 1500 + "42" + ")" * 1500 + "}",
        "\\sqrt{" * 600 + "2" + "}" * 600,
        "$" * 50_000,
        "{" * 200_000,
        "1" * 200_000,
        "\\boxed{" + "9" * 900 + "}",
    ],
)
def test_math_hostile_text_is_just_incorrect(text: str):
    judgement = make_math()(text, "42", {})
    assert not judgement.is_correct
    assert len(judgement.extracted or "") <= MAX_EXTRACTED_CHARS


def test_reasoning_gym_scorer():
    import reasoning_gym  # takes seconds

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    metadata = {"reasoning_gym_dataset": "chain_sum", "entry": entry}
    verifier = make_reasoning_gym()
    answer = entry["answer"]
    for text, is_correct in [
        (answer, True),
        (f"thinking... <answer> {answer} </answer> done", True),
        (f"<answer>{answer}</answer><answer>1</answer>", False),
        (f"<answer>{answer}</answer> as asked in <answer></answer> tags", True),
        (f"<answer>{answer}</answer> as asked in <answer> tags", True),
        (f"it is {answer}", False),
        ("</answer><answer>", False),
    ]:
        assert verifier(text, answer, metadata).is_correct is is_correct, text
    with pytest.raises(ValueError, match="not from a reasoning_gym source"):
        verifier(answer, answer, {})


def test_reasoning_gym_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'reasoning-gym"):
        make_reasoning_gym()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "give it as package.module:function"),
        ("json.dumps", "give it as package.module:function"),
        ("no_such_module:f", "cannot import no_such_module:f: there is no module no_such_module"),
        ("json:dmps", r"cannot import json:dmps: .*no function dmps; did you mean dumps\?"),
        ("tests.rewards.hostile_verifiers:NOT_A_FUNCTION", "is int, not a function"),
    ],
)
def test_bad_function_paths(path: str | None, message: str):
    with pytest.raises(UserError, match=message):
        make_python(path)
