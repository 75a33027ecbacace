"""Coverage-guided fuzzing of answer extraction: `make fuzz` says what to install.

`python -m tests.fuzz.fuzz_answers [-max_total_time=600] [CORPUS]`: libFuzzer's options. A crash, a
hang of more than thirty seconds or a wrong verdict stops it and is written to a file.
"""

from __future__ import annotations

import importlib
import sys

atheris = importlib.import_module("atheris")

with atheris.instrument_imports(include=["vapo.rewards"]):
    from vapo.rewards.answer_extraction import last_boxed
    from vapo.rewards.hostile_text import guarded, install
    from vapo.rewards.verifiers import exact, make_math, make_regex

    MATH = make_math()

ANSWER = "90210"
REGEX = make_regex(r"answer: (\d+)")
PIECES = (
    "\\boxed{", "}", "\\frac{", "\\sqrt{", "^{", "$", "\\text{", "\\left(", "\\right)", "(", ")",
    "!", "answer: ", "90211", "9", "=", ",", "\\\\", "\\{", "\\}", "|", " or ", "\u0669", "\x00",
    "\ud800", "__import__('os')", "**", "\\binom{", "\\begin{pmatrix}", "\\end{pmatrix}", "&",
    "%", "x", "-",
)  # fmt: skip


def response(data: bytes) -> str:
    """Bytes above 127 stand for pieces of LaTeX, so that mutations keep them whole."""
    return "".join(PIECES[b % len(PIECES)] if b > 127 else chr(b) for b in data)


def test_one(data: bytes) -> None:
    text = response(data)
    with guarded():
        judgements = [
            verifier(text, ANSWER, {}) for verifier in (exact, REGEX, MATH) if len(text) < 5_000
        ]
    box = last_boxed(text)
    if box is not None:
        assert box in text
    for judgement in judgements:
        # no digits of the answer, so no way to write it short of computing it
        could_be_right = all(digit in text for digit in "0") or "+" in text or "!" in text
        assert not judgement.is_correct or could_be_right, text
        assert judgement.extracted is None or len(judgement.extracted) <= 200


if __name__ == "__main__":
    with guarded():
        MATH("42", ANSWER, {})
    install()
    program, *options = sys.argv
    atheris.Setup([program, "-timeout=30", "-rss_limit_mb=3000", *options], test_one)
    atheris.Fuzz()
