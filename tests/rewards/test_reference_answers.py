r"""The verifier `math` on the reference sets: pairs of answers, each judged by hand.

`answers.jsonl` has a row for each: reference, response, verdict and the verdict's reason. `right`
and `wrong` are what the verifier must say. `missed` is right, or right to some questions, and is
called wrong; docs/verifiers.md lists these kinds.

`percent` is the value of `rewards.percent` that the verdict is for, where it is not for both.

`model_answers.jsonl` has answers in the words of models, of the kinds that a parser of answers is
likely to reject, and wrong ones that look like them. `answer_settings.jsonl` has boxes, fonts,
mentions, programs' numbers and the ends of chat answers.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from vapo.rewards.answer_extraction import extract_answer
from vapo.rewards.verifiers import make_math


def rows_of(name: str) -> list[dict[str, str]]:
    text = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


ROWS = rows_of("answers")
MODEL_ROWS = rows_of("model_answers")
SETS = {
    "answers": ROWS,
    "model_answers": MODEL_ROWS,
    "answer_settings": rows_of("answer_settings"),
}
DOCS = Path(__file__).parents[2] / "docs" / "verifiers.md"


def called(verdict: str, rows: list[dict[str, str]]) -> dict[bool, list[str]]:
    """The rows of this verdict by what the verifier calls them."""
    verifier = make_math()
    found: dict[bool, list[str]] = {True: [], False: []}
    for row in rows:
        if row["verdict"] == verdict:
            text = f"{row['response']!r} for {row['reference']}: {row['reason']}"
            found[verifier(row["response"], row["reference"], {}).is_correct].append(text)
    return found


def test_the_set_is_large_and_its_rows_are_whole():
    counts = Counter(row["verdict"] for row in ROWS)
    assert counts.keys() == {"right", "wrong", "missed"}
    assert counts["right"] + counts["missed"] >= 200
    assert counts["wrong"] >= 200
    assert all(row["reference"] and row["reason"] for row in ROWS)
    pairs = Counter((row["reference"], row["response"]) for row in ROWS)
    assert max(pairs.values()) == 1


@pytest.mark.parametrize("name", SETS)
def test_no_wrong_answer_is_called_right(name: str):
    assert called("wrong", SETS[name])[True] == []


@pytest.mark.parametrize("name", SETS)
def test_right_answers_are_called_right(name: str):
    assert called("right", SETS[name])[False] == []


@pytest.mark.parametrize("name", SETS)
def test_with_hundredths_a_percentage_is_its_fraction_alone(name: str):
    """Rows with `percent: either` are right with that alone."""
    verifier = make_math(percent="hundredth")
    num_percent = 0
    for row in SETS[name]:
        num_percent += "percent" in row
        expected = row["verdict"] == "right" and "percent" not in row
        assert verifier(row["response"], row["reference"], {}).is_correct == expected, row
    assert num_percent >= 2 or name == "answer_settings"


def test_what_is_missed_is_marked_and_documented():
    """A row that is no longer missed is to be marked `right`."""
    assert called("missed", ROWS)[True] == called("missed", MODEL_ROWS)[True] == []
    text = DOCS.read_text(encoding="utf-8").partition("| reason |")[2]
    documented = set(re.findall(r"^\| (\w+) \| ", text, re.MULTILINE))
    kinds = {
        row["reason"].partition(":")[0]
        for row in [*ROWS, *MODEL_ROWS]
        if row["verdict"] == "missed"
    }
    assert kinds <= documented, kinds - documented


def test_the_documented_counts_are_the_sets():
    documented = " ".join(DOCS.read_text(encoding="utf-8").split())
    for rows in SETS.values():
        counts = Counter(row["verdict"] for row in rows)
        text = (
            f"{len(rows)} pairs judged by hand, {counts['wrong']} wrong and {counts['right']} "
            f"right ones it judges so; {counts['missed']} right ones it calls wrong"
        )
        assert text in documented


@pytest.mark.parametrize("row", ROWS[::7], ids=lambda row: row["reference"])
def test_every_reference_is_its_own_answer(row: dict[str, str]):
    assert make_math()(f"\\boxed{{{row['reference']}}}", row["reference"], {}).is_correct


@pytest.mark.parametrize(
    "text",
    [
        r"7^{7^{7^7}}", r"1000!^{99}", r"\sqrt[1000]{2^{9999}}", r"\sin 10^{10^{8}}",
        "(x+y)^{9999}", r"\binom{1000}{500}" * 20, "|" * 400, "1," * 240 + "1", "0^{-1}",
        r"\tan\frac{\pi}{2}", r"\frac{1}{x-x}", "x^{i}", r"\log_1 5", r"\sqrt[0]{5}", "(-5)!",
        r"\lfloor i \rfloor", r"\ln(" * 11 + "5" + ")" * 11, "x=" * 5 + "1",
        r"\begin{pmatrix}&\end{pmatrix}",
    ],
)  # fmt: skip
def test_nothing_takes_long_or_raises(text: str):
    verifier = make_math()
    began = time.process_time()
    for reference in ("42", "x+1", "1,2", r"\{1,2\}", "(1,2)", "x^{2024}", r"\ln 5"):
        assert not verifier(f"\\boxed{{{text}}}", reference, {}).is_correct
    assert time.process_time() - began < 1


def test_a_chain_of_hundreds_of_factors_or_divisors_is_compared_as_a_short_one():
    for chain in ("2" + "x" * 200, "2" + "/x" * 100, "2" + r"\cdot x/y" * 25):
        assert make_math()(f"\\boxed{{{chain}+0}}", chain, {}).is_correct
        for text in (f"{chain}+1", f"{chain}+{chain}", f"-{chain}"):
            assert not make_math()(f"\\boxed{{{text}}}", chain, {}).is_correct


@pytest.mark.parametrize("large", ["x^{300}", "x^{-300}", "x^{300}y", "e^{300x}", "(x+y)^{300}"])
def test_what_is_small_beside_a_large_power_is_not_lost(large: str):
    """At a point where the power has hundreds of digits, one is nothing beside it."""
    assert make_math()(f"\\boxed{{{large}+0}}", large, {}).is_correct
    for small in ("1", "x"):
        assert not make_math()(f"\\boxed{{{large}+{small}}}", large, {}).is_correct


@pytest.mark.parametrize(
    "text",
    [
        "is " * 60_000, "answer: " * 20_000, "$" * 100_000, r"\boxed{" * 20_000, r"\(" * 50_000,
        "= " * 50_000, "<answer>" * 20_000, r"\boxed{1}, " * 15_000, " " * 100_000 + "x",
        "So she has 42 " * 10_000 + ".", r"\boxed{\text{so } 42" + r" \text{ of } 2" * 9_000 + "}",
        r"\boxed{" + " " * 100_000, "\n" * 100_000 + "is 42 or", r"\boxed{1}" * 15_000,
        "so 42 " + "a " * 1_900 + ".", "1 = " * 900, "**" * 1_900, "x (" * 1_200 + " is 42",
        r"\boxed{" * 9_000 + "1" + "}" * 9_000, r"\boxed(a(" * 25_000, r"\boxed " * 28_000,
        r"\boxed " + " " * 190_000, r"\begin{boxed}" * 15_000, r"\fcolorbox{a}{b}{" * 10_000,
        "<answer> a " * 18_000, "<answer>and</answer>" * 9_000, "4" + "\u200b" * 190_000 + "2",
        "\\" * 200_000, r"\boxed{x} " * 20_000, r"\boxed{\fbox{" * 9_000 + "1" + "}" * 18_000,
        "{a" * 2_000, "{{a}" * 1_000, "_a" * 2_000, "**a" * 1_300, "<b " * 1_300, "'a" * 2_000,
        r"\textbf{" * 500, "73 \U0001f600" * 1_300, "Done. " * 660, "1!" * 2_000, ";" * 4_000,
        "final: " * 570, "Answer:\n" * 500, r"\boxed{1" + r"\ " * 90_000 + "}",
    ],
)  # fmt: skip
def test_an_answer_is_looked_for_in_bounded_time(text: str):
    began = time.process_time()
    extract_answer(text)
    assert time.process_time() - began < 2
