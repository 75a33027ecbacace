"""The verifiers: functions that judge a response by the reference answer.

A response is hostile text: they parse it, and never evaluate or format it. They run in worker
processes (`vapo.rewards.text_judge`), which enforce time and memory limits. This module imports no
torch, so that a worker starts fast.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vapo.errors import UserError
from vapo.system.installation import install_command

MAX_EXTRACTED_CHARS = 200
"""Longer extracted answers are cut in verdicts and tables (never in the comparison)."""


@dataclass(frozen=True)
class Judgement:
    """What a verifier returns for one response.

    If `reward` is None, the response gets the configured reward of a correct or incorrect response
    (`text_judge.verdict_fields`). `extracted` is the answer that was found in the response.
    """

    is_correct: bool
    reward: float | None = None
    extracted: str | None = None


Verifier = Callable[[str, str, Mapping[str, Any]], Judgement]
"""Judges a response text by the reference answer and the prompt's metadata. It may raise, hang or
crash, since it runs in a process of its own."""

_EXTRAS = {"math_verify": "math-verify", "reasoning_gym": "reasoning"}
"""The packages that verifiers need, and the extra of vapo that installs each of them."""

MAX_RESPONSE_CHARS = 200_000
"""Of a longer response, a verifier gets the last characters, where the answer is: this many."""


def exact(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
    """Judge a response correct if all of its text equals the answer, spaces around both aside.

    An empty response is incorrect.
    """
    return _compare(response_text.strip(), answer)


def make_regex(pattern: str | None) -> Verifier:
    """Make the verifier that compares the first group of the pattern's last match with the answer.

    Spaces around both do not count. A response without a match, or with an empty group, is
    incorrect.

    Raises: UserError: there is no pattern, it does not compile, or it has no group.
    """
    if not pattern:
        raise UserError("rewards.pattern is not set: verifier `regex` needs it")
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "its groups are nested too deeply" if is_deep else str(error)
        raise UserError(
            f"rewards.pattern is {pattern!r:.80}, which does not compile: {reason}"
        ) from None
    if compiled.groups == 0:
        raise UserError(
            f"rewards.pattern is {pattern!r}: put the answer's part in parentheses, as in "
            r"'answer: (\d+)'"
        )

    def regex(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        last = None
        for match in compiled.finditer(response_text):
            last = match.group(1)
        return _compare(None if last is None else last.strip(), answer)

    return regex


def make_math(percent: str = "either") -> Verifier:
    r"""Make the mathematics verifier, which compares a response's answer with the reference.

    The answer is in the last `\boxed{...}` or tag, or else in the response's last lines
    (`answer_extraction`). It is correct if it equals the reference (`answer_equality`). An answer
    that is not understood completely is incorrect, unless it is the reference's own text.

    Args:
        percent: whether `25%` equals both references 25 and 0.25 (`either`), or only 0.25
            (`hundredth`).
    """
    from vapo.rewards.answer_equality import is_same_answer
    from vapo.rewards.answer_extraction import extract_answer, last_boxed

    def math(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        extracted = extract_answer(response_text)
        if not extracted:
            return Judgement(False, extracted=extracted)
        boxed = last_boxed(answer)
        is_correct = is_same_answer(
            answer if boxed is None else boxed, extracted, counts_percent=percent == "either"
        )
        return Judgement(is_correct, extracted=extracted[:MAX_EXTRACTED_CHARS])

    return math


@dataclass(frozen=True)
class VoteTask:
    """A task for the verifier `math`: find out which of these responses to one prompt agree."""

    responses: tuple[str, ...]


def math_vote_classes(task: VoteTask) -> list[int]:
    """Return for each response the index of the first response with the same answer."""
    from vapo.rewards.answer_equality import vote_classes
    from vapo.rewards.answer_extraction import extract_answer

    return vote_classes([extract_answer(text) or "" for text in task.responses])


def make_reasoning_gym() -> Verifier:
    """Make the verifier that scores a response with the reasoning_gym dataset that made the prompt.

    A response is correct only if the score is 1. The answer is the content of the response's last
    `<answer>...</answer>`, or the whole response if it has no such tag.

    Raises: UserError: reasoning_gym is not installed.
    """
    check_package("reasoning_gym")
    import reasoning_gym  # takes seconds, which must not count for the first verdict's time limit

    from vapo.rewards.answer_boxes import last_tag

    scorer = lru_cache(maxsize=256)(reasoning_gym.get_score_answer_fn)

    def score(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        if "reasoning_gym_dataset" not in metadata:
            raise ValueError("the prompt is not from a reasoning_gym source")
        end = response_text.rfind("</answer>") + len("</answer>")
        tag = last_tag(response_text[:end])
        extracted = (response_text if tag is None else tag.content).strip()
        marks = scorer(metadata["reasoning_gym_dataset"])(extracted, metadata["entry"])
        return Judgement(float(marks) >= 1.0 - 1e-6, extracted=extracted[:MAX_EXTRACTED_CHARS])

    return score


def make_math_verify() -> Verifier:
    """Make the verifier of the package math-verify, which is common in the field.

    The package parses LaTeX into SymPy's expressions, and plain expressions by SymPy's parser,
    which evaluates code: the process that it runs in refuses any but bounded arithmetic
    (`hostile_text`). The package's own time limits are signals that interrupt SymPy anywhere and
    leave its caches half written. So they are off, and the time limit of a verdict ends the process
    instead.

    Raises: UserError: math-verify is not installed.
    """
    check_package("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits being off
    from math_verify import parse, verify  # takes seconds, as reasoning_gym does

    @lru_cache(maxsize=1024)
    def parsed(reference: str) -> list[Any]:
        boxed = reference if r"\boxed" in reference else rf"\boxed{{{reference}}}"
        expressions: list[Any] = parse(boxed, parsing_timeout=None)
        return expressions

    def math_verify(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        gold = parsed(answer.strip())
        if not gold:
            raise ValueError(f"math-verify does not understand the reference {answer!r:.80}")
        expressions = parse(response_text, parsing_timeout=None)
        if not expressions:
            return Judgement(False)
        is_correct = bool(verify(gold, expressions, timeout_seconds=None))
        return Judgement(is_correct, extracted=str(expressions[-1])[:MAX_EXTRACTED_CHARS])

    return math_verify


def check_package(verifier: str, key: str = "rewards.verifier") -> None:
    """Check that the package which a verifier needs is installed.

    Args:
        key: the config key that chose the verifier, for the message.

    Raises: UserError: the package is not installed.
    """
    extra = _EXTRAS.get(verifier)
    if extra is not None and importlib.util.find_spec(verifier) is None:
        raise UserError(f"{key} is {verifier}, which is not installed: {install_command(extra)}")


def _compare(extracted: str | None, answer: str) -> Judgement:
    """Judge an extracted answer correct if it equals the stripped reference and is not empty."""
    if not extracted:
        return Judgement(False)
    return Judgement(extracted == answer.strip(), extracted=extracted[:MAX_EXTRACTED_CHARS])
