"""The verifiers. Responses are hostile text: parsed, never evaluated or formatted.

They run in worker processes (`vapo.rewards.workers`), which enforce time and memory limits;
nothing here imports torch, so that a worker starts fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vapo.errors import UserError
from vapo.rewards import Judgement, Verifier
from vapo.rewards.hostile_text import UnsafeTextError, check_latex

MAX_RESPONSE_CHARS = 200_000
"""Verifiers see at most so many characters of a response: its end, where the answer is."""

MAX_BOX_CHARS = 500
"""math: a longer box is incorrect, unless it is the answer's own text."""

MAX_PLAIN_CHARS = 4_000
"""math: without a box, so many characters of the response's end are searched."""

MAX_EXTRACTED_CHARS = 200
"""Longer extracted answers are cut in verdicts and tables (never in the comparison)."""

_RELATION = re.compile(
    r"[<>\u2260\u2264\u2265\u222a\u2229]|!="
    r"|\\(?:n(?:eq?|ot)|leq?|geq?|lt|gt|cup|cap|setminus|lor|vee)(?![A-Za-z])"
)


def exact(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
    """The whole response, stripped, equals the answer."""
    return _compare(response_text.strip(), answer)


def make_regex(pattern: str | None) -> Verifier:
    """The first group of the pattern's last match, stripped, equals the answer.

    Raises:
        UserError: no pattern, it does not compile, or it has no group.
    """
    if not pattern:
        raise UserError("rewards.pattern is not set: verifier `regex` needs it")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"rewards.pattern is {pattern!r}, which does not compile: {error}"
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


def make_math() -> Verifier:
    """Mathematical equality by math-verify: of the last `\\boxed{...}`, else of the plain end.

    Only the last box counts, so a response cannot collect answers. The answer's own text is
    always correct; other text only if it is small enough to be computed (`hostile_text`).
    math-verify's own time limits (signals) are off: the worker's are stricter and also stop C
    code.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    from vapo.rewards.computed_size import check_size

    _limit_parser()
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def parsed(text: str) -> list[Any]:
        return list(parse(text, extraction_config=targets, parsing_timeout=None))

    @lru_cache(maxsize=1024)
    def reference(answer: str) -> list[Any]:
        has_marks = "\\boxed" in answer or "$" in answer
        return parsed(answer if has_marks else f"\\boxed{{{answer}}}") or parsed(answer)

    def math(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        box = last_boxed(response_text)
        if box is not None and box.strip() == answer.strip() != "":
            return Judgement(True, extracted=answer[:MAX_EXTRACTED_CHARS])
        try:
            candidate = parsed(_readable(response_text, box))
            check_size(candidate)
        except UnsafeTextError:
            candidate = []
        gold = reference(answer)
        if not candidate or not gold or _relates_to_a_number(str(candidate[-1]), gold):
            return Judgement(False, extracted=None if box is None else box[:MAX_EXTRACTED_CHARS])
        is_correct = bool(verify(gold, candidate, timeout_seconds=None))
        # correct answers vote together in maj@k, however they are written
        extracted = answer if is_correct else str(candidate[-1])
        return Judgement(is_correct, extracted=extracted[:MAX_EXTRACTED_CHARS])

    return math


def _relates_to_a_number(text: str, gold: Sequence[Any]) -> bool:
    r"""`\neq 42`, `> 42` and `41 \cup 42`: math-verify takes them for 42."""
    return getattr(gold[0], "is_number", False) and _RELATION.search(text) is not None


def _readable(response_text: str, box: str | None) -> str:
    """What math-verify is to read. Raises: UnsafeTextError."""
    if box is None:
        plain = response_text[-MAX_PLAIN_CHARS:]
        if any(c.isdigit() and not c.isascii() for c in plain):
            raise UnsafeTextError("digits that are not ASCII")
        return plain
    if not box.strip() or len(box) > MAX_BOX_CHARS:
        raise UnsafeTextError("no text, or too much, in the box")
    check_latex(box)
    return f"\\boxed{{{box}}}"


def _limit_parser() -> None:
    """math-verify calls these two for each text that it finds; ours look at the text first."""
    from math_verify import parser

    if not hasattr(parser.parse_latex_cached, "is_limited"):
        parser.parse_latex_cached = _limited(parser.parse_latex_cached)
        parser.parse_expr_cached = _limited(parser.parse_expr_cached)


def _limited(parse_text: Callable[[str], Any]) -> Callable[[str], Any]:
    def limited(text: str) -> Any:
        if len(text) > MAX_BOX_CHARS:
            raise UnsafeTextError("too much text")
        check_latex(text)
        return parse_text(text)

    limited.is_limited = True  # type: ignore[attr-defined]
    return limited


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, nested braces included; None if there is no box.

    A box that never closes holds nothing: the response was cut inside its answer.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    _, opening, rest = text.rpartition("\\boxed{")
    if not opening:
        return None
    depth = 1
    for match in re.finditer(r"\\.|[{}]", rest, flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return rest[: match.start()]
    return ""


def make_reasoning_gym() -> Verifier:
    """The scorer of the dataset that made the prompt; only full marks are correct.

    The answer is what the response's last `<answer>...</answer>` holds, else all of it.

    Raises:
        UserError: reasoning_gym is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "rewards.verifier is reasoning_gym, which is not installed: "
            "pip install 'vapo[reasoning]'"
        )

    @lru_cache(maxsize=256)
    def scorer(dataset: str) -> Callable[..., Any]:
        import reasoning_gym

        function: Callable[..., Any] = reasoning_gym.get_score_answer_fn(dataset)
        return function

    def score(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        if "reasoning_gym_dataset" not in metadata:
            raise ValueError("the prompt is not from a reasoning_gym source")
        extracted = response_text
        end = response_text.rfind("</answer>")
        start = response_text.rfind("<answer>", 0, max(end, 0))
        if start >= 0:
            extracted = response_text[start + len("<answer>") : end]
        extracted = extracted.strip()
        marks = scorer(metadata["reasoning_gym_dataset"])(extracted, metadata["entry"])
        return Judgement(float(marks) >= 1.0 - 1e-6, extracted=extracted[:MAX_EXTRACTED_CHARS])

    return score


def make_python(path: str | None) -> Verifier:
    """A user's function `f(response_text, answer, metadata)`, given as `package.module:function`.

    It returns `bool` (the verdict; the configured reward), or `(bool, float)` (the verdict and
    its own reward). A number alone is refused: whether 0.5 is correct is not ours to guess,
    and the positive-example LM loss imitates what is called correct.

    Raises:
        UserError: not importable, or not a function.
    """
    module_name, _, name = (path or "").partition(":")
    if not module_name or not name:
        raise UserError(f"rewards.function is {path!r}: give it as package.module:function")
    try:
        function: Any = importlib.import_module(module_name)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"rewards.function: cannot import {path}: {type(error).__name__}: {error}"
        ) from None
    if not callable(function):
        raise UserError(f"rewards.function: {path} is {type(function).__name__}, not a function")

    def python(response_text: str, answer: str, metadata: Mapping[str, Any]) -> Judgement:
        result = function(response_text, answer, metadata)
        verdict, reward = (
            result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        )
        verdict = verdict.item() if hasattr(verdict, "item") else verdict  # numpy, torch scalars
        if isinstance(verdict, float) and verdict != verdict:
            return Judgement(False, reward=verdict)
        if not isinstance(verdict, bool):
            raise TypeError(f"returned {result!r:.80}, not a bool or (bool, float)")
        return Judgement(verdict, reward=None if reward is None else float(reward))

    return python


def make_verifier(
    kind: str, *, pattern: str | None = None, function: str | None = None
) -> Verifier:
    """The verifier of this name.

    Raises:
        UserError: its settings are missing or unusable.
    """
    if kind == "exact":
        return exact
    if kind == "regex":
        return make_regex(pattern)
    if kind == "math":
        return make_math()
    if kind == "reasoning_gym":
        return make_reasoning_gym()
    if kind == "python":
        return make_python(function)
    raise UserError(
        f"rewards.verifier is {kind!r}: known are exact, regex, math, reasoning_gym, python"
    )


def _compare(extracted: str | None, answer: str) -> Judgement:
    """Equality after stripping; an empty answer is never correct."""
    if not extracted:
        return Judgement(False)
    return Judgement(extracted == answer.strip(), extracted=extracted[:MAX_EXTRACTED_CHARS])
